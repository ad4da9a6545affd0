"""What a change of a job's hosts is told as, and which sizes a config is checked for."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from plan_configs import ppo_config
from programs import write_task

from spmdrl import sft
from spmdrl.cli.arguments import dry_flags
from spmdrl.config import (
    CheckpointConfig,
    ConfigError,
    DataConfig,
    SftConfig,
    SftDataConfig,
    TrainConfig,
)
from spmdrl.distributed.elastic_job import ElasticJob
from spmdrl.distributed.signals import Stopping
from spmdrl.distributed.stop_votes import REGROUP, STOP
from spmdrl.training import dry_run, elastic, stop, supervised
from spmdrl.training.checks.rl import require_sound
from spmdrl.training.elastic import SizeChange, check_memory_room, check_sizes
from spmdrl.training.savers import Savers
from spmdrl.training.stop import StopController


def test_a_change_is_one_line():
    now = time.monotonic()
    lost = SizeChange((4, 2), (("a", "b"), ("a",)), 37, age_s=9.6, found_at=now - 4)
    assert lost.line() == (
        "elastic: 4 -> 2 ranks, host b lost; goes on from step 37 in memory, 14 s"
    )
    both = SizeChange((4, 6), (("a", "b"), ("a", "c", "d")), 37, ("step 38: torn",), found_at=now)
    assert both.line() == (
        "elastic: 4 -> 6 ranks, host b lost, hosts c, d new; goes on from step 37 in memory "
        "(passed over: step 38: torn), 0 s"
    )
    torn = ("step 38: no host has x as it was written",)
    disk = SizeChange(
        (None, 2), ((), ("a",)), None, torn, disk=Path("run/checkpoints/step_00000030")
    )
    assert disk.line() == (
        "elastic: 2 ranks; no checkpoint in memory is whole (step 38: no host has x as it was "
        "written): goes on from run/checkpoints/step_00000030"
    )
    assert replace(disk, disk=None, passed=()).line() == (
        "elastic: 2 ranks; no checkpoint in memory is of a later step: begins where the run began"
    )


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """On the first of four hosts, each with two ranks, of 3 to 4."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    return SimpleNamespace(
        elastic=ElasticJob(3, 4, memory=tmp_path), topology=SimpleNamespace(world=8)
    )


def test_every_size_is_checked_at_the_start(runtime, qwen3):
    sizes = []
    check_sizes(lambda config, world: sizes.append(world), None, runtime)
    assert sizes == [6, 8]
    config = ppo_config(qwen3, actor=TrainConfig(fsdp=4))
    require_sound(config, 8)
    with pytest.raises(ConfigError) as told:
        check_sizes(require_sound, config, runtime)
    begin = "with 3 hosts, 6 ranks in all, which --nnodes 3:4 allows: actor.fsdp on ranks 0-5: "
    assert str(told.value).startswith(begin)


def test_placement_that_names_ranks_has_one_size(runtime, qwen3):
    placement = {"actor": "0-3", "rollout": "4-7"}
    config = ppo_config(qwen3, placement=placement)
    require_sound(config, 8)
    with pytest.raises(ConfigError, match="with 3 hosts, 6 ranks in all"):
        check_sizes(require_sound, config, runtime)


@pytest.mark.programs
def test_the_dry_run_plans_the_memory_of_every_size(topology, qwen3, tmp_path, monkeypatch):
    write_task(tmp_path)
    data = DataConfig(str(tmp_path / "train.jsonl"), prompts_per_step=8, max_prompt_tokens=16)
    rows = SftDataConfig(str(tmp_path / "sft.jsonl"), batch_size=2, max_tokens=32)
    Path(rows.train).write_text('{"prompt": "1+1=", "response": "2"}\n' * 2)
    runtime = SimpleNamespace(elastic=ElasticJob(1, 3), topology=topology, is_main=True)
    sizes = []
    monkeypatch.setattr(elastic, "check_memory", lambda config, world, planner: sizes.append(world))
    dry = dry_flags(True, 3, False)
    dry_run.show_plan(ppo_config(qwen3, data=data, steps=2), runtime, dry)
    fine_tuning = SftConfig(str(qwen3), rows, out="out", steps=2)
    supervised.show_plan(sft.task(fine_tuning), fine_tuning, runtime, dry)
    assert sizes == [3, 1, 2, 3] * 2


