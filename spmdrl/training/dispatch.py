"""The step's answers on their way from the ranks that sampled to those that train.

Where every role is on every rank this only evens out the ranks' work; where roles have ranks of
their own it is how data moves between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from spmdrl.config import PpoConfig, support_width
from spmdrl.data.packing import (
    BatchAssignment,
    assign_to_ranks,
    empty_batch,
    pack_samples,
    prompt_lens,
)
from spmdrl.distributed.agreement import broadcast_from_first
from spmdrl.distributed.collectives import all_gather_rows
from spmdrl.distributed.placement import Ranks
from spmdrl.rewards.runner import check_invalid
from spmdrl.rollout.agents.samples import training_rows
from spmdrl.rollout.multi_turn.conversation import has_replies
from spmdrl.training.batch_exchange import (
    ASKED_FIELDS,
    FIELDS,
    packing_order,
    receive_assignment,
    receive_batch,
    receive_results,
    send_assignment,
    send_batch,
    send_results,
    span,
)
from spmdrl.training.collect import RolloutResult
from spmdrl.training.credit import resample
from spmdrl.training.logs.demonstrations import demonstration_metrics
from spmdrl.training.logs.metrics import sample_metrics
from spmdrl.training.logs.sample_tokens import SampleRecorder, first_samples
from spmdrl.training.online_preference import keep_pairs
from spmdrl.training.roles import Roles, Trainer
from spmdrl.types import Batch, Sample


@dataclass
class TrainBatches:
    """The batches that a step trains on: this rank's share, for each role that it has.

    Roles that are given sequences on the same ranks share their batches. On ranks that do not
    train, `batches` is empty.
    """

    assignment: BatchAssignment
    batches: dict[Ranks, list[Batch]]  # by Trainer.ranks: the Batch of each mini-batch
    metrics: dict[str, float]  # of the step, to which every part of it adds its own
    step_info: dict[str, Any]  # what the ranks that sampled say of the step, the same on every rank
    # keeps what the actor's updates compute of the samples that are written to samples/
    recorder: SampleRecorder = field(default_factory=SampleRecorder)

    def of(self, trainer: Trainer) -> list[Batch]:
        """Returns the mini-batches of a role that is on this rank."""
        return self.batches[trainer.ranks]

    @property
    def is_empty(self) -> bool:
        """Whether no rank has an answer to learn from: the rewards of every group were equal."""
        return self.assignment.num_seqs == 0


def dispatch_batches(roles: Roles, rollout: RolloutResult | None, step: int) -> TrainBatches | None:
    """Gives every rank of every training role its share of the samples.

    rollout: what this rank sampled; None on ranks that do not sample. Returns None on ranks that
    do not train. Raises TooManyInvalid on every rank where too many samples have no reward.
    """
    for trainer in roles.trainers:
        trainer.step = step
    if roles.reply_images is not None:
        roles.reply_images.replies.clear()  # of the step before
    if roles.topology.world > 1:
        found = exchange_batches(roles, rollout, step)
        if found is None:
            return None
        assignment, batches, step_info = found
    else:
        assert rollout is not None
        with roles.phases("balance", roles.sampling):
            batch, assignment, step_info = assign_and_pack(roles, rollout, step)
        with roles.phases("receive", roles.training):
            number = assignment.num_mini_batches
            ends = torch.bincount(assignment.mini_batch_ids, minlength=number).cumsum(0).tolist()
            minis = [span(batch, *part) for part in zip([0, *ends[:-1]], ends, strict=True)]
            batches = {roles.actor.ranks: minis}
    if roles.adapter_routes is not None and roles.actor.here:
        for batch in batches[roles.actor.ranks]:
            batch.adapters = roles.adapter_routes.of(batch.prompts)
    result = TrainBatches(assignment, batches, dict(step_info["metrics"]), step_info)
    if roles.config.log_samples > 0 and roles.config.log_sample_tokens > 0:
        result.recorder = recorder_of(roles.config, assignment)
    return result


Exchanged = tuple[BatchAssignment, dict[Ranks, list[Batch]], dict[str, Any]]


def exchange_batches(roles: Roles, rollout: RolloutResult | None, step: int) -> Exchanged | None:
    """Returns the assignment, the mini-batches of this rank's roles and what the sampling ranks say
    of the step; None on ranks that do not train. Collective over all ranks.
    """
    post, sets, fields = roles.post, list(roles.trainer_ranks), fields_of_sets(roles)
    pictures = None if roles.reply_images is None else roles.reply_images.replies
    assignment: BatchAssignment | None = None
    step_info: dict[str, Any] = {}
    own: dict[Ranks, Batch] = {}
    first = roles.training.ranks[0]  # hears of the assignment, and tells the others that train
    # what was learnt from has arrived. Ranks that sample ahead must not wait for more: the trainers
    # may be waiting for them to take weights
    ahead = roles.config.async_steps if roles.sampling.here else 0
    post.begin(step, delivered=step - 1 - ahead)
    if roles.sampling.here:
        assert rollout is not None
        with roles.phases("balance", roles.sampling):
            batch, assignment, step_info = assign_and_pack(roles, rollout, step)
            if roles.sampling.rank == 0 and first not in roles.sampling.ranks:
                send_assignment(assignment, step_info, first, post)
            for ranks, names in zip(sets, fields, strict=True):
                batch = reorder(batch, packing_order(assignment, ranks, post.rank), assignment)
                own[ranks] = send_batch(batch, assignment, ranks, names, post, pictures)
    if not roles.training.here:
        return None
    name = "receive" if roles.sampling.here else "wait samples"
    with roles.phases(name, roles.training):
        if assignment is None and post.rank == first:
            assignment, step_info = receive_assignment(roles.sampling.ranks[0], sets, post)
        if not set(roles.training.ranks) <= set(roles.sampling.ranks):
            assignment, step_info = broadcast_from_first(
                (assignment, step_info), roles.training.control
            )
        assert assignment is not None
        num_keys, routing = len(roles.algorithm.reward_keys), roles.routing
        width = support_width(roles.config.rollout)
        batches = {
            ranks: receive_batch(
                own.get(ranks), assignment, ranks, names, num_keys, post, routing, pictures, width
            )
            for ranks, names in zip(sets, fields, strict=True)
            if post.rank in ranks
        }
    for trainer in roles.trainers:  # ranks that help others with their sequences have none
        if trainer.here and trainer.ranks not in batches:
            batches[trainer.ranks] = empty_batches(roles, trainer, assignment.num_mini_batches)
    return assignment, batches, step_info


def fields_of_sets(roles: Roles) -> list[tuple[str, ...]]:
    """Returns for each of `roles.trainer_ranks`, the actor's first, the fields of a `Batch` that
    its ranks are sent.
    """
    of_actor: tuple[str, ...] = FIELDS
    asked: tuple[str, ...] = ASKED_FIELDS
    if roles.config.rewards.per_turn:
        of_actor = (*of_actor, "turn_rewards")
    if roles.routing is not None:
        of_actor = (*of_actor, "routed_experts")
    if roles.reply_images is not None:
        of_actor, asked = (*of_actor, "reply_images"), (*asked, "reply_images")
    others = list(roles.trainer_ranks)[1:]
    found = [of_actor] + [asked] * len(others)
    if roles.config.rollout.keep_sampling_mask:
        found[0] = (*of_actor, "support_ids")
        for i, ranks in enumerate(others, start=1):
            if roles.ref is not None and ranks == roles.ref.ranks:
                found[i] = (*asked, "support_ids")
    return found


def empty_batches(roles: Roles, trainer: Trainer, num_mini_batches: int) -> list[Batch]:
    """Returns mini-batches without sequences that have the fields of this trainer's batches."""
    of_samples = trainer.ranks == roles.actor.ranks
    of_policy = of_samples or (roles.ref is not None and trainer.ranks == roles.ref.ranks)
    nothing = torch.zeros(0, dtype=torch.int64)
    return [
        empty_batch(
            nothing,
            len(roles.algorithm.reward_keys),
            per_turn=roles.config.rewards.per_turn and of_samples,
            routing=roles.routing if of_samples else None,
            reply_images=roles.reply_images is not None,
            support_width=support_width(roles.config.rollout) if of_policy else 0,
        )
        for _ in range(num_mini_batches)
    ]


