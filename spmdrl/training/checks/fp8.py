"""Checks whether a role's layers can multiply in FP8 (TrainConfig.fp8)."""

from __future__ import annotations

import torch

from spmdrl.config import TrainConfig, require
from spmdrl.distributed.accelerator import multiplies_fp8
from spmdrl.engines.fsdp.experts import expert_modules
from spmdrl.engines.fsdp.float8 import fp8_layers, require_torchao
from spmdrl.engines.fsdp.model import decoder_layers
from spmdrl.hub.hf_folder import load_hf_config, meta_model

LEAST_SHARE = 0.5  # of the weights of the decoder layers, for which FP8 is worth its rounding


def check_fp8(name: str, role: TrainConfig, model: str) -> None:
    """name: of the role; model: its model. Raises ConfigError."""
    if role.fp8 is None:
        return
    asked = f"{name}.fp8={role.fp8!r}"
    require(
        role.engine == "fsdp",
        f"{asked} does not go with {name}.engine={role.engine!r}: Megatron-core computes in FP8 "
        "(its fp8_format and fp8_recipe) with the layers of TransformerEngine alone, which are not "
        "built here. Use engine 'fsdp', or leave fp8 out",
    )
    require(
        role.dtype == "bfloat16",
        f"{asked} with {name}.dtype={role.dtype!r}: what is beside these products would be more "
        "exact than they are, for twice the memory; use dtype='bfloat16'",
    )
    require(
        role.lora is None,
        f"{asked} does not go with {name}.lora: FP8 makes the products of large trained weights "
        "faster, and of adapters both factors are small; leave one of them out",
    )
    require_torchao(asked)
    shell = meta_model(load_hf_config(model))
    require(
        not expert_modules(shell),
        f"{asked}: a mixture's experts, most of its weights, are no linear layers and would "
        "multiply in bfloat16 as before: leave fp8 out",
    )
    chosen = fp8_layers(shell).values()
    require(
        bool(chosen),
        f"{asked} has no effect: no decoder layer of model type {shell.config.model_type!r} has a "
        "plain linear layer with two widths that are multiples of 16; leave it out",
    )
    weights = sum(p.numel() for layer in decoder_layers(shell) for p in layer.parameters())
    share = sum(layer.weight.numel() for layer in chosen) / weights
    require(
        share >= LEAST_SHARE,
        f"{asked}: only {share:.0%} of the weights of the decoder layers of model type "
        f"{shell.config.model_type!r} are of layers that FP8 is for, see docs/fp8.md; the others "
        "would multiply in bfloat16 as before: leave fp8 out",
    )
    if torch.cuda.is_available():
        require(
            multiplies_fp8(),
            f"{asked} on {torch.cuda.get_device_name()}: products in FP8 need a GPU of NVIDIA with "
            "compute capability 8.9 or more (L4, L40S, RTX 40, H100 and later), and on AMD's "
            "nothing was tried: leave fp8 out",
        )


def warnings_of_fp8(config: object) -> list[str]:
    """Returns what is known to be slow on a GPU. config: of any program."""
    names = [
        name for name in ("actor", "critic", "ref", "prm")
        if isinstance(role := getattr(config, name, None), TrainConfig)
        and role.fp8 is not None and not role.compile
    ]  # fmt: skip
    if not names or not torch.cuda.is_available():
        return []
    return [
        f"{', '.join(f'{name}.fp8' for name in names)} without compile=True: torchao's layers are "
        "made to be compiled, and without it each rounding to FP8 is several kernels"
    ]
