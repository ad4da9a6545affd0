"""Maps parts of a Hugging Face checkpoint to a chunk of a Megatron model, as boxes and views.

megatron-core fuses and orders weights its own way: rows of q, k and v by query group, gate and up
projections of each tensor rank end to end, experts and layers numbered from 0 on each rank. Here
every local parameter is described as rectangular parts of Hugging Face tensors, each a view of the
parameter: loading copies into the views, weight sync sends them, and nothing is ever assembled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from spmdrl.config import ConfigError
from spmdrl.engines.megatron.layout import (
    FAMILIES,
    expert_width,
    head_dim,
    num_experts,
    shared_expert_width,
)
from spmdrl.engines.megatron.model import ValueHead, layer_numbers
from spmdrl.hub.quantized_weights import FP8_SCALE, Part, fp8_weight, is_fp8, quantization_of
from spmdrl.weights.boxes import Box, sizes


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


def pieces(chunk: Any, hf_config: PreTrainedConfig) -> Iterator[tuple[str, Tensor, list[HfSlice]]]:
    """(Megatron's local name, tensor, what lies in it) of every parameter and expert bias.

    chunk: a GPTModel of `build_chunks`, or what wraps it as `.module`. The pieces of a tensor are
    disjoint and, but for rows that pad the vocabulary, make it up.
    """
    while hasattr(chunk, "module"):
        chunk = chunk.module
    for name, parameter in chunk.named_parameters():
        yield name, parameter, _pieces_of(chunk, hf_config, name, len(parameter))
    for name, buffer in chunk.named_buffers():
        if name.endswith(".router.expert_bias"):
            yield name, buffer, _pieces_of(chunk, hf_config, name, len(buffer))


TE_NAMES = {  # TransformerEngine's layers have the norm inside, and all experts in one
    r"self_attention\.linear_qkv\.layer_norm_weight": "input_layernorm.weight",
    r"mlp\.linear_fc1\.layer_norm_weight": "pre_mlp_layernorm.weight",
    r"self_attention\.linear_q_up_proj\.layer_norm_weight": "self_attention.q_layernorm.weight",
    r"self_attention\.linear_kv_up_proj\.layer_norm_weight": "self_attention.kv_layernorm.weight",
    r"mlp\.experts\.(linear_fc\d)\.weight(\d+)": r"mlp.experts.local_experts.\2.\1.weight",
}


def local_name(rest: str) -> str:
    """A layer's parameter by the name it has without TransformerEngine."""
    for pattern, replacement in TE_NAMES.items():
        if re.fullmatch(pattern, rest):
            return re.sub(pattern, replacement, rest)
    return rest


def _pieces_of(chunk: Any, hf: PreTrainedConfig, name: str, rows: int) -> list[HfSlice]:
    layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if layer is None:
        return _outside_layers(chunk, hf, name, rows)
    number = layer_numbers(chunk.config, chunk.vp_stage)[int(layer[1])]
    prefix, rest = f"model.layers.{number}.", local_name(layer[2])
    if rest.startswith("self_attention."):
        return _attention(chunk, hf, prefix + "self_attn.", rest.removeprefix("self_attention."))
    if rest.startswith("mlp."):
        return _mlp(chunk, hf, prefix, rest.removeprefix("mlp."))
    norms = {
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    }
    return [_whole(prefix + _known(norms, rest), hf.hidden_size)]


def _known(names: dict[str, str], name: str) -> str:
    if name not in names:
        raise ConfigError(f"engine megatron: no Hugging Face name for the parameter {name}")
    return names[name]


def _outside_layers(chunk: Any, hf: PreTrainedConfig, name: str, rows: int) -> list[HfSlice]:
    """rows: of the parameter here; a host may have padded the vocabulary more than we do."""
    if name == "decoder.final_layernorm.weight":
        return [_whole("model.norm.weight", hf.hidden_size)]
    if isinstance(getattr(chunk, "output_layer", None), ValueHead):
        if name == "output_layer.weight":
            return [_whole("value_head.weight", 1, hf.hidden_size)]
        if name == "output_layer.bias":
            return [_whole("value_head.bias", 1)]
    tied = name == "output_layer.weight" and chunk.share_embeddings_and_output_weights
    names = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "model.embed_tokens.weight" if tied else "lm_head.weight",
    }
    tp = _cut(chunk.pg_collection.tp)
    first, last = tp.part * rows, min((tp.part + 1) * rows, hf.vocab_size)
    if first >= last:  # this rank has nothing but padding
        return []
    box = ((first, last), (0, hf.hidden_size))
    view = partial(_rows, first=0, count=last - first)
    return [HfSlice(_known(names, name), (hf.vocab_size, hf.hidden_size), box, view, tied)]


