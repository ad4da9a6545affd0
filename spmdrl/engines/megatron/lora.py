"""Low-rank adapters on megatron-core's linear layers, as engines/fsdp/lora.py has them.

megatron-core fuses q, k and v, and gate and up projections. Here every layer of the Hugging Face
model has an A and a B of its own, so that the adapter is the same as FSDP2's, in peft's format too.
B's rows are placed in the fused output as the mapping places the rows of the frozen weight.

Under tensor parallelism what a rank holds of A and B follows from how the layer is cut:

    by rows (q, k, v, gate, up)    A whole, B cut as the weight; A x is gathered over the tokens,
                                   or what flows back to it is summed
    by columns (o, down)           A cut as the weight, B whole; A x is summed, (tokens, rank)
    not at all                     both whole
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedConfig

from spmdrl.config import ConfigError, LoraConfig, TrainConfig
from spmdrl.distributed.topology import Topology
from spmdrl.engines.fsdp.lora import (
    IN_LAYER,
    Adapters,
    given_tensors,
    initial_values,
    scale_of,
    target_layers,
)
from spmdrl.engines.fsdp.sharded_loading import (
    RowsChecksum,
    checksum,
    fingerprint_of,
    open_model,
)
from spmdrl.engines.megatron.hf_mapping import HfSlice, pieces
from spmdrl.hub.hf_folder import meta_model
from spmdrl.weights.boxes import Box, sizes
from spmdrl.weights.checkpoint_names import ADAPTER
from spmdrl.weights.shards import Derived, Shards

BY_ROWS, BY_COLUMNS, UNCUT = "rows", "columns", "uncut"


class Part(NamedTuple):
    """What a parameter that is trained holds of a tensor of the Hugging Face model."""

    name: str  # of the tensor
    shape: tuple[int, ...]  # of all of it
    box: Box  # that lies in the parameter


class Pair(NamedTuple):
    """The adapter of one Hugging Face layer, as far as it lies here."""

    layer: str
    a: nn.Parameter  # (rank, columns) float32
    b: nn.Parameter | None  # (rows, rank) float32; None: this rank has no row of the layer
    a_part: Part
    b_part: Part | None


class LinearAdapters(nn.Module):
    """The adapters of one linear layer of megatron-core; `add` is a hook behind its forward pass.

    Its Hugging Face layers, and so the parameters, are the same on all tensor ranks but for a B of
    which a rank has no row.
    """

    def __init__(self, target: Any, held: Mapping[str, list[HfSlice]], lora: LoraConfig) -> None:
        """held: what lies of the weight of each adapted layer here, which may be nothing but for
        the columns."""
        super().__init__()
        self.cut, self.group = cut_of(target), getattr(target, "tp_group", None)
        self.tokens_cut = bool(getattr(target, "sequence_parallel", False))
        self.rank, self.scale, self.off = lora.rank, scale_of(lora), False
        self.pairs = [self._pair(target.weight, layer, held[layer]) for layer in sorted(held)]
        self.a = nn.ParameterList(pair.a for pair in self.pairs)
        self.b = nn.ParameterList(pair.b for pair in self.pairs if pair.b is not None)
        rows = [row for layer in sorted(held) for row in rows_of(held[layer], target.weight)]
        order = torch.full((len(target.weight),), len(rows))  # the last: a column of zeros
        order[torch.tensor(rows, dtype=torch.int64)] = torch.arange(len(rows))
        self.order: Tensor | None = None
        if not torch.equal(order, torch.arange(len(order))):
            self.order = order.to(target.weight.device)

    def _pair(self, weight: Tensor, layer: str, held: list[HfSlice]) -> Pair:
        """held: of the layer's weight; that of another rank where this one has no row of it."""
        here = [piece for piece in held if piece.box[0][0] < piece.box[0][1]]
        (out, columns), (_, cut) = held[0].shape, held[0].box
        a_part = Part(layer + ADAPTER[0], (self.rank, columns), ((0, self.rank), cut))
        a = parameter(a_part.box, weight.device, self.cut == BY_COLUMNS, 1)
        b: nn.Parameter | None = None
        b_part: Part | None = None
        if here:
            rows = (min(p.box[0][0] for p in here), max(p.box[0][1] for p in here))
            b_part = Part(layer + ADAPTER[1], (out, self.rank), (rows, (0, self.rank)))
            b = parameter(b_part.box, weight.device, self.cut == BY_ROWS, 0)
        # whoever sees its own tokens alone has a part of the gradient: Megatron sums these
        a.sequence_parallel = self.tokens_cut and self.cut != BY_COLUMNS  # type: ignore[attr-defined]
        if b is not None:
            b.sequence_parallel = self.tokens_cut and self.cut != BY_ROWS  # type: ignore[attr-defined]
        return Pair(layer, a, b, a_part, b_part)

    def forward(self, x: Tensor) -> Tensor:
        """Returns scale B A x, of the rows of the linear layer here. x: as that layer takes it."""
        a = torch.cat([pair.a for pair in self.pairs]) if len(self.pairs) > 1 else self.pairs[0].a
        inner = self.shared(linear(x, a.to(x.dtype))) * self.scale
        found = [
            linear(part, pair.b.to(x.dtype))
            for pair, part in zip(self.pairs, inner.split(self.rank, dim=-1), strict=True)
            if pair.b is not None
        ]
        if self.order is None:
            return torch.cat(found, -1) if len(found) > 1 else found[0]
        nothing = 0.0 * inner[..., :1]  # other ranks wait for what flows back through `inner`
        return torch.cat([*found, nothing], -1).index_select(-1, self.order)

    def shared(self, inner: Tensor) -> Tensor:
        """A x as B is to take it: of all tokens that the output has, summed over all columns."""
        from megatron.core.tensor_parallel import mappings

        if self.cut == BY_ROWS and self.tokens_cut:
            return mappings.gather_from_sequence_parallel_region(
                inner, tensor_parallel_output_grad=True, group=self.group
            )
        if self.cut == BY_ROWS:
            return mappings.copy_to_tensor_model_parallel_region(inner, group=self.group)
        if self.cut == BY_COLUMNS and self.tokens_cut:
            return mappings.reduce_scatter_to_sequence_parallel_region(inner, group=self.group)
        if self.cut == BY_COLUMNS:
            return mappings.reduce_from_tensor_model_parallel_region(inner, group=self.group)
        return inner

    def add(self, layer: nn.Module, args: tuple[Tensor, ...], out: tuple[Tensor, Any]) -> Any:
        return out if self.off else (out[0] + self(args[0]), out[1])

    def parts(self) -> Iterator[tuple[nn.Parameter, Part]]:
        for pair in self.pairs:
            yield pair.a, pair.a_part
            if pair.b is not None and pair.b_part is not None:
                yield pair.b, pair.b_part


