"""Several adapters in one model, each of which computes its own tokens (LoraConfig.by_source).

The tokens x of a micro-batch, packed in one row, are brought into the order of their adapters:

    [x1 | x2 | ...]          the tokens of adapter 1, of adapter 2, ...
    [B1 A1 x1 | B2 A2 x2 | ...]

and scale times these products goes back to where the tokens are. So the products of n tokens cost
what those of one adapter would. An adapter without a token still multiplies a matrix of no rows:
its gradient is 0, and every rank takes part in the same collectives of FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from transformers import PreTrainedModel

from spmdrl.config import ConfigError, LoraConfig, TrainConfig, require
from spmdrl.distributed.topology import Topology
from spmdrl.engines.fsdp.compat import set_variant
from spmdrl.engines.fsdp.optimizers import Optimizer
from spmdrl.engines.fsdp.per_sequence_layers import is_recurrent, is_sparse
from spmdrl.engines.fsdp.sharding import clip_gradients
from spmdrl.hub.hf_folder import sees_images
from spmdrl.segments import to_device
from spmdrl.types import Batch

DEFAULT = "default"  # what peft calls an adapter that has no name


def names_of(lora: LoraConfig) -> tuple[str, ...]:
    """Returns the names of several adapters; one empty name where there is one."""
    return lora.names or ("",)


def in_layer(adapter: str) -> tuple[str, str]:
    """Returns peft's names of A and B in a layer. adapter: as in names_of."""
    name = adapter or DEFAULT
    return f"lora_A.{name}.weight", f"lora_B.{name}.weight"


def folder_of(lora: LoraConfig, adapter: str) -> str | None:
    """Returns the folder that an adapter starts from: that of its name in lora.adapter, or else
    lora.adapter itself, from which then all start; None where there is none.
    """
    if lora.adapter is None:
        return None
    if not any(Path(lora.adapter, name).is_dir() for name in lora.names):
        return lora.adapter
    return str(Path(lora.adapter, adapter))


class TokenOrder(NamedTuple):
    """The tokens of a pass in the order of their adapters."""

    there: Tensor  # (num_tokens,) int64: which token stands in each place of that order
    back: Tensor  # (num_tokens,) int64: the place of each token in it
    counts: list[int]  # how many tokens each adapter has


class AdapterTokens:
    """Says to all layers of a model which adapter each token of the pass at hand is of, and counts
    the updates of each adapter: one whose sources have no token in a mini-batch is left as it is,
    with its moments.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.order: TokenOrder | None = None
        self.num_updates = dict.fromkeys(names, 0)

    @contextmanager
    def of(self, adapters: Tensor | None, device: torch.device) -> Iterator[None]:
        """Around a forward pass, and the backward pass that computes parts of it again. adapters:
        (num_tokens,) int64 on the CPU, of the tokens that the model is given.
        """
        assert adapters is not None, "by_source: a batch that does not say whose its sequences are"
        there = torch.argsort(adapters, stable=True)
        counts = torch.bincount(adapters, minlength=len(self.names)).tolist()
        moved = to_device([there, torch.argsort(there)], device)
        self.order = TokenOrder(moved[0], moved[1], counts)
        try:
            yield
        finally:
            self.order = None

    def add_products(self, layer: Any, x: Tensor, result: Tensor) -> Tensor:
        """Returns result + scale B A x, of each token with its own adapter. layer: peft's; x: (...,
        in), with as many rows as the pass has tokens; result: (..., out).
        """
        assert self.order is not None, "a pass outside of AdapterTokens.of"
        there, back, counts = self.order
        rows = x.flatten(0, -2)
        assert len(rows) == len(there), "a layer that is not given the pass's tokens"
        ordered = Reordered.apply(rows, there, back)
        products = [
            layer.lora_B[name](layer.lora_A[name](own))
            for name, own in zip(self.names, ordered.split(counts), strict=True)
        ]
        added = Reordered.apply(torch.cat(products), back, there) * layer.scaling[self.names[0]]
        return result + added.view_as(result)

    def weights_of(self, name: str, trained: Mapping[str, Tensor]) -> list[Tensor]:
        """Returns A and B of all layers of an adapter."""
        return [weight for key, weight in trained.items() if key.endswith(in_layer(name))]

    def count_updates(self, counts: Tensor) -> None:
        for name, count in zip(self.names, counts.tolist(), strict=True):
            self.num_updates[name] += int(count > 0)

    def resume(
        self, num_updates: Mapping[str, int], trained: Mapping[str, Tensor], optimizer: Optimizer
    ) -> None:
        """Tells the optimizer how many steps each adapter has made, which it does not store."""
        self.num_updates, state = dict(num_updates), optimizer.state
        for name, number in self.num_updates.items():
            for weight in self.weights_of(name, trained):
                if "step" in state[weight]:  # Muon counts none
                    state[weight]["step"].fill_(number)


def loss_tokens(batch: Batch, tokens: AdapterTokens) -> Tensor:
    """Counts a batch's unmasked tokens of each adapter: (num_adapters,) float64."""
    assert batch.adapters is not None
    of = torch.repeat_interleave(batch.adapters, batch.seq_lens)
    counts = torch.zeros(len(tokens.names), dtype=torch.float64)
    return counts.index_add(0, of, batch.loss_mask.double())


