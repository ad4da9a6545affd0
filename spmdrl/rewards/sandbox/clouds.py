"""Sandboxes of E2B and of Modal, by their own packages, which are imported where one is chosen.

A sandbox is started for the tests of one response, and ends with them. The names of packages that
are used: e2b 2.63 (Sandbox.create, files.write, commands.run, kill) and modal 1.6 (App.lookup,
Image.from_registry, Sandbox.create, exec, terminate).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spmdrl.config import SandboxConfig, require
from spmdrl.rewards.sandbox.place import Busy, RemoteSandbox, ended
from spmdrl.rewards.sandbox.sandbox import Limits, Result, SandboxError

IMAGE = "python:3.12-slim"  # of Modal, where the config names none
APP = "spmdrl"
# reads the length of the program, the program and then its stdin, which stays where it is
BOOT = """
import sys
size = int(sys.stdin.buffer.readline())
code = sys.stdin.buffer.read(size).decode()
exec(compile(code, "program.py", "exec"), {"__name__": "__main__"})
"""


@contextmanager
def in_e2b(config: SandboxConfig, longest_s: float) -> Iterator[RemoteSandbox]:
    """Yields one sandbox of E2B, without a network. Raises Busy, SandboxError."""
    e2b: Any = importlib.import_module("e2b")
    sandbox = called(
        lambda: e2b.Sandbox.create(
            template=config.image or None, timeout=int(longest_s) + 1, allow_internet_access=False
        ),
        e2b,
    )

    def run(code: str, stdin: str, limits: Limits, turn: int) -> Result:
        folder = f"/tmp/{time.monotonic_ns()}"
        program, given = f"{folder}/program.py", f"{folder}/stdin"
        called(lambda: sandbox.files.write(program, code), e2b)
        called(lambda: sandbox.files.write(given, stdin), e2b)
        # the sandbox's own clock ends the program; the client's is for a connection that hangs
        command = f"timeout -s KILL {limits.wall_s:g} python3 {program} < {shlex.quote(given)}"
        began = time.monotonic()
        try:
            done = called(lambda: sandbox.commands.run(command, timeout=limits.wall_s + 10), e2b)
        except e2b.CommandExitException as failed:
            done = failed
        seconds = time.monotonic() - began
        if done.exit_code in (124, 137) and seconds >= limits.wall_s:
            return Result("time", None, done.stdout, done.stderr, "", seconds)
        return ended(of_shell(done.exit_code), done.stdout, done.stderr, seconds)

    try:
        yield run
    finally:
        called(sandbox.kill, e2b)


def called(call: Any, e2b: Any) -> Any:
    """Calls E2B. Raises Busy, SandboxError, CommandExitException."""
    try:
        return call()
    except e2b.CommandExitException:
        raise
    except (e2b.RateLimitException, e2b.TimeoutException) as error:
        raise Busy(f"E2B: {type(error).__name__}: {error}") from error
    except (e2b.SandboxException, e2b.AuthenticationException) as error:
        raise SandboxError(f"E2B: {type(error).__name__}: {error}") from error


@contextmanager
def in_modal(config: SandboxConfig, longest_s: float) -> Iterator[RemoteSandbox]:
    """Yields one sandbox of Modal, without a network. Raises Busy, SandboxError."""
    modal: Any = importlib.import_module("modal")

    def start() -> Any:
        app = modal.App.lookup(APP, create_if_missing=True)
        image = modal.Image.from_registry(config.image or IMAGE)
        return modal.Sandbox.create(
            app=app, image=image, timeout=int(longest_s) + 60, block_network=True
        )

    sandbox = asked(start, modal)

    def run(code: str, stdin: str, limits: Limits, turn: int) -> Result:
        began = time.monotonic()

        def execute() -> tuple[int, str, str]:
            limit_s = max(1, round(limits.wall_s))  # whole seconds
            process = sandbox.exec("python3", "-c", BOOT, timeout=limit_s)
            program = code.encode("utf-8", "replace")
            process.stdin.write(b"%d\n" % len(program) + program + stdin.encode("utf-8", "replace"))
            process.stdin.write_eof()
            process.stdin.drain()
            out, err = process.stdout.read(), process.stderr.read()
            return process.wait(), out, err

        exit_code, out, err = asked(execute, modal)
        seconds = time.monotonic() - began
        if exit_code == -1:  # how ContainerProcess.wait tells of its timeout
            return Result("time", None, out, err, "", seconds)
        return ended(of_shell(exit_code), out, err, seconds)

    try:
        yield run
    finally:
        asked(sandbox.terminate, modal)


def asked(call: Any, modal: Any) -> Any:
    """Calls Modal. Raises Busy, SandboxError."""
    found = modal.exception
    try:
        return call()
    except (found.ResourceExhaustedError, found.ServiceError, found.ConnectionError) as error:
        raise Busy(f"Modal: {type(error).__name__}: {error}") from error
    except found.Error as error:
        raise SandboxError(f"Modal: {type(error).__name__}: {error}") from error


def of_shell(exit_code: int) -> int:
    """Returns an exit code as Python's subprocess has it: minus the signal that ended a process."""
    return 128 - exit_code if exit_code > 128 else exit_code


def check_cloud(config: SandboxConfig) -> None:
    """Raises ConfigError where the package or the key of a service is missing."""
    require(
        importlib.util.find_spec(config.kind) is not None,
        f"sandbox.kind={config.kind!r} needs the package {config.kind!r}: pip install "
        f"'spmdrl[{config.kind}]'",
    )
    if config.kind == "e2b":
        require(
            bool(os.environ.get("E2B_API_KEY")),
            "sandbox.kind='e2b' needs the environment variable E2B_API_KEY on every rank",
        )
        return
    has_token = all(os.environ.get(name) for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"))
    file = Path(os.environ.get("MODAL_CONFIG_PATH", Path.home() / ".modal.toml"))
    require(
        has_token or file.is_file(),
        "sandbox.kind='modal' needs a token on every rank: the environment variables "
        f"MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, or the file {file} (modal token new)",
    )