def recorder_of(config: PpoConfig, assignment: BatchAssignment) -> SampleRecorder:
    """Returns what keeps the updates' results of the samples that are written to samples/."""
    steps = 1 + config.algo.replay_steps
    return SampleRecorder(first_samples(assignment, config.log_samples, steps, config.rollout.n))


def assign_and_pack(
    roles: Roles, rollout: RolloutResult, step: int
) -> tuple[Batch, BatchAssignment, dict[str, Any]]:
    """Decides which rank trains on which sample, and packs those of this rank.

    Returns its samples in the order in which they are sent to the actor, the assignment of all
    samples, and what the training ranks are told of the step. Collective over the sampling ranks.
    """
    config, sampling = roles.config, roles.sampling
    metrics = rollout_metrics(roles, rollout)
    samples = sorted(rollout.samples, key=lambda s: (s.group, s.index))
    if roles.algorithm.weighs_pairs:
        samples, of_pairs = keep_pairs(samples, config, sampling)
        metrics |= of_pairs
    if config.agent is not None:
        samples = training_rows(samples, config.rollout.n)
        samples.sort(key=lambda s: (s.group, s.index))
    if roles.replay is not None:
        batch, assignment, metrics["filter/kept"] = assign_replayed(roles, samples, step)
    else:
        # rows of agents have prompts of their own, of which nothing is known to be shared
        shares = config.agent is None
        found = [
            (s.group, s.index, s.num_tokens, shares * len(s.prompt.token_ids)) for s in samples
        ]
        assignment = assigned(roles, torch.tensor(found).reshape(-1, 4))
        # packed in the order in which it is sent: no copy on the way
        mine = (assignment.sample_ranks == roles.post.rank).nonzero().flatten()
        order = torch.searchsorted(
            mine, packing_order(assignment, roles.actor.ranks, roles.post.rank)
        )
        in_order = [samples[i] for i in order.tolist()]
        batch = packed(roles, in_order)
        if roles.reply_images is not None:
            roles.reply_images.mark(batch, in_order)
    ranks = roles.actor.ranks
    metrics["balance/imbalance"] = assignment.imbalance(ranks, roles.trainer_ranks[ranks])
    return batch, assignment, {"metrics": metrics | rollout.metrics, **rollout.step_info}


