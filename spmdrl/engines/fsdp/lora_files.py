"""Adapters on disk: in a role's folder of a checkpoint, and as peft writes and reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmdrl.checkpoint.disk_space import writing
from spmdrl.config import ConfigError, LoraConfig
from spmdrl.config.words import counted
from spmdrl.distributed.collectives import broadcast_object
from spmdrl.distributed.topology import Topology
from spmdrl.engines.fsdp.dora import MAGNITUDE, OFFSET
from spmdrl.engines.fsdp.expert_adapters import add_deltas, factor_names, peft_tensors
from spmdrl.engines.fsdp.lora import (
    PEFT_PREFIX,
    Adapters,
    checksum,
    fingerprint_of_sums,
    peft_config,
    scale_of,
)
from spmdrl.engines.fsdp.model import build_model
from spmdrl.engines.fsdp.quantized_base import read_quantized, rounded
from spmdrl.engines.fsdp.sharded_loading import fingerprint_of, read_shards
from spmdrl.engines.fsdp.source_adapters import in_layer, names_of
from spmdrl.engines.fsdp.weight_files import WeightFiles, open_weights
from spmdrl.hub.download import local_model
from spmdrl.hub.hf_folder import auto_class, keep_tower, load_hf_config
from spmdrl.weights.buffers import kept_tensors, persistent_buffers
from spmdrl.weights.checkpoint_names import ADAPTER
from spmdrl.weights.shards import Shards, row_norms, set_lengths
from spmdrl.weights.transfer import gathered

BASE_FILE = "lora.json"  # in a role's folder of a checkpoint: what its adapters belong to


def read_base(folder: Path) -> dict[str, Any] | None:
    """Reads what a role's folder of a checkpoint says of its adapters; None for a model."""
    file = Path(folder, BASE_FILE)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def check_base(adapters: Adapters | None, folder: Path, topology: Topology) -> None:
    """Raises ConfigError where the checkpoint's adapters are not this run's. Collective."""
    problem = difference(adapters, folder) if topology.rank == 0 else None
    problem = broadcast_object(problem, topology.control)
    if problem is not None:
        raise ConfigError(problem)


def difference(adapters: Adapters | None, folder: Path) -> str | None:
    saved = read_base(folder)
    if saved is None and adapters is None:
        return None
    if adapters is None:
        assert saved is not None
        return (
            f"{folder} holds adapters of rank {saved['rank']}, and this run has no lora: set it, "
            "or export the checkpoint (python -m spmdrl.export) and start from that model"
        )
    if saved is None:
        return (
            f"{folder} holds a whole model, and this run trains adapters: export it (python -m "
            "spmdrl.export) and start from that model, or leave lora out"
        )
    mine = adapters.identity()
    if saved["fingerprint"] != mine["fingerprint"]:
        return (
            f"{folder} holds adapters of the base {saved['model']} (fingerprint "
            f"{saved['fingerprint'][:12]}); this run's base {mine['model']} has other weights "
            f"({mine['fingerprint'][:12]}): set model to the former"
        )
    if saved.get("adapters", []) != mine["adapters"]:
        return (
            f"{folder} was written with the adapters {saved.get('adapters') or ['of all sources']},"
            f" this run has {mine['adapters'] or ['of all sources']}: lora.by_source is not what "
            "it was"
        )
    for key in ("rank", "alpha", "use_rslora", "use_dora", "quantization"):
        before = saved.get(key, False if key == "use_dora" else None)
        if before != mine[key]:
            return f"{folder} was written with lora.{key}={before}, this run has {mine[key]}"
    if saved["layers"] != mine["layers"]:
        return (
            f"{folder} has adapters on {counted(len(saved['layers']), 'layer')}, this run on "
            f"{len(mine['layers'])}: lora.target_modules, or freeze_vision, is not what it was"
        )
    if saved.get("stacks", []) != mine["stacks"]:
        return (
            f"{folder} has adapters on {len(saved.get('stacks', []))} stacked weights of experts, "
            f"this run on {len(mine['stacks'])}: lora.target_parameters is not what it was"
        )
    return None


def lora_of(saved: Mapping[str, Any]) -> LoraConfig:
    """The config of a checkpoint's adapters; `saved` is what `read_base` gives."""
    targets = saved["target_modules"]
    targets = targets if targets == "all-linear" else tuple(targets)
    return LoraConfig(
        saved["rank"], saved["alpha"], targets, saved["use_rslora"],
        use_dora=saved.get("use_dora", False),
        target_parameters=tuple(saved.get("target_parameters", ())),
        quantization=saved.get("quantization"),
        by_source={name: name for name in saved.get("adapters", [])},
    )  # fmt: skip