def _attention(chunk: Any, hf: Any, prefix: str, rest: str) -> list[HfSlice]:
    tp, hidden, heads = _cut(chunk.pg_collection.tp), hf.hidden_size, hf.num_attention_heads
    latent = FAMILIES[hf.model_type].latent
    if rest == "linear_proj.weight":
        width = heads * (hf.v_head_dim if latent else head_dim(hf))
        return [_columns(prefix + "o_proj.weight", (hidden, width), tp)]
    if latent:
        return [_latent_attention(hf, prefix, rest, tp)]
    if rest == "linear_qkv.weight":
        return _qkv(hf, prefix, "weight", (hidden,), tp)
    if rest == "linear_qkv.bias":
        return _qkv(hf, prefix, "bias", (), tp)
    names = {"q_layernorm.weight": "q_norm.weight", "k_layernorm.weight": "k_norm.weight"}
    return [_whole(prefix + _known(names, rest), head_dim(hf))]


def _qkv(
    hf: Any, prefix: str, kind: str, tail: tuple[int, ...], tp: DimensionSplit
) -> list[HfSlice]:
    """Returns for each query group the rows of its queries, its key and its value.

    With more tensor ranks than groups a group lies on several ranks, cut anywhere.
    """
    dim, groups = head_dim(hf), hf.num_key_value_heads
    queries = hf.num_attention_heads // groups * dim  # rows of a group
    first, last = tp.range(groups * (queries + 2 * dim))
    found, start = [], 0
    for group in range(groups):
        for letter, count in (("q", queries), ("k", dim), ("v", dim)):
            begin, end = max(start, first), min(start + count, last)
            if begin < end:
                row = group * count + begin - start
                box = ((row, row + end - begin), *((0, size) for size in tail))
                view = partial(_rows, first=begin - first, count=end - begin)
                name = f"{prefix}{letter}_proj.{kind}"
                found.append(HfSlice(name, (groups * count, *tail), box, view))
            start += count
    return found


def _latent_attention(hf: Any, prefix: str, rest: str, tp: DimensionSplit) -> HfSlice:
    hidden, heads = hf.hidden_size, hf.num_attention_heads
    query_rows = heads * (hf.qk_nope_head_dim + hf.qk_rope_head_dim)
    key_value_rows = heads * (hf.qk_nope_head_dim + hf.v_head_dim)
    rank, rope = hf.kv_lora_rank, hf.qk_rope_head_dim
    match rest.removesuffix(".weight"):
        case "linear_q_proj":
            return _cut_rows(prefix + "q_proj.weight", (query_rows, hidden), tp)
        case "linear_q_down_proj":
            return _whole(prefix + "q_a_proj.weight", hf.q_lora_rank, hidden)
        case "q_layernorm":
            return _whole(prefix + "q_a_layernorm.weight", hf.q_lora_rank)
        case "linear_q_up_proj":
            return _cut_rows(prefix + "q_b_proj.weight", (query_rows, hf.q_lora_rank), tp)
        case "linear_kv_down_proj":
            return _whole(prefix + "kv_a_proj_with_mqa.weight", rank + rope, hidden)
        case "kv_layernorm":
            return _whole(prefix + "kv_a_layernorm.weight", rank)
        case "linear_kv_up_proj":
            return _cut_rows(prefix + "kv_b_proj.weight", (key_value_rows, rank), tp)
    raise AssertionError(rest)


