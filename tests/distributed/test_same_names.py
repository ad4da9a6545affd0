"""Hosts that have one name, as containers may, are still several hosts."""

from dataclasses import replace
from pathlib import Path

import pytest
from ranks import run_ranks

from spmdrl.config import DataConfig, PpoConfig

pytestmark = pytest.mark.ranks


def guards_on(topology, folder):
    """(the neighbour whose process is looked for, whether rank 0 is here) of an embedded step's
    watchdog, with four ranks on one machine, and on two machines of one name.
    """
    from spmdrl.distributed.faults.embedded_watchdog import Guard

    config = PpoConfig("m", DataConfig("t"), "math", run_dir=folder)
    assert Path("/proc/sys/kernel/random/boot_id").read_text().strip() in topology.machine
    found = []
    for machine in ("one", f"number {topology.rank // 2}"):
        guard = Guard(replace(topology, host="node", machine=machine), config)
        found.append((guard.neighbour, guard.near_store))
    return found


def test_no_process_is_looked_for_on_another_host_of_the_same_name(tmp_path):
    """It would be found dead where it never was."""
    found = run_ranks(4, guards_on, str(tmp_path), timeout_s=30)
    one, two = zip(*found, strict=True)
    assert one == ((1, True), (2, True), (3, True), (0, True))
    assert two == ((1, True), (0, True), (3, False), (2, False))
