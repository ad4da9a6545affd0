"""What algo.distillation is refused with, and whose tokens a teacher must have."""

from dataclasses import replace

import pytest
from tiny_models import CHARS, save_tokenizer
from transformers import AutoTokenizer, Qwen3Config

from spmdrl.config import (
    AlgoConfig,
    ConfigError,
    DataConfig,
    DistillationConfig,
    PpoConfig,
    RolloutConfig,
    TrainConfig,
)
from spmdrl.distributed.placement import place, training_roles
from spmdrl.training.checks.algorithms import check_algo
from spmdrl.training.checks.distillation import check_distillation, check_tokenizers
from spmdrl.training.checks.ranges import check_bounds

HF = Qwen3Config(vocab_size=len(CHARS))


def config_of(teacher="teacher", reward_coef=0.0, changes=None, **distillation):
    algo = AlgoConfig(
        advantage="reinforce",
        reward_coef=reward_coef,
        distillation=DistillationConfig(**distillation),
    )
    config = PpoConfig(
        "m", DataConfig("t"), "gsm8k", algo=algo, ref=TrainConfig(model=teacher),
        rollout=RolloutConfig(n=1),
    )  # fmt: skip
    return replace(config, **(changes or {}))


def check_all(config, hosted=False):
    check_bounds(config)
    check_distillation(config, HF, hosted)
    check_algo(config)


SENSE = [
    {}, {"reward_coef": 1.0}, {"reward_coef": 0.5, "loss": "jsd", "beta": 0.9},
    {"loss": "reverse_kl", "topk": 1, "loss_max_clamp": 10.0}, {"tail": False, "coef": 0.1},
    {"changes": {"ref": TrainConfig(model="teacher", engine="megatron")}},
]  # fmt: skip
NONSENSE = [
    ({"teacher": None}, ["ref.model", "None", "teacher"]),
    ({"teacher": "m"}, ["ref.model", "'m'", "another model"]),
    ({"topk": 65}, ["topk=65", "at most 64"]),
    ({"topk": 0}, ["topk=0", "at least 1"]),
    ({"beta": 0.2}, ["beta=0.2", "no effect", "'jsd'"]),
    ({"loss": "jsd", "beta": 1.0}, ["beta=1.0", "reverse_kl"]),
    ({"loss": "jsd", "beta": 0.0}, ["beta=0.0", "above 0"]),
    ({"loss": "reverse_kl", "tail": False}, ["tail=False", "'forward_kl'"]),
    ({"coef": 0.0}, ["coef=0.0", "above 0"]),
    ({"loss_max_clamp": 0.0}, ["loss_max_clamp=0.0", "above 0"]),
    ({"changes": {"prm": TrainConfig()}}, ["process reward model"]),
    ({"changes": {"strict": True}}, ["strict=True", "batch-invariant"]),
]


@pytest.mark.parametrize("settings", SENSE, ids=str)
def test_sense_is_not_refused_and_loads_the_teacher(settings):
    config = config_of(**settings)
    check_all(config)
    assert training_roles(config)["ref"].model == "teacher"
    assert place(replace(config, placement={"actor": "0", "ref": "1"}), 2).roles["ref"] == (1,)


@pytest.mark.parametrize(("settings", "words"), NONSENSE, ids=str)
def test_nonsense_is_refused(settings, words):
    with pytest.raises(ConfigError) as error:
        check_all(config_of(**settings))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_an_actor_of_another_program_and_a_small_vocabulary_are_refused():
    with pytest.raises(ConfigError, match="another program"):
        check_all(config_of(), hosted=True)
    with pytest.raises(ConfigError, match="topk=64, but the model has 61 tokens"):
        check_distillation(config_of(), Qwen3Config(vocab_size=61))


def test_a_teacher_must_mean_the_same_by_every_id(tmp_path, monkeypatch):
    save_tokenizer(tmp_path / "own")
    save_tokenizer(tmp_path / "same")
    monkeypatch.setattr("tiny_models.CHARS", [*CHARS[:7], CHARS[8], CHARS[7], *CHARS[9:]])
    save_tokenizer(tmp_path / "other")
    monkeypatch.undo()
    added = AutoTokenizer.from_pretrained(tmp_path / "own")
    added.add_tokens(["<think>"])
    added.save_pretrained(tmp_path / "more")

    def check(teacher):
        check_tokenizers(str(tmp_path / "own"), str(tmp_path / teacher))

    check("same")
    with pytest.raises(ConfigError, match=r"2 ids differ, id 7 is '4' there and '3' here"):
        check("other")
    with pytest.raises(ConfigError, match=f"id {len(CHARS)} is '<think>' there and None here"):
        check("more")
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="no tokenizer that loads"):
        check("none")