def parameter(box: Box, device: torch.device, is_cut: bool, dimension: int) -> nn.Parameter:
    """Returns zeros with the marks by which megatron-core counts a gradient once in a norm."""
    from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

    made = nn.Parameter(torch.zeros(sizes(box), device=device))
    set_tensor_model_parallel_attributes(made, is_cut, dimension if is_cut else -1, 1)
    return made


def cut_of(target: Any) -> str:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    if isinstance(target, RowParallelLinear):
        return BY_COLUMNS  # megatron-core counts dimensions of the transposed weight
    return BY_ROWS if isinstance(target, ColumnParallelLinear) else UNCUT


def rows_of(held: Iterable[HfSlice], weight: Tensor) -> list[int]:
    """Returns which rows of a fused weight hold the rows of a Hugging Face layer, in their order.

    Raises ConfigError where these are no run without a gap, of which no B is a part.
    """
    places = torch.arange(len(weight))[:, None].expand(weight.shape)
    found, last = list[int](), -1
    for piece in sorted(held, key=lambda piece: piece.box[0]):
        first, end = piece.box[0]
        if first == end:
            continue
        if last not in (-1, first):
            raise ConfigError(
                f"lora: {piece.name} lies on a rank of engine megatron in parts that are not next "
                "to each other, which has no adapters: leave it out of lora.target_modules"
            )
        found += piece.view(places).reshape(end - first, -1)[:, 0].tolist()
        last = end
    return found


# ---- putting them into a model


