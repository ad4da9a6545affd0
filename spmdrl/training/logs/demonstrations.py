"""Metrics of the demonstrations among a step's answers; those of sampled answers leave them out."""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.distributed.collectives import all_gather_rows
from spmdrl.distributed.topology import Topology
from spmdrl.types import Sample


def demonstration_metrics(
    samples: list[Sample], n: int, num_prompts: int, topology: Topology
) -> dict[str, float]:
    """demonstrations/share: of the prompts that were asked, those with a demonstration;
    demonstrations/reward and demonstrations/mean_tokens: means over demonstrations, the first over
    those with a reward.

    samples: of this rank, sampled ones too. n: answers to a prompt; num_prompts: asked on all ranks
    together. Collective.
    """
    rows = [
        [s.index == n - 1, s.reward is not None, s.reward or 0.0, s.num_response_tokens]
        for s in samples
        if s.is_demonstration
    ]
    own = torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)
    # a prompt's last answer is a demonstration, if it has any
    is_last, scored, rewards, tokens = torch.cat(all_gather_rows(own, topology)).unbind(1)
    metrics = {"demonstrations/share": float(is_last.sum()) / max(num_prompts, 1)}
    if len(tokens):
        metrics["demonstrations/mean_tokens"] = mean(tokens)
    if scored.any():
        metrics["demonstrations/reward"] = mean(rewards[scored > 0])
    return metrics


def mean(values: Tensor) -> float:
    """The mean in the order of the values, so that it does not depend on which rank has what."""
    return float(values.sort().values.mean())
