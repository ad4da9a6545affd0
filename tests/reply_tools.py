"""Tools of tests, in a module that worker processes import at once."""

import asyncio
import functools
import os
import time
from collections.abc import AsyncIterator, Iterator


def multiply(a: int, b: int) -> int:
    """Multiplies.

    Args:
        a: one
        b: another
    """
    return a * b


def secret(extra_info: dict) -> dict:
    """Tells what only the data knows.

    Args:
        extra_info: of the prompt
    """
    return {"it is": extra_info["secret"]}


async def slowly(text: str) -> str:
    """Says it again.

    Args:
        text: what is to be said
    """
    return text * 2


def bad(kind: str) -> str:
    """Fails.

    Args:
        kind: how
    """
    if kind == "raise":
        raise LookupError("no such\nthing")
    if kind == "die":
        os._exit(3)
    if kind == "hang":
        time.sleep(100)
    if kind == "bytes":
        return "42 \u20ac\n".encode() + b"\xff"  # type: ignore[return-value]
    return object()  # type: ignore[return-value]


def in_parts() -> Iterator[str]:
    """Says it in parts."""
    yield "a"


async def in_parts_later(text: str) -> AsyncIterator[str]:
    """Says it in parts.

    Args:
        text: what is to be said
    """
    yield text


def untyped(a):
    """Does it.

    Args:
        a: one
    """


async def sleep_there(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "slept"


async def tell_there(file: str) -> None:
    with open(file, "w") as told:
        told.write("runs")
    try:
        await asyncio.sleep(1000)
    except asyncio.CancelledError:
        with open(file, "w") as told:
            told.write("cancelled")
        raise


async def block(seconds: float) -> None:
    time.sleep(seconds)


def by_place(a: int, /) -> int:
    """Does it.

    Args:
        a: one
    """
    return a


def forward(a: "NoSuchClass") -> int:  # type: ignore[name-defined]  # noqa: F821
    """Does it.

    Args:
        a: one
    """
    return a


def numbers() -> list:
    """Of numpy."""
    import numpy as np

    return [np.float32(1.5), np.arange(3)]


async def changes(extra_info: dict, fails: bool = False) -> int:
    """What it is given.

    Args:
        extra_info: of the prompt
        fails: or ends
    """
    if fails:
        raise KeyboardInterrupt
    extra_info["secret"] += 1
    return extra_info["secret"]


class Purse:
    """What one sample owns."""

    def __init__(self, extra_info: dict, sample_index: int = 0) -> None:
        self.coins, self.log = extra_info["secret"], extra_info.get("log")
        self.name = f"purse {sample_index}"

    def earn(self, coins: int) -> str:
        """Puts coins in.

        Args:
            coins: how many
        """
        if coins < 0:
            self.coins = 0  # half done
            raise ValueError("no debts")
        if coins == 666:
            time.sleep(100)
        self.coins += coins
        return self._count()

    def process(self) -> int:
        """Says where it lives."""
        return os.getpid()

    def close(self) -> None:
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{self.name} had {self.coins}\n")

    def _count(self) -> str:
        return f"{self.name}: {self.coins}"


class Stall:
    """Sells; knows nothing of purses."""

    def __init__(self) -> None:
        self.sold = 0

    def buy(self) -> int:
        """Buys one.

        Returns:
            how many were sold
        """
        self.sold += 1
        return self.sold


class Helpers:
    @staticmethod
    def help() -> str:
        """Helps."""
        return "help"


class Waits:
    async def wait(self) -> str:
        """Waits."""
        return "waited"


class Silent:
    def _whisper(self) -> str:
        return ""


class Asks:
    def look(self, extra_info: dict) -> str:
        """Looks.

        Args:
            extra_info: of the prompt
        """
        return ""


class Alias:
    def _inc(self) -> str:
        """Adds."""
        return ""

    inc = _inc


class Cached:
    @functools.cache  # noqa: B019
    def look(self) -> str:
        """Looks."""
        return ""


class Board:
    """Changes what it is given."""

    def __init__(self, extra_info: dict) -> None:
        self.cells = extra_info["cells"]

    def mark(self) -> int:
        """Marks a cell."""
        time.sleep(0.6)
        self.cells.append(1)
        return len(self.cells)


class Needs:
    def __init__(self, weather: str) -> None: ...

    def look(self) -> str:
        """Looks."""
        return ""
