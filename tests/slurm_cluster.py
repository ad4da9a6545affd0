"""A real Slurm on virtual hosts: slurmctld, munged and a slurmd per node, all our children."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from virtual_hosts import Network, why_not

PACKAGES = ("slurm-wlm", "munge", "iproute2")
CONF = """
ClusterName=test
SlurmctldHost=switch(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
ReturnToService=2
InactiveLimit=0
KillWait=3
SlurmctldTimeout=30
SlurmdTimeout=5
BatchStartTimeout=10
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
JobRequeue=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def why_no_slurm() -> str | None:
    """The reason why there can be no Slurm here. As root on Debian, installs its packages."""
    missing = [tool for tool in ("slurmctld", "slurmd", "munged", "ip") if not shutil.which(tool)]
    if missing and os.geteuid() == 0 and shutil.which("apt-get"):
        env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
        subprocess.run(["apt-get", "update", "-qq"], env=env, timeout=120)
        done = subprocess.run(install, env=env, capture_output=True, text=True, timeout=200)
        if done.returncode:
            return f"apt-get install {' '.join(PACKAGES)} failed: {done.stderr.strip()[-300:]}"
        missing = [tool for tool in missing if not shutil.which(tool)]
    if missing:
        return f"needs {missing}: apt-get install {' '.join(PACKAGES)}"
    return why_not()


class Slurm:
    """A cluster with nodes n1, n2, ... on hosts whose names are others."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self.network = Network(folder, [f"box{i}" for i in range(1, nodes + 1)])
        self.nodes = {f"n{i}": self.network.hosts[f"box{i}"] for i in range(1, nodes + 1)}
        lines = [f"NodeName={name} NodeAddr={host.address} CPUs=4 RealMemory=4000"
                 for name, host in self.nodes.items()]  # fmt: skip
        Path(folder, "state").mkdir()
        self.conf = Path(folder, "slurm.conf")
        self.conf.write_text(CONF.format(folder=folder, nodes="\n".join(lines)))
        self.env = os.environ | {"SLURM_CONF": str(self.conf)}
        self.log = Path(folder, "daemons.log").open("wb")
        self.start()

    def start(self) -> None:
        folder, switch = self.folder, self.network.switch
        key = Path(folder, "munge.key")
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        munge = ["munged", "--foreground", "--force", f"--key-file={key}", "--num-threads=2"]
        for what in ("socket=munge.sock", "pid-file=munged.pid", "log-file=munged.log",
                     "seed-file=munged.seed"):  # fmt: skip
            option, name = what.split("=")
            munge.append(f"--{option}={folder / name}")
        options = {"env": self.env, "stdout": self.log, "stderr": self.log}
        switch.start(munge, **options)
        self.wait_until(Path(folder, "munge.sock").exists, "munged", 20)
        switch.start(["slurmctld", "-D", "-f", str(self.conf)], **options)
        for name, host in self.nodes.items():
            Path(folder, f"spool.{name}").mkdir()
            host.start(["slurmd", "-D", "-f", str(self.conf), "-N", name], **options)
        self.wait_until(lambda: self.idle() == set(self.nodes), "the nodes", 60)

    def idle(self) -> set[str]:
        done = subprocess.run(
            self.network.switch.command("sinfo", "-h", "-N", "-t", "idle", "-o", "%N"),
            env=self.env, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return set(done.stdout.split())

    def wait_until(self, ready: Callable[[], bool], what: str, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while not ready():
            if time.monotonic() > end:
                raise TimeoutError(f"{what} not there after {limit_s} s:\n{self.last_words()}")
            time.sleep(0.1)

    def run(self, *args: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
        """A command of Slurm's, on the host where slurmctld runs."""
        command = self.network.switch.command(*args)
        if cwd:
            command[command.index(f"--wd={Path.cwd()}")] = f"--wd={cwd}"
        done = subprocess.run(
            command, env=self.env | (env or {}), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, (args, done.stdout, done.stderr, self.last_words())
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What scontrol says of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", "-o", number)))

    def last_words(self) -> str:
        logs = {log.name: log.read_text(errors="replace") for log in self.folder.glob("*.log")}
        return "\n".join(f"--- {name}\n{text[-1500:]}" for name, text in sorted(logs.items()))

    def close(self) -> None:
        self.network.close()
        self.log.close()
