"""Coroutine functions of users in a worker process: all on one event loop, each limited in time.

Imported by worker.py; uses the standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import selectors
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from spmdrl.rewards.workers import worker

CANCEL_S = 0.1  # for coroutines to be cancelled in, when all ends

Function = Callable[..., Any]
Kind = type[worker.RewardResult] | type[worker.Reply]


async def call_async(function: Function, arguments: dict[str, Any], kind: Kind) -> Any:
    """Does what worker.call does, for a coroutine function."""
    try:
        return kind.of(await function(**arguments))
    except GeneratorExit:
        raise
    except BaseException as error:  # noqa: BLE001  a user's code may raise anything
        return kind.failed(worker.reason_of(error))


async def limited(
    call: Coroutine[Any, Any, Any], timeout_s: float, grace_s: float, kind: Kind
) -> Any:
    """Its outcome; once it is late it is cancelled, and left behind if it does not heed that."""
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait({task}, timeout=grace_s)
        if task.done():
            return kind.failed(f"timed out after {timeout_s:g} s")
        return kind.failed(not_ended(timeout_s + grace_s))
    except asyncio.CancelledError:
        task.cancel()  # nobody waits for it any more
        raise


def not_ended(limit_s: float) -> str:
    return (
        f"timed out after {limit_s:g} s: an async function must await and not block, since all "
        "share one event loop, and must let itself be cancelled"
    )


class OneProcess(selectors.DefaultSelector):
    """Ends a fork of the worker once it comes back to the event loop, which is not the fork's."""

    def __init__(self) -> None:
        super().__init__()
        self.pid = os.getpid()

    def select(self, timeout: float | None = None) -> Any:
        if os.getpid() != self.pid:
            worker.end_fork()
        try:
            return super().select(timeout)
        except OSError:  # a function closed its descriptor, and the connection's with it
            worker.wait_to_be_ended()


class Server:
    """Answers calls as they end, by number. What one function does to the event loop, or to the
    tasks of others, must not hold up the rest."""

    def __init__(
        self, line: worker.WorkerConnection, functions: list[Function], kind: Kind,
        timeout_s: float, grace_s: float,
    ) -> None:  # fmt: skip
        self.line, self.functions, self.kind = line, functions, kind
        self.timeout_s, self.grace_s = timeout_s, grace_s
        self.loop = asyncio.SelectorEventLoop(OneProcess())
        self.ended: asyncio.Future[None] = self.loop.create_future()
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.given_up: set[int] = set()
        self.loop.add_reader(line.socket, self.read)

    def read(self) -> None:
        try:
            data = self.line.socket.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data and not self.ended.done():
            self.loop.remove_reader(self.line.socket)
            self.ended.set_result(None)
        self.line.frames.received += data
        while (message := self.line.frames.take()) is not None:
            self.begin(*pickle.loads(message))

    def begin(self, number: int, index: int | None, argument: Any) -> None:
        """index None: the call with the number `argument` is given up."""
        if index is None:
            if argument in self.tasks:
                self.given_up.add(argument)
                self.tasks[argument].cancel()
            return
        call = call_async(self.functions[index], argument, self.kind)
        self.tasks[number] = self.loop.create_task(self.answer(number, call))

    async def answer(self, number: int, call: Coroutine[Any, Any, Any]) -> None:
        try:
            outcome = await limited(call, self.timeout_s, self.grace_s, self.kind)
        except asyncio.CancelledError:
            if number in self.given_up or self.ended.done():
                raise
            outcome = self.kind.failed("was cancelled by another function on its event loop")
        finally:
            del self.tasks[number]
            self.given_up.discard(number)
        self.line.send({"number": number, "fields": list(outcome)})

    async def cancel_all(self) -> None:
        for task in list(self.tasks.values()):
            task.cancel()
        await asyncio.sleep(CANCEL_S if self.tasks else 0)

    def run(self, until: Any) -> None:
        """A task of a user's own may raise what ends an event loop, or stop it: it goes on."""
        future = asyncio.ensure_future(until, loop=self.loop)
        while not future.done():
            with contextlib.suppress(RuntimeError, SystemExit, KeyboardInterrupt):
                self.loop.run_until_complete(future)


def serve(
    line: worker.WorkerConnection,
    functions: list[Function],
    kind: str,
    timeout_s: float,
    grace_s: float,
) -> None:
    """Serves until the trainer shuts the connection down; what runs then is cancelled.

    grace_s: beyond the time limit, for a coroutine to answer to its cancellation.
    """
    server = Server(line, functions, worker.KINDS[kind], timeout_s, grace_s)
    server.run(server.ended)
    server.run(server.cancel_all())
