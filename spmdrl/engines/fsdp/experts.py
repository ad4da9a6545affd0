"""Expert parallelism: the ranks of a group have some experts of each layer, and tokens travel.

transformers keeps the experts of a layer in stacked weights, (experts, ...) each, and families that
do share one decorator (transformers.integrations.use_experts_implementation). Each rank of an `ep`
group holds the same number of experts, which follow each other. The router stays where the token is
and chooses among all experts. A token is sent once for each expert that it was given, by an
all-to-all; a rank's rows are ordered by expert, so that each projection is one grouped product; the
results go back and are weighted and added up where the token is. So gradients of a router and of
what stands before it are those of a rank's own tokens, and an expert's those of all tokens.

Source of the exchange: Lepikhin et al. 2020, GShard, arXiv 2006.16668, section 3.2, without a
capacity: nothing is dropped or padded.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import grouped_mm
from transformers import PreTrainedConfig

from spmdrl.config import ConfigError, TrainConfig
from spmdrl.distributed.torch_compat import set_parameter
from spmdrl.hub.transformers_compat import apply_expert_gate
from spmdrl.weights.shards import local

# before the name of a stacked weight: the factors of its adapter (expert_adapters.py)
LORA_A, LORA_B = "lora_A_", "lora_B_"


def expert_modules(module: nn.Module) -> list[nn.Module]:
    """Returns the modules that have the routed experts of a layer as stacked weights, which
    transformers' decorator has made known.
    """
    return [m for m in module.modules() if is_stacked(m)]


def is_stacked(module: nn.Module) -> bool:
    marks = all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed"))
    own = list(module.parameters())
    return marks and bool(own) and all(p.shape[:1] == (module.num_experts,) for p in own)


def check_experts(shell: nn.Module, hf: PreTrainedConfig, role: TrainConfig, strict: bool) -> None:
    """Checks that a role's experts can be spread (TrainConfig.expert_parallel). shell: the model,
    perhaps without data. Raises ConfigError.
    """
    degree, found = role.expert_parallel, expert_modules(shell)
    if degree == 1:
        return
    if not found:
        raise ConfigError(
            f"expert_parallel={degree}: model type {hf.model_type!r} has no routed experts that "
            "transformers keeps in stacked weights, which engine 'fsdp' could spread: use "
            "expert_parallel=1"
        )
    numbers = sorted({int(m.num_experts) for m in found})  # type: ignore[arg-type]
    if any(number % degree for number in numbers):
        raise ConfigError(
            f"expert_parallel={degree} does not divide the {numbers[0]} experts of a layer of "
            f"model type {hf.model_type!r}: a rank has whole experts, each the same number"
        )
    if strict:
        raise ConfigError(
            f"expert_parallel={degree} with strict=True: grouped products of experts round by how "
            "many tokens there are; use expert_parallel=1"
        )


# ---- weights


def compute_here(module: nn.Module, compiled: bool) -> None:
    """Has a module with stacked experts compute by `expert_forward`. compiled: the layers around
    are, and this stays out of their graphs.
    """
    forward = torch.compiler.disable(expert_forward) if compiled else expert_forward
    module.forward = MethodType(forward, module)


def split_experts(module: nn.Module, mesh: DeviceMesh, compiled: bool) -> None:
    """Gives each rank its experts, and has their modules compute them by `expert_forward`. Before
    the module is sharded.

    mesh: the ranks that have all experts between them. Parameters become DTensors, cut along their
    first axis. compiled: see compute_here.
    """
    size, rank = mesh.size(), mesh.get_local_rank()
    for part in expert_modules(module):
        for name, p in list(part.named_parameters()):
            mine = p.detach().chunk(size)[rank].clone()
            cut = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
            set_parameter(part, name, nn.Parameter(cut, p.requires_grad))
        compute_here(part, compiled)


# ---- the exchange of tokens


class Route(NamedTuple):
    """The way of a rank's rows. A row is a token for one of its experts: there are num_tokens x
    top_k of them, token by token.
    """

    group: dist.ProcessGroup | None  # None: this rank has all experts
    top_k: int
    by_expert: Tensor  # (rows,) the numbers of the rows, by their expert, and so by its rank
    place: Tensor  # (rows,) where each row is in that order
    sent: list[int]  # rows to each rank of the group
    received: list[int]  # rows from each rank
    arrived: Tensor  # (received rows,) the numbers of those that come, by this rank's expert
    expert: Tensor  # (received rows,) this rank's expert of each, ascending
    ends: Tensor  # (experts of this rank,) int32: where the rows of each end


def route(top_k_index: Tensor, num_experts: int, group: dist.ProcessGroup | None) -> Route:
    """Plans the exchange. Collective over the group. top_k_index: (num_tokens, top_k) experts."""
    chosen = top_k_index.reshape(-1)
    by_expert, device = chosen.argsort(stable=True), chosen.device
    count = torch.zeros(num_experts, dtype=torch.int64, device=device)
    count.scatter_add_(0, chosen, torch.ones_like(chosen))
    if group is None:
        ends = count.cumsum(0).to(torch.int32)
        order = torch.arange(len(chosen), device=device)
        top_k, place = top_k_index.shape[-1], inverse(by_expert)
        return Route(group, top_k, by_expert, place, [], [], order, chosen[by_expert], ends)
    theirs = torch.empty_like(count)  # by the rank that they come from, and this rank's expert
    dist.all_to_all_single(theirs, count, group=group)
    size = group.size()
    per_rank = torch.stack([count.view(size, -1), theirs.view(size, -1)]).sum(-1)
    sent, received = per_rank.tolist()  # the device is waited for here, once a layer
    own = num_experts // size
    numbers = torch.arange(own, device=device).repeat(size)
    expert = numbers.repeat_interleave(theirs, output_size=sum(received))
    expert, arrived = expert.sort(stable=True)
    ends = theirs.view(size, own).sum(0).cumsum(0).to(torch.int32)
    return Route(
        group, top_k_index.shape[-1], by_expert, inverse(by_expert), sent, received, arrived,
        expert, ends,
    )  # fmt: skip


def inverse(order: Tensor) -> Tensor:
    found = torch.empty_like(order)
    found[order] = torch.arange(len(order), device=order.device)
    return found


def to_experts(rows: Tensor, way: Route) -> Tensor:
    """Takes rows by their expert to its rank; returns those that came, by this rank's expert."""
    if way.group is None:
        return rows
    came = rows.new_empty(sum(way.received), rows.shape[1])
    dist.all_to_all_single(came, rows.contiguous(), way.received, way.sent, group=way.group)
    return came[way.arrived]


