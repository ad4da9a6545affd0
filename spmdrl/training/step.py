"""One step of reinforcement learning. Every rank runs every line.

collected = collect(roles, prompts, step, ...)   sample, score (collect.py)
lesson    = hand_over(roles, collected, step)    from the ranks that sampled to those that train
metrics   = learn(roles, lesson, step)           logprobs, advantages, updates
sync(roles, version=step)                        the new weights into the engine (push_weights.py)

A rank outside a role's placement passes through its lines without waiting, so that roles on
disjoint ranks work at the same time; they meet where one needs what another found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
from spmdrl.config import PpoConfig
from spmdrl.data.packing import Deal, deal, empty_batch, pack_samples
from spmdrl.distributed.collectives import all_gather_rows
from spmdrl.distributed.placement import Ranks
from spmdrl.distributed.progress import PROGRESS
from spmdrl.engines.base import LossFn
from spmdrl.rewards.runner import check_invalid
from spmdrl.rollout.multi_turn.conversation import has_replies
from spmdrl.training.batch_exchange import (
    ASKED_FIELDS,
    FIELDS,
    packing_order,
    receive_batch,
    receive_deal,
    receive_results,
    send_batch,
    send_deal,
    send_results,
)
from spmdrl.training.checks.strict import require_equal
from spmdrl.training.collect import Collected
from spmdrl.training.credit import (
    add_advantages,
    add_correction,
    resample,
    select_tokens,
    with_outcome_weights,
)
from spmdrl.training.logs.metrics import merged, sample_metrics
from spmdrl.training.roles import Roles, Trainer
from spmdrl.types import Batch

logger = logging.getLogger(__name__)


@dataclass
class Lesson:
    """What a step is learnt from: this rank's share of it, for each role that it has.

    Roles that are given sequences on the same ranks share their batches. On ranks that do not
    train, `batches` is empty.
    """

    deal: Deal
    batches: dict[Ranks, list[Batch]]  # by Trainer.ranks: the Batch of each mini-batch
    facts: dict[str, Any]  # about the samples, the same on every rank

    def of(self, trainer: Trainer) -> list[Batch]:
        return self.batches[trainer.ranks]


# ---- from the ranks that sampled to those that train


def hand_over(roles: Roles, collected: Collected | None, step: int) -> Lesson | None:
    """Deals the samples to the ranks of every training role. collected: None where none sample.

    Raises TooManyInvalid. Returns None on ranks that do not train.
    """
    config, post, per_turn = roles.config, roles.post, roles.config.rewards.per_turn
    sets, of_actor = roles.trainer_ranks, (*FIELDS, "turn_rewards") if per_turn else FIELDS
    fields = [of_actor] + [ASKED_FIELDS] * (len(sets) - 1)
    dealt: Deal | None = None
    facts: dict[str, Any] = {}
    own: dict[Ranks, Batch] = {}
    # what was learnt from has arrived. Ranks that sample ahead must not wait for more: the trainers
    # may be waiting for them to take weights
    ahead = config.async_steps if roles.sampling.here else 0
    post.begin(step, delivered=step - 1 - ahead)
    if roles.sampling.here:
        assert collected is not None
        with roles.phases("balance", roles.sampling):
            batch, dealt, facts = deal_out(roles, collected, step)
            if roles.sampling.rank == 0:
                others = tuple(r for r in roles.training.ranks if r not in roles.sampling.ranks)
                send_deal(dealt, facts, others, post)
            for ranks, names in zip(sets, fields, strict=True):
                order = packing_order(dealt, ranks, post.rank)
                batch = arranged(batch, order, dealt)
                own[ranks] = send_batch(batch, dealt, ranks, names, post)
    if not roles.training.here:
        return None
    name = "receive" if roles.sampling.here else "wait samples"
    with roles.phases(name, roles.training):
        if dealt is None:
            dealt, facts = receive_deal(roles.sampling.ranks[0], sets, post)
        batches = {
            ranks: receive_batch(
                own.get(ranks), dealt, ranks, names, len(config.algo.reward_keys), post
            )
            for ranks, names in zip(sets, fields, strict=True)
            if post.rank in ranks
        }
    for trainer in roles.trainers:  # ranks that help others with their sequences have none
        if trainer.here and trainer.ranks not in batches:
            nothing = torch.zeros(0, dtype=torch.int64)
            has_turns = per_turn and trainer.ranks == roles.actor.ranks
            batches[trainer.ranks] = [
                empty_batch(nothing, len(config.algo.reward_keys), per_turn=has_turns)
                for _ in range(dealt.num_minis)
            ]
    return Lesson(dealt, batches, facts)


def deal_out(roles: Roles, collected: Collected, step: int) -> tuple[Batch, Deal, dict[str, Any]]:
    """This rank's samples as they are sent to the actor, who gets which of all, and metrics."""
    algo, sampling, per_turn = roles.config.algo, roles.sampling, roles.config.rewards.per_turn
    metrics = sample_metrics(
        collected.asked, sampling, penalised=algo.overlong_buffer > 0,
        replies=has_replies(roles.config), per_turn=per_turn,
    )  # fmt: skip
    check_invalid(collected.asked, roles.config.rewards, sampling)
    if estimator_of(algo).groups:
        equal = collected.num_equal / max(collected.num_asked, 1)
        metrics["reward/frac_reward_zero_std"] = equal  # TRL's name for it
    if algo.dynamic_sampling:
        metrics["dynamic_sampling/rounds"] = collected.rounds
        metrics["dynamic_sampling/groups"] = collected.num_groups
    samples = sorted(collected.samples, key=lambda s: (s.group, s.index))
    batch = None
    if roles.replay is not None:
        new = pack_samples(samples, tuple(algo.reward_keys), per_turn)
        batch, metrics["filter/kept"] = resample(
            roles.replay.mix(new), roles.config, step, sampling
        )
        rows = torch.stack([batch.groups, batch.indices, batch.seq_lens], dim=1)
    else:
        rows = torch.tensor([(s.group, s.index, s.num_tokens) for s in samples]).reshape(-1, 3)
    makers = torch.full((len(rows), 1), roles.post.rank)
    table = torch.cat(all_gather_rows(torch.cat([rows.long(), makers], dim=1), sampling))
    dealt = deal(table, algo.mini_batches, roles.trainer_ranks)
    metrics["balance/imbalance"] = dealt.imbalance(roles.actor.ranks)
    if batch is None:  # packed in the order in which it is sent: no copy on the way
        mine = (dealt.makers == roles.post.rank).nonzero().flatten()
        order = torch.searchsorted(mine, packing_order(dealt, roles.actor.ranks, roles.post.rank))
        in_order = [samples[i] for i in order.tolist()]
        batch = pack_samples(in_order, tuple(algo.reward_keys), per_turn)
    return batch, dealt, {"metrics": metrics, **collected.facts}


