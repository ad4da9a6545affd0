"""One step of reinforcement learning: `train_step` is the algorithm, every rank runs every line.

A rank outside of a role's placement passes through that role's lines without waiting, so that roles
on ranks of their own work at the same time; they meet where one needs what another has computed.
"""

from __future__ import annotations

from collections.abc import Callable

from spmdrl.algo.correction import take_mismatch
from spmdrl.algo.demonstrations import take_shares
from spmdrl.algo.objectives import policy_objective, value_objective
from spmdrl.distributed.progress import PROGRESS
from spmdrl.training.checks.strict import require_equal
from spmdrl.training.coefficients import adapt, entropy_bonus
from spmdrl.training.collect import RolloutResult
from spmdrl.training.credit import add_advantages, add_correction, select_tokens
from spmdrl.training.dispatch import TrainBatches, dispatch_batches, send_to_role
from spmdrl.training.logs.metrics import merged
from spmdrl.training.mismatch.explain import explain_mismatch
from spmdrl.training.online_preference import prepare_pairs, weigh_pairs
from spmdrl.training.process_reward_model import update_process_reward_model
from spmdrl.training.push_weights import push_weights
from spmdrl.training.reference_sync import sync_reference
from spmdrl.training.roles import Roles, train
from spmdrl.training.staleness import staleness
from spmdrl.training.teacher_logprobs import (
    ask_teachers,
    compute_ref_logprobs,
    compute_teacher_logprobs,
    send_teachers_logprobs,
)
from spmdrl.types import Batch


def train_step(
    roles: Roles, generate_and_score: Callable[[int], RolloutResult], step: int, push: bool = True
) -> TrainBatches | None:
    """Generates answers, scores them, updates critic and actor, and pushes the actor's weights.

    generate_and_score: makes this rank's answers of a step, with rewards (`collect.collect`).
    step: counted from 1; seeds are made from it. push: without it the caller gives the rollout
    engine its weights. Returns what was trained on, with the step's metrics in `metrics`, which are
    the same on every rank that trains; None on the others. Raises PhaseError on every rank.
    """
    config, algo = roles.config, roles.config.algo
    rollout = generate_and_score(step) if roles.sampling.here else None
    batches = dispatch_batches(roles, rollout, step)
    if batches is not None and batches.is_empty:
        batches.metrics["rollout/loss_tokens"] = 0.0
    elif batches is not None:
        if roles.ref is not None:
            compute_ref_logprobs(roles, batches)
        if roles.routes is not None:
            ask_teachers(roles, batches)
        if roles.critic is not None:
            compute_values(roles, batches)
        compute_old_logprobs(roles, batches)
        if algo.policy_teaches:
            compute_teacher_logprobs(roles, batches)
        if config.explain_mismatch or config.explain_mismatch_above is not None:
            explain_mismatch(roles, batches, step)
        if roles.prm is not None:
            update_process_reward_model(roles, batches)
        compute_advantages(roles, batches, step)
        if roles.critic is not None:
            update_critic(roles, batches)
        if step > algo.critic_warmup_steps:
            update_actor(roles, batches, step)
        gather_metrics(roles, batches)
    if algo.ref_model_sync_steps > 0:
        sync_reference(roles, step)
    if push:
        push_weights(roles, version=step)
    return batches


def compute_values(roles: Roles, batches: TrainBatches) -> None:
    """Sets values by the critic before it learns from these samples."""
    critic = roles.critic
    if critic is None or not critic.here:
        return
    with roles.phases("values", critic.topology):
        critic.model.onload()
        for batch in PROGRESS.each(batches.of(critic), "mini-batches"):
            batch.values = critic.model.values(batch, critic.images)


def compute_old_logprobs(roles: Roles, batches: TrainBatches) -> None:
    """Sets old_logprobs by the actor before it learns, or by what the rollout engine said.

    A single update's own pass gives them. A second one needs them from here: else its ratio is 1.
    """
    actor, algo = roles.actor, roles.config.algo
    if not actor.here:
        return
    if algo.correction.bypass:
        for batch in batches.of(actor):
            batch.old_logprobs = batch.rollout_logprobs
    elif roles.algorithm.needs_old_logprobs:
        token_sums = roles.algorithm.estimator.token_sums
        with roles.phases("old_logprobs", actor.topology):
            actor.model.onload()
            for batch in PROGRESS.each(batches.of(actor), "mini-batches"):
                stats = actor.model.logprobs(batch, roles.temperature, token_sums, actor.images)
                batch.old_logprobs, batch.old_entropy, batch.pi_squared = stats[:3]


