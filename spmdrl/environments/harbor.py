"""Terminal tasks in folders, as Harbor and Terminal-Bench have them.

    task/instruction.md   or task.yaml with `instruction`    what the policy reads
    task/environment/     its files, with a Dockerfile's COPY and WORKDIR where there is one
    task/tests/test.sh    or task/run-tests.sh               decides, after the policy's last turn

The policy works in the task's folder by shell commands (terminal.py). No image is built: the
machine's programs and the trainer's Python are there, read-only, and lines RUN of a Dockerfile have
no effect. Formats: harborframework.com/docs/tasks, tbench.ai/docs.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shlex
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from spmdrl.config import ConfigError
from spmdrl.config.words import counted, verb
from spmdrl.environments import terminal
from spmdrl.environments.episodes import Row
from spmdrl.environments.task_folders import TaskFolder, claimed, readable_copy
from spmdrl.environments.terminal import ShellResult, run_shell
from spmdrl.rewards.workers.stateful_tools import calls_of

logger = logging.getLogger(__name__)

TESTS_S = 60.0  # for a task's tests, where the task says nothing; below rewards.timeout_s
MOST_TESTS_MIB = 4096
SCRIPTS = ("tests/test.sh", "run-tests.sh")
VERDICTS = ("reward.txt", "reward.json")  # that a script may leave in /logs/verifier
MOST_VERDICT = 1 << 16  # bytes


# ---- rows


def task_rows(
    folder: str | Path, data_source: str = "terminal", command_s: float = 20.0, system: str = ""
) -> list[Row]:
    """Returns a row for each task in a folder of tasks, sorted by name.

    command_s: time limit of a shell command, in seconds; below multi_turn.timeout_s. system: a
    first message. Rows name their tasks by absolute paths, which every host must have. Raises
    ConfigError for a task that cannot be run.
    """
    rows = []
    for task in sorted(path for path in Path(folder).absolute().iterdir() if path.is_dir()):
        if (said := instruction_of(task)) is None:
            continue
        files, chat = files_of(task), [{"role": "user", "content": said}]
        info = {
            "task": str(task), "script": script_of(task), "command_s": command_s,
            "tests_s": tests_limit(task), **files,
        }  # fmt: skip
        head = [{"role": "system", "content": system}] * bool(system)
        rows.append({"data_source": data_source, "prompt": [*head, *chat], "extra_info": info})
    if not rows:
        raise ConfigError(f"{folder}: no folder in it has an instruction.md or a task.yaml")
    return rows


def instruction_of(task: Path) -> str | None:
    if (task / "instruction.md").is_file():
        return (task / "instruction.md").read_text(encoding="utf-8").strip()
    if not (task / "task.yaml").is_file():
        return None
    import yaml

    given = yaml.safe_load((task / "task.yaml").read_text(encoding="utf-8"))
    if not isinstance(given, dict) or not isinstance(given.get("instruction"), str):
        raise ConfigError(f"{task}/task.yaml has no text `instruction`")
    return given["instruction"].strip()


def script_of(task: Path) -> str:
    found = [script for script in SCRIPTS if (task / script).is_file()]
    if not found:
        raise ConfigError(f"{task}: no script decides over it; expected {' or '.join(SCRIPTS)}")
    return found[0]


def tests_limit(task: Path) -> float:
    """Returns the seconds that a task's tests may take, of task.toml or task.yaml."""
    if (task / "task.toml").is_file():
        given = tomllib.loads((task / "task.toml").read_text(encoding="utf-8"))
        return float(given.get("verifier", {}).get("timeout_sec", TESTS_S))
    if (task / "task.yaml").is_file():
        import yaml

        given = yaml.safe_load((task / "task.yaml").read_text(encoding="utf-8"))
        return float(given.get("max_test_timeout_sec", TESTS_S))
    return TESTS_S


def files_of(task: Path) -> dict[str, Any]:
    """Returns where a sample's folder is ("workdir") and what it begins with ("copies": a file of
    the task, and its place in the folder).

    This is what the Dockerfile copies into its last WORKDIR, or all of environment/ where there is
    none. Raises ConfigError for what it copies elsewhere.
    """
    context = task / "environment" if (task / "environment").is_dir() else task
    dockerfile = context / "Dockerfile"
    if not dockerfile.is_file():
        names = sorted(path.name for path in context.iterdir()) if context != task else []
        copies = [(f"environment/{name}", name) for name in names]
        return {"workdir": "/app", "copies": copies}
    lines = re.sub(r"\\\n", " ", dockerfile.read_text(encoding="utf-8")).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line.strip() and line.lstrip()[0] != "#"]
    workdir = next((s[1].strip() for s in reversed(steps) if s[0].upper() == "WORKDIR"), "/app")
    if num_runs := sum(step[0].upper() == "RUN" for step in steps):
        logger.warning(
            "%s: %s RUN %s no effect", dockerfile, counted(num_runs, "line"), verb(num_runs, "have")
        )
    copied = [step[1] for step in steps if step[0].upper() in ("COPY", "ADD")]
    pairs = [pair for names in copied for pair in copies_of(names, workdir, dockerfile)]
    copies = [(str(path.relative_to(task)), target) for path, target in pairs]
    return {"workdir": workdir, "copies": copies}


