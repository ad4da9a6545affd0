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

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
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
from spmdrl.engines.megatron.families import FAMILIES
from spmdrl.engines.megatron.hf_mapping import pieces
from spmdrl.engines.megatron.splits import HfSlice, tensor_names
from spmdrl.engines.megatron.towers import (
    has_trained_tower,
    language_part,
    own_name,
    seeing_config,
)
from spmdrl.hub.hf_folder import meta_model
from spmdrl.weights.boxes import Box, sizes
from spmdrl.weights.checkpoint_names import ADAPTER
from spmdrl.weights.shards import Derived, Shards

Runs = list[tuple[tuple[int, int], list[int]]]
BY_ROWS, BY_COLUMNS, UNCUT = "rows", "columns", "uncut"


class Part(NamedTuple):
    """Says what a parameter that is trained holds of a tensor of the Hugging Face model."""

    name: str  # of the tensor
    shape: tuple[int, ...]  # of all of it
    box: Box  # that lies in the parameter


class AdapterPair(NamedTuple):
    """The adapter of one Hugging Face layer, as far as it lies here."""

    layer: str
    a: nn.Parameter  # (rank, columns) float32
    a_part: Part
    b: list[tuple[nn.Parameter, Part]]  # (rows, rank) float32 of each run of rows; may be none


