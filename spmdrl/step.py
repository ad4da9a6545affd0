"""One step of reinforcement learning. Every rank runs every line.

samples = collect(roles, prompts, step)      sample, score
metrics = learn(roles, samples, ...)         balance, logprobs, advantages, update, sync weights
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.algo.advantages import (
    SEQUENCE_ESTIMATORS,
    TOKEN_ESTIMATORS,
    token_moments,
    token_rewards,
    whiten,
)
from spmdrl.algo.kl import ESTIMATORS
from spmdrl.algo.losses import loss_weights, policy_objective, value_objective
from spmdrl.collectives import all_gather_rows
from spmdrl.config import AlgoConfig, PpoConfig
from spmdrl.engines.engine import TrainEngine
from spmdrl.metrics import sample_metrics
from spmdrl.packing import balance
from spmdrl.phases import Phases
from spmdrl.rewards.runner import RewardRunner, check_invalid
from spmdrl.rollout.engine import RolloutEngine
from spmdrl.rollout.sampling import greedy_params, sample_prompts, training_params
from spmdrl.topology import Topology
from spmdrl.types import Batch, Prompt, Sample, segment_expand, segment_sum
from spmdrl.weights.sync import sync_weights


@dataclass
class Roles:
    """Who takes part in a step. `topology` spans all ranks; each engine knows its own."""

    config: PpoConfig
    topology: Topology
    phases: Phases
    tokenizer: Any
    rollout_topology: Topology
    rollout: RolloutEngine
    rewards: RewardRunner
    actor: TrainEngine
    ref: TrainEngine | None = None
    critic: TrainEngine | None = None
    policy_version: int = 0  # of the weights that the rollout engine holds


def collect(roles: Roles, prompts: list[tuple[int, Prompt]], step: int) -> list[Sample]:
    """Asks every prompt n times and scores the answers; returns those that this rank made.

    prompts: (group, prompt) of the whole step, the same on every rank.
    """
    config = roles.config
    with roles.phases("rollout"):
        samples = sample_prompts(
            roles.rollout, prompts, training_params(config.rollout), config.rollout.n,
            run_seed=config.seed, step=step, policy_version=roles.policy_version,
            topology=roles.rollout_topology, tokenizer=roles.tokenizer,
        )  # fmt: skip
        if config.rollout.sleep:
            roles.rollout.sleep()
    with roles.phases("reward"):
        roles.rewards.score(samples, roles.phases.still_going)
    return samples


def learn(roles: Roles, samples: list[Sample], num_prompts: int, step: int) -> dict[str, float]:
    """Updates the models from this step's samples and hands the engine the new weights.

    Returns the step's metrics, the same on every rank. Raises TooManyInvalid.
    """
    config, algo, topology, phases = roles.config, roles.config.algo, roles.topology, roles.phases
    temperature = config.rollout.temperature

    with phases("balance"):
        metrics = sample_metrics(samples, topology)
        check_invalid(samples, config.rewards, topology)
        batches, imbalance = balance(samples, num_prompts, algo.mini_batches, topology)
        metrics["balance/imbalance"] = imbalance

    if needs_old_logprobs(algo):
        with phases("old_logprobs"):
            roles.actor.onload()
            for batch in batches:
                batch.old_logprobs = roles.actor.logprobs(batch, temperature)
    if roles.ref is not None:
        with phases("ref_logprobs"):
            roles.ref.onload()
            for batch in batches:
                batch.ref_logprobs = roles.ref.logprobs(batch, temperature)
            roles.ref.offload()
    if roles.critic is not None:
        with phases("values"):
            roles.critic.onload()
            for batch in batches:
                batch.values = roles.critic.values(batch)

    with phases("advantages"):
        metrics |= add_advantages(batches, algo, topology)

    if roles.critic is not None:
        with phases("update_critic"):
            updates = train(roles.critic, batches, value_objective(algo), algo.epochs, temperature)
            metrics |= {f"critic/{name}": value for name, value in updates.items()}
            roles.critic.offload()
    if step > algo.critic_warmup_steps:
        with phases("update_actor"):
            roles.actor.onload()
            updates = train(roles.actor, batches, policy_objective(algo), algo.epochs, temperature)
            metrics |= {f"actor/{name}": value for name, value in updates.items()}
    sync(roles, version=step)
    return metrics


def sync(roles: Roles, version: int) -> None:
    """Gives the engine the actor's weights; `version` names them."""
    with roles.phases("sync"):
        roles.actor.onload()
        if roles.config.rollout.sleep:
            roles.rollout.wake()
        sync_weights(roles.actor, roles.rollout, roles.config.rollout.dtype, roles.config.weights)
        roles.actor.offload()
        roles.policy_version = version


def needs_old_logprobs(algo: AlgoConfig) -> bool:
    """With one update per rollout the update's own forward pass has them (algo.losses)."""
    return algo.epochs * algo.mini_batches > 1 or (algo.kl_coef > 0 and algo.kl_in == "reward")


