"""Low-rank adapters on a Hugging Face model's linear layers (Hu et al. 2021, arXiv 2106.09685).

peft's layers compute y = W x + scale B A x, with scale = alpha / rank, or alpha / sqrt(rank)
(Kalajdzievski 2023, arXiv 2312.03732). W is frozen and held in the role's dtype; A and B are
float32. B starts at 0, so that the model starts as its base.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from safetensors import safe_open
from safetensors.torch import load_file
from spmdrl_kernels.linear import FastLinear, use_fast_linear
from torch import Tensor
from transformers import PreTrainedConfig

from spmdrl.cli.hub_names import model_name, name_of
from spmdrl.config import ConfigError, LoraConfig, TrainConfig
from spmdrl.distributed.topology import Topology
from spmdrl.engines.fsdp.compat import taken_for_experts, turn_adapter
from spmdrl.engines.fsdp.dora import MAGNITUDE, OFFSET, Magnitudes, add_offsets, subtract_norms
from spmdrl.engines.fsdp.expert_adapters import (
    add_stacks,
    expert_parts,
    factor_names,
    factor_shapes,
    given_factors,
    peft_layers,
    target_stacks,
)
from spmdrl.engines.fsdp.per_sequence_layers import is_recurrent
from spmdrl.engines.fsdp.quantized_base import (
    Nf4Linear,
    QuantizedLowRank,
    check_quantization,
    quantize_layers,
    send_codes,
)
from spmdrl.engines.fsdp.source_adapters import (
    DEFAULT,
    AdapterTokens,
    add_others,
    check_by_source,
    folder_of,
    in_layer,
    names_of,
)
from spmdrl.hub.hf_folder import meta_model, sees_images, towers
from spmdrl.weights.checkpoint_names import ADAPTER, Parts, adapter_parts, checkpoint_name
from spmdrl.weights.shards import Derived, LowRank, Shards, TensorSource, shards_by_part, shards_of

PEFT_PREFIX = "base_model.model."
IN_LAYER = in_layer("")  # peft's names of A and B


@dataclass
class Adapters:
    """The adapters of one engine, and the base that they belong to."""

    config: LoraConfig
    model: str  # the base: a folder or a hub id
    dtype: str  # that the base is held in
    layers: list[str]  # names of the layers that have one
    stacks: list[str]  # names of the stacked weights of experts that have one
    transposed: bool  # these are (experts, in, out)
    quantized: dict[str, Nf4Linear]  # the base of each layer, where it is in 4 bits
    fingerprint: str | None  # of the base's weights; known on the topology's first rank
    tokens: AdapterTokens | None = None  # where there are several adapters

    def named_shards(
        self, weights: Mapping[str, Tensor], parts: Parts, merged: bool
    ) -> dict[str, Shards]:
        """weights: the parameters by their names in the model; else as TrainEngine says."""
        base = {n.replace(".base_layer.", "."): p for n, p in weights.items() if ".lora_" not in n}
        scale = scale_of(self.config)
        made_of: dict[str, TensorSource] = {}
        assert not (merged and self.config.by_source), "several adapters cannot be merged"
        for layer, name in product(self.layers, names_of(self.config)):
            a, b = (weights[f"{layer}.{part}"] for part in in_layer(name))
            offset = weights.get(f"{layer}.{OFFSET}")
            if merged and layer in self.quantized:
                made_of[f"{layer}.weight"] = QuantizedLowRank(self.quantized[layer], a, b, scale)
            elif merged:
                weight = base.pop(f"{layer}.weight")
                own = checkpoint_name(f"{layer}.weight", weight.shape, parts)
                assert own is not None  # add_adapters
                made_of[own] = LowRank(weight, a, b, scale, offset)
            else:
                of_a, of_b = adapter_parts(name)
                base[layer + of_a] = a
                made_of[layer + of_b] = LowRank(None, a, b, scale)
        for stack in self.stacks if merged else ():
            a, b = (weights[name] for name in factor_names(stack))
            made_of |= expert_parts(stack, base.pop(stack), a, b, scale, self.transposed, parts)
        return shards_by_part(base, parts) | Derived(made_of).shards()

    def unscaled_shards(
        self, parameters: Mapping[str, Tensor], name: str = ""
    ) -> dict[str, Shards]:
        """Returns the shards of every A and B of an adapter, and of DoRA's magnitudes. parameters:
        of the engine's module, by name. name: which of several adapters."""
        found = {n.removeprefix("hf."): p for n, p in parameters.items()}
        named = {
            layer + part: shards_of(found[f"{layer}.{inner}"])
            for layer in self.layers
            for part, inner in zip(ADAPTER, in_layer(name), strict=True)
        }
        for stack in self.stacks:
            for part, inner in zip(ADAPTER, factor_names(stack), strict=True):
                named[stack + part] = shards_of(found[inner])
        if not self.config.use_dora:
            return named
        made_of = {
            layer + MAGNITUDE: Magnitudes(
                found[f"{layer}.{OFFSET}"], found[f"{layer}.base_layer.weight"]
            )
            for layer in self.layers
        }
        return named | Derived(made_of).shards()

    def initial(self, hf: Any) -> Iterator[tuple[str, Tensor]]:
        """Yields (name in the engine's module, full tensor) of each A and B as it begins, and of
        each offset of DoRA, which is the magnitude as long as `start` was not called."""
        for name, value in initial_adapters(hf, self.config, self.layers, self.stacks):
            yield f"hf.{name}", value

    def start(self, module: nn.Module, topology: Topology) -> None:
        """Ends what `initial` and `read_quantized` began, when the base has its weights. Collective
        over the topology."""
        send_codes(self.quantized, topology)
        if self.config.use_dora and self.config.adapter:
            named = {n.removeprefix("hf."): p for n, p in module.named_parameters()}
            subtract_norms(named, self.layers)

    def note(self) -> bytes:
        """Returns what a checkpoint has of `identity`."""
        return json.dumps(self.identity(), indent=1).encode()

    def identity(self) -> dict[str, Any]:
        """Returns what a checkpoint says of its adapters."""
        lora = self.config
        return {
            "model": name_of(self.model) or str(Path(self.model).resolve()),
            "fingerprint": self.fingerprint, "dtype": self.dtype, "rank": lora.rank,
            "alpha": lora.alpha, "use_rslora": lora.use_rslora, "layers": self.layers,
            "target_modules": lora.target_modules, "use_dora": lora.use_dora,
            "target_parameters": lora.target_parameters, "stacks": self.stacks,
            "transposed": self.transposed, "quantization": lora.quantization,
            "adapters": [*lora.names],
        }  # fmt: skip


