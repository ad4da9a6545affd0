"""Tells what a run is doing, in plain words, while something takes long. Rank 0 alone speaks.

On a terminal there is one line, drawn in place and erased before anything else is printed:

    step 3/120: generating answers [####------] 45 %, 15 s left, 29 of 64 answers

In a pipe or a Slurm log there are plain lines, and only where nothing else was printed for some
time: 3 s at the start, in the first two steps and between steps, 30 s in later steps, and 30 s
before the same is said again. Nothing is shown before a program calls `PROGRESS.start`, so a
program that embeds spmdrl prints what it prints. Imports no torch: the first words come before it.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

TICK_S = 0.5  # between two looks of the thread
PATIENCE_S = 3.0  # of silence in a log, before it is said what goes on
LONG_S = 30.0  # the same in later steps, and before something is said again
FIRST_STEPS = 2
BAR = 10  # columns
ERASE = "\r\033[K"
LIBRARIES = "loading the libraries (PyTorch, transformers)"

# phases of a run (spmdrl/distributed/phases.py) in plain words; others are shown by their name
WORDS = {
    "check folders": "checking the folders of the run",
    "download": "downloading models and data",
    "load data": "loading the data",
    "build actor": "loading the model",
    "build ref": "loading the reference model",
    "build teachers": "loading the teachers",
    "build critic": "loading the critic",
    "build prm": "loading the process reward model",
    "build reward model": "loading the reward model",
    "build judge": "loading the judge",
    "build rollout": "starting the engine",
    "plan weights": "planning how weights go from the trainer to the engine",
    "resume": "preparing the run's folder and looking for a checkpoint",
    "wait sync": "waiting for the other ranks",
    "sync": "copying the new weights to the engine",
    "wait weights": "waiting for new weights",
    "data": "taking the next rows of the data",
    "rollout": "generating answers",
    "reward": "scoring answers with the reward",
    "reward_model": "scoring answers with the reward model",
    "judge": "having answers judged",
    "wait answers": "waiting for the answers",
    "wait rewards": "waiting for the rewards",
    "log samples": "writing some of the answers to samples/",
    "balance": "sharing the answers out over the ranks",
    "receive": "sharing the answers out over the ranks",
    "wait samples": "waiting for the answers",
    "ref_logprobs": "computing reference log-probabilities",
    "teacher_logprobs": "asking the teachers about the answers",
    "old_logprobs": "computing log-probabilities",
    "explain mismatch": "comparing engine and trainer, module by module",
    "values": "computing the critic's values",
    "advantages": "computing advantages",
    "update_prm": "updating the process reward model",
    "update_critic": "updating the critic",
    "update_actor": "updating the model",
    "update": "updating the model",
    "sync_reference": "moving the reference towards the policy",
    "wait report": "waiting for the other ranks",
    "report": "collecting metrics",
    "evaluate": "evaluating on held-out data",
    "wait evaluation": "waiting for the evaluation on held-out data",
    "checkpoint": "saving a checkpoint",
    "save": "writing the trained model",
    "export": "turning the checkpoint into a Hugging Face model",
}


@dataclass
class Count:
    done: int
    total: int
    what: str  # "answers"; plural

    def text(self) -> str:
        return f"{self.done:,} of {self.total:,} {self.what}"


@dataclass
class Doing:
    """Something that goes on. The inner of several counts divides one unit of the outer."""

    words: str
    since: float  # time.monotonic()
    counts: list[Count] = field(default_factory=list)
    said_at: float | None = None  # in a log

    def share(self) -> float | None:
        """Returns how much of it is done, from 0 to 1; None where nothing is counted."""
        found = None
        for count in reversed(list(self.counts)):
            found = (count.done + (found or 0.0)) / max(count.total, 1)
        return found

    def facts(self, now: float) -> str:
        """Returns how much is done, the time that is left where that can be told, or the time so
        far.
        """
        seconds, share = now - self.since, self.share()
        if share is None:
            return spoken(seconds)
        left = f"{spoken(seconds * (1 - share) / share)} left" if share and seconds >= 1 else ""
        counts = [count.text() for count in list(self.counts) if count.total > 1]
        return ", ".join(filter(None, [f"{100 * share:.0f} %", left or spoken(seconds), *counts]))


class Progress:
    """Shows what goes on in this process, innermost last; a thread draws it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.active, self.live = clock, False, False
        self.lock = threading.RLock()
        self.doing: list[Doing] = []
        self.label, self.steps_seen, self.in_step = "", 0, False
        self.printed_at = clock()
        self.drawn = False
        self.beside = False  # rank 0 may have drawn on this process's terminal
        self.ended = threading.Event()
        self.heard: Callable[[], None] = lambda: None  # is told of each item that is done

    # ---- for programs

    def start(self, words: str) -> None:
        """Says `words` at once, and from now on what goes on; on rank 0."""
        live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        if os.environ.get("RANK", "0") != "0":
            self.beside = live
            return
        self.open(live)
        os.register_at_fork(after_in_child=self.forget)
        atexit.register(self.stop)  # also where the program ends by an exception
        self.now(words)
        self.say(self.doing[-1], self.clock())
        self.ended = threading.Event()
        threading.Thread(
            target=self.keep_looking, args=(self.ended,), name="progress", daemon=True
        ).start()

    def open(self, live: bool) -> None:
        """Shows from now on, where `look` is called."""
        self.active, self.live, self.printed_at = True, live, self.clock()

    def forget(self) -> None:
        """Forgets the thread and its lock, in a fork, which has not the thread and where no one
        would release the lock.
        """
        self.lock, self.active, self.drawn = threading.RLock(), False, False

    def stop(self) -> None:
        """Nothing is shown any more; the line on the terminal is erased."""
        if self.active:
            self.active = False
            self.ended.set()
            self.clear()

    def clear(self) -> None:
        """Erases the line on the terminal, for others to print."""
        if self.drawn and self.lock.acquire(timeout=1.0):  # its holder may wait for the terminal
            sys.stdout.write(ERASE)
            sys.stdout.flush()
            self.drawn = False
            self.lock.release()

    def now(self, words: str) -> None:
        """Says what goes on outside of phases until the next call; "": nothing worth a word."""
        with self.lock:
            while self.doing:
                self.end(self.doing[-1])
            if words and self.active:
                self.doing.append(Doing(words, self.clock()))

    @contextmanager
    def step(self, number: int, total: int) -> Iterator[None]:
        """While a step of a run goes on, which is named before what it does."""
        self.now("")
        self.label, self.in_step = f"step {number}/{total}: ", True
        self.steps_seen += 1
        yield
        self.in_step = False

    def line(self, text: str) -> None:
        """Prints it, at once and in place of what is drawn. Of any rank."""
        with self.lock:
            self.printed_at = self.clock()
            erased, self.drawn = (ERASE if self.drawn or self.beside else ""), False
            sys.stdout.write(f"{erased}{text}\n")
            sys.stdout.flush()

    # ---- for what takes long

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """While a phase of this name goes on; see WORDS."""
        if not self.active:
            yield
            return
        doing = Doing(WORDS.get(name, name), self.clock())
        with self.lock:
            self.doing.append(doing)
        try:
            yield
        finally:
            self.end(doing)

    def detail(self, text: str) -> None:
        """Adds it to the words of what goes on: which model, which engine."""
        if self.active and self.doing:
            self.doing[-1].words += f" ({text})"

    def count(self, done: int, total: int, what: str) -> None:
        """Notes that so much is done of what goes on."""
        if self.active and self.doing:
            self.doing[-1].counts = [Count(done, total, what)]

    def each(self, items: Sequence[T], what: str) -> Iterator[T]:
        """The items; those that were taken and worked on count as done. On ranks that show nothing
        `heard` is told of them as well.
        """
        counts = self.doing[-1].counts if self.active and self.doing else []
        mine, place = Count(0, len(items), what), len(counts)
        counts.append(mine)
        try:
            for item in items:
                yield item
                mine.done += 1
                del counts[place + 1 :]
                self.heard()
        finally:
            del counts[place:]

    # ---- how it is shown

    def keep_looking(self, ended: threading.Event) -> None:
        while not ended.wait(TICK_S):
            with self.lock:
                if not ended.is_set():
                    self.look()

    def look(self) -> None:
        """Draws what goes on, or says it where it is time to."""
        if not self.doing:
            return
        doing, now = self.doing[-1], self.clock()
        if self.live:
            self.draw(doing, now)
        elif now - self.printed_at >= self.patience_s(doing):
            self.say(doing, now)

    def patience_s(self, doing: Doing) -> float:
        early = not self.in_step or self.steps_seen <= FIRST_STEPS
        return PATIENCE_S if early and doing.said_at is None else LONG_S

    def say(self, doing: Doing, now: float) -> None:
        if self.live:
            self.draw(doing, now)
            return
        facts = f": {doing.facts(now)}" if doing.counts or now - doing.since >= 1 else ""
        doing.said_at = now
        self.line(f"spmdrl: {self.label}{doing.words}{facts}")

    def draw(self, doing: Doing, now: float) -> None:
        share, bar = doing.share(), " ..."
        if share is not None:
            filled = min(int(BAR * share), BAR)
            bar = f" [{'#' * filled}{'-' * (BAR - filled)}]"
        words, facts, room = f"{self.label or 'spmdrl: '}{doing.words}", doing.facts(now), columns()
        if len(words) + len(bar) + len(facts) + 1 >= room:  # what is counted matters more
            words = words[: max(room // 2, room - len(bar) - len(facts) - 2)]
        sys.stdout.write(f"{ERASE}{f'{words}{bar} {facts}'[: room - 1]}")
        sys.stdout.flush()
        self.drawn = True

    def end(self, doing: Doing) -> None:
        """Says in a log how long it took, where it was said that it went on."""
        with self.lock:
            seconds = self.clock() - doing.since
            if doing.said_at is not None and seconds >= PATIENCE_S and self.active:
                self.line(f"spmdrl: {self.label}{doing.words}: done after {spoken(seconds)}")
            self.doing = [other for other in self.doing if other is not doing]


PROGRESS = Progress()


def model_text(model: str) -> str:
    """A model's name or folder, and the size of its weights where it is a folder."""
    from spmdrl.cli.hub_names import name_of  # not at the top: the config comes with it

    size = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    name = name_of(model) or model
    if size >= 1e9:
        return f"{name}, {size / 1e9:.1f} GB"
    return f"{name}, {size / 1e6:.1f} MB" if size else name


def columns() -> int:
    """Returns the columns of the terminal; 80 where it does not say."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def spoken(seconds: float) -> str:
    """Writes a duration as in "12 s", "1 min 20 s", "2 h 5 min"."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
