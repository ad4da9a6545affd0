"""Roles on ranks: what a placement means, and which are refused with the arithmetic."""

from dataclasses import replace

import pytest

from spmdrl.config import (
    AlgoConfig,
    ConfigError,
    CorrectionConfig,
    DataConfig,
    PpoConfig,
    RolloutConfig,
    TrainConfig,
    WeightsConfig,
)
from spmdrl.distributed.placement import parse_ranks, place, show_ranks
from spmdrl.training.checks.describe import placement_lines
from spmdrl.training.checks.memory_plan import memory_plan
from spmdrl.training.checks.rl import check_roles


def config_of(placement, **options):
    data = DataConfig("-", prompts_per_step=8)
    rollout = options.pop("rollout", RolloutConfig(engine="hf", n=4))
    return PpoConfig("-", data, "gsm8k", placement=placement, rollout=rollout, **options)


WITH_ALL = {
    "algo": AlgoConfig(advantage="gae", kl_coef=0.1, correction=CorrectionConfig(level="token")),
    "critic": TrainConfig(),
}


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("0-3", (0, 1, 2, 3)), ("4", (4,)), (5, (5,)), ("7, 0-2", (0, 1, 2, 7)), ((3, 1), (1, 3)),
     ("all", tuple(range(8)))],
)  # fmt: skip
def test_ranks_are_read(text, ranks):
    assert parse_ranks(text, 8, "placement['actor']") == ranks
    assert parse_ranks(show_ranks(ranks), 8, "again") == ranks


@pytest.mark.parametrize(
    ("text", "words"),
    [("0-8", "needs rank 8, but there are 8 ranks: 0-7"), ("3-1", "runs backwards"),
     ("0-99999999999999", "needs rank 99999999999999, but there are 8 ranks"),
     ("a", "expected ranks like"), ("", "expected ranks like"), ("-1", "expected ranks like"),
     ("0,0-1", "names a rank twice")],
)  # fmt: skip
def test_ranks_that_are_none(text, words):
    with pytest.raises(ConfigError, match=r"placement\['actor'\]") as error:
        parse_ranks(text, 8, "placement['actor']")
    assert words in str(error.value)


def test_what_is_not_named_follows():
    placement = place(config_of({"actor": "0-3", "rollout": "4-7", "critic": "6"}, **WITH_ALL), 8)
    assert placement.roles == {
        "actor": (0, 1, 2, 3), "rollout": (4, 5, 6, 7), "ref": (0, 1, 2, 3), "critic": (6,),
        "reward": (4, 5, 6, 7),
    }  # fmt: skip
    assert placement.sampling == (4, 5, 6, 7)
    assert placement.training == (0, 1, 2, 3, 6)
    everywhere = place(config_of({}), 3)
    assert set(everywhere.roles.values()) == {(0, 1, 2)}


@pytest.mark.parametrize(
    ("placement", "options", "words"),
    [
        ({"actro": "0"}, {}, "no role 'actro'; did you mean 'actor'"),
        ({"critic": "0"}, {}, "names critic, which this run does not have"),
        ({"actor": "0-1", "rollout": "2"}, {}, "uses 3 of 4 ranks; nothing would run on 3"),
        ({"rollout": "1-3", "actor": "0"}, {"rollout": RolloutConfig(tensor_parallel=2)},
         "tensor_parallel on ranks 1-3: dp=-1 x tp=2 does not fit 3 ranks"),
        ({"actor": "0-2", "rollout": "3"}, {"actor": TrainConfig(fsdp=2)},
         "actor.fsdp on ranks 0-2: dp=-1 x fsdp=2 does not fit 3 ranks"),
        ({"actor": "0-2", "rollout": "2-3"}, {"async_steps": 1, **WITH_ALL},
         "no rank can do both: ranks 2 are to"),
        ({"actor": "0-1", "rollout": "2-3"}, {"async_steps": 1},
         "async_steps trains on tokens of older weights: set algo.correction"),
        ({}, {"rollout": RolloutConfig(engine="hf", oversample=1.5)},
         "rollout.oversample trains on tokens of older weights"),
        ({"reward": "0"}, {"rollout": RolloutConfig(engine="hf", oversample=2), **WITH_ALL},
         "leave 'reward' out of placement"),
    ],
)  # fmt: skip
def test_impossible_placements_are_refused(placement, options, words):
    with pytest.raises(ConfigError) as error:
        check_roles(config_of(placement, **options), 4)
    assert words in str(error.value)


def test_the_plan_shows_where_everything_is(qwen3):
    config = config_of(
        {"actor": "0-3", "rollout": "4-7", "critic": "3,6-7"}, async_steps=0, **WITH_ALL
    )
    text = "\n".join(placement_lines(config, 8))
    assert "actor    ranks 0-3: dp 1 x fsdp 4" in text
    assert "critic   ranks 3,6-7: dp 1 x fsdp 3" in text
    assert "rollout  ranks 4-7: 4 hf engines x tp 1" in text
    small = replace(config, model=str(qwen3), weights=WeightsConfig(bucket_mib=1))
    config = replace(small, rollout=replace(config.rollout, kv_cache_mib=1))
    assert memory_plan(config, 8).all_lines()[-1].endswith("on rank 3, the fullest")
    offloaded = replace(config, actor=TrainConfig(offload_optimizer=True))
    assert any("Adam on the host while idle" in line for line in memory_plan(offloaded, 8).lines)
