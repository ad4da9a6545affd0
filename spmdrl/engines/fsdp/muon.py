"""Muon over FSDP2 shards: orthogonalised momentum for the matrices of a model's layers.

torch.optim.Muon steps on whole matrices and multiplies in bfloat16. Given shards, DTensor would
gather within each of the iteration's products and round on the way, so that weights depend on the
number of ranks. Here momentum and weights stay shards; each matrix is put together on one of the
ranks that share it, orthogonalised there, and its rows are sent back. As many matrices as there are
ranks are under way at once, of similar sizes, so that all ranks work.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from spmdrl.weights.checkpoint_names import Parts
from spmdrl.weights.shards import local

# of the quintic iteration: https://kellerjordan.github.io/posts/muon (2024)
COEFFICIENTS, ITERATIONS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7
RMS = 0.2  # of an update, as AdamW's: Liu et al. 2025, arXiv 2502.16982

# the matrices within a weight, by rows and columns: one, or of stacked experts gate and up
Cuts = tuple[tuple[slice, slice], ...]


def hidden_matrices(
    module: nn.Module, layers: Sequence[nn.Module], parts: Parts, prefix: str = ""
) -> dict[str, Cuts]:
    """Finds what Muon is for, by name in `module`: the matrices of the repeated layers, to be asked
    before they are sharded. Embeddings, LM head, value head, norms and biases are not.

    parts: of weights.names, whose names lack the prefix; there stacked experts are found.
    """
    inside = {id(p) for layer in layers for p in layer.parameters()}
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    found: dict[str, Cuts] = {}
    for name, p in module.named_parameters():
        if id(p) not in inside - tables or name.endswith("bias"):
            continue
        experts = parts.get(name.removeprefix(prefix), ())
        if p.ndim == 2 and min(p.shape) > 1:
            found[name] = ((slice(None), slice(None)),)
        elif p.ndim == 3 and experts:
            boxes = sorted({part.box[1:] for part in experts})
            found[name] = tuple((slice(*rows), slice(*columns)) for rows, columns in boxes)
    return found


class Muon(torch.optim.Optimizer):
    """B <- mu B + (1 - mu) G;  W <- W - lr (weight_decay W + 0.2 sqrt(max(rows, columns)) O),
    O the orthogonalised (1 - mu) G + mu B: torch.optim.Muon with Nesterov's momentum and
    adjust_lr_fn="match_rms_adamw", under which learning rates are those of AdamW.
    """

    def __init__(
        self, matrices: Sequence[tuple[Tensor, Cuts]], lr: float, momentum: float,
        weight_decay: float, compute: torch.dtype,
    ) -> None:  # fmt: skip
        """matrices: (rows, columns) weights, or (experts, rows, columns) sharded by experts;
        compute: dtype of the products."""
        super().__init__(
            [p for p, _ in matrices],
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay},
        )
        self.cuts, self.compute = dict(matrices), compute
        for p in self.cuts:  # now, so that it can be saved before the first step
            self.state[p] = {"momentum": torch.zeros_like(p, requires_grad=False)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Collective over the ranks that share the weights."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            flat = sorted((p for p in params if p.ndim == 2), key=lambda p: -p.numel())
            ranks = sharing_group(flat[0]) if flat else None
            at_once = dist.get_world_size(ranks) if ranks is not None else 1
            for start in range(0, len(flat), at_once):
                together = flat[start : start + at_once]
                found = orthogonal_shards([self._update(p, group) for p in together], together)
                for p, direction in zip(together, found, strict=True):
                    self._move(p, direction, group)
            for p in (p for p in params if p.ndim == 3):  # an expert is whole on its rank
                direction = self._update(p, group)
                for rows, columns in self.cuts[p]:
                    direction[:, rows, columns] = orthogonal(direction[:, rows, columns])
                self._move(p, direction, group)

    def _update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """This rank's part of Nesterov's momentum, in the dtype of the products."""
        assert p.grad is not None
        gradient, momentum = local(p.grad), local(self.state[p]["momentum"])
        momentum.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]).to(self.compute)

    def _move(self, p: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
        weight, lr = local(p), group["lr"]
        weight.mul_(1 - lr * group["weight_decay"])
        for rows, columns in self.cuts[p]:
            part = direction[..., rows, columns]
            size = max(p.shape if p.ndim == 2 else part.shape[1:])
            weight[..., rows, columns].add_(part, alpha=-lr * RMS * sqrt(size))


def orthogonal(matrices: Tensor) -> Tensor:
    """Returns about U V^T of each (..., rows, columns) matrix U S V^T: five Newton-Schulz
    iterations, after which singular values are between 0.7 and 1.2. In the dtype given.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    count = matrices.shape[:-2].numel()  # 0 on a rank without experts
    x = (matrices.mT if tall else matrices).reshape(count, *sorted(matrices.shape[-2:]))
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.view(*matrices.shape[:-2], *x.shape[1:])
    return x.mT if tall else x


def orthogonal_shards(updates: Sequence[Tensor], matrices: Sequence[Tensor]) -> list[Tensor]:
    """Rank i of those that share the matrices puts the i-th together and sends the rows back.

    updates: this rank's (rows, columns) of each; matrices: the weights, as many as ranks or fewer.
    """
    ranks = sharing_group(matrices[0])
    if ranks is None:
        return [orthogonal(update) for update in updates]
    number, count = dist.get_rank(ranks), dist.get_world_size(ranks)
    sent = [update.numel() for update in updates] + [0] * (count - len(updates))
    mine = matrices[number].shape if number < len(matrices) else torch.Size((0, 0))
    received = [rows * mine[1] for rows in rows_of_shards(mine[0], count)]
    shards = torch.cat([update.flatten() for update in updates])
    whole = shards.new_empty(mine.numel())
    dist.all_to_all_single(whole, shards, received, sent, group=ranks)
    if len(whole):
        whole = orthogonal(whole.view(mine)).reshape(-1)  # its rows one after the other again
    back = torch.empty_like(shards)
    dist.all_to_all_single(back, whole, sent, received, group=ranks)
    return [
        part.view(update.shape)
        for part, update in zip(back.split(sent), updates, strict=False)  # no more than matrices
    ]


def rows_of_shards(rows: int, count: int) -> list[int]:
    """Returns how many rows each shard has, as torch.chunk, and so FSDP2, cuts them: the last ranks
    may have fewer, or none.
    """
    each = -(-rows // count)
    return [min(max(rows - each * i, 0), each) for i in range(count)]


def sharing_group(p: Tensor) -> dist.ProcessGroup | None:
    """The ranks that hold the rows of a weight between them; None where this one holds all."""
    if not isinstance(p, DTensor):
        return None
    axes = [i for i, cut in enumerate(p.placements) if isinstance(cut, Shard)]
    assert len(axes) <= 1, p.placements
    assert all(p.placements[i] == Shard(0) for i in axes), p.placements
    axes = [i for i in axes if p.device_mesh.size(i) > 1]
    return p.device_mesh.get_group(axes[0]) if axes else None