def compute_advantages(roles: Roles, batches: TrainBatches, step: int) -> None:
    """Sets advantages, returns and the weights of the loss, from rewards and what was computed.

    The actor's ranks do it, with statistics over all of them.
    """
    actor, config, algorithm = roles.actor, roles.config, roles.algorithm
    if roles.ref is not None or roles.routes is not None:
        send_teachers_logprobs(roles, batches)
    if roles.critic is not None:
        send_to_role(roles, batches, ("values",), roles.critic, actor)
    if actor.here:
        with roles.phases("advantages", actor.topology):
            own, metrics = batches.of(actor), batches.metrics
            metrics |= staleness(roles, own, step)
            if algorithm.corrects_before_update:
                metrics |= add_correction(own, config.algo, actor.topology)
            if algorithm.weighs_pairs:
                metrics |= prepare_pairs(own, actor.topology)
            else:
                metrics |= add_advantages(own, config, algorithm, roles.kl_coef, actor.topology)
    if roles.critic is not None:
        send_to_role(roles, batches, ("returns", "loss_weights"), actor, roles.critic)


def update_critic(roles: Roles, batches: TrainBatches) -> None:
    """Trains the critic to predict the returns."""
    critic, config = roles.critic, roles.config
    if critic is None or not critic.here:
        return
    with roles.phases("update_critic", critic.topology):
        loss_fn = value_objective(config.algo)
        updates = train(critic, batches.of(critic), loss_fn, config, config.algo.epochs)
        batches.metrics |= {f"critic/{name}": value for name, value in updates.items()}
        critic.model.offload()


def update_actor(roles: Roles, batches: TrainBatches, step: int) -> None:
    """Trains the policy on the advantages."""
    actor, config, algorithm = roles.actor, roles.config, roles.algorithm
    if not actor.here:
        return
    with roles.phases("update_actor", actor.topology):
        actor.model.onload()
        loss_fn = algorithm.objective
        if algorithm.adapts:
            loss_fn = policy_objective(config.algo, roles.kl_coef, entropy_bonus(roles))
        if batches.recorder.wanted:
            loss_fn = batches.recorder.watch(loss_fn)
        before = before_update(roles, step) if algorithm.selects or algorithm.weighs_pairs else None
        updates = train(actor, batches.of(actor), loss_fn, config, config.algo.epochs, before)
        if config.algo.demonstrations:
            take_shares(updates)
        if algorithm.corrects_in_update:
            batches.metrics |= take_mismatch(updates)
        batches.metrics |= {f"actor/{name}": value for name, value in updates.items()}
        if config.strict:
            require_equal(batches.metrics, step)
    if algorithm.adapts:
        batches.metrics |= adapt(roles, batches.metrics, num_samples=batches.assignment.num_seqs)


def gather_metrics(roles: Roles, batches: TrainBatches) -> None:
    """Makes the metrics the same on every rank that trains, where roles have ranks of their own."""
    if len(roles.trainer_ranks) == 1:
        return
    roles.phases.barrier("wait report", roles.training)
    with roles.phases("report", roles.training):
        batches.metrics = merged(batches.metrics, roles.training)


def before_update(roles: Roles, step: int) -> Callable[[Batch, int], dict[str, float]]:
    """Returns what is done before each update, by the policy at hand: it chooses the tokens of
    clip_cov and kl_cov, or computes the gradient of a loss of pairs, whose metrics it returns.
    """
    config, actor = roles.config, roles.actor

    def before(batch: Batch, update: int) -> dict[str, float]:
        logprobs = batch.old_logprobs
        if update > 0 or logprobs is None or config.algo.correction.bypass:
            stats = actor.model.logprobs(batch, roles.temperature, images=actor.images)
            logprobs = stats.logprobs
        if roles.algorithm.weighs_pairs:
            return weigh_pairs(batch, logprobs, config, actor.topology)
        batch.selected_mask = select_tokens(batch, logprobs, config, step, update, actor.topology)
        return {}

    return before