def rollout_metrics(roles: Roles, rollout: RolloutResult) -> dict[str, float]:
    """Returns numbers about the samples of all ranks. Raises TooManyInvalid on every rank where too
    many have no reward. Collective.
    """
    config, algo, sampling = roles.config, roles.config.algo, roles.sampling
    metrics = sample_metrics(
        [s for s in rollout.all_samples if not s.is_demonstration], sampling,
        penalised=algo.overlong_buffer > 0, replies=has_replies(config),
        per_turn=config.rewards.per_turn,
    )  # fmt: skip
    if algo.demonstrations:
        metrics |= demonstration_metrics(
            rollout.all_samples, config.rollout.n, rollout.num_sampled, sampling
        )
    check_invalid(rollout.all_samples, config.rewards, sampling)
    if roles.algorithm.estimator.groups:
        equal = rollout.num_equal / max(rollout.num_sampled, 1)
        metrics["reward/frac_reward_zero_std"] = equal  # TRL's name for it
    if algo.dynamic_sampling:
        metrics["dynamic_sampling/rounds"] = rollout.rounds
        metrics["dynamic_sampling/groups"] = rollout.num_groups
    return metrics


def packed(roles: Roles, samples: list[Sample]) -> Batch:
    """Returns one Batch of the samples, with the fields that the config asks for."""
    config = roles.config
    return pack_samples(
        samples, roles.algorithm.reward_keys, config.rewards.per_turn, roles.routing,
        support_width(config.rollout),
    )  # fmt: skip


