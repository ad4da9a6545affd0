"""Adapters on the experts of a mixture, which transformers keeps in stacked weights.

Each expert has factors of its own, as peft's target_parameters give them: W_e + scale B_e A_e. They
are held as stacked as the weight is, (experts, rank, in) and (experts, out, rank) float32, so that
what spreads experts over ranks spreads them too. experts.py computes with them: a token's product
with A and B of its expert takes the place of a sum of matrices, for which each expert's matrix and
its gradient would be made in every pass.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.config import ConfigError, LoraConfig
from spmdrl.engines.fsdp.experts import LORA_A, LORA_B, compute_here, is_stacked
from spmdrl.weights.boxes import intersect, sizes, view, whole
from spmdrl.weights.checkpoint_names import ADAPTER, Parts, SubTensor
from spmdrl.weights.shards import TensorSource, held_box, local

RANK_MULTIPLE = 8  # grouped products on GPUs take rows of a multiple of 16 bytes, in bfloat16


def stacked_names(hf: nn.Module) -> list[str]:
    """Returns the names of the matrices of all experts, (experts, out, in) or (experts, in, out)
    each.
    """
    return [
        f"{name}.{own}"
        for name, module in hf.named_modules()
        if is_stacked(module)
        for own, p in module.named_parameters(recurse=False)
        if p.ndim == 3 and not own.startswith("lora_")
    ]


def target_stacks(hf: nn.Module, lora: LoraConfig) -> list[str]:
    """Names of the stacked weights to adapt. Raises ConfigError where a target is none."""
    names = stacked_names(hf)
    for target in lora.target_parameters:
        if not any(name.endswith(f".{target}") for name in names):
            ends = sorted({".".join(name.split(".")[-2:]) for name in names})
            near = difflib.get_close_matches(target, ends, n=3) or ends
            raise ConfigError(
                f"lora.target_parameters={target!r} is the end of no name of a weight in which "
                "transformers stacks the experts of a layer; "
                + (f"nearest: {', '.join(near)}" if near else "this model has none: leave it out")
            )
    if lora.target_parameters and lora.use_dora:
        raise ConfigError(
            "lora.use_dora with lora.target_parameters: peft has no DoRA of stacked weights, and "
            "could not load the adapter: leave one of them out"
        )
    if lora.target_parameters and lora.rank % RANK_MULTIPLE:
        raise ConfigError(
            f"lora.rank={lora.rank} with lora.target_parameters: grouped products of experts on "
            f"GPUs need a multiple of {RANK_MULTIPLE}"
        )
    targets = tuple(f".{target}" for target in lora.target_parameters)
    return [name for name in names if name.endswith(targets)] if targets else []


def factor_names(name: str) -> tuple[str, str]:
    """Returns what A and B of a stacked weight are called in the model."""
    module, _, own = name.rpartition(".")
    return f"{module}.{LORA_A}{own}", f"{module}.{LORA_B}{own}"


def factor_shapes(hf: nn.Module, name: str, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of A, (experts, rank, in), and of B, (experts, out, rank)."""
    module: Any = hf.get_submodule(name.rpartition(".")[0])
    experts, out, columns = hf.get_parameter(name).shape
    if module.is_transposed:
        out, columns = columns, out
    return (experts, rank, columns), (experts, out, rank)


def add_stacks(
    hf: nn.Module, names: Sequence[str], rank: int, scale: float, compiled: bool
) -> None:  # fmt: skip
    """Gives these weights factors without values, and has their modules compute with them.
    compiled: the layers around are.
    """
    for name in names:
        module: Any = hf.get_submodule(name.rpartition(".")[0])
        device = hf.get_parameter(name).device
        shapes = factor_shapes(hf, name, rank)
        for factor, shape in zip(factor_names(name), shapes, strict=True):
            own = factor.rpartition(".")[2]
            module.register_parameter(own, nn.Parameter(torch.zeros(shape, device=device)))
        module.lora_scale, module.lora_off = scale, False
        compute_here(module, compiled)


