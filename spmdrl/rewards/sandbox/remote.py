"""Programs in remote sandboxes (PpoConfig.sandbox), with the interface of those of this machine.

`run_tests_in` is where one of both is chosen. A RemoteSandbox is a service: it runs a program with
some stdin and says how it ended. What a program does, up to and including a limit, is a Result.
That a service has no room, cannot be reached or fails raises SandboxError in the end, so that the
sample is invalid and does not score 0. Standard library only: reward workers import this.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import random
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import NamedTuple, TypeVar

from spmdrl.config import ConfigError, SandboxConfig, require
from spmdrl.rewards.sandbox import program as sandbox_program
from spmdrl.rewards.sandbox import values as sandbox_values
from spmdrl.rewards.sandbox.clouds import check_cloud, in_e2b, in_modal
from spmdrl.rewards.sandbox.fusion import check_urls, in_fusion
from spmdrl.rewards.sandbox.place import Busy, RemoteSandbox
from spmdrl.rewards.sandbox.sandbox import (
    USUAL,
    Kind,
    Limits,
    Result,
    SandboxError,
    run_tests,
)

LONGEST_WAIT_S = 20.0  # between two attempts


T = TypeVar("T")
Service = Callable[
    [SandboxConfig, float], AbstractContextManager[RemoteSandbox]
]  # seconds it is needed
SERVICES: dict[str, Service] = {"fusion": in_fusion, "e2b": in_e2b, "modal": in_modal}


class RemoteProgram(NamedTuple):
    """A test as a main program."""

    code: str
    stdin: str
    mark: str = ""  # begins the line of stdout with the reply; "": all of stdout is the result


def run_tests_in(
    config: SandboxConfig | None, code: str, kind: Kind, tests: list[bytes], limits: Limits,
    total_s: float,
) -> list[Result]:  # fmt: skip
    """Does what sandbox.run_tests does, there where the config says; None: on this machine.

    Of the limits, wall_s, memory_mib (where the service has a limit of memory) and output_kib are
    kept remotely; the others are those of the service. Raises SandboxError, and ValueError for
    assert statements that a service is not trusted with.
    """
    if config is None:
        return run_tests(code, kind, tests, limits, total_s)
    check_tests(config, kind)
    deadline = time.monotonic() + total_s
    programs = [as_program(code, kind, test) for test in tests]
    longest_s = min(total_s, len(tests) * limits.wall_s) + LONGEST_WAIT_S

    def run(place: RemoteSandbox, program: RemoteProgram) -> Result:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return Result("time", None, "", "", "", 0.0)
        own = replace(limits, wall_s=min(limits.wall_s, max(left_s, 0.01)))
        call = functools.partial(place, program.code, program.stdin, own)
        return read(again(config, deadline, call), program, limits)

    with ExitStack() as stack:
        service = SERVICES[config.kind]
        place = again(
            config, deadline, lambda turn: stack.enter_context(service(config, longest_s))
        )
        threads = max(min(config.max_concurrent, len(tests)), 1)
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        return list(pool.map(functools.partial(run, place), programs))


def check_tests(config: SandboxConfig, kind: Kind) -> None:
    """Raises ValueError for tests that run beside the program where that is not accepted."""
    if kind == "assert" and not config.allow_asserts:
        raise ValueError(
            "its tests are assert statements, which a remote sandbox runs in the program's own "
            "process, so that a program can forge their passing: use tests with inputs and "
            "outputs, sandboxes of this machine, or accept it with sandbox.allow_asserts=True"
        )


def again(config: SandboxConfig, deadline: float, call: Callable[[int], T]) -> T:
    """Calls until there is room: call(number of the attempt). Raises SandboxError."""
    wait_s = config.backoff_s
    for turn in range(config.retries + 1):
        try:
            return call(turn)
        except Busy as busy:
            pause_s = min(max(wait_s * random.uniform(0.5, 1.0), busy.wait_s), LONGEST_WAIT_S)
            if turn == config.retries or time.monotonic() + pause_s > deadline:
                tried = f"{turn + 1} attempts" if turn else "one attempt"
                raise SandboxError(f"no remote sandbox after {tried}: {busy}") from busy
            time.sleep(pause_s)
            wait_s *= 2
    raise AssertionError("the last attempt returns or raises")


# ---- what a test is as a program, and what its output says


def as_program(code: str, kind: Kind, test: bytes) -> RemoteProgram:
    """test: as sandbox.run_tests has it."""
    if kind == "run":
        return RemoteProgram(code, test.decode("utf-8", "replace"))
    mark = secrets.token_hex(16)
    if kind == "call":
        _, function, arguments = json.loads(test[4:])
        return RemoteProgram(calling(code, function, arguments, mark), "", mark)
    lines = [code, test.decode(), f"print('\\n' + {mark!r} + 'ok')"]
    return RemoteProgram("\n".join(lines), "", mark)


def calling(code: str, function: str, arguments: list[object], mark: str) -> str:
    """Returns a program that prints the mark and a function's value, in the form of JSON that our
    own sandbox replies with. The right value is not in it.
    """
    asked = json.dumps([function, arguments])
    return "\n".join([
        "from __future__ import annotations",
        "import json, sys",
        inspect.getsource(sandbox_values.plain),
        inspect.getsource(sandbox_program.find),
        f"function, arguments = json.loads({asked!r})",
        "names = {'__name__': 'solution'}",
        f"exec(compile({code!r}, 'solution.py', 'exec'), names)",
        "value = find(names, function)(*arguments)",
        "reply = json.dumps(['ok', plain(value)], sort_keys=True)",
        f"print('\\n' + {mark!r} + reply)",
    ])  # fmt: skip


def read(found: Result, program: RemoteProgram, limits: Limits) -> Result:
    """Reads the reply, and cuts what is too long. A program that ended without a reply has failed,
    whatever its exit code.
    """
    most = limits.output_kib << 10
    returned, status = "", found.status
    if program.mark:
        replies = [line for line in found.stdout.split("\n") if line.startswith(program.mark)]
        returned = replies[-1].removeprefix(program.mark) if replies else ""
        status = "error" if status == "ok" and not replies else status
    elif len(found.stdout.encode("utf-8", "replace")) > most:
        status = "output"
    out, err = found.stdout[:most], found.stderr[:most]
    return Result(status, found.exit_code, out, err, returned, found.seconds)


# ---- where it is


@functools.cache
def check_remote(config: SandboxConfig) -> None:
    """Raises ConfigError where the service cannot be used. SandboxFusion's servers are tried; the
    others cost money, and are asked for what they need alone.
    """
    if config.kind != "fusion":
        require(not config.urls, f"sandbox.urls={config.urls} are of kind 'fusion': leave them out")
        check_cloud(config)
        return
    require(not config.image, f"sandbox.image={config.image!r} is of the kinds 'e2b' and 'modal'")
    check_urls(config)
    for url in config.urls:
        alone = SandboxConfig(urls=(url,), retries=config.retries, backoff_s=config.backoff_s)
        try:
            [found] = run_tests_in(alone, "print(6 * 7)", "run", [b""], USUAL, math.inf)
        except SandboxError as error:
            raise ConfigError(f"sandbox.urls: {url} runs no program: {error}") from error
        require(
            found.stdout.strip() == "42",
            f"sandbox.urls: {url} does not run Python as it should: {found}",
        )
