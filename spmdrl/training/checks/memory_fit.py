"""Refuses a run that its GPUs cannot hold, and names the fields that would help, best first.

Each proposal is planned as the run itself is, with that field changed, and has passed the checks of
the config; so has what is proposed together where no field is enough.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from spmdrl.cli.arguments import override
from spmdrl.config import (
    ConfigError,
    LoraConfig,
    PpoConfig,
    PreferenceTrainingConfig,
    RewardTrainingConfig,
    RunConfig,
    SftConfig,
    SupervisedConfig,
    TrainConfig,
    checkpointing_of,
)
from spmdrl.distributed.placement import is_frozen, show_ranks, training_roles
from spmdrl.rollout.build import ENGINES
from spmdrl.training.checks import rl, supervised
from spmdrl.training.checks.memory_plan import Array, MemoryPlan, memory_plan, supervised_plan
from spmdrl.training.checks.preference import check_preference

logger = logging.getLogger(__name__)

LEAST_TOKENS = 1024  # of a micro-batch that is proposed: below, products of matrices are slow
ROOM = 0.1  # of a GPU that stays free of what `room_lines` names: a plan is an estimate
MOST_TOKENS = 65536  # that `room_lines` names: so many were measured (docs/gpu.md)
MOST_TOGETHER = 6  # fields
MOST_RANKS = 8  # times as many are proposed at most
MOST_TENSOR_PARALLEL = 64  # of the rollout; above 8 an engine spans hosts
OTHER_TRAINING = 6  # the cost from which on a field changes what is trained, or where


@dataclass(frozen=True)
class Proposal:
    """A changed field, and what the plan is with it."""

    cost: int  # see `changes`
    text: str
    changed: RunConfig
    world: int
    plan: MemoryPlan

    @property
    def result(self) -> str:
        return f"{self.text}: peak {self.plan.fullest.peak.total:.1f} GiB"


@dataclass(frozen=True)
class Planner:
    """Says how a config is planned and checked; both take the config and the number of ranks."""

    plan: Callable[[Any, int], MemoryPlan]
    check: Callable[[Any, int], None]  # raises ConfigError

    def propose(self, cost: int, text: str, changed: RunConfig, world: int) -> Proposal | None:
        """Returns None where the changed config is refused."""
        try:
            self.check(changed, world)
        except ConfigError:
            return None
        return Proposal(cost, text, changed, world, self.plan(changed, world))


def rl_planner(
    prompt_tokens: Array | None, gpu_gib: float | None, image_tokens: float = 0.0
) -> Planner:
    plan = partial(
        memory_plan, prompt_tokens=prompt_tokens, gpu_gib=gpu_gib, image_tokens=image_tokens
    )
    return Planner(plan, rl.require_sound)


def supervised_planner(
    kind: str, row_tokens: Array, gpu_gib: float | None, image_tokens: float = 0.0
) -> Planner:  # fmt: skip
    plan = partial(
        supervised_plan, kind=kind, row_tokens=row_tokens, gpu_gib=gpu_gib,
        image_tokens=image_tokens,
    )  # fmt: skip
    return Planner(plan, require_sound)


def require_sound(config: SupervisedConfig, world: int) -> None:
    """Raises ConfigError where the config's program refuses it."""
    if isinstance(config, RewardTrainingConfig):
        supervised.check_reward_training(config, world, warn=False)
    elif isinstance(config, PreferenceTrainingConfig):
        check_preference(config, world, warn=False)
    else:
        assert isinstance(config, SftConfig)
        supervised.check_sft(config, world, warn=False)


def check_memory(config: RunConfig, world: int, planner: Planner) -> None:
    """Raises ConfigError where the plan is more than a GPU has; with memory_check "warn" it is a
    warning. Nothing is refused on CPUs.
    """
    try:
        plan = planner.plan(config, world)
    except (AttributeError, KeyError, TypeError) as error:  # a config with names of its own
        logger.warning(
            "there is no memory plan for this model: %s: %s", type(error).__name__, error
        )
        return
    if not plan.too_much:
        return
    text = "\n".join([*arithmetic(config, plan), *remedies(config, world, plan, planner)])
    if config.memory_check == "refuse":
        raise ConfigError(text)
    logger.warning(text)


def arithmetic(config: RunConfig, plan: MemoryPlan) -> list[str]:
    """Says what is too much, with all summands."""
    assert plan.gpu_gib is not None
    timeline, lines = plan.fullest, []
    peak, left = timeline.peak, plan.gpu_gib - plan.reserve_gib
    if peak.total > left:
        parts = " + ".join(f"{part} {gib:.1f}" for part, gib in peak.parts.items() if gib >= 0.05)
        lines.append(
            f"GPU memory: {parts} = {peak.total:.1f} GiB in {peak.name} on ranks "
            f"{show_ranks(timeline.ranks)}, but {plan.gpu_gib:.1f} GiB less {plan.reserve_gib:.1f} "
            f"(CUDA context, NCCL, fragmentation) are {left:.1f}: {peak.total - left:.1f} too much"
        )
    engine = plan.engine
    if engine is not None and engine.needed > engine.awake and isinstance(config, PpoConfig):
        share = config.rollout.gpu_memory_utilization
        lines.append(
            f"GPU memory: the rollout engine needs {engine.needed:.1f} GiB (weights "
            f"{engine.weights:.1f}, its passes, CUDA graphs, the cache of one longest sequence), "
            f"but has {engine.awake:.1f}: rollout.gpu_memory_utilization={share:g} of "
            f"{plan.gpu_gib:.1f}, or rollout.kv_cache_mib"
        )
    return lines


