"""The program inside the sandbox: runs the model's code once per test, each in a forked process.

`sandbox.py` starts it and sends its text along, that of `values.py` first, since no file of
ours is visible in there. It uses the standard library only, and imports little of it, since that is
most of what a call costs. What it reports is believed for what it is, the output of the model's
code; whether an output is right is decided outside, where the right one is known.

A test is forked off before its text is read, so the model's code does not find it in its memory.
Three kinds: "run" has text for stdin; "call" asks for a function's value; "assert" has a judge, a
third process that runs the test's statements and asks the model's process for values. The judge
never runs the model's code, which therefore cannot change what `assert` or `==` mean. A verdict is
the judge's only with the secret that it got, after the model's process was there. Tests that
evaluate text have a spare process, which is older than the secret and the text of the test too.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import time

TYPE_CHECKING = False  # importing typing would cost as much as the rest of the start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn
if __name__ != "__main__":  # inside, what is imported here stands above as part of one program
    from spmdrl.rewards.sandbox.judge import judge
    from spmdrl.rewards.sandbox.program import ASK, REPLY, Program, serve_value
    from spmdrl.rewards.sandbox.values import (
        OUT_OF_DISK,
        OUT_OF_MEMORY,
        OUT_OF_PROCESSES,
        code_of,
        frame,
        read_frame,
        write_all,
    )
    from spmdrl.rewards.sandbox.weak import die_with, harden

STATUSES = ("ok", "error", "time", "cpu", "memory", "output", "processes", "disk", "killed",
            "unjudged")  # fmt: skip
MAX_FILES = 64  # open at once
DRAIN_S = 1.0  # for what is still in the pipes when nobody is left who writes


# ---- the model's process


def run_code(code: str, kind: str) -> int:
    """Runs `code` as a main program or, where it is then asked for values, as a module, and
    answers; returns the exit code."""
    name = "__main__" if kind == "run" else "solution"
    main = type(sys)(name)
    vars(main).update(__builtins__=__builtins__, __file__="main.py")
    sys.modules[name] = sys.modules["__main__"] = main
    sys.argv[:] = ["main.py"]
    try:
        add_site_builtins()
        load(code, main, kind)
        if kind == "assert":
            sys.set_int_max_str_digits(0)
            Program(main.__dict__, ASK, REPLY).serve()
        elif kind == "call":
            serve_value(main.__dict__)
        status = 0
    except SystemExit as error:
        status = exit_code(error.code)
    except BaseException as error:  # noqa: BLE001  a program may raise anything
        status = code_of(error)
        show(error)
    return at_exit(status)


def add_site_builtins() -> None:
    """Adds the builtins that Python's module `site` makes, which is not imported in here."""
    import _sitebuiltins
    import builtins

    vars(builtins).update(
        exit=_sitebuiltins.Quitter("exit", "Ctrl-D"), quit=_sitebuiltins.Quitter("quit", "Ctrl-D"),
        help=_sitebuiltins._Helper(),
    )  # fmt: skip


def load(code: str, main: Any, kind: str) -> None:
    """Runs the program's text. A module that ends with sys.exit() has its names all the same."""
    try:
        exec(compile(code, "main.py", "exec", dont_inherit=True), main.__dict__)
    except SystemExit:
        if kind == "run":
            raise


