"""Chooses what a layer keeps of its forward pass for the backward pass: all, some, or only its
input.

Checkpointing is torch's, by way of transformers' layers: "full" keeps a layer's input and computes
the rest again; "selective" also keeps what matrix products and attention give, which is most of the
time and about half of the memory. Source of the choice: Korthikanti et al. 2022, arXiv 2205.05198,
section 5. Offloading moves what is kept to the CPU until it is needed.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from spmdrl.config import require
from spmdrl.distributed.torch_compat import PRODUCTS, storage_id
from spmdrl.weights.shards import local


def use_checkpointing(hf: PreTrainedModel, how: bool | Literal["selective"]) -> None:
    """how: False (keep all), True (full) or "selective". Works in train mode only.

    Raises ConfigError for a model whose code in transformers has no checkpointing.
    """
    require(
        not how or hf.supports_gradient_checkpointing,
        f"{type(hf).__name__} has no activation checkpointing in transformers: set "
        "activation_checkpointing=False",
    )
    settings: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, keep_products)
    if how:
        hf.gradient_checkpointing_enable(settings)


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = getattr(op, "name", lambda: "")().split(".")[0] in PRODUCTS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def is_gathered(p: Tensor) -> bool:
    """Says whether a weight is as a pass computes with it. Shards are of a mesh of two axes or
    more; the experts of this rank are gathered, and of a mesh of one.
    """
    return not isinstance(p, DTensor) or p.device_mesh.ndim == 1


def offloading(module: nn.Module, pinned: bool) -> saved_tensors_hooks:
    """Returns hooks around a forward pass: what that saves for the backward pass lies on the CPU.

    Weights stay where they are: sharding gives their memory back and gathers them again by itself.
    module: after it was sharded.
    """
    tool = save_on_cpu(pin_memory=pinned)
    weights: set[int] = set()  # their storages, which FSDP empties and fills but keeps

    def note(part: nn.Module, args: Any) -> None:
        weights.update(storage_id(local(p)) for p in part.parameters() if is_gathered(p))

    def pack(saved: Tensor) -> Any:
        return saved if storage_id(saved) in weights else tool.pack_hook(saved)

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else tool.unpack_hook(kept)

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.register_forward_pre_hook(note)  # after FSDP's own, which gathers
    return saved_tensors_hooks(pack, unpack)
