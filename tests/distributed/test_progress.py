"""What a run says of what it is doing: in a log and on a terminal."""

from __future__ import annotations

import ast
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import spmdrl
from spmdrl.distributed import progress
from spmdrl.distributed.process import LineFormatter, LineHandler
from spmdrl.distributed.progress import ERASE, WORDS, Progress, spoken


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shown(clock: Clock) -> Progress:
    """In a log."""
    found = Progress(clock)
    found.open(live=False)
    return found


def pass_time(shown: Progress, clock: Any, seconds: float) -> None:
    """As the thread does it."""
    for _ in range(int(seconds * 2)):
        clock.now += 0.5
        shown.look()


def test_a_log_gets_a_line_after_3_s_of_silence_and_then_one_each_30_s(shown, clock, capsys):
    with shown.phase("build actor"):
        shown.detail("a/model")
        pass_time(shown, clock, 2.5)
        assert capsys.readouterr().out == ""
        pass_time(shown, clock, 70)
    assert capsys.readouterr().out.splitlines() == [
        "spmdrl: loading the model (a/model): 3 s",
        "spmdrl: loading the model (a/model): 33 s",
        "spmdrl: loading the model (a/model): 1 min 3 s",
        "spmdrl: loading the model (a/model): done after 1 min 12 s",
    ]
    with shown.phase("sync"):
        pass_time(shown, clock, 2)
    assert capsys.readouterr().out == ""


def test_short_phases_do_not_add_up_to_silence(shown, clock, capsys):
    for _ in range(4):
        with shown.phase("load data"):
            pass_time(shown, clock, 2)
    assert capsys.readouterr().out.splitlines() == [
        "spmdrl: loading the data: 1 s", "spmdrl: loading the data: 2 s",
    ]  # fmt: skip


def test_later_steps_speak_after_30_s_and_evaluations_after_3(shown, clock, capsys):
    for step in range(1, 6):
        with shown.step(step, 9), shown.phase("rollout"):
            pass_time(shown, clock, 20)
        shown.line(f"step {step}/9 | ...")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "spmdrl: step 1/9: generating answers: 3 s",
        "spmdrl: step 1/9: generating answers: done after 20 s",
        "step 1/9 | ...",
        "spmdrl: step 2/9: generating answers: 3 s",
        "spmdrl: step 2/9: generating answers: done after 20 s",
        "step 2/9 | ...",
        "step 3/9 | ...", "step 4/9 | ...", "step 5/9 | ...",
    ]  # fmt: skip
    with shown.phase("evaluate"):
        shown.count(0, 64, "answers")
        pass_time(shown, clock, 2)
        shown.count(16, 64, "answers")
        pass_time(shown, clock, 2)
    said, ended = capsys.readouterr().out.splitlines()
    assert said == (
        "spmdrl: step 5/9: evaluating on held-out data: 25 %, 9 s left, 16 of 64 answers"
    )
    assert ended.endswith("done after 4 s")


def test_a_terminal_has_one_line_that_is_erased_for_others(shown, clock, capsys, monkeypatch):
    monkeypatch.setattr(progress, "columns", lambda: 80)
    shown.live = True
    with shown.step(3, 120), shown.phase("update_actor"):
        for _ in shown.each([1, 2], "updates"):
            for number, _ in enumerate(shown.each([1, 2, 3, 4], "micro-batches")):
                clock.now += 1
                if number == 2:
                    shown.look()
        assert not shown.doing[0].counts
        shown.line("a line")
        shown.line("another")
    out = capsys.readouterr().out
    drawn = out.split(ERASE)
    assert drawn[1].startswith("step 3/120: updating the model [##--------] 25 %, 9 s left, 0 of 2")
    assert drawn[2].startswith("step 3/120: updating the model [#######---] 75 %, 2 s left, 1 of 2")
    assert drawn[3] == "a line\nanother\n"  # nothing to erase for the second
    assert all(len(line) < 80 for line in drawn[:3])


def test_long_names_leave_room_for_the_count(shown, clock, capsys, monkeypatch):
    monkeypatch.setattr(progress, "columns", lambda: 60)
    shown.live = True
    with shown.phase("build rollout"):
        shown.detail("vLLM, " + "/very/long" * 20)
        shown.count(5, 10, "files")
        clock.now += 10
        shown.look()
    line = capsys.readouterr().out.removeprefix(ERASE)
    assert line.startswith("spmdrl: starting the engine (")
    assert line.endswith(" [#####-----] 50 %, 10 s left") and len(line) < 60