def to_tokens(rows: Tensor, way: Route) -> Tensor:
    """Takes rows by this rank's expert back; returns this rank's own, token by token."""
    if way.group is None:
        return rows[way.place]
    leaving = torch.empty_like(rows)
    leaving[way.arrived] = rows
    came = rows.new_empty(sum(way.sent), rows.shape[1])
    dist.all_to_all_single(came, leaving, way.sent, way.received, group=way.group)
    return came[way.place]


class Dispatch(torch.autograd.Function):
    """(num_tokens, hidden_size) tokens -> (received rows, hidden_size), by this rank's expert."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, way: Route) -> Tensor:
        ctx.way = way
        return to_experts(hidden[way.by_expert // way.top_k], way)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        rows = to_tokens(grads[0], ctx.way)
        return rows.view(-1, ctx.way.top_k, rows.shape[1]).sum(1), None


class Combine(torch.autograd.Function):
    """(received rows, hidden_size) results -> (rows, hidden_size) of this rank's own, by token."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Route) -> Tensor:
        ctx.way = way
        return to_tokens(rows, way)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return to_experts(grads[0][ctx.way.by_expert], ctx.way), None


# ---- what an expert computes


def expert_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Takes the place of the forward pass of a module with stacked experts. Collective over the
    ranks that have all experts between them; where this one has them, nothing is exchanged.

    hidden_states: (num_tokens, hidden_size); top_k_index, top_k_weights: (num_tokens, top_k).
    """
    first = next(self.parameters())
    group = first.device_mesh.get_group() if isinstance(first, DTensor) else None
    way = route(top_k_index, self.num_experts, group)
    rows = Combine.apply(products(self, Dispatch.apply(hidden_states, way), way), way)
    weighted = rows * top_k_weights.reshape(-1, 1)
    shape = (*top_k_index.shape, hidden_states.shape[-1])
    return weighted.view(shape).sum(1).to(hidden_states.dtype)


def products(experts: Any, rows: Tensor, way: Route) -> Tensor:
    """Says what this rank's experts make of its rows: (received rows, hidden_size), by expert."""
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    rows = grouped_linear(experts, first, rows, way)
    rows = apply_expert_gate(experts, rows) if experts.has_gate else experts.act_fn(rows)
    return grouped_linear(experts, "down_proj", rows, way)


class OfTokens(torch.autograd.Function):
    """Stacked weights, as they are. In the backward pass the gradients of experts without tokens
    are 0, whatever a kernel leaves there: some wrote nothing (pytorch#172439, CUTLASS before 4.3).
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.ends = ends
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        without = ctx.ends.diff(prepend=ctx.ends.new_zeros(1)) == 0
        # in place: the product has made it for this weight alone
        return grads[0].masked_fill_(without[:, None, None], 0), None


def grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """(received rows, in) by expert times (experts, in, out) -> (received rows, out).

    Where no row has come no grouped product is asked for nothing; all gradients are 0, not None.
    """
    if len(rows) == 0:
        return rows @ weight[0]
    return grouped_mm(rows, OfTokens.apply(weight, ends), offs=ends)


def grouped_linear(experts: Any, name: str, rows: Tensor, way: Route) -> Tensor:
    """One product of each expert's rows with its matrix, (out, in), or (in, out) if transposed."""
    weight = local(getattr(experts, name))
    found = grouped_product(rows, weight if experts.is_transposed else weight.mT, way.ends)
    if hasattr(experts, LORA_A + name) and not experts.lora_off:
        a, b = (local(getattr(experts, factor + name)) for factor in (LORA_A, LORA_B))
        inner = grouped_product(rows, a.mT, way.ends) * experts.lora_scale
        found = found + grouped_product(inner, b.mT, way.ends)
    if not experts.has_bias:
        return found
    return found + local(getattr(experts, name + "_bias"))[way.expert]
