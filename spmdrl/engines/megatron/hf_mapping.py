"""Maps parts of a Hugging Face checkpoint to a chunk of a Megatron model, as boxes and views.

megatron-core fuses and orders weights its own way: rows of q, k and v by query group, gate and up
projections of each tensor rank end to end, experts and layers numbered from 0 on each rank. Here
every local parameter is described as rectangular parts of Hugging Face tensors, each a view of the
parameter: loading copies into the views, weight sync sends them, and nothing is ever assembled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from spmdrl.config import ConfigError
from spmdrl.engines.megatron.families import FAMILIES
from spmdrl.engines.megatron.model import RewardHead, ValueHead, layer_numbers
from spmdrl.engines.megatron.splits import DimensionSplit, HfSlice, Place, StackedGateUp, Whole
from spmdrl.engines.megatron.towers import is_of_tower, own_name, seeing_config, stored_name
from spmdrl.hub.quantized_weights import (
    BLOCKS,
    FP8_SCALE,
    Part,
    fp8_weight,
    is_fp8,
    mxfp4_weight,
    quantization_of,
)
from spmdrl.weights.boxes import Box, sizes
from spmdrl.weights.checkpoint_names import published_shape


def check_stacked_experts(whole: PreTrainedConfig, text: PreTrainedConfig) -> None:
    """Raises ConfigError where FP8 blocks would have to be read out of a tensor of all experts.

    whole: the config of the model's files; text: of its language model.
    """
    names = FAMILIES[text.model_type].names.values()
    if is_fp8(whole) and any(isinstance(split, StackedGateUp) for split in names):
        raise ConfigError(
            f"engine megatron reads no FP8 blocks of {text.model_type!r}, whose experts are one "
            "tensor: convert the model to bfloat16 first"
        )


def pieces(chunk: Any, hf_config: PreTrainedConfig) -> Iterator[tuple[str, Tensor, list[HfSlice]]]:
    """(Megatron's local name, tensor, what lies in it) of every parameter and expert bias.

    chunk: a GPTModel of `build_chunks`, or what wraps it as `.module`. The pieces of a tensor are
    disjoint and, but for rows that pad the vocabulary, make it up. Adapters are left out.
    """
    while hasattr(chunk, "module"):
        chunk = chunk.module
    for name, parameter in chunk.named_parameters():
        if ".adapters." in name:  # of lora.py, and in no checkpoint of a model
            continue
        yield name, parameter, _stored(chunk, hf_config, name, parameter)
    for name, buffer in chunk.named_buffers():
        if name.endswith(".router.expert_bias"):
            yield name, buffer, _stored(chunk, hf_config, name, buffer)


Found = TypeVar("Found")
WHOLE = DimensionSplit(1, 0)
HEADS = {*ValueHead.names.values(), *RewardHead.names.values()}
VOCABULARY = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
}
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


def _stored(chunk: Any, hf: PreTrainedConfig, name: str, parameter: Tensor) -> list[HfSlice]:
    """Names the pieces as files of the model do."""
    return [
        piece._replace(name=stored_name(hf, piece.name))
        for piece in _pieces_of(chunk, hf, name, parameter)
    ]


def _pieces_of(chunk: Any, hf: PreTrainedConfig, name: str, parameter: Tensor) -> list[HfSlice]:
    ahead = re.fullmatch(r"mtp\.layers\.(\d+)\.(.+)", name)
    if ahead is not None:
        return _mtp_pieces(chunk, hf, int(ahead[1]), ahead[2], parameter)
    layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if layer is None:
        return _outside_layers(chunk, hf, name, parameter)
    number = layer_numbers(chunk.config, chunk.vp_stage)[int(layer[1])]
    return _layer_pieces(chunk, hf, f"model.layers.{number}.", layer[2], parameter)


def _layer_pieces(
    chunk: Any, hf: PreTrainedConfig, prefix: str, name: str, parameter: Tensor
) -> list[HfSlice]:
    """prefix: of the layer's Hugging Face names; name: of the parameter inside it."""
    groups, rest = chunk.pg_collection, local_name(name)
    place = Place(prefix, cut_of(groups.tp), chunk.config)
    expert = re.fullmatch(r"(.+\.local_experts\.)(\d+)(\..+)", rest)
    if expert is not None:
        first, _ = cut_of(groups.ep).range(chunk.config.num_moe_experts)
        place = place._replace(cut=cut_of(groups.expt_tp), expert=first + int(expert[2]))
        rest = f"{expert[1]}{{expert}}{expert[3]}"
    split = _known(FAMILIES[hf.model_type].names, rest)
    return split.slices(place, tuple(parameter.shape))


def _mtp_pieces(
    chunk: Any, hf: PreTrainedConfig, number: int, name: str, parameter: Tensor
) -> list[HfSlice]:
    """number: of the layer among those for multi-token prediction, from 0."""
    known = FAMILIES[hf.model_type].mtp
    assert known is not None, hf.model_type
    prefix, inside = (
        text.format(layer=chunk.config.num_layers + number, number=number)
        for text in (known.prefix, known.inside)
    )
    if name.startswith("transformer_layer."):
        name = name.removeprefix("transformer_layer.")
        return _layer_pieces(chunk, hf, inside, name, parameter)
    place = Place(prefix, cut_of(chunk.pg_collection.tp), chunk.config)
    return _known(known.around, name).slices(place, tuple(parameter.shape))


def _known(names: Mapping[str, Found], name: str) -> Found:
    if name not in names:
        raise ConfigError(f"engine megatron: no Hugging Face name for the parameter {name}")
    return names[name]


def _outside_layers(
    chunk: Any, hf: PreTrainedConfig, name: str, parameter: Tensor
) -> list[HfSlice]:
    config: Any = hf
    head = getattr(chunk, "output_layer", None)
    if isinstance(head, ValueHead) and name.startswith("output_layer."):
        where = _known(head.names, name.removeprefix("output_layer."))
    elif is_of_tower(name):  # whole on every rank that has it, by transformers' own names
        where = name
    elif name == "decoder.final_layernorm.weight":
        where = "model.norm.weight"
    else:
        tied = name == "output_layer.weight" and chunk.share_embeddings_and_output_weights
        where = "model.embed_tokens.weight" if tied else _known(VOCABULARY, name)
        cut = cut_of(chunk.pg_collection.tp)
        return vocabulary_rows(where, config.vocab_size, cut, tuple(parameter.shape), tied)
    return Whole(where).slices(Place("", WHOLE, chunk.config), tuple(parameter.shape))


def vocabulary_rows(
    name: str, vocab: int, cut: DimensionSplit, shape: tuple[int, ...], tied: bool
) -> list[HfSlice]:
    """Returns this rank's rows of the vocabulary without those that pad it, which a host may have
    more of than we do; none where it has nothing but padding.
    """
    _, (first, last) = cut.whole(shape[0])
    last = min(last, vocab)
    if first >= last:
        return []
    box = ((first, last), (0, shape[1]))
    view = partial(torch.narrow, dim=0, start=0, length=last - first)
    return [HfSlice(name, (vocab, shape[1]), box, view, tied)]


def cut_of(group: torch.distributed.ProcessGroup) -> DimensionSplit:
    return DimensionSplit(group.size(), group.rank())


class Folder:
    """The tensors of a checkpoint folder, read part by part; those in FP8 blocks as float32.

    Of files that have a tower for images or sounds as well, the language model's have the names
    that they have in a model without one, and a tower's begin with its part's (towers.own_name).
    """

    def __init__(self, folder: str | Path, hf_config: PreTrainedConfig | None = None) -> None:
        """hf_config: it says how large the blocks are; without it there may be none."""
        self.folder = Path(folder)
        whole = None if hf_config is None else seeing_config(hf_config)
        self.kind = "" if whole is None else whole.model_type
        how = quantization_of(hf_config)
        self.block = tuple(how["weight_block_size"]) if is_fp8(hf_config) else ()
        self.open: dict[str, Any] = {}
        index = self.folder / "model.safetensors.index.json"
        there: dict[str, str]
        if (self.folder / "model.safetensors").is_file():  # before an index, as transformers reads
            names = self._handle("model.safetensors").keys()
            there = dict.fromkeys(names, "model.safetensors")
        elif index.is_file():
            there = self._index(index)
        else:
            raise ConfigError(
                f"model: {folder} has neither model.safetensors nor model.safetensors.index.json"
            )
        self.stored = {own_name(name): name for name in there}  # as the files name it
        self.files = {name: there[stored] for name, stored in self.stored.items()}

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

        name: as `pieces` or the files have it. Raises ConfigError where it is missing, has another
        shape, is quantised or not finite.
        """
        name = own_name(name)
        if name + BLOCKS in self.files:
            return self._mxfp4(name, shape, box)
        lead: tuple[int, ...] = ()
        if name not in self.files:
            name, lead, shape, box = self._stacked(name, shape, box)
        part = self._slice(name)
        there = tuple(part.get_shape())
        if there != shape and there == published_shape(self.kind, name, shape):
            return self.read(name, there, (box[0], box[2], box[1])).transpose(1, 2)
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
        return self._handle(self.files[name]).get_slice(self.stored[name])

    def _part(self, name: str, part: Part) -> Tensor:
        return self._slice(name)[part]

    def _mxfp4(self, name: str, shape: tuple[int, ...], box: Box) -> Tensor:
        """Returns a part of the experts' matrices that are stored in MXFP4, in float32."""
        weight = mxfp4_weight(name, tuple(self._slice(name + BLOCKS).get_shape()))
        if weight.shape != shape:
            raise ConfigError(
                f"model: {name} in {self.folder} is {weight.shape}, but config.json means {shape}"
            )
        experts, *inside = (slice(first, last) for first, last in box)
        return weight.read(self._part, experts)[(slice(None), *inside)]

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
def load_pretrained(
    chunks: list[Any], folder: str | Path, hf_config: PreTrainedConfig, new_head: bool = True
) -> None:
    """Fills chunks of `build_chunks`, each rank reading only its own parts of the files.

    new_head: a value head or score that the folder does not have stays as it is. Local. Raises
    ConfigError where the folder does not fit the config, perhaps on one rank only.
    """
    checkpoint = Folder(folder, hf_config)
    for chunk in chunks:
        for _, parameter, parts in pieces(chunk, hf_config):
            for piece in parts:
                own = own_name(piece.name)
                if new_head and own in HEADS and own not in checkpoint.files:
                    continue
                view = piece.view(parameter)
                assert tuple(view.shape) == sizes(piece.box), (piece, view.shape)
                view.copy_(checkpoint.read(piece.name, piece.shape, piece.box))
