"""Checks whether the routers of a role's model can have a load-balancing loss."""

from __future__ import annotations

from spmdrl.config import ConfigError, TrainConfig, require
from spmdrl.engines.fsdp.router_aux_loss import routers_of
from spmdrl.hub.hf_folder import load_hf_config, meta_model


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
