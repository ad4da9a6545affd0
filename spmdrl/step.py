"""One step of reinforcement learning. Every rank runs every line.

collected = collect(roles, prompts, step, ...)   sample, score (collect.py)
metrics = learn(roles, collected, step)          balance, logprobs, advantages, update
sync(roles, version=step)                        the new weights into the engine
"""

from __future__ import annotations

from collections.abc import Callable

from spmdrl.algo.advantages import estimator_of
from spmdrl.algo.kl import next_entropy_coef, next_kl_coef
from spmdrl.algo.objectives import (
    corrects,
    needs_old_logprobs,
    policy_objective,
    prm_objective,
    selects,
    value_objective,
)
from spmdrl.collect import Collected
from spmdrl.collectives import sum_over_ranks
from spmdrl.credit import (
    add_advantages,
    add_correction,
    resample,
    select_tokens,
    with_outcome_weights,
)
from spmdrl.engines.engine import LossFn, TrainEngine
from spmdrl.metrics import sample_metrics
from spmdrl.packing import balance, pack_samples
from spmdrl.rewards.runner import check_invalid
from spmdrl.roles import Roles
from spmdrl.types import Batch


def learn(roles: Roles, collected: Collected, step: int) -> dict[str, float]:
    """Updates the models from this step's samples.

    Returns the step's metrics, the same on every rank. Raises TooManyInvalid.
    """
    config, algo, topology, phases = roles.config, roles.config.algo, roles.topology, roles.phases
    temperature = config.rollout.temperature

    with phases("balance"):
        metrics = sample_metrics(collected.asked, topology, penalised=algo.overlong_buffer > 0)
        check_invalid(collected.asked, config.rewards, topology)
        if algo.dynamic_sampling:
            metrics["dynamic_sampling/rounds"] = collected.rounds
            metrics["dynamic_sampling/groups"] = collected.num_groups
        if collected.num_groups == 0:  # every group was equal: nothing to learn from
            return metrics | {"rollout/loss_tokens": 0.0}
        batch = pack_samples(collected.samples, tuple(algo.reward_keys))
        if roles.replay is not None:
            batch, metrics["filter/kept"] = resample(
                roles.replay.mix(batch), config, step, topology
            )
        batches, metrics["balance/imbalance"] = balance(batch, algo.mini_batches, topology)

    metrics |= look(roles, batches)
    with phases("advantages"):
        if corrects(algo) and not algo.correction.bypass:
            metrics |= add_correction(batches, algo, topology)
        metrics |= add_advantages(batches, config, roles.kl_coef, topology)

    if roles.critic is not None:
        with phases("update_critic"):
            updates = train(roles.critic, batches, value_objective(algo), algo.epochs, temperature)
            metrics |= {f"critic/{name}": value for name, value in updates.items()}
            roles.critic.offload()
    if step > algo.critic_warmup_steps:
        with phases("update_actor"):
            roles.actor.onload()
            loss_fn = policy_objective(algo, roles.kl_coef, entropy_bonus(roles))
            select = selector(roles, step) if selects(algo) else None
            updates = train(roles.actor, batches, loss_fn, algo.epochs, temperature, select)
            metrics |= {f"actor/{name}": value for name, value in updates.items()}
        metrics |= adapt(roles, metrics, num_samples=len(collected.samples))
    return metrics


def look(roles: Roles, batches: list[Batch]) -> dict[str, float]:
    """What each model says of the samples before any of them learns; the prm then learns at once.

    Sets old_logprobs, ref_logprobs, prm_logprobs and values where they are needed.
    """
    config, algo, phases = roles.config, roles.config.algo, roles.phases
    temperature, metrics = config.rollout.temperature, {}
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
            outcomes = [with_outcome_weights(batch, roles.topology) for batch in batches]
            updates = train(roles.prm, outcomes, prm_objective(algo), 1, temperature)
            metrics = {f"prm/{name}": value for name, value in updates.items()}
            roles.prm.offload()
    if roles.critic is not None:
        with phases("values"):
            roles.critic.onload()
            for batch in batches:
                batch.values = roles.critic.values(batch)
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

    before(batch, number of updates done): called ahead of each. A mini-batch that has nothing to
    learn from on any rank makes no update.
    """
    updates: list[dict[str, float]] = []
    for _ in range(epochs):
        for batch in batches:
            if before is not None:
                before(batch, len(updates))
            updates.append(engine.update(batch, loss_fn, temperature))
    done = [update for update in updates if update]
    return {
        name: max(u[name] for u in done)
        if name.endswith("_max")
        else sum(u[name] for u in done) / len(done)
        for name in (done[0] if done else ())
    }


def adapt(roles: Roles, metrics: dict[str, float], num_samples: int) -> dict[str, float]:
    """The coefficients that this step was run with; sets those of the next."""
    algo = roles.config.algo
    used: dict[str, float] = {}
    if "actor/entropy" not in metrics:  # there was nothing to learn from
        return used
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
        assert roles.weight_sync is not None
        roles.weight_sync.push()
        roles.actor.offload()
        roles.policy_version = version
