"""Checks what a config asks of routers: to replay the experts of the rollout engine, and to have a
load-balancing loss.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from spmdrl.config import ConfigError, PpoConfig, TrainConfig, require
from spmdrl.distributed.placement import is_frozen, training_roles
from spmdrl.engines.fsdp.router_aux_loss import routers_of
from spmdrl.engines.fsdp.router_replay import routing_of
from spmdrl.hub.hf_folder import load_hf_config, meta_model
from spmdrl.rollout.build import ENGINES


def check_router_replay(config: PpoConfig, hf: PreTrainedConfig, hosted: bool) -> None:
    """hf: the model's config; hosted: the actor is another program's. Raises ConfigError."""
    for name, role in training_roles(config).items():
        require(
            name == "actor" or is_frozen(name) or role.router_replay is None,
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
    can = {n: spec.check_routed_experts for n, spec in ENGINES.items() if spec.check_routed_experts}
    check = can.get(rollout.engine)
    if check is None:
        raise ConfigError(
            f"{asked}: rollout.engine={rollout.engine!r} does not say which experts it chose; use "
            f"one of {[*can]}"
        )
    check(hf.get_text_config(), rollout)
    routing_of(hf)


def check_router_aux_loss(name: str, role: TrainConfig, model: str) -> None:
    """name: of the role; model: its model. Raises ConfigError."""
    if not role.router_aux_loss_coef:
        return
    asked = f"{name}.router_aux_loss_coef={role.router_aux_loss_coef:g}"
    require(
        role.engine == "fsdp",
        f"{asked} does not go with {name}.engine={role.engine!r}: Megatron-core's seq_aux_loss "
        "takes the packed sequences of a micro-batch for one sequence, so the loss would depend "
        "on what is packed together. Use engine 'fsdp', or leave it 0",
    )
    require(
        not role.compile,
        f"{asked} does not go with {name}.compile=True: what a router has chosen is read between "
        "operations of a layer; leave compile out",
    )
    try:
        routers_of(meta_model(load_hf_config(model)))
    except ConfigError as error:
        raise ConfigError(f"{name}.{error}") from error
