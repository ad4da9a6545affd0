"""Coroutine functions of users: in one process, limited in time, in number and in how often."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
from concurrent.futures import Future
from typing import Any

from spmdrl.rewards.workers.pool import Function, Limits, worker_setup
from spmdrl.rewards.workers.process import Kind, WorkerLost, WorkerProcess
from spmdrl.rewards.workers.worker import RewardResult
from spmdrl.rewards.workers.worker_loop import CANCEL_S, not_ended

ASYNC_GRACE_S = 5.0  # beyond the time limit, for a coroutine to answer to its cancellation


class LoopThread:
    """Has coroutines run on the event loop of a worker process, as many and as often as allowed.

    Drives that process from a thread with an event loop of its own, on which no code of users
    runs. A process whose event loop is blocked, or that ended, fails the calls that were under way
    in it and is replaced for those that have not begun.
    """

    def __init__(
        self, functions: list[Function], config: Limits, ranks: int, kind: Kind = RewardResult
    ) -> None:
        """Starts the process in the background. Raises ConfigError as worker_setup."""
        self.timeout_s, self.grace_s, self.kind = config.timeout_s, ASYNC_GRACE_S, kind
        self.index = {id(function): i for i, function in enumerate(functions)}
        limits = {"timeout_s": self.timeout_s, "grace_s": self.grace_s, "kind": kind.__name__}
        self.process = WorkerProcess(worker_setup(functions, kind, limits))
        self.places = asyncio.Semaphore(config.max_concurrent // ranks or sys.maxsize)
        self.apart_s = 60 * ranks / config.max_per_minute if config.max_per_minute else 0.0
        self.next_at = 0.0  # of the loop's clock: when another may begin
        self.waiting: dict[int, asyncio.Future[Any]] = {}  # for an answer, by its number
        self.loop = asyncio.new_event_loop()
        self.loop.call_soon(self.start_early)
        self.thread = threading.Thread(target=self.loop.run_forever, name="coroutines", daemon=True)
        self.thread.start()

    def submit(self, function: Function, arguments: dict[str, Any]) -> Future[Any]:
        call = self.in_turn(self.index[id(function)], arguments)
        return asyncio.run_coroutine_threadsafe(call, self.loop)

    async def in_turn(self, index: int, arguments: dict[str, Any]) -> Any:
        """Makes a call once its turn has come. Waiting costs the sample none of its time."""
        async with self.places:
            self.connect()
            begins_at = max(self.next_at, self.loop.time())
            self.next_at = begins_at + self.apart_s
            await asyncio.sleep(begins_at - self.loop.time())
            return await self.call(index, arguments)

    async def call(self, index: int, arguments: dict[str, Any]) -> Any:
        """The process itself ends what is late, unless something blocks its event loop."""
        self.connect()
        limit_s = self.timeout_s + 2 * self.grace_s
        number = 0
        try:
            number = self.process.send(index, arguments, timeout_s=limit_s)
            self.waiting[number] = self.loop.create_future()
            self.loop.call_soon(self.deliver)  # what came while it was sent
            return await asyncio.wait_for(self.waiting[number], limit_s)
        except WorkerLost as error:
            self.disconnect(f"its process {error}")
            return self.kind.failed(f"its process {error}")
        except TimeoutError:
            self.disconnect(not_ended(limit_s))
            return self.kind.failed(not_ended(limit_s))
        except asyncio.CancelledError:
            if self.process.ready and not self.process.closing:
                self.give_up(number, limit_s)
            raise
        finally:
            self.waiting.pop(number, None)

    def give_up(self, number: int, limit_s: float) -> None:
        """Has the process cancel one call. A request that is sent in part leaves no way on."""
        try:
            self.process.send(None, number, timeout_s=limit_s)
        except WorkerLost as error:
            self.disconnect(f"its process {error}; all async functions share it")
        except TimeoutError:
            self.disconnect(not_ended(limit_s))
        self.loop.call_soon(self.deliver)

    def start_early(self) -> None:
        with contextlib.suppress(OSError):  # the first call tries again and tells
            self.process.start()

    def connect(self) -> None:
        """Waits for the process where it is not there yet. Raises as WorkerProcess.prepare."""
        if self.process.ready:
            return
        self.process.prepare()
        self.loop.add_reader(self.process.pipe, self.read)

    def read(self) -> None:
        try:
            self.process.read()
        except WorkerLost as error:
            self.disconnect(f"its process {error}; all async functions share it")
        self.deliver()

    def deliver(self) -> None:
        """Hands out the replies that were taken in."""
        if not self.process.ready:  # those of one that has ended were handed out
            return
        try:
            self.hand_out()
        except WorkerLost as error:
            self.disconnect(f"its process {error}; all async functions share it")

    def hand_out(self) -> None:
        """Raises WorkerLost for what is no reply."""
        while (answer := self.process.taken()) is not None:
            future = self.waiting.get(answer["number"])
            if future is not None and not future.done():
                future.set_result(self.kind(*answer["fields"]))

    def disconnect(self, reason: str) -> None:
        """Ends the process. What was under way there has failed, but for replies taken in."""
        if self.process.ready:
            with contextlib.suppress(WorkerLost):  # `reason` tells of it
                self.hand_out()
        if self.process.keeper is not None:
            self.loop.remove_reader(self.process.pipe)
            self.process.stop()
        for future in self.waiting.values():
            if not future.done():
                future.set_result(self.kind.failed(reason))

    def close(self) -> None:
        """Cancels what runs, and ends the process."""
        if self.process.ready:
            self.process.closing = True
            with contextlib.suppress(OSError):
                self.process.pipe.shutdown(socket.SHUT_WR)
        else:
            self.process.kill()
        self.loop.call_soon_threadsafe(self.cancel_all)
        self.thread.join(timeout=5)

    def cancel_all(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.call_later(2 * CANCEL_S, self.end)

    def end(self) -> None:
        self.disconnect("was ended with the run")
        self.loop.stop()
