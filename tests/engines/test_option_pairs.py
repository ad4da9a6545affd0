"""Every pair of a role's options: what is not to change numbers does not, whatever is beside it.

docs/training.md has the table of these pairs. A run has several options, so that few runs have all
pairs: of every two options that go together some run has both, one has only the first, one only
the second and one neither.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import groups_that_end, run_calls
from training_batches import with_shared_prompts

from spmdrl.config import ConfigError, LoraConfig, OptimConfig, TrainConfig
from spmdrl.data.packing import empty_batch
from spmdrl.engines.fsdp.lora import check_lora
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.training.checks.common import check_training_role
from spmdrl.types import Batch

LENS = [20, 33, 7, 12, 41, 3, 18, 25, 9, 2]

CONFIG = TrainConfig(dtype="float32", micro_batch_tokens=60, optim=OptimConfig(lr=1e-3))
LEARNING: dict[str, dict[str, Any]] = {  # what is learnt, and how
    "lora": {"lora": LoraConfig(rank=4)},
    "adamw8bit": {"optim": replace(CONFIG.optim, name="adamw8bit")},
    "muon": {"optim": replace(CONFIG.optim, name="muon")},
}
NEUTRAL: dict[str, dict[str, Any]] = {  # the same numbers with other means
    "ulysses": {"ulysses": 2},
    "replicas": {"fsdp": 1},
    "checkpointing": {"activation_checkpointing": True},
    "selective": {"activation_checkpointing": "selective"},
    "torch kernels": {"kernels": "torch"},
    "offload": {"offload_params": True, "offload_optimizer": True},
    "ema": {"ema": 0.5},
    "offload policy": {"offload_policy": True},
    "whole prompts": {"shared_prefix": False},
    "kept weights": {"reshard_after_forward": False},
}
REFUSED = {
    ("lora", "muon"), ("ulysses", "replicas"), ("muon", "offload policy"),
    ("offload", "offload policy"),
}  # fmt: skip
ONE_FIELD = {("adamw8bit", "muon"), ("checkpointing", "selective")}
OPTIONS = LEARNING | NEUTRAL
PAIRS = [p for p in itertools.combinations(OPTIONS, 2) if p not in REFUSED | ONE_FIELD]
# `test_the_runs_have_every_pair` holds that these are enough
RUNS: list[tuple[str, ...]] = [
    (),
    ("replicas", "selective", "torch kernels", "ema", "offload policy", "whole prompts",
     "kept weights"),
    ("ulysses", "checkpointing", "offload", "ema"),
    ("lora", "adamw8bit", "ulysses", "checkpointing", "offload", "whole prompts", "kept weights"),
    ("lora", "adamw8bit", "ulysses", "selective", "offload policy"),
    ("lora", "adamw8bit", "replicas", "selective", "whole prompts", "kept weights"),
    ("lora", "selective", "torch kernels", "offload", "ema", "kept weights"),
    ("adamw8bit", "replicas", "checkpointing", "torch kernels", "ema", "offload policy"),
    ("muon", "ulysses", "selective"),
    ("muon", "ulysses", "torch kernels", "offload", "whole prompts", "kept weights"),
    ("muon", "replicas", "checkpointing", "offload", "ema", "whole prompts"),
]  # fmt: skip
ALONE: list[tuple[str, ...]] = [(), *((name,) for name in LEARNING), ("lora", "adamw8bit")]


def config_of(names: tuple[str, ...]) -> TrainConfig:
    return replace(CONFIG, **{k: v for name in names for k, v in OPTIONS[name].items()})


def learnt(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name in LEARNING)


def whole_batch(seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    batch = empty_batch(torch.tensor(LENS))
    batch.token_ids = torch.randint(3, 60, (batch.num_tokens,), generator=draw)
    with_shared_prompts(batch, [(3, 6), (2, 11), (5, 1)])
    batch.loss_mask = (torch.rand(batch.num_tokens, generator=draw) > 0.2).float()
    batch.loss_mask[batch.cu_seqlens[:-1]] = 0
    batch.advantages = torch.randn(batch.num_tokens, generator=draw) * batch.loss_mask
    batch.rollout_logprobs = -torch.rand(batch.num_tokens, generator=draw) * batch.loss_mask
    batch.loss_weights = batch.loss_mask / batch.loss_mask.sum()
    return batch


def results_on(topology: Any, model: str, cases: list[tuple[str, ...]], seed: int) -> list[Any]:
    """Of each case two updates' metrics, the logprobs of this rank's sequences, the average. On one
    rank no prompt is shared.
    """
    whole, results = whole_batch(seed), []
    for case in cases:
        config = config_of(case)
        if topology.world == 1:
            config = replace(config, shared_prefix=False)
        with groups_that_end():
            results.append(result_on(topology, model, config, whole))
    return results


def result_on(topology: Any, model: str, config: TrainConfig, whole: Batch) -> Any:
    from spmdrl.algo.objectives import policy_objective
    from spmdrl.config import AlgoConfig
    from spmdrl.distributed.topology import Topology, train_degrees
    from spmdrl.engines.fsdp.engine import FsdpEngine

    ranks = Topology.build(topology.device, **train_degrees(config))
    engine = FsdpEngine.build("policy", model, config, ranks)
    engine.offload()
    mine: list[int] = []
    if ranks.rank in ranks.data_ranks:
        first = ranks.data_ranks.index(ranks.rank)
        mine = list(range(first, len(LENS), len(ranks.data_ranks)))
    batch = whole.select(mine)
    engine.onload()
    loss_fn = policy_objective(AlgoConfig(entropy_coef=0.01))
    metrics = [engine.update(batch, loss_fn, 0.8) for _ in range(2)]
    looked = engine.logprobs(batch, 0.8).logprobs
    parts = looked.split(batch.seq_lens.tolist())
    found = {int(s): part for s, part in zip(mine, parts, strict=True)}
    average = dict(engine.named_average(torch.float32, 1 << 20)) if config.ema else {}
    engine.offload()
    return metrics, found, {n: t.clone() for n, t in average.items()}


@pytest.fixture(scope="module")
def results(qwen3: Any, pytestconfig: pytest.Config) -> dict[Any, Any]:
    seed = pytestconfig.getoption("--seed")
    [alone] = run_calls(1, [(results_on, (str(qwen3), ALONE, seed))])
    [shared] = run_calls(2, [(results_on, (str(qwen3), RUNS, seed))], timeout_s=230)
    found = {(1, case): [each] for case, each in zip(ALONE, alone[0], strict=True)}
    for number, case in enumerate(RUNS):
        found[2, case] = [rank[number] for rank in shared]
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("names", RUNS, ids=" with ".join)
def test_numbers_are_those_of_one_plain_rank(results: dict[Any, Any], names: Any) -> None:
    [(want, sequences, _)] = results[1, learnt(names)]
    limit = 2e-4 if "adamw8bit" in names else 2e-5  # a code may be rounded to the other side
    seen: dict[int, torch.Tensor] = {}
    for metrics, found, average in results[2, names]:
        for got, one in zip(metrics, want, strict=True):
            assert got == pytest.approx(one, rel=limit, abs=limit)
        seen |= found
        assert bool(average) == ("ema" in names)
        assert all(torch.isfinite(tensor).all() for tensor in average.values())
    assert seen.keys() == sequences.keys()
    for number, one in sequences.items():
        torch.testing.assert_close(seen[number], one, rtol=10 * limit, atol=10 * limit)


def test_the_runs_have_every_pair() -> None:
    for a, b in itertools.combinations(OPTIONS, 2):
        wanted = {(True, False), (False, True), (False, False)}
        if (a, b) in PAIRS:
            wanted.add((True, True))
        assert {(a in names, b in names) for names in RUNS} == wanted, (a, b)
    plain = {name for names in RUNS if not learnt(names) for name in names}
    assert plain == set(NEUTRAL)


@pytest.mark.parametrize("pair", sorted(REFUSED), ids=" with ".join)
def test_what_does_not_go_together_is_refused_by_name(pair: Any, qwen3: Any) -> None:
    words = {"lora": "actor.lora", "muon": "muon", "ulysses": "ulysses=2", "replicas": "fsdp=1",
             "offload": "actor.offload_params", "offload policy": "offload_policy"}  # fmt: skip

    def check() -> None:
        check_training_role("actor", config_of(pair), (0, 1), 10)
        check_lora("actor", config_of(pair), load_hf_config(str(qwen3)))

    with pytest.raises(ConfigError) as error:
        check()
    assert all(words[name] in str(error.value) for name in pair), error.value