def scale_of(lora: LoraConfig) -> float:
    return lora.alpha / (math.sqrt(lora.rank) if lora.use_rslora else lora.rank)


# ---- making them


def add_adapters(
    hf: Any, model: str, config: TrainConfig, parts: Parts, full: bool, fast_cpu: bool
) -> Adapters:
    """Puts adapters into a float32 model, in place, and freezes the rest of it.

    full: it has weights, so A and B are given theirs too; those of a layer depend on lora.seed and
    the layer's name alone. Without it the fingerprint is not known yet. fast_cpu: layers that are
    fast there will be used.
    """
    lora = config.lora
    assert lora is not None
    layers, stacks = target_layers(hf, lora, config.freeze_vision), target_stacks(hf, lora)
    shapes = {name: hf.get_submodule(name).weight.shape for name in layers}
    in_parts = [n for n in layers if checkpoint_name(f"{n}.weight", shapes[n], parts) is None]
    if in_parts:
        raise ConfigError(
            f"lora.target_modules: a checkpoint of {model} has {in_parts[0]}.weight in parts, "
            "which cannot be adapted: leave it out"
        )
    known = fingerprint(dict(hf.named_parameters())) if full else None
    hf.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):  # peft draws an A of its own
        made = peft_config(replace(lora, use_dora=False), layers, model)
        adapt_layers(hf, layers, made, names_of(lora)[0] or DEFAULT)
        tokens = add_others(hf, layers, made, lora.names) if lora.names else None
    if lora.use_dora:
        add_offsets(hf, layers)
    add_stacks(hf, stacks, lora.rank, scale_of(lora), config.compile)
    if fast_cpu:
        use_fast_linear(hf)
    dtype = getattr(torch, config.dtype)
    for parameter in hf.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    if full:
        with torch.no_grad():
            for name, value in initial_adapters(hf, lora, layers, stacks):
                hf.get_parameter(name).copy_(value)
    quantized: dict[str, Nf4Linear] = {}
    if lora.quantization is not None:
        quantized = quantize_layers(hf, layers, dtype)
    transposed = any(hf.get_submodule(n.rpartition(".")[0]).is_transposed for n in stacks)
    return Adapters(
        lora, model, config.dtype, layers, stacks, transposed, quantized, known, tokens
    )  # fmt: skip