def arranged(batch: Batch, rows: Tensor, dealt: Deal) -> Batch:
    """The sequences of `batch` in the order of these rows of the deal."""
    place = {(g, i): at for at, (g, i) in enumerate(
        zip(batch.groups.tolist(), batch.indices.tolist(), strict=True)
    )}  # fmt: skip
    order = [
        place[g, i]
        for g, i in zip(dealt.groups[rows].tolist(), dealt.indices[rows].tolist(), strict=True)
    ]
    return batch if order == list(range(batch.num_seqs)) else batch.select(order)


# ---- learning


def learn(roles: Roles, lesson: Lesson | None, step: int) -> dict[str, float]:
    """Updates the models from this step's samples. Ranks that do not train pass through.

    Returns the step's metrics, the same on every rank that trains; {} elsewhere.
    """
    if lesson is None:
        return {}
    config, algo, phases = roles.config, roles.config.algo, roles.phases
    metrics: dict[str, float] = dict(lesson.facts["metrics"])
    if lesson.deal.num_seqs == 0:  # every group was equal: nothing to learn from
        return metrics | {"rollout/loss_tokens": 0.0}
    actor, critic = roles.actor, roles.critic

    metrics |= look(roles, lesson)
    if actor.here:
        with phases("advantages", actor.topology):
            batches = lesson.of(actor)
            metrics |= staleness(roles, batches, step)
            if corrects(algo) and not algo.correction.bypass:
                metrics |= add_correction(batches, algo, actor.topology)
            metrics |= add_advantages(batches, config, roles.kl_coef, actor.topology)
    tell(roles, lesson, ("returns", "loss_weights"), actor, critic)

    if critic is not None and critic.here:
        with phases("update_critic", critic.topology):
            updates = train(critic, lesson.of(critic), value_objective(algo), config, algo.epochs)
            metrics |= {f"critic/{name}": value for name, value in updates.items()}
            critic.model.offload()
    if actor.here and step > algo.critic_warmup_steps:
        with phases("update_actor", actor.topology):
            actor.model.onload()
            loss_fn = policy_objective(algo, roles.kl_coef, entropy_bonus(roles))
            select = selector(roles, step) if selects(algo) else None
            updates = train(actor, lesson.of(actor), loss_fn, config, algo.epochs, select)
            metrics |= {f"actor/{name}": value for name, value in updates.items()}
            if config.strict:
                require_equal(metrics, step)
        metrics |= adapt(roles, metrics, num_samples=lesson.deal.num_seqs)
    if len(roles.trainer_ranks) > 1:  # one role's ranks know nothing of another's
        with phases("wait report", roles.training):
            pass
        with phases("report", roles.training):
            metrics = merged(metrics, roles.training)
    return metrics


def look(roles: Roles, lesson: Lesson) -> dict[str, float]:
    """What each model says of the samples before any of them learns; the prm then learns at once.

    Sets old_logprobs, ref_logprobs, prm_logprobs and values where they are needed.
    """
    config, algo, phases = roles.config, roles.config.algo, roles.phases
    actor, ref, critic, prm = roles.actor, roles.ref, roles.critic, roles.prm
    temperature, metrics = config.rollout.temperature, {}
    if ref is not None and ref.here:
        with phases("ref_logprobs", ref.topology):
            ref.model.onload()
            for batch in PROGRESS.each(lesson.of(ref), "mini-batches"):
                batch.ref_logprobs = ref.model.logprobs(batch, temperature).logprobs
            ref.model.offload()
    if critic is not None and critic.here:
        with phases("values", critic.topology):
            critic.model.onload()
            for batch in PROGRESS.each(lesson.of(critic), "mini-batches"):
                batch.values = critic.model.values(batch)
    if actor.here and algo.correction.bypass:
        for batch in lesson.of(actor):
            batch.old_logprobs = batch.rollout_logprobs
    elif actor.here and needs_old_logprobs(algo):
        with phases("old_logprobs", actor.topology):
            actor.model.onload()
            for batch in PROGRESS.each(lesson.of(actor), "mini-batches"):
                stats = actor.model.logprobs(batch, temperature, estimator_of(algo).token_sums)
                batch.old_logprobs, batch.old_entropy, batch.pi_squared = stats
    if prm is not None:
        assert ref is not None
        tell(roles, lesson, ("ref_logprobs",), ref, prm)
    if prm is not None and prm.here:
        with phases("update_prm", prm.topology):
            prm.model.onload()
            for batch in lesson.of(prm):
                batch.prm_logprobs = prm.model.logprobs(batch, temperature).logprobs
            outcomes = [with_outcome_weights(batch, prm.topology) for batch in lesson.of(prm)]
            updates = train(prm, outcomes, prm_objective(algo), config, epochs=1)
            metrics = {f"prm/{name}": value for name, value in updates.items()}
            prm.model.offload()
    tell(roles, lesson, ("ref_logprobs",), ref, actor)
    tell(roles, lesson, ("values",), critic, actor)
    tell(roles, lesson, ("prm_logprobs",), prm, actor)
    return metrics


def tell(
    roles: Roles,
    lesson: Lesson,
    names: tuple[str, ...],
    source: Trainer | None,
    target: Trainer | None,
) -> None:
    """Gives `target` what `source` found of each token, where they are on different ranks."""
    if source is None or target is None:
        return
    if source.ranks == target.ranks:  # those that are given sequences have it already
        if target.here and not source.here:  # a rank that helps them holds no token
            for batch, name in product(lesson.of(target), names):
                setattr(batch, name, torch.zeros(batch.num_tokens))
        return
    post, dealt = roles.post, lesson.deal
    for name in names:
        own = [getattr(batch, name) for batch in lesson.of(source)] if source.here else None
        if own is not None:
            send_results(own, dealt, source.ranks, target.ranks, post)
        if target.here:
            found = receive_results(own, dealt, source.ranks, target.ranks, post)
            for batch, values in zip(lesson.of(target), found, strict=True):
                setattr(batch, name, values)


def selector(roles: Roles, step: int) -> Callable[[Batch, int], None]:
    """Chooses the tokens of clip_cov and kl_cov before each update, by the policy at hand."""
    config, actor = roles.config, roles.actor

    def select(batch: Batch, update: int) -> None:
        logprobs = batch.old_logprobs
        if update > 0 or logprobs is None or config.algo.correction.bypass:
            logprobs = actor.model.logprobs(batch, config.rollout.temperature).logprobs
        batch.selected = select_tokens(batch, logprobs, config, step, update, actor.topology)

    return select


def train(
    trainer: Trainer,
    batches: list[Batch],
    loss_fn: LossFn,
    config: PpoConfig,
    epochs: int,
    before: Callable[[Batch, int], None] | None = None,
) -> dict[str, float]:
    """`epochs` passes of one update per mini-batch; metrics are means (maxima) over the updates.

    before(batch, number of updates done): called ahead of each. A mini-batch that has nothing to
    learn from on any rank makes no update.
    """
    updates: list[dict[str, float]] = []
    skipped_before = trainer.skipped
    for batch in PROGRESS.each(epochs * batches, "updates"):
        if before is not None:
            before(batch, len(updates))
        temperature = config.rollout.temperature
        updates.append(update(trainer, batch, loss_fn, temperature, config.nan_updates))
    done = [update for update in updates if update]
    skipped = {"skipped_updates": float(trainer.skipped - skipped_before)}
    return (skipped if config.nan_updates else {}) | {
        name: max(u[name] for u in done)
        if name.endswith("_max")
        else sum(u[name] for u in done) / len(done)
        for name in (done[0] if done else ())
    }


def update(
    trainer: Trainer, batch: Batch, loss_fn: LossFn, temperature: float, nan_updates: int
) -> dict[str, float]:
    """Its metrics; {} where there was nothing to learn, or what is not finite may be passed over.

    Raises FloatingPointError on every rank, with the weights as they were, where it may not.
    """
    try:
        found = trainer.model.update(batch, loss_fn, temperature)
    except FloatingPointError as error:
        trainer.skipped += 1
        trainer.skipped_in_a_row += 1
        if trainer.skipped_in_a_row > nan_updates:
            raise
        if trainer.topology.rank == 0:
            in_a_row = trainer.skipped_in_a_row
            logger.warning("%s: passed over, %d in a row: %s", trainer.name, in_a_row, error)
        return {}
    trainer.skipped_in_a_row = 0
    return found


def staleness(roles: Roles, batches: list[Batch], step: int) -> dict[str, float]:
    """How many steps the weights that chose the tokens were behind those that now learn.

    Never more than config.async_steps, but for samples that were kept: partial ones and replayed.
    """
    sums, most = torch.zeros(2, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    for batch in batches:
        age = (step - 1 - batch.policy_version) * (batch.loss_mask > 0)
        sums += torch.stack([age.sum().double(), batch.loss_mask.sum(dtype=torch.float64)])
        if len(age):
            most = torch.maximum(most, age.max())
    dist.all_reduce(sums, group=roles.actor.topology.group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=roles.actor.topology.group)
    config = roles.config
    kept = config.rollout.oversample > 1 or config.algo.replay_steps > 0
    assert kept or int(most) <= config.async_steps, (int(most), config.async_steps)
    mean = float(sums[0] / sums[1].clamp(min=1))
    return {"staleness/mean": mean, "staleness/max": float(most)}


def adapt(roles: Roles, metrics: dict[str, float], num_samples: int) -> dict[str, float]:
    """The coefficients that this step was run with; sets those of the next."""
    algo = roles.config.algo
    used: dict[str, float] = {}
    if "actor/entropy" not in metrics:  # there was nothing to learn from
        return used
    if algo.kl_target is not None:
        used["actor/kl_coef"] = roles.kl_coef
        kl = metrics["reward/kl" if algo.kl_in == "reward" else "actor/ref_kl"]
        roles.kl_coef = next_kl_coef(
            roles.kl_coef, kl, algo.kl_target, algo.kl_horizon, num_samples
        )
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
