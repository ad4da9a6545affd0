"""Messages with numbers are English for one thing as for several."""

import pytest
from plan_configs import ppo_config

from spmdrl.config import ConfigError
from spmdrl.config.words import counted, verb
from spmdrl.distributed.placement import parse_ranks
from spmdrl.distributed.topology import resolve_degrees
from spmdrl.training.checks.describe import describe


def test_nouns_and_verbs_agree_with_their_number():
    assert [counted(n, "bad row") for n in (0, 1, 2)] == ["0 bad rows", "1 bad row", "2 bad rows"]
    assert [counted(2, noun) for noun in ("batch", "process", "place")] == [
        "2 batches", "2 processes", "2 places",
    ]  # fmt: skip
    assert [verb(1, word) for word in ("are", "have", "were", "name")] == [
        "is", "has", "was", "names",
    ]  # fmt: skip
    assert [verb(n, "have") for n in (0, 2)] == ["have", "have"]


def test_one_rank_and_one_update_are_told_in_the_singular(qwen3):
    with pytest.raises(ConfigError, match="fsdp=2 does not fit 1 rank: 2 does not divide 1"):
        resolve_degrees({"fsdp": 2}, 1)
    with pytest.raises(ConfigError, match="but there is 1 rank: 0-0"):
        parse_ranks("1", 1, "placement")
    text = describe(ppo_config(qwen3, steps=1), 1, 1, gpu_gib=None)
    assert "1 epoch: 1 update a step" in text and "\n  1 prompt / 12" in text
