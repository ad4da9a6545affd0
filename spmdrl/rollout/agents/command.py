"""Agents that are command lines: a program per trajectory, which finds the endpoint in its
environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from spmdrl.config import AgentConfig

MOST_OUTPUT = 1 << 16  # characters of a program's output that are kept, those of its end
READ_BYTES = 1 << 16
LOOK_S = 0.5  # between looks whether a program has ended whose output is still open
LOOKS, LAST_LOOK_S = 3, 0.02  # for what a program has left running, and the time between them
LAST_OUTPUT_S = 2.0  # in which its output is read once all that it has started is killed
MOST_ROW = 120_000  # bytes of a variable: Linux takes 128 KiB, with its name
STEP_END_S = 10.0  # in which a step of Slurm ends once srun is told to
CONTAINERS = ("docker", "podman")
ANTHROPIC_MODELS = (
    "ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL",
)  # fmt: skip
BUBBLEWRAP = (
    "bwrap", "--die-with-parent", "--unshare-all", "--share-net", "--ro-bind", "/", "/",
    "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--chdir", "/tmp",
)  # fmt: skip


class CommandAgent:
    """Runs a command line for each trajectory.

    `{prompt}` and the like in its words are filled in from the row: {prompt}, {id}, {index},
    {base_url}, {key}, and {extra_info[...]}. The last line of its standard output is what it
    returns, where that is JSON: a number or an object; all output is beside it as "output". It is
    over when it has ended, and what it has started ends with it.
    """

    def __init__(self, words: Sequence[str], config: AgentConfig) -> None:
        self.words, self.config = tuple(words), config
        self.__qualname__ = " ".join(self.words)[:60]

    async def __call__(
        self, row: dict[str, Any], base_url: str, api_key: str, model: str, trajectory_id: str
    ) -> dict[str, Any]:
        told = variables(row, base_url, api_key, model, trajectory_id)
        words = [filled(word, row, base_url, api_key, model) for word in self.words]
        process = await asyncio.create_subprocess_exec(
            *self.run_by(words, told), env={**os.environ, **told}, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        said, complaints = Output(process.stdout), Output(process.stderr)
        try:
            await has_ended(process, (said, complaints))
        finally:
            if self.config.runner == "srun":
                await end_step(process)
            await end_all(process, trajectory_id)
            if self.config.runner in CONTAINERS:  # its client has ended, and it has not
                await remove(self.config.runner, name_of_container(trajectory_id))
            await asyncio.wait((said.task, complaints.task), timeout=LAST_OUTPUT_S)
            said.task.cancel()
            complaints.task.cancel()
        output = said.text() + complaints.text()
        if process.returncode != 0:
            raise RuntimeError(
                f"the agent ended with status {process.returncode}; its output: {output[-2000:]}"
            )
        return {**returned(said.text()), "output": output}

    def run_by(self, words: list[str], told: Mapping[str, str]) -> list[str]:
        """Returns the command line with that of the runner before it."""
        runner, args = self.config.runner, self.config.runner_args
        if runner == "bubblewrap":
            return [*BUBBLEWRAP, *args, *words]
        if runner in CONTAINERS:
            given = [word for name in told for word in ("--env", name)]
            name = name_of_container(told["SPMDRL_TRAJECTORY_ID"])
            fixed = ["--rm", "--init", "--network=host", "--name", name]
            return [runner, "run", *fixed, *given, *args, *words]
        if runner == "srun":
            return ["srun", "--overlap", "--ntasks=1", *args, *words]
        return words


def variables(
    row: dict[str, Any], base_url: str, api_key: str, model: str, trajectory_id: str
) -> dict[str, str]:
    """Returns what a program is told by its environment: the names that clients of OpenAI and
    Anthropic read, and the row as JSON.
    """
    return {
        "OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": api_key,
        "OPENAI_MODEL": model, **dict.fromkeys(ANTHROPIC_MODELS, model),
        **without_proxy(base_url),
        "SPMDRL_TRAJECTORY_ID": trajectory_id, "SPMDRL_ROW": row_text(row),
    }  # fmt: skip


def row_text(row: dict[str, Any]) -> str:
    """Returns a row as JSON. Raises ValueError where no environment variable can hold it."""
    text = json.dumps(row, default=str)
    if len(text) > MOST_ROW:
        raise ValueError(
            f"the row has {len(text)} bytes as JSON, and a program is told at most {MOST_ROW} in "
            "its environment: take out of extra_info what it does not need, or let the agent be a "
            "function"
        )
    return text


def without_proxy(url: str) -> dict[str, str]:
    """Returns variables by which clients reach the endpoint directly, also where the host's
    variables name a proxy.
    """
    known = os.environ.get("NO_PROXY") or os.environ.get("no_proxy", "")
    hosts = [*filter(None, known.split(",")), "127.0.0.1", "localhost", "::1"]
    own = urlsplit(url).hostname or ""
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(dict.fromkeys([*hosts, own])))


def name_of_container(trajectory_id: str) -> str:
    return f"spmdrl-{trajectory_id}"


async def end_step(srun: asyncio.subprocess.Process) -> None:
    """Has srun end its job step, unless that is over. A step outlives an srun that is killed."""
    with contextlib.suppress(ProcessLookupError, TimeoutError):
        srun.terminate()
        await asyncio.wait_for(srun.wait(), STEP_END_S)


async def end_all(process: asyncio.subprocess.Process, trajectory_id: str) -> None:
    """Kills a program, its process group, and what it has started in sessions of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), LAST_OUTPUT_S)
    for _ in range(LOOKS):
        for pid in left_behind(trajectory_id):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(LAST_LOOK_S)  # in which what was killed ends, and leaves others behind