def _mlp(chunk: Any, hf: Any, layer: str, rest: str) -> list[HfSlice]:
    groups = chunk.pg_collection
    mixtral = hf.model_type == "mixtral"
    prefix = layer + ("block_sparse_moe." if mixtral else "mlp.")
    if rest == "router.weight":
        return [_whole(prefix + "gate.weight", num_experts(hf), hf.hidden_size)]
    if rest == "router.expert_bias":
        return [_whole(prefix + "gate.e_score_correction_bias", num_experts(hf))]
    expert = re.fullmatch(r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight", rest)
    if expert is not None:
        first, _ = _cut(groups.ep).range(num_experts(hf))
        prefix += f"experts.{first + int(expert[1])}."
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        return _glu(prefix, names, expert[2], expert_width(hf), hf, _cut(groups.expt_tp))
    names, tp = ("gate_proj", "up_proj", "down_proj"), _cut(groups.tp)
    if rest.startswith("shared_experts."):
        part = rest.removeprefix("shared_experts.").removesuffix(".weight")
        return _glu(prefix + "shared_experts.", names, part, shared_expert_width(hf), hf, tp)
    return _glu(prefix, names, rest.removesuffix(".weight"), hf.intermediate_size, hf, tp)


def _glu(
    prefix: str, names: tuple[str, str, str], part: str, width: int, hf: Any, cut: DimensionSplit
) -> list[HfSlice]:
    """linear_fc1: this rank's rows of the gate projection, then those of the up projection."""
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    if part == "linear_fc2":
        return [_columns(down, (hf.hidden_size, width), cut)]
    if part != "linear_fc1":
        raise ConfigError(f"engine megatron: no Hugging Face name for {prefix}{part}")
    first, last = cut.range(width)
    box, count = ((first, last), (0, hf.hidden_size)), last - first
    return [
        HfSlice(name, (width, hf.hidden_size), box, partial(_rows, first=start, count=count))
        for name, start in ((gate, 0), (up, count))
    ]


def _whole(name: str, *shape: int) -> HfSlice:
    return HfSlice(name, shape, tuple((0, size) for size in shape), _all)


def _cut_rows(name: str, shape: tuple[int, int], cut: DimensionSplit) -> HfSlice:
    return HfSlice(name, shape, (cut.range(shape[0]), (0, shape[1])), _all)


def _columns(name: str, shape: tuple[int, int], cut: DimensionSplit) -> HfSlice:
    return HfSlice(name, shape, ((0, shape[0]), cut.range(shape[1])), _all)


def _cut(group: torch.distributed.ProcessGroup) -> DimensionSplit:
    return DimensionSplit(group.size(), group.rank())


def _all(parameter: Tensor) -> Tensor:
    return parameter


def _rows(parameter: Tensor, first: int, count: int) -> Tensor:
    return parameter.narrow(0, first, count)


class Folder:
    """The tensors of a checkpoint folder, read part by part; those in FP8 blocks as float32."""

    def __init__(self, folder: str | Path, hf_config: PreTrainedConfig | None = None) -> None:
        """hf_config: it says how large the blocks are; without it there may be none."""
        self.folder = Path(folder)
        how = quantization_of(hf_config)
        self.block = tuple(how["weight_block_size"]) if is_fp8(hf_config) else ()
        self.open: dict[str, Any] = {}
        index = self.folder / "model.safetensors.index.json"
        self.files: dict[str, str]
        if (self.folder / "model.safetensors").is_file():  # before an index, as transformers reads
            names = self._handle("model.safetensors").keys()
            self.files = dict.fromkeys(names, "model.safetensors")
        elif index.is_file():
            self.files = self._index(index)
        else:
            raise ConfigError(
                f"model: {folder} has neither model.safetensors nor model.safetensors.index.json"
            )

    def _index(self, index: Path) -> dict[str, str]:
        try:
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"model: {index} is damaged: {error}. Fetch it again") from error

    def _handle(self, file: str) -> Any:
        if file not in self.open:
            if not (self.folder / file).is_file():
                raise ConfigError(f"model: {self.folder} lacks {file}, which its index names")
            try:
                self.open[file] = safe_open(self.folder / file, "pt")
            except SafetensorError as error:
                raise ConfigError(
                    f"model: {self.folder / file} is damaged: {error}. Fetch or copy it again"
                ) from error
        return self.open[file]

    def read(self, name: str, shape: tuple[int, ...], box: Box) -> Tensor:
        """Part of a tensor; also where the folder has the experts of a layer as one tensor.

        Raises ConfigError where it is missing, has another shape, is quantised or not finite.
        """
        lead: tuple[int, ...] = ()
        if name not in self.files:
            name, lead, shape, box = self._stacked(name, shape, box)
        part = self._slice(name)
        there = tuple(part.get_shape())
        if there[len(lead) :] != shape:
            raise ConfigError(
                f"model: {name} in {self.folder / self.files[name]} is {there}, but config.json "
                f"means {(*there[: len(lead)], *shape)}"
            )
        ranges = tuple(slice(first, last) for first, last in box)
        if self.block and not lead and name + FP8_SCALE in self.files:
            found = fp8_weight(name, there, self.block).read(self._part, ranges)
        elif part.get_dtype() in ("F64", "F32", "F16", "BF16"):
            found = part[(*lead, *ranges)]
        else:
            raise ConfigError(
                f"model: {name} in {self.folder / self.files[name]} is {part.get_dtype()}; "
                "convert the checkpoint to bfloat16 first"
            )
        # the sum alone would do, but for weights whose finite sum overflows
        if not found.float().sum().isfinite() and not found.isfinite().all():
            raise ConfigError(
                f"model: {name} in {self.folder / self.files[name]} has values that are not "
                "finite numbers"
            )
        return found

    def _slice(self, name: str) -> Any:
        return self._handle(self.files[name]).get_slice(name)

    def _part(self, name: str, part: Part) -> Tensor:
        return self._slice(name)[part]

    def _stacked(
        self, name: str, shape: tuple[int, ...], box: Box
    ) -> tuple[str, tuple[int, ...], tuple[int, ...], Box]:
        """Returns where transformers' own layout (save_original_format=False) has what `name`
        means.
        """
        plain = name.replace(".block_sparse_moe.", ".mlp.")
        if plain in self.files:
            return plain, (), shape, box
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", plain)
        stacked, start = "", 0
        if expert is not None and expert[3] in ("down_proj", "w2"):
            stacked = f"{expert[1]}.down_proj"
        elif expert is not None:
            stacked = f"{expert[1]}.gate_up_proj"
            start = shape[0] if expert[3] in ("up_proj", "w3") else 0
            (first, last), columns = box
            shape, box = (2 * shape[0], shape[1]), ((start + first, start + last), columns)
        if expert is None or stacked not in self.files:
            hint = "; is tie_word_embeddings missing in config.json?" if "lm_head" in name else ""
            raise ConfigError(f"model: {self.folder} has no tensor {name}{hint}")
        return stacked, (int(expert[2]),), shape, box


@torch.no_grad()
def load_pretrained(chunks: list[Any], folder: str | Path, hf_config: PreTrainedConfig) -> None:
    """Fills chunks of `build_chunks`, each rank reading only its own parts of the files.

    A value head that the folder does not have stays as it is. Local. Raises ConfigError where the
    folder does not fit the config, perhaps on one rank only.
    """
    checkpoint = Folder(folder, hf_config)
    for chunk in chunks:
        for _, parameter, parts in pieces(chunk, hf_config):
            for piece in parts:
                if piece.name.startswith("value_head.") and piece.name not in checkpoint.files:
                    continue
                view = piece.view(parameter)
                assert tuple(view.shape) == sizes(piece.box), (piece, view.shape)
                view.copy_(checkpoint.read(piece.name, piece.shape, piece.box))
