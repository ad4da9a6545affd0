"""Scoring on ranks of their own: answers go there as token ids, rewards come back as numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from spmdrl.collectives import all_to_all_rows
from spmdrl.phases import Phases
from spmdrl.roles import Sampler
from spmdrl.topology import Topology
from spmdrl.types import Prompt, Sample

REASONS = ("stop", "length", "abort")


def score(
    samples: list[Sample],
    sampler: Sampler,
    sampling: Topology,
    prompt_of: Callable[[int], Prompt],
    tokenizer: Any,
    phases: Phases,
) -> None:
    """Sets reward, reward_info and pred, or invalid, of what this rank made. Collective over
    `sampling`.

    prompt_of: by id, for ranks that score what others made.
    """
    if sampler.scoring.ranks == sampler.topology.ranks:
        assert sampler.rewards is not None
        sampler.rewards.score(samples, phases.still_going)
        return
    scorers = [sampling.ranks.index(rank) for rank in sampler.scoring.ranks]
    # sample i goes to scorer i mod s; each rank starts at another, so that small parts spread
    scorer_of = [scorers[(i + sampling.rank) % len(scorers)] for i in range(len(samples))]
    parts = [[s for s, r in zip(samples, scorer_of, strict=True) if r == rank]
             for rank in range(sampling.world)]  # fmt: skip
    heads = [
        [s.prompt.id, s.index, REASONS.index(s.finish_reason), len(s.response_ids)]
        for part in parts for s in part
    ]  # fmt: skip
    head = torch.tensor(heads, dtype=torch.int64).reshape(-1, 4)
    tokens = torch.tensor([t for part in parts for s in part for t in s.response_ids]).long()
    counts = [len(part) for part in parts]
    asked = all_to_all_rows(head, counts, sampling)
    asked_by = all_to_all_rows(torch.full((len(head), 1), sampling.rank), counts, sampling)
    lengths = [sum(len(s.response_ids) for s in part) for part in parts]
    answers = all_to_all_rows(tokens, lengths, sampling).split(asked[:, 3].tolist())
    theirs = [
        rebuilt(row, ids.tolist(), prompt_of, tokenizer)
        for row, ids in zip(asked.tolist(), answers, strict=True)
    ]
    if sampler.rewards is not None:
        sampler.rewards.score(theirs, phases.still_going)
    verdicts = [json.dumps([s.reward, s.invalid, s.reward_info, s.pred]).encode() for s in theirs]
    back = torch.bincount(asked_by.flatten(), minlength=sampling.world).tolist()
    sizes = all_to_all_rows(torch.tensor([len(v) for v in verdicts]).long(), back, sampling)
    by_maker = asked_by.flatten().tolist()
    num_bytes = [
        sum(len(v) for v, maker in zip(verdicts, by_maker, strict=True) if maker == rank)
        for rank in range(sampling.world)
    ]
    text = torch.frombuffer(bytearray(b"".join(verdicts) or b" "), dtype=torch.uint8)
    text = all_to_all_rows(text[: sum(num_bytes)], num_bytes, sampling)
    mine = [s for part in parts for s in part]
    for s, verdict in zip(mine, text.split(sizes.tolist()), strict=True):
        s.reward, s.invalid, s.reward_info, s.pred = json.loads(verdict.numpy().tobytes())


def rebuilt(
    row: list[int], ids: list[int], prompt_of: Callable[[int], Prompt], tokenizer: Any
) -> Sample:
    """As much of a sample as a reward function can ask for."""
    prompt_id, index, reason, _ = row
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return Sample(prompt_of(prompt_id), 0, index, ids, [], [], [], REASONS[reason], response=text)
