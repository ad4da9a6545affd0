"""Sums of gradients and gathers of weights beside computation: the same updates, in every bit."""

from dataclasses import replace
from pathlib import Path

import pytest
from ranks import groups_that_end, run_calls
from test_megatron_engine import (
    OFFLOADED,
    assert_equal,
    case,
    engine_of,
    idle_case,
    loss_of,
    poisoned_case,
    resumed_pair,
    save_models,
    share_of,
    updated,
    weights_of,
)
from test_megatron_muon import MUON
from test_megatron_vision import SHOWN, task
from test_mtp import save_with_mtp
from tiny_models import save_qwen_vl
from training_batches import whole_batch

from spmdrl.config import ConfigError, LoraConfig, TrainConfig

pytestmark = [pytest.mark.ranks, pytest.mark.megatron, pytest.mark.strict_nccl]

BOTH = {"overlap_grad_reduce": True, "overlap_param_gather": True}
SMALL = BOTH | {"ddp_bucket_size": 5000}  # weights: several buckets of these tiny models


def unclipped(*args, **layout):
    """Not clipped: a gradient's norm is summed in the order of its shards, which buckets make."""
    one = case(*args, **layout)
    return *one[:3], replace(one[3], optim=replace(one[3].optim, clip_norm=1e9))


def overlapped(one, how):
    return *one[:3], replace(one[3], **how)


EXPERTS = {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}
CASES = [
    (unclipped("qwen3", "value", 2, dtype="bfloat16"), SMALL),
    (case("qwen2", "policy", 2, context_parallel=2), {"overlap_grad_reduce": True}),
    (unclipped("qwen3", "policy", 4, pipeline_parallel=2, activation_checkpointing=True), SMALL),
    (unclipped("qwen3", "policy", 4, pipeline_parallel=2, virtual_pipeline=2), SMALL),
    (unclipped("moe", "policy", 4, **EXPERTS), SMALL),
    (unclipped("odd", "policy", 2, optim=MUON), SMALL),
    (unclipped("qwen2", "policy", 2, lora=LoraConfig(rank=8), ema=0.5), SMALL),
    (unclipped("mtp", "policy", 4, pipeline_parallel=2, mtp_loss_scaling_factor=0.3), SMALL),
]


def pairs_on(topology, models):
    found = []
    for plain, how in CASES:
        with groups_that_end():
            both = plain, overlapped(plain, how)
            found.append([seen_of(topology, models, one) for one in both])
    return found


def seen_of(topology, models, case):
    """Two updates, what a pass says after them, and all weights after one more; beside these what
    `watched` noted and whether gathers went on after an update. None on ranks outside."""
    engine = engine_of(topology, models, case)
    if engine is None:
        return None
    started, batch = watched(engine), whole_batch().select(share_of(engine))
    metrics = updated(engine, case[1], 2)
    going_on = gathers_of(engine)
    look = engine.logprobs if case[1] == "policy" else engine.values
    looked = look(batch, 0.8).logprobs if case[1] == "policy" else look(batch)
    left = gathers_of(engine)
    metrics += updated(engine, case[1])
    return [looked, metrics, weights_of(engine), average_of(engine)], started, going_on, left


def watched(engine):
    """Of each chunk's last chance how many of its buckets had started, and how many it has."""
    found = []
    for chunk in engine.parts.overlapped:

        def start_rest(*unused, chunk=chunk, rest=chunk.start_rest):
            found.append((chunk.num_started, len(chunk.groups)))
            rest()

        chunk.start_rest = start_rest
    return found


def gathers_of(engine):
    groups = [group for chunk in engine.parts.overlapped for group in chunk.groups]
    return sum(group.param_gather_handle is not None for group in groups)


def average_of(engine):
    return dict(engine.named_average(engine.parts.config.params_dtype, 1 << 20)) if (
        engine.parts.average
    ) else {}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_with_mtp("glm4_moe", folder / "mtp")
    save_qwen_vl(folder / "vision")
    return save_models(folder) | {name: str(folder / name) for name in ("mtp", "vision")}


def test_updates_are_those_without_overlap(models):
    calls = [(pairs_on, (models,))]
    for number, rank in enumerate(run_calls(4, calls, timeout_s=300)[0]):
        for (plain, how), (want, got) in zip(CASES, rank, strict=True):
            if want is None:
                assert number >= plain[2] and got is None
                continue
            for metrics in want[0][1] if "ddp_bucket_size" in how else ():
                for name in {"grad_norm", "mtp_grad_norm"} & metrics.keys():
                    metrics[name] = pytest.approx(metrics[name], rel=1e-5)
            assert_equal(got[0], want[0])
            assert want[1:] == ([], 0, 0)
            check_overlap_of(plain, how, number, *got[1:])


