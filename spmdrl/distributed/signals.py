"""Signals that end a run in order: after the step, with a checkpoint, by the code for "again".

SIGINT (Ctrl-C), SIGTERM (torchrun, Slurm, Kubernetes), SIGHUP (a terminal that is gone) and SIGUSR1
(what sbatch --signal sends ahead of a time limit) are noted by a thread, since the main one may be
blocked in a collective, and Python runs its handlers there only. Ranks hear of a signal at
different moments, or not at all: after each step they vote (stop_votes.py). spmdrl/__init__.py has
a program listen for SIGINT from its first moment on, so this imports neither torch nor the config.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from spmdrl.distributed.exit import INTERRUPTED, REQUEUE, leave
from spmdrl.distributed.progress import PROGRESS

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
AT_ONCE = (signal.SIGINT, signal.SIGTERM)  # what a second signal is that ends the run amid a step
SAME_S = 2.0  # a signal comes from torchrun and from the scheduler: within this it is one
WORD_S = 4.0  # for the other ranks to hear why this one leaves
TOLD_S = 2.0  # torchrun's SIGTERM may be its answer to a rank that died, which a watchdog tells of


class Stopping:
    """Keeps what a signal asked of this rank, and acts on it.

    Only a program calls `listen`. Until `arm` is called nothing would be lost, so the first signal
    ends the process, a SIGTERM after TOLD_S. Afterwards it asks the run to stop after the step;
    `grace_s` later, or with a second Ctrl-C or SIGTERM, the process ends at once. `on_quit` hears
    why and with which code, to tell the other ranks.
    """

    def __init__(self) -> None:
        self.failed: Callable[[], bool] = lambda: False  # then torchrun's signal is its answer
        self.on_quit: Callable[[str, int], None] = lambda why, _: say(f"stopped by {why}")
        self.armed, self.grace_s = False, 0.0
        self.asked: str | None = None  # the first signal's name
        self.asked_at = 0.0
        self.told = False
        self.listener = 0  # the process that listens; a fork of it does not
        self.shares = False  # a signal that another handler has taken is that handler's

    def listen(self, signals: Iterable[signal.Signals] = SIGNALS) -> None:
        """Takes the process's signals: a program's business, not a library's. Later calls take
        further ones. SIGHUP stays ignored where nohup has the process ignore it.
        """
        if self.listener != os.getpid():
            self.listener = os.getpid()
            self.pipe, self.inlet = os.pipe()
            os.set_blocking(self.inlet, False)
            signal.set_wakeup_fd(self.inlet, warn_on_full_buffer=False)
            threading.Thread(target=self._listen, name="signals", daemon=True).start()
        for number in signals:
            if number == signal.SIGHUP and is_ignored(number):
                continue
            signal.signal(number, _noted)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])  # launcher.py blocks one

    def arm(self, grace_s: float) -> None:
        """Lets a signal leave the run `grace_s` to end its step and save, from now on; 0: none."""
        self.armed, self.grace_s = grace_s > 0, grace_s

    def _listen(self) -> None:
        poll = select.poll()  # select.select knows no descriptor above 1023
        poll.register(self.pipe, select.POLLIN)
        while True:
            ready = poll.poll(200)
            for number in os.read(self.pipe, 64) if ready else b"":
                if number in SIGNALS and not self._is_anothers(number):
                    self._on(signal.Signals(number))
            since = time.monotonic() - self.asked_at
            if not self.asked:
                continue
            if not self.armed and since > TOLD_S and not self.failed():
                self._quit(self.asked, code_of(signal.Signals[self.asked]))
            if self.armed and since > self.grace_s:
                late = f"{self.asked}, and the step had not ended after {self.grace_s:g} s"
                self._quit(late, REQUEUE)
            if self.armed and not self.told and since > SAME_S and not self.failed():
                self.told = True
                say(f"{self.asked}: the run stops after this step, with a checkpoint, "
                    f"within {self.grace_s:g} s; once more, and it stops now")  # fmt: skip

    def _is_anothers(self, number: int) -> bool:
        return self.shares and signal.getsignal(number) is not _noted

    def _on(self, number: signal.Signals) -> None:
        if self.asked is None:
            self.asked, self.asked_at = number.name, time.monotonic()
            if not self.armed and number != signal.SIGTERM:
                self._quit(number.name, code_of(number))
        elif number in AT_ONCE and time.monotonic() - self.asked_at > SAME_S:
            code = code_of(signal.Signals[self.asked])  # torchrun passes a second SIGINT as SIGTERM
            # another rank may take this signal for the first that it heard
            self._quit(f"a second signal, {number.name}", code, number == signal.SIGTERM)

    def _quit(self, why: str, code: int, may_answer: bool = False) -> NoReturn:
        """may_answer: the signal may be torchrun's, about a rank that a watchdog will tell of."""
        end = time.monotonic() + TOLD_S
        while may_answer and not self.failed() and time.monotonic() < end:
            time.sleep(0.05)
        if not (may_answer and self.failed()):
            told = threading.Thread(target=self.on_quit, args=(why, code), daemon=True)
            told.start()
            told.join(WORD_S)  # a store that does not answer is not waited for
        leave(code)


def is_ignored(number: signal.Signals) -> bool:
    return signal.getsignal(number) == signal.SIG_IGN


def code_of(number: signal.Signals) -> int:
    return INTERRUPTED if number == signal.SIGINT else REQUEUE


def say(what: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        PROGRESS.line(f"\nspmdrl: {what}")


def _noted(_signal: int, _frame: Any) -> None:
    """Python's own handler has nothing to do: the thread has read of the signal."""


STOPPING = Stopping()  # of a program
