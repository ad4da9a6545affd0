"""Asks the reference about a step's tokens, and the teacher that is learnt from.

That is the reference, the policy itself with a hint in its prompt, or one of several teachers, each
of which has its own sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.distributed.progress import PROGRESS
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.training.dispatch import TrainBatches, result_like, send_to_role
from spmdrl.training.roles import Roles, Trainer
from spmdrl.training.teacher_endpoint import endpoint_logprobs
from spmdrl.types import Batch, PolicyStats


def compute_ref_logprobs(roles: Roles, batches: TrainBatches) -> None:
    """Sets ref_logprobs by the frozen reference model; of a teacher also teacher_ids and
    teacher_logprobs. A reference that is the teacher sees the hints of the data.
    """
    ref = roles.ref
    assert ref is not None
    if not ref.here:
        return
    with roles.phases("ref_logprobs", ref.topology):
        ref.model.onload()
        for batch in PROGRESS.each(batches.of(ref), "mini-batches"):
            if roles.config.algo.policy_teaches:
                stats = ref.model.logprobs(batch, roles.temperature, images=ref.images)
                batch.ref_logprobs = stats.logprobs
                continue
            stats = ask_teacher(roles, ref, batch)
            batch.ref_logprobs = stats.logprobs
            batch.teacher_ids, batch.teacher_logprobs = stats.top_ids, stats.top_logprobs
        ref.model.offload()


def ask_teachers(roles: Roles, batches: TrainBatches) -> None:
    """Sets ref_logprobs, teacher_ids and teacher_logprobs by the teachers of this rank, of which
    there are several: each in the places of its own sequences, with 0 in the others.
    """
    for name, teacher in roles.teachers.items():
        if not teacher.here:
            continue
        with roles.phases("teacher_logprobs", teacher.topology):
            teacher.model.onload()
            for batch in PROGRESS.each(batches.of(teacher), "mini-batches"):
                assert roles.routes is not None
                seqs = roles.routes.rows(batch, name)
                put(roles, batch, seqs, ask_teacher(roles, teacher, batch.select(seqs)))
            teacher.model.offload()

    ask_endpoints(roles, batches)


def ask_endpoints(roles: Roles, batches: TrainBatches) -> None:
    """Does for teachers behind endpoints what `ask_teachers` does, on the actor's ranks."""
    actor = roles.actor
    if not roles.endpoints or not actor.here:
        return
    vocab_size = load_hf_config(roles.config.model).get_text_config().vocab_size
    with roles.phases("teacher_logprobs", actor.topology):
        assert roles.routes is not None
        for name, client in roles.endpoints.items():
            for batch in PROGRESS.each(batches.of(actor), "mini-batches"):
                seqs = roles.routes.rows(batch, name)
                own = batch.select(seqs)
                hinted = None if roles.hints is None else roles.hints.put_into(own)
                stats = endpoint_logprobs(
                    client, own if hinted is None else hinted.batch, roles.teacher_topk,
                    vocab_size, roles.phases.still_going,
                )  # fmt: skip
                put(roles, batch, seqs, stats if hinted is None else hinted.placed(stats))


def put(roles: Roles, batch: Batch, seqs: list[int], stats: PolicyStats) -> None:
    """Puts what a teacher says of these sequences in their places of the batch."""
    places = token_places(batch, seqs)
    found = (stats.logprobs, stats.top_ids, stats.top_logprobs)
    for name, values in zip(result_names(roles), found, strict=False):
        assert values is not None
        place = getattr(batch, name)
        if place is None:
            place = values.new_zeros(batch.num_tokens, *values.shape[1:])
        place[places] = values
        setattr(batch, name, place)


def result_names(roles: Roles) -> tuple[str, ...]:
    """Returns the fields that a teacher sets."""
    return ("ref_logprobs", *(("teacher_ids", "teacher_logprobs") if roles.teacher_topk else ()))


def token_places(batch: Batch, seqs: list[int]) -> Tensor:
    """(n,) int64: where the tokens of these sequences are in the batch."""
    starts, ends = batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist()
    return torch.cat([torch.arange(starts[i], ends[i]) for i in seqs] or [torch.arange(0)])


def send_teachers_logprobs(roles: Roles, batches: TrainBatches) -> None:
    """Sends what the reference and the teachers have said to the actor, where they are on other
    ranks. A token has one teacher, and all others have 0 in its place.
    """
    actor = roles.actor
    if roles.routes is None:
        names = result_names(roles) if not roles.config.algo.policy_teaches else ("ref_logprobs",)
        send_to_role(roles, batches, names, roles.ref, actor)
        return
    names, own = result_names(roles), batches.of(actor) if actor.here else []
    sums = [[getattr(batch, name) for name in names] for batch in own]
    apart = {each.ranks: each for each in roles.teachers.values() if each.ranks != actor.ranks}
    for teacher in apart.values():
        send_to_role(roles, batches, names, teacher, actor)
        for batch, before in zip(own, sums, strict=True):
            for i, name in enumerate(names):
                values = getattr(batch, name)
                before[i] = values if before[i] is None else before[i] + values
    for batch, found in zip(own, sums, strict=True):
        for name, values in zip(names, found, strict=True):
            like = result_like(roles, name)
            setattr(batch, name, like.new_zeros(batch.num_tokens, *like.shape[1:])
                    if values is None else values)  # fmt: skip


def compute_teacher_logprobs(roles: Roles, batches: TrainBatches) -> None:
    """Sets teacher_ids and teacher_logprobs by the policy itself, before it learns, where it is its
    own teacher. Source: OPSD, arXiv 2601.18734, algorithm 1; SDFT, arXiv 2601.19897.
    """
    actor = roles.actor
    if not actor.here:
        return
    with roles.phases("teacher_logprobs", actor.topology):
        actor.model.onload()
        for batch in PROGRESS.each(batches.of(actor), "mini-batches"):
            stats = ask_teacher(roles, actor, batch)
            batch.teacher_ids, batch.teacher_logprobs = stats.top_ids, stats.top_logprobs


def ask_teacher(roles: Roles, teacher: Trainer, batch: Batch) -> PolicyStats:
    """Returns what the teacher says of the batch's unmasked tokens, behind prompts with their
    hints, where the data has any. Collective over the teacher's ranks.
    """
    top_k = roles.teacher_topk
    if roles.hints is None:
        return teacher.model.logprobs(
            batch, roles.temperature, images=teacher.images, top_k=top_k
        )  # fmt: skip
    hinted = roles.hints.put_into(batch)
    stats = teacher.model.logprobs(
        hinted.batch, roles.temperature, images=roles.hints.images, top_k=top_k
    )
    return hinted.placed(stats)
