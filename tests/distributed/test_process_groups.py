"""All ranks of a large job make the same process groups, in the same order, and few of them."""

import dataclasses
from typing import Any

import process_groups
import pytest
from process_groups import compare, sample

from spmdrl.config import DataConfig, PpoConfig, RolloutConfig, TrainConfig
from spmdrl.distributed.nccl_rules.rules import RulesBroken
from spmdrl.distributed.topology import Topology

BASE = PpoConfig(model="model", data=DataConfig(train="train.jsonl"), reward="math")
MEGATRON = TrainConfig(engine="megatron", tensor_parallel=2, pipeline_parallel=2)
# ranks, fields of the config, most groups of a rank, most communicators of a rank
CASES: dict[str, tuple[int, dict[str, Any], int, int]] = {
    "all on all": (1024, {}, 6, 2),
    "replicas, critic": (
        256, {"actor": TrainConfig(fsdp=32), "critic": TrainConfig(fsdp=32)}, 8, 4
    ),
    "split": (
        256,
        {"placement": {"actor": "0-127", "rollout": "128-255"},
         "rollout": RolloutConfig(tensor_parallel=8), "async_steps": 1},
        9, 4,
    ),
    "overlap": (
        64,
        {"placement": {"actor": "0-31", "rollout": "16-63", "critic": "0,2,4,6,40-43"},
         "critic": TrainConfig()},
        16, 8,
    ),
    "ulysses": (256, {"actor": TrainConfig(fsdp=32, ulysses=8)}, 10, 6),
    "megatron": (32, {"actor": MEGATRON, "rollout": RolloutConfig(tensor_parallel=2)}, 31, 24),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [*list(CASES)[:-1], pytest.param("megatron", marks=pytest.mark.megatron)]
)
def test_all_ranks_make_the_same_groups(name: str) -> None:
    """Some ranks of each job are compared: the first, the last and others between."""
    world, fields, most_groups, most_communicators = CASES[name]
    ranks = sample(world, 20)[:: 4 if world > 256 else 2]
    made = compare(dataclasses.replace(BASE, **fields), world, ranks)
    assert max(m.groups for m in made.values()) <= most_groups
    assert max(m.communicators for m in made.values()) <= most_communicators
    assert all(m.created for m in made.values())


def test_a_rank_that_makes_other_groups_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the stacks of both ranks."""
    build = process_groups.build_topologies

    def differs(config: PpoConfig, placement: Any, everyone: Topology) -> Any:
        if everyone.rank == 5:
            Topology.build(everyone.device, [4, 5], dp=-1)
        return build(config, placement, everyone)

    monkeypatch.setattr(process_groups, "build_topologies", differs)
    with pytest.raises(RulesBroken, match="do not make the same groups") as broken:
        compare(BASE, 8, list(range(8)))
    assert "in differs" in str(broken.value) and "rank 5 makes group" in str(broken.value)
