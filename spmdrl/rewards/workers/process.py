"""The trainer's side of a worker process: starts it, talks to it, and says how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from spmdrl.config import ConfigError
from spmdrl.rewards.workers import keeper
from spmdrl.rewards.workers.worker import TOKEN_BYTES, Frames, NoFrame, Reply, RewardResult

START_LIMIT_S = 300.0  # for a worker to import what the functions need
START_TRIES = 3  # of a worker that something kills while it starts
STATUS_S = 2.0  # for the keeper to say how a worker ended that has hung up
KEEPER_S = keeper.SWEEP_S + 5.0  # for the keeper to end

Kind = type[RewardResult] | type[Reply]


class WorkerLost(Exception):
    """The worker cannot answer any more: it ended, hung up or wrote what is no reply."""

    def __init__(self, how: str, signal_number: int = 0) -> None:
        super().__init__(how)
        self.signal_number = signal_number  # that ended it


@dataclass
class Setup:
    """The message that a worker receives first."""

    pickled: bytes
    kind: Kind
    loaded: bool = False  # by a worker at least: what fails later is no mistake of the config


class WorkerProcess:
    """A worker process, its keeper and the connections to both. Belongs to one thread.

    A worker and its keeper lead sessions of their own, so that Ctrl-C does not reach them. The
    keeper ends the worker with all its descendants when that thread or the trainer ends.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.keeper: subprocess.Popen | None = None
        self.ready = False  # it has loaded the functions
        self.starts = self.number = self.pid = 0
        self.closing = False

    def start(self) -> None:
        """Raises OSError where there can be no further process."""
        self.starts += 1
        self.frames = Frames(secrets.token_bytes(TOKEN_BYTES))
        self.pipe, its_pipe = socket.socketpair()
        self.control, its_control = socket.socketpair()
        fds = [its_control.fileno(), its_pipe.fileno()]
        arguments = [keeper.__file__, *fds, os.getpid()]
        try:
            self.keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", *map(str, arguments)],
                pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        finally:
            its_pipe.close()
            its_control.close()
        self.ready = False
        self.pipe.settimeout(START_LIMIT_S)
        with contextlib.suppress(OSError):  # it ended at once, which wait_ready will tell
            self.pipe.sendall(self.frames.token + self.frames.frame(self.setup.pickled))
        self.pipe.setblocking(False)

    def prepare(self) -> None:
        """Starts the process where there is none, and waits until it has loaded the functions.

        Raises ConfigError where the functions cannot be loaded; RuntimeError where the process is
        killed again and again, or where others have loaded them before.
        """
        lost = WorkerLost("was never started")
        for _ in range(START_TRIES):
            if self.keeper is None:
                self.start()
            try:
                return self.wait_ready()
            except WorkerLost as error:
                lost = error
            self.stop()
            if self.closing:
                break
        told = f"a worker process {lost} while it loaded your functions, {START_TRIES} times"
        killed = lost.signal_number == signal.SIGKILL
        raise (RuntimeError if killed or self.setup.loaded else ConfigError)(told) from lost

    def wait_ready(self) -> None:
        try:
            answer = self.receive(START_LIMIT_S)
        except TimeoutError as error:
            self.stop()
            raise RuntimeError(
                f"a worker process was not ready after {START_LIMIT_S:g} s of imports"
            ) from error
        if answer["failed"] is not None:
            self.stop()
            raise (RuntimeError if self.setup.loaded else ConfigError)(
                "a worker process cannot load your functions (rewards, tools); what they import "
                "must be installed, or its folder in PYTHONPATH:\n" + answer["failed"]
            )
        self.ready = self.setup.loaded = True
        self.pid = answer["pid"]

    def call(self, index: int, arguments: dict[str, Any], timeout_s: float) -> Any:
        """Runs one function; afterwards a worker is there, the same or a fresh one.

        `timeout_s` does not count the start of a worker. Raises as `prepare`.
        """
        if self.ready and self.has_news():  # it owes nothing: it has ended, or somebody wrote
            self.stop()
        if not self.ready:
            self.prepare()
        kind = self.setup.kind
        try:
            number = self.send(index, arguments, timeout_s=timeout_s)
            answer = self.receive(timeout_s)
            if answer["number"] == number:
                return kind(*answer["fields"])
            reason = f"its process answered call {answer['number']}, not {number}"
        except TimeoutError:
            reason = f"timed out after {timeout_s:g} s"
        except WorkerLost as error:
            reason = f"its process {error}"
        self.stop()
        with contextlib.suppress(OSError):  # the next call tries again and tells
            if not self.closing:
                self.start()
        return kind.failed(reason)

    def send(self, *request: Any, timeout_s: float) -> int:
        """The number of the request. Raises TimeoutError, and WorkerLost where it has hung up.

        While the worker takes nothing, this takes in its replies: a worker that waits until its
        replies are read does not read requests. Call `taken` for them afterwards, since the
        connection does not become readable again.
        """
        self.number += 1
        rest = memoryview(self.frames.frame(pickle.dumps((self.number, *request))))
        end = time.monotonic() + timeout_s
        while rest:
            try:
                rest = rest[self.pipe.send(rest) :]
            except BlockingIOError:
                self.wait_for_room(end)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise self.lost() from error
        return self.number

    def wait_for_room(self, end: float) -> None:
        """Takes in what comes, until more can be sent. Raises TimeoutError and WorkerLost."""
        poll = select.poll()
        poll.register(self.pipe, select.POLLIN | select.POLLOUT)
        poll.register(self.control, select.POLLIN)
        left_s = end - time.monotonic()
        if left_s <= 0 or not (ready := dict(poll.poll(1000 * left_s))):
            raise TimeoutError
        if ready.get(self.pipe.fileno(), 0) & ~select.POLLOUT:
            self.read()
        elif self.control.fileno() in ready:
            raise self.lost()

    def receive(self, limit_s: float) -> dict[str, Any]:
        """Returns what the worker says next. Raises TimeoutError and WorkerLost."""
        end = time.monotonic() + limit_s
        while (answer := self.taken()) is None:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError
            ready = wait([self.pipe, self.control], left)
            if self.pipe in ready:
                self.read()
            elif ready:
                raise self.lost()
        return answer

    def read(self) -> None:
        """Takes in what has come. Raises WorkerLost."""
        try:
            data = self.pipe.recv(1 << 20)
        except BlockingIOError:  # `send` has taken it in
            return
        except ConnectionResetError:
            data = b""
        if not data:
            raise self.lost()
        self.frames.received += data

    def taken(self) -> dict[str, Any] | None:
        """The next reply of what was taken in, if it is complete; what a fork of the worker says
        is passed over. Raises WorkerLost for what is no reply."""
        while True:
            try:
                message = self.frames.take()
            except NoFrame as error:
                raise WorkerLost(
                    f"wrote what is no reply to its connection with the trainer: {error}; a "
                    "function must not write to a descriptor that it has not opened"
                ) from error
            if message is None:
                return None
            answer: dict[str, Any] = json.loads(message)
            if answer["pid"] == self.pid or not self.ready:
                return answer

    def has_news(self) -> bool:
        return bool(self.frames.received or wait([self.pipe, self.control], 0))

    def lost(self) -> WorkerLost:
        """Returns how the worker ended that has hung up."""
        if not wait([self.control], STATUS_S):
            return WorkerLost(
                "closed its connection with the trainer: a function must not close a descriptor "
                "that it has not opened"
            )
        try:
            told = self.control.recv(64)
        except ConnectionResetError:
            told = b""
        if not told:
            how = "was ended with the run" if self.closing else "died with its killed keeper"
            return WorkerLost(how, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(int(told))
        if code >= 0:
            return WorkerLost(f"exited with code {code}")
        name = name_of_signal(-code)
        if self.closing:
            return WorkerLost("was ended with the run", -code)
        by = ", which spmdrl did not send: out of memory (see dmesg), or killed by hand"
        return WorkerLost(f"died of {name}{by if name == 'SIGKILL' else ''}", -code)

    def kill(self) -> None:
        """Kills the worker, for other threads: its keeper ends it, and then `call` returns."""
        self.closing = True
        if self.keeper is not None:
            with contextlib.suppress(OSError):
                self.control.shutdown(socket.SHUT_WR)

    def stop(self) -> None:
        """Ends the worker with all its descendants."""
        if self.keeper is None:
            return
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)
        try:
            self.keeper.wait(KEEPER_S)
        except subprocess.TimeoutExpired:
            self.keeper.kill()
            self.keeper.wait()
        self.pipe.close()
        self.control.close()
        self.keeper, self.ready = None, False


def name_of_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one has no name
        return f"signal {number}"
