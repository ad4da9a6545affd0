"""A model of transformers as another program shards it with FSDP2, and steps of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Host:
    """What programs do in different ways."""

    sharded: bool = True
    mesh: tuple[int, ...] = ()  # replicas and ranks that share; (): one axis of all ranks
    reshard_after_forward: bool = True
    own_units: tuple[str, ...] = ()  # modules that are units of their own, beside the layers
    together: bool = False  # these are one unit
    param_dtype: torch.dtype | None = None
    divide_factor: float | None = None
    offload: bool = False
    dtype: torch.dtype = torch.float32  # of the weights
    attention: str = "sdpa"
    dropout: float = 0.0
    checkpointing: bool = False
    lr: float = 1e-3
    settings: dict[str, Any] = field(default_factory=dict)  # of the model's config


def fsdp_host(folder: str, host: Host = Host()) -> tuple[Any, torch.optim.Optimizer]:
    """As a program builds it: fully_shard on each layer and on the model, then AdamW."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=host.dtype, attn_implementation=host.attention,
        attention_dropout=host.dropout, **host.settings,
    )  # fmt: skip
    if host.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if host.sharded:
        shape = host.mesh or (torch.distributed.get_world_size(),)
        names = ("replicate", "shard")[-len(shape) :]
        settings: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", shape, mesh_dim_names=names),
            "mp_policy": MixedPrecisionPolicy(host.param_dtype, reduce_dtype=torch.float32),
            "reshard_after_forward": host.reshard_after_forward,
        }
        if host.offload:
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        own = [model.get_submodule(name) for name in host.own_units]
        for unit in [*model.model.layers, *([own] if host.together else own)]:
            fully_shard(unit, **settings)
        fully_shard(model, **settings)
        if host.divide_factor is not None:
            for module in model.modules():
                if hasattr(module, "set_gradient_divide_factor"):
                    module.set_gradient_divide_factor(host.divide_factor)
    return model, torch.optim.AdamW(model.parameters(), lr=host.lr, weight_decay=0.0)


def sft_step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> float:
    """The program's own step, on tokens that depend on its number and the rank. It leaves its
    gradients where they are until the next of its steps begins.
    """
    optimizer.zero_grad()
    draw = torch.Generator().manual_seed(100 * number + torch.distributed.get_rank())
    tokens = torch.randint(3, 60, (4, 12), generator=draw)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    return float(loss)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """The whole weights, on every rank. Collective."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }
