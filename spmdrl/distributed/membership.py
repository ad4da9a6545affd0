"""The hosts of a job as its launcher sees them: who joins, who leaves, what the ranks are told.

torchrun's agent stops the ranks where a host wants to join (SIGTERM), and starts them again when
all hosts have met anew. It takes ranks that end with code 75 for a failure, does not tell them why
they are stopped, and leaves the place of a host that was told to leave to its time limit.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousError

from spmdrl.distributed import elastic_compat
from spmdrl.distributed.elastic_job import CHANGE, JOB, MEMORY, NNODES, ROUND, VARIABLES

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "spmdrl_memory_"
LOCK = "lock"  # held while the launcher lives
SETTLE_S = 5.0  # for another host's launcher to join, or to say that it leaves
LOOK_S = 0.2
# torchrun waits 30 s for more hosts than the fewest, and 15 s for the signs of life of a lost one
RENDEZVOUS = {"last_call_timeout": 3, "keep_alive_interval": 2, "keep_alive_max_attempt": 5}


class HostMemory:
    """A folder in this host's memory for checkpoints of a job, which goes when its launcher does.

    What a launcher that was killed has left is removed by the next launcher of the same user.
    """

    def __init__(self, root: Path) -> None:
        for left in root.glob(f"{PREFIX}*"):
            with suppress(OSError):
                remove_if_left(left)
        # it has its name once it is locked: another launcher would take it for one that was left
        aside = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=root))
        self.lock = os.open(aside / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.folder = aside.rename(root / aside.name.removeprefix("."))

    def close(self) -> None:
        with suppress(OSError):
            remove(self.folder)
        os.close(self.lock)


def forget_other_job() -> None:
    """Takes the description of another job out of the environment: this launcher may run in a rank
    of it, and its ranks are none of that job's."""
    for name in VARIABLES:
        os.environ.pop(name, None)


def remove_if_left(folder: Path) -> None:
    """Removes the folder unless a launcher has it: the kernel frees the lock of one that is
    gone. Without a lock ranks have made it again that outlived their launcher.
    """
    try:
        lock = os.open(folder / LOCK, os.O_RDWR)
    except FileNotFoundError:
        remove(folder)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(folder)
    finally:
        os.close(lock)


def remove(folder: Path) -> None:
    """Removes the folder, and its lock last: one that is killed meanwhile leaves it to the next."""
    for path in folder.iterdir():
        if path.name != LOCK:
            shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(folder)


class Membership:
    """Tells the ranks of a job what they need to go on from each other's memory, and lets hosts
    join and leave between steps.

    folder: of this launcher alone, for the file that says why ranks are stopped.
    """

    def __init__(self, nnodes: tuple[int, int], folder: Path) -> None:
        self.is_elastic = nnodes[0] < nnodes[1]
        self.change = Path(folder, "change")
        self.handler: Any = None
        self.members: frozenset[Any] = frozenset()  # hosts when the ranks were last started
        self.is_new = False  # this host came to a job that was under way, and has met others once
        self.newcomers: frozenset[Any] = frozenset()  # hosts that came at the last meeting
        self.failed = False  # the ranks ended by a failure, for which a restart was taken
        self.ends_job = False  # when this launcher ends, so do those of the other hosts
        # without it a job has no checkpoints in memory, and says so where they are asked for
        self.memory = HostMemory(SHARED_MEMORY) if os.access(SHARED_MEMORY, os.W_OK) else None
        os.environ[NNODES] = f"{nnodes[0]}:{nnodes[1]}"
        os.environ[CHANGE] = str(self.change)
        if self.memory is not None:
            os.environ[MEMORY] = str(self.memory.folder)

    def before_start(self, agent: Any, group: Any) -> None:
        """Is called when the hosts have met, before ranks are started: writes their environment."""
        self.change.unlink(missing_ok=True)
        self.handler = handler = group.spec.rdzv_handler
        if not elastic_compat.is_dynamic(handler):
            return
        met_before = elastic_compat.rendezvous_round(handler)
        os.environ[ROUND] = str(met_before)
        os.environ[JOB] = elastic_compat.name_job(handler)
        members, is_first = elastic_compat.members(handler), not self.members
        self.is_new = is_first and met_before > 0
        self.newcomers = frozenset() if is_first else members - self.members
        if self.failed and self.members - members:
            elastic_compat.allow_restart(agent)  # it was the loss of a host, perhaps replaced
        self.members, self.failed = members, False

    def before_stop(self) -> None:
        """Is called before the ranks are stopped to be started again: leaves word of it."""
        # what cleans the temporary folder takes one that stood untouched for days
        self.change.parent.mkdir(parents=True, exist_ok=True)
        self.change.touch()

    def is_done(self, codes: list[int | None]) -> bool:
        """Whether ranks that were stopped for a host that has come have ended with these codes
        because the run is over. Then the job ends.
        """
        self.ends_job = bool(codes) and all(code == 0 for code in codes)
        return self.ends_job

    def refuses_newcomers(self) -> bool:
        """Whether ranks that have ended for a mistake in the config are to be started again, since
        it may be that of hosts that have come: these leave, which is waited for.
        """
        return bool(self.newcomers) and self.goes_on()

    def shut_down(self, handler: Any) -> bool:
        """Is called when this launcher ends, but for a signal. Unless the job ends, which the other
        hosts are to know, it leaves them.
        """
        if self.ends_job or not self.is_elastic:
            return elastic_compat.close_rendezvous(handler)
        with suppress(RendezvousError):
            elastic_compat.leave_rendezvous(handler)
        return True

    def goes_on(self) -> bool:
        """Whether ranks that have ended in order, with code 75, are to be started again: hosts have
        joined or left. Waits up to SETTLE_S for them to say so. Where the rendezvous does not
        answer the job ends, with the code of its ranks.
        """
        end = time.monotonic() + SETTLE_S
        with suppress(RendezvousError):
            while self.is_elastic and time.monotonic() < end:
                waiting = self.handler.num_nodes_waiting()
                if waiting or self.members - elastic_compat.members(self.handler):
                    return True
                time.sleep(LOOK_S)
        return False

    def leave(self) -> None:
        """Tells the other hosts that this one leaves."""
        if self.is_elastic and self.handler is not None:
            elastic_compat.leave_rendezvous(self.handler)

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()
