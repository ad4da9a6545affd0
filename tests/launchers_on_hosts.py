"""launch/multinode.sh on virtual hosts, as a user starts it, but without the seconds of imports."""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from programs import ROOT, ForkedRank, pids_of
from ranks import SERVER, become
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from virtual_hosts import Host, Network, why_not


@contextmanager
def two_hosts(folder: Path) -> Iterator[Network]:
    """Two hosts on one switch, "left" and "right". Skips the test where none can be made."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with closing(Network(folder, ["left", "right"])) as network:
        yield network


NAMES = ("net", "uts", "mnt", "pid")  # of the namespaces of a host


class Side:
    """launch/multinode.sh on one of the hosts, output to folder/<host>.log.

    nodes: how many hosts, torchrun's --nnodes. ranks: of each host by its name. What it starts as
    python is written down instead, and done on that host by a process that has imported torch
    already; so have the ranks, which are forks of it.
    """

    def __init__(
        self, host: Host, folder: Path, head: str, *args: object, nodes: str,
        ranks: Mapping[str, int], restarts: int = 0,
    ) -> None:  # fmt: skip
        self.host, self.log = host, folder / f"{host.name}.log"
        self.seen = 0  # what of the log is known already
        stand_in = folder / "bin"
        stand_in.mkdir(exist_ok=True)
        Path(stand_in, "python").write_text('#!/bin/sh\nprintf "%s\\0" "$@" -- && env -0\n')
        Path(stand_in, "python").chmod(0o755)
        env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")} | {
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MAX_RESTARTS": str(restarts),
            "PATH": f"{stand_in}:{os.environ['PATH']}", "RANKS_PER_NODE": str(ranks[host.name]),
        }  # fmt: skip
        command = [str(ROOT / "launch/multinode.sh"), nodes, head, "cfg.py", *map(str, args)]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        words, _, settings = done.stdout.partition("\0--\0")
        launcher = words.split("\0"), dict(x.split("=", 1) for x in settings.split("\0") if x)
        self.log.write_text("")
        self.process = SERVER.Process(target=on_host, args=(host.pid, str(self.log), *launcher))
        self.process.start()

    def wait(self, limit_s: float) -> int | None:
        self.process.join(limit_s)
        return self.process.exitcode

    def text(self) -> str:
        return self.log.read_text()

    @property
    def launcher(self) -> psutil.Process:
        [launcher] = psutil.Process(self.process.pid).children()
        return launcher

    def ranks(self) -> list[int]:
        """Process ids in rank order."""
        return pids_of(self.launcher.pid)


def enter(host: int, names: Sequence[str] = NAMES) -> None:
    """Takes this process, and for processes its children, to the host with this process id. One
    that enters "pid" can start no threads any more.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    spaces = [os.open(f"/proc/{host}/ns/{name}", os.O_RDONLY) for name in names]
    for space in spaces:
        if libc.setns(space, 0):
            raise OSError(ctypes.get_errno(), "setns")


def serve_store(host: int, port: int) -> None:
    """A rendezvous store on a host that trains nothing, as docs/elastic.md starts one."""
    enter(host, ["net"])
    store = dist.TCPStore(
        "0.0.0.0", port, is_master=True, wait_for_workers=False, multi_tenant=True
    )
    while store is not None:
        time.sleep(1)


def on_host(host: int, log: str, words: list[str], env: dict[str, str]) -> None:
    """The command `python WORDS` on the host with this process id, as nsenter would start it."""
    enter(host)
    launcher = multiprocessing.get_context("fork").Process(target=launch, args=(log, words, env))
    launcher.start()  # a process is of another pid namespace than the one that entered it
    launcher.join()
    sys.exit(launcher.exitcode)


def launch(log: str, words: list[str], env: dict[str, str]) -> None:
    assert words[:2] == ["-m", "spmdrl.launch"], words
    os.setsid()
    os.chdir(Path(log).parent)
    become(Path(log), env)
    subprocess_handler.Popen = ForkedRank
    sys.exit(importlib.import_module("spmdrl.launch").main(words[2:]))


def is_running(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def wait_for(words: str, sides: list[Side], limit_s: float = 90) -> str:
    """Until one of them has said it."""
    end = time.monotonic() + limit_s
    while True:
        for side in sides:
            if found := re.search(words, side.text()[side.seen :]):
                return found[0]
        assert time.monotonic() < end, "\n".join(side.text()[-4000:] for side in sides)
        time.sleep(0.05)
