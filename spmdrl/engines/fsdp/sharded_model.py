"""Builds what FsdpEngine trains: a model, sharded by FSDP2, and its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch.nn as nn
from torch import Tensor
from transformers import PreTrainedModel

from spmdrl.config import TrainConfig, checkpointing_of
from spmdrl.data.processor_files import ProcessorFiles
from spmdrl.distributed.topology import Topology
from spmdrl.engines.fsdp import ema, layers
from spmdrl.engines.fsdp.activations import offloading, use_checkpointing
from spmdrl.engines.fsdp.experts import check_experts, split_experts
from spmdrl.engines.fsdp.hosted_policy import HostedPolicy
from spmdrl.engines.fsdp.layer_kinds import shares_prefixes
from spmdrl.engines.fsdp.lora import Adapters, add_adapters
from spmdrl.engines.fsdp.lora_files import fill_module
from spmdrl.engines.fsdp.model import HEADS, decoder_layers
from spmdrl.engines.fsdp.muon import Cuts, hidden_matrices
from spmdrl.engines.fsdp.optimizers import Optimizer, build_optimizer
from spmdrl.engines.fsdp.router_aux_loss import RouterAuxLoss
from spmdrl.engines.fsdp.router_replay import Routers
from spmdrl.engines.fsdp.sharded_loading import allocate, drop_data, open_model, scatter_weights
from spmdrl.engines.fsdp.sharding import divides_experts, gathers_once, shard
from spmdrl.engines.fsdp.strict import make_strict
from spmdrl.engines.fsdp.ulysses import SequenceParallelGroup, check_ulysses
from spmdrl.engines.stored_dtype import DTYPES, as_stored, stored_dtype
from spmdrl.hub.hf_folder import load_hf_config, sees_images
from spmdrl.hub.remote_code import code_files
from spmdrl.weights.checkpoint_names import Parts, checkpoint_parts


@dataclass
class ShardedModel:
    """A model and its optimizer on this rank."""

    kind: str  # "policy" | "value" | "reward"
    module: nn.Module  # one of model.HEADS around the Hugging Face model
    pretrained: list[Any]  # configs with save_pretrained, written beside the weights
    parts: Parts  # what files make of the parameters
    optimizer: Optimizer | None = None  # None: the model is frozen
    shares_prefixes: bool = False  # the prompt of a group is computed once in a micro-batch
    gathers_once: bool = False  # see sharding.gathers_once
    # layers keep what was gathered from their forward pass to their backward pass
    keeps_gathered: bool = False
    adapters: Adapters | None = None
    average: dict[str, Tensor] = field(default_factory=dict)  # of what is trained, with config.ema
    routers: Routers | None = None  # whose experts are replayed
    aux_loss: RouterAuxLoss | None = None
    # around a forward pass with gradient: where what it keeps goes
    offloaded: AbstractContextManager[Any] = field(default_factory=nullcontext)
    driven: Callable[[], AbstractContextManager[Any]] = nullcontext  # around all passes
    loss_scale: float = 1.0  # by what losses are multiplied, so that gradients are their sum

    @property
    def trained(self) -> dict[str, Tensor]:
        """The weights that are trained, by name; none of a frozen model."""
        return {n: p for n, p in self.module.named_parameters() if p.requires_grad}


def sharded_model_of_host(host: HostedPolicy, config: TrainConfig) -> ShardedModel:
    """Returns a policy that another program has built, sharded and trains. When weights are
    gathered is the program's to say: it is not changed here.
    """
    return ShardedModel(
        "policy", host.module, [host.hf.config], checkpoint_parts(host.hf.config), host.optimizer,
        shares_prefixes=shares_prefixes(config, False, host.hf.config),
        driven=host.driven, loss_scale=host.loss_scale,
    )  # fmt: skip


def build_sharded_model(
    kind: str, model: str, config: TrainConfig, topology: Topology, frozen: bool = False,
    strict: bool = False, load_weights: bool = True,
) -> ShardedModel:  # fmt: skip
    """Loads a Hugging Face model into the shards of this rank. Collective over the topology.

    load_weights: without it weights are 0, until `take_weights`.

    Raises ConfigError where the model or what the config asks of it cannot be had.
    """
    layers.check_here(config, topology.device)
    hf, files = open_model(kind, model, topology, load_weights)
    built = change_layers(kind, model, hf, config, topology, frozen, strict)
    on_first = load_weights and files is None  # the whole model, which the first rank hands out
    is_first = on_first and topology.rank == 0
    if not on_first:
        drop_data(built.module)
    if config.lora is not None and not frozen:
        fast = layers.on_fast_cpu(config, topology.device)
        built.adapters = add_adapters(hf, model, config, built.parts, is_first, fast)
    full_weights = dict(built.module.state_dict()) if is_first else {}
    hidden = shard_layers(built, hf, config, topology, frozen)
    if on_first:
        scatter_weights(built.module, full_weights, topology)
    else:
        allocate(built.module, topology.device, config.offload_policy)
        fill_module(built.module, files, built.adapters, topology)
    if frozen:
        built.module.requires_grad_(False)
        return built
    if built.adapters is not None:
        built.adapters.start(built.module, topology)
    trained = built.trained
    built.optimizer = build_optimizer(trained, config.optim, hidden, DTYPES[config.dtype])
    built.average = ema.start(trained) if config.ema else {}
    return built


def change_layers(
    kind: str, model: str, hf: PreTrainedModel, config: TrainConfig, topology: Topology,
    frozen: bool, strict: bool,
) -> ShardedModel:  # fmt: skip
    """Gives the model the layers that the config asks for and the head of its kind. Raises
    ConfigError where it cannot have them.
    """
    aux_loss: RouterAuxLoss | None = None
    if config.router_aux_loss_coef > 0 and not frozen:
        team = SequenceParallelGroup.of(topology)
        aux_loss = RouterAuxLoss(hf, config.router_aux_loss_coef, team)
    layers.use_layers(hf, config, topology.device, strict)
    replays = kind == "policy" and not frozen and config.router_replay is not None
    routers = Routers(hf) if replays else None
    pretrained = files_beside_weights(hf, kind, model)
    check_ulysses(hf.config, config.ulysses)
    check_experts(hf, hf.config, config, strict)
    parts = checkpoint_parts(hf.config)  # before a head unties what is tied
    shares = kind != "reward" and shares_prefixes(config, strict, hf.config)
    module: nn.Module = HEADS[kind](hf)
    if strict:
        make_strict(module, DTYPES[config.dtype], topology.device)
    return ShardedModel(
        kind, module, pretrained, parts,
        shares_prefixes=shares, routers=routers, aux_loss=aux_loss,
    )  # fmt: skip


def shard_layers(
    built: ShardedModel, hf: PreTrainedModel, config: TrainConfig, topology: Topology, frozen: bool
) -> dict[str, Cuts]:
    """Makes each layer a unit of FSDP2, with what it keeps for its backward pass as the config
    asks. Returns what Muon trains: see muon.hidden_matrices. Collective.
    """
    blocks = decoder_layers(hf)
    if not frozen:
        use_checkpointing(hf, checkpointing_of(config, topology.device.type == "cuda"))
    if config.compile:
        layers.compile_layers(blocks)
    if topology.experts is not None:
        split_experts(built.module, topology.experts["ep"], config.compile)
    hidden = hidden_matrices(built.module, blocks, built.parts, prefix="hf.")
    once = gathers_once(config, topology.copies["fsdp"].size())
    built.gathers_once = once
    built.keeps_gathered = not (config.reshard_after_forward or frozen or once)
    shard(
        built.module, blocks, DTYPES[config.dtype], topology, config.offload_policy,
        not built.keeps_gathered, divides_experts(config),
    )  # fmt: skip
    if config.activation_offload and not frozen:
        built.offloaded = offloading(built.module, pinned=topology.device.type == "cuda")
    return hidden


def files_beside_weights(hf: Any, kind: str, model: str) -> list[Any]:
    """Returns what a checkpoint has beside its weights, each with save_pretrained: configs, code of
    the model's own, and the processor of its images.
    """
    config = as_stored(hf.config, stored_dtype(load_hf_config(model), model))
    generation = [hf.generation_config] if kind != "reward" else []
    processor = [ProcessorFiles(model)] if sees_images(hf.config) else []
    return [config, *generation, *code_files(hf.config), *processor]