def add_adapters(
    chunks: list[Any], model: str, hf_config: PreTrainedConfig, config: TrainConfig,
    topology: Topology, load_weights: bool, kind: str,
) -> Adapters:  # fmt: skip
    """Freezes the chunks but for a value head, and gives the layers that config.lora names their
    adapters, with their initial values. Collective over the topology. Raises ConfigError.
    """
    lora = config.lora
    assert lora is not None
    layers = target_layers(meta_model(hf_config), lora)
    given = given_tensors(lora)
    for chunk in chunks:
        for name, p in chunk.named_parameters():
            p.requires_grad_(kind == "value" and name.startswith("output_layer."))
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(let_gradient_pass)
        adapt(chunk, hf_config, lora, set(layers))
        for adapters in adapters_of([chunk]):
            fill_pairs(adapters.pairs, lora, given)
    known = fingerprint(kind, model, topology) if load_weights else None
    return Adapters(lora, model, config.dtype, layers, known)


def adapt(chunk: Any, hf_config: PreTrainedConfig, lora: LoraConfig, layers: set[str]) -> None:
    """Collective over the tensor ranks: one that has no row of a layer takes part in A x."""
    held: dict[str, dict[str, list[HfSlice]]] = {}  # by linear layer and Hugging Face layer
    for name, _, parts in pieces(chunk, hf_config):
        for piece in parts:
            layer = piece.name.removesuffix(".weight")
            if layer in layers and piece.name.endswith(".weight"):
                held.setdefault(name, {}).setdefault(layer, []).append(piece)
    everyone: list[Any] = [None] * chunk.pg_collection.tp.size()
    known = {
        name: {layer: parts[0]._replace(view=all_of) for layer, parts in of_layer.items()}
        for name, of_layer in held.items()
    }
    dist.all_gather_object(everyone, known, group=chunk.pg_collection.tp)
    for name in sorted({name for theirs in everyone for name in theirs}):
        mine = dict(held.get(name, {}))
        for theirs in everyone:
            for layer, piece in theirs.get(name, {}).items():
                (_, columns) = piece.box
                mine.setdefault(layer, [piece._replace(box=((0, 0), columns))])
        put(chunk, name, mine, lora)


def put(chunk: Any, name: str, held: Mapping[str, list[HfSlice]], lora: LoraConfig) -> None:
    """name: of the parameter in the chunk that is the weight of a linear layer."""
    module, _, leaf = name.rpartition(".")
    target = chunk.get_submodule(module)
    if leaf != "weight" or target.weight.dim() != 2 or not adaptable(target):
        raise ConfigError(
            f"lora.target_modules: engine megatron has {', '.join(sorted(held))} in "
            f"{type(target).__name__}, which it does not adapt: leave it out, or use engine fsdp"
        )
    target.adapters = LinearAdapters(target, held, lora)
    target.register_forward_hook(target.adapters.add)


def adaptable(target: Any) -> bool:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    from spmdrl.engines.megatron.model import WholeLinear

    if getattr(target, "is_expert", False) or getattr(target, "gather_output", False):
        return False
    return isinstance(target, (ColumnParallelLinear, RowParallelLinear, WholeLinear))


def all_of(parameter: Tensor) -> Tensor:
    return parameter


@torch.no_grad()
def fill_pairs(pairs: Iterable[Pair], lora: LoraConfig, given: Mapping[str, Tensor]) -> None:
    for pair in pairs:
        columns = pair.a_part.shape[1]
        rows = pair.b_part.shape[0] if pair.b_part is not None else 0
        a, b = initial_values(lora, given, pair.layer, columns, rows)
        pair.a.copy_(a[:, slice(*pair.a_part.box[1])])
        if pair.b is not None and pair.b_part is not None:
            pair.b.copy_(b[slice(*pair.b_part.box[0])])


def let_gradient_pass(layer: nn.Module, args: Any, out: Tensor) -> Tensor:
    """megatron-core's recomputation gives no gradient to what a layer holds unless its input asks
    for one, and frozen embeddings do not.
    """
    return out.requires_grad_() if torch.is_grad_enabled() else out


def adapters_of(chunks: Iterable[Any]) -> Iterator[LinearAdapters]:
    for chunk in chunks:
        yield from (m for m in chunk.modules() if isinstance(m, LinearAdapters))


@contextmanager
def adapters_off(chunks: list[Any]) -> Iterator[None]:
    """Meanwhile the layers compute W x."""
    for adapters in adapters_of(chunks):
        adapters.off = True
    try:
        yield
    finally:
        for adapters in adapters_of(chunks):
            adapters.off = False