def show(error: BaseException) -> None:
    """The traceback without our frames at its start. The program may have a hook of its own."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename.startswith("sandbox_"):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def exit_code(value: Any) -> int:
    if value is None or isinstance(value, int):
        return (value or 0) & 255
    print(value, file=sys.stderr)
    return 1


def at_exit(status: int) -> int:
    """Does what the interpreter does at its end, as far as a program can see it."""
    import atexit

    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):  # closed or replaced by the program
        status = status or 1
    return status


def child(
    code: str, kind: str, limits: dict[str, Any], fds: list[int],
    leave: Callable[[int], NoReturn] = os._exit,
) -> NoReturn:  # fmt: skip
    """Never returns. fds: what becomes 0, 1, 2 and, to be asked, 3 and 4. `leave` is taken before
    the program can replace it."""
    status = 1
    try:
        high = [os.dup2(fd, 32 + i) for i, fd in enumerate(fds)]
        for i, fd in enumerate(high):
            os.dup2(fd, i, inheritable=i < 3)
        os.closerange(len(fds), MAX_FILES)
        reset_signals()
        confine(limits)
        status = run_code(code, kind)
    finally:
        leave(status)


def confine(limits: dict[str, Any]) -> None:
    """Sets the limits that hold for a test's processes and not for the one that reports."""
    for what, name in ((resource.RLIMIT_CPU, "cpu_s"), (resource.RLIMIT_AS, "memory")):
        resource.setrlimit(what, (limits[name], limits[name]))
    if limits["weak"]:
        harden(limits["weak"], limits["parent"], limits["packages"])


def reset_signals() -> None:
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def judge_process(
    test: bytes, secret: bytes, limits: dict[str, Any], fds: list[int], spare: int
) -> NoReturn:
    """Never returns. fds: what becomes 0, 1, 2, and those to ask, to be answered, and for the
    verdict. spare: a socket, or below 0."""
    status = 1
    try:
        high = [os.dup2(fd, 32 + i, inheritable=False) for i, fd in enumerate(fds)]
        spare = os.dup2(spare, 40, inheritable=False) if spare >= 0 else spare
        for i, fd in enumerate(high[:3]):
            os.dup2(fd, i)
        os.closerange(3, 35)
        reset_signals()
        confine(limits)
        status = judge(test, secret, high[3], high[4], spare, high[5])
    except BaseException as error:  # noqa: BLE001  a test may raise anything
        show(error)
    finally:
        os._exit(status)


def spare_process(control: Any, limits: dict[str, Any]) -> NoReturn:
    """Never returns. For each byte it hands out one end of a conversation with a new process."""
    import _socket

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    limits = {**limits, "parent": os.getpid()}
    null = os.open("/dev/null", os.O_RDWR)
    try:
        for fd in range(3):
            os.dup2(null, fd)
        control_fd = os.dup2(control.fileno(), 32)
        os.closerange(3, 32)
        control = _socket.socket(fileno=control_fd)
        while control.recv(1):
            ours, theirs = _socket.socketpair()
            if os.fork() == 0:
                serve_text(theirs.fileno(), limits)
            right = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, ours.fileno().to_bytes(4, "little"))
            control.sendmsg([b"!"], [right])
            ours.close()
            theirs.close()
    finally:
        os._exit(0)


def serve_text(fd: int, limits: dict[str, Any]) -> NoReturn:
    """Never returns. Has one text run, and answers questions about what that has made."""
    try:
        fd = os.dup2(fd, 33)
        os.closerange(3, 33)
        os.closerange(34, MAX_FILES)
        reset_signals()
        confine(limits)
        sys.set_int_max_str_digits(0)
        Program({}, fd, fd).serve()
    finally:
        os._exit(0)


# ---- the process that starts, limits and reports


