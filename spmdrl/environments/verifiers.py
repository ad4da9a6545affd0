"""Environments of the package verifiers (Prime Intellect's), as agents. See docs/verifiers.md.

The package does not resolve beside vLLM, so an environment lives in processes of another Python
(verifiers_server.py), which the worker process of an engine's agents starts. There it plays the
row of a trajectory against the trajectory's endpoint and scores it by its rubric. Workers import
this: standard library and config only.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spmdrl.config import ConfigError
from spmdrl.environments.episodes import Row

SERVER = Path(__file__).with_name("verifiers_server.py")
CHECK_LIMIT_S = 60.0  # for an interpreter to say whether it has the environment
MOST_SAID = 2000  # characters quoted of what a process wrote to stderr
LONGEST_LINE = 1 << 26  # bytes of a reply
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # which are about our own Python


@dataclass(frozen=True)
class Served:
    """Says which environment is served, and by which Python."""

    python: str  # the interpreter's path
    environment: str
    args: str  # a JSON object
    env: tuple[tuple[str, str], ...] = ()  # variables beside those of this process
    processes: int = 1
    log: str = os.devnull

    def command(self, task: str, **more: Any) -> list[str]:
        spec = {"environment": self.environment, "args": json.loads(self.args), **more}
        return [self.python, str(SERVER), task, json.dumps(spec)]

    def variables(self) -> dict[str, str]:
        """Returns the variables of its processes: what is installed beside the interpreter, such
        as uv, is found first.
        """
        known = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        path = os.pathsep.join([str(Path(self.python).parent), known.get("PATH", os.defpath)])
        return {**known, "PATH": path, **dict(self.env)}


def verifiers_agent(
    python: str,
    environment: str,
    args: Mapping[str, Any] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    processes: int = 1,
    log: str = os.devnull,
) -> VerifiersAgent:
    """Returns an agent for `PpoConfig.agent` that plays the rows of an environment.

    python: an interpreter that has verifiers and the environment. environment: its name, as
    `vf-eval` takes it, or "module:callable" for a classic one that has no name. args: those of its
    `load_environment`; of a taskset of verifiers.v1 the fields of the [env] block. env: variables
    for its processes. processes: how many an engine has; rollouts within one share its event loop.
    log: a file for what they write to stderr.

    Raises ConfigError where the interpreter, the package or the environment's module is missing.
    """
    served = served_by(python, environment, args, env, processes, log)
    said = checked(served)
    if "failed" in said:
        raise ConfigError(f"verifiers_agent: {served.python}: {said['failed']}")
    return VerifiersAgent(served)


def verifiers_rows(
    python: str,
    environment: str,
    args: Mapping[str, Any] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    split: str = "train",
    limit: int | None = None,
    data_source: str = "",
) -> list[Row]:
    """Returns the rows of an environment's data set, for `write_rows`; its agent plays no others.

    python, environment, args, env: as for `verifiers_agent`. split: "train" or "eval". limit: of
    the number of rows, from the first on; None: all. data_source: by which agents, rewards and
    metrics tell rows apart; empty: the environment's name.

    Raises ConfigError where the environment does not load.
    """
    if split not in ("train", "eval"):
        raise ConfigError(f'verifiers_rows: split={split!r}: expected "train" or "eval"')
    served = served_by(python, environment, args, env)
    command = served.command("rows", split=split, limit=limit)
    done = subprocess.run(
        command, capture_output=True, text=True, env=served.variables(), stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        said = done.stderr.strip()[-MOST_SAID:]
        raise ConfigError(f"the environment {environment} does not say its rows: {said}")
    return [
        {
            "data_source": data_source or environment, "prompt": [told(m) for m in row["prompt"]],
            "reward_model": {"style": "rule", "ground_truth": row["ground_truth"]},
            "extra_info": {"verifiers": json.dumps(row["row"])},
        }
        for row in map(json.loads, done.stdout.splitlines())
    ]  # fmt: skip


def told(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message without the fields that a data set has for messages of other roles."""
    return {name: value for name, value in message.items() if value is not None}


def served_by(
    python: str, environment: str, args: Mapping[str, Any] | None,
    env: Mapping[str, str] | None, processes: int = 1, log: str = os.devnull,
) -> Served:  # fmt: skip
    """Raises ConfigError."""
    found = shutil.which(os.path.expanduser(python))
    if found is None:
        raise ConfigError(f"verifiers: there is no interpreter python={python!r} on this host")
    if processes < 1:
        raise ConfigError(f"verifiers_agent: processes={processes}: expected 1 or more")
    try:
        given = json.dumps(dict(args or {}), sort_keys=True)
    except TypeError as error:
        raise ConfigError(f"verifiers: args must be JSON: {error}") from error
    variables = tuple(sorted((env or {}).items()))
    return Served(os.path.abspath(found), environment, given, variables, processes, log)