def test_a_loop_that_is_left_early_counts_no_longer(shown):
    with shown.phase("update"):
        for _ in shown.each([1, 2], "updates"):
            taken = shown.each([1, 2], "micro-batches")
            next(taken)  # a schedule takes as many as it needs, and never asks for one more
            next(taken)
        assert not shown.doing[-1].counts
    assert not shown.doing


def test_each_item_is_a_sign_that_a_long_phase_gets_on(shown, clock):
    """Also on a rank that shows nothing; the watchdog hears of it."""
    for progress_of_rank in (shown, Progress(clock)):
        done = []
        progress_of_rank.heard = lambda done=done: done.append(len(done))
        with progress_of_rank.phase("update"):
            for item in progress_of_rank.each("abc", "micro-batches"):
                assert len(done) == "abc".index(item)
        assert len(done) == 3


def test_nothing_is_shown_unless_a_program_asks(clock, capsys, monkeypatch):
    silent = Progress(clock)
    with silent.step(1, 2), silent.phase("rollout"):
        silent.count(1, 2, "answers")
        assert list(silent.each([1, 2], "rows")) == [1, 2]
        silent.look()
    monkeypatch.setenv("RANK", "1")
    silent.start("starting")
    assert not silent.active and capsys.readouterr().out == ""


def on_terminal(script: str, rank: int = 0) -> str:
    """What a program writes to a terminal."""
    ours, theirs = pty.openpty()
    program = [sys.executable, "-c", "from spmdrl.distributed.progress import PROGRESS\n" + script]
    environment = os.environ | {"RANK": str(rank), "TERM": "xterm"}
    subprocess.run(program, stdout=theirs, stderr=subprocess.DEVNULL, env=environment, timeout=60)
    os.close(theirs)
    os.set_blocking(ours, False)
    found = os.read(ours, 1 << 16).decode().replace("\r\n", "\n")
    os.close(ours)
    return found


@pytest.mark.programs
def test_an_exception_leaves_no_line_on_the_terminal():
    assert on_terminal("PROGRESS.start('reading'); 1 / 0").endswith(f"reading ... 0 s{ERASE}")


@pytest.mark.programs
def test_lines_of_another_rank_replace_what_rank_0_has_drawn():
    assert on_terminal("PROGRESS.start('reading'); PROGRESS.line('a')", rank=2) == f"{ERASE}a\n"


@pytest.mark.programs
def test_a_fork_prints_while_the_thread_held_the_lock():
    script = """
import os, threading, time
PROGRESS.start("reading")
holder = threading.Thread(target=lambda: (PROGRESS.lock.acquire(), time.sleep(2)), daemon=True)
holder.start()
time.sleep(0.2)
if os.fork() == 0:
    PROGRESS.line("of the fork")
    os._exit(0)
time.sleep(1)
os._exit(0)
"""
    assert "of the fork\n" in on_terminal(script)


def test_a_wrong_log_call_of_a_library_ends_nothing(capsys):
    log = logging.Logger("library")
    log.addHandler(LineHandler())
    log.warning("%d rows", "many")
    log.warning("%d rows", 3)
    out, err = capsys.readouterr()
    assert out == "3 rows\n" and "TypeError" in err


@pytest.mark.parametrize(
    ("name", "level", "line"),
    [
        ("spmdrl.training.checks.rl", logging.WARNING, "warning: 3 rows"),
        ("spmdrl.data.prompts", logging.INFO, "spmdrl: 3 rows"),
        ("library.part", logging.WARNING, "library.part: 3 rows"),
    ],
)
def test_a_line_of_ours_says_what_it_is_and_one_of_a_library_whose(name, level, line):
    record = logging.LogRecord(name, level, "file.py", 1, "%d rows", (3,), None)
    assert LineFormatter().format(record) == line


def test_every_phase_has_plain_words():
    names = set()
    for file in Path(spmdrl.__file__).parent.rglob("*.py"):
        text = file.read_text()
        if file.name.startswith(("embed", "external")):  # in a host's program nothing is shown
            continue
        if "phases(" in text or "barrier(" in text:  # to parse all would take a second
            names |= phases_in(ast.parse(text))
    assert len(names) > 20
    assert names - {"end of the call", "attach"} <= WORDS.keys()


def phases_in(tree: ast.Module) -> set[str]:
    """The texts that are given to a call of `phases` or `phases.barrier`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    found = set()
    for call in calls:
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        first = call.args[0]
        if name in ("phases", "barrier") and isinstance(first, ast.Constant):
            found.add(str(first.value))
    return found


def test_durations():
    assert [spoken(s) for s in (0.4, 59.9, 80, 7500)] == ["0 s", "59 s", "1 min 20 s", "2 h 5 min"]
