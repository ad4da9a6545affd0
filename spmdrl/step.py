"""One step of reinforcement learning. Every rank runs every line.

samples = collect(roles, prompts, step, ...)   sample, score
metrics = learn(roles, samples, step)          balance, logprobs, advantages, update
sync(roles, version=step)                      the new weights into the engine
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from spmdrl.algo.advantages import estimator_of
from spmdrl.algo.kl import next_entropy_coef, next_kl_coef
from spmdrl.algo.losses import (
    SELECTING_LOSSES,
    corrects,
    needs_old_logprobs,
    policy_objective,
    prm_objective,
    value_objective,
)
from spmdrl.algo.selection import overlong_penalty, unequal
from spmdrl.collectives import all_gather_rows, sum_over_ranks
from spmdrl.config import PpoConfig
from spmdrl.credit import add_advantages, add_correction, select_tokens, with_outcome_weights
from spmdrl.engines.engine import LossFn, TrainEngine
from spmdrl.metrics import sample_metrics
from spmdrl.packing import balance, pack_samples
from spmdrl.phases import Phases
from spmdrl.replay import ReplayBuffer
from spmdrl.rewards.runner import RewardRunner, check_invalid
from spmdrl.rollout.engine import RolloutEngine
from spmdrl.rollout.sampling import greedy_params, sample_prompts, training_params
from spmdrl.topology import Topology
from spmdrl.types import Batch, Prompt, Sample
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
    prm: TrainEngine | None = None
    replay: ReplayBuffer | None = None
    kl_coef: float = 0.0  # of the next step, where adaptive
    entropy_coef: float = 0.0
    entropy: float | None = None  # of the last step, where its coefficient is adaptive
    policy_version: int = 0  # of the weights that the rollout engine holds


@dataclass
class Collected:
    """What a step sampled. `samples` are to be trained on, groups 0 .. num_groups - 1.

    Both lists hold what this rank made; `asked` is more where dynamic sampling left groups out.
    """

    samples: list[Sample]
    num_groups: int  # the same on every rank
    asked: list[Sample]
    rounds: int = 0


def collect(
    roles: Roles, prompts: list[Prompt], step: int, more: Callable[[int], list[Prompt]]
) -> Collected:
    """Asks every prompt n times and scores the answers.

    prompts: of the whole step, the same on every rank; more(k): the k prompts after those. With
    dynamic sampling a group whose rewards are all equal is left out, and more prompts are asked
    until the step is full or algo.dynamic_sampling rounds are over (DAPO).
    """
    rounds = max(roles.config.algo.dynamic_sampling, 1)
    result = Collected([], 0, [], 0)
    wanted, num_asked = len(prompts), 0
    while True:
        result.rounds += 1
        asked = list(enumerate(prompts, start=num_asked))
        num_asked += len(prompts)
        samples = ask(roles, asked, step, result.rounds)
        result.asked += samples
        keep_groups(result, samples, wanted, roles)
        missing = wanted - result.num_groups
        if missing == 0 or result.rounds == rounds:
            break
        # as many as will do at the rate so far
        share = max(result.num_groups, 1) / num_asked
        prompts = more(min(wanted, math.ceil(missing / share)))
    if roles.config.rollout.sleep:
        with roles.phases("rollout"):
            roles.rollout.sleep()
    return result


def ask(
    roles: Roles, prompts: list[tuple[int, Prompt]], step: int, sampling_round: int
) -> list[Sample]:
    """Scored answers to (group, prompt) of the whole step, those that this rank made."""
    config, algo = roles.config, roles.config.algo
    where: dict[str, Any] = {
        "run_seed": config.seed, "step": step, "policy_version": roles.policy_version,
        "topology": roles.rollout_topology, "tokenizer": roles.tokenizer,
    }  # fmt: skip
    with roles.phases("rollout"):
        # a later round may ask a prompt again, after the end of an epoch: other seeds
        purpose = "train" if sampling_round == 1 else f"train round {sampling_round}"
        samples = sample_prompts(
            roles.rollout, prompts, training_params(config.rollout), config.rollout.n,
            purpose=purpose, **where,
        )  # fmt: skip
        greedy: list[Sample] = []
        if config.rollout.greedy_baseline:
            greedy = sample_prompts(
                roles.rollout, prompts, greedy_params(config.rollout), 1, purpose="greedy", **where
            )
    with roles.phases("reward"):
        roles.rewards.score(samples + greedy, roles.phases.still_going)
        add_greedy_rewards(samples, greedy)
        check_reward_keys(samples, tuple(algo.reward_keys))
        for sample in samples if algo.overlong_buffer else ():
            sample.penalty = overlong_penalty(
                len(sample.response_ids), config.rollout.max_tokens, algo.overlong_buffer,
                algo.overlong_penalty,
            )  # fmt: skip
    return samples


def add_greedy_rewards(samples: list[Sample], greedy: list[Sample]) -> None:
    """A sample whose greedy answer has no valid reward has no baseline, so it is invalid too."""
    baseline = {g.group: g for g in greedy}
    for sample in samples if greedy else ():
        other = baseline[sample.group]
        if other.reward is None and sample.invalid is None:
            sample.reward, sample.invalid = None, f"the greedy answer is invalid: {other.invalid}"
        sample.greedy_reward = other.reward or 0.0


def check_reward_keys(samples: list[Sample], keys: tuple[str, ...]) -> None:
    """Makes samples invalid whose reward function did not give all of algo.reward_keys."""
    for sample in samples:
        missing = [key for key in keys if key not in sample.reward_info]
        if missing and sample.invalid is None:
            got = sorted(sample.reward_info) or "a plain number"
            sample.reward = None
            sample.invalid = f"algo.reward_keys asks for {missing}, the reward function gave {got}"


def keep_groups(result: Collected, samples: list[Sample], wanted: int, roles: Roles) -> None:
    """Takes the groups of this round that are to be trained on, at most `wanted` altogether.

    All of them, or with dynamic sampling those with unequal rewards, in order of their number.
    """
    with roles.phases("reward"):
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.group, []).append(sample)
        good = list(groups)
        if roles.config.algo.dynamic_sampling:
            good = [
                g for g in good if unequal([s.reward for s in groups[g] if s.reward is not None])
            ]
        everyone = torch.cat(all_gather_rows(torch.tensor(good).long(), roles.topology))
        taken = sorted(everyone.tolist())[: wanted - result.num_groups]
        for number, group in enumerate(taken, start=result.num_groups):
            for sample in groups.get(group, ()):
                sample.group = number
                result.samples.append(sample)
        result.num_groups += len(taken)


def learn(roles: Roles, collected: Collected, step: int) -> dict[str, float]:
    """Updates the models from this step's samples.

    Returns the step's metrics, the same on every rank. Raises TooManyInvalid.
    """
    config, algo, topology, phases = roles.config, roles.config.algo, roles.topology, roles.phases
    temperature = config.rollout.temperature

    with phases("balance"):
        metrics = sample_metrics(collected.asked, topology)
        check_invalid(collected.asked, config.rewards, topology)
        if algo.dynamic_sampling:
            metrics["dynamic_sampling/rounds"] = collected.rounds
            metrics["dynamic_sampling/groups"] = collected.num_groups
        if collected.num_groups == 0:  # every group was equal: nothing to learn from
            return metrics | {"rollout/loss_tokens": 0.0}
        num_groups = collected.num_groups
        batch = pack_samples(collected.samples, tuple(algo.reward_keys))
        if roles.replay is not None:
            batch = roles.replay.mix(batch)
            num_groups = config.data.prompts_per_step * (1 + algo.replay_steps)
        mini_batches = min(algo.mini_batches, num_groups)
        batches, metrics["balance/imbalance"] = balance(batch, num_groups, mini_batches, topology)

    if algo.correction.bypass:
        for batch in batches:
            batch.old_logprobs = batch.rollout_logprobs
    elif needs_old_logprobs(algo):
        with phases("old_logprobs"):
            roles.actor.onload()
            for batch in batches:
                stats = roles.actor.logprobs(batch, temperature, estimator_of(algo).token_sums)
                batch.old_logprobs, batch.old_entropy, batch.pi_squared = stats
    if roles.ref is not None:
        with phases("ref_logprobs"):
            roles.ref.onload()
            for batch in batches:
                batch.ref_logprobs = roles.ref.logprobs(batch, temperature).logprobs
            roles.ref.offload()
    if roles.prm is not None:
        with phases("update_prm"):
            roles.prm.onload()
            for batch in batches:
                batch.prm_logprobs = roles.prm.logprobs(batch, temperature).logprobs
            outcomes = [with_outcome_weights(batch, topology) for batch in batches]
            updates = train(roles.prm, outcomes, prm_objective(algo), 1, temperature)
            metrics |= {f"prm/{name}": value for name, value in updates.items()}
            roles.prm.offload()
    if roles.critic is not None:
        with phases("values"):
            roles.critic.onload()
            for batch in batches:
                batch.values = roles.critic.values(batch)

    with phases("advantages"):
        kept = [batch.loss_mask for batch in batches]
        if corrects(algo) and not algo.correction.bypass:
            kept, correction = add_correction(batches, algo, topology)
            metrics |= correction
        batches, credit = add_advantages(batches, config, roles.kl_coef, kept, step, topology)
        metrics |= credit

    if roles.critic is not None:
        with phases("update_critic"):
            updates = train(roles.critic, batches, value_objective(algo), algo.epochs, temperature)
            metrics |= {f"critic/{name}": value for name, value in updates.items()}
            roles.critic.offload()
    if step > algo.critic_warmup_steps:
        with phases("update_actor"):
            roles.actor.onload()
            loss_fn = policy_objective(algo, roles.kl_coef, entropy_bonus(roles))
            select = selector(roles, step) if algo.policy_loss in SELECTING_LOSSES else None
            updates = train(roles.actor, batches, loss_fn, algo.epochs, temperature, select)
            metrics |= {f"actor/{name}": value for name, value in updates.items()}
        metrics |= adapt(roles, metrics, num_samples=len(collected.samples))
    return metrics


def selector(roles: Roles, step: int) -> Callable[[Batch, int], None]:
    """Chooses the tokens of clip_cov and kl_cov before each update, by the policy at hand."""

    def select(batch: Batch, update: int) -> None:
        logprobs = batch.old_logprobs
        if update > 0 or logprobs is None or roles.config.algo.correction.bypass:
            logprobs = roles.actor.logprobs(batch, roles.config.rollout.temperature).logprobs
        batch.selected = select_tokens(batch, logprobs, roles.config, step, update, roles.topology)

    return select


def train(
    engine: TrainEngine,
    batches: list[Batch],
    loss_fn: LossFn,
    epochs: int,
    temperature: float,
    before: Callable[[Batch, int], None] | None = None,
) -> dict[str, float]:
    """`epochs` passes of one update per mini-batch; metrics are means (maxima) over the updates.

    before(batch, number of updates done): called ahead of each.
    """
    updates: list[dict[str, float]] = []
    for _ in range(epochs):
        for batch in batches:
            if before is not None:
                before(batch, len(updates))
            updates.append(engine.update(batch, loss_fn, temperature))
    return {
        name: max(u[name] for u in updates)
        if name.endswith("_max")
        else sum(u[name] for u in updates) / len(updates)
        for name in updates[0]
    }


def adapt(roles: Roles, metrics: dict[str, float], num_samples: int) -> dict[str, float]:
    """The coefficients that this step was run with; sets those of the next."""
    algo = roles.config.algo
    used = {}
    if algo.kl_target is not None:
        used["actor/kl_coef"] = roles.kl_coef
        kl = metrics["reward/kl" if algo.kl_in == "reward" else "actor/ref_kl"]
        total = int(sum_over_ranks(num_samples, roles.topology))
        roles.kl_coef = next_kl_coef(roles.kl_coef, kl, algo.kl_target, algo.kl_horizon, total)
    if algo.entropy_target is not None:
        used["actor/entropy_coef"] = entropy_bonus(roles)
        roles.entropy = metrics["actor/entropy"]
        roles.entropy_coef = next_entropy_coef(
            roles.entropy_coef, metrics["actor/entropy"], algo.entropy_target, algo.entropy_delta
        )
    return used


def entropy_bonus(roles: Roles) -> float:
    """The coefficient of this step: an adaptive one rests while the entropy is above its target."""
    target = roles.config.algo.entropy_target
    if target is not None and roles.entropy is not None and roles.entropy > target:
        return 0.0
    return roles.entropy_coef


def sync(roles: Roles, version: int) -> None:
    """Gives the engine the actor's weights; `version` names them."""
    with roles.phases("sync"):
        roles.actor.onload()
        if roles.config.rollout.sleep:
            roles.rollout.wake()
        sync_weights(roles.actor, roles.rollout, roles.config.rollout.dtype, roles.config.weights)
        roles.actor.offload()
        roles.policy_version = version


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