def fill_module(
    module: Any, files: WeightFiles | None, adapters: Adapters | None, topology: Topology
) -> None:  # fmt: skip
    """Reads this rank's shards of an engine's module; without files they are 0 but for new
    adapters. Collective over the topology.
    """
    new = adapters.initial(module.hf) if adapters is not None else iter(())
    sums = read_shards(module, files, new, topology, checksums=adapters is not None)
    if adapters is not None and files is not None:
        sums |= read_quantized(adapters.quantized, files, topology)
        adapters.fingerprint = fingerprint_of(files, sums, topology)


def adapter_tensors(
    read: Callable[[str], Tensor], saved: Mapping[str, Any], name: str = ""
) -> dict[str, Tensor]:
    """Returns `<layer>.lora_A.weight` and `<layer>.lora_B.weight` of a checkpoint, of layers and of
    stacked weights of experts, and DoRA's offsets. read: a function that reads a tensor of it by
    its name. name: which of several adapters. Raises ConfigError where it has several and none is
    named.
    """
    if saved.get("adapters") and not name:
        raise ConfigError(
            f"the checkpoint has several adapters, {', '.join(saved['adapters'])}, and one model "
            "holds one of them: write each with python -m spmdrl.export --adapter"
        )
    parts = dict(zip(ADAPTER, in_layer(name), strict=True))
    if lora_of(saved).use_dora:
        parts["." + OFFSET] = OFFSET
    found = {
        layer + part: read(f"hf.{layer}.{inner}")
        for layer in saved["layers"]
        for part, inner in parts.items()
    }
    for stack in saved.get("stacks", []):
        for part, inner in zip(ADAPTER, factor_names(stack), strict=True):
            found[stack + part] = read(f"hf.{inner}")
    return found


def with_magnitudes(
    adapters: Mapping[str, Tensor], saved: Mapping[str, Any], base: str
) -> dict[str, Tensor]:  # fmt: skip
    """Returns what peft has of a checkpoint's adapters: for DoRA's offsets magnitudes, which are
    worked out of the base. adapters: of adapter_tensors. Raises ConfigError as merged_sources does.
    """
    if not lora_of(saved).use_dora:
        return dict(adapters)
    _, _, read_tensor = tensors_of(base_folder(saved, base))
    found = {n: t for n, t in adapters.items() if not n.endswith(OFFSET)}
    for layer in saved["layers"]:
        weight = read_tensor(f"{layer}.weight").to(getattr(torch, saved["dtype"]))
        found[layer + MAGNITUDE] = adapters[f"{layer}.{OFFSET}"] + row_norms(weight)
    return found


def base_folder(saved: Mapping[str, Any], base: str) -> str:
    """Returns where the base of a checkpoint's adapters lies; raises ConfigError as merged_sources
    does, whose arguments these are.
    """
    path = local_model("base" if base else "the base of these adapters", base or saved["model"])
    if not Path(path).is_dir():
        raise ConfigError(f"the base {path} of these adapters is not there: name it with --base")
    if any("language_model" in name for name in [*saved["layers"], *saved.get("stacks", [])]):
        keep_tower(path)
    shapes, _, read_tensor = tensors_of(path)
    sums = {name: checksum(read_tensor(name)) for name in shapes}
    if fingerprint_of_sums(shapes, sums) != saved["fingerprint"]:
        raise ConfigError(f"{path} has not the weights that these adapters were trained on")
    return path