def assigned(roles: Roles, rows: Tensor) -> BatchAssignment:
    """Assigns the sequences of all ranks. rows: (n, 4) of this rank's: group, index, tokens, tokens
    of the prompt. Collective over the sampling ranks.
    """
    makers = torch.full((len(rows), 1), roles.post.rank)
    table = torch.cat(all_gather_rows(torch.cat([rows.long(), makers], dim=1), roles.sampling))
    return assign_to_ranks(table, roles.config.algo.mini_batches, roles.trainer_ranks)


def assign_replayed(
    roles: Roles, samples: list[Sample], step: int
) -> tuple[Batch, BatchAssignment, float]:
    """Does what `assign_and_pack` does with these samples and those of earlier steps, of which as
    many as are new are drawn. Returns also how many different ones were drawn. Collective.
    """
    assert roles.replay is not None
    mixed = roles.replay.mix(packed(roles, samples))
    batch, kept = resample(mixed, roles.config, step, roles.sampling)
    rows = torch.stack([batch.groups, batch.indices, batch.seq_lens, prompt_lens(batch)], dim=1)
    assignment = assigned(roles, rows)
    order = packing_order(assignment, roles.actor.ranks, roles.post.rank)
    return reorder(batch, order, assignment), assignment, kept


def reorder(batch: Batch, rows: Tensor, assignment: BatchAssignment) -> Batch:
    """Returns the sequences of `batch` in the order of these rows of the assignment."""
    place = {(g, i): at for at, (g, i) in enumerate(
        zip(batch.groups.tolist(), batch.indices.tolist(), strict=True)
    )}  # fmt: skip
    order = [
        place[g, i]
        for g, i in zip(
            assignment.groups[rows].tolist(), assignment.indices[rows].tolist(), strict=True
        )
    ]
    return batch if order == list(range(batch.num_seqs)) else batch.select(order)


def send_to_role(
    roles: Roles,
    batches: TrainBatches,
    names: tuple[str, ...],
    source: Trainer | None,
    target: Trainer | None,
) -> None:
    """Sends per-token results of `source` to `target`, where they are on different ranks.

    names: the fields of Batch that are sent.
    """
    if source is None or target is None:
        return
    if source.ranks == target.ranks:  # those that are given sequences have it already
        if target.here and not source.here:  # a rank that helps them holds no token
            for batch, name in product(batches.of(target), names):
                like = result_like(roles, name)
                setattr(batch, name, like.new_zeros(batch.num_tokens, *like.shape[1:]))
        return
    post, assignment = roles.post, batches.assignment
    for name in names:
        own = [getattr(batch, name) for batch in batches.of(source)] if source.here else None
        if own is not None:
            send_results(own, assignment, source.ranks, target.ranks, post)
        if target.here:
            like = result_like(roles, name)
            found = receive_results(own, assignment, source.ranks, target.ranks, post, like)
            for batch, values in zip(batches.of(target), found, strict=True):
                setattr(batch, name, values)


def result_like(roles: Roles, name: str) -> Tensor:
    """Returns a tensor without tokens that has the dtype and the further axes of a result."""
    dtype = torch.int32 if name == "teacher_ids" else torch.float32
    columns = (roles.teacher_topk,) if name in ("teacher_ids", "teacher_logprobs") else ()
    return torch.zeros(0, *columns, dtype=dtype)
