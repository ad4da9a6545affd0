"""What a rehearsal says of a config before anything runs: mistakes that no check refuses."""

import json
import re
from dataclasses import replace

import pytest
from review_rewards import boxed, constant, formatted, fragile, good, percent, upside_down
from tiny_models import CHARS, save_qwen3

from spmdrl.config import (
    CheckpointConfig,
    ConfigError,
    DataConfig,
    OptimConfig,
    PpoConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)
from spmdrl.distributed.phases import Phases
from spmdrl.rehearse.prepare import prepare
from spmdrl.rehearse.probes import Probes
from spmdrl.rehearse.review import Reviewed, failing_rewards
from spmdrl.training.runtime import Runtime

ROWS = [{"prompt": f"{i}+{i % 7}=", "answer": str(i + i % 7)} for i in range(40)]
HELD_OUT = [{"prompt": f"{i}+50=", "answer": str(i + 50)} for i in range(8)]
CHAT = "{% for m in messages %}{{ m.content }}<eot>{% endfor %}"
FORGETFUL = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}<eos>{% endfor %}"


def ask(messages):
    return []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("review")


@pytest.fixture(scope="module")
def model(folder):
    return str(save_qwen3(folder / "model"))


def with_template(folder, template, token=None):
    """A model whose tokenizer has this template, and one more special token."""
    from transformers import AutoTokenizer

    target = folder / f"model_{len(list(folder.glob('model_*')))}"
    save_qwen3(target, vocab_size=len(CHARS) + 1)
    tokenizer = AutoTokenizer.from_pretrained(target)
    if token is not None:
        tokenizer.add_special_tokens({"additional_special_tokens": [token]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(target)
    return str(target)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def config(tmp_path, model):
    return PpoConfig(
        model=model,
        data=DataConfig(
            train=write(tmp_path / "train.jsonl", ROWS),
            eval=write(tmp_path / "eval.jsonl", HELD_OUT), prompts_per_step=8,
            max_prompt_tokens=32, ground_truth_key="answer",
        ),
        reward=good,
        rewards=RewardConfig(workers=1),
        steps=20,
        rollout=RolloutConfig(engine="hf", n=4, max_tokens=16),
        actor=TrainConfig(optim=OptimConfig(lr=1e-6)),
        checkpoint=CheckpointConfig(every_steps=10),
        run_dir=str(tmp_path / "run"),
    )  # fmt: skip


@pytest.fixture
def said(config, topology, tmp_path):
    """Returns a function that says what looks wrong of the config with some groups changed."""

    def review_of(gpu_gib=80.0, **changes):
        runtime = Runtime(topology, Phases(topology), tmp_path)
        groups = {
            name: replace(getattr(config, name), **value) if isinstance(value, dict) else value
            for name, value in changes.items()
        }
        changed = replace(config, **groups)
        return prepare(changed, runtime, tmp_path / "out", 2, 0, gpu_gib).wrong

    return review_of


@pytest.mark.programs
def test_of_a_sound_config_nothing_is_said(said):
    assert said() == []
    assert said(reward=formatted) == []  # it asks for no ground truth, and tells nothing by it


# Each of these is legal, and was somebody's lost day: docs/rehearse.md has where.
BROKEN = {
    "constant": ({"reward": constant}, r"the reward is 0 for every one of \d+ answers"),
    "upside down": ({"reward": upside_down}, "does not tell them apart. Is its sign right"),
    "form": ({"reward": boxed}, r"reads answers in the form .boxed\{...\}.*no prompt asks for it"),
    "fails": ({"reward": fragile}, r"fails on \d+ of \d+ answers.*ValueError"),
    "percent": (
        {"reward": percent, "algo": {"advantage": "rloo"}}, "rewards reach 100, and advantages",
    ),
    "lr": ({"actor": {"optim": OptimConfig(lr=1e-3)}}, "actor.optim.lr=0.001 is above what trains"),
    "cold": ({"rollout": {"temperature": 0.1}}, "the 4 answers to a prompt will be all but the"),
    "kl": ({"algo": {"kl_coef": 1.0}}, "algo.kl_coef=1 holds the policy at the reference"),
    "epochs": ({"steps": 2000}, "ask each of 40 prompts 400 times"),
    "unkept": ({"checkpoint": {"every_steps": 50}}, "a run that fails before its end loses all"),
    "no evaluation": ({"data": {"eval": None}}, "data.eval is not set"),
    "short answers": ({"rollout": {"max_tokens": 1}}, "more than rollout.max_tokens=1 tokens"),
}  # fmt: skip


@pytest.mark.programs
@pytest.mark.parametrize("name", BROKEN)
def test_a_mistake_that_is_legal_is_named(said, name):
    changes, sentence = BROKEN[name]
    (found,) = said(**changes)
    assert_says(found, sentence)


def assert_says(found, sentence):
    assert re.search(sentence, found, re.DOTALL), found


@pytest.mark.programs
def test_mistakes_in_the_data_are_named(said, tmp_path):
    long = [{"prompt": "1" * 40, "answer": "1"} for _ in range(10)]
    (found,) = said(data={"train": write(tmp_path / "long.jsonl", ROWS + long)})
    assert_says(found, "10 of 50 prompts are longer than data.max_prompt_tokens=32")
    (found,) = said(data={"eval": write(tmp_path / "same.jsonl", HELD_OUT + ROWS[:3])})
    assert_says(found, "3 of 11 held-out prompts that were read are among those")
    two = [*ROWS, {"prompt": "1+1=", "answer": "3"}]
    (found,) = said(data={"train": write(tmp_path / "two.jsonl", two)})
    assert_says(found, "1 prompt stands in data.train with different ground truths")
    twice = [{**row, "prompt": f"<bos><bos>{row['prompt']}"} for row in ROWS]
    (found,) = said(data={"train": write(tmp_path / "bos.jsonl", twice)})
    assert_says(found, "prompts begin with '<bos>' twice")


@pytest.mark.programs
def test_mistakes_in_the_chat_template_are_named(said, folder, tmp_path):
    chats = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    data = {"train": write(tmp_path / "chats.jsonl", chats)}
    runs_on = with_template(folder, CHAT, "<eot>")
    (found,) = said(model=runs_on, data=data)
    number = len(CHARS)
    assert_says(
        found, rf"ends an answer with '<eot>' \(token {number}\).*stop_token_ids=\({number}"
    )
    assert said(model=runs_on, data=data, rollout={"stop_token_ids": (number,)}) == []
    (found,) = said(model=with_template(folder, FORGETFUL), data=data, environment=ask)
    assert_says(found, "takes <think>...</think> out of earlier turns")


def test_what_the_real_run_would_refuse_is_refused(said):
    with pytest.raises(ConfigError, match="does not divide into"):
        said(algo={"mini_batches": 3})


@pytest.mark.programs
def test_a_run_that_its_gpus_cannot_hold_is_told(said):
    (found,) = said(gpu_gib=1.0)
    assert_says(found, "GiB")


def test_a_reward_that_holds_up_the_step_is_named(config):
    probes = Probes(right={"bare": [1.0]}, tried=1, seconds=2.0)
    slow = replace(config, data=replace(config.data, prompts_per_step=512))
    (found,) = failing_rewards(Reviewed(slow, 8, None, None, None, probes))
    assert_says(found, "takes 2 s a sample: 2048 samples on 8 ranks x rewards.workers=1 are 512 s")
    assert [*failing_rewards(Reviewed(config, 8, None, None, None, probes))] == []
