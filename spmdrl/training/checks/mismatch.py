"""Checks whether a mismatch of trainer and rollout engine could be explained (explain_mismatch)."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from spmdrl.config import PpoConfig, is_eager, require
from spmdrl.distributed.placement import Placement
from spmdrl.hub.hf_folder import sees_images
from spmdrl.rollout.build import ENGINES


def check_explain_mismatch(
    config: PpoConfig, hf: PreTrainedConfig, placement: Placement, hosted: bool
) -> None:
    """hf: the model's config; hosted: the actor is another program's. Raises ConfigError where the
    modules of both models cannot be read and compared in one process.
    """
    above = config.explain_mismatch_above
    if not config.explain_mismatch and above is None:
        return
    asked = (
        "explain_mismatch=True" if config.explain_mismatch else f"explain_mismatch_above={above:g}"
    )
    require(
        not config.explain_mismatch or above is None,
        f"explain_mismatch_above={above} has no effect with explain_mismatch=True, which explains "
        "every step: leave one of them out",
    )
    actor, rollout = config.actor, config.rollout
    require(
        actor.engine == "fsdp" and not hosted,
        f"{asked} needs actor.engine='fsdp': the modules of Megatron-core have other names than "
        "those of a rollout engine",
    )
    everyone = placement.roles["actor"]
    require(
        everyone == placement.roles["rollout"],
        f"{asked} compares both models in one process, and by the placement actor and rollout have "
        "ranks of their own: place them on the same ranks",
    )
    require(
        {*placement.training, *placement.sampling} == {*everyone},
        f"{asked} needs actor and rollout on every rank: name no other ranks in placement",
    )
    spec = ENGINES[rollout.engine]
    require(
        spec.read_pass is not None,
        f"{asked}: what the modules of {spec.title} compute cannot be read; use one of "
        f"{[name for name, other in ENGINES.items() if other.read_pass is not None]}",
    )
    require(
        not spec.reads_eager or is_eager(rollout, torch.cuda.is_available(), config.strict),
        f"{asked}: modules that {spec.title} has compiled cannot be read; set "
        "rollout.enforce_eager=True",
    )
    require(
        rollout.quantization is None and getattr(hf, "quantization_config", None) is None,
        f"{asked} needs a rollout engine whose weights are not quantised: theirs differ from the "
        "trainer's by more than rounding; leave it out",
    )
    require(
        not sees_images(hf),
        f"{asked} is for models of text alone: here the model sees images; leave it out",
    )
    for field, usual, reason in (
        ("compile", False, "compiled layers cannot be read"),
        ("ulysses", 1, "each rank has a part of a sequence's tokens"),
        ("lora", None, "an adapter's layers have other names than the engine's, which are merged"),
        ("fp8", None, "its products differ from the engine's by more than rounding to bfloat16"),
        ("router_replay", None, "the trainer uses the engine's experts, so that none can flip"),
    ):
        require(
            getattr(actor, field) == usual,
            f"{asked} does not go with actor.{field}={getattr(actor, field)!r}: {reason}; leave it "
            f"{usual!r}",
        )
