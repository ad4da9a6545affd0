"""Terminal tasks in folders: a sample's shell, and the tests that decide over what it left."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dialogues import PROMPT, call, config_of, contents, messages_of_sample, played

from spmdrl.config import ConfigError, MultiTurnConfig, RewardConfig
from spmdrl.environments import terminal
from spmdrl.environments.episodes import write_rows
from spmdrl.environments.harbor import Terminal, task_reward, task_rows, verdict_of
from spmdrl.environments.task_folders import all_folders, remove_tree
from spmdrl.environments.terminal import (
    OWN_PROCESSES,
    SPARE_PROCESSES,
    USUAL,
    own_by_sandbox,
    run_shell,
    too_large,
)
from spmdrl.rewards.runner import RewardRunner
from spmdrl.rewards.sandbox.limits import descendants
from spmdrl.rewards.sandbox.sandbox import NOBODY
from spmdrl.rollout.multi_turn.tools import Toolbox
from spmdrl.types import Prompt, Sample

pytestmark = pytest.mark.sandbox

HARBOR = {
    "instruction.md": "Add the numbers of numbers.txt into sum.txt.\n",
    "task.toml": "[verifier]\ntimeout_sec = 7.0\n",
    "environment/Dockerfile": (
        "FROM debian\nRUN apt-get install gawk\nWORKDIR /work/place\n"
        "COPY *.txt \\\n  ./\nCOPY [\"deep\", \"below/\"]\n"
    ),
    "environment/numbers.txt": "3\n4\n",
    "environment/deep/more.txt": "5\n",
    "tests/test.sh": (
        "cat ~/.profile 2>/dev/null && exit 9\n"
        "if [ \"$(cat sum.txt)\" = 12 ]; then r=1; else r=0.25; fi\n"
        "echo \"{\\\"reward\\\": $r, \\\"files\\\": $(ls | wc -l)}\" > /logs/verifier/reward.json\n"
    ),
}  # fmt: skip
BENCH = {
    "task.yaml": "instruction: |\n  Write hello into hi.\nmax_test_timeout_sec: 5\n",
    "run-tests.sh": "python $TEST_DIR/test_outputs.py\n",
    "tests/test_outputs.py": "assert open('hi').read() == 'hello'\n",
}


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # workers, too
    monkeypatch.setattr("tempfile.tempdir", None)
    all_folders.cache_clear()
    yield
    all_folders.cache_clear()


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    for name, files in (("a_sum", HARBOR), ("hello", BENCH)):
        for file, text in files.items():
            path = tmp_path / "tasks" / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            if file.startswith(("tests/", "run-tests")):
                path.chmod(0o600)  # nobody else's, as with a umask of 077
    found = task_rows(tmp_path / "tasks")
    write_rows(tmp_path / "tasks.jsonl", found)
    return [json.loads(line) for line in (tmp_path / "tasks.jsonl").open()]


def prompt_of(row: dict[str, Any], number: int) -> Prompt:
    return replace(
        PROMPT, id=number, data_source=row["data_source"], extra_info=row["extra_info"],
        chat=row["prompt"], ground_truth=None,
    )  # fmt: skip


def shell(command: str) -> str:
    return call("shell", command=command)


def test_two_tasks_are_solved_and_scored(rows: Any, talk: Any, tokenizer: Any) -> None:
    """In the very folder where that is still there, else in one that is made anew."""
    assert [row["prompt"][-1]["content"] for row in rows] == [
        "Add the numbers of numbers.txt into sum.txt.", "Write hello into hi."
    ]  # fmt: skip
    assert [row["extra_info"]["tests_s"] for row in rows] == [7, 5]
    prompts = [prompt_of(row, i) for i, row in enumerate(rows)]
    limits = MultiTurnConfig(timeout_s=60, workers=1)
    round = talk(*prompts, tools=(Terminal,), multi_turn=limits)
    summed = played(
        round, tokenizer, shell("pwd; ls -R") + shell("echo ok > ~/.profile; touch /tmp/x; nix"),
        shell("cat numbers.txt below/more.txt | paste -sd+ | tee sum; ls ~/.profile /tmp"),
        shell("echo $(($(cat sum))) > sum.txt; exit 3"), "done",
    )  # fmt: skip
    [listed, wrong], [joined], [last] = contents(summed)
    assert listed.split("\n") == [
        "/work/place", ".:", "below", "numbers.txt", "", "./below:", "more.txt"
    ]  # fmt: skip
    assert wrong.endswith("nix: command not found\n\n[exit code 127]")
    assert joined == "3+4+5\n/home/terminal/.profile\n\n/tmp:\nx"
    assert last == "[exit code 3]"
    hello = played(round, tokenizer, shell("printf hello > hi"), "done", position=1)
    idle = played(round, tokenizer, "done", position=0)
    samples = [
        Sample(prompts[i], 0, 2, [], [], [], [], "stop", messages=chat[1:])
        for i, answer in ((0, summed), (1, hello), (0, idle), (0, summed))
        for chat in [messages_of_sample(answer, prompts[i], tokenizer)]
    ]
    rewards = RewardRunner(task_reward, RewardConfig(workers=1))
    told = []
    for sample in samples:  # one after the other: the last finds its folder gone
        rewards.score([sample])
        assert sample.invalid is None, sample.invalid
        told.append((sample.reward, sample.reward_info))
    rewards.close()
    sound = {"limit_hit": 0, "bad_verdict": 0}
    assert told == [
        (1, {"reward": 1, "files": 4, "rebuilt": 0, **sound}),
        (1, {"rebuilt": 0, **sound}),
        (0.25, {"reward": 0.25, "files": 2, "rebuilt": 1, **sound}),
        (1, {"reward": 1, "files": 4, "rebuilt": 1, **sound}),
    ]
    left = [*(all_folders() / "folders").iterdir(), *(all_folders() / "states").iterdir()]
    assert left == []


@pytest.mark.parametrize(
    ("command", "status", "output"),
    [
        ("echo a; sleep 9", "time", "a\n"),
        ("sleep 9 & echo b", "ok", "b\n"),
        ("for i in 1 2 3 4; do head -c 5000000 /dev/zero > $i; done; sleep 9", "disk", ""),
        ("ls /etc/shadow /home /proc; touch /usr/x", "ok", None),
        ("python -c \"import socket; socket.create_connection(('1.1.1.1', 80), 1)\"", "ok", None),
        ("python -c \"print('x' * 9000)\"", "ok", None),
        ("cat ../secret ../../secret", "ok", None),
    ],
)
def test_a_command_is_shut_in(tmp_path: Path, command: str, status: str, output: str) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "work").mkdir()
    own_by_sandbox(tmp_path / "work")
    wall_s = 2 if status == "time" else 30  # a busy machine is slow to write
    limits = replace(USUAL, wall_s=wall_s, file_mib=16, output_kib=4, processes=20)
    result = run_shell(command, [(str(tmp_path / "work"), "/app")], "/app", limits)
    assert result.status == status
    if output is not None:
        assert result.output == output
    elif "9000" in command:
        assert len(result.output) < 5000 and "bytes left out" in result.output
    else:
        assert result.exit_code != 0 and "secret\n" not in result.output


def test_folders_may_stand_anywhere_and_are_removed_whatever_becomes_of_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "work").mkdir()
    own_by_sandbox(tmp_path / "work")
    place = "/deep/er/app"
    made = run_shell(
        "pwd; mkdir -p a/b; touch a/b/c; chmod 555 a/b; chmod 0 a",
        [(str(tmp_path / "work"), place)], place,
    )  # fmt: skip
    assert (made.status, made.output) == ("ok", f"{place}\n")
    remove_tree(tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_a_folder_that_hides_its_files_counts_as_too_large() -> None:
    """Root sees into every folder, so that another user looks."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        folder = Path(place, "work")
        (folder / "hidden").mkdir(parents=True)
        for path in (Path(place), folder):
            path.chmod(0o755)
        assert not seen_as_too_large([str(folder), str(folder)])
        (folder / "hidden").chmod(0)
        assert seen_as_too_large([str(folder)])
        (folder / "hidden").chmod(0o755)
        for name in ("a", "b"):  # together
            Path(place, name).mkdir()
            Path(place, name, "file").write_bytes(b"x" * (700 << 10))
        assert not seen_as_too_large([f"{place}/a"])
        assert seen_as_too_large([f"{place}/a", f"{place}/b"])