def one_test(head: dict[str, Any], limits: dict[str, Any]) -> bytes:
    """A report on one test, as bytes."""
    kind = head["kind"]
    feed, out, err, reply = [os.pipe() for _ in range(4)]
    null = os.open("/dev/null", os.O_RDONLY)
    fds = [feed[0], out[1], err[1]] if kind == "run" else [null, out[1], err[1], feed[0], reply[1]]
    began = time.monotonic()
    spare, control = start_spare(limits) if head["spare"] else ([], -1)
    model = os.fork()
    if model == 0:
        child(head["code"], kind, limits, fds)
    test = read_frame(0)  # not earlier: see above
    pids, secret, third = [model], b"", reply[0]
    feeding: int | None = feed[1]
    if kind == "assert":
        secret, verdict = os.urandom(16), os.pipe()
        pids += [*spare, os.fork()]
        if pids[-1] == 0:
            fds = [null, err[1], err[1], feed[1], reply[0], verdict[1]]
            judge_process(test, secret, limits, fds, control)
        for fd in (feed[1], reply[0], verdict[1], *([control] if spare else [])):
            os.close(fd)
        test, feeding, third = b"", None, verdict[0]
    reading = [out[0], err[0], *([third] if kind != "run" else [])]
    unused = [reply[0]] if kind == "run" else []
    for fd in (feed[0], out[1], err[1], reply[1], null, *unused):
        os.close(fd)
    streams, status, ended = watch(pids, feeding, test, reading, limits)
    seconds = time.monotonic() - began
    status, code = conclude(status, ended, limits)
    parts = [bytes(s[: limits["output"]]) for s in streams]
    if kind == "assert":
        status, parts[2] = believe(status, parts[2], secret)
    return report(status, code, seconds, parts)


def start_spare(limits: dict[str, Any]) -> tuple[list[int], int]:
    """A process for text that a test evaluates, and a descriptor to ask it."""
    import _socket

    ours, theirs = _socket.socketpair()
    pid = os.fork()
    if pid == 0:
        spare_process(theirs, limits)
    theirs.close()
    return [pid], ours.detach()


def believe(status: str, said: bytes, secret: bytes) -> tuple[str, bytes]:
    """The status of a test with a judge, whose word is one that has the secret. Returns with it
    why there is none, as a frame."""
    word = said[4 + len(secret) :] if said[4 : 4 + len(secret)] == secret else b""
    if word[:4] == b"none":
        return "unjudged", frame(word[4:])
    if status == "ok" and word != b"pass":
        status = "error"
    return status, b""


def watch(
    pids: list[int], feed_fd: int | None, feed: bytes, reading: list[int], limits: dict[str, Any]
) -> tuple[list[bytearray], str | None, list[Any]]:
    """Feeds and reads until the last of `pids` has ended or a limit is hit; then ends all.

    Returns what was read per descriptor, the limit or None, and wait4's answers.
    """
    streams = {fd: bytearray() for fd in reading}
    pidfd = os.pidfd_open(pids[-1])
    polled = select.poll()
    for fd in [*reading, pidfd]:
        polled.register(fd, select.POLLIN)
    for fd in reading:
        os.set_blocking(fd, False)
    if feed_fd is not None:
        os.set_blocking(feed_fd, False)
        polled.register(feed_fd, select.POLLOUT)
    view, status, running = memoryview(feed), None, True
    deadline = time.monotonic() + limits["wall_s"]
    while status is None and (running or reading):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            status = "time" if running else None
            break
        for fd, _ in polled.poll(left_s * 1000):
            if fd == feed_fd:
                view = view[put(fd, view) :]
                if not view:
                    polled.unregister(fd)
                    os.close(fd)
                    feed_fd = None
            elif fd == pidfd:
                running = False
                polled.unregister(fd)
                sweep(pids, limits)
                deadline = time.monotonic() + DRAIN_S
            elif not take(fd, streams[fd], limits["output"]):
                polled.unregister(fd)
                reading.remove(fd)
            elif len(streams[fd]) > limits["output"]:
                status = "output"
    sweep(pids, limits)
    for fd in [*streams, pidfd, *([] if feed_fd is None else [feed_fd])]:
        os.close(fd)
    return list(streams.values()), status, [os.wait4(pid, 0)[1:] for pid in pids]


def put(fd: int, view: memoryview) -> int:
    """The number of bytes that went; all of them where nobody reads any more."""
    try:
        return os.write(fd, view[:65536])
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return len(view)


