"""Calls on their way from the endpoint's thread to the engine's, and answers on their way back."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

from spmdrl.rollout.base import Completion
from spmdrl.rollout.engine_calls import NO_CALLS, EngineCall, EngineCalls


class CallQueue:
    """The calls that are under way. `ask` belongs to the event loop of the endpoint, the rest to
    the thread of the engine.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_calls = 0
        self.new: dict[int, EngineCall] = {}
        self.given_up: list[int] = []
        self.inside: dict[int, EngineCall] = {}  # the engine
        self.awaited: dict[int, asyncio.Future[Completion]] = {}

    async def ask(self, call: EngineCall) -> Completion:
        """Waits until the engine has answered. A call that is cancelled is given up."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        with self.lock:
            number = self.num_calls
            self.num_calls += 1
            self.new[number], self.awaited[number] = call, future
        try:
            return await future
        finally:
            with self.lock:
                self.awaited.pop(number, None)
                self.new.pop(number, None)
                if number in self.inside:
                    del self.inside[number]
                    self.given_up.append(number)

    def __bool__(self) -> bool:
        return bool(self.new or self.given_up)

    def take(self) -> EngineCalls:
        """Returns what the engine is to begin and to give up."""
        if not self:
            return NO_CALLS
        with self.lock:
            found = EngineCalls(self.new, tuple(self.given_up))
            self.inside |= self.new
            self.new, self.given_up = {}, []
        return found

    def end(self, number: int, answer: Completion) -> None:
        """Gives an answer to who waits for it, if anybody still does."""
        with self.lock:
            self.inside.pop(number, None)
            self.given_up = [each for each in self.given_up if each != number]
            future = self.awaited.get(number)
        if future is not None:
            with suppress(RuntimeError):  # the endpoint has ended
                future.get_loop().call_soon_threadsafe(settle, future, answer)

    def pause(self, number: int, answer: Completion) -> None:
        """Keeps a call with what there is of its answer: the engine goes on with it later."""
        with self.lock:
            call = self.inside.pop(number, None)
            if call is not None:
                self.new[number] = call.continued(answer)
            self.given_up = [each for each in self.given_up if each != number]


def settle(future: asyncio.Future[Completion], answer: Completion) -> None:
    if not future.done():
        future.set_result(answer)