def add_advantages(batches: list[Batch], algo: AlgoConfig, topology: Topology) -> dict[str, float]:
    """Sets advantages, loss_weights and, with a critic, returns. Collective.

    Statistics (of a group, of whitening, of the loss's divisor) are over all ranks' samples.
    """
    rewards = [rewards_of_tokens(batch, algo) for batch in batches]
    if algo.advantage in SEQUENCE_ESTIMATORS:
        for batch, advantage in zip(
            batches, sequence_advantages(batches, rewards, algo, topology), strict=True
        ):
            batch.advantages = segment_expand(advantage, batch.seq_lens) * batch.loss_mask
    else:
        moments = torch.zeros(3, dtype=torch.float64)
        for batch, reward in zip(batches, rewards, strict=True):
            assert batch.values is not None
            batch.advantages, batch.returns = TOKEN_ESTIMATORS[algo.advantage](
                reward, batch.values, batch.loss_mask, batch.seq_lens, algo.gamma, algo.lam
            )
            moments += token_moments(batch.advantages, batch.loss_mask)
        dist.all_reduce(moments, group=topology.group)
        for batch in batches:
            assert batch.advantages is not None
            batch.advantages = whiten(batch.advantages, batch.loss_mask, moments)
    for batch in batches:
        lens = batch.response_lens
        counts = torch.tensor([float(lens.sum()), float((lens > 0).sum())], dtype=torch.float64)
        dist.all_reduce(counts, group=topology.group)
        batch.loss_weights = loss_weights(
            batch.loss_mask, batch.seq_lens, lens, algo.aggregation, counts
        )
    return advantage_metrics(batches, topology)


def rewards_of_tokens(batch: Batch, algo: AlgoConfig) -> Tensor:
    """(num_tokens,): the reward at the end, less the KL penalty where it belongs to the reward."""
    kl = None
    if algo.kl_coef and algo.kl_in == "reward":
        assert batch.old_logprobs is not None and batch.ref_logprobs is not None
        kl = ESTIMATORS[algo.kl_estimator](batch.old_logprobs, batch.ref_logprobs)
    return token_rewards(batch.rewards, batch.loss_mask, batch.seq_lens, kl, algo.kl_coef)


def sequence_advantages(
    batches: list[Batch], rewards: list[Tensor], algo: AlgoConfig, topology: Topology
) -> list[Tensor]:
    """(num_seqs,) float32 for each batch, from the scores of all samples of the step."""
    mine = torch.cat(
        [
            torch.stack(
                [b.groups.double(), segment_sum(r.double(), b.seq_lens), b.valid.double()], dim=1
            )
            for b, r in zip(batches, rewards, strict=True)
        ]
    )  # (my sequences, 3)
    tables = all_gather_rows(mine, topology)
    groups, scores, valid = torch.cat(tables).unbind(1)
    advantages = SEQUENCE_ESTIMATORS[algo.advantage](scores, groups.long(), valid).float()
    first = sum(len(t) for t in tables[: topology.rank])
    own = advantages[first : first + len(mine)]
    return list(own.split([b.num_seqs for b in batches]))


def advantage_metrics(batches: list[Batch], topology: Topology) -> dict[str, float]:
    moments = torch.zeros(3, dtype=torch.float64)
    for batch in batches:
        assert batch.advantages is not None
        moments += token_moments(batch.advantages, batch.loss_mask)
    dist.all_reduce(moments, group=topology.group)
    count, total, squares = moments.tolist()
    mean = total / max(count, 1)
    std = max(squares / max(count, 1) - mean**2, 0.0) ** 0.5
    return {"advantage/mean": mean, "advantage/std": std, "rollout/loss_tokens": count}


def train(
    engine: TrainEngine, batches: list[Batch], loss_fn: Any, epochs: int, temperature: float
) -> dict[str, float]:
    """`epochs` passes of one update per mini-batch; metrics are means (maxima) over the updates."""
    updates = [
        engine.update(batch, loss_fn, temperature) for _ in range(epochs) for batch in batches
    ]
    return {
        name: max(u[name] for u in updates)
        if name.endswith("_max")
        else sum(u[name] for u in updates) / len(updates)
        for name in updates[0]
    }


def evaluate(
    roles: Roles, prompts: list[tuple[int, Prompt]], step: int
) -> tuple[list[Sample], dict[str, float]]:
    """Greedy answers to held-out prompts and their mean reward, per data_source where several."""
    with roles.phases("evaluate"):
        samples = sample_prompts(
            roles.rollout, prompts, greedy_params(roles.config.rollout), n=1,
            run_seed=roles.config.seed, step=step, policy_version=roles.policy_version,
            topology=roles.rollout_topology, tokenizer=roles.tokenizer, purpose="eval",
        )  # fmt: skip
        roles.rewards.score(samples, roles.phases.still_going)
    with roles.phases("evaluate"):
        metrics = sample_metrics(samples, roles.topology, by_source=True)
    picked = {
        name.replace("reward/mean", "accuracy"): value
        for name, value in metrics.items()
        if "reward/mean" in name or name in ("reward/invalid", "response/mean_tokens")
    }
    return samples, {f"eval/{name}": value for name, value in picked.items()}
