"""Machines of one's own on this one: each with its network, host name, processes and mounts.

A host is a process that holds its namespaces and reaps what is left; with it, all of the host's
processes and its network go, and it goes with the test's process, however that ends: nothing needs
to be cleaned up, and nothing outside is touched. Host names are in nobody's /etc/hosts.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

PR_SET_PDEATHSIG = 1
INIT = "trap : TERM INT USR1; while :; do sleep 1000 & wait; done"  # a shell reaps orphans


def why_not() -> str | None:
    """The reason why no hosts can be made here."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    for tool in ("ip", "unshare", "nsenter"):
        if not shutil.which(tool):
            return f"needs {tool} (iproute2, util-linux)"
    made = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", "ip", "link", "set", "lo", "up"],
        capture_output=True, text=True,
    )  # fmt: skip
    return f"cannot make namespaces: {made.stderr.strip()}" if made.returncode else None


NAMESPACES = ("--net", "--uts", "--mount", "--pid", "--mount-proc", "--propagation", "private")


def die_with_the_test() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Host:
    """One machine. address: its only one, beside the loopback's."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.holder = subprocess.Popen(
            ["unshare", *NAMESPACES, "--fork", "--kill-child", "bash", "-c", INIT],
            preexec_fn=die_with_the_test, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.pid = self._init()
        self.run("hostname", name)
        self.ip("link set lo up")

    def _init(self) -> int:
        """The process that is number 1 in there."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            for child in psutil.Process(self.holder.pid).children():
                with suppress(psutil.Error):
                    if child.name() == "bash":
                        return child.pid
            time.sleep(0.01)
        raise TimeoutError(f"no host {self.name}")

    def command(self, *args: str) -> list[str]:
        inside = ("--net", "--uts", "--mount", "--pid")
        return ["nsenter", "--target", str(self.pid), *inside, f"--wd={Path.cwd()}", *args]

    def start(self, args: Sequence[str], **options: Any) -> subprocess.Popen:
        return subprocess.Popen(
            self.command(*args), stdin=subprocess.DEVNULL, preexec_fn=die_with_the_test, **options
        )

    def run(self, *args: str, **options: Any) -> str:
        """Output of a command; CalledProcessError shows what it said."""
        done = subprocess.run(
            self.command(*args), capture_output=True, text=True, timeout=60, **options
        )
        if done.returncode:
            raise RuntimeError(f"{self.name}: {args}: {done.stdout}{done.stderr}")
        return done.stdout

    def ip(self, line: str) -> None:
        self.run("ip", *line.split())

    def hosts_file(self, path: Path) -> None:
        self.run("mount", "--bind", str(path), "/etc/hosts")

    def processes(self) -> list[psutil.Process]:
        """All that run here, wherever they were started from."""
        mine = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/ns/pid") == mine:
                    found.append(process)
        return found

    def kill(self) -> None:
        """As if the plug were pulled."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.holder.wait(20)


class Network:
    """Hosts on one switch, which is a host too."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        alone = Path(folder, "hosts")
        alone.write_text("127.0.0.1 localhost\n")
        self.switch = Host("switch", "10.77.0.1")
        self.switch.hosts_file(alone)
        self.hosts: dict[str, Host] = {}
        self.switch.ip("link add br0 type bridge")
        self.switch.ip("addr add 10.77.0.1/24 dev br0")
        self.switch.ip("link set br0 up")
        for number, name in enumerate(names, 11):
            host = self.hosts[name] = Host(name, f"10.77.0.{number}")
            host.hosts_file(alone)
            ends = f"eth0 netns {host.pid} type veth peer name {name} netns {self.switch.pid}"
            subprocess.run(["ip", "link", "add", *ends.split()], check=True)
            self.switch.ip(f"link set {name} master br0 up")
            host.ip(f"addr add {host.address}/24 dev eth0")
            host.ip("link set eth0 up")

    def cut(self, name: str) -> None:
        """Unplugs the host's cable; its processes go on."""
        self.switch.ip(f"link set {name} down")

    def mend(self, name: str) -> None:
        self.switch.ip(f"link set {name} up")

    def close(self) -> None:
        for host in (*self.hosts.values(), self.switch):
            host.kill()