def room_lines(
    config: PpoConfig | SupervisedConfig, world: int, plan: MemoryPlan, planner: Planner
) -> list[str]:
    """A line that names the largest micro-batches of the actor, by doubling, with which a tenth of
    the GPU stays free by the plan: a GPU waits for the processor that launches the kernels of small
    ones. Empty on CPUs, in a pipeline, which wants many, and where larger ones would be no fuller.
    plan: of the config as it is.
    """
    best, tokens = None, 2 * config.actor.micro_batch_tokens
    if plan.gpu_gib is None or plan.too_much or config.actor.pipeline_parallel > 1:
        return []
    least = ROOM * plan.gpu_gib
    while tokens <= MOST_TOKENS:
        actor = replace(config.actor, micro_batch_tokens=tokens)
        text = f"actor.micro_batch_tokens={tokens}"
        found = planner.propose(1, text, replace(config, actor=actor), world)
        if found is None or found.plan == plan or found.plan.free_gib < least:
            break
        best, plan, tokens = found, found.plan, 2 * tokens
    if best is None:
        return []
    return [f"  room     {best.result}; fewer launches of kernels"]


# ---- what would help


def remedies(config: RunConfig, world: int, plan: MemoryPlan, planner: Planner) -> list[str]:
    """Fields that are enough come first, the least costly of them first; then the others, by what
    is left too much."""
    proposed = proposals(config, world, planner)
    found = best_values(proposed)
    enough = [proposal for proposal in found if not proposal.plan.too_much]
    helps = [p for p in found if 0 < p.plan.too_much < plan.too_much - 0.05]
    helps.sort(key=lambda proposal: proposal.plan.too_much)
    lines = [f"  {proposal.result}" for proposal in enough]
    if enough:
        return ["What would help, best first, and the peak then:", *lines]
    lines = [f"  {proposal.result}, still {proposal.plan.too_much:.1f} too much"
             for proposal in helps]  # fmt: skip
    head = ["No field alone is enough. What would help, best first, and the peak then:"]
    combined = together(config, world, plan, planner, proposed)
    return [*head, *lines, *combined] if lines else combined


def best_values(found: list[Proposal]) -> list[Proposal]:
    """Chooses of each field the first value that is enough, else the one that lacks the least."""
    by_field: dict[str, list[Proposal]] = {}
    for proposal in found:
        by_field.setdefault(proposal.text.partition("=")[0], []).append(proposal)
    return [
        next((p for p in same if not p.plan.too_much), min(same, key=lambda p: p.plan.too_much))
        for same in by_field.values()
    ]


def together(
    config: RunConfig, world: int, plan: MemoryPlan, planner: Planner, proposed: list[Proposal]
) -> list[str]:
    """Takes the field that helps most, again and again, until all fits; those that change what is
    trained only where the others are not enough. proposed: for the config as it is.
    """
    for most_cost in (OTHER_TRAINING - 1, OTHER_TRAINING):
        now, texts = Proposal(0, "", config, world, plan), list[str]()
        while now.plan.too_much and len(texts) < MOST_TOGETHER:
            next_ones = proposals(now.changed, now.world, planner) if texts else proposed
            found = [p for p in next_ones
                     if p.cost <= most_cost and p.plan.too_much < now.plan.too_much]  # fmt: skip
            if not found:
                break
            now = min(found, key=lambda proposal: proposal.plan.too_much)
            texts.append(now.text)
        if not now.plan.too_much:
            peak = now.plan.fullest.peak.total
            return [f"Together: {', '.join(texts)}: peak {peak:.1f} GiB"]
    return ["No combination of these fits: it takes more ranks, larger GPUs or a smaller model"]


def proposals(config: RunConfig, world: int, planner: Planner) -> list[Proposal]:
    """All single changes that are legal, those that cost least first; last, more ranks."""
    found = [planner.propose(cost, text, new, world) for cost, text, new in changes(config)]
    if not getattr(config, "placement", {}):
        more = [2**i * world for i in range(1, MOST_RANKS.bit_length())]
        wider = (planner.propose(OTHER_TRAINING, f"{n} ranks", config, n) for n in more)
        found.append(next((p for p in wider if p is not None and not p.plan.too_much), None))
    return [proposal for proposal in found if proposal is not None]