def adapt_layers(hf: Any, layers: Sequence[str], config: Any, adapter: str = "default") -> None:
    """Puts peft's linear layer with an adapter around each of these, which are chosen by us.

    config: peft's LoraConfig. adapter: its name in peft's layers.
    """
    from peft.tuners.lora import Linear

    for name in layers:
        parent, _, leaf = name.rpartition(".")
        base = hf.get_submodule(name)
        # r and lora_alpha are read from its arguments alone
        adapted = Linear(base, adapter, config, r=config.r, lora_alpha=config.lora_alpha)
        setattr(hf.get_submodule(parent), leaf, adapted)


def peft_config(lora: LoraConfig, targets: Sequence[str], model: str) -> Any:
    """model: a folder; one in a hub's cache is named as peft names it, by its id and commit."""
    from peft import LoraConfig as PeftConfig

    name = model_name("model", name_of(model) or model)
    return PeftConfig(
        r=lora.rank, lora_alpha=lora.alpha, use_rslora=lora.use_rslora, use_dora=lora.use_dora,
        target_modules=list(targets), target_parameters=list(lora.target_parameters) or None,
        lora_dropout=0.0, task_type="CAUSAL_LM",
        base_model_name_or_path=name.repo if name else model,
        revision=name.revision or None if name else None,
    )  # fmt: skip


def initial_adapters(
    hf: Any, lora: LoraConfig, layers: Sequence[str], stacks: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name in the model, full tensor in float32) of each A and B: a uniform in
    +-1 / sqrt(in) as peft has it, B zero; or what the folder lora.adapter holds. Of DoRA's offset
    zeros, or the folder's magnitude.
    """
    read = {adapter: given_tensors(folder_of(lora, adapter)) for adapter in names_of(lora)}
    given = read[names_of(lora)[0]]
    for name in layers:
        for adapter in names_of(lora):
            own = in_layer(adapter)
            a, b = (hf.get_submodule(name).get_parameter(part) for part in own)
            values = initial_values(lora, read[adapter], name, a.shape[1], b.shape[0])
            for part, value in zip(own, values, strict=True):
                yield f"{name}.{part}", value
        if lora.use_dora:
            rows = torch.zeros(len(b)) if not given else given[PEFT_PREFIX + name + MAGNITUDE]
            yield f"{name}.{OFFSET}", rows
    factors = dict(given_factors(stacks, lora.rank, given, PEFT_PREFIX)) if given else {}
    for name in stacks:
        if not given:
            (a, b) = factor_shapes(hf, name, lora.rank)
            factors[name] = (drawn(lora, name, a), torch.zeros(b))
        yield from zip(factor_names(name), factors[name], strict=True)


def given_tensors(folder: str | None) -> dict[str, Tensor]:
    """Reads the adapter to start from; {} where there is none."""
    if not folder:
        return {}
    return load_file(Path(folder, "adapter_model.safetensors"))


def initial_values(
    lora: LoraConfig, given: Mapping[str, Tensor], layer: str, columns: int, rows: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns A (rank, columns) and B (rows, rank) of a layer as they begin. given: of
    given_tensors."""
    if given:
        a, b = (given[PEFT_PREFIX + layer + part] for part in ADAPTER)
        return a, b
    return drawn(lora, layer, (lora.rank, columns)), torch.zeros(rows, lora.rank)