def seen_as_too_large(folders: list[str]) -> bool:
    pid = os.fork()
    if pid == 0:
        if os.geteuid() == 0:
            os.setresuid(NOBODY, NOBODY, NOBODY)
        os._exit(1 + too_large(folders, 1))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (1, 2)
    return code == 2


def test_commands_that_multiply_are_held_by_the_kernel() -> None:
    """Looks at /proc alone are too slow: these processes double every few milliseconds."""
    limits, ended, seen = replace(USUAL, processes=20), threading.Event(), [0]
    others = set(descendants(os.getpid()))

    def count() -> None:
        while not ended.is_set():
            seen.append(len(set(descendants(os.getpid(), 2000)) - others))

    counting = threading.Thread(target=count)
    counting.start()
    try:
        result = run_shell("f() { f & f & }; f; sleep 9", [], "/", limits)
    finally:
        ended.set()
        counting.join()
    assert result.status == "processes"
    most = limits.processes + OWN_PROCESSES + SPARE_PROCESSES
    # a count takes a while, in which some end and others begin: it sees more than there ever are
    assert 3 < max(seen) < 2 * most


def test_what_tests_write_is_read_with_care() -> None:
    assert verdict_of("reward.txt", " 0.5\n") == {"reward": 0.5}
    assert verdict_of("reward.json", '{"f1": 1}') == {"f1": 1, "reward": 1}
    for text in (
        "",
        "nan",
        "{}",
        "[1]",
        '{"reward": "x"}',
        '{"a": 1, "b": 2}',
        '{"reward": 1e999}',
    ):
        assert verdict_of("reward.json", text) == {}


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"instruction.md": "x"}, "no script decides over it"),
        ({"task.yaml": "a: 1"}, "has no text `instruction`"),
        ({}, "no folder in it has an instruction.md"),
        ({**HARBOR, "environment/Dockerfile": "COPY numbers.txt /etc/x"}, "alone to put them"),
        ({**HARBOR, "environment/Dockerfile": "COPY --from=b numbers.txt ."}, "of the task alone"),
        ({**HARBOR, "environment/Dockerfile": "COPY nothing ."}, "there is no such file"),
    ],
)
def test_a_task_that_cannot_be_run_is_refused(
    tmp_path: Path, files: dict[str, str], problem: str
) -> None:
    (tmp_path / "tasks/task/environment").mkdir(parents=True)
    (tmp_path / "tasks/task/tests").mkdir()
    for file, text in files.items():
        if not file.startswith("environment/deep"):
            (tmp_path / "tasks/task" / file).write_text(text)
    with pytest.raises(ConfigError, match=problem):
        task_rows(tmp_path / "tasks")


def test_a_terminal_needs_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMDRL_SANDBOX", "weak")
    with pytest.raises(ConfigError, match="a terminal needs bubblewrap"):
        Toolbox((Terminal,))
    monkeypatch.delenv("SPMDRL_SANDBOX")
    monkeypatch.setenv("PATH", os.devnull)
    terminal.try_out.cache_clear()
    terminal.base.cache_clear()
    with pytest.raises(ConfigError, match="no program 'bwrap'"):
        Toolbox((Terminal,))
    config_of(tools=(Terminal,))
