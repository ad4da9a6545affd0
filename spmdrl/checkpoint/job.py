"""run_dir/job.json: after which step this job's run began, for a start after a failure."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spmdrl.checkpoint.disk_space import writing
from spmdrl.checkpoint.earlier_runs import replace_synced
from spmdrl.config import ConfigError
from spmdrl.distributed.elastic_job import JOB, ROUND
from spmdrl.distributed.topology import Topology


def job() -> str:
    """Returns a name that stays the same where torchrun or Slurm starts a run again."""
    if "SLURM_JOB_ID" in os.environ:
        return f"slurm {os.environ['SLURM_JOB_ID']}"
    if JOB in os.environ:  # torchrun's id may be that of another job, or of none
        return f"spmdrl.launch {os.environ[JOB]}"
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":
        return f"torchrun {run_id}"
    started_at = (
        Path("/proc", str(os.getppid()), "stat")
        .read_text(errors="replace")
        .rpartition(")")[2]
        .split()[19]
    )
    return f"{socket.gethostname()} {os.getppid()} {started_at}"


def is_of_this_job(before: dict[str, Any]) -> bool:
    """Whether a job.json with this content was written in this job.

    Hosts of an elastic job may be of several Slurm jobs, and several jobs may run one after the
    other in one of Slurm: spmdrl.launch knows better. A job that Slurm requeued has new launchers.
    """
    name, wrote = os.environ.get(JOB), before.get("launcher")
    if name is not None and name == wrote:
        return True
    requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    both_known = name is not None and wrote is not None
    return before["job"] == job() and (requeued or not both_known)


def restarts(topology: Topology) -> int:
    """Returns how often the ranks were started before in this job. Collective.

    torchrun counts per node, and only those that its own ranks caused; spmdrl.launch says how often
    the hosts have met.
    """
    names = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", ROUND)
    counts = [os.environ.get(name, "0") for name in names]
    most = torch.tensor([sum(map(int, counts))])
    dist.all_reduce(most, dist.ReduceOp.MAX, group=topology.control)
    return int(most.item())


def began_at(run_dir: Path, topology: Topology) -> int | None:
    """The step after which this run began, where it is started again after a failure. Collective.

    It then goes on from its own checkpoints, whatever config.resume said to the first start.
    None: it is a start of its own. Raises ConfigError where job.json cannot tell.
    """
    answer: list[Any] = [(None, None)]
    known = Path(run_dir, "job.json")
    again = restarts(topology) > 0
    if topology.rank == 0 and again and known.is_file():
        answer = [read_job(known)]
    dist.broadcast_object_list(answer, group=topology.group, group_src=0)
    began, problem = answer[0]
    if problem is not None:
        raise ConfigError(problem)
    return began


def read_job(path: Path) -> tuple[int | None, str | None]:
    """(the step after which this job's run began, what is wrong with the file)."""
    try:
        before = json.loads(path.read_text())
        return (int(before["began_at"]) if is_of_this_job(before) else None), None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return None, (
            f"{path} cannot be read ({type(error).__name__}: {error}), and this run was started "
            "again: whether the checkpoints there are its own cannot be told. Remove the file and "
            "start the run with --resume auto to go on from them"
        )


def write_job(run_dir: Path, began: int) -> None:
    """began: the step after which the run began. A restart needs it, also after a power failure."""
    content = json.dumps({"job": job(), "launcher": os.environ.get(JOB), "began_at": began})
    with writing(Path(run_dir, "job.json")):
        replace_synced(Path(run_dir, "job.json"), content.encode())
