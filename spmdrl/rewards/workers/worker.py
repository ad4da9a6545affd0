"""The process that runs functions of users, until its connection to the trainer ends.

Plain functions run one call at a time, coroutine functions all at once (worker_loop.py).
Started by path (`python worker.py FD PARENT_PID`, by keeper.py) and not by multiprocessing, whose
children import the trainer's main module, and torch with it. Uses the standard library, cloudpickle
and spmdrl.distributed.output only.

Both directions carry frames: token, length of the message, message, token. Requests are pickled.
Replies are JSON, since bytes that a user's function wrote there must not be unpickled; each has the
number of its request and the pid of its process, since a function may fork and return in both.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import functools
import importlib
import inspect
import io
import json
import math
import os
import pickle
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from fcntl import F_DUPFD_CLOEXEC, fcntl
from typing import Any, NamedTuple, NoReturn

PR_SET_PDEATHSIG = 1
MAX_REASON_CHARS = 4000
MAX_PRED_CHARS = 1000
TOKEN_BYTES = 16
LENGTH_BYTES = 8
SPARE_FDS = 64  # descriptors above that of the connection
MOST_FDS = 1 << 14  # below which it lies, however many there may be
# how files of images begin, and their names in a data: URI; WebP's is within a RIFF
KINDS_OF_IMAGES = (
    (b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"),
    (b"II*\x00", "tiff"), (b"MM\x00*", "tiff"), (b"BM", "bmp"),
)  # fmt: skip
IMAGE_HEADS = tuple(head for head, kind in KINDS_OF_IMAGES if kind != "bmp")
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")  # of Pillow, that a PNG keeps
REWARD_FUNCTION = "the reward function"  # how the reason of a bad return begins
LARGEST = 1e30  # of a reward: what is larger overflows float32 on its way into a loss


class RewardResult(NamedTuple):
    """The result of one call: a reward, or the reason why there is none."""

    reward: float | None  # those of turns included
    info: dict[str, float]
    invalid: str | None
    pred: str | None = None  # what the function read as the answer
    turns: list[float] | None = None  # None: it said nothing of turns

    @classmethod
    def failed(cls, reason: str) -> RewardResult:
        return cls(None, {}, reason)

    @classmethod
    def of(cls, result: Any) -> RewardResult:
        return to_outcome(result)


class Reply(NamedTuple):
    """A reply is what a tool or an environment returned, as plain data; or why it did not."""

    value: Any
    error: str | None = None

    @classmethod
    def failed(cls, reason: str) -> Reply:
        return cls(None, reason)

    @classmethod
    def of(cls, result: Any) -> Reply:
        if inspect.iscoroutine(result):
            result.close()
            return cls(None, "returned a coroutine; declare it with `async def`")
        if inspect.isgenerator(result) or inspect.isasyncgen(result):
            return cls(None, "returned a generator; use `return` in place of `yield`")
        try:
            return cls(plain(result))
        except (ValueError, TypeError, RecursionError) as error:
            return cls(None, f"returned what is no plain data: {error}")


def as_plain(value: Any) -> Any:
    """Numbers and lists of numpy and torch, images of Pillow and encoded ones as a part of a
    message, other bytes as the text that they are in UTF-8, text of anything else.
    """
    encoded = encoded_image(value)
    if encoded is not None:
        return image_part(encoded)
    if isinstance(value, bytes | bytearray):  # what a subprocess has written, say
        return value.decode(errors="replace")
    return value.tolist() if hasattr(value, "tolist") else str(value)


def encoded_image(value: Any) -> bytes | None:
    """Returns the file of an image: of Pillow's a PNG, which loses nothing; of bytes that begin as
    such a file does, these. None for anything else.
    """
    if isinstance(value, bytes | bytearray):
        head = bytes(value[:12])
        is_webp = head[:4] == b"RIFF" and head[8:] == b"WEBP"
        is_bmp = head[:2] == b"BM" and head[6:10] == bytes(4)  # a word may begin with these letters
        return bytes(value) if is_webp or is_bmp or head.startswith(IMAGE_HEADS) else None
    pillow = sys.modules.get("PIL.Image")  # there is no image of Pillow before it is imported
    if pillow is None or not isinstance(value, pillow.Image):
        return None
    file = io.BytesIO()
    (value if value.mode in PNG_MODES else value.convert("RGB")).save(file, "PNG")
    return file.getvalue()


def image_part(encoded: bytes) -> dict[str, str]:
    """Returns an image as a part of a message, with a data: URI."""
    kind = next((name for head, name in KINDS_OF_IMAGES if encoded.startswith(head)), "webp")
    uri = f"data:image/{kind};base64,{base64.b64encode(encoded).decode()}"
    return {"type": "image", "image": uri}


def plain(value: Any) -> Any:
    """Returns a value as JSON has it, other objects as text. Halves of characters, which UTF-8 and
    tokenizers do not know, become "?".
    """
    text = json.dumps(value, default=as_plain, ensure_ascii=False)
    return json.loads(text.encode(errors="replace").decode())


KINDS: dict[str, type[RewardResult] | type[Reply]] = {
    kind.__name__: kind for kind in (RewardResult, Reply)
}


def call(
    function: Callable[..., Any], arguments: dict[str, Any],
    kind: type[RewardResult] | type[Reply] = RewardResult,
) -> RewardResult | Reply:  # fmt: skip
    try:
        return kind.of(function(**arguments))
    except BaseException as error:  # noqa: BLE001  a user's code may raise anything
        return kind.failed(reason_of(error))


def reason_of(error: BaseException) -> str:
    """The traceback from the reward function on, without the frame that called it."""
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, frames)).strip()
    return text if len(text) <= MAX_REASON_CHARS else f"... {text[-MAX_REASON_CHARS:]}"


def cause_of(reason: str) -> str:
    """Returns what was raised, of a traceback: the first line behind its frames, since a message
    may go on with advice. Of any other reason the last line.
    """
    lines = reason.strip().splitlines() or [""]
    frames = [i for i, line in enumerate(lines) if line.startswith('  File "')]
    behind = lines[frames[-1] :] if frames else []
    return next((line for line in behind if not line.startswith(" ")), lines[-1])


def to_outcome(result: Any) -> RewardResult:
    """A number, or a mapping with "score", or with a list of "turns", whose sum is added to the
    score. Of its other entries the numbers are kept for the log.

    Text beside the score is legal and not kept, but for verl's "pred", the answer as the function
    read it; a number there that is not finite makes the sample invalid, since it would spoil every
    mean it enters.
    """
    info: dict[str, float] = {}
    pred: str | None = None
    turns: list[float] | None = None
    score = result
    if isinstance(result, dict):
        given = result.get("turns")
        has_turns = isinstance(given, list | tuple)
        if "score" not in result and not has_turns:
            keys = ", ".join(map(str, result)) or "nothing"
            return not_valid(f"returned a dict without the key 'score' (it has {keys})")
        score, pred = result.get("score", 0.0), to_text(result.get("pred"))
        if has_turns:
            turns = to_numbers(given)
            if turns is None:
                return not_turns(f"returned {shorten(repr(given))} as its turns")
        for key, value in result.items():
            number = to_number(value)
            if key != "score" and number is not None:
                info[str(key)] = number
    reward = to_number(score)
    if reward is None:
        if inspect.iscoroutine(score):
            score.close()
            return not_valid("returned a coroutine; declare it with `async def`")
        kind = "" if score is None else f"{type(score).__name__} "
        return not_valid(f"returned {kind}{shorten(repr(score))}")
    for key, number in [("score", reward), *info.items()]:
        if not abs(number) < LARGEST:  # nan too
            return not_valid(f"returned {number} as its {key}")
    if turns is None:
        return RewardResult(reward, info, None, pred)
    for i, number in enumerate(turns, start=1):
        if not abs(number) < LARGEST:
            return not_turns(f"returned {number} for turn {i} of {len(turns)}")
    total = math.fsum([reward, *turns])
    if not abs(total) < LARGEST:
        return not_turns(f"returned {len(turns)} turns that make its reward {total}")
    return RewardResult(total, info, None, pred, turns)


def to_text(value: Any) -> str | None:
    """Text or a number as text that fits into UTF-8; None for anything else."""
    number = to_number(value)
    text = value if isinstance(value, str) else None if number is None else str(number)
    return text and str(text)[:MAX_PRED_CHARS].encode(errors="replace").decode()


def not_valid(what: str) -> RewardResult:
    return RewardResult.failed(
        f"{REWARD_FUNCTION} {what}; expected a finite number, or a dict with a finite number "
        "under 'score'; with rewards.per_turn a dict with a list of them under 'turns'"
    )


def not_turns(what: str) -> RewardResult:
    return RewardResult.failed(
        f"{REWARD_FUNCTION} {what}; expected a list of finite numbers, one for each turn of the "
        "policy's, with rewards.per_turn=True, and no such entry without"
    )


def to_number(value: Any) -> float | None:
    """Python numbers, and scalars of numpy and torch; None for anything else."""
    if isinstance(value, bool | int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return to_number(value.item())
    return None


def to_numbers(values: Any) -> list[float] | None:
    """None where any is not what to_number knows."""
    numbers: list[float] = []
    for each in values:
        number = to_number(each)
        if number is None:
            return None
        numbers.append(number)
    return numbers


def shorten(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


class NoFrame(Exception):
    """Raised where what was received is none of ours: a user's code wrote to the descriptor."""


