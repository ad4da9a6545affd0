"""What can be known before anything is built: is the config sound, what will it need.

`check` raises ConfigError with the value, the place and the remedy; `describe` is --dry-run's text.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from spmdrl.algo.advantages import estimator_of
from spmdrl.algo.checks import check_algo, require, shown, weighs_the_engine
from spmdrl.algo.losses import aggregation_of
from spmdrl.algo.objectives import needs_old_logprobs
from spmdrl.bounds import check_bounds
from spmdrl.config import CheckpointConfig, ConfigError, PpoConfig, SftConfig, TrainConfig
from spmdrl.engines.fsdp import DTYPES
from spmdrl.engines.lora import adapter_count, check_lora
from spmdrl.engines.megatron_layout import check_layout, expert_width, moe_layers, num_experts
from spmdrl.engines.megatron_parts import degrees_of
from spmdrl.engines.models import load_hf_config
from spmdrl.engines.optimizers import LABELS, check_optimizer, state_bytes
from spmdrl.engines.ulysses import check_ulysses
from spmdrl.placement import (
    Placement,
    Ranks,
    place,
    reference_is_base,
    show_ranks,
    training_roles,
)
from spmdrl.remote_code import allow_code, has_foreign_code
from spmdrl.rollout.vllm_fp8 import check_fp8
from spmdrl.rollout.vllm_lora import check_adapter_mode
from spmdrl.strict import check_strict
from spmdrl.topology import resolve_degrees, train_degrees
from spmdrl.weights.names import checkpoint_parts

GIB = 2**30
# per token, layer and hidden unit in half precision, by TrainConfig.activation_checkpointing;
# kernels/bench/activations.py measures their ratios
KEPT_BYTES = {False: 34, "selective": 20, True: 2}
MAX_RANKS = 2**20


def check(config: PpoConfig, world: int, hosted: bool = False) -> None:
    """Raises ConfigError; needs no process group, no weights and no data.

    hosted: the actor's layout stands already, in another program.
    """
    data, rollout, algo = config.data, config.rollout, config.algo
    check_bounds(config)
    check_world(world)
    check_places(config)
    require(
        rollout.min_tokens <= rollout.max_tokens,
        f"rollout.min_tokens={rollout.min_tokens} is above max_tokens={rollout.max_tokens}",
    )
    check_algo(config)
    check_checkpoint(config.checkpoint)
    metric = config.checkpoint.best_metric
    require(
        not config.checkpoint.keep_best
        or not metric.startswith("eval/")
        or (data.eval is not None and config.eval_every > 0),
        f"checkpoint.keep_best={config.checkpoint.keep_best} goes by best_metric={metric!r}, but "
        "nothing is evaluated while the run goes on: set data.eval and eval_every, or choose "
        "another metric, e.g. best_metric='reward/mean'",
    )
    require(
        data.prompts_per_step % algo.mini_batches == 0,
        f"data.prompts_per_step={data.prompts_per_step} does not divide into "
        f"algo.mini_batches={algo.mini_batches}; counts that do: {divisors(data.prompts_per_step)}",
    )
    check_roles(config, world)
    if config.trust_remote_code:
        roles = training_roles(config).values()
        for model in dict.fromkeys([config.model, *(role.model or config.model for role in roles)]):
            allow_code(model)
    hf = load_hf_config(config.model)
    check_model(hf, config)
    check_strict(config, hf, hosted)
    placement = place(config, world)
    for name, role in training_roles(config).items():
        if role.engine == "megatron" and not (hosted and name == "actor"):
            check_megatron(name, role, role.model or config.model, len(placement.roles[name]))
        check_sharing(name, role, role.model or config.model)
    check_adapters(config, placement, hf)


def check_adapters(config: PpoConfig, placement: Placement, hf: PreTrainedConfig) -> None:
    """Raises ConfigError where lora of a role does not go with the rest."""
    for name, role in training_roles(config).items():
        require(
            name != "ref" or role.lora is None,
            "ref.lora has no effect: the reference is not trained. With actor.lora it is the "
            "actor's base, its adapter off",
        )
        check_lora(name, role, load_hf_config(role.model) if role.model else hf)
    if config.weights.lora == "adapter":
        check_adapter_mode(config.actor.lora, config.rollout, hf.get_text_config())
    if reference_is_base(config, placement):
        for field in dataclasses.fields(TrainConfig):
            value = getattr(config.ref, field.name)
            require(
                field.name == "model"
                or value in (getattr(TrainConfig(), field.name), getattr(config.actor, field.name)),
                f"ref.{field.name}={value!r} has no effect: with actor.lora the reference is the "
                "actor's base with its adapter off, computed as the actor is. Leave it out, or "
                "place ref on other ranks, where it is loaded by itself",
            )


def check_sharing(name: str, role: TrainConfig, model: str) -> None:
    try:
        check_ulysses(load_hf_config(model), role.ulysses)
    except ConfigError as error:
        raise ConfigError(f"{name}.{error}") from error


def check_checkpoint(config: CheckpointConfig) -> None:
    require(config.every_steps >= 0, f"checkpoint.every_steps={config.every_steps}: 0 or more")
    require(config.keep >= 1, f"checkpoint.keep={config.keep}: at least 1")
    require(config.keep_best >= 0, f"checkpoint.keep_best={config.keep_best}: 0 (off) or more")
    require(
        config.every_steps > 0 or not config.keep_best,
        f"checkpoint.keep_best={config.keep_best} has no effect: every_steps=0 saves nothing",
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
    try:
        check_layout(hf, degrees_of(role), num_ranks)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def check_world(world: int) -> None:
    require(1 <= world <= MAX_RANKS, f"{world} ranks: a run has 1 to {MAX_RANKS:,}")


def check_places(config: PpoConfig | SftConfig) -> None:
    """Paths and names that nothing can be at."""
    places = {"model": config.model, "run_dir": config.run_dir}
    if isinstance(config, SftConfig):
        places |= {"out": config.out, "data.prompt_key": config.data.prompt_key,
                   "data.response_key": config.data.response_key}  # fmt: skip
    for name, text in places.items():
        require(bool(text.strip()) and "\0" not in text, f"{name}={text!r} is no name")
    for name in ("run_dir", "out"):
        require(
            name not in places or not Path(places[name]).is_file(),
            f"{name}={places.get(name)!r} is a file; name a folder",
        )
    for key in ("tokenize", "add_generation_prompt"):
        require(
            key not in config.data.chat_template_kwargs,
            f"data.chat_template_kwargs: {key!r} is not yours to set, a prompt needs it as it is",
        )


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
    placement = place(config, world)
    here = placement.roles["rollout"]
    try:
        engines = resolve_degrees({"dp": -1, "tp": tp}, len(here))["dp"]
    except ConfigError as error:
        raise ConfigError(
            f"rollout.tensor_parallel on ranks {show_ranks(here)}: {error}"
        ) from error
    samples = config.data.prompts_per_step * config.rollout.n
    require(
        samples >= engines,
        f"data.prompts_per_step={config.data.prompts_per_step} x rollout.n={config.rollout.n} = "
        f"{samples} samples are fewer than the {engines} rollout engines ({len(here)} ranks / "
        f"tensor_parallel={tp}): some would have nothing to do",
    )
    for name, role in training_roles(config).items():
        check_training_role(name, role, placement.roles[name], updates_per_run(config))
    check_schedule(config, placement)


def check_schedule(config: PpoConfig, placement: Placement) -> None:
    """What over-sampling and sampling ahead ask of the rest."""
    rollout, algo = config.rollout, config.algo
    require(config.async_steps >= 0, f"async_steps={config.async_steps} must be 0 or more")
    require(rollout.oversample >= 1, f"rollout.oversample={rollout.oversample} must be at least 1")
    both = sorted(set(placement.sampling) & set(placement.training))
    require(
        config.async_steps == 0 or not both,
        f"async_steps={config.async_steps} samples while it trains, so no rank can do both: ranks "
        f"{show_ranks(tuple(both))} are to. With 8 ranks e.g. placement={{'actor': '0-3', "
        "'rollout': '4-7'}",
    )
    for name, is_on in (("algo.dynamic_sampling", algo.dynamic_sampling > 0),
                        ("rollout.greedy_baseline", rollout.greedy_baseline),
                        ("async_steps", config.async_steps > 0)):  # fmt: skip
        require(
            rollout.oversample == 1 or not is_on,
            f"rollout.oversample={rollout.oversample} does not go with {name}: both decide what "
            "a step asks and what weights answer; choose one",
        )
    require(
        rollout.oversample == 1 or placement.roles["reward"] == placement.roles["rollout"],
        f"rollout.oversample={rollout.oversample} keeps answers where they were made: leave "
        "'reward' out of placement",
    )
    stale = {"async_steps": config.async_steps, "rollout.oversample": rollout.oversample - 1}
    for name, value in stale.items():
        require(
            not value or weighs_the_engine(algo),
            f"{name} trains on tokens of older weights: set algo.correction=CorrectionConfig("
            "level='token') to weigh for it, or CorrectionConfig(bypass=True), which makes the "
            "loss's ratio that to the policy that sampled",
        )


# what only one engine reads, and what it is where nobody sets it
LAYOUT: dict[str, dict[str, Any]] = {
    "fsdp": {
        "fsdp": -1, "ulysses": 1, "kernels": "spmdrl", "attention": "auto", "compile": False,
        "activation_offload": False, "ema": 0.0,
    },
    "megatron": {
        "tensor_parallel": 1, "sequence_parallel": False, "pipeline_parallel": 1,
        "virtual_pipeline": 1, "context_parallel": 1, "expert_parallel": 1,
        "expert_tensor_parallel": 1,
    },
}  # fmt: skip


def check_training_role(name: str, role: TrainConfig, ranks: Ranks, updates: int) -> None:
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
    try:
        resolve_degrees(train_degrees(role), len(ranks))
    except ConfigError as error:
        raise ConfigError(f"{name}.{what} on ranks {show_ranks(ranks)}: {error}") from error
    optim = role.optim
    check_optimizer(name, role)
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
        optim.schedule == "constant" or optim.decay_steps > optim.warmup_steps,
        f"{name}.optim.schedule={optim.schedule!r} needs optim.decay_steps above "
        f"warmup_steps={optim.warmup_steps}, e.g. {updates}, the number of optimizer steps of "
        "this run",
    )


def check_sft(config: SftConfig, world: int) -> None:
    """Raises ConfigError, as `check` does for PpoConfig."""
    check_bounds(config)
    check_world(world)
    check_places(config)
    require(config.actor.model is None, "actor.model: set `model`, which is what is trained")
    check_checkpoint(config.checkpoint)
    metric = config.checkpoint.best_metric
    require(
        not config.checkpoint.keep_best or metric.startswith("sft/"),
        f"checkpoint.keep_best goes by best_metric={metric!r}, which fine-tuning has not: use e.g. "
        "best_metric='sft/loss' with best_is='smallest'",
    )
    check_training_role("actor", config.actor, tuple(range(world)), config.steps)
    if config.trust_remote_code:
        allow_code(config.model)
    check_layers(load_hf_config(config.model))
    check_sharing("actor", config.actor, config.model)
    check_lora("actor", config.actor, load_hf_config(config.model))
    if config.actor.engine == "megatron":
        check_megatron("actor", config.actor, config.model, world)


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
    require("" not in config.rollout.stop, "rollout.stop has an empty string: every answer has it")
    unknown = [t for t in config.rollout.stop_token_ids if t >= text.vocab_size]
    require(
        not unknown,
        f"rollout.stop_token_ids: the model has {text.vocab_size} tokens, but not {unknown}",
    )
    if config.rollout.quantization is not None:
        check_fp8(text, config.rollout)
    for name, role in training_roles(config).items():
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


def updates_per_run(config: PpoConfig) -> int:
    return config.steps * config.algo.epochs * config.algo.mini_batches


def describe(config: PpoConfig, world: int, num_prompts: int) -> str:
    """Batch arithmetic, placement, parameters and memory, as text."""
    d, r, a = config.data, config.rollout, config.algo
    samples = d.prompts_per_step * r.n
    longest = d.max_prompt_tokens + r.max_tokens
    sharing = sharing_ranks(config.actor)
    actors = len(place(config, world).roles["actor"]) // sharing
    holders = "ranks" if sharing == 1 else f"groups of {sharing} ranks"
    budget = config.actor.micro_batch_tokens * config.actor.context_parallel * config.actor.ulysses
    per_update = samples // a.mini_batches
    lines = [
        "batch",
        f"  {d.prompts_per_step} prompts x {r.n} samples = {samples} samples a step, "
        f"at most {samples * r.max_tokens:,} response tokens",
        f"  {samples} / {a.mini_batches} mini-batches = {per_update} samples an update, "
        f"about {per_update / actors:g} on each of {actors} {holders}; {a.epochs} epochs: "
        f"{a.epochs * a.mini_batches} updates a step, {updates_per_run(config)} in {config.steps}",
        f"  {num_prompts} prompts / {d.prompts_per_step} = {num_prompts // d.prompts_per_step} "
        f"steps an epoch: {config.steps * d.prompts_per_step / max(num_prompts, 1):.2f} epochs",
        f"  longest sequence {d.max_prompt_tokens} + {r.max_tokens} = {longest} tokens; "
        f"micro-batches of {budget} tokens",
        *algorithm_lines(config),
        *placement_lines(config, world),
    ]
    return "\n".join(lines + memory_lines(config, world))


def sharing_ranks(role: TrainConfig) -> int:
    """How many ranks work on the same sequences."""
    megatron = role.tensor_parallel * role.pipeline_parallel * role.context_parallel
    return role.ulysses if role.engine == "fsdp" else megatron


def placement_lines(config: PpoConfig, world: int) -> list[str]:
    roles, rollout = place(config, world).roles, config.rollout
    lines = ["placement"]
    for name, role in training_roles(config).items():
        degrees = resolve_degrees(train_degrees(role), len(roles[name]))
        layout = " x ".join(f"{axis} {size}" for axis, size in degrees.items())
        if role.engine == "megatron":
            layout = f"megatron, {layout}" + "".join(
                f", {label} {getattr(role, field)}"
                for label, field in (("sequence parallel", "sequence_parallel"),
                                     ("chunks per stage", "virtual_pipeline"),
                                     ("experts over", "expert_parallel"),
                                     ("each over", "expert_tensor_parallel"))
                if getattr(role, field) is True or getattr(role, field) > 1
            )  # fmt: skip
        lines.append(f"  {name:8} ranks {show_ranks(roles[name])}: {layout}")
    engines = len(roles["rollout"]) // rollout.tensor_parallel
    lines.append(f"  rollout  ranks {show_ranks(roles['rollout'])}: {engines} {rollout.engine} "
                 f"engines x tp {rollout.tensor_parallel}")  # fmt: skip
    lines.append(f"  reward   ranks {show_ranks(roles['reward'])}: {config.rewards.workers} "
                 "processes each")  # fmt: skip
    if config.async_steps:
        lines.append(f"  sampling runs up to {config.async_steps} steps ahead of training; both "
                     "meet where the run evaluates or saves")  # fmt: skip
    return lines


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


@dataclass(frozen=True)
class Memory:
    """GiB that a training role takes on each of its ranks."""

    parameters: int
    trainable: int
    weights: float  # float32; of megatron, and of a base with adapters, in the role's dtype
    gradients: float  # float32
    adam: float  # what the optimizer keeps, and megatron's float32 weights beside others
    activations: float
    config: TrainConfig
    average: float = 0.0  # of the weights, float32; goes where the optimizer goes

    @property
    def idle(self) -> float:
        """What stays on the device while the role has nothing to do."""
        kept = 0.0 if self.config.offload_params else self.weights
        return kept + (0.0 if self.config.offload_optimizer else self.adam + self.average)

    @property
    def saved(self) -> float:
        return self.weights + self.adam + self.average

    @property
    def busy(self) -> float:
        return self.weights + self.gradients + self.adam + self.average + self.activations


def memory_of(name: str, role: TrainConfig, model: str, num_ranks: int) -> Memory:
    """Activations: 34 bytes per token, layer and hidden unit in half precision (Korthikanti 2022,
    arXiv 2205.05198, without its attention term), less if checkpointed; of one layer if
    offloaded."""
    hf = load_hf_config(role.model or model)
    count, text = parameter_count(hf), hf.get_text_config()
    trained = name != "ref"
    width = 1 if role.dtype == "bfloat16" else 2
    per_unit = KEPT_BYTES[role.activation_checkpointing if trained else True] * width
    units = role.micro_batch_tokens * text.num_hidden_layers * text.hidden_size
    if role.activation_offload and trained:
        units, per_unit = units // text.num_hidden_layers, KEPT_BYTES[False] * width
    activations = units * per_unit / GIB
    if role.engine == "fsdp":
        sharers = num_ranks if role.fsdp == -1 else role.fsdp
        one = count * 4 / sharers / GIB
        if role.lora is not None and trained:
            return memory_of_adapters(name, role, hf, count, sharers, activations)
        parts = checkpoint_parts(hf) if role.optim.name == "muon" else {}
        adam = state_bytes(meta_model(hf), parts, role.optim.name) / sharers / GIB
        average = one if role.ema else 0.0
        return Memory(
            count,
            count * trained,
            one,
            one * trained,
            adam * trained,
            activations,
            role,
            average * trained,
        )
    cuts = role.tensor_parallel * role.pipeline_parallel
    held = (count - expert_count(hf)) / cuts  # parameters on a rank
    held += expert_count(hf) / (
        role.expert_parallel * role.expert_tensor_parallel * role.pipeline_parallel
    )
    one, shares = held * 4 / GIB, num_ranks / cuts
    states = 2 if role.dtype == "float32" else 3
    return Memory(
        count, count * trained, one * width / 2, one * trained, states * one / shares * trained,
        activations / (cuts if role.sequence_parallel else role.pipeline_parallel), role,
    )  # fmt: skip


def memory_lines(config: PpoConfig, world: int) -> list[str]:
    """Estimate for the fullest rank, GiB, and what leaves the device when."""
    placement = place(config, world)
    roles = {
        name: memory_of(name, role, config.model, len(placement.roles[name]))
        for name, role in training_roles(config).items()
    }
    shared = reference_is_base(config, placement)
    if shared:
        saved = roles.pop("ref").weights
    lines = ["parameters and memory of a rank (estimate, GiB)"]
    for name, m in roles.items():
        label = LABELS[m.config.optim.name]
        leaves = [word for word, is_on in (("weights", m.config.offload_params),
                                           (label, m.config.offload_optimizer))
                  if is_on]  # fmt: skip
        average = f" and average {m.average:.2f}" if m.average else ""
        away = f"; {' and '.join(leaves)} on the host while idle" if leaves else ""
        only = (
            "" if m.config.lora is None else f", {m.trainable / 1e6:,.3f}M of them trained (lora)"
        )
        lines.append(
            f"  {name:8} {m.parameters / 1e6:,.1f}M parameters{only}; weights {m.weights:.2f}, "
            f"gradients {m.gradients:.2f}, {label} {m.adam:.2f}{average}, activations "
            f"{m.activations:.2f}{away}"
        )
    if shared:
        lines.append("  ref      the actor's weights with its adapter off: saves "
                     f"{saved:.2f} of weights of its own")  # fmt: skip
    lines += copy_lines(config, roles, placement)
    count = parameter_count(load_hf_config(config.model))
    weights = count * DTYPES[config.rollout.dtype].itemsize / config.rollout.tensor_parallel / GIB
    cache = config.rollout.kv_cache_mib / 1024
    sleeps = config.rollout.sleep and set(placement.roles["rollout"]) & set(placement.training)
    asleep = "given back while training" if sleeps else "kept while training"
    share = f"{config.rollout.gpu_memory_utilization:.0%}"
    lines.append(f"  rollout  weights {weights:.2f}, KV cache {cache:.2f} (CPU; on a GPU up "
                 f"to {share} of its memory); {asleep}")  # fmt: skip
    bucket = config.weights.bucket_mib / 1024
    lines.append(f"  sync     at most {bucket:.2f} beside the weights, while they are sent")
    if config.actor.lora is not None:
        sent = {"merge": "with its adapter in them: every weight at each push",
                "adapter": "once; then the adapter alone"}  # fmt: skip
        lines.append(f"           the base's weights go {sent[config.weights.lora]}")
    peaks = []
    for rank in range(world):
        mine = [m for name, m in roles.items() if rank in placement.roles[name]]
        samples = rank in placement.roles["rollout"]
        engine = weights + cache if samples else 0.0
        idle = sum(m.idle for m in mine)
        while_training = max((m.busy - m.idle for m in mine), default=0.0)
        while_training += (weights if sleeps else engine) * samples
        peaks.append((idle + max(while_training, engine + bucket), rank))
    most, rank = max(peaks, key=lambda peak: peak[0])
    lines.append(f"  peak     {most:.2f} on rank {rank}, the fullest")
    return lines


def memory_of_adapters(
    name: str, role: TrainConfig, hf: PreTrainedConfig, count: int, sharers: int, activations: float
) -> Memory:
    """count: parameters of the base, which is held in the role's dtype; the rest is float32."""
    assert role.lora is not None
    learnt = adapter_count(hf, role.lora)
    learnt += (hf.get_text_config().hidden_size + 1) * (name == "critic")  # of its head
    adapters = learnt * 4 / sharers / GIB
    base = count * DTYPES[role.dtype].itemsize / sharers / GIB
    moments = 2 * adapters * (0.27 if role.optim.name == "adamw8bit" else 1)  # codes and scales
    return Memory(
        count + learnt, learnt, base + adapters, adapters, moments, activations, role,
        adapters if role.ema else 0.0,
    )  # fmt: skip


def copy_lines(
    config: PpoConfig, roles: dict[str, Memory], placement: Placement
) -> list[str]:  # fmt: skip
    """What a checkpoint that is written meanwhile takes of the host's memory."""
    saved = {name: m for name, m in roles.items() if name != "ref"}
    if config.checkpoint.every_steps == 0 or config.checkpoint.blocking:
        return []
    ranks = {rank for name in saved for rank in placement.roles[name]}
    most = max(
        sum(m.saved for name, m in saved.items() if rank in placement.roles[name]) for rank in ranks
    )
    return [f"  checkpoint copy on the host {most:.2f}, kept from the first save on (none with "
            "checkpoint.blocking)"]  # fmt: skip


def expert_count(hf: PreTrainedConfig) -> int:
    """Parameters of all routed experts."""
    if not any(moe_layers(hf)):
        return 0
    one = 3 * hf.get_text_config().hidden_size * expert_width(hf)
    return sum(moe_layers(hf)) * num_experts(hf) * one


def parameter_count(hf: PreTrainedConfig) -> int:
    return sum(prod(p.shape) for p in meta_model(hf).parameters())


def meta_model(hf: PreTrainedConfig) -> PreTrainedModel:
    """Shapes without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf)
    model.tie_weights()
    return model