@functools.cache
def checked(served: Served) -> dict[str, Any]:
    """Returns what the interpreter says of the environment. Raises ConfigError where it cannot."""
    try:
        done = subprocess.run(
            served.command("check"), capture_output=True, text=True, env=served.variables(),
            stdin=subprocess.DEVNULL, timeout=CHECK_LIMIT_S,
        )  # fmt: skip
        said: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"verifiers: {served.python} does not run: {error}") from error
    except ValueError as error:
        problem = done.stderr.strip()[-MOST_SAID:]
        raise ConfigError(f"verifiers: {served.python} does not run: {problem}") from error
    return said


class VerifiersAgent:
    """Plays rows of `verifiers_rows`. Returns the rubric's reward as "score", with its parts and
    metrics beside it.
    """

    def __init__(self, served: Served) -> None:
        self.served = served
        self.__qualname__ = f"verifiers {served.environment} {served.args}"  # as logs call it

    async def __call__(
        self, extra_info: dict[str, Any], base_url: str, api_key: str, model: str
    ) -> dict[str, Any]:
        if "verifiers" not in (extra_info or {}):
            raise VerifiersError(
                "the row is none of verifiers_rows: its extra_info lacks 'verifiers'"
            )
        request = {
            "row": json.loads(extra_info["verifiers"]), "base_url": base_url, "api_key": api_key,
            "model": model,
        }  # fmt: skip
        connection = min(connections(self.served), key=lambda each: each.num_asked)
        return await connection.ask(request)


class VerifiersError(Exception):
    """The environment has failed, and its sample is invalid for this reason."""

    __module__ = "builtins"  # samples/ then name it alone


@functools.cache
def connections(served: Served) -> list[ServerProcess]:
    """Returns this process's connections to an environment; their processes start when asked."""
    return [ServerProcess(served) for _ in range(served.processes)]


@dataclass
class Process:
    """A process that serves an environment, what it has to answer, and the end of its stderr."""

    handle: asyncio.subprocess.Process
    waiting: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    said: bytes = b""
    listening: asyncio.Task[None] | None = None
    delivering: asyncio.Task[None] | None = None

    def send(self, message: dict[str, Any]) -> None:
        assert self.handle.stdin is not None
        self.handle.stdin.write(json.dumps(message).encode() + b"\n")

    async def listen(self, path: str) -> None:
        """Keeps the end of what it writes to stderr; all of it goes to a file."""
        assert self.handle.stderr is not None
        with open(path, "ab") as log:
            while data := await self.handle.stderr.read(1 << 16):
                log.write(data)
                log.flush()
                self.said = (self.said + data)[-4 * MOST_SAID :]

    async def deliver(self) -> None:
        """Hands out replies until the process ends."""
        assert self.handle.stdout is not None
        while line := await self.handle.stdout.readline():
            said = json.loads(line)
            reply = self.waiting.get(said["number"])
            if reply is None or reply.done():
                continue
            if "error" in said:
                reply.set_exception(VerifiersError(said["error"]))
            else:
                reply.set_result(said["output"])

    async def ended(self) -> VerifiersError:
        """Waits for its end, and says how it came."""
        assert self.listening is not None
        await self.listening
        status = await self.handle.wait()
        text = self.said.decode(errors="replace").strip()[-MOST_SAID:]
        return VerifiersError(
            f"the environment's process ended with status {status}; its stderr ends: {text}"
        )


class ServerProcess:
    """A process with an environment, on the event loop that asks it; started by the first request,
    and by the first after it ended.
    """

    def __init__(self, served: Served) -> None:
        self.served = served
        self.start: asyncio.Task[Process] | None = None
        self.numbers = itertools.count()
        self.num_asked = 0  # under way

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises VerifiersError."""
        if self.start is None:
            self.start = asyncio.create_task(self.started())
        self.num_asked += 1
        try:
            # one that gives up leaves the process to the others
            return await self.answered(await asyncio.shield(self.start), request)
        finally:
            self.num_asked -= 1

    async def answered(self, process: Process, request: dict[str, Any]) -> dict[str, Any]:
        number = next(self.numbers)
        process.waiting[number] = reply = asyncio.get_running_loop().create_future()
        process.send({"number": number, **request})
        try:
            return await reply
        except asyncio.CancelledError:
            process.send({"cancel": number})
            raise
        finally:
            process.waiting.pop(number)

    async def started(self) -> Process:
        """Raises VerifiersError for an environment that does not load."""
        pipe = asyncio.subprocess.PIPE
        handle = await asyncio.create_subprocess_exec(
            *self.served.command("serve"), env=self.served.variables(), limit=LONGEST_LINE,
            stdin=pipe, stdout=pipe, stderr=pipe,
        )  # fmt: skip
        assert handle.stdout is not None
        process = Process(handle)
        process.listening = asyncio.create_task(process.listen(self.served.log))
        line = await handle.stdout.readline()
        said = json.loads(line) if line else {}
        if "ready" not in said:
            self.start = None
            ended = await process.ended()
            raise VerifiersError(said["failed"]) if "failed" in said else ended
        process.delivering = asyncio.create_task(self.deliver(process))
        return process

    async def deliver(self, process: Process) -> None:
        """Hands out replies. The end of the process fails what it has not answered."""
        await process.deliver()
        self.start = None
        problem = await process.ended()
        for reply in process.waiting.values():
            if not reply.done():
                reply.set_exception(problem)