class Frames:
    """Messages in a stream of bytes."""

    def __init__(self, token: bytes) -> None:
        self.token = token
        self.received = bytearray()

    def frame(self, message: bytes) -> bytes:
        return self.token + len(message).to_bytes(LENGTH_BYTES, "big") + message + self.token

    def take(self) -> bytes | None:
        """The next message; None: it is not complete. Raises NoFrame."""
        head = bytes(self.received[: TOKEN_BYTES + LENGTH_BYTES])
        if not self.token.startswith(head[:TOKEN_BYTES]):
            raise NoFrame(self.quoted())
        start = TOKEN_BYTES + LENGTH_BYTES
        end = start + int.from_bytes(head[TOKEN_BYTES:], "big")
        if len(head) < start or len(self.received) < end + TOKEN_BYTES:
            return None
        message = bytes(self.received[start:end])
        if self.received[end : end + TOKEN_BYTES] != self.token:
            raise NoFrame(self.quoted())
        del self.received[: end + TOKEN_BYTES]
        return message

    def quoted(self) -> str:
        return shorten(repr(bytes(self.received[:80]).replace(self.token, b"")))


class WorkerConnection:
    """The worker's end of the connection.

    Its descriptor has a high number, which loops over small ones miss, and is closed in forks.
    """

    def __init__(self, fd: int) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MOST_FDS if limit == resource.RLIM_INFINITY else min(limit, MOST_FDS)
        high = fcntl(fd, F_DUPFD_CLOEXEC, max(3, most - SPARE_FDS))
        os.close(fd)
        self.socket = socket.socket(fileno=high)
        self.pid, self.inode = os.getpid(), os.fstat(high).st_ino
        os.register_at_fork(after_in_child=self.socket.close)
        self.frames = Frames(b"")
        token = bytearray()
        while len(token) < TOKEN_BYTES:
            token += self.read(TOKEN_BYTES - len(token))
        self.frames.token = bytes(token)

    def read(self, most: int) -> bytes:
        """Raises EOFError where the trainer has gone."""
        if not (data := self.socket.recv(most)):
            raise EOFError
        return data

    def receive(self) -> Any:
        """Waits for a request. Raises EOFError, or ConnectionError, where the trainer has gone."""
        while (message := self.frames.take()) is None:
            self.frames.received += self.read(1 << 20)
        return pickle.loads(message)

    def send(self, reply: dict[str, Any]) -> None:
        """Sends a reply; in a fork of the worker, which came back from a user's function, this ends
        the fork.
        """
        if os.getpid() != self.pid:
            end_fork()
        message = json.dumps({**reply, "pid": self.pid}).encode()
        try:
            ours = os.fstat(self.socket.fileno()).st_ino == self.inode
        except OSError:
            ours = False
        if not ours:  # closed, or another file by now
            wait_to_be_ended()
        self.socket.sendall(self.frames.frame(message))