def take(fd: int, into: bytearray, most: int) -> bool:
    """False at the end of the stream. Takes one byte more than `most`, which tells."""
    try:
        part = os.read(fd, min(65536, most + 1 - len(into)))
    except BlockingIOError:
        return True
    into += part
    return bool(part)


def sweep(pids: list[int], limits: dict[str, Any]) -> None:
    """Ends the test's processes: all but this one, where there is a process namespace."""
    if limits["weak"]:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # none is waited for yet, so the numbers are theirs
        return
    if os.getpid() != 2:  # kill(-1) would end every process of this user on the machine
        raise RuntimeError("kill(-1) outside of a process namespace")
    try:  # noqa: SIM105  contextlib is slow to import
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass


def conclude(status: str | None, ended: list[Any], limits: dict[str, Any]) -> tuple[str, int]:
    """The status, and the exit code or minus the signal, of the model's process and the judge."""
    codes = [os.waitstatus_to_exitcode(code) for code, _ in ended]
    if status:
        return status, codes[0]
    used = max(usage.ru_utime + usage.ru_stime for _, usage in ended)
    code = codes[-1]
    if len(codes) > 1 and code and codes[0] not in (0, -signal.SIGKILL):
        code = codes[0]  # the judge failed because the model's process had ended
    named = {
        0: "ok", OUT_OF_MEMORY: "memory", OUT_OF_PROCESSES: "processes", OUT_OF_DISK: "disk",
        -signal.SIGXFSZ: "disk",
    }  # fmt: skip
    if code == -signal.SIGKILL and used > 0.8 * limits["cpu_s"]:  # the two clocks differ a little
        return "cpu", code
    return named.get(code, "killed" if code < 0 else "error"), code


def report(status: str, code: int, seconds: float, streams: list[bytes]) -> bytes:
    streams = [*streams, b""][:3]
    head = [
        STATUSES.index(status).to_bytes(1, "big"),
        code.to_bytes(2, "big", signed=True),
        int(seconds * 1e6).to_bytes(8, "big"),
    ]
    return b"".join([*head, *map(frame, streams)])


def clear(folder: str) -> None:
    """Removes what a test left in the working directory."""
    for name in os.listdir(folder):
        path = folder + "/" + name
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, 0o700)
            clear(path)
            os.rmdir(path)
        else:
            os.unlink(path)


def set_limits(limits: dict[str, Any]) -> None:
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_IGN)  # the model's code may send any
    most = {
        resource.RLIMIT_CORE: 1, resource.RLIMIT_MEMLOCK: 0, resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NOFILE: MAX_FILES, resource.RLIMIT_FSIZE: limits["file"],
        resource.RLIMIT_SIGPENDING: 256, resource.RLIMIT_STACK: 8 << 20,
        resource.RLIMIT_NICE: 0, resource.RLIMIT_RTPRIO: 0,
    }  # fmt: skip
    # one byte: with 0, a core_pattern that is a pipe would still start a program of the machine
    if not limits["weak"]:
        # init, this process, the model's and the judge are not the model's to use up
        most[resource.RLIMIT_NPROC] = limits["processes"] + 4
    user = limits["user"]
    if user:  # until here we are root, though one that can do nothing but this
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    for what, value in most.items():
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))


def main() -> None:
    import marshal

    head = marshal.loads(read_frame(0))
    limits = head["limits"]
    os.closerange(3, (1 << 31) - 1)  # whatever else was left open on the way here
    if limits["weak"]:
        die_with(limits["parent"])
    limits["parent"] = os.getpid()
    set_limits(limits)
    limits["packages"] = head["packages"]
    sys.path += head["packages"][:1]
    if head["kind"] != "run":
        import json  # once for all processes to come  # noqa: F401
    for left in range(head["count"] - 1, -1, -1):
        write_all(1, one_test(head, limits))
        try:
            if left and not limits["weak"]:
                clear(".")
        except (OSError, RecursionError):  # made on purpose, then; the next test would see it
            return


if __name__ == "__main__":
    main()
