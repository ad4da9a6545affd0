"""What can be known before anything is built: is the config sound, what will it need.

`check` raises ConfigError with the value, the place and the remedy; `describe` is --dry-run's text.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from math import prod
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from spmdrl.algo.advantages import estimator_of
from spmdrl.algo.checks import check_algo, require, shown
from spmdrl.algo.losses import aggregation_of
from spmdrl.algo.objectives import needs_old_logprobs
from spmdrl.config import ConfigError, PpoConfig, SftConfig, TrainConfig
from spmdrl.engines.fsdp import DTYPES
from spmdrl.engines.models import load_hf_config
from spmdrl.topology import resolve_degrees, train_degrees

GIB = 2**30


def check(config: PpoConfig, world: int) -> None:
    """Raises ConfigError; needs no process group, no weights and no data."""
    data, rollout, algo = config.data, config.rollout, config.algo
    check_finite(config, "")
    for name, value in {"seed": config.seed, "rollout.min_tokens": rollout.min_tokens}.items():
        require(value >= 0, f"{name}={value} must not be negative")
    require(
        data.max_eval_prompts is None or data.max_eval_prompts >= 1,
        f"data.max_eval_prompts={data.max_eval_prompts} must be at least 1",
    )
    fraction = config.rewards.max_invalid_fraction
    require(0 <= fraction <= 1, f"rewards.max_invalid_fraction={fraction} must be in 0..1")
    for name, value in {
        "steps": config.steps, "data.prompts_per_step": data.prompts_per_step,
        "data.max_prompt_tokens": data.max_prompt_tokens, "rollout.n": rollout.n,
        "rollout.max_tokens": rollout.max_tokens, "rollout.max_num_seqs": rollout.max_num_seqs,
        "weights.bucket_mib": config.weights.bucket_mib, "rewards.workers": config.rewards.workers,
    }.items():  # fmt: skip
        require(value >= 1, f"{name}={value} must be at least 1")
    require(rollout.temperature > 0, "rollout.temperature must be above 0: training explores")
    require(0 < rollout.top_p <= 1, f"rollout.top_p={rollout.top_p} must be in (0, 1]")
    require(rollout.top_k >= 0, f"rollout.top_k={rollout.top_k} must be 0 (off) or more")
    require(
        rollout.min_tokens <= rollout.max_tokens,
        f"rollout.min_tokens={rollout.min_tokens} is above max_tokens={rollout.max_tokens}",
    )
    check_algo(config)
    require(config.checkpoint.keep >= 1, f"checkpoint.keep={config.checkpoint.keep}: at least 1")
    require(
        data.prompts_per_step % algo.mini_batches == 0,
        f"data.prompts_per_step={data.prompts_per_step} does not divide into "
        f"algo.mini_batches={algo.mini_batches}; counts that do: {divisors(data.prompts_per_step)}",
    )
    check_roles(config, world)
    hf = load_hf_config(config.model)
    check_model(hf, config)


def check_finite(node: Any, where: str) -> None:
    """No number of the config is inf or nan: each would end as a loss that is not finite."""
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            check_finite(value, f"{where}{field.name}.")
        elif isinstance(value, float):
            require(math.isfinite(value), f"{where}{field.name}={value} is not a finite number")


def check_roles(config: PpoConfig, world: int) -> None:
    require(
        config.actor.model is None,
        f"actor.model={config.actor.model!r}: the actor trains the run's model, set `model`; "
        "only critic and ref may start from another one",
    )
    tp = config.rollout.tensor_parallel
    if config.rollout.engine == "hf":
        require(tp == 1, f"rollout.engine='hf' has no tensor parallelism: tensor_parallel={tp}")
    else:
        require(
            config.rollout.temperature >= 0.01,
            f"rollout.temperature={config.rollout.temperature}: vLLM would raise it to 0.01",
        )
        require(
            importlib.util.find_spec("vllm") is not None,
            "rollout.engine='vllm', but vLLM is not installed: docs/install.md, or use 'hf'",
        )
    try:
        engines = resolve_degrees({"dp": -1, "tp": tp}, world)["dp"]
    except ConfigError as error:
        raise ConfigError(f"rollout.tensor_parallel: {error}") from error
    require(
        config.data.prompts_per_step >= engines,
        f"data.prompts_per_step={config.data.prompts_per_step} is less than the {engines} rollout "
        f"engines ({world} ranks / tensor_parallel={tp}): some would have nothing to do",
    )
    for name, role in roles_of(config).items():
        check_training_role(name, role, world, updates_per_run(config))


def check_training_role(name: str, role: TrainConfig, world: int, updates: int) -> None:
    try:
        resolve_degrees(train_degrees(role.fsdp), world)
    except ConfigError as error:
        raise ConfigError(f"{name}.fsdp: {error}") from error
    require(role.micro_batch_tokens >= 2, f"{name}.micro_batch_tokens must be at least 2")
    optim = role.optim
    for field, value, fits in (
        ("lr", optim.lr, optim.lr >= 0),
        ("betas", optim.betas, len(optim.betas) == 2 and all(0 <= b < 1 for b in optim.betas)),
        ("warmup_steps", optim.warmup_steps, optim.warmup_steps >= 0),
    ):
        require(fits, f"{name}.optim.{field}={value} is out of range")
    require(
        optim.clip_norm > 0,
        f"{name}.optim.clip_norm={optim.clip_norm} would zero every gradient; "
        "for no clipping use a large number, e.g. 1e9",
    )
    require(
        optim.schedule == "constant" or optim.decay_steps > optim.warmup_steps,
        f"{name}.optim.schedule={optim.schedule!r} needs optim.decay_steps above "
        f"warmup_steps={optim.warmup_steps}, e.g. {updates}, the number of optimizer steps of "
        "this run",
    )


def check_sft(config: SftConfig, world: int) -> None:
    """Raises ConfigError, as `check` does for PpoConfig."""
    require(config.steps >= 1, f"steps={config.steps} must be at least 1")
    require(config.data.batch_size >= 1, f"data.batch_size={config.data.batch_size}: at least 1")
    require(config.actor.model is None, "actor.model: set `model`, which is what is trained")
    check_training_role("actor", config.actor, world, config.steps)
    load_hf_config(config.model)


def check_model(hf: PreTrainedConfig, config: PpoConfig) -> None:
    text, tp = hf.get_text_config(), config.rollout.tensor_parallel
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    limit = getattr(text, "max_position_embeddings", None)
    require(
        limit is None or longest <= limit,
        f"data.max_prompt_tokens={config.data.max_prompt_tokens} + rollout.max_tokens="
        f"{config.rollout.max_tokens} = {longest} tokens, but the model's "
        f"max_position_embeddings is {limit}",
    )
    check_layers(hf)
    for name, role in roles_of(config).items():
        if role.model is not None:
            other = load_hf_config(role.model)
            check_layers(other)
            vocab, theirs = text.vocab_size, other.get_text_config().vocab_size
            require(vocab == theirs, f"{name}.model has {theirs} tokens, the model {vocab}")
    heads = text.num_attention_heads
    require(
        heads % tp == 0,
        f"rollout.tensor_parallel={tp} does not divide the model's {heads} attention heads; "
        f"use one of {divisors(heads)}",
    )


def check_layers(hf: PreTrainedConfig) -> None:
    """Packed sequences are kept apart in attention alone: no other layer may mix tokens."""
    kinds = set(getattr(hf.get_text_config(), "layer_types", None) or ())
    other = sorted(kinds - {"full_attention", "sliding_attention"})
    require(
        not other and not getattr(hf, "is_stateful", False),
        f"model type {hf.model_type!r} has layers {other} that carry state from token to token; "
        "packed training supports full and sliding attention",
    )


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def roles_of(config: PpoConfig) -> dict[str, TrainConfig]:
    """The training roles of this run by name."""
    roles = {"actor": config.actor}
    if config.algo.kl_coef > 0 or config.prm is not None:
        roles["ref"] = config.ref
    if config.critic is not None:
        roles["critic"] = config.critic
    if config.prm is not None:
        roles["prm"] = config.prm
    return roles


def updates_per_run(config: PpoConfig) -> int:
    return config.steps * config.algo.epochs * config.algo.mini_batches


def describe(config: PpoConfig, world: int, num_prompts: int) -> str:
    """Batch arithmetic, placement, parameters and memory, as text."""
    d, r, a = config.data, config.rollout, config.algo
    samples = d.prompts_per_step * r.n
    longest = d.max_prompt_tokens + r.max_tokens
    engines = world // r.tensor_parallel
    per_update = samples // a.mini_batches
    lines = [
        "batch",
        f"  {d.prompts_per_step} prompts x {r.n} samples = {samples} samples a step, "
        f"at most {samples * r.max_tokens:,} response tokens",
        f"  {samples} / {a.mini_batches} mini-batches = {per_update} samples an update, "
        f"about {per_update / world:g} on each of {world} ranks; {a.epochs} epochs: "
        f"{a.epochs * a.mini_batches} updates a step, {updates_per_run(config)} in {config.steps}",
        f"  {num_prompts} prompts / {d.prompts_per_step} = {num_prompts // d.prompts_per_step} "
        f"steps an epoch: {config.steps * d.prompts_per_step / max(num_prompts, 1):.2f} epochs",
        f"  longest sequence {d.max_prompt_tokens} + {r.max_tokens} = {longest} tokens; "
        f"micro-batches of {config.actor.micro_batch_tokens} tokens",
        *algorithm_lines(config),
        "placement",
    ]
    for name, role in roles_of(config).items():
        fsdp = world if role.fsdp == -1 else role.fsdp
        lines.append(f"  {name:8} ranks 0-{world - 1}: dp {world // fsdp} x fsdp {fsdp}")
    lines.append(f"  rollout  ranks 0-{world - 1}: {engines} {r.engine} engines x tp "
                 f"{r.tensor_parallel}")  # fmt: skip
    return "\n".join(lines + memory_lines(config, world))


def algorithm_lines(config: PpoConfig) -> list[str]:
    """What the names resolve to, and which passes they cost."""
    algo, estimator = config.algo, estimator_of(config.algo)
    over = "all unmasked tokens of the step" if estimator.whiten else "nothing"
    old = "a pass of the actor" if needs_old_logprobs(algo) else "those of the update's own pass"
    if algo.correction.bypass:
        old = "those of the rollout engine (bypass)"
    extra = {
        "a greedy answer per prompt": config.rollout.greedy_baseline,
        f"up to {algo.dynamic_sampling} rounds of sampling": algo.dynamic_sampling > 0,
        f"samples of {algo.replay_steps} earlier steps": algo.replay_steps > 0,
        f"samples drawn by {algo.sample_filter!r}": algo.sample_filter is not None,
        "rollout correction of each " + algo.correction.level: algo.correction.level != "off",
        f"rejection by {', '.join(algo.correction.reject)}": bool(algo.correction.reject),
    }
    return [
        "algorithm",
        f"  advantage {shown(algo.advantage)}, whitened over {over}; policy loss "
        f"{shown(algo.policy_loss)}, aggregation {shown(aggregation_of(algo))}",
        f"  old logprobs: {old}",
        *[f"  {text}" for text, is_on in extra.items() if is_on],
    ]


def memory_lines(config: PpoConfig, world: int) -> list[str]:
    """Estimate for one rank, GiB. Activations: 34 bytes per token, layer and hidden unit in half
    precision (Korthikanti 2022, arXiv 2205.05198, without its attention term), 2 if checkpointed.
    """
    lines = ["parameters and memory per rank (estimate)"]
    total = 0.0
    for name, role in roles_of(config).items():
        hf = load_hf_config(role.model or config.model)
        count, text = parameter_count(hf), hf.get_text_config()
        fsdp = world if role.fsdp == -1 else role.fsdp
        trained = name != "ref"
        state = count * (16 if trained else 4) / fsdp / GIB  # float32 weight, gradient, two moments
        width = 1 if role.dtype == "bfloat16" else 2
        per_unit = (2 if role.activation_checkpointing or not trained else 34) * width
        tokens = role.micro_batch_tokens
        activations = tokens * text.num_hidden_layers * text.hidden_size * per_unit / GIB
        total += state + activations
        lines.append(f"  {name:8} {count / 1e6:,.1f}M parameters; weights, gradients, Adam "
                     f"{state:.2f} GiB, activations {activations:.2f} GiB")  # fmt: skip
    count = parameter_count(load_hf_config(config.model))
    weights = count * DTYPES[config.rollout.dtype].itemsize / config.rollout.tensor_parallel / GIB
    cache = config.rollout.kv_cache_mib / 1024
    lines.append(f"  rollout  weights {weights:.2f} GiB, KV cache {cache:.2f} GiB (CPU; on a GPU "
                 f"up to {config.rollout.gpu_memory_utilization:.0%} of its memory)")  # fmt: skip
    lines.append(f"  sync     at most {config.weights.bucket_mib / 1024:.2f} GiB while gathering")
    lines.append(f"  sum      {total + weights + cache + config.weights.bucket_mib / 1024:.2f} GiB")
    return lines


def parameter_count(hf: PreTrainedConfig) -> int:
    """Counts on the meta device: no memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf)
    model.tie_weights()
    return sum(prod(p.shape) for p in model.parameters())