def fingerprint(kind: str, model: str, topology: Topology) -> str | None:
    """Returns the same as fsdp.sharded_loading.fingerprint_of does for engine fsdp: each rank reads
    its share of the weights once more. Collective over the topology.
    """
    _, files = open_model(kind, model, topology, load_weights=True)
    if files is None:
        raise ConfigError(f"model: {model!r}: engine megatron adapts safetensors files only")
    sums: dict[str, RowsChecksum] = {}
    names = [n for n, _ in files.meta.named_parameters() if files.source_of(n) is not None]
    for name in names[topology.rank :: topology.world]:
        shape = files.meta.get_parameter(name).shape
        sums[name] = checksum(0, files.rows(name, 0, shape[0]))
    files.close()
    return fingerprint_of(files, sums, topology)


# ---- what is trained, as others see it


def trained_parts(chunk: Any, hf_config: PreTrainedConfig) -> Iterator[tuple[Tensor, Part]]:
    """Yields every parameter that is trained beside a frozen base: adapters and a value head."""
    for adapters in adapters_of([chunk]):
        yield from adapters.parts()
    for _, parameter, held in pieces(chunk, hf_config):
        if parameter.requires_grad:
            (piece,) = held
            yield parameter, Part(piece.name, piece.shape, piece.box)


def stored_name(part: Part) -> str:
    """Returns the name that engine fsdp stores it by, so that exporting needs to know no engine."""
    for end, inner in zip(ADAPTER, IN_LAYER, strict=True):
        if part.name.endswith(end):
            return f"model.hf.{part.name.removesuffix(end)}.{inner}"
    return f"model.{part.name}"


class ScaledB:
    """scale B, the second factor of an adapter that is sent by itself."""

    def __init__(self, pair: Pair, scale: float) -> None:
        assert pair.b is not None and pair.b_part is not None
        self.b, self.scale = pair.b, scale
        self.shape, self.boxes = pair.b_part.shape, (pair.b_part.box,)

    @property
    def device(self) -> torch.device:
        return self.b.device

    def compute(self, to: list[Tensor]) -> None:
        torch.mul(self.b, self.scale, out=to[0])


class Merged:
    """W + scale B A, the parts of it that lie here."""

    def __init__(self, base: Shards, pair: Pair, scale: float) -> None:
        self.base, self.pair, self.scale = base, pair, scale
        self.shape, self.boxes = base.shape, base.boxes

    @property
    def device(self) -> torch.device:
        return self.pair.a.device

    def compute(self, to: list[Tensor]) -> None:
        pair = self.pair
        assert pair.b is not None and pair.b_part is not None
        (first_row, _), (_, (first_column, _)) = pair.b_part.box[0], pair.a_part.box
        for (rows, columns), weight, part in zip(self.boxes, self.base.tensors(), to, strict=True):
            b = pair.b[rows[0] - first_row : rows[1] - first_row]
            a = pair.a[:, columns[0] - first_column : columns[1] - first_column]
            torch.addmm(weight.float(), b, a, alpha=self.scale, out=part)


def with_adapters(base: dict[str, Shards], chunks: list[Any], merged: bool) -> dict[str, Shards]:
    """Returns the shards of a model with adapters, of those of its base; see
    TrainEngine.named_shards.
    """
    made_of: dict[str, Merged | ScaledB] = {}
    found = dict(base)
    for adapters in adapters_of(chunks):
        for pair in adapters.pairs:
            if not merged:
                found[pair.a_part.name] = lying_shards(pair.a, pair.a_part)
            if pair.b_part is None:
                continue
            if merged:
                name = f"{pair.layer}.weight"
                made_of[name] = Merged(base[name], pair, adapters.scale)
            else:
                made_of[pair.b_part.name] = ScaledB(pair, adapters.scale)
    for name, shards in Derived(made_of).shards().items():
        found[name] = shards._replace(exact=base[name].exact if merged else False)
    return found


def unscaled_shards(chunks: list[Any]) -> dict[str, Shards]:
    """Returns the shards of every A and B."""
    pairs = (pair for adapters in adapters_of(chunks) for pair in adapters.parts())
    return {part.name: lying_shards(p, part) for p, part in pairs}


def lying_shards(parameter: Tensor, part: Part) -> Shards:
    return Shards(part.shape, (part.box,), partial(list, [parameter]))