def test_memory_without_room_is_told_at_the_start(runtime, qwen3, monkeypatch):
    config = ppo_config(qwen3)
    monkeypatch.setattr(elastic, "free_bytes", lambda path: 100 << 20)
    check_memory_room(config, runtime, 100 << 20)  # 4 parts of a quarter
    with pytest.raises(ConfigError, match=r"has 100 MiB for .* take at least 101 MiB of each"):
        check_memory_room(config, runtime, 101 << 20)
    off = ppo_config(qwen3, checkpoint=CheckpointConfig(in_memory_every_steps=0))
    check_memory_room(off, runtime, 101 << 20)


def test_what_ranks_have_left_in_memory_is_room_for_those_after_them(runtime, qwen3, monkeypatch):
    """Else a job whose memory suffices would end at its first change."""
    config = ppo_config(qwen3)
    Path(runtime.elastic.memory, "step_00000007", "actor").mkdir(parents=True)
    Path(runtime.elastic.memory, "step_00000007", "actor", "shards").write_bytes(bytes(3 << 20))
    monkeypatch.setattr(elastic, "free_bytes", lambda path: 1 << 20)
    check_memory_room(config, runtime, 4 << 20)
    with pytest.raises(ConfigError, match=r"has 4.0 MiB for .* at least 5.0 MiB of each"):
        check_memory_room(config, runtime, 5 << 20)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (ElasticJob(), "python -m spmdrl.launch with --nnodes MIN:MAX or --max-restarts"),
        (ElasticJob(1, 2, change=Path("change")), "/dev/shm of this host could not be written"),
    ],
)  # fmt: skip
def test_a_host_without_a_place_in_memory_says_which_it_lacks(qwen3, job, words):
    config = ppo_config(qwen3, checkpoint=CheckpointConfig(in_memory_every_steps=1))
    with pytest.raises(ConfigError, match=words):
        check_memory_room(config, SimpleNamespace(elastic=job), 1)


@pytest.mark.parametrize(
    ("job", "on_disk", "wish", "armed", "saved", "told"),
    [
        (ElasticJob(1, 2), True, STOP, True, "memory disk", "--resume auto goes on"),
        (ElasticJob(1, 2), True, REGROUP, True, "memory", "goes on with other hosts"),
        (ElasticJob(1, 2), False, STOP, True, "memory", "hosts that stay go on; without any it is"),
        (ElasticJob(), True, STOP, True, "disk", "--resume auto goes on"),
        (ElasticJob(), False, 0, False, "", ""),  # nothing outlives the ranks: a signal ends them
    ],
)  # fmt: skip
def test_a_step_that_ends_by_a_signal_is_kept_for_those_who_go_on(
    qwen3, monkeypatch, job, on_disk, wish, armed, saved, told
):
    """It is no step that is due: checkpoints come after every fifth, in memory and on the disk."""
    votes = SimpleNamespace(agree=lambda own: wish)
    monkeypatch.setattr(stop, "StopVotes", lambda topology, lag: votes)
    memory, disk = (SimpleNamespace(failed=False, wait=lambda: None) for _ in range(2))
    savers = Savers(disk if on_disk else None, 5, memory, 5)
    runtime = SimpleNamespace(elastic=job, stopping=Stopping(), topology=None, stopped="")
    ending = StopController(ppo_config(qwen3, steps=9), runtime, savers)
    assert runtime.stopping.armed == armed
    ending.vote(3)
    assert ending.savers_of_step() == [{"memory": memory, "disk": disk}[name]
                                       for name in saved.split()]  # fmt: skip
    if wish:
        assert told in ending.stop(3)
