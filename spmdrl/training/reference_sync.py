"""A KL reference that follows the policy: TRL's sync_ref_model, the soft update of TR-DPO."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from spmdrl.engines.base import TrainEngine
from spmdrl.training.roles import Roles


def sync_reference(roles: Roles, step: int) -> None:
    """Moves the reference towards the policy in every algo.ref_model_sync_steps-th step.

    reference <- alpha policy + (1 - alpha) reference, in float32, weight by weight, with alpha =
    algo.ref_model_mixup_alpha. Source: arXiv 2404.09656, equation 4. Collective over the actor's
    ranks, which are the reference's.
    """
    algo, actor, ref = roles.config.algo, roles.actor, roles.ref
    if step % algo.ref_model_sync_steps or not actor.here:
        return
    assert ref is not None
    with roles.phases("sync_reference", actor.topology):
        actor.model.offload(keep_weights=True)
        actor.model.onload(weights_only=True)
        ref.model.onload()
        bucket_bytes = roles.config.weights.bucket_mib << 20
        ref.model.take_weights(
            mixed(actor.model, ref.model, algo.ref_model_mixup_alpha, bucket_bytes)
        )
        ref.model.offload()


def mixed(
    policy: TrainEngine, reference: TrainEngine, alpha: float, bucket_bytes: int
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, alpha policy + (1 - alpha) reference), float32 full tensors."""
    of_policy = policy.named_weights(torch.float32, bucket_bytes)
    of_reference = reference.named_weights(torch.float32, bucket_bytes)
    for (name, new), (same, old) in zip(of_policy, of_reference, strict=True):
        if name != same:
            raise ValueError(f"the policy has {name} where the reference has {same}")
        yield name, old.lerp_(new, alpha)
