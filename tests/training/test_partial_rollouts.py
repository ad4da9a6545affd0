"""What a step began and did not train on, with a real engine: it is asked on, and whole."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spmdrl.algo.algorithm import Algorithm
from spmdrl.config import AlgoConfig, ConfigError, DataConfig, PpoConfig, RolloutConfig
from spmdrl.data.packing import pack_samples
from spmdrl.data.prompt_order import PromptOrder, epoch_permutation
from spmdrl.distributed.phases import Phases
from spmdrl.distributed.topology import Topology
from spmdrl.rollout.hf.engine import HfEngine
from spmdrl.rollout.sampling import SampleRequest, as_request, questions_of, training_params
from spmdrl.rollout.scheduler import Scheduler
from spmdrl.training.collect import PromptSource, RolloutResult, ask_for_some, keep_groups
from spmdrl.training.credit import add_advantages
from spmdrl.training.partial_rollouts import PartialRollouts
from spmdrl.training.roles import Roles, Sampler
from spmdrl.types import Prompt, Sample

# no answer ends early: a group takes longer than the longest burst, after which a round may end
CONFIG = PpoConfig(
    model="-", data=DataConfig(train="-"), reward="gsm8k", algo=AlgoConfig(advantage="dr_grpo"),
    rollout=RolloutConfig(engine="hf", n=2, max_tokens=60, ignore_eos=True, dtype="float32"),
)  # fmt: skip


def prompt_of(id: int) -> Prompt:
    return Prompt(id, [5 + id, 6, 7], "d", "1", "p")


@pytest.fixture(scope="module")
def engine(qwen3: Path) -> Iterator[HfEngine]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/pg", rank=0, world_size=1)
        alone = Topology.build(torch.device("cpu"), dp=1, tp=1)
        yield HfEngine(str(qwen3), CONFIG.rollout, 100, alone)
        dist.destroy_process_group()


@pytest.fixture
def roles_of(engine: HfEngine) -> Iterator[Callable[..., Roles]]:
    """(prompts_per_step, max_num_seqs, what is left, version of the weights) -> Roles."""
    most, alone = engine.max_num_seqs, engine.topology
    sampler = Sampler(alone, Scheduler(engine, alone), alone, rewards=None)
    absent: Any = None  # nothing here trains

    def build(wanted: int, most: int, leftover: PartialRollouts, version: int) -> Roles:
        engine.max_num_seqs, engine.policy_version = most, version
        config = replace(CONFIG, data=replace(CONFIG.data, prompts_per_step=wanted))
        return Roles(
            config, alone, alone, alone, alone, Phases(alone), absent, engine.stops.tokenizer,
            sampler, weights=absent, mailbox=None, actor=absent, leftover=leftover,
        )  # fmt: skip

    yield build
    engine.max_num_seqs, engine.policy_version = most, 0


def begin(engine: HfEngine, questions: list[SampleRequest], num_steps: int) -> list[SampleRequest]:
    """The questions after so many steps of the engine."""
    ids = engine.add([as_request(q) for q in questions], training_params(CONFIG.rollout))
    for _ in range(num_steps):
        assert not engine.step()
    return [replace(q, begun=c) for q, c in zip(questions, engine.abort(ids), strict=True)]


def test_what_is_not_taken_before_the_next_early_stop_is_carried_on_intact(
    engine: HfEngine, roles_of: Callable[..., Roles], tmp_path: Path
) -> None:
    """Three groups begun by weights 0, and an engine with room for one of them. The others go
    through a checkpoint too, and end under weights 2 as if they had never been interrupted."""
    params, leftover = training_params(CONFIG.rollout), PartialRollouts(CONFIG.rollout)
    leftover.prompts = [(group, prompt_of(10 + group)) for group in range(3)]
    asked = questions_of(leftover.prompts, 2, run_seed=0, step=1)
    whole = {(q.group, q.index): engine.generate([as_request(q)], params)[0] for q in asked}
    leftover.questions = begin(engine, asked, num_steps=5)
    last = leftover.questions[4:]
    source = PromptSource(take=lambda count, step: pytest.fail("enough are left"), by_id=prompt_of)

    samples = ask_for_some(roles_of(1, 2, leftover, 1), leftover, source, step=2)
    assert [(s.group, s.index, s.prompt.id) for s in samples] == [(0, 0, 10), (0, 1, 10)]
    assert [prompt.id for _, prompt in leftover.prompts] == [11, 12]
    kept = [q for q in leftover.questions if q.prompt.id == 12]
    assert kept == last  # tokens, logprobs, versions, seed and place: the engine never ran them
    assert [len(q.begun.token_ids) for q in kept if q.begun] == [5, 5]

    leftover.save(tmp_path / "leftover.pt")
    loaded = PartialRollouts(CONFIG.rollout)
    loaded.load([tmp_path / "leftover.pt"], prompt_of, engine.stops.tokenizer, rank=0, world=1)
    assert loaded.questions == leftover.questions
    samples += ask_for_some(roles_of(2, 8, loaded, 2), loaded, source, step=3)
    assert not loaded.prompts and not loaded.questions and not loaded.samples
    assert len(samples) == 6
    for sample in samples:
        answer = whole[sample.prompt.id - 10, sample.index]
        assert sample.response_ids == answer.token_ids
        assert sample.rollout_logprobs == pytest.approx(answer.logprobs, abs=1e-5)
        assert sample.policy_version[:5] == [0] * 5
        assert sample.policy_version == sorted(sample.policy_version)
        if sample.prompt.id == 12:
            assert sample.policy_version[5:] == [2] * 55


def test_a_prompt_that_is_left_and_comes_again_in_a_new_epoch_makes_two_groups(
    engine: HfEngine, roles_of: Callable[..., Roles]
) -> None:
    order = PromptOrder(3, prompts_per_step=3, seed=1)
    order.next_step()  # the first epoch is over
    again, other, _ = epoch_permutation(3, 1, epoch=1, shuffle=True).tolist()
    leftover = PartialRollouts(
        CONFIG.rollout, [(4, prompt_of(again))]
    )  # a group of an earlier step
    left = questions_of(leftover.prompts, 2, run_seed=0, step=1)
    leftover.questions = begin(engine, left, num_steps=5)
    roles = roles_of(3, 8, leftover, 1)
    source = PromptSource(lambda count, step: [prompt_of(i) for i in order.take(count)], prompt_of)

    samples = ask_for_some(roles, leftover, source, step=2)
    assert [(s.group, s.index, s.prompt.id) for s in sorted(samples, key=lambda s: s.group)] == [
        (group, index, id) for group, id in enumerate([again, again, other]) for index in range(2)
    ]
    assert len({tuple(s.response_ids) for s in samples}) == 6  # no seed is used twice
    for sample in samples:
        sample.reward = [0.0, 10.0, 100.0][sample.group] + sample.index
    result = RolloutResult([], 0, [])
    heard = keep_groups(result, samples, 3, roles)
    rewards = [[[0.0, 10.0, 100.0][group] + index for index in range(2)] for group in range(3)]
    assert heard == list(zip([again, again, other], rewards, strict=True))
    assert result.num_groups == 3
    assert (result.num_sampled, result.num_equal) == (3, 0)
    counted = RolloutResult([], 0, [])
    keep_groups(counted, [replace(s, reward=1.0) for s in samples if s.group < 2], 2, roles)
    assert (counted.num_sampled, counted.num_equal) == (2, 2)
    short = [replace(s, reward=1.0, penalty=-0.1 * s.index) for s in samples if s.group == 0]
    keep_groups(counted, short, 1, roles)  # what the algorithm is given differs
    assert (counted.num_sampled, counted.num_equal) == (3, 2)
    batch = pack_samples(sorted(result.samples, key=lambda s: (s.group, s.index)))
    batch.old_logprobs = batch.rollout_logprobs

    def by_sample(**changes: Any) -> list[float]:
        config = replace(roles.config, algo=replace(roles.config.algo, **changes))
        add_advantages([batch], config, Algorithm.of(config.algo), 0.0, engine.topology)
        assert batch.advantages is not None
        return batch.advantages[batch.cu_seqlens[1:] - 1].tolist()

    assert by_sample() == pytest.approx([-0.5, 0.5] * 3)  # each is held to the mean of its group
    clipped = by_sample(reward_clip=(0.25, 50.0))  # rewards 0, 1; 10, 11; 100, 101
    assert clipped == pytest.approx([-0.375, 0.375, -0.5, 0.5, 0, 0])


def test_groups_are_unequal_by_the_number_that_is_asked_for(engine: HfEngine) -> None:
    found = [
        Sample(prompt_of(0), group, i, [5], [0.0], [1], [0], "stop", reward=float(i * by_reward),
               reward_info={"acc": float(i * by_metric)})
        for group, (by_reward, by_metric) in enumerate(((1, 0), (0, 1), (100, 0)))
        for i in range(2)
    ]  # fmt: skip

    def kept(**algo: Any) -> list[float]:
        config = replace(CONFIG, algo=AlgoConfig(dynamic_sampling=2, **algo))
        roles: Any = SimpleNamespace(
            config=config, algorithm=Algorithm.of(config.algo), sampling=engine.topology,
            phases=lambda *_: nullcontext(),
        )  # fmt: skip
        result = RolloutResult([], 0, [])
        keep_groups(result, [replace(s) for s in found], 3, roles)
        return [s.reward for s in result.samples if s.index == 1]

    assert kept() == [1.0, 100.0]
    assert kept(dynamic_sampling_metric="acc") == [0.0]
    assert kept(reward_clip=(1.0, 5.0)) == [100.0]


def test_what_an_earlier_version_wrote_is_refused(engine: HfEngine, tmp_path: Path) -> None:
    leftover = PartialRollouts(CONFIG.rollout, [(0, prompt_of(10))])
    leftover.save(tmp_path / "leftover.pt")
    old = torch.load(tmp_path / "leftover.pt")
    del old["format"]
    torch.save(old, tmp_path / "leftover.pt")
    with pytest.raises(ConfigError, match=r"an earlier version.*--rollout\.oversample 1"):
        leftover.load([tmp_path / "leftover.pt"], prompt_of, engine.stops.tokenizer, 0, 1)
