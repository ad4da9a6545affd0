"""A checkpoint as a Hugging Face folder, whatever engine and layout wrote it; see export.py."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from spmdrl.checkpoint.format import damage
from spmdrl.checkpoint.safe_load import ShardReader
from spmdrl.config import ConfigError
from spmdrl.engines.fsdp.lora import adapter_tensors, lora_of, merged, read_base, write_adapter
from spmdrl.engines.stored_dtype import DTYPES, name_dtype, stored_dtype
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.weights.checkpoint_names import checkpoint_parts


def export(
    checkpoint: Path, out: Path, dtype: str = "", ema: bool = False, base: str = ""
) -> None:  # fmt: skip
    """dtype: "" is that of the model that the run started from, which stands in hf/config.json.

    Raises ConfigError for a damaged checkpoint or one without the average that is wanted, an
    unknown dtype, or a taken folder.
    """
    if dtype and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: use one of {', '.join(DTYPES)}")
    check_folders(checkpoint, out)
    if base and read_base(Path(checkpoint, "actor")) is None:
        raise ConfigError(f"--base: {checkpoint} holds a whole model, which needs no base")
    weights = load_full(checkpoint, "actor", ema, base)
    hf = str(Path(checkpoint, "hf"))
    chosen = DTYPES[dtype] if dtype else stored_dtype(load_hf_config(hf), hf)
    out.mkdir(parents=True, exist_ok=True)
    for file in Path(checkpoint, "hf").iterdir():
        shutil.copy(file, out)
    write_weights(weights.items(), chosen, out)


def check_folders(checkpoint: Path, out: Path) -> None:
    wrong = damage(checkpoint)
    if wrong:
        raise ConfigError(f"--checkpoint {checkpoint}: {wrong}")
    taken = [n for n in ("config.json", "adapter_config.json") if Path(out, n).exists()]
    if taken:
        raise ConfigError(f"--out {out} already holds a model; name another folder")


def export_adapter(checkpoint: Path, out: Path, base: str, ema: bool = False) -> None:
    """Raises ConfigError as `export` does, and where the checkpoint has no adapters."""
    check_folders(checkpoint, out)
    saved = read_base(Path(checkpoint, "actor"))
    if saved is None:
        raise ConfigError(f"--adapter: {checkpoint} holds a whole model, no adapters")
    tensors = adapter_tensors(load_model_state(Path(checkpoint, "actor"), ema), saved)
    write_adapter(out, tensors, lora_of(saved), saved["layers"], base or saved["model"])


def load_full(checkpoint: Path, role: str, ema: bool = False, base: str = "") -> dict[str, Tensor]:
    """Full tensors of a role's model by Hugging Face name, from shards of any layout.

    ema: of the moving average; weights that were not trained have none and are as they are.
    """
    folder = Path(checkpoint, role)
    saved = read_base(folder)
    if saved is None and Path(folder, "metadata.json").exists():
        if ema:
            require_average(folder, ShardReader(str(folder)).read_metadata().state_dict_metadata)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of megatron-core, on what is not installed
            from spmdrl.engines.megatron.checkpoint import load_whole

            return load_whole(folder, Path(checkpoint, "hf"), ema)
    weights = load_model_state(folder, ema)
    if saved is not None:
        weights = merged(weights, saved, base)
    parts = checkpoint_parts(load_hf_config(str(Path(checkpoint, "hf"))))
    named: dict[str, Tensor] = {}
    for key in list(weights):
        name, tensor = key.removeprefix("hf."), weights.pop(key)
        if name in parts:  # cloned: a file's tensors must not share memory
            named |= {part.name: part.of(tensor).clone() for part in parts[name]}
        else:
            named[name] = tensor
    return named


def load_model_state(folder: Path, ema: bool = False) -> dict[str, Tensor]:
    """Loads what FSDP's engine saved of a model, or either engine of adapters, by the names of
    FSDP's module. ema: as for `load_full`.
    """
    reader = ShardReader(str(folder))
    stored = reader.read_metadata().state_dict_metadata
    weights = empty_tensors(stored, "model.")
    average = empty_tensors(stored, "ema.") if ema else {}
    if ema:
        require_average(folder, stored)
    assert average.keys() <= weights.keys(), sorted(average.keys() - weights.keys())
    state = {"model": {n: t for n, t in weights.items() if n not in average}, "ema": average}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it loads in a single process
        dcp.load(state, storage_reader=reader, no_dist=True)
    weights |= average
    return weights


def require_average(folder: Path, stored: Iterable[str]) -> None:
    """stored: the names in a checkpoint. Raises ConfigError where none is of an average."""
    if not any(name.startswith("ema.") for name in stored):
        raise ConfigError(
            f"--ema: {folder} has no moving average of the weights; a run keeps one with "
            f"actor.ema=0.99 or so. Without --ema the weights themselves are exported"
        )


def empty_tensors(stored: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    """Returns empty tensors for what a checkpoint has under a prefix, by the names without it."""
    return {
        key.removeprefix(prefix): torch.empty(meta.size, dtype=meta.properties.dtype)
        for key, meta in stored.items()
        if key.startswith(prefix) and isinstance(meta, TensorStorageMetadata)
    }


def write_weights(named: Iterable[tuple[str, Tensor]], dtype: torch.dtype, out: Path) -> None:
    """model.safetensors, or shards of 5 GB with their index; a tied head is left out."""
    tied = json.loads(Path(out, "config.json").read_text()).get("tie_word_embeddings", False)
    state = {
        name: tensor.to(dtype).contiguous()
        for name, tensor in named
        if not (tied and name == "lm_head.weight")
    }
    save_torch_state_dict(state, out, max_shard_size="5GB", metadata={"format": "pt"})
    config: dict[str, Any] = json.loads(Path(out, "config.json").read_text())
    name_dtype(config, dtype)
    config.pop("quantization_config", None)  # of a model that was loaded and written as floats
    Path(out, "config.json").write_text(json.dumps(config, indent=2))