def wait_to_be_ended() -> NoReturn:
    """Once a function has closed the connection: the trainer sees its end, and ends the process."""
    while True:
        time.sleep(3600)


def end_fork() -> NoReturn:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def die_with(parent: int) -> None:
    """Has the kernel end this process with its keeper, however the keeper ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the line above
        sys.exit(1)


def with_cache(function: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    """Returns a function with functools.lru_cache around it, as a user's file has it."""
    return functools.lru_cache(**parameters)(function)


def load(setup: dict[str, Any]) -> list[Callable[..., Any]]:
    sys.path[:] = setup["sys_path"]
    output = importlib.import_module("spmdrl.distributed.output")
    output.keep_output()  # a print must not make a sample invalid
    for module in setup["imports"]:
        importlib.import_module(module)
    return pickle.loads(setup["functions"])


def main(fd: int, parent: int) -> None:
    die_with(parent)
    # meant for the trainer, which may want to end its step; children take defaults
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    with contextlib.suppress(EOFError, ConnectionError):  # the trainer has gone: nobody to tell
        serve(WorkerConnection(fd))


def serve(line: WorkerConnection) -> None:
    """Loads the functions, then answers calls. What user code raises is an answer too."""
    setup = line.receive()
    try:
        functions = load(setup)
    except BaseException as error:  # noqa: BLE001  a user's module may raise anything
        line.send({"failed": reason_of(error)})
        return
    line.send({"failed": None})
    if setup["loop"] is not None:
        # importable by now, from the trainer's sys.path
        worker_loop = importlib.import_module("spmdrl.rewards.workers.worker_loop")
        worker_loop.serve(line, functions, **setup["loop"])
        return
    kind = KINDS[setup["kind"]]
    while True:
        number, index, arguments = line.receive()
        outcome = call(functions[index], arguments, kind)
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that it left is not for the next call
        line.send({"number": number, "fields": list(outcome)})


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
