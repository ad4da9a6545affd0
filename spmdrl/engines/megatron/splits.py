"""Says which parts of Hugging Face tensors make up one local parameter of a Megatron model.

A family names a split for each parameter (families.py). Sizes come from the parameter itself and
from Megatron's config: a split knows only how its rows and columns are cut over tensor ranks, and
how megatron-core fuses several matrices into one.

    Whole("self_attn.q_norm.weight")                       every tensor rank holds it whole
    SplitRows("self_attn.q_b_proj.weight")                 its rows are cut over the tensor ranks
    SplitColumns("self_attn.o_proj.weight")                its columns are
    GateUp("mlp.gate_proj.weight", "mlp.up_proj.weight")   a rank's rows of both, end to end
    Qkv("self_attn.{}_proj.weight")                        by query group its q, k and v
    Qkv("self_attn.{}_proj.weight", gated=True)            and of the q projection a gate
    DeltaRows({"qkv": "linear_attn.conv1d.weight"})        rows of a gated delta net's parts
    Stacked("mlp.experts.down_proj")                       one expert of a tensor that has them all

Names are those inside a layer; {expert} stands for an expert's number in the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from spmdrl.weights.boxes import Box, whole


class HfSlice(NamedTuple):
    """A part of a Hugging Face tensor that lies in a local Megatron parameter."""

    name: str  # in the checkpoint
    shape: tuple[int, ...]  # of the whole Hugging Face tensor
    box: Box  # which part of it
    view: Callable[[Tensor], Tensor]  # of the local parameter, or of anything of its shape
    tied: bool = False  # the last stage's copy of the embeddings: loaded, but never exported


class DimensionSplit(NamedTuple):
    """Into how many parts a dimension is cut, and which of them is here."""

    parts: int
    part: int

    def range(self, size: int) -> tuple[int, int]:
        step = size // self.parts
        return self.part * step, (self.part + 1) * step

    def whole(self, here: int) -> tuple[int, tuple[int, int]]:
        """Returns the whole size of what has `here` of it on this rank, and the part's range."""
        return here * self.parts, (self.part * here, (self.part + 1) * here)


class Place(NamedTuple):
    """Says where a local parameter is in the whole model."""

    prefix: str  # of its Hugging Face names: "model.layers.3."
    cut: DimensionSplit  # over the tensor ranks, those of an expert's parameter among experts
    config: Any  # Megatron's TransformerConfig
    expert: int = 0  # its number in the whole model

    def name(self, inside: str) -> str:
        return self.prefix + inside.replace("{expert}", str(self.expert))


class Split(Protocol):
    """Says how a local parameter is made up of Hugging Face tensors."""

    def slices(self, at: Place, shape: tuple[int, ...]) -> list[HfSlice]:
        """shape: of the local parameter."""
        ...


@dataclass(frozen=True)
class Whole:
    """A tensor that every tensor rank holds whole."""

    name: str

    def slices(self, at: Place, shape: tuple[int, ...]) -> list[HfSlice]:
        return [HfSlice(at.name(self.name), shape, whole(shape), _all)]


@dataclass(frozen=True)
class SplitRows:
    """A tensor whose first dimension is cut over the tensor ranks."""

    name: str

    def slices(self, at: Place, shape: tuple[int, ...]) -> list[HfSlice]:
        size, here = at.cut.whole(shape[0])
        tail = shape[1:]
        return [HfSlice(at.name(self.name), (size, *tail), (here, *whole(tail)), _all)]


@dataclass(frozen=True)
class SplitColumns:
    """A matrix whose columns are cut over the tensor ranks."""

    name: str

    def slices(self, at: Place, shape: tuple[int, ...]) -> list[HfSlice]:
        size, here = at.cut.whole(shape[1])
        return [HfSlice(at.name(self.name), (shape[0], size), ((0, shape[0]), here), _all)]


@dataclass(frozen=True)
class GateUp:
    """This rank's rows of the gate projection, then those of the up projection. Where both have one
    name, the checkpoint has all of gate's rows and then all of up's in one tensor.
    """

    gate: str
    up: str

    def slices(self, at: Place, shape: tuple[int, ...]) -> list[HfSlice]:
        count, tail = shape[0] // 2, shape[1:]
        width, (first, last) = at.cut.whole(count)
        fused = self.gate == self.up
        full = (2 * width if fused else width, *tail)
        return [
            HfSlice(
                at.name(name), full, ((start + first, start + last), *whole(tail)),
                partial(_rows, first=begin, count=count),
            )
            for name, start, begin in (
                (self.gate, 0, 0), (self.up, width if fused else 0, count),
            )
        ]  # fmt: skip


