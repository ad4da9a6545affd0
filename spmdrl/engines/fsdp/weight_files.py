"""Reads rows of a model's parameters from its safetensors files, so that each rank reads its own.

transformers renames some tensors of a checkpoint when it loads them, and makes others from several:
the experts of a layer are stacked, for example. Its own rules say here which tensors a parameter is
made of, and its own checks say what is missing, left over or of another shape; both see shapes
alone. Rows of a tensor that is only renamed are read as a slice of its file. Of stacked experts
those are read whose rows are wanted. What is made in another way is made whole and cut, one
parameter at a time.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from spmdrl.config import ConfigError
from spmdrl.engines.fsdp.model import output_names, require_loadable
from spmdrl.hub.hf_folder import check_files, has_tower
from spmdrl.hub.language_model import language_key
from spmdrl.hub.quantized_weights import Part, Quantized, is_readable, quantized_weights
from spmdrl.hub.remote_code import UNREADABLE, reason_of
from spmdrl.hub.transformers_compat import checkpoint_files


@dataclass
class Source:
    """The tensors in the files that one parameter, or several, are made of."""

    target: str  # the first of the parameters
    converter: WeightConverter | None  # None: the parameter is the tensor as it is in the file
    keys: dict[str, list[str]] = field(default_factory=dict)  # by the converter's source pattern

    @property
    def stacks_rows(self) -> bool:
        """Whether row i of the parameter is made of the i-th tensor of each pattern and no other:
        experts are stacked, and whatever follows keeps their axis.
        """
        if self.converter is None:
            return False
        first, *others = self.converter.operations
        return isinstance(first, MergeModulelist) and first.dim == 0 and all(
            (isinstance(op, Concatenate) and op.dim > 0)
            or (isinstance(op, Transpose) and op.dim0 > 0 and op.dim1 > 0 and not op.check_dims)
            for op in others
        )  # fmt: skip


class WeightFiles:
    """The safetensors files of a model, read by the names of its parameters and buffers."""

    def __init__(
        self, model: str, paths: list[str], shell: PreTrainedModel, only_language: bool = False
    ) -> None:
        """shell: the model with weights of any value. only_language: it is the language model of
        files that have a tower as well. Raises what safe_open does.
        """
        self.model = model
        self.paths: dict[str, str] = {}  # of each tensor's file
        self.keys: dict[str, str] = {}  # in the file, of each tensor
        shapes: dict[str, list[int]] = {}
        for path in paths:
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118  it is no mapping
                    name = language_key(key) if only_language else key
                    if name is not None:
                        self.paths[name], self.keys[name] = path, key
                        shapes[name] = file.get_slice(key).get_shape()
        self.quantized: dict[str, Quantized] = {}
        config: Any = copy.deepcopy(shell.config)
        if is_readable(config):
            self.quantized, parts = quantized_weights(shapes, config)
            of_parts = {name: q.stored for name, q in self.quantized.items()}
            self.paths |= {name: self.paths[part] for name, part in of_parts.items()}
            kept = {name: shape for name, shape in shapes.items() if name not in parts}
            shapes = kept | {name: list(q.shape) for name, q in self.quantized.items()}
            del config.quantization_config  # they are read as floating-point tensors
        given = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
        loaded: Any = type(shell).from_pretrained(
            None, config=config, state_dict=given, device_map={"": "meta"},
            dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True,
        )  # fmt: skip
        self.meta: Any = loaded[0]  # the model without data
        self.found: dict[str, Any] = loaded[1]  # what is missing, left over or of another shape
        self.dtypes = {name: tensor.dtype for name, tensor in shell.state_dict().items()}
        # names that are other names for a parameter, by the model's config
        self.tied: dict[str, str] = dict(self.meta.all_tied_weights_keys)
        self.sources = self.sources_of(given)
        self.opened: tuple[str, Any] = ("", None)

    def sources_of(self, given: dict[str, Tensor]) -> dict[str, Source]:
        """Returns the source of each parameter and buffer that the files have. The rules are those
        of transformers.core_model_loading.convert_and_load_state_dict_in_model.
        """
        rules = get_model_conversion_mapping(self.meta)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        own, prefix = self.meta.state_dict(), self.meta.base_model_prefix
        found: dict[str, Source] = {}
        for key in sorted(given, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, own)
            if name not in own and key in own:
                name, pattern = rename_source_key(key, [], [], prefix, own)
            if name in own:
                rule = by_pattern[pattern] if pattern is not None else None
                source = found.setdefault(name, Source(name, rule))
                source.keys.setdefault(pattern or key, []).append(key)
        for source in list(found.values()):
            if source.converter is not None:
                parts = {p: [given[key] for key in keys] for p, keys in source.keys.items()}
                found |= dict.fromkeys(self.converted(source, parts), source)
        return found

    def source_of(self, name: str) -> Source | None:
        """Returns the source of a parameter, or of one that it is tied to."""
        if name in self.sources:
            return self.sources[name]
        others = [*(t for t, s in self.tied.items() if s == name), self.tied.get(name, "")]
        return next((self.sources[other] for other in others if other in self.sources), None)

    def path_of(self, name: str) -> str:
        """Returns the file that has the first of a parameter's tensors; "" where none has."""
        source = self.source_of(name)
        return "" if source is None else self.paths[next(iter(source.keys.values()))[0]]

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Returns rows [first, last) of a parameter, in the dtype that the model has it in before
        it is cast for training. A tensor without dimensions is returned whole.

        Zeros where the files have none. Raises ConfigError where a value is not a finite number.
        """
        source, dtype = self.source_of(name), self.dtypes[name]
        if source is None:
            shape = self.meta.state_dict()[name].shape
            found = torch.zeros(last - first, *shape[1:], dtype=dtype)
        elif source.converter is None:
            keys = next(iter(source.keys.values()))  # under several names it is one tensor
            found = self.tensor(keys[0], slice(first, last)).to(dtype)
        elif source.stacks_rows:
            found = self.made(source, name, dtype, slice(first, last))
        else:
            found = self.made(source, name, dtype, slice(None))[first:last]
        # the sum alone would do, but for weights whose finite sum overflows
        if not found.sum().isfinite() and not found.isfinite().all():
            raise ConfigError(
                f"model: {self.model!r}: {name} has values that are not finite numbers"
            )
        return found

    def made(self, source: Source, name: str, dtype: torch.dtype, which: slice) -> Tensor:
        """which: those of each pattern's tensors that are read."""
        parts = {
            pattern: [self.tensor(key).to(dtype) for key in keys[which]]
            for pattern, keys in source.keys.items()
        }
        return self.converted(source, parts)[name if name in self.sources else source.target]

    def converted(self, source: Source, parts: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        """Returns the parameters that transformers makes of a source's tensors, by their names."""
        rule: Any = copy.deepcopy(source.converter)
        rule.collected_tensors.update(parts)
        made = rule.convert(source.target, model=self.meta, config=self.meta.config)
        return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}

    def tensor(self, key: str, rows: slice | None = None) -> Tensor:
        """Returns a weight of the files, or rows of it; one that is quantised there in float32."""
        if key in self.quantized:
            return self.quantized[key].read(self.stored, rows)
        return self.stored(key, rows)

    def stored(self, key: str, rows: Part = None) -> Tensor:
        """Returns a tensor as it is in the files, or a part of it. One file is open at a time, so
        that no more of the files than one is mapped into memory.
        """
        path = self.paths[key]
        if self.opened[0] != path:
            self.opened = (path, safe_open(path, "pt"))
        part = self.opened[1].get_slice(self.keys[key])
        return part[...] if rows is None or not part.get_shape() else part[rows]

    def close(self) -> None:
        self.opened = ("", None)