class LinearAdapters(nn.Module):
    """The adapters of one linear layer of megatron-core; `add` is a hook behind its forward pass.

    Its Hugging Face layers are the same on all tensor ranks, whether a rank has rows of them or
    not: all ranks take part in A x.
    """

    def __init__(self, target: Any, held: Mapping[str, list[HfSlice]], lora: LoraConfig) -> None:
        """held: what lies here of the weight of each adapted layer; of one that has no row here a
        slice without rows.
        """
        super().__init__()
        self.cut, self.group = cut_of(target), getattr(target, "tp_group", None)
        # of a layer that is not cut its weight says whether a rank sees its own tokens alone
        marked: Any = target.weight if self.cut == UNCUT else target
        self.tokens_cut = bool(marked.sequence_parallel)
        self.rank, self.scale, self.off = lora.rank, scale_of(lora), False
        self.pairs: list[AdapterPair] = []
        rows: list[int] = []  # of the linear layer, in the order of the rows of B
        for layer in sorted(held):
            runs = runs_of(held[layer], target.weight)
            rows += [row for _, places in runs for row in places]
            self.pairs.append(self._pair(target.weight, layer, held[layer][0], runs))
        self.a = nn.ParameterList(pair.a for pair in self.pairs)
        self.b = nn.ParameterList(b for pair in self.pairs for b, _ in pair.b)
        order = torch.full((len(target.weight),), len(rows))  # the last: a column of zeros
        order[torch.tensor(rows, dtype=torch.int64)] = torch.arange(len(rows))
        self.order: Tensor | None = None
        if not torch.equal(order, torch.arange(len(order))):
            self.order = order.to(target.weight.device)

    def _pair(self, weight: Tensor, layer: str, piece: HfSlice, runs: Runs) -> AdapterPair:
        (out, columns), (_, cut) = piece.shape, piece.box
        a_part = Part(layer + ADAPTER[0], (self.rank, columns), ((0, self.rank), cut))
        a = parameter(a_part.box, weight.device, self.cut == BY_COLUMNS, 1)
        # whoever sees its own tokens alone has a part of the gradient: Megatron sums these
        mark(a, self.tokens_cut and self.cut != BY_COLUMNS)
        b = []
        for span, _ in runs:
            part = Part(layer + ADAPTER[1], (out, self.rank), (span, (0, self.rank)))
            b.append((parameter(part.box, weight.device, self.cut == BY_ROWS, 0), part))
            mark(b[-1][0], self.tokens_cut and self.cut != BY_ROWS)
        return AdapterPair(layer, a, a_part, b)

    def forward(self, x: Tensor) -> Tensor:
        """Returns scale B A x, of the rows of the linear layer here. x: as that layer takes it."""
        a = torch.cat([pair.a for pair in self.pairs]) if len(self.pairs) > 1 else self.pairs[0].a
        inner = self.shared(linear(x, a.to(x.dtype))) * self.scale
        found = [
            linear(part, b.to(x.dtype))
            for pair, part in zip(self.pairs, inner.split(self.rank, dim=-1), strict=True)
            for b, _ in pair.b
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
            yield from pair.b


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


def mark(made: Any, tokens_cut: bool) -> None:
    made.sequence_parallel = tokens_cut


def runs_of(held: Iterable[HfSlice], weight: Tensor) -> Runs:
    """Returns the runs of rows of a Hugging Face layer that lie in a fused weight, in their order,
    and which of its rows these are.
    """
    numbers = torch.arange(len(weight))[:, None].expand(weight.shape)
    found: Runs = []
    for piece in sorted(held, key=lambda piece: piece.box[0]):
        first, last = piece.box[0]
        if first == last:
            continue
        places = piece.view(numbers).reshape(last - first, -1)[:, 0].tolist()
        if found and found[-1][0][1] == first:
            (begin, _), before = found.pop()
            first, places = begin, before + places
        found.append(((first, last), places))
    return found


# ---- what is known before anything is built


def check_adaptable(
    hf_config: PreTrainedConfig, lora: LoraConfig, freeze_vision: bool = False
) -> None:
    """Raises ConfigError where a layer to be adapted is no linear layer of megatron-core."""
    if lora.use_dora:
        raise ConfigError(
            "lora.use_dora with engine megatron: a row of W + scale B A lies on several "
            "tensor-parallel ranks, which do not measure it together: use engine fsdp, or leave "
            "use_dora out"
        )
    if lora.quantization is not None:
        raise ConfigError(
            f"lora.quantization={lora.quantization!r}: engine megatron holds its weights in "
            "floating point: use engine fsdp"
        )
    if lora.target_parameters:
        raise ConfigError(
            "lora.target_parameters with engine megatron: its experts' matrices are given no "
            "adapters: use engine fsdp, or leave target_parameters out"
        )
    if lora.by_source:
        raise ConfigError(
            "lora.by_source: engine megatron trains one adapter: use engine fsdp, or leave "
            "by_source out"
        )
    if has_trained_tower(hf_config) and not freeze_vision:
        raise ConfigError(
            f"lora with engine megatron: a tower for images ({hf_config.model_type}) is given no "
            "adapters: set freeze_vision=True, which leaves it as it is, or use engine fsdp"
        )
    names = FAMILIES[language_part(hf_config).model_type].names
    linear = [
        split for name, split in names.items()
        if re.search(r"\.(linear_\w+|in_proj|out_proj)\.weight$", name) and "{expert}" not in name
    ]  # fmt: skip
    ends = {
        f".{text.replace('{}', letter).removesuffix('.weight')}"
        for split in linear for text in tensor_names(split) for letter in "qkv"
    }  # fmt: skip
    for layer in target_layers(meta_model(hf_config), lora, freeze_vision):
        if not layer.endswith(tuple(ends)):
            raise ConfigError(
                f"lora.target_modules: {layer} is no linear layer in megatron-core: name others, "
                f"of {', '.join(sorted({end.rpartition('.')[2] for end in ends}))}, or use engine "
                "fsdp"
            )


# ---- putting them into a model


def add_adapters(
    chunks: list[Any], model: str, hf_config: PreTrainedConfig, config: TrainConfig,
    topology: Topology, load_weights: bool, kind: str,
) -> Adapters:  # fmt: skip
    """Freezes the chunks but for a value head, and gives the layers that config.lora names their
    adapters, with their initial values. hf_config: of the whole model. Collective over the
    topology. Raises ConfigError.
    """
    lora = config.lora
    assert lora is not None
    layers = target_layers(meta_model(hf_config), lora, config.freeze_vision)
    hf_config = language_part(hf_config)
    given = given_tensors(lora.adapter)
    for chunk in chunks:
        for name, p in chunk.named_parameters():
            p.requires_grad_(kind == "value" and name.startswith("output_layer."))
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(let_gradient_pass)
        adapt(chunk, hf_config, lora, set(layers))
        for adapters in adapters_of([chunk]):
            fill_pairs(adapters.pairs, lora, given)
    known = fingerprint(kind, model, topology) if load_weights else None
    return Adapters(lora, model, config.dtype, layers, [], False, {}, known)


def adapt(chunk: Any, hf_config: PreTrainedConfig, lora: LoraConfig, layers: set[str]) -> None:
    """Collective over the tensor ranks: one that has no row of a layer takes part in A x."""
    held: dict[str, dict[str, list[HfSlice]]] = {}  # by linear layer and Hugging Face layer
    for name, _, parts in pieces(chunk, hf_config):
        for piece in parts:
            layer = module_name(hf_config, piece.name).removesuffix(".weight")
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


def module_name(hf_config: PreTrainedConfig, name: str) -> str:
    """Returns what transformers' module calls what `pieces` names `name`; adapters are named so."""
    if seeing_config(hf_config) is None:
        return name
    return re.sub(r"^model\.", "model.language_model.", own_name(name))


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
def fill_pairs(pairs: Iterable[AdapterPair], lora: LoraConfig, given: Mapping[str, Tensor]) -> None:
    for pair in pairs:
        rows = max((part.shape[0] for _, part in pair.b), default=0)
        a, b = initial_values(lora, given, pair.layer, pair.a_part.shape[1], rows)
        pair.a.copy_(a[:, slice(*pair.a_part.box[1])])
        for held, part in pair.b:
            held.copy_(b[slice(*part.box[0])])


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

    def __init__(self, pair: AdapterPair, scale: float) -> None:
        self.pair, self.scale = pair, scale
        self.shape = pair.b[0][1].shape
        self.boxes = tuple(part.box for _, part in pair.b)

    @property
    def device(self) -> torch.device:
        return self.pair.a.device

    def compute(self, to: list[Tensor]) -> None:
        for (b, _), part in zip(self.pair.b, to, strict=True):
            torch.mul(b, self.scale, out=part)


class Merged:
    """W + scale B A, the parts of it that lie here."""

    def __init__(self, base: Shards, pair: AdapterPair, scale: float) -> None:
        self.base, self.pair, self.scale = base, pair, scale
        self.shape, self.boxes = base.shape, base.boxes

    @property
    def device(self) -> torch.device:
        return self.pair.a.device

    def compute(self, to: list[Tensor]) -> None:
        for (rows, _), weight, part in zip(self.boxes, self.base.tensors(), to, strict=True):
            b = self._rows_of_b(*rows)
            torch.addmm(weight.float(), b, self.pair.a, alpha=self.scale, out=part)

    def _rows_of_b(self, first: int, last: int) -> Tensor:
        return next(
            b[first - part.box[0][0] : last - part.box[0][0]]
            for b, part in self.pair.b
            if part.box[0][0] <= first and last <= part.box[0][1]
        )


def with_adapters(base: dict[str, Shards], chunks: list[Any], merged: bool) -> dict[str, Shards]:
    """Returns the shards of a model with adapters, of those of its base; see
    TrainEngine.named_shards.
    """
    made_of: dict[str, Merged | ScaledB] = {}
    named = {own_name(name): name for name in base}
    found = dict(base)
    exact = any(shards.exact for shards in base.values())
    for adapters in adapters_of(chunks):
        for pair in adapters.pairs:
            if not merged:
                lies = lying_shards([(pair.a, pair.a_part)])
                found[pair.a_part.name] = lies._replace(exact=exact)
            if not pair.b:  # this rank has no row of the layer
                continue
            if merged:
                name = named[own_name(f"{pair.layer}.weight")]
                made_of[name] = Merged(base[name], pair, adapters.scale)
            else:
                made_of[pair.layer + ADAPTER[1]] = ScaledB(pair, adapters.scale)
    for name, shards in Derived(made_of).shards().items():
        found[name] = shards._replace(exact=base[name].exact if merged else exact)
    return found


def unscaled_shards(chunks: list[Any]) -> dict[str, Shards]:
    """Returns the shards of every A and B."""
    found: dict[str, Shards] = {}
    for pair in (pair for adapters in adapters_of(chunks) for pair in adapters.pairs):
        found[pair.a_part.name] = lying_shards([(pair.a, pair.a_part)])
        if pair.b:
            found[pair.layer + ADAPTER[1]] = lying_shards(pair.b)
    return found


def lying_shards(parts: list[tuple[nn.Parameter, Part]]) -> Shards:
    boxes = tuple(part.box for _, part in parts)
    return Shards(parts[0][1].shape, boxes, lambda: [p for p, _ in parts])