@dataclass(frozen=True)
class Qkv:
    """Rows by query group: those of its queries, its key and its value; between queries and key
    those of the queries' gates, if there are any.

    With more tensor ranks than groups a group lies on several ranks, cut anywhere.
    """

    name: str  # {} stands for q, k and v; without it the tensor has all of q's rows, then k's, v's
    gated: bool = False  # the q projection has for each head the rows of its query and of its gate

    def slices(self, at: Place, shape: tuple[int, ...]) -> list[HfSlice]:
        dim, groups = at.config.kv_channels, at.config.num_query_groups
        heads = at.config.num_attention_heads
        rows = {"q": heads * dim * (2 if self.gated else 1), "k": groups * dim, "v": groups * dim}
        first, last = at.cut.range(sum(rows.values()))
        fused = "{}" not in self.name
        ahead = {"q": 0, "k": rows["q"], "v": rows["q"] + rows["k"]} if fused else {}
        found, start = [], 0
        for letter, there, count in self._runs(heads // groups, groups, dim):
            begin, end = max(start, first), min(start + count, last)
            if begin < end:
                row = ahead.get(letter, 0) + there + begin - start
                box = ((row, row + end - begin), *whole(shape[1:]))
                view = partial(_rows, first=begin - first, count=end - begin)
                name = at.name(self.name.replace("{}", letter))
                full = sum(rows.values()) if fused else rows[letter]
                found.append(HfSlice(name, (full, *shape[1:]), box, view))
            start += count
        return found

    def _runs(self, heads: int, groups: int, dim: int) -> Iterator[tuple[str, int, int]]:
        """Yields (q, k or v; the first row in its projection; number of rows) of each run of rows
        of all ranks' parameters. heads: of one group.
        """
        for group in range(groups):
            if self.gated:
                mine = range(group * heads, (group + 1) * heads)
                yield from (("q", 2 * head * dim, dim) for head in mine)
                yield from (("q", (2 * head + 1) * dim, dim) for head in mine)
            else:
                yield "q", group * heads * dim, heads * dim
            yield "k", group * dim, dim
            yield "v", group * dim, dim


@dataclass(frozen=True)
class DeltaRows:
    """This rank's rows of parts of a gated delta net, end to end: queries (q), keys (k), values
    (v), gates (z), and the two rows of each value head that say how much it writes (b) and how fast
    it forgets (a).
    """

    tensors: Mapping[str, str]  # by the letters of the parts that it has: the tensor's name
    by_head: bool = False  # it has the rows of each key head together, in place of those of a part

    def slices(self, at: Place, shape: tuple[int, ...]) -> list[HfSlice]:
        sizes, found, start = delta_sizes(at.config), [], 0
        for letters, name in self.tensors.items():
            own = [sizes[letter] for letter in letters]
            full = (sum(own), *shape[1:])
            blocks = at.config.linear_num_key_heads if self.by_head else 1
            for number, size in enumerate(own):
                first, last = at.cut.range(size)
                before, step = sum(own[:number]) // blocks, size // blocks
                for block in range(first // step, -(-last // step)):
                    begin, end = max(first, block * step), min(last, (block + 1) * step)
                    row = block * (sum(own) // blocks) + before + begin - block * step
                    box = ((row, row + end - begin), *whole(shape[1:]))
                    view = partial(_rows, first=start + begin - first, count=end - begin)
                    found.append(HfSlice(at.name(name), full, box, view))
                start += last - first
        return found


def delta_sizes(config: Any) -> dict[str, int]:
    """Returns how many rows each part of a gated delta net has, on all tensor ranks together."""
    keys = config.linear_key_head_dim * config.linear_num_key_heads
    values, heads = (
        config.linear_value_head_dim * config.linear_num_value_heads,
        config.linear_num_value_heads,
    )
    return {"q": keys, "k": keys, "v": values, "z": values, "b": heads, "a": heads}


@dataclass(frozen=True)
class Stacked:
    """One expert's part of a tensor that has those of all experts, matrices transposed.

    It is not cut over tensor ranks.
    """

    name: str

    def slices(self, at: Place, shape: tuple[int, ...]) -> list[HfSlice]:
        assert at.cut.parts == 1, self.name
        inside = tuple(reversed(shape))
        full = (at.config.num_moe_experts, *inside)
        box = ((at.expert, at.expert + 1), *whole(inside))
        return [HfSlice(at.name(self.name), full, box, _transposed_alone)]


@dataclass(frozen=True)
class StackedGateUp:
    """One expert's rows of the gate and the up projection, which the checkpoint has end to end in
    one tensor of all experts.
    """

    name: str

    def slices(self, at: Place, shape: tuple[int, ...]) -> list[HfSlice]:
        count, columns = shape[0] // 2, shape[1]
        width, (first, last) = at.cut.whole(count)
        full = (at.config.num_moe_experts, 2 * width, columns)
        return [
            HfSlice(
                at.name(self.name), full,
                ((at.expert, at.expert + 1), (start + first, start + last), (0, columns)),
                partial(_rows_of_expert, first=begin, count=count),
            )
            for start, begin in ((0, 0), (width, count))
        ]  # fmt: skip


@dataclass(frozen=True)
class StackedColumns:
    """One expert's columns of a tensor that has those of all experts; cut over the tensor ranks."""

    name: str

    def slices(self, at: Place, shape: tuple[int, ...]) -> list[HfSlice]:
        size, here = at.cut.whole(shape[1])
        full = (at.config.num_moe_experts, shape[0], size)
        box = ((at.expert, at.expert + 1), (0, shape[0]), here)
        return [HfSlice(at.name(self.name), full, box, _alone)]


def tensor_names(split: Split) -> list[str]:
    """Returns the names inside a layer of the tensors that a split reads; {} stands for q, k and v,
    {expert} for a number.
    """
    fields = vars(split).values()
    plain = [value for value in fields if isinstance(value, str)]
    return plain + [
        name for value in fields if isinstance(value, Mapping) for name in value.values()
    ]


def _all(parameter: Tensor) -> Tensor:
    return parameter


def _rows(parameter: Tensor, first: int, count: int) -> Tensor:
    return parameter.narrow(0, first, count)


def _alone(parameter: Tensor) -> Tensor:
    return parameter[None]


def _rows_of_expert(parameter: Tensor, first: int, count: int) -> Tensor:
    return parameter.narrow(0, first, count)[None]


def _transposed_alone(parameter: Tensor) -> Tensor:
    """(out, in) -> (1, in, out), (out,) -> (1, out)."""
    return (parameter.mT if parameter.ndim > 1 else parameter)[None]
