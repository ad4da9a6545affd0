"""The teacher of distillation on given answers: a frozen model that says, in each place of a row's
answer, which tokens it finds most likely.

It lives on all ranks, as the actor does, with an engine and degrees of its own. Where these deal
the rows out to other ranks than the actor's do, what it says travels to those.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spmdrl.config import SftConfig, SupervisedConfig
from spmdrl.data.packing import BatchAssignment
from spmdrl.distributed.placement import Ranks, training_roles
from spmdrl.distributed.progress import PROGRESS, model_text
from spmdrl.distributed.topology import Topology, train_degrees
from spmdrl.engines.build import build_engine
from spmdrl.training.batch_exchange import P2PChannel, receive_results, send_results
from spmdrl.training.roles import Trainer
from spmdrl.training.row_share import Share, owners_of, share_of
from spmdrl.training.runtime import Runtime
from spmdrl.types import PolicyStats


@dataclass(frozen=True)
class Teacher:
    """The role `ref` of fine-tuning with distillation."""

    trainer: Trainer
    topk: int
    channel: P2PChannel | None  # to the actor's ranks; None: rows are dealt out to the same ranks


def build_teacher(config: SupervisedConfig, runtime: Runtime, actor: Trainer) -> Teacher | None:
    """None where the config has no distillation. Collective."""
    role = training_roles(config).get("ref")
    if role is None:
        return None
    assert isinstance(config, SftConfig) and config.distillation is not None and role.model
    topology = runtime.topology
    with runtime.phases("build ref"):
        PROGRESS.detail(model_text(role.model))
        ranks = Topology.build(topology.device, share=actor.topology, **train_degrees(role))
        engine = build_engine("policy", role.model, role, ranks, frozen=True)
        trainer = Trainer("ref", ranks, engine)
        trainer.model.offload()
        apart = trainer.ranks != actor.ranks
        return Teacher(trainer, config.distillation.topk, P2PChannel(topology) if apart else None)


def ask_teacher(teacher: Teacher, share: Share) -> None:
    """Sets teacher_ids and teacher_logprobs of this rank's batch. Collective."""
    ref = teacher.trainer
    batch = share.batch
    if teacher.channel is not None:
        batch = share.rows.batch(share_of(share.rows, share.indices, ref))
    ref.model.onload()
    stats = ref.model.logprobs(batch, temperature=1.0, images=share.rows.images, top_k=teacher.topk)
    ref.model.offload()
    assert stats.top_ids is not None and stats.top_logprobs is not None
    if teacher.channel is None:
        share.batch.teacher_ids, share.batch.teacher_logprobs = stats.top_ids, stats.top_logprobs
    else:
        send_to_actor(stats, share, ref.ranks, teacher.channel)


def send_to_actor(stats: PolicyStats, share: Share, source: Ranks, channel: P2PChannel) -> None:
    """Gives the actor's ranks what the teacher's ranks know of their rows; other ranks have none.

    stats: of this rank's rows as one of `source`.
    """
    assignment, target = assignment_of(share, source), share.actor.ranks
    for name, values in (("teacher_ids", stats.top_ids), ("teacher_logprobs", stats.top_logprobs)):
        assert values is not None
        own = None
        if channel.rank in source:
            own = [values]
            send_results(own, assignment, source, target, channel)
        found = values[:0]
        if channel.rank in target:
            like = values[:0]
            (found,) = receive_results(own, assignment, source, target, channel, like)
        setattr(share.batch, name, found)
    channel.wait_until_delivered()


def assignment_of(share: Share, source: Ranks) -> BatchAssignment:
    """Says which ranks have which row of the step, as one of `source` and as one of the actor's."""
    rows, indices, target = share.rows, share.indices, share.actor.ranks
    zeros = torch.zeros(len(indices), dtype=torch.int64)
    return BatchAssignment(
        groups=torch.arange(len(indices)), indices=zeros,
        seq_lens=torch.from_numpy(rows.measured.num_tokens[indices]), sample_ranks=zeros,
        mini_batch_ids=zeros, prefix_lens=zeros,
        train_ranks={ranks: owners_of(rows, indices, ranks) for ranks in (source, target)},
        num_mini_batches=1,
    )  # fmt: skip