def merged_sources(
    adapters: Mapping[str, Tensor], saved: Mapping[str, Any], base: str
) -> Iterator[tuple[str, tuple[int, ...], Callable[[], Tensor]]]:
    """Yields of each parameter and each buffer that files hold its name, its shape and a function
    that reads it in float32: the base as it was held, and scale B A. base: where it lies now; "":
    where it lay. Raises ConfigError where the base is not there, or is another model.
    """
    shapes, buffers, read_tensor = tensors_of(base_folder(saved, base))
    dtype, scale = getattr(torch, saved["dtype"]), scale_of(lora_of(saved))
    quantized = saved.get("quantization") is not None

    def read(name: str) -> Tensor:
        layer = name.removesuffix(".weight")
        adapted = layer + ADAPTER[0] in adapters
        weight = read_tensor(name).to(dtype).to(torch.float32, copy=adapted)
        if not adapted:
            return weight
        if quantized:
            weight = rounded(weight.to(dtype)).float()
        a, b = (adapters[layer + part] for part in ADAPTER)
        if name in saved.get("stacks", []):
            add_deltas(weight, a, b, scale, saved["transposed"])
            return weight
        lengths = row_norms(weight) if f"{layer}.{OFFSET}" in adapters else None
        weight.addmm_(b, a, alpha=scale)
        if lengths is not None:
            set_lengths(weight, lengths + adapters[f"{layer}.{OFFSET}"])
        return weight

    for name, shape in shapes.items():
        yield name, shape, partial(read, name)
    for name, shape in buffers.items():  # biases of routers, which stay in their own dtype
        yield name, shape, partial(read_tensor, name)


Shapes = dict[str, tuple[int, ...]]


def tensors_of(model: str) -> tuple[Shapes, Shapes, Callable[[str], Tensor]]:
    """Returns the shapes of a language model's parameters, those of its buffers that files hold,
    and a function that reads one of either in float32.

    One is in memory at a time, but where its files cannot be read by rows.
    """
    shell = build_model(model, full=False, has_head=True)
    files = open_weights(model, shell, has_head=True)
    shapes = {name: tuple(parameter.shape) for name, parameter in shell.named_parameters()}
    buffers = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(shell).items()}
    if files is not None:
        lengths = {n: shape[0] if shape else 0 for n, shape in (shapes | buffers).items()}
        return shapes, buffers, lambda name: files.rows(name, 0, lengths[name]).float()
    auto = auto_class(load_hf_config(model))
    hf = auto.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
    weights = {name: tensor.detach() for name, tensor in kept_tensors(hf).items()}
    return shapes, buffers, lambda name: weights[name].float().clone()


def save_adapters(adapters: Adapters, module: Any, topology: Topology, folder: Path) -> None:
    """Writes the adapter of an engine's module as peft has it; several to folder/<name> each.
    Collective over the topology.
    """
    for name in names_of(adapters.config):
        named = adapters.unscaled_shards(dict(module.named_parameters()), name)
        save_adapter(adapters, named, topology, folder / name)


def save_adapter(
    adapters: Adapters, named: Mapping[str, Shards], topology: Topology, folder: Path
) -> None:
    """Writes the adapters as peft has them. named: A and B, unscaled, by the names of ADAPTER, and
    DoRA's magnitudes. Collective over the topology.
    """
    first = topology.rank == 0
    tensors = gathered(named, torch.float32, 64 << 20, topology, to_first=True)
    kept = {name: tensor.cpu().clone() for name, tensor in tensors if first}
    if first:
        own = adapters
        write_adapter(folder, kept, own.config, own.layers, own.model, own.stacks)


def write_adapter(
    folder: Path, tensors: Mapping[str, Tensor], lora: LoraConfig, layers: Sequence[str],
    model: str, stacks: Sequence[str] = (),
) -> None:  # fmt: skip
    """adapter_config.json and adapter_model.safetensors; peft.PeftModel.from_pretrained reads it.

    tensors: `<layer>.lora_A.weight` and `<layer>.lora_B.weight`, unscaled, and of DoRA
    `<layer>.lora_magnitude_vector`; of stacked weights of experts, whose names are `stacks`, the
    same after the name of the weight.
    """
    from safetensors.torch import save

    targets: Sequence[str] = sorted({name.rpartition(".")[2] for name in layers})
    # peft's own "all-linear" may mean other layers; a list of ends means these in peft and vLLM
    if lora.target_modules != "all-linear":
        targets = lora.target_modules
    if any("language_model" in name for name in layers):  # a vision tower's may have the same ends
        targets = layers
    config = peft_config(lora, targets, model)
    config.inference_mode = True
    others = {stack + part for stack in stacks for part in ADAPTER}
    named = {name: tensor for name, tensor in tensors.items() if name not in others}
    named |= peft_tensors(stacks, tensors)
    state = {PEFT_PREFIX + name: tensor.contiguous() for name, tensor in named.items()}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(folder)
        content = save(state, metadata={"format": "pt"})
        Path(folder, "adapter_model.safetensors").write_bytes(content)
