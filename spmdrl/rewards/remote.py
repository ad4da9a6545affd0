"""Scoring on ranks of their own: answers go there as token ids, rewards come back as numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

import torch

from spmdrl.collectives import all_to_all_rows
from spmdrl.phases import Phases
from spmdrl.roles import Sampler
from spmdrl.topology import Topology
from spmdrl.types import Prompt, Sample

REASONS = ("stop", "length", "abort")


class Scorer(Protocol):
    """Who has samples scored: the Roles of a run, or less."""

    sampler: Sampler
    sampling: Topology  # ranks that sample or score
    phases: Phases
    tokenizer: Any


def score(
    samples: list[Sample], by: Scorer, prompt_of: Callable[[int], Prompt], phase: str
) -> None:
    """Sets reward, reward_info and pred, or invalid, of what this rank made, in phases so named.

    prompt_of: by id, for ranks that score what others made. Collective over by.sampling.
    """
    rewards, sampling, phases = by.sampler.rewards, by.sampling, by.phases
    if by.sampler.scoring.ranks == by.sampler.topology.ranks:
        with phases(phase, sampling):
            assert rewards is not None
            rewards.score(samples, phases.still_going)
        return
    with phases("wait answers", sampling):
        pass  # who only scores has nothing to do until all have theirs
    with phases(phase, sampling):
        mine, theirs, makers = hand_over(samples, by, prompt_of)
        if rewards is not None:
            rewards.score(theirs, phases.still_going)
    with phases("wait rewards", sampling):
        pass
    with phases(phase, sampling):
        take_back(mine, theirs, makers, sampling)


def hand_over(
    samples: list[Sample], by: Scorer, prompt_of: Callable[[int], Prompt]
) -> tuple[list[Sample], list[Sample], list[int]]:
    """(my samples by who scores them, those that I am to score, who made each). Collective."""
    sampling = by.sampling
    scorers = [sampling.ranks.index(rank) for rank in by.sampler.scoring.ranks]
    # sample i goes to scorer i mod s; each rank starts at another, so that small parts spread
    scorer_of = [scorers[(i + sampling.rank) % len(scorers)] for i in range(len(samples))]
    parts = [[s for s, r in zip(samples, scorer_of, strict=True) if r == rank]
             for rank in range(sampling.world)]  # fmt: skip
    mine = [s for part in parts for s in part]
    heads = [[s.prompt.id, s.index, REASONS.index(s.finish_reason), len(s.response_ids)]
             for s in mine]  # fmt: skip
    head = torch.tensor(heads, dtype=torch.int64).reshape(-1, 4)
    tokens = torch.tensor([t for s in mine for t in s.response_ids]).long()
    counts = [len(part) for part in parts]
    asked = all_to_all_rows(head, counts, sampling)
    asked_by = all_to_all_rows(torch.full((len(head), 1), sampling.rank), counts, sampling)
    lengths = [sum(len(s.response_ids) for s in part) for part in parts]
    answers = all_to_all_rows(tokens, lengths, sampling).split(asked[:, 3].tolist())
    theirs = [
        rebuilt(row, ids.tolist(), prompt_of, by.tokenizer)
        for row, ids in zip(asked.tolist(), answers, strict=True)
    ]
    return mine, theirs, asked_by.flatten().tolist()


def take_back(
    mine: list[Sample], theirs: list[Sample], makers: list[int], sampling: Topology
) -> None:
    """What others say of mine, for what I say of theirs; see hand_over. Collective."""
    verdicts = [json.dumps([s.reward, s.invalid, s.reward_info, s.pred]).encode() for s in theirs]
    by_maker: list[list[bytes]] = [[] for _ in range(sampling.world)]
    for verdict, maker in zip(verdicts, makers, strict=True):
        by_maker[maker].append(verdict)
    sizes = torch.tensor([len(v) for part in by_maker for v in part]).long()
    sizes = all_to_all_rows(sizes, [len(part) for part in by_maker], sampling)
    num_bytes = [sum(map(len, part)) for part in by_maker]
    text = torch.frombuffer(bytearray(b"".join(map(b"".join, by_maker)) or b" "), dtype=torch.uint8)
    text = all_to_all_rows(text[: sum(num_bytes)], num_bytes, sampling)
    for s, verdict in zip(mine, text.split(sizes.tolist()), strict=True):
        s.reward, s.invalid, s.reward_info, s.pred = json.loads(verdict.numpy().tobytes())


def rebuilt(
    row: list[int], ids: list[int], prompt_of: Callable[[int], Prompt], tokenizer: Any
) -> Sample:
    """As much of a sample as a reward function can ask for."""
    prompt_id, index, reason, _ = row
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return Sample(prompt_of(prompt_id), 0, index, ids, [], [], [], REASONS[reason], response=text)