def check_overlap_of(plain, how, rank, started, going_on, left):
    """The first stage's buckets have all started when its backward pass ends, but those of
    interleaved chunks; after an update weights are gathered until a pass wants them."""
    stages, chunks = plain[3].pipeline_parallel, plain[3].virtual_pipeline
    is_first, sizes = rank < plain[2] // stages, {size for _, size in started}
    assert len(started) >= 3 * chunks
    if is_first and chunks == 1:
        assert all(size == done for done, size in started)
        assert min(sizes) > 1 or "ddp_bucket_size" not in how
    else:
        assert (0, min(sizes)) in started
    assert (going_on > 0) == how.get("overlap_param_gather", False)
    assert left == 0


# ---- what else an engine does between two updates


def others_on(topology, models, folder):
    """Engines that are offloaded, that pass over an update, and that load a checkpoint of buckets
    of another size."""
    idle = unclipped("moe", "policy", 2, dtype="bfloat16", expert_parallel=2, **OFFLOADED, **SMALL)
    odd = unclipped("odd", "policy", 2)
    small = overlapped(odd, SMALL)
    for name in ("moved", "same"):
        Path(folder, name).mkdir(exist_ok=True)
    calls = (
        lambda: idle_case(topology, models, Path(folder, "idle"), idle),
        lambda: poisoned_case(topology, models, small),
        lambda: resumed_pair(topology, models, Path(folder, "moved"), small, odd, 1),
        lambda: resumed_pair(topology, models, Path(folder, "same"), small, small, 1),
    )
    found = []
    for call in calls:
        with groups_that_end():
            found.append(call())
    return found


def images_on(topology, models):
    """Without overlap and with it: two updates in which one rank alone has images, and all weights
    then; how many buckets had started when the backward passes ended."""
    from spmdrl.distributed.topology import Topology, train_degrees
    from spmdrl.engines.build import build_engine

    found = []
    batch, images, _ = task(models["vision"])
    sees = [shown != 1 for shown in SHOWN]
    mine = [seq for seq in range(len(SHOWN)) if sees[seq] == (topology.rank == 0)]
    for how in ({}, SMALL):
        with groups_that_end():
            config = unclipped("vision", "policy", 2, **how)[3]
            ranks = Topology.build(topology.device, **train_degrees(config))
            engine = build_engine("policy", models["vision"], config, ranks)
            started = watched(engine)
            share = batch.select(mine)
            metrics = [engine.update(share, loss_of("policy"), 1.0, images) for _ in range(2)]
            for update in metrics:
                update["grad_norm"] = round(update["grad_norm"], 4)
            found.append(([metrics, weights_of(engine)], started))
    return found


def test_what_comes_between_updates_finds_whole_weights(models, tmp_path):
    calls = [(others_on, (models, str(tmp_path))), (images_on, (models,))]
    others, images = run_calls(2, calls, timeout_s=300)
    for idle, poisoned, moved, same in others:
        (away, busy, after, loaded), (message, seen, unseen) = idle, poisoned
        assert_equal([away, loaded], [busy, after])
        assert "loss nan" in message
        assert_equal(list(seen), list(unseen))
        for saved, went_on, resumed in (moved, same):
            assert_equal(resumed[1], went_on[1])
            assert any((saved[name] != went_on[1][name]).any() for name in saved)
    for rank, ((want, _), (got, started)) in enumerate(images):
        assert_equal(got, want)
        # language layers' buckets start in the backward pass, a tower without images at its end
        assert all((done == size) == (rank == 0) and done > 1 for done, size in started[::2])


def test_what_cannot_be_overlapped_is_refused():
    from spmdrl.training.checks.common import check_training_role

    role = TrainConfig(engine="megatron")
    check_training_role("actor", replace(role, **BOTH, ddp_bucket_size=10**6), (0, 1), None)
    check_training_role("actor", replace(role, overlap_grad_reduce=True), (0, 1), None)
    for changed, message in (
        ({"overlap_param_gather": True}, "set overlap_grad_reduce=True"),
        ({"ddp_bucket_size": 10**6}, "ddp_bucket_size=1000000 has no effect"),
    ):
        wrong = replace(role, **changed)
        with pytest.raises(ConfigError, match=message):
            check_training_role("actor", wrong, (0, 1), None)
    with pytest.raises(ConfigError, match="overlap_grad_reduce=True has no effect with"):
        check_training_role("actor", TrainConfig(overlap_grad_reduce=True), (0, 1), None)
