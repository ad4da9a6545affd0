"""PRIME: a process reward model that learns from outcomes, one update ahead of the actor's.

Source: Cui et al., Process Reinforcement through Implicit Rewards, arXiv:2502.01456.
"""

from __future__ import annotations

from dataclasses import replace

from spmdrl.algo.losses import loss_counts, seq_mean_token_mean
from spmdrl.algo.objectives import prm_objective
from spmdrl.distributed.topology import Topology
from spmdrl.training.credit import summed
from spmdrl.training.dispatch import TrainBatches, send_to_role
from spmdrl.training.roles import Roles, train
from spmdrl.types import Batch


def update_process_reward_model(roles: Roles, batches: TrainBatches) -> None:
    """Sets prm_logprobs, then makes the model learn from the outcomes of the same samples, and
    gives prm_logprobs to the actor.

    Needs ref_logprobs. The actor's ranks wait for prm_logprobs; ranks with none of the three roles
    pass through.
    """
    prm, config = roles.prm, roles.config
    assert prm is not None and roles.ref is not None
    send_to_role(roles, batches, ("ref_logprobs",), roles.ref, prm)
    if prm.here:
        with roles.phases("update_prm", prm.topology):
            prm.model.onload()
            for batch in batches.of(prm):
                stats = prm.model.logprobs(batch, roles.temperature, images=prm.images)
                batch.prm_logprobs = stats.logprobs
            outcomes = [with_outcome_weights(batch, prm.topology) for batch in batches.of(prm)]
            updates = train(prm, outcomes, prm_objective(config.algo), config, epochs=1)
            batches.metrics |= {f"prm/{name}": value for name, value in updates.items()}
            prm.model.offload()
    send_to_role(roles, batches, ("prm_logprobs",), prm, roles.actor)


def with_outcome_weights(batch: Batch, topology: Topology) -> Batch:
    """Returns the batch with weights by which every sample of the mini-batch counts the same.

    Raises ValueError where a reward is no label.
    """
    rewards = batch.rewards[batch.valid > 0]
    if len(rewards) and (told := not_labels(float(rewards.min()), float(rewards.max()))):
        raise ValueError(told)
    counts = summed(loss_counts(batch.loss_mask, batch.seq_lens), topology)
    weights = seq_mean_token_mean(batch.loss_mask, batch.seq_lens, counts, 1)
    return replace(batch, loss_weights=weights)


def not_labels(lowest: float, highest: float) -> str:
    """Returns why rewards between these two are no labels of outcomes; "" where they are."""
    if 0 <= lowest <= highest <= 1:
        return ""
    return (
        f"advantage='prime' takes rewards as labels in 0..1, got {lowest:g} .. {highest:g}: have "
        "the reward function return such, or take another algo.advantage"
    )
