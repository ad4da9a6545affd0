"""Checks what every program that trains can know of its config before anything is built."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from transformers import PreTrainedConfig

from spmdrl.config import (
    CheckpointConfig,
    ConfigError,
    DataConfig,
    OptimConfig,
    PpoConfig,
    RunConfig,
    SftDataConfig,
    SupervisedConfig,
    TrainConfig,
    require,
)
from spmdrl.config.words import counted
from spmdrl.data.processor_files import same_pixels
from spmdrl.distributed.placement import Ranks, show_ranks
from spmdrl.distributed.topology import resolve_degrees, train_degrees
from spmdrl.engines.fsdp.experts import check_experts
from spmdrl.engines.fsdp.layer_kinds import check_tokens_shared, prefix_obstacle
from spmdrl.engines.fsdp.optimizers import check_optimizer
from spmdrl.engines.fsdp.trial import CannotShrink
from spmdrl.engines.fsdp.ulysses import check_ulysses
from spmdrl.engines.megatron.hf_mapping import check_stacked_experts
from spmdrl.engines.megatron.layout import (
    check_layout,
    check_scores,
    has_experts,
)
from spmdrl.engines.megatron.lora import check_adaptable
from spmdrl.engines.megatron.mtp import check_mtp
from spmdrl.engines.megatron.muon import check_matrices
from spmdrl.engines.megatron.parts import degrees_of
from spmdrl.engines.megatron.towers import language_part, untrained_tower
from spmdrl.engines.stored_dtype import DTYPES
from spmdrl.hub.hf_folder import (
    keep_tower,
    load_hf_config,
    meta_model,
    sees_images,
    whole_config,
)
from spmdrl.hub.quantized_weights import is_readable, quantization_of
from spmdrl.hub.remote_code import has_foreign_code
from spmdrl.hub.vision_families import FAMILIES
from spmdrl.training.checks.fp8 import warnings_of_fp8
from spmdrl.training.checks.packing import check_packing
from spmdrl.training.run_length import scheduled

MAX_RANKS = 2**20


def check_sharing(name: str, role: TrainConfig, model: str, strict: bool = False) -> None:
    """Checks what is packed and shared: sequences in a row, tokens between ranks, prefixes between
    sequences. model: the role's. Raises ConfigError where it cannot be.
    """
    hf = load_hf_config(model)
    try:
        check_tokens_shared(hf, role.ulysses)
        check_ulysses(hf, role.ulysses)
        if role.engine == "fsdp" and role.expert_parallel > 1:
            check_experts(meta_model(hf), hf, role, strict)
    except ConfigError as error:
        raise ConfigError(f"{name}.{error}") from error
    if role.engine == "fsdp":
        with suppress(CannotShrink):  # nothing is known of it; --dry-run says so
            check_packing(hf)
    reason = prefix_obstacle(role, strict, hf) if role.shared_prefix is True else None
    require(
        reason is None, f"{name}.shared_prefix=True cannot be: {reason}; leave it out, or set False"
    )


def check_checkpoint(config: RunConfig, own_metric: str) -> None:
    """own_metric: of each step, by which a checkpoint may be kept where nothing is evaluated."""
    saved, default = config.checkpoint, CheckpointConfig()
    require(
        saved.every_steps > 0 or not saved.keep_best,
        f"checkpoint.keep_best={saved.keep_best} has no effect: every_steps=0 saves nothing",
    )
    for name in ("best_metric", "best_is"):
        value = getattr(saved, name)
        require(
            saved.keep_best > 0 or value == getattr(default, name),
            f"checkpoint.{name}={value!r} has no effect with checkpoint.keep_best=0",
        )
    evaluates = config.data.eval is not None and config.eval_every > 0
    require(
        not saved.keep_best or not saved.best_metric.startswith("eval/") or evaluates,
        f"checkpoint.keep_best={saved.keep_best} goes by best_metric={saved.best_metric!r}, but "
        "nothing is evaluated while the run goes on: set data.eval and eval_every, or choose "
        f"another metric, e.g. best_metric={own_metric!r}",
    )


def check_megatron(name: str, role: TrainConfig, model: str, num_ranks: int) -> None:
    require(
        importlib.util.find_spec("megatron.core") is not None,
        f"{name}.engine='megatron', but megatron-core is not installed: docs/install.md",
    )
    hf = load_hf_config(model)
    require(
        not has_foreign_code(hf),
        f"{name}.engine='megatron' builds {hf.model_type!r} itself and would not run the code that "
        f"{model!r} brings along: use engine 'fsdp', or leave trust_remote_code off",
    )
    how = quantization_of(hf).get("quant_method")
    require(
        how is None or is_readable(hf),
        f"{name}.engine='megatron' reads weights in floating point, in FP8 blocks or in MXFP4, and "
        f"{model!r} has quant_method={how!r}: convert it to bfloat16 first",
    )
    text = language_part(hf)
    try:
        check_layout(text, degrees_of(role), num_ranks)
        check_stacked_experts(hf, text)
        require(
            role.moe_grouped_gemm or has_experts(text),
            f"moe_grouped_gemm=False has no effect: {text.model_type!r} has no experts",
        )
        check_scores(text, role.context_parallel, DTYPES[role.dtype])
        if role.lora is not None:
            check_adaptable(hf, role.lora, role.freeze_vision)
        check_mtp(name, role, model)
        if role.optim.name == "muon":
            check_matrices(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def check_world(world: int) -> None:
    require(1 <= world <= MAX_RANKS, f"{world} ranks: a run has 1 to {MAX_RANKS:,}")


def check_places(config: RunConfig) -> None:
    """Paths and names that nothing can be at."""
    places = {"model": config.model, "run_dir": config.run_dir}
    keys = {f.name: getattr(config.data, f.name) for f in dataclasses.fields(config.data)
            if f.name.endswith("_key")}  # fmt: skip
    places |= {f"data.{name}": key for name, key in keys.items() if key is not None}
    if isinstance(config, SupervisedConfig):
        places |= {"out": config.out}
    for name, text in places.items():
        require(bool(text.strip()) and "\0" not in text, f"{name}={text!r} is no name")
    for key in ("tokenize", "add_generation_prompt"):
        require(
            key not in config.data.chat_template_kwargs,
            f"data.chat_template_kwargs: {key!r} is not yours to set, a prompt needs it as it is",
        )


# what only one engine reads, and what it is where nobody sets it
LAYOUT: dict[str, dict[str, Any]] = {
    "fsdp": {
        "fsdp": -1, "reshard_after_forward": True, "ulysses": 1, "kernels": "spmdrl",
        "attention": "auto", "compile": False, "shared_prefix": "auto",
        "activation_offload": False, "offload_policy": False,
    },
    "megatron": {
        "tensor_parallel": 1, "sequence_parallel": False, "pipeline_parallel": 1,
        "virtual_pipeline": 1, "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None, "context_parallel": 1,
        "expert_tensor_parallel": 1, "moe_grouped_gemm": True,
        "mtp_loss_scaling_factor": 0.0, "overlap_grad_reduce": False,
        "overlap_param_gather": False, "ddp_bucket_size": None,
    },
}  # fmt: skip


def check_training_role(name: str, role: TrainConfig, ranks: Ranks, updates: int | None) -> None:
    """updates: of the run; None: the data will tell. Raises ConfigError."""
    require(
        role.engine == "fsdp" or role.ulysses == 1,
        f"{name}.ulysses={role.ulysses} is of engine 'fsdp'. With {name}.engine={role.engine!r} "
        f"ranks share the tokens of a sequence by {name}.context_parallel",
    )
    for engine, fields in LAYOUT.items():
        for field, default in fields.items():
            require(
                role.engine == engine or getattr(role, field) == default,
                f"{name}.{field}={getattr(role, field)} has no effect with {name}.engine="
                f"{role.engine!r}: it is of engine {engine!r}",
            )
    what = "fsdp" if role.engine == "fsdp" else "tensor x pipeline x context_parallel"
    what += " with ulysses" if role.ulysses != 1 else ""
    on_experts = role.engine == "fsdp" and role.expert_parallel != 1
    what += " with expert_parallel" if on_experts else ""
    try:
        resolve_degrees(train_degrees(role), len(ranks))
    except ConfigError as error:
        raise ConfigError(f"{name}.{what} on ranks {show_ranks(ranks)}: {error}") from error
    optim = role.optim
    check_optimizer(name, role)
    check_offload_policy(name, role)
    check_overlap(name, role)
    for field, value, fits in (
        ("muon_momentum", optim.muon_momentum, optim.muon_momentum < 1),
        ("betas", optim.betas, len(optim.betas) == 2 and all(b < 1 for b in optim.betas)),
    ):
        require(fits, f"{name}.optim.{field}={value} is out of range")
    require(
        optim.clip_norm > 0,
        f"{name}.optim.clip_norm={optim.clip_norm} would zero every gradient; "
        "for no clipping use a large number, e.g. 1e9",
    )
    require(
        optim.lr * optim.weight_decay < 1,
        f"{name}.optim.weight_decay={optim.weight_decay:g} x lr={optim.lr:g} is "
        f"{optim.lr * optim.weight_decay:g}: at 1 every weight is 0 after one step, above it "
        "changes its sign. Usual is 0.01 to 0.1",
    )
    require(
        not optim.warmup_ratio or not optim.warmup_steps,
        f"{name}.optim.warmup_ratio={optim.warmup_ratio:g} and warmup_steps={optim.warmup_steps} "
        "both say how long the warm-up is: give one of them",
    )
    if updates is not None:
        check_decay(name, scheduled(optim, updates, in_epochs=False), updates)


def check_decay(name: str, optim: OptimConfig, updates: int) -> None:
    """Raises ConfigError where the rate would decay before it is there. updates: of the run."""
    warmup = optim.warmup_steps
    advice = f", e.g. {updates}, the number of optimizer steps of this run"
    if updates <= warmup:
        advice = f", but the run has only {counted(updates, 'optimizer step')}: shorten the warm-up"
    require(
        optim.schedule == "constant" or optim.decay_steps > warmup,
        f"{name}.optim.schedule={optim.schedule!r} needs optim.decay_steps above "
        f"warmup_steps={warmup}{advice}",
    )


def check_offload_policy(name: str, role: TrainConfig) -> None:
    if not role.offload_policy:
        return
    for field in ("offload_params", "offload_optimizer"):
        require(
            not getattr(role, field),
            f"{name}.{field} has no effect with {name}.offload_policy, which keeps weights, "
            "gradients and the optimizer on the CPU all the time: leave one of them out",
        )
    require(
        role.optim.name != "muon",
        f"{name}.offload_policy with {name}.optim.name='muon': the optimizer steps on the CPU, "
        "where making whole matrices orthogonal takes minutes a step; use 'adamw' or 'adamw8bit', "
        "or offload_optimizer, which moves the optimizer only while the role is idle",
    )


def check_overlap(name: str, role: TrainConfig) -> None:
    """Raises ConfigError for what needs overlap_grad_reduce, by whose buckets both are done."""
    if role.overlap_grad_reduce:
        return
    require(
        not role.overlap_param_gather,
        f"{name}.overlap_param_gather=True without {name}.overlap_grad_reduce: weights are "
        "gathered by the buckets in which gradients are reduced, and without the latter there is "
        "one bucket for all: set overlap_grad_reduce=True",
    )
    require(
        role.ddp_bucket_size is None,
        f"{name}.ddp_bucket_size={role.ddp_bucket_size} has no effect without "
        f"{name}.overlap_grad_reduce, as there is one bucket for all gradients: set it, too",
    )


def keep_towers(config: RunConfig, *others: str | None) -> None:
    """Has the run's model, and the models of other roles, loaded with their towers, if the config
    says so. Raises ConfigError where the model has none that is understood here.
    """
    if not config.vision_tower:
        return
    kind = whole_config(config.model).model_type
    require(
        kind in FAMILIES,
        f"vision_tower=True: model type {kind!r} has no tower for images that is understood here; "
        f"model types that have are {', '.join(FAMILIES)}",
    )
    keep_tower(config.model, *filter(None, others))


def check_vision(
    hf: PreTrainedConfig, roles: Mapping[str, TrainConfig], others: Mapping[str, Any] | None = None
) -> None:
    """Refuses what a model with a vision tower cannot do yet, and what one without cannot.

    others: settings by name that do not go with a tower either.
    """
    if not sees_images(hf):
        for name, role in roles.items():
            require(not role.freeze_vision, f"{name}.freeze_vision: the model sees no images")
        return
    wanted, untrained = dict(others or {}), untrained_tower(hf)
    for name, role in roles.items():
        require(
            role.engine != "megatron" or untrained is None,
            f"{name}.engine='megatron': not with {hf.model_type!r}, a model that sees images: "
            f"{untrained}. Use engine fsdp",
        )
        wanted |= {
            f"{name}.compile": role.compile,
            f"{name}.kernels='liger'": role.kernels == "liger",
            f"{name}.fp8": role.fp8 is not None,
        }  # fmt: skip
    found = [name for name, value in wanted.items() if value]
    require(
        not found, f"{', '.join(found)}: not with {hf.model_type!r}, a model that sees images"
    )  # fmt: skip


def check_other_model(name: str, other: str, model: str, hf: PreTrainedConfig) -> None:
    """Raises ConfigError where a role's own model does not take the run's tokens and images.

    name: of the role; other: its model. hf: the config of `model`.
    """
    theirs = load_hf_config(other)
    require(
        getattr(hf, "image_token_id", None) == getattr(theirs, "image_token_id", None),
        f"{name}.model and the model mark images by different tokens, or one sees none",
    )
    require(
        not sees_images(hf) or same_pixels(model, other, FAMILIES[hf.model_type].video),
        f"{name}.model and the model have image or video processors that differ: both are given "
        "the same pixels",
    )
    vocab, found = hf.get_text_config().vocab_size, theirs.get_text_config().vocab_size
    require(vocab == found, f"{name}.model has {found} tokens, the model {vocab}")


# what a role that is not trained does not read
OF_TRAINING = (
    "offload_optimizer", "activation_checkpointing", "activation_offload", "optim",
    "freeze_vision", "reshard_after_forward", "router_replay", "ema", "mtp_loss_scaling_factor",
    "router_aux_loss_coef", "overlap_grad_reduce", "overlap_param_gather", "ddp_bucket_size",
)  # fmt: skip


def check_reference_options(
    ref: TrainConfig, actor: TrainConfig, names: Iterable[str] = OF_TRAINING,
    reason: str = "the reference is not trained", role: str = "ref",
) -> None:  # fmt: skip
    """Refuses options of the reference that change nothing; it may be given the actor's whole
    config. names: of these options. role: the name of the reference's.
    """
    for name in names:
        value = getattr(ref, name)
        require(
            value in (getattr(TrainConfig(), name), getattr(actor, name)),
            f"{role}.{name}={value!r} has no effect: {reason}",
        )


OF_VIDEOS = (
    "video_key", "video_fps", "video_frames", "video_max_frames", "video_max_pixels",
    "max_video_tokens",
)  # fmt: skip


def check_pixels(hf: PreTrainedConfig, data: DataConfig | SftDataConfig) -> None:
    for name in ("image_min_pixels", "image_max_pixels"):
        require(
            sees_images(hf) or getattr(data, name) is None, f"data.{name}: the model sees no images"
        )
    sees_videos = sees_images(hf) and FAMILIES[hf.model_type].video is not None
    for name in OF_VIDEOS:
        require(
            sees_videos or getattr(data, name) == getattr(DataConfig, name),
            f"data.{name}: the model is shown no videos here",
        )
    require(
        data.video_frames is None or data.video_max_frames is None,
        "data.video_frames is how many frames are shown of each video, so that video_max_frames "
        "has no effect",
    )


MOST_LR = 0.01  # a slip, mostly; of models of some thousand weights it may be meant


def warnings_of_optimizer(name: str, optim: OptimConfig, updates: int) -> list[str]:
    """updates: of the role, in the whole run."""
    found = []
    if optim.lr == 0:
        found.append(f"{name}.optim.lr=0: nothing is learnt")
    elif optim.lr > MOST_LR:
        found.append(f"{name}.optim.lr={optim.lr:g} is far above what trains a language model")
    if optim.warmup_steps > updates:
        found.append(
            f"{name}.optim.warmup_steps={optim.warmup_steps}, but the run has {updates} optimizer "
            f"steps: it ends at lr={optim.lr * updates / optim.warmup_steps:.3g}, of "
            f"{optim.lr:g}"
        )
    return found


def warnings_of_run(config: RunConfig) -> list[str]:
    found = []
    if isinstance(config, PpoConfig) and config.checkpoint.every_steps == 0:
        found.append("checkpoint.every_steps=0: nothing of what is learnt is kept")
    both = files_of(config.data.train) & files_of(config.data.eval or ())
    if both:
        found.append(
            f"{', '.join(sorted(both))} is in data.train and in data.eval: what is trained on is "
            "not held out"
        )
    return found + warnings_of_fp8(config)


def files_of(paths: str | tuple[str, ...]) -> set[str]:
    """The absolute paths of a data option's files, links followed. Raises ConfigError for a NUL."""
    names = (paths,) if isinstance(paths, str) else paths
    for name in names:
        if "\0" in name:
            raise ConfigError(f"data file {name!r} cannot be read: a name of a file holds no NUL")
    return {os.path.realpath(name) for name in names}