def changes(config: RunConfig) -> list[tuple[int, str, RunConfig]]:
    """(cost, text, changed config) of fields that are not set to save memory yet.

    Sorted by what they cost: 0 nothing, 1 larger batches, 2 time to move states, 3 and 4 time to
    compute or to communicate, 5 other numbers, 6 another kind of training.
    """
    assert isinstance(config, PpoConfig | SupervisedConfig)
    made: list[tuple[int, str, RunConfig]] = []
    for name, role in training_roles(config).items():
        stays = isinstance(config, SupervisedConfig) and name == "actor"
        for cost, field, value in role_changes(name, role, stays):
            changed = override(config, name, with_field(role, field, value))
            shown = "LoraConfig()" if field == "lora" else repr(value)
            made.append((cost, f"{name}.{field}={shown}", changed))
    if isinstance(config, PpoConfig):
        for cost, field, value in rollout_changes(config):
            rollout = replace(config.rollout, **{field: value})
            made.append((cost, f"rollout.{field}={value!r}", replace(config, rollout=rollout)))
        judge = config.reward_model
        if judge is not None and not judge.offload_params:
            changed = replace(config, reward_model=replace(judge, offload_params=True))
            made.append((2, "reward_model.offload_params=True", changed))
        for cost, field, value in judge_changes(config):
            assert config.judge is not None
            changed = replace(config, judge=replace(config.judge, **{field: value}))
            made.append((cost, f"judge.{field}={value!r}", changed))
    return sorted(made, key=lambda change: change[0])


def with_field(role: TrainConfig, field: str, value: Any) -> TrainConfig:
    if field == "optim.name":
        return replace(role, optim=replace(role.optim, name=value))
    if field == "tensor_parallel":  # as large models want it
        return replace(role, tensor_parallel=value, sequence_parallel=True)
    return replace(role, **{field: value})


def role_changes(
    name: str, role: TrainConfig, stays: bool
) -> Iterator[tuple[int, str, Any]]:  # fmt: skip
    """(cost, field, value). stays: nothing of the role may leave the device."""
    trained, on_fsdp = not is_frozen(name), role.engine == "fsdp"
    if on_fsdp and role.fsdp != -1:
        yield 0, "fsdp", -1
    if trained and not role.reshard_after_forward:
        yield 1, "reshard_after_forward", True
    half = role.micro_batch_tokens // 2
    while half >= LEAST_TOKENS:
        yield 1, "micro_batch_tokens", half
        half //= 2
    if not stays and not role.offload_params:
        yield 2, "offload_params", True
    if not stays and trained and not role.offload_optimizer:
        yield 2, "offload_optimizer", True
    if trained and checkpointing_of(role, on_gpu=True) is not True:
        yield 3, "activation_checkpointing", True
    if on_fsdp and not role.offload_policy:
        yield 4, "offload_policy", True
    if trained and on_fsdp and not role.activation_offload:
        yield 4, "activation_offload", True
    if not on_fsdp:
        yield 3, "tensor_parallel", 2 * role.tensor_parallel
        yield 4, "pipeline_parallel", 2 * role.pipeline_parallel
    yield 3, "expert_parallel", 2 * role.expert_parallel
    if trained and on_fsdp and role.optim.name == "adamw":
        yield 5, "optim.name", "adamw8bit"
    if trained and on_fsdp and role.lora is None and name == "actor":
        yield OTHER_TRAINING, "lora", LoraConfig()


def judge_changes(config: PpoConfig) -> Iterator[tuple[int, str, Any]]:
    """(cost, field, value) of the judge's engine, as rollout_changes."""
    judge = config.judge
    if judge is None:
        return
    if not judge.sleep:
        yield 2, "sleep", True
    if judge.kv_cache_mib is None and ENGINES[judge.engine or config.rollout.engine].has_kv_cache:
        for step in (-4, -3, -2, -1, 1, 2, 3, 4):
            share = round(judge.gpu_memory_utilization + 0.05 * step, 2)
            if 0.1 <= share <= 0.9:
                yield 1, "gpu_memory_utilization", share


def rollout_changes(config: PpoConfig) -> Iterator[tuple[int, str, Any]]:
    """(cost, field, value). Shares of the GPU come in steps of 0.05, degrees in powers of two."""
    rollout = config.rollout
    if not rollout.sleep:
        yield 0, "sleep", True
    if not ENGINES[rollout.engine].has_kv_cache:
        return
    if rollout.kv_cache_mib is None:
        now = rollout.gpu_memory_utilization
        for step in range(1, 9):
            lower, higher = round(now - 0.05 * step, 2), round(now + 0.05 * step, 2)
            if lower >= 0.1:
                yield 1, "gpu_memory_utilization", lower
            if higher <= 0.9:
                yield 1, "gpu_memory_utilization", higher
    degree = 2 * rollout.tensor_parallel
    while degree <= MOST_TENSOR_PARALLEL:
        yield 2, "tensor_parallel", degree
        degree *= 2
