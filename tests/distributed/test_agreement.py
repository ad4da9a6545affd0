"""What ranks tell each other along a tree, and what that takes of connections and messages."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from math import ceil, log2
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from spmdrl.config import ConfigError
from spmdrl.distributed import collectives
from spmdrl.distributed.agreement import (
    broadcast_from_first,
    children,
    gather_to_all,
    gather_to_first,
    lowest,
    parent,
)
from spmdrl.distributed.collectives import FailedElsewhere, together
from spmdrl.distributed.env import keep_kernels_on_this_host
from spmdrl.distributed.process import (
    MOST_FILES,
    prepare_environment,
    raise_file_limit,
    require_launcher,
)
from spmdrl.distributed.topology import LAZY_GLOO, gloo_connects_now

RANKS = 32
SIZES = (1, 2, 3, 13, RANKS)
OWN_FILES = 8  # that a gloo group has without a connection, and some to spare


def open_files():
    return len(os.listdir("/proc/self/fd"))


def all_along_a_tree(topology):
    """(whether all values are right, files that the last group has taken)."""
    rank, right = topology.rank, True
    for size in SIZES:
        before = open_files()
        group = dist.new_group(list(range(size)), backend="gloo")
        if rank >= size:
            continue
        everyone = [{"rank": r, "text": "x" * 50 * r} for r in range(size)]
        for speaker in {0, size // 2, size - 1}:
            said = 3 if rank == speaker else 1000 + rank
            right &= lowest(said, group) == 3
        gathered = gather_to_first(everyone[rank], group)
        right &= gathered == (everyone if rank == 0 else None)
        right &= gather_to_all(everyone[rank], group) == everyone
        right &= broadcast_from_first([rank], group) == [0]
        dist.barrier(group=group)
    taken = open_files() - before
    for dtype, most in ((torch.int64, 0), (torch.int64, 1 << 20), (torch.bfloat16, 1 << 20)):
        collectives.TREE_BYTES = most  # 0: round the ring
        mine = torch.full((rank % 3, 2), rank, dtype=dtype)
        rows = collectives.all_gather_rows(mine, topology)
        right &= [part.tolist() for part in rows] == [[[r, r]] * (r % 3) for r in range(RANKS)]
        right &= all(part.dtype == dtype for part in rows)
    return right, taken


@pytest.mark.ranks
def test_a_tree_carries_values_over_few_connections():
    """Without lazy connections a group of 32 takes 31, with a flat gather its first rank does."""
    results = run_ranks(RANKS, all_along_a_tree, timeout_s=60)
    assert all(right for right, _ in results)
    most = max(taken for _, taken in results)
    assert most <= 2 * ceil(log2(RANKS)) + OWN_FILES < RANKS - 1, results


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000, 1024])
def test_each_rank_has_one_way_to_the_first(size):
    below = {rank: children(rank, size) for rank in range(size)}
    assert sorted(child for own in below.values() for child in own) == list(range(1, size))
    assert all(parent(child) == rank for rank, own in below.items() for child in own)
    assert all(len(own) <= ceil(log2(size)) if size > 1 else not own for own in below.values())


def test_between_hosts_of_eight_only_leaders_talk():
    across = [(rank, parent(rank)) for rank in range(1, 1024) if rank // 8 != parent(rank) // 8]
    assert len(across) == 1024 // 8 - 1
    assert all(rank % 8 == 0 and other % 8 == 0 for rank, other in across)


def raised_limits(topology):
    """The limit of this process after `raise_file_limit`, and of the one that has started it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    child = os.fork()
    if child == 0:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        raise_file_limit()
        os._exit(resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 200)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    own = os.waitstatus_to_exitcode(ended[1])
    return own, resource.getrlimit(resource.RLIMIT_NOFILE), hard


@pytest.mark.ranks
def test_the_limit_of_files_is_raised_for_a_rank_and_its_torchrun():
    [(own, (soft, hard), before)] = run_ranks(1, raised_limits, timeout_s=30)
    assert own == 1
    assert soft == min(hard, MOST_FILES) if hard > 0 else soft == MOST_FILES
    assert hard == before


