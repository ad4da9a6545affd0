"""Scoring on ranks of their own: answers go there as token ids, rewards come back as numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any, Protocol

import torch

from spmdrl.distributed.collectives import all_to_all_rows
from spmdrl.distributed.phases import Phases
from spmdrl.distributed.progress import PROGRESS
from spmdrl.distributed.topology import Topology
from spmdrl.rewards.invalid import InvalidWatch
from spmdrl.rewards.runner import RewardRunner, Scoring
from spmdrl.rollout.answer_codec import pack, unpack
from spmdrl.rollout.sampling import SampleRequest, as_samples, completion_of
from spmdrl.training.roles import Sampler
from spmdrl.types import Judgement, Prompt, Sample


class ScoringContext(Protocol):
    """A ScoringContext has samples scored: the Roles of a run, or less."""

    sampler: Sampler
    sampling: Topology  # ranks that sample or score
    phases: Phases
    tokenizer: Any


def score(
    samples: list[Sample], by: ScoringContext, prompt_of: Callable[[int], Prompt], phase: str
) -> None:
    """Sets reward, turn_rewards, reward_info and pred, or invalid, of what this rank made, in
    phases so named.

    prompt_of: by id, for ranks that score what others made. Collective over by.sampling.
    """
    rewards, sampling, phases = by.sampler.rewards, by.sampling, by.phases
    if by.sampler.scoring.ranks == by.sampler.topology.ranks:
        ask_models(samples, by, held_out=phase == "evaluate")
        with phases(phase, sampling):
            assert rewards is not None
            finish_scoring(rewards.begin(samples), rewards, by)
        return
    score_remotely(samples, by, prompt_of, phase)


def ask_models(samples: list[Sample], by: ScoringContext, held_out: bool) -> None:
    """Sets model_score, where there is a reward model, and judgement, where there is a judge. On
    the ranks that score.
    """
    model, judge, rewards = by.sampler.reward_model, by.sampler.judge, by.sampler.rewards
    if model is not None:
        with by.phases("reward_model", by.sampler.scoring):
            model.score(samples)
    if judge is not None:
        assert rewards is not None
        with by.phases("judge", by.sampler.scoring):
            judge.score(samples, rewards.asks_judge, held_out, by.phases.still_going)


def score_remotely(
    samples: list[Sample], by: ScoringContext, prompt_of: Callable[[int], Prompt], phase: str
) -> None:
    """Does what `score` does, where other ranks score than those that sample."""
    rewards, sampling, phases = by.sampler.rewards, by.sampling, by.phases
    phases.barrier("wait answers", sampling)  # who only scores has nothing to do until then
    with phases(phase, sampling):
        sent, received, makers = send_to_scorers(samples, by, prompt_of)
    ask_models(received, by, held_out=phase == "evaluate")
    with phases(phase, sampling):
        if rewards is not None:
            finish_scoring(rewards.begin(received), rewards, by)
    phases.barrier("wait rewards", sampling)
    with phases(phase, sampling):
        return_verdicts(sent, received, makers, sampling)


def finish_scoring(begun: Scoring, rewards: RewardRunner, by: ScoringContext) -> None:
    """Collective over the ranks that score. Raises TooManyInvalid, on the first rank to see it."""
    watch = InvalidWatch(rewards.config, len(begun.samples), by.sampler.scoring)
    alone, num_scored = by.sampler.scoring.world == 1, 0
    what = "answers scored" if alone else "answers scored on rank 0"

    def scored(sample: Sample) -> None:
        nonlocal num_scored
        num_scored += 1
        PROGRESS.count(num_scored, len(begun.samples), what)
        by.phases.still_going()  # slow rewards are no hang
        if sample.invalid is not None:
            watch.failed(sample, sample.invalid)

    rewards.finish(begun, scored)


def send_to_scorers(
    samples: list[Sample], by: ScoringContext, prompt_of: Callable[[int], Prompt]
) -> tuple[list[Sample], list[Sample], list[int]]:
    """Returns this rank's samples in the order of who scores them, the samples that it is to score,
    and which rank made each of those. Collective.
    """
    sampling = by.sampling
    scorers = [sampling.ranks.index(rank) for rank in by.sampler.scoring.ranks]
    # sample i goes to scorer i mod s; each rank starts at another, so that small parts spread
    scorer_of = [scorers[(i + sampling.rank) % len(scorers)] for i in range(len(samples))]
    parts = [[s for s, r in zip(samples, scorer_of, strict=True) if r == rank]
             for rank in range(sampling.world)]  # fmt: skip
    sent = [s for part in parts for s in part]
    rows = [[s.prompt.id, s.index, s.group] for s in sent]
    head = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)
    counts = [len(part) for part in parts]
    addresses = all_to_all_rows(head, counts, sampling)
    makers = all_to_all_rows(torch.full((len(head), 1), sampling.rank), counts, sampling)
    said = [[replace(completion_of(s), routed_experts=None) for s in part] for part in parts]
    packed = [pack(dict(enumerate(part))) for part in said]
    answers = [a for part in all_to_all_bytes(packed, sampling) for a in unpack(part).values()]
    questions = [
        SampleRequest(prompt_of(id), group, index, seed=0)
        for id, index, group in addresses.tolist()
    ]
    received = as_samples(questions, answers, by.tokenizer)
    return sent, received, makers.flatten().tolist()


def return_verdicts(
    sent: list[Sample], received: list[Sample], makers: list[int], sampling: Topology
) -> None:
    """Exchanges verdicts: this rank gives those on others' samples, and takes those on its own; see
    send_to_scorers. Collective.
    """
    verdicts: list[list[Any]] = [[] for _ in range(sampling.world)]
    for s, maker in zip(received, makers, strict=True):
        judged = None if s.judgement is None else astuple(s.judgement)
        told = [s.reward, s.invalid, s.reward_info, s.pred, s.turn_rewards, judged]
        verdicts[maker].append(told)
    returned = all_to_all_bytes([json.dumps(v).encode() for v in verdicts], sampling)
    own = [verdict for part in returned for verdict in json.loads(part)]
    for s, verdict in zip(sent, own, strict=True):
        s.reward, s.invalid, s.reward_info, s.pred, s.turn_rewards, judged = verdict
        s.judgement = None if judged is None else Judgement(*judged)


def all_to_all_bytes(parts: list[bytes], topology: Topology) -> list[bytes]:
    """parts: one for each rank; what each of them sent. Collective."""
    sizes = [len(part) for part in parts]
    received = all_to_all_rows(torch.tensor(sizes), [1] * len(parts), topology).tolist()
    sent = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
    rows = all_to_all_rows(sent, sizes, topology)
    return [part.numpy().tobytes() for part in rows.split(received)]
