"""Finds out what a model is like that another program has built with transformers and FSDP2.

Each function raises ConfigError for what a step cannot drive, and says what to do instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedConfig, PreTrainedModel

from spmdrl.config import OptimConfig, TrainConfig, require
from spmdrl.distributed.torch_compat import fsdp_settings, is_compiled
from spmdrl.engines.fsdp.layer_kinds import per_sequence_layers
from spmdrl.engines.fsdp.model import some_of
from spmdrl.engines.fsdp.sharding import root_of, units_of
from spmdrl.hub.hf_folder import meta_model, sees_images

COMPUTES_IN = (torch.float32, torch.bfloat16)
# fields of the actor's config that count for a host's model
COUNTS = {"engine", "dtype", "fsdp", "micro_batch_tokens", "attention", "shared_prefix",
          "offload_params", "offload_optimizer", "optim"}  # fmt: skip
# fields of a model's config that change nothing of its log-probabilities, beside all dropouts
WITHOUT_EFFECT = {
    "_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache",
    "pad_token_id", "bos_token_id", "eos_token_id", "initializer_range", "return_dict",
    "output_hidden_states", "output_attentions", "output_router_logits", "router_aux_loss_coef",
    "aux_loss_alpha", "router_jitter_noise", "id2label", "label2id", "problem_type",
    "chunk_size_feed_forward", "is_encoder_decoder", "attn_implementation", "max_window_layers",
}  # fmt: skip


class Sharding(NamedTuple):
    """Says how the program has sharded its model."""

    replicas: int  # of the weights
    sharers: int  # ranks that share one copy
    divisor: float  # of the sum of all ranks' gradients
    dtype: torch.dtype  # that the model computes in


def check_kind(model: Any) -> None:
    """Raises ConfigError for what is no causal language model of transformers as it is."""
    name = type(model).__name__
    require(
        isinstance(model, PreTrainedModel),
        f"attach: {name} is neither a model of transformers nor a list of Megatron's chunks: give "
        "the AutoModelForCausalLM itself, sharded in place by fully_shard. DistributedDataParallel,"
        " FSDP1, torch.compile(model) and peft's wrappers are not supported",
    )
    names = [name for name, _ in model.named_parameters()]
    require(
        not any(".lora_" in name for name in names),
        "attach: the model has adapters (lora_A, lora_B): a host's are not supported; merge them, "
        "or train adapters with python -m spmdrl.ppo and actor.lora",
    )
    require(
        not any(map(is_compiled, model.modules())) and not any("_orig_mod" in n for n in names),
        "attach: parts of the model are compiled: our passes give layers packed sequences, which "
        "they were not compiled for; leave torch.compile out",
    )
    require(
        model.get_output_embeddings() is not None,
        f"attach: {name} has no head over the vocabulary: load it with AutoModelForCausalLM",
    )


def check_architecture(model: PreTrainedModel, hf_config: PreTrainedConfig) -> None:
    """Raises ConfigError with every difference between the model and config.model.

    A difference would not stop training, but the engine would sample from another model. What no
    config shows is measured once the engine stands (embed_compare.check_gap).
    """
    kind = hf_config.model_type
    wrong = [] if kind == model.config.model_type else [
        f"model type: {model.config.model_type} here, {kind} there"
    ]  # fmt: skip
    wrong = wrong or wrong_fields(model.config, hf_config) + wrong_weights(model, hf_config)
    require(
        not wrong,
        f"attach: the model is not what config.model describes: {'; '.join(wrong)}",
    )
    require(
        not sees_images(hf_config),
        f"attach: {kind} sees images, which a host's model is not given; use python -m spmdrl.ppo",
    )
    apart = per_sequence_layers(hf_config)
    require(
        not apart,
        f"attach: {', '.join(apart)} of {kind} carry states from token to token, and our passes "
        "would replace how they compute a packed row; use python -m spmdrl.ppo",
    )


def wrong_fields(here: PreTrainedConfig, there: PreTrainedConfig) -> list[str]:
    mine, theirs = here.to_dict(), there.to_dict()
    names = sorted(n for n in {*mine, *theirs} - WITHOUT_EFFECT if "dropout" not in n)
    return [
        f"{name}: {mine.get(name)} here, {theirs.get(name)} there"
        for name in names
        if mine.get(name) != theirs.get(name)
    ]


def wrong_weights(model: PreTrainedModel, hf_config: PreTrainedConfig) -> list[str]:
    """Compares names and shapes of the weights."""
    mine = {name: tuple(p.shape) for name, p in model.named_parameters()}
    theirs = {name: tuple(p.shape) for name, p in meta_model(hf_config).named_parameters()}
    wrong = [
        f"{name} ({mine.get(name)} here, {theirs.get(name)} there)"
        for name in sorted({*mine, *theirs})
        if mine.get(name) != theirs.get(name)
    ]
    return [f"weights: {some_of(wrong)}"] if wrong else []


def sharding_of(model: PreTrainedModel) -> Sharding:
    """Raises ConfigError for a sharding that no Topology of axes dp and fsdp describes."""
    world, units = dist.get_world_size(), units_of(model)
    weights = dict(model.named_parameters())
    if not units:
        require(
            world == 1,
            f"attach: the model is not sharded, and the program has {world} ranks: call "
            "fully_shard on each layer and on the model before the optimizer is made",
        )
        return Sharding(1, 1, 1.0, compute_dtype(model, MixedPrecisionPolicy()))
    require(
        root_of(model) is model,
        "attach: fully_shard was called on parts of the model and not on the model itself",
    )
    plain = [name for name, p in weights.items() if not isinstance(p, DTensor)]
    require(not plain, f"attach: fully_shard has left out {some_of(plain)} (ignored_params)")
    replicas, sharers = mesh_of(weights)
    policies, divisors = zip(*map(fsdp_settings, units), strict=True)
    found = {replicas * sharers if d is None else d for group in divisors for d in group}
    require(
        len(found) == 1,
        f"attach: units divide their gradients by different factors, {sorted(found)}: "
        "set_gradient_divide_factor must be the same for all",
    )
    require(
        len({policy.param_dtype for policy in policies}) == 1,
        "attach: units compute in different dtypes: MixedPrecisionPolicy.param_dtype must be the "
        "same for all",
    )
    require(
        policies[0].output_dtype in (None, torch.float32),
        f"attach: MixedPrecisionPolicy.output_dtype={policies[0].output_dtype} of the model would "
        "round log-probabilities: leave it out, or use torch.float32",
    )
    return Sharding(replicas, sharers, found.pop(), compute_dtype(model, policies[0]))


def mesh_of(weights: Mapping[str, Tensor]) -> tuple[int, int]:
    """Returns replicas of the weights, and ranks that share one copy."""
    mesh, *others = {p.device_mesh for p in weights.values() if isinstance(p, DTensor)}
    everyone = list(range(dist.get_world_size()))
    require(
        not others and mesh.ndim <= 2 and mesh.mesh.flatten().tolist() == everyone,
        f"attach: weights lie on ranks {mesh.mesh.tolist()}: fully_shard must be given one mesh of "
        f"all {len(everyone)} ranks in their order, of one axis or of two (HSDP); tensor, pipeline "
        "and expert parallelism of a host are not supported",
    )
    for name, p in weights.items():
        assert isinstance(p, DTensor)
        *copies, split = p.placements
        fits = isinstance(split, Shard) and all(isinstance(c, Replicate) for c in copies)
        require(fits, f"attach: {name} is placed as {p.placements}: fully_shard alone may place it")
    return (1, mesh.size()) if mesh.ndim == 1 else (mesh.size(0), mesh.size(1))


def compute_dtype(model: PreTrainedModel, policy: MixedPrecisionPolicy) -> torch.dtype:
    """Raises ConfigError where it is neither float32 nor bfloat16."""
    embedding: Any = model.get_input_embeddings()
    dtype = policy.param_dtype or embedding.weight.dtype
    others = ({p.dtype for p in model.parameters()} | {dtype}) - {*COMPUTES_IN}
    require(
        not others,
        f"attach: the host's model is in {', '.join(map(str, others))}; use bfloat16 or float32",
    )
    return dtype


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raises ConfigError for an optimizer that a step cannot drive."""
    kind = type(optimizer).__name__
    require(
        isinstance(optimizer, torch.optim.Optimizer),
        f"attach: the optimizer ({kind}) is not a torch.optim.Optimizer",
    )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    require(
        closure is None or closure.default is not inspect.Parameter.empty,
        f"attach: {kind}.step() computes the gradient itself, by a closure; use AdamW, for example",
    )
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    own = {id(p): name for name, p in model.named_parameters()}
    left = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in stepped]
    require(
        not left and stepped <= {*own},
        "attach: the optimizer has not the model's weights"
        + (f" ({some_of(left)})" if left else "")
        + ": make it from model.parameters() after fully_shard, which replaces them; weights that "
        "are not to be trained have requires_grad=False",
    )


