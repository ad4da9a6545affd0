"""Checks of the adapters of a run of reinforcement learning: where they go, and who has several."""

from __future__ import annotations

from transformers import PreTrainedConfig

from spmdrl.config import PpoConfig, SftConfig, TrainConfig, require
from spmdrl.distributed.placement import Placement, is_frozen, reference_is_base, training_roles
from spmdrl.engines.fsdp.lora import check_lora
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.rollout.build import ENGINES, check_adapter

LEAST_MERGED_LR = 5e-5  # with which most of an adapter is left after ten updates: docs/lora.md


def check_adapters(config: PpoConfig, placement: Placement, hf: PreTrainedConfig) -> None:
    """Raises ConfigError where lora of a role does not go with the rest."""
    for name, role in training_roles(config).items():
        require(
            not is_frozen(name) or role.lora is None,
            f"{name}.lora has no effect: the reference is not trained. With actor.lora it is the "
            "actor's base, its adapter off",
        )
        check_lora(name, role, load_hf_config(role.model) if role.model else hf)
        if name != "actor":
            check_no_sources(name, role, f"{name} reads the rows of all sources")
    check_source_adapters(config)
    if config.weights.lora == "adapter":
        check_adapter(config.actor.lora, config.rollout, hf.get_text_config())
    ref = config.ref
    is_base = config.actor.lora is not None and ref.model in (None, config.model)
    require(
        not is_base
        or "ref" not in training_roles(config)
        or ref.dtype == config.actor.dtype
        or reference_is_base(config, placement),
        f"ref.dtype={ref.dtype!r}: with actor.lora the reference is the actor's base, which beside "
        f"the actor is computed in actor.dtype={config.actor.dtype!r}: set ref.dtype to that, so "
        "that numbers do not depend on the placement",
    )


def warnings_of_adapters(config: PpoConfig) -> list[str]:
    """Warns where an adapter that has just begun is lost in the rounding of what samples. W is a
    number of the rollout's dtype, so that W + scale B A is rounded back to it until the product is
    above half of its last bit.
    """
    lora, lr, dtype = config.actor.lora, config.actor.optim.lr, config.rollout.dtype
    begins = lora is not None and lora.adapter is None
    if not begins or config.weights.lora != "merge" or dtype == "float32" or lr >= LEAST_MERGED_LR:
        return []
    return [
        f"weights.lora='merge' rounds W + scale B A to rollout.dtype={dtype!r}, in which little is "
        f"left of an adapter that has just begun: with actor.optim.lr={lr} the samples will hardly "
        "be those of the policy that is trained (docs/lora.md has numbers). Set "
        "weights.lora='adapter', which rounds A and B alone, or a learning rate of adapters, 1e-4"
    ]


def check_source_adapters(config: PpoConfig) -> None:
    """Raises ConfigError where several adapters of the actor do not go with the rest of a run."""
    if config.actor.lora is None or not config.actor.lora.by_source:
        return
    require(
        ENGINES[config.rollout.engine].check_adapter is not None,
        f"actor.lora.by_source: rollout.engine={config.rollout.engine!r} has no memory for "
        "adapters beside its weights: use 'vllm'",
    )
    require(
        config.weights.lora == "adapter",
        "actor.lora.by_source: W + scale B A has one adapter in it, and the rollout engine is to "
        "sample with several: set weights.lora='adapter'",
    )


def check_no_sources(name: str, role: TrainConfig, reason: str) -> None:
    """Raises ConfigError where a role has several adapters, and can have but one."""
    require(
        role.lora is None or not role.lora.by_source,
        f"{name}.lora.by_source: {reason}, so it has one adapter: leave by_source out",
    )


def check_average(config: SftConfig) -> None:
    """Raises ConfigError where fine-tuning would keep an average of several adapters."""
    lora = config.actor.lora
    require(
        config.actor.ema == 0 or lora is None or not lora.by_source,
        f"actor.ema={config.actor.ema} has no effect with actor.lora.by_source: fine-tuning writes "
        "several adapters and not their average. Leave it out",
    )