@pytest.mark.parametrize("own", [None, "0", "1"])
def test_a_value_of_the_environment_is_there_again(own, monkeypatch):
    """The samples' group is made with connections to all; later groups follow the user's value."""
    monkeypatch.delenv(LAZY_GLOO, raising=False)
    if own is not None:
        monkeypatch.setenv(LAZY_GLOO, own)
    with gloo_connects_now():
        assert os.environ[LAZY_GLOO] == "0"
    assert os.environ.get(LAZY_GLOO) == own


def test_processes_of_slurm_or_mpi_without_a_launcher_are_refused(monkeypatch):
    """Each would train by itself, and all of a host on its first GPU."""
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    require_launcher(launched=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    require_launcher(launched=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "16")
    require_launcher(launched=True)
    with pytest.raises(ConfigError, match=r"16 processes .* python -m spmdrl\.launch"):
        require_launcher(launched=False)


def test_triton_keeps_its_kernels_at_home_on_one_host_alone(monkeypatch, tmp_path):
    chosen = ("TRITON_CACHE_DIR", "TRITON_HOME")

    def cache(**environment):
        for name in (*chosen, "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        keep_kernels_on_this_host()
        return os.environ.get("TRITON_CACHE_DIR")

    ranks = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", "/local")
    assert cache() is cache(WORLD_SIZE="8", LOCAL_WORLD_SIZE="8") is None
    assert cache(**ranks) == f"/local/spmdrl_triton_{os.getuid()}"
    assert cache(**ranks, TRITON_HOME="/mine") is None
    assert cache(**ranks, TRITON_CACHE_DIR="/mine") == "/mine"
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    assert cache() == f"/local/spmdrl_triton_{os.getuid()}"


def test_a_parent_of_another_user_keeps_its_limit(monkeypatch):
    """Stands in for the kernel, which lets root do all."""

    def refused(pid, which, limits=None):
        if pid:
            raise PermissionError
        return (MOST_FILES, MOST_FILES)

    asked = []
    monkeypatch.setattr(resource, "prlimit", lambda *a: (asked.append(a[0]), refused(*a))[1])
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    raise_file_limit()
    assert asked == [0, os.getppid()]


def saved_where_one_cannot(topology, folder):
    """What each rank hears of a save whose folder one rank cannot make."""
    from spmdrl.engines.host_copies import stage_own

    file = Path(folder, f"rank_{topology.rank}")
    if topology.rank == 1:
        file.write_text("no folder")
    else:
        file.mkdir()
    staged = stage_own({"a": torch.ones(4)}, topology.rank, None)
    try:
        staged.write(file / "below", topology.control)
    except (OSError, FailedElsewhere) as error:
        return type(error).__name__
    return "saved"


@pytest.mark.ranks
def test_a_save_that_one_rank_cannot_begin_is_told_on_all(tmp_path):
    told = run_ranks(3, saved_where_one_cannot, str(tmp_path), timeout_s=30)
    assert told == ["FailedElsewhere", "NotADirectoryError", "FailedElsewhere"]


def test_a_failure_of_ones_own_is_told_though_the_others_have_gone(monkeypatch):
    """The group is a stand-in, and so is the agreement, in which a connection breaks."""

    def breaks(value, group):
        raise RuntimeError("Connection closed by peer")

    def fails():
        raise OSError("disk full")

    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    monkeypatch.setattr(collectives, "lowest", breaks)
    with pytest.raises(OSError, match="disk full"):
        together(group, fails)
    with pytest.raises(RuntimeError, match="Connection closed"):
        together(group, lambda: 1)


def environment_of_a_rank(topology, names):
    """What `prepare_environment` leaves of variables, one of which the user has set."""
    for name in names:
        os.environ.pop(name, None)
    os.environ[names[0]] = "3"
    prepare_environment()
    return [os.environ.get(name) for name in names]


@pytest.mark.ranks
def test_a_rank_has_what_torchs_groups_read():
    names = ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING",
             "TORCH_GLOO_LAZY_INIT"]  # fmt: skip
    assert run_ranks(1, environment_of_a_rank, names, timeout_s=30) == [["3", "0", "1"]]
    assert run_ranks(1, environment_of_a_rank, names[::-1], timeout_s=30) == [["3", "0", "0"]]
