"""Checks whether the experts of the rollout engine can be replayed by the actor (router_replay)."""

from __future__ import annotations

from transformers import PreTrainedConfig

from spmdrl.config import PpoConfig, require
from spmdrl.distributed.placement import training_roles
from spmdrl.engines.fsdp.router_replay import routing_of
from spmdrl.rollout.build import ENGINES
from spmdrl.rollout.vllm.latent_attention import is_latent
from spmdrl.rollout.vllm.model_types import runs_on_cpu

NOT_IN_VLLM = ("granitemoehybrid", "nemotron_h")  # model types with Mamba layers and experts


def check_router_replay(config: PpoConfig, hf: PreTrainedConfig, hosted: bool) -> None:
    """hf: the model's config; hosted: the actor is another program's. Raises ConfigError."""
    for name, role in training_roles(config).items():
        require(
            name in ("actor", "ref") or role.router_replay is None,
            f"{name}.router_replay={role.router_replay!r} has no effect: only the actor's experts "
            "are those of the rollout engine; leave it out",
        )
    actor, rollout = config.actor, config.rollout
    if actor.router_replay is None:
        return
    asked = f"actor.router_replay={actor.router_replay!r}"
    require(
        not hosted,
        f"{asked} needs an actor that the run builds itself, and here it is another program's: "
        "leave it out",
    )
    require(
        not actor.compile,
        f"{asked} does not go with actor.compile=True: which experts are chosen is replaced "
        "between operations of a layer; leave compile out",
    )
    can = [spec.name for spec in ENGINES.values() if spec.returns_routed_experts]
    require(
        rollout.engine in can,
        f"{asked}: rollout.engine={rollout.engine!r} does not say which experts it chose; use one "
        f"of {can}",
    )
    require(
        rollout.engine_args.get("enable_prefix_caching", True) is True,
        f"{asked}: vLLM keeps the experts of its tokens by the blocks of its prefix cache; leave "
        "enable_prefix_caching out of rollout.engine_args",
    )
    require(
        rollout.enforce_eager is not False or rollout.engine != "vllm" or not runs_on_cpu(),
        f"{asked}: on CPUs vLLM's compiled layers do not say which experts they chose; leave "
        "rollout.enforce_eager out",
    )
    text = hf.get_text_config()
    require(
        rollout.engine != "vllm" or text.model_type not in NOT_IN_VLLM,
        f"{asked}: vLLM fails to return the experts of model type {text.model_type!r}, whose "
        "layers carry a state; use rollout.engine='hf'",
    )
    require(
        rollout.engine != "vllm" or not (runs_on_cpu() and is_latent(text)),
        f"{asked}: on CPUs vLLM has no prefix cache for latent attention, by whose blocks it keeps "
        "the experts of its tokens; use rollout.engine='hf'",
    )
    routing_of(hf)
