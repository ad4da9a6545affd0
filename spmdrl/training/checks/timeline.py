"""The parts of a rank's memory in each phase of a step; the peak is the largest sum.

What is asleep or offloaded is counted as that: on a GPU it is on the host or nowhere. On a CPU
all of it is in the same memory, and only vLLM's KV cache is given back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from spmdrl.algo.objectives import needs_old_logprobs
from spmdrl.config import PpoConfig
from spmdrl.distributed.placement import TEACHERS, training_roles
from spmdrl.training.checks.engine_memory import EngineMemory
from spmdrl.training.checks.memory import Memory

PARTS = (
    "engine", "judge", "weights", "optimizer", "gradients", "activations", "temporary", "push",
    "save",
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """One phase of a step: what is done, by which role, and which roles are on the device."""

    phase: str
    what: Literal["sample", "judge", "look", "update", "push", "save"]
    role: str | None = None
    loaded: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Phase:
    """Says what is there in a phase, GiB by part."""

    name: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Timeline:
    """The phases of a step on a rank, and what its process has on the host beside them."""

    phases: Sequence[Phase]
    on_host: float = 0.0  # GiB: what is offloaded, and a checkpoint's copy
    roles: tuple[str, ...] = ()
    ranks: tuple[int, ...] = field(default=(0,))

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)


def works_of(config: PpoConfig) -> list[Work]:
    """Returns the phases of a step in their order (training/step.py).

    A role stays on the device from its first phase to its last: the critic from `values` to its
    update, the actor from its old log-probabilities, or what it says as its own teacher, to the end
    of the push.
    """
    asks_actor = needs_old_logprobs(config.algo) and not config.algo.correction.bypass
    teaches = config.algo.policy_teaches
    early = frozenset({"actor"} if asks_actor or teaches else ())
    critic, actor = frozenset({"critic"}), frozenset({"actor"})
    works = [
        Work("rollout", "sample"),
        Work("reward_model", "look", "reward_model", frozenset({"reward_model"})),
        *([Work("judge", "judge")] if config.judge is not None else []),
        Work("ref_logprobs", "look", "ref", frozenset({"ref"})),
        *(Work("teacher_logprobs", "look", name, frozenset({name}))
          for name in training_roles(config) if name.startswith(TEACHERS)),
        Work("values", "look", "critic", critic),
    ]  # fmt: skip
    if asks_actor:
        works.append(Work("old_logprobs", "look", "actor", critic | actor))
    if teaches:
        works.append(Work("teacher_logprobs", "look", "actor", critic | actor))
    return [
        *works,
        Work("update_prm", "update", "prm", critic | early | {"prm"}),
        Work("update_critic", "update", "critic", critic | early),
        Work("update_actor", "update", "actor", actor),
        Work("sync", "push", "actor", actor),
    ]


def timeline_of(
    works: Iterable[Work], roles: Mapping[str, Memory], engine: EngineMemory | None, sleeps: bool,
    push: float, copy: float, on_gpu: bool, judge: EngineMemory | None = None,
) -> Timeline:  # fmt: skip
    """roles: those of this rank; engine: where it samples. push: GiB under way while weights are
    sent; copy: of a checkpoint, on the host. judge: the engine of the judge, where it is.
    """
    phases = []
    for work in works:
        joins = engine is not None and work.what in ("sample", "push")
        joins |= judge is not None and work.what == "judge"
        if work.role not in roles and not joins:
            continue
        back = roles[work.role].back_to_save() if work.what == "save" and work.role else {}
        if work.what == "save" and (not on_gpu or sum(back.values()) == 0):
            continue
        parts = dict.fromkeys(PARTS, 0.0)
        if engine is not None:
            parts["engine"] = engine_in(work, engine, sleeps, on_gpu)
        if judge is not None:
            parts["judge"] = judge.awake if work.what == "judge" else judge.asleep
        for name, memory in roles.items():
            at_work = name in work.loaded or not on_gpu
            add(parts, memory.on_device(at_work, only_weights=work.what == "push" and on_gpu))
        if work.what == "push":
            parts["push"] = push
            sender = roles.get(work.role or "")
            if sender is not None and sender.on_host:  # its shards are copied to be sent
                parts["push"] += sender.weights
        elif work.what == "save":
            add(parts, back)
        elif work.role is not None:
            memory = roles[work.role]
            add(parts, memory.update() if work.what == "update" else memory.look())
        phases.append(Phase(work.phase, parts))
    away = on_host(roles, engine, sleeps, on_gpu)
    away += judge.asleep_on_host if judge is not None else 0.0
    return Timeline(phases, away + copy)


def engine_in(work: Work, engine: EngineMemory, sleeps: bool, on_gpu: bool) -> float:
    """Returns the GiB of an engine in a phase. For a push it wakes its weights alone; its KV cache
    follows when the trainer's weights have left (training/push_weights.py), and is there while a
    checkpoint is made."""
    if not sleeps or work.what in ("sample", "judge", "save") or work.role == "reward_model":
        return engine.awake
    if work.what == "push" and on_gpu:
        return min(engine.awake, engine.asleep + engine.weights)
    return engine.asleep


def on_host(
    roles: Mapping[str, Memory], engine: EngineMemory | None, sleeps: bool, on_gpu: bool
) -> float:
    """Returns the GiB of the host's memory for what leaves the GPU."""
    if not on_gpu:
        return 0.0
    away = 0.0
    for memory in roles.values():
        stays = memory.on_device(at_work=False)
        away += memory.states - stays["weights"] - stays["optimizer"]
    return away + (engine.asleep_on_host if engine is not None and sleeps else 0.0)


def add(parts: dict[str, float], more: Mapping[str, float]) -> None:
    for name, gib in more.items():
        parts[name] += gib


def table(phases: Sequence[Phase]) -> list[str]:
    """A line per phase, GiB by part; parts that are nowhere are left out."""
    shown = [part for part in PARTS if any(phase.parts.get(part, 0.0) >= 0.005 for phase in phases)]
    lines = ["    " + f"{'':14}" + "".join(f"{part:>12}" for part in (*shown, "all"))]
    for phase in phases:
        numbers = [*(phase.parts.get(part, 0.0) for part in shown), phase.total]
        lines.append("    " + f"{phase.name:14}" + "".join(f"{gib:12.2f}" for gib in numbers))
    return lines