def open_weights(model: str, shell: PreTrainedModel, has_head: bool) -> WeightFiles | None:
    """Opens the files of a model, and gives the shell the model's generation config.

    has_head: as build_model takes it. Returns None where rows cannot be read: the files are not
    safetensors, or quantised, or transformers fills in what they lack. Raises ConfigError as
    load_model does.
    """
    config: Any = shell.config
    if Path(model).is_dir():
        check_files(Path(model))
    adapter = Path(model, "adapter_config.json").is_file()  # transformers looks for its base
    quantized = getattr(config, "quantization_config", None) is not None
    if adapter or (quantized and not is_readable(config)):
        return None
    try:
        paths = checkpoint_files(model, config)
        if not all(path.endswith(".safetensors") for path in paths):
            return None
        files = WeightFiles(model, paths, shell, only_language=has_tower(model))
        if shell.can_generate():
            shell.generation_config = generation_config(model, shell)
    except (*UNREADABLE, SafetensorError) as error:
        raise ConfigError(f"model: {model!r} cannot be loaded: {reason_of(error)}") from error
    head = () if has_head else output_names(shell)
    require_loadable(model, files.found, head)
    there = {name for name in files.dtypes if files.source_of(name) is not None}
    return files if there.issuperset(files.dtypes.keys() - set(head)) else None


def generation_config(model: str, shell: PreTrainedModel) -> Any:
    """Returns what generation_config.json says; without one, what the model's config says."""
    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:  # the file is optional
        return shell.generation_config
