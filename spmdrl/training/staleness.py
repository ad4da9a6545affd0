"""Measures how old the weights are that chose the tokens of a step."""

from __future__ import annotations

import torch
import torch.distributed as dist

from spmdrl.algo.demonstrations import sampled_mask
from spmdrl.training.roles import Roles
from spmdrl.types import Batch


def staleness(roles: Roles, batches: list[Batch], step: int) -> dict[str, float]:
    """Returns how many steps the weights that chose the tokens were behind those that now learn.

    Never more than config.async_steps, but for samples that were kept: partial ones and replayed.
    Demonstrations, which no weights of ours have chosen, do not count.
    """
    sums, most = torch.zeros(2, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    for batch in batches:
        mask = sampled_mask(batch)
        age = (step - 1 - batch.policy_version) * (mask > 0)
        sums += torch.stack([age.sum().double(), mask.sum(dtype=torch.float64)])
        if len(age):
            most = torch.maximum(most, age.max())
    dist.all_reduce(sums, group=roles.actor.topology.group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=roles.actor.topology.group)
    config = roles.config
    # samples of earlier steps are trained on: partial ones, or replayed
    keeps_samples = config.rollout.oversample > 1 or config.algo.replay_steps > 0
    known = keeps_samples or int(most) <= config.async_steps
    assert known, (int(most), config.async_steps)
    mean = float(sums[0] / sums[1].clamp(min=1))
    return {"staleness/mean": mean, "staleness/max": float(most)}