def left_behind(trajectory_id: str) -> list[int]:
    """Returns the orphans that know a trajectory's id, by their environment. Orphans of a worker
    process come to the process that has started it (keeper.py).
    """
    keeper, found = os.getppid(), []
    mark = f"SPMDRL_TRAJECTORY_ID={trajectory_id}".encode()
    pids = read_file(f"/proc/{keeper}/task/{keeper}/children").split()
    for pid in map(int, pids):
        if mark in read_file(f"/proc/{pid}/environ").split(b"\0"):
            found.append(pid)
    return found


def read_file(path: str) -> bytes:
    """Returns what is in a file, nothing where it cannot be read."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read()
    return b""


async def remove(runner: str, name: str) -> None:
    """Ends a container, if it is still there."""
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        runner, "rm", "--force", name, stdout=quiet, stderr=quiet
    )
    await process.wait()


def filled(word: str, row: dict[str, Any], base_url: str, api_key: str, model: str) -> str:
    """Returns a word of a command line with the row's values in place of their names in braces."""
    names = {
        "prompt": row["prompt"], "index": row["sample_index"], "base_url": base_url,
        "key": api_key, "model": model, "extra_info": row["extra_info"],
        "data_source": row["data_source"],
    }  # fmt: skip
    return word.format_map(names) if "{" in word else word


class Output:
    """Reads what a program writes, and keeps the end of it."""

    def __init__(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        self.kept = b""
        self.task = asyncio.ensure_future(self.read(stream))

    async def read(self, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(READ_BYTES):
            self.kept = (self.kept + data)[-4 * MOST_OUTPUT :]

    def text(self) -> str:
        return self.kept.decode(errors="replace")[-MOST_OUTPUT:]


async def has_ended(process: asyncio.subprocess.Process, outputs: Sequence[Output]) -> None:
    """Waits until a program has ended. What it has started may hold its output open still."""
    reading = [output.task for output in outputs]
    while process.returncode is None:
        if all(task.done() for task in reading):
            await process.wait()
        else:
            await asyncio.wait(reading, timeout=LOOK_S)


def returned(output: str) -> dict[str, Any]:
    """Returns what the last line of an output says, where it is a number or an object in JSON."""
    lines = output.strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else None
    except ValueError:
        return {}
    if isinstance(value, dict):
        return value
    return {"score": value} if isinstance(value, int | float) else {}


def is_command(agent: Any) -> bool:
    """Whether an agent is a command line."""
    return isinstance(agent, Sequence) and not isinstance(agent, str)


def missing_program(agent: CommandAgent) -> str | None:
    """Returns the runner's program where this host lacks it."""
    import shutil

    names = {"process": agent.words[0], "bubblewrap": "bwrap"}
    name = names.get(agent.config.runner, agent.config.runner)
    return None if "{" in name or shutil.which(name) or name == sys.executable else name
