"""Starts one worker process, says how it ended, and ends every process that it leaves behind.

Started by path (`python keeper.py CONTROL_FD PIPE_FD PARENT_PID`), between the trainer and the
worker. Orphans of the worker come to this process (PR_SET_CHILD_SUBREAPER), those in a session of
their own too. It writes the wait status of the worker to the control socket. It kills what is left
and ends once the worker has ended, the trainer shuts the control socket down, or the trainer has
ended, however that happened. Uses the standard library only, since each worker has one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SWEEP_S = 5.0  # for killed processes to be gone; one that the kernel holds is left then
# meant for the trainer, which may want to end its step; SIGTERM is also that of its end
SIGNALS = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def main(control: int, pipe: int, parent: int) -> None:
    woken, wakes = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    adopt_orphans()
    os.set_inheritable(control, False)
    worker = start_worker(pipe)
    os.close(pipe)
    status = wait_for_end(worker, control, woken, parent)
    if status is not None:
        with contextlib.suppress(OSError):  # the trainer may have gone
            os.write(control, b"%d\n" % status)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)  # at once, before they can start others
    sweep()


def adopt_orphans() -> None:
    """Has orphans among the descendants become children of this process; tells where it cannot."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1) == 0:
        return
    told = (
        f"spmdrl: prctl(PR_SET_CHILD_SUBREAPER) failed: {os.strerror(ctypes.get_errno())}: what "
        "your functions start in the background may outlive the run; end it by hand\n"
    )
    with contextlib.suppress(OSError):  # stderr may be closed
        os.write(2, told.encode())


def start_worker(pipe: int) -> int:
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
    own = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        # -P: the script's folder must not come before the standard library
        os.execv(sys.executable, [sys.executable, "-P", script, str(pipe), str(own)])
    finally:
        os._exit(127)


def wait_for_end(worker: int, control: int, woken: int, parent: int) -> int | None:
    """The worker's wait status; None where it is to be ended. Reaps orphans meanwhile."""
    poll = select.poll()  # select.select knows no descriptor above 1023
    poll.register(control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while os.getppid() == parent:
        ready = dict(poll.poll())
        with contextlib.suppress(BlockingIOError):
            while os.read(woken, 512):
                pass
        ended = reap()
        if worker in ended:
            return ended[worker]
        if control in ready:  # the trainer never writes: this is its end, or it wants ours
            return None
    return None


def reap() -> dict[int, int]:
    """Wait statuses of the children that have ended, by pid."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


def sweep() -> None:
    """Kills all descendants: those of a child that was killed become children of this process."""
    end = time.monotonic() + SWEEP_S
    while time.monotonic() < end:
        for pid in children():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def children() -> list[int]:
    """Empty where /proc cannot be read: what is left is the process group, killed by `main`."""
    own: int = os.getpid()
    names: list[str] = []
    found: list[int] = []
    with contextlib.suppress(OSError):
        names = os.listdir("/proc")
    for name in names:
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == own:
                    found.append(int(name))
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