def rounded_steps(optimizer: torch.optim.Optimizer) -> str:
    """Returns a warning where the optimizer steps on weights in bfloat16, which lose what is less
    than half of their last bit: most of what reinforcement learning learns. "": it does not.
    """
    groups = optimizer.param_groups
    trained = [p for group in groups for p in group["params"] if p.requires_grad]
    if all(p.dtype == torch.float32 for p in trained):
        return ""
    return (
        f"attach: {type(optimizer).__name__} steps on weights in bfloat16. A weight of 0.02 loses "
        f"every step below 6e-05, and the learning rate is {max(float(g['lr']) for g in groups)}: "
        "unless the optimizer rounds at random, load the model in float32 and give fully_shard "
        "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
    )


def check_actor(given: TrainConfig, sharding: Sharding) -> None:
    """Raises ConfigError where the actor's config says what is the host's to say."""
    for field in fields(TrainConfig):
        value, default = getattr(given, field.name), getattr(TrainConfig(), field.name)
        require(
            field.name in COUNTS or value == default,
            f"actor.{field.name}={value!r} has no effect: the model is the host's",
        )
    require(
        given.engine == "fsdp",
        f"actor.engine={given.engine!r}, but the host's model is one of transformers: leave it out",
    )
    require(
        given.fsdp in (-1, sharding.sharers),
        f"actor.fsdp={given.fsdp}, but the host's model has {sharding.sharers}: leave it out",
    )
    require(
        given.optim == OptimConfig(clip_norm=given.optim.clip_norm),
        "actor.optim has no effect but clip_norm: the optimizer and its schedule are the host's",
    )


def on_cpu_beside_gpu(model: nn.Module, device: torch.device) -> bool:
    """Says whether the program has CPUOffloadPolicy: its shards stay on the CPU."""
    return device.type != "cpu" and all(p.device.type == "cpu" for p in model.parameters())


def check_offload(given: TrainConfig, model: nn.Module, device: torch.device) -> None:
    """Raises ConfigError where what is on the CPU anyway is to be moved there."""
    moves = given.offload_params or given.offload_optimizer
    require(
        not (moves and on_cpu_beside_gpu(model, device)),
        "actor.offload_params and actor.offload_optimizer have no effect: with the host's "
        "CPUOffloadPolicy both are on the CPU; leave them out",
    )