def copies_of(names: str, workdir: str, dockerfile: Path) -> list[tuple[Path, str]]:
    """(source, where it goes below the working directory) of what a line COPY names; a slash at the
    end: into that folder. Raises ConfigError for what cannot be copied.
    """
    words = json.loads(names) if names.startswith("[") else shlex.split(names)
    *sources, target = [word for word in words if not word.startswith("--")]
    path = PurePosixPath(workdir, target)
    if not path.is_relative_to(workdir) or any(word.startswith("--from") for word in words):
        raise ConfigError(
            f"{dockerfile}: COPY {names}: a sample has files of the task alone, and its WORKDIR "
            f"{workdir} alone to put them"
        )
    into = str(path.relative_to(workdir)) + "/" * target.endswith(("/", "."))
    context = dockerfile.parent
    found = [path for name in sources for path in sorted(context.glob(name.strip("/") or "."))]
    if len(found) < len(sources):
        raise ConfigError(f"{dockerfile}: COPY {names}: there is no such file")
    return [(path, into) for path in found]


# ---- the tool


class Terminal:
    """The shell of a sample, in the folder of its task."""

    def __init__(self, extra_info: dict[str, Any], sample_index: int = 0) -> None:
        self.about, self.index = extra_info, sample_index
        self.calls: list[str] = []
        self.folder = TaskFolder.made(extra_info)

    def shell(self, command: str) -> str:
        """Runs a command with bash and returns what it prints. Files last from one call to the
        next; variables, processes and the current directory do not.

        Args:
            command: what bash is to run, of one line or more
        """
        if not self.folder.is_there():  # taken away: the machine's temporary files were cleared
            self.folder = rebuild_folder(self.about, self.calls)
        limits = replace(terminal.USUAL, wall_s=self.about["command_s"])
        result = self.folder.run(command, limits)
        self.calls.append(command)
        self.folder.publish(self.index, self.calls)
        return told(result, limits.wall_s)

    @staticmethod
    def __tool_check__() -> None:
        """Raises ConfigError where no shell can be run."""
        terminal.check()


def rebuild_folder(about: dict[str, Any], calls: Iterable[str]) -> TaskFolder:
    folder, limits = TaskFolder.made(about), replace(terminal.USUAL, wall_s=about["command_s"])
    for command in calls:
        folder.run(command, limits)
    return folder


def told(result: ShellResult, wall_s: float) -> str:
    """Returns what the policy reads of a command."""
    if result.status == "ok":
        code = f"[exit code {result.exit_code}]" if result.exit_code else ""
        return f"{result.output}\n{code}".strip() or "(no output)"
    after = f" after {wall_s:g} s" if result.status == "time" else ""
    return f"{result.output}\n[ended{after} by the limit: {result.status}]".strip()


# ---- the reward


def task_reward(
    messages: list[dict[str, Any]], extra_info: dict[str, Any], sample_index: int
) -> dict[str, float]:
    """A reward function: runs the task's tests in the folder that the sample has left.

    The folder is the very one where it is still on this host; otherwise, as on other ranks'
    hosts, the sample's commands are run again in a new one, which `rewards.timeout_s` must leave
    time for. The score is what the script wrote to /logs/verifier/reward.txt or reward.json; else 1
    where it ended with exit code 0, and 0 where not. Other numbers of reward.json are reported.
    """
    calls = [arguments["command"] for _, arguments in calls_of(Terminal, messages)]
    found = claimed(extra_info, sample_index, calls)
    folder = found or rebuild_folder(extra_info, calls)
    try:
        result = run_tests(folder, extra_info)
        written = folder.verdict(VERDICTS, MOST_VERDICT)
    finally:
        folder.remove()
    numbers = {} if written is None else verdict_of(*written)
    passed = float(result.status == "ok" and result.exit_code == 0)
    return {
        **numbers, "score": numbers.get("reward", passed), "rebuilt": float(found is None),
        "limit_hit": float(result.status != "ok"),
        "bad_verdict": float(written is not None and not numbers),
    }  # fmt: skip


def run_tests(folder: TaskFolder, about: dict[str, Any]) -> ShellResult:
    task, script = Path(about["task"]), about["script"]
    limits = replace(terminal.USUAL, wall_s=about["tests_s"], memory_mib=MOST_TESTS_MIB)
    own = folder.place / "task"  # not the sandbox's: it is made when the last command has ended
    own.mkdir(exist_ok=True)
    parts = [("tests", "/tests")] if (task / "tests").is_dir() else []
    if script == "run-tests.sh":
        parts.append((script, "/run-tests.sh"))
    mounts = [(str(readable_copy(task / name, own)), there) for name, there in parts]
    command = f"export TEST_DIR=/tests; bash /{script}"
    return run_shell(command, folder.mounts(for_tests=True), about["workdir"], limits, mounts)


def verdict_of(name: str, text: str) -> dict[str, float]:
    """Returns the numbers that a script wrote, the score as "reward"; {} where there is none. What
    the policy has made may have written it, so what is wrong with it is no failure of ours."""
    try:
        value = json.loads(text) if name.endswith(".json") else {"reward": float(text)}
        numbers = {str(key): float(number) for key, number in value.items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}
    if "reward" not in numbers and len(numbers) == 1:
        [numbers["reward"]] = numbers.values()
    is_sound = "reward" in numbers and all(map(math.isfinite, numbers.values()))
    return numbers if is_sound else {}