# ---- as the engine sends them


class ExpertPart:
    """W_e + scale B_e A_e of a part of a stacked weight, as far as it lies on this rank."""

    def __init__(
        self, base: Tensor, a: Tensor, b: Tensor, scale: float, transposed: bool, part: SubTensor
    ) -> None:
        """base, a, b: as in the module's docstring, split by experts in the same way, or full."""
        self.base, self.a, self.b, self.scale, self.transposed = base, a, b, scale, transposed
        held = held_box(base)
        common = intersect(held, part.box) if held is not None else None
        self.held, self.common = held, common
        self.shape = part.shape
        self.boxes = () if common is None else (part.inside(common),)
        whole_experts = held is None or held[1:] == whole(tuple(base.shape[1:]))
        assert whole_experts, "a rank has rows of an expert: see divides_experts"

    @property
    def device(self) -> torch.device:
        return local(self.base).device

    def compute(self, to: list[Tensor]) -> None:
        if self.held is None or self.common is None:
            return
        experts, rows, columns = self.common
        own = slice(experts[0] - self.held[0][0], experts[1] - self.held[0][0])
        left, right = local(self.b)[own], local(self.a)[own]
        if self.transposed:
            left, right = right.mT, left.mT
        torch.baddbmm(
            view(local(self.base), self.held, self.common).float(),
            left[:, slice(*rows)], right[:, :, slice(*columns)],
            alpha=self.scale, out=to[0].view(sizes(self.common)),
        )  # fmt: skip


def expert_parts(
    name: str, base: Tensor, a: Tensor, b: Tensor, scale: float, transposed: bool, parts: Parts
) -> dict[str, TensorSource]:
    """Returns what a checkpoint has of a stacked weight with its adapter, by its names there."""
    mine = parts.get(name, [SubTensor(name, tuple(base.shape), whole(base.shape))])
    return {part.name: ExpertPart(base, a, b, scale, transposed, part) for part in mine}


def add_deltas(weight: Tensor, a: Tensor, b: Tensor, scale: float, transposed: bool) -> None:
    """Adds scale B A to all of a stacked weight, in place."""
    left, right = (a.mT, b.mT) if transposed else (b, a)
    weight.baddbmm_(left, right, alpha=scale)


# ---- as peft has them


def peft_layers(names: Sequence[str]) -> dict[str, str]:
    """Returns what peft calls the layer of each stacked weight's adapter. It wraps a module once
    for each of its weights, in their order in the module, and the last wrapper has the module's
    own name. names: in the order of the model.
    """
    modules = [name.rpartition(".")[0] for name in names]
    return {
        name: module + ".base_layer" * modules[i + 1 :].count(module)
        for i, (name, module) in enumerate(zip(names, modules, strict=True))
    }


def peft_tensors(names: Sequence[str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the factors by peft's names, and as it has them: A (experts * rank, in), expert by
    expert, and B (out, rank * experts), rank by rank. tensors: `<weight>.lora_A.weight` and
    `<weight>.lora_B.weight`.
    """
    found = {}
    for name, layer in peft_layers(names).items():
        a, b = (tensors[name + part] for part in ADAPTER)
        found[layer + ADAPTER[0]] = a.flatten(0, 1)
        found[layer + ADAPTER[1]] = b.permute(1, 2, 0).flatten(1, 2).contiguous()
    return found


def given_factors(
    names: Sequence[str], rank: int, given: Mapping[str, Tensor], prefix: str
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:  # fmt: skip
    """Yields A and B of each stacked weight from what peft has of them; the inverse of
    peft_tensors. prefix: of names in peft's files.
    """
    for name, layer in peft_layers(names).items():
        a, b = (given[prefix + layer + part] for part in ADAPTER)
        yield (
            name,
            (
                a.unflatten(0, (-1, rank)),
                b.unflatten(1, (rank, -1)).permute(2, 0, 1).contiguous(),
            ),
        )
