"""megatron-core's distributed optimizer: how it is built, and moved between devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmdrl.config import OptimConfig
from spmdrl.engines.megatron import compat


def build_optimizer(chunks: list[Any], mega: Any, optim: OptimConfig, clips: bool = True) -> Any:
    """AdamW; weight decay on matrices only, as in fsdp.build_optimizer. clips: whether its step
    clips gradients; the engine does where parameters are clipped apart.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    settings = OptimizerConfig(
        optimizer="adam", lr=optim.lr, min_lr=0.0, weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0], adam_beta2=optim.betas[1], adam_eps=optim.eps,
        clip_grad=optim.clip_norm if clips else 0.0, bf16=mega.params_dtype == torch.bfloat16,
        params_dtype=mega.params_dtype, use_distributed_optimizer=True,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, chunks)
    for part in compat.optimizer_parts(optimizer):
        # what the first step would make, so that it can be saved
        part.init_state_fn(part.optimizer, part.config)
        for group in part.optimizer.param_groups:
            group.setdefault("step", 0)
        if isinstance(part.optimizer, torch.optim.AdamW):  # a host's program without Apex
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))
    set_hyperparameters(optimizer, optim)
    return optimizer


def set_hyperparameters(optimizer: Any, optim: OptimConfig) -> None:
    """Sets the optimizer's hyperparameters to those of `optim`; Megatron leaves it to its scheduler
    to spare norms and biases the decay, and takes the rest from a checkpoint that it loads.
    """
    for group in optimizer.param_groups:
        group["betas"], group["eps"] = optim.betas, optim.eps
        group["weight_decay"] = optim.weight_decay * group["wd_mult"]


def move_optimizer(optimizer: Any, device: torch.device) -> None:
    """Adam's moments, and the float32 weights where these are not the model's own."""
    for part in compat.optimizer_parts(optimizer):
        for state in part.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.ndim > 0:
                    state[name] = value.to(device)
        for param in own_weights(part):
            param.data = param.data.to(device)


def own_weights(part: Any) -> list[Tensor]:
    """An optimizer's float32 weights that are not the model's own nor views of them."""
    groups = [
        *getattr(part, "shard_fp32_from_float16_groups", []),
        *getattr(part, "fp32_from_float16_groups", []),
    ]
    return [param for group in groups for param in group if param is not None]
