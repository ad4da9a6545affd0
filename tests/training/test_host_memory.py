"""What a host has is compared with what ranks take, and freed memory goes back when it grows."""

import resource

import pytest

from spmdrl.distributed import process as program
from spmdrl.training.checks import host_memory


@pytest.fixture
def roomy(monkeypatch):
    monkeypatch.setattr(host_memory, "available_gib", lambda: (8.0, "the host's free memory"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")


def test_ranks_that_do_not_fit_are_the_last_line(roomy):
    told = host_memory.host_lines(5.0, 4, "lower actor.micro_batch_tokens")
    assert "room for 1 of 4 ranks" in told[0]
    assert told[-1].startswith("warning: 2 ranks x 5.00 = 10.00 GiB do not fit into the 8.00 GiB")
    assert told[-1].endswith("lower actor.micro_batch_tokens")
    [told] = host_memory.host_lines(3.9, 4, "")
    assert "3.90 a rank; 8.00 available here (the host's free memory): room for 2 of 4" in told


def test_a_limit_on_address_space_counts_for_each_rank(roomy, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (3 << 30, 3 << 30))
    told = host_memory.host_lines(3.5, 2, "lower actor.micro_batch_tokens")
    assert "`ulimit -v` leaves each process 3.00 GiB: raise it" in told[-1]


def test_a_cgroup_says_what_is_left(tmp_path, monkeypatch):
    limit, used = tmp_path / "memory.max", tmp_path / "memory.current"
    monkeypatch.setattr(host_memory, "CGROUPS", ((str(limit), str(used)),))
    limit.write_text("max\n")
    used.write_text(f"{64 << 20}\n")
    assert host_memory.available_gib()[1] == "the host's free memory"
    limit.write_text(f"{320 << 20}\n")
    assert host_memory.available_gib() == (0.25, f"the limit in {limit}")


def test_free_pages_go_back_where_memory_grows(monkeypatch):
    """Not while the first steps show what they need, nor at once again."""
    heap, resident, trimmed = program.Heap(), [0], []
    monkeypatch.setattr(program.psutil, "Process", lambda: Resident(resident))
    heap.trim = lambda keep: trimmed.append(resident[0])
    for value in (100, 130, 120, 130, 125, 131, 128, 132, 90, 100, 129, 110, 120, 133, 135):
        resident[0] = value
        heap.after_step()
    assert trimmed == [132, 133] and heap.level == 135


class Resident:
    def __init__(self, value):
        self.value = value

    def memory_info(self):
        return type("Info", (), {"rss": self.value[0]})