def clip_each(
    trained: Mapping[str, Tensor], tokens: AdapterTokens, counts: Tensor, most: float,
    topology: Topology,
) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
    """Clips the gradients of each adapter to a norm over its own, so that none takes from the step
    of another; one without tokens loses its gradients, which the optimizer then passes over.

    trained: parameters by name. counts: of loss_tokens, over all ranks. Returns the norm over all
    gradients before, and metrics of each adapter. Collective.
    """
    squares, metrics = torch.zeros((), device=topology.device), dict[str, float]()
    for name, count in zip(tokens.names, counts.tolist(), strict=True):
        own = tokens.weights_of(name, trained)
        norm = clip_gradients(own, most, topology)
        if count == 0:
            for weight in own:
                weight.grad = None
        squares += norm.square()
        metrics |= {f"grad_norm/{name}": float(norm), f"loss_tokens/{name}": count}
    return squares.sqrt(), metrics


class Reordered(torch.autograd.Function):
    """rows[order]. Gradients are copied back, where autograd's own backward would add them up."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.inverse), None, None


def add_others(
    hf: nn.Module, layers: Sequence[str], config: Any, names: Sequence[str]
) -> AdapterTokens:
    """Gives peft's layers, which have the first of these adapters, the others too, and has them
    compute each token with its own. config: peft's LoraConfig.
    """
    tokens = AdapterTokens(names)
    for path in layers:
        layer: Any = hf.get_submodule(path)
        for name in names[1:]:
            layer.update_layer(name, config.r, lora_alpha=config.lora_alpha, config=config)
            set_variant(layer, keep_result, name)
        layer.set_adapter(list(names))
        set_variant(layer, tokens.add_products, names[0])  # adds those of all
    return tokens


def keep_result(layer: Any, x: Tensor, result: Tensor) -> Tensor:
    return result


def check_by_source(name: str, role: TrainConfig, model: PreTrainedModel) -> None:
    """Raises ConfigError where a role cannot have several adapters. model: its shell."""
    lora = role.lora
    if lora is None or not lora.by_source:
        return
    where = f"{name}.lora.by_source"
    for adapter in lora.names:
        plain = adapter.replace("_", "").replace("-", "").isalnum()
        if not plain or hasattr(nn.ModuleDict(), adapter):
            raise ConfigError(
                f"{where}: {adapter!r} cannot be an adapter's name, by which its folder is called: "
                "use letters, digits, '_' and '-', and no name of torch.nn.ModuleDict's"
            )
    reasons = {
        f"{name}.lora.use_dora learns the lengths of one adapter's rows": lora.use_dora,
        f"{name}.lora.target_parameters adapts experts, which have one adapter": bool(
            lora.target_parameters
        ),
        f"{name}.lora.quantization={lora.quantization!r} was not tried with several adapters": (
            lora.quantization is not None
        ),
        f"{name}.compile would compile each layer anew for every number of tokens that an adapter "
        "has": role.compile,
        "the model has recurrent layers or sparse attention, which are given its tokens in another "
        "form": any(is_recurrent(module) or is_sparse(module) for module in model.modules()),
        "the model's tower would have adapters, and is given no tokens; set freeze_vision": (
            sees_images(model.config) and not role.freeze_vision
        ),
    }
    for reason, is_so in reasons.items():
        require(not is_so, f"{where}: {reason}. Leave out one of them")
