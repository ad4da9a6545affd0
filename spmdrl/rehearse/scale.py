"""Scales a config down to a rehearsal: which fields change, to what, and why.

What the run is made of stays: data, template, rewards, tools, agents, algorithm, which roles have
ranks of their own, and which kinds of parallelism the roles use. Sizes become small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from spmdrl.cli.arguments import entry_of, override
from spmdrl.cli.paths import model_fields
from spmdrl.config import KeepSamplesConfig, PpoConfig, TrainConfig
from spmdrl.config.words import counted
from spmdrl.distributed.placement import Ranks, place, show_ranks, training_roles
from spmdrl.rollout.build import ENGINES, HF

STEPS = 2  # of the first run; a second one resumes from its checkpoint and does one more
PROMPTS, SAMPLES, EVAL_PROMPTS = 4, 8, 4  # of a step, of a prompt, of an evaluation
TOKENS = 64  # of an answer; TURN_TOKENS of a sample with several turns
TURN_TOKENS = 256
KV_CACHE_MIB = 64
HOSTED = {  # settings of trackers' packages, by which nothing leaves this machine
    "WANDB_MODE": "offline", "SWANLAB_MODE": "offline",
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """A field of the config that is another in the rehearsal."""

    field: str  # by its dotted key
    before: Any
    value: Any
    reason: str

    def line(self) -> str:
        return f"{self.field}: {self.before!r} -> {self.value!r} ({self.reason})"


@dataclass
class Scaled:
    """A config that is being scaled down."""

    config: PpoConfig
    changes: list[Change] = field(default_factory=list)

    def set(self, key: str, value: Any, reason: str) -> None:
        """Sets a field by its dotted key; one that has the value already is left out."""
        before = value_at(self.config, key)
        if before != value:
            self.config = override(self.config, key, value)
            self.changes.append(Change(key, before, value, reason))

    def lower(self, key: str, most: int, reason: str) -> None:
        if value_at(self.config, key) > most:
            self.set(key, most, reason)

    def options(self) -> dict[str, Any]:
        """Returns the changed fields with their values."""
        return {change.field: change.value for change in self.changes}


def value_at(config: Any, key: str) -> Any:
    names = key.split(".")
    while names:
        if isinstance(config, Mapping):
            group, names = entry_of(config, names)
            config = config[group]
        else:
            config, names = getattr(config, names[0]), names[1:]
    return config


def scale(
    config: PpoConfig, world: int, ranks: int, models: Mapping[str, str], run_dir: str,
    on_gpu: bool,
) -> tuple[Scaled, int]:  # fmt: skip
    """Returns the config of the rehearsal, and on how many ranks it runs.

    world: ranks of the real run. ranks: wanted here; at least one for each set of ranks that the
    placement tells apart. models: tiny ones, by the dotted key of the field that names the model.
    """
    scaled = Scaled(config)
    for key, folder in models.items():
        scaled.set(key, folder, "a tiny random model of the same family")
    scaled.set("run_dir", run_dir, "the rehearsal's own folder")
    roles, here = scale_placement(scaled, world, ranks)
    for name, role in training_roles(config).items():
        before = len(place(config, world).roles[name])
        scale_role(scaled, name, role, before, len(roles[name]))
    scale_rollout(scaled, roles, on_gpu)
    scale_judge(scaled, roles)
    scale_images(scaled)
    scale_batch(scaled, len(roles["rollout"]) // value_at(scaled.config, "rollout.tensor_parallel"))
    scale_length(scaled)
    if not on_gpu:
        for_cpu(scaled)
    return scaled, here


# ---- who is where


def scale_placement(scaled: Scaled, world: int, ranks: int) -> tuple[dict[str, Ranks], int]:
    """Gives each set of ranks that has roles of its own equally many; returns the ranks of each
    role, and how many there are.
    """
    roles = place(scaled.config, world).roles
    kinds = {rank: frozenset(n for n, r in roles.items() if rank in r) for rank in range(world)}
    order = [*dict.fromkeys(kinds.values())]
    each = max(1, ranks // len(order))
    found = {
        name: tuple(
            rank for place_, kind in enumerate(order) if name in kind
            for rank in range(place_ * each, (place_ + 1) * each)
        )
        for name in roles
    }  # fmt: skip
    if scaled.config.placement:
        small = {name: show_ranks(found[name]) for name in scaled.config.placement}
        scaled.set("placement", small, f"{counted(world, 'rank')} -> {each * len(order)}")
    return found, each * len(order)


def scale_role(scaled: Scaled, name: str, role: TrainConfig, before: int, count: int) -> None:
    """Makes the degrees of a role fit `count` ranks; in the real run it has `before`."""
    reason = f"{name} has {count} of {counted(before, 'rank')}"
    left = count
    if role.engine == "fsdp":
        ulysses = take_half(role.ulysses, left)
        experts = take_half(role.expert_parallel, left // ulysses)
        scaled.set(f"{name}.ulysses", ulysses, reason)
        scaled.set(f"{name}.expert_parallel", experts, reason)
        if role.fsdp > 1:
            copies = role.fsdp < before and count > 1 and ulysses == experts == 1
            scaled.set(f"{name}.fsdp", count // 2 if copies else -1, reason)
        return
    for degree in ("tensor_parallel", "pipeline_parallel", "context_parallel"):
        here = take_half(getattr(role, degree), left)
        scaled.set(f"{name}.{degree}", here, reason)
        left //= here
    scaled.set(f"{name}.expert_parallel", take_half(role.expert_parallel, left), reason)
    scaled.set(f"{name}.expert_tensor_parallel", 1, reason)
    small = "a tiny model has few layers"
    scaled.set(f"{name}.virtual_pipeline", 1, small)
    for stage in ("first", "last"):
        scaled.set(f"{name}.num_layers_in_{stage}_pipeline_stage", None, small)
    if value_at(scaled.config, f"{name}.tensor_parallel") == 1:
        scaled.set(f"{name}.sequence_parallel", False, "without tensor_parallel")


def take_half(degree: int, ranks: int) -> int:
    """Returns 2 where a degree is above 1 and divides the ranks by 2; else 1."""
    return 2 if degree > 1 and ranks % 2 == 0 else 1


# ---- how much


def scale_rollout(scaled: Scaled, roles: Mapping[str, Ranks], on_gpu: bool) -> None:
    config = scaled.config
    for key, value, reason in replaced_engines(config, on_gpu):
        scaled.set(key, value, reason)
    if "model" in config.rollout.speculative:
        scaled.set("rollout.speculative", {}, "its draft model is not made tiny")
    tp = take_half(value_at(scaled.config, "rollout.tensor_parallel"), len(roles["rollout"]))
    scaled.set(
        "rollout.tensor_parallel", tp, f"rollout has {counted(len(roles['rollout']), 'rank')}"
    )
    if tp == 1:
        scaled.set("rollout.expert_parallel", False, "without tensor_parallel")
    several = config.tools or config.environment or config.agent
    # of demonstrations, which nobody samples, those that are longer would be left out
    tokens = TURN_TOKENS if several or config.algo.demonstrations else TOKENS
    scaled.lower("rollout.n", SAMPLES, "small")
    scaled.lower("algo.demonstrations", SAMPLES - 1, "small")
    scaled.lower("rollout.max_tokens", tokens, "small")
    scaled.lower("rollout.min_tokens", value_at(scaled.config, "rollout.max_tokens"), "small")
    scaled.lower("rollout.max_num_seqs", 32, "small")


def replaced_engines(config: PpoConfig, on_gpu: bool) -> Iterator[tuple[str, Any, str]]:
    """Yields the fields by which transformers takes the place of an engine that does not run here,
    with their values and the reason.
    """
    rollout, judge = config.rollout, config.judge
    if not can_run(rollout.engine, on_gpu):
        yield "rollout.engine", HF.name, f"{ENGINES[rollout.engine].title} does not run here"
        for key, value in (
            ("rollout.tensor_parallel", 1), ("rollout.expert_parallel", False),
            ("rollout.enforce_eager", "auto"), ("rollout.engine_args", {}),
            ("rollout.quantization", None), ("rollout.speculative", {}), ("weights.lora", "merge"),
        ):  # fmt: skip
            yield key, value, "of the other engine"
        if config.actor.lora is not None:
            yield "actor.lora.by_source", {}, "of the other engine"
            if config.actor.lora.by_source and config.actor.lora.adapter is not None:
                yield "actor.lora.adapter", None, "of several adapters, which the other engine has"
    if judge is not None and not can_run(judge.engine or rollout.engine, on_gpu):
        title = ENGINES[judge.engine or rollout.engine].title
        yield "judge.engine", HF.name, f"{title} does not run here"
        yield "judge.tensor_parallel", 1, "of the other engine"
        yield "judge.engine_args", {}, "of the other engine"


def scale_judge(scaled: Scaled, roles: Mapping[str, Ranks]) -> None:
    judge, rollout = scaled.config.judge, scaled.config.rollout
    if judge is None:
        return
    count = len(roles["reward"])
    degree = take_half(judge.tensor_parallel, count)
    scaled.set("judge.tensor_parallel", degree, f"reward has {counted(count, 'rank')}")
    scaled.lower("judge.max_tokens", TOKENS, "small")
    others = rollout.n - 1 + rollout.greedy_baseline
    scaled.lower("judge.opponents", others, f"an answer has {others} others in its group")


def scale_images(scaled: Scaled) -> None:
    """Makes images small that replies show, where one would not fit into an answer."""
    config = scaled.config
    answer = config.rollout.max_tokens
    for section, limits, room in (
        ("multi_turn", config.multi_turn, answer),
        ("agents", config.agents, config.data.max_prompt_tokens + answer),
    ):
        if limits.max_images and limits.max_image_tokens >= room:
            scaled.set(f"{section}.max_image_tokens", room // 2, f"there is room for {room} tokens")


def can_run(engine: str, on_gpu: bool) -> bool:
    spec = ENGINES[engine]
    return find_spec(spec.library) is not None and (on_gpu or spec.runs_on_cpus)


def scale_batch(scaled: Scaled, engines: int) -> None:
    """engines: that sample; each gets a sample at least."""
    algo, data = scaled.config.algo, scaled.config.data
    prompts = max(PROMPTS, -(-engines // (2 * scaled.config.rollout.n)) * 2)
    scaled.lower("data.prompts_per_step", prompts, "small")
    if scaled.config.data.prompts_per_step % 2 == 0:  # an odd number is small already
        scaled.lower("algo.mini_batches", 2, "small")
    scaled.lower("algo.epochs", 2, "small")
    scaled.lower("algo.dynamic_sampling", 2, "small")
    scaled.lower("algo.critic_warmup_steps", 1, "small")
    scaled.lower("algo.replay_steps", 1, "small")
    if algo.overlong_buffer:
        half = value_at(scaled.config, "rollout.max_tokens") // 2
        scaled.lower("algo.overlong_buffer", half, "half of an answer")
    scaled.set("rewards.max_invalid_fraction", 1.0, "random answers may have no reward")
    if data.eval is not None:
        most = min(data.max_eval_prompts or EVAL_PROMPTS, EVAL_PROMPTS)
        scaled.set("data.max_eval_prompts", most, "small")
        scaled.set("eval_every", STEPS, "an evaluation before and behind the steps")
        if scaled.config.eval_samples > 2:
            scaled.set("eval_samples", 2, "small")


def scale_length(scaled: Scaled) -> None:
    scaled.set("epochs", 0.0, "steps are counted")
    scaled.set("steps", STEPS, "small")
    scaled.set("checkpoint.every_steps", STEPS, "to resume from")
    scaled.set("checkpoint.in_memory_every_steps", None, "no host is lost")
    scaled.set("resume", "never", "it begins anew")
    if scaled.config.algo.ref_model_sync_steps > 0:
        scaled.set("algo.ref_model_sync_steps", 1, "2 steps reach it")
    scaled.set("log_samples", 64, "to be shown")
    scaled.set("profile", None, "it names steps of the real run")
    if scaled.config.keep_samples != KeepSamplesConfig():
        scaled.set("keep_samples.last", 0, "nothing is replayed")
        scaled.set("keep_samples.every", 0, "nothing is replayed")
    for key, adapter in model_fields(scaled.config).items():
        if key.endswith("adapter") and adapter:
            scaled.set(key, None, "it fits the large model alone")
    for name, role in training_roles(scaled.config).items():
        if role.optim.decay_steps or role.optim.warmup_steps > STEPS:
            scaled.set(f"{name}.optim.schedule", "constant", "2 steps have no schedule")
            scaled.set(f"{name}.optim.decay_steps", 0, "2 steps have no schedule")
            scaled.set(f"{name}.optim.warmup_steps", 0, "2 steps have no schedule")


def for_cpu(scaled: Scaled) -> None:
    """Changes what a machine without a GPU cannot do."""
    scaled.set("rollout.kv_cache_mib", KV_CACHE_MIB, "on a CPU")
    scaled.set("rollout.quantization", None, "on a CPU")
    scaled.set("rollout.enforce_eager", "auto", "on a CPU")
    for name, role in training_roles(scaled.config).items():
        for key, value in usual_on_cpu(role):
            scaled.set(f"{name}.{key}", value, "on a CPU")
    if scaled.config.judge is not None:
        scaled.set("judge.kv_cache_mib", KV_CACHE_MIB, "on a CPU")


def usual_on_cpu(role: TrainConfig) -> Iterator[tuple[str, Any]]:
    """Yields the fields of a role that need a GPU, with what they are on a CPU."""
    if role.kernels == "liger":
        yield "kernels", "spmdrl"
    if role.attention == "flash_attn":
        yield "attention", "auto"
    yield "activation_offload", False
    yield "compile", False
