"""What the reference says of a step's tokens, and what a teacher does, which may be the reference,
or the policy itself with a hint in its prompt.
"""

from __future__ import annotations

from spmdrl.distributed.progress import PROGRESS
from spmdrl.training.dispatch import TrainBatches
from spmdrl.training.roles import Roles, Trainer
from spmdrl.types import Batch, PolicyStats


def compute_ref_logprobs(roles: Roles, batches: TrainBatches) -> None:
    """Sets ref_logprobs by the frozen reference model, where there is one; of a teacher also
    teacher_ids and teacher_logprobs. A reference that is the teacher sees the hints of the data.
    """
    ref = roles.ref
    if ref is None or not ref.here:
        return
    with roles.phases("ref_logprobs", ref.topology):
        ref.model.onload()
        for batch in PROGRESS.each(batches.of(ref), "mini-batches"):
            if roles.policy_teaches:
                stats = ref.model.logprobs(batch, roles.temperature, images=ref.images)
                batch.ref_logprobs = stats.logprobs
                continue
            stats = ask_teacher(roles, ref, batch)
            batch.ref_logprobs = stats.logprobs
            batch.teacher_ids, batch.teacher_logprobs = stats.top_ids, stats.top_logprobs
        ref.model.offload()


def compute_teacher_logprobs(roles: Roles, batches: TrainBatches) -> None:
    """Sets teacher_ids and teacher_logprobs by the policy itself, before it learns, where it is its
    own teacher. Source: OPSD, arXiv 2601.18734, algorithm 1; SDFT, arXiv 2601.19897.
    """
    actor = roles.actor
    if not roles.policy_teaches or not actor.here:
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