def drawn(lora: LoraConfig, name: str, shape: tuple[int, ...]) -> Tensor:
    """Returns A of a layer, or of all experts of one, as it begins: (..., in)."""
    digest = hashlib.sha256(f"{lora.seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1 / math.sqrt(shape[-1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def target_layers(hf: Any, lora: LoraConfig, freeze_vision: bool = False) -> list[str]:
    """Names of the layers to adapt. Raises ConfigError where a target is no linear layer."""
    others = {hf.get_output_embeddings()}
    if freeze_vision and sees_images(hf.config):
        others |= {module for part in towers(hf) for module in part.modules()}
    outputs, renamed = fused_outputs(hf), taken_for_experts(hf.config.model_type)
    fused = {name for name, module in hf.named_modules() if id(module) in outputs}
    experts = {n for n, m in hf.named_modules() if is_plain(m) and n.rpartition(".")[2] in renamed}
    linear = [
        n for n, m in hf.named_modules()
        if is_plain(m) and m not in others and n not in fused | experts
    ]  # fmt: skip
    if not linear:
        raise ConfigError(f"lora: {type(hf).__name__} has no torch.nn.Linear to adapt")
    if lora.target_modules == "all-linear":
        return linear
    targets = tuple(lora.target_modules)
    if not targets and lora.target_parameters:
        return []
    if not targets:
        raise ConfigError(
            "lora.target_modules=() adapts no layer, so nothing would be trained: leave it at "
            "'all-linear', or name layers, e.g. ('q_proj', 'v_proj')"
        )
    for target in targets:
        if any(is_target(name, (target,)) for name in fused):
            raise ConfigError(
                f"lora.target_modules={target!r} is a projection of a Mamba layer, whose kernels "
                "on GPUs read the weight itself and would ignore an adapter: leave it out"
            )
        if any(is_target(name, (target,)) for name in experts):
            raise ConfigError(
                f"lora.target_modules={target!r}: peft takes this name for the experts' of model "
                f"type {hf.config.model_type!r} and would load the adapter without these layers: "
                "leave it out"
            )
        if not any(is_target(name, (target,)) for name in linear):
            leaves = sorted({name.rpartition(".")[2] for name in linear})
            near = difflib.get_close_matches(target, leaves, n=3) or leaves
            raise ConfigError(
                f"lora.target_modules={target!r} is the end of no linear layer's name; nearest: "
                f"{', '.join(near)}. Embeddings and the head are not adapted; a mixture's experts "
                "are by lora.target_parameters"
            )
    return [name for name in linear if is_target(name, targets)]


def is_plain(module: nn.Module) -> bool:
    """Says whether a module is a linear layer and no more: Llama 4's routers are more."""
    return isinstance(module, nn.Linear) and type(module).forward in (
        nn.Linear.forward, FastLinear.forward,
    )  # fmt: skip


def fused_outputs(hf: nn.Module) -> set[int]:
    """Returns the ids of the projections of Mamba layers whose weights are read by themselves: see
    the error in target_layers.
    """
    layers = [m for m in hf.modules() if is_recurrent(m) and hasattr(m, "D")]
    names = ("out_proj", "dt_proj")
    return {id(getattr(m, name)) for m in layers for name in names if hasattr(m, name)}


def is_target(name: str, targets: Sequence[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Meanwhile the layers compute W x. peft's own switch would also freeze A and B, of which FSDP
    has to know beforehand."""
    from peft.tuners.lora import LoraLayer

    layers = [layer for layer in module.modules() if isinstance(layer, LoraLayer)]
    experts: list[Any] = [part for part in module.modules() if hasattr(part, "lora_off")]

    def turn(off: bool) -> None:
        for layer in layers:
            turn_adapter(layer, off)
        for part in experts:
            part.lora_off = off

    turn(off=True)
    try:
        yield
    finally:
        turn(off=False)


# ---- what is known before anything is built


def check_lora(name: str, role: TrainConfig, config: PreTrainedConfig) -> None:
    """Raises ConfigError where the role's adapters cannot be had. config: of its model."""
    lora = role.lora
    if lora is None:
        return
    if role.optim.name == "muon":
        raise ConfigError(
            f"{name}.lora with {name}.optim.name='muon': what Muon makes orthogonal is the change "
            "of a weight, which adapters hold as two factors; use 'adamw' or 'adamw8bit'"
        )
    for field in ("rank", "alpha"):
        if getattr(lora, field) < 1:
            raise ConfigError(f"{name}.lora.{field}={getattr(lora, field)} must be at least 1")
    check_quantization(name, role, config)
    shell = meta_model(config)
    check_by_source(name, role, shell)
    layers, stacks = target_layers(shell, lora, role.freeze_vision), target_stacks(shell, lora)
    for folder in dict.fromkeys(folder_of(lora, adapter) for adapter in names_of(lora)):
        if folder is not None:
            check_adapter(name, replace(lora, adapter=folder), layers, stacks)


def check_adapter(
    name: str, lora: LoraConfig, layers: Sequence[str], stacks: Sequence[str] = ()
) -> None:  # fmt: skip
    """Whether the adapter to start from is what the config says, and nothing else besides."""
    assert lora.adapter is not None
    where = f"{name}.lora.adapter={lora.adapter!r}"
    files = [Path(lora.adapter, n) for n in ("adapter_config.json", "adapter_model.safetensors")]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(f"{where} has no {' and no '.join(missing)}; is it a peft adapter?")
    given = json.loads(files[0].read_text())
    odd = [
        key for key in ("rank_pattern", "alpha_pattern", "modules_to_save",
                        "fan_in_fan_out", "lora_bias")
        if given.get(key)
    ]  # fmt: skip
    if given.get("peft_type") != "LORA" or odd or given.get("bias", "none") != "none":
        raise ConfigError(f"{where} is more than plain LoRA: {odd or given.get('peft_type')}")
    said = {"rank": given["r"], "alpha": given["lora_alpha"],
            "use_rslora": bool(given.get("use_rslora")),
            "use_dora": bool(given.get("use_dora"))}  # fmt: skip
    for field, value in said.items():
        if getattr(lora, field) != value:
            raise ConfigError(
                f"{where} has {field} {value}, not {getattr(lora, field)}: set "
                f"{name}.lora.{field}={value}"
            )
    with safe_open(files[1], framework="pt") as file:
        held = set(file.keys())
    parts = (*ADAPTER, MAGNITUDE) if lora.use_dora else ADAPTER
    wanted = {PEFT_PREFIX + layer + part for layer in layers for part in parts}
    wanted |= {PEFT_PREFIX + own + part for own in peft_layers(stacks).values() for part in ADAPTER}
    if held != wanted:
        leaves = sorted({key.partition(".lora_")[0].rpartition(".")[2] for key in held})
        raise ConfigError(
            f"{where} has {len(held)} tensors, for {', '.join(leaves)}; {name}.lora.target_modules"
            f"={lora.target_modules!r}, with target_parameters={lora.target_parameters!r}, of this "
            f"model asks for {len(wanted)}, of which "
            f"{len(wanted - held)} are not there"
        )


# ---- the fingerprint of the base


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Returns a digest of a model's weights: names, shapes and a checksum of each tensor, as they
    were read.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    return fingerprint_of_sums(shapes, {name: checksum(t) for name, t in weights.items()})


def checksum(tensor: Tensor) -> int:
    data: Any = tensor.detach().contiguous().numpy()
    return zlib.crc32(data)


def fingerprint_of_sums(shapes: Mapping[str, tuple[int, ...]], sums: Mapping[str, int]) -> str:
    digest = hashlib.sha256()
    for name in sorted(shapes):
        digest.update(f"{name} {shapes[name]} {sums[name]}\n".encode())
    return digest.hexdigest()
