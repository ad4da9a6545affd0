"""Coroutine functions of users: on one event loop in a thread, limited in time and in number."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any

from spmdrl.rewards import worker
from spmdrl.rewards.pool import Function, Kind, Limits
from spmdrl.rewards.worker import Outcome

CANCEL_S = 0.1  # for coroutines to be cancelled in, when all ends
ASYNC_GRACE_S = 5.0  # beyond the time limit, for a coroutine to answer to its cancellation


async def call_async(function: Function, arguments: dict[str, Any], kind: Kind) -> Any:
    """As worker.call, for a coroutine function."""
    try:
        return kind.of(await function(**arguments))
    except GeneratorExit:
        raise
    except BaseException as error:  # noqa: BLE001  a user's code may raise anything
        return kind.failed(worker.reason_of(error))


async def limited(call: Coroutine[Any, Any, Any], timeout_s: float, kind: Kind) -> Any:
    """Its outcome; once it is late it is cancelled, and left behind if it does not heed that."""
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait({task}, timeout=ASYNC_GRACE_S)
        if task.done():
            return kind.failed(f"timed out after {timeout_s:g} s")
        return kind.failed(not_ended(timeout_s + ASYNC_GRACE_S))
    except asyncio.CancelledError:
        task.cancel()  # nobody waits for it any more
        raise


def not_ended(limit_s: float) -> str:
    return (
        f"timed out after {limit_s:g} s: an async function must await and not block, since all "
        "share one event loop, and must let itself be cancelled"
    )


class LoopThread:
    """An event loop in a thread, on which coroutines run, as many and as often as allowed."""

    def __init__(self, config: Limits, ranks: int, kind: Kind = Outcome) -> None:
        self.timeout_s, self.kind = config.timeout_s, kind
        self.places = asyncio.Semaphore(config.max_concurrent // ranks or sys.maxsize)
        self.apart_s = 60 * ranks / config.max_per_minute if config.max_per_minute else 0.0
        self.next_at = 0.0  # of the loop's clock: when another may begin
        self.began: dict[int, float] = {}  # when each that runs did, by time.monotonic()
        self.loop = asyncio.new_event_loop()
        self.stuck = False  # something on it blocks
        self.looked, self.late = time.monotonic(), False
        threading.Thread(target=self.loop.run_forever, name="coroutines", daemon=True).start()

    def submit(self, function: Function, arguments: dict[str, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(self.in_turn(function, arguments), self.loop)

    async def in_turn(self, function: Function, arguments: dict[str, Any]) -> Any:
        """To wait for its turn costs a sample nothing of its time."""
        async with self.places:
            begins_at = max(self.next_at, self.loop.time())
            self.next_at = begins_at + self.apart_s
            await asyncio.sleep(begins_at - self.loop.time())
            call = id(arguments)
            self.began[call] = time.monotonic()
            try:
                called = call_async(function, arguments, self.kind)
                return await limited(called, self.timeout_s, self.kind)
            finally:
                del self.began[call]

    def outcome(self, future: Future[Any]) -> Any:
        """The loop itself ends what is late, unless a coroutine blocks it."""
        limit_s = self.limit_s
        while not self.stuck and not future.cancelled():
            try:
                return future.result(max(0.0, limit_s - self.longest_s()))
            except TimeoutError:
                # others may have begun since, for which this one had to wait
                self.stuck = self.longest_s() >= limit_s
        with contextlib.suppress(TimeoutError, CancelledError):
            return future.result(0)
        future.cancel()
        return self.kind.failed(not_ended(limit_s))

    @property
    def limit_s(self) -> float:
        """After which a coroutine cannot have been cancelled."""
        return self.timeout_s + 2 * ASYNC_GRACE_S

    def is_late(self) -> bool:
        """Whether something blocks the loop, as of half a second ago at most."""
        now = time.monotonic()
        if now - self.looked > 0.5:
            self.looked, self.late = now, self.longest_s() >= self.limit_s
        return self.late

    def longest_s(self) -> float:
        """For how long the oldest of those that run has."""
        began = min(list(self.began.values()), default=None)
        return 0.0 if began is None else time.monotonic() - began

    def close(self) -> None:
        """Cancels what runs, and ends the loop."""
        self.loop.call_soon_threadsafe(self.cancel_all)

    def cancel_all(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.call_later(CANCEL_S, self.loop.stop)
