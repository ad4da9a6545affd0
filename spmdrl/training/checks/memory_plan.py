"""The memory plan of a run: what every rank has in each phase, and what the dry run says of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from spmdrl.config import PpoConfig, RunConfig, SftConfig, SupervisedConfig, TrainConfig
from spmdrl.distributed.elastic_job import ElasticJob
from spmdrl.distributed.placement import (
    Placement,
    is_frozen,
    place,
    reference_is_base,
    saved_roles,
    show_ranks,
    training_roles,
)
from spmdrl.distributed.progress import PROGRESS
from spmdrl.engines.fsdp.optimizers import LABELS
from spmdrl.rewards.reward_model import train_config
from spmdrl.rollout.build import ENGINES
from spmdrl.training.checks.engine_memory import EngineMemory, engine_memory
from spmdrl.training.checks.host_memory import process_gib
from spmdrl.training.checks.judge_memory import judge_line, judge_memory
from spmdrl.training.checks.memory import GIB, Memory, MicroBatches, memory_of
from spmdrl.training.checks.model_shape import shape_of
from spmdrl.training.checks.timeline import (
    PARTS,
    Phase,
    Timeline,
    Work,
    add,
    table,
    timeline_of,
    works_of,
)

Array = np.ndarray[Any, Any]

# What of a GPU is not for the plan. The context: some 0.3 GiB (pytorch/pytorch#107667), and cuBLAS'
# workspaces. NCCL: 0.54 to 0.69 GB a communicator (NVIDIA/nccl#964), 1.06 GB in all of a job on
# eight H100s before its first all-to-all, and 4.34 GB behind it (NVIDIA/nccl#1685).
# Fragmentation of PyTorch's allocator, as packed batches vary in length: an assumption.
CONTEXT_GIB = 0.5
NCCL_GIB = 2.0  # of more than one rank
ALL_TO_ALL_GIB = 2.1  # more of NCCL
FRAGMENTATION = 0.05  # of the GPU
IN_MEMORY = 4  # parts of a rank's size in /dev/shm: two checkpoints, each with its copy


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of all ranks; those with the same roles have the same."""

    lines: tuple[str, ...]  # what the roles take by themselves
    timelines: tuple[Timeline, ...]  # of each set of roles, by its first rank
    world: int
    gpu_gib: float | None = None  # of a GPU; None: ranks are on CPUs
    process: float = 0.0  # interpreter, libraries and data
    engine: EngineMemory | None = None
    judge: EngineMemory | None = None
    all_to_all: bool = False  # whether a role's ranks send to each other all at once

    @property
    def fullest(self) -> Timeline:
        """The ranks with the highest peak; on CPUs what is on the host is the same memory."""
        on_cpu = self.gpu_gib is None
        return max(self.timelines, key=lambda t: t.peak.total + t.on_host * on_cpu)

    @property
    def host_gib(self) -> float:
        """The most that a rank takes of the host's memory."""
        on_cpu = self.gpu_gib is None
        most = max(t.on_host + t.peak.total * on_cpu for t in self.timelines)
        return most + self.process

    @property
    def reserve_gib(self) -> float:
        if self.gpu_gib is None:
            return 0.0
        nccl = NCCL_GIB + ALL_TO_ALL_GIB * self.all_to_all if self.world > 1 else 0.0
        return CONTEXT_GIB + nccl + FRAGMENTATION * self.gpu_gib

    @property
    def free_gib(self) -> float:
        """Returns what the fullest rank's GPU has left at its peak; below 0: so much is too much.
        On a CPU there is no limit.
        """
        if self.gpu_gib is None:
            return math.inf
        return self.gpu_gib - self.fullest.peak.total - self.reserve_gib

    @property
    def too_much(self) -> float:
        """The GiB that the fullest rank has too little, and the engines within it; 0: all fits."""
        if self.gpu_gib is None:
            return 0.0
        engines = [each for each in (self.engine, self.judge) if each is not None]
        lacks = sum(max(each.needed - each.awake, 0.0) for each in engines)
        return max(-self.free_gib, 0.0) + lacks

    def all_lines(self) -> list[str]:
        lines = list(self.lines)
        for timeline in self.timelines:
            where = f"ranks {show_ranks(timeline.ranks)}" if self.world > 1 else "a rank"
            lines += [f"  {where} ({', '.join(timeline.roles)})", *table(timeline.phases)]
        process = f"{self.process:.2f} of interpreter, libraries and data, on the host"
        lines.append(f"  process  {process}")
        peak = self.fullest.peak
        rank = f" on rank {self.fullest.ranks[0]}, the fullest" if self.world > 1 else ""
        if self.gpu_gib is None:
            most = self.host_gib
            return [*lines, bold(f"  peak     {most:.2f} GiB in {peak.name}{rank}")]
        return [
            *lines,
            f"  host     {self.host_gib:.2f}",
            f"  reserve  {self.reserve_gib:.2f} of the GPU for the CUDA context, NCCL and "
            "fragmentation",
            bold(f"  peak     {peak.total:.2f} of {self.gpu_gib:.1f} GiB in {peak.name}{rank}"),
        ]


def gpu_gib_here() -> float | None:
    """GiB of this rank's GPU; None where there is none."""
    return torch.cuda.mem_get_info()[1] / GIB if torch.cuda.is_available() else None


def bold(line: str) -> str:
    return f"\033[1m{line}\033[0m" if PROGRESS.live else line


# ---- reinforcement learning


def memory_plan(
    config: PpoConfig, world: int, prompt_tokens: Array | None = None,
    gpu_gib: float | None = None, image_tokens: float = 0.0,
) -> MemoryPlan:  # fmt: skip
    """prompt_tokens: (num_prompts,) lengths; None: all are as long as they may be. gpu_gib: of each
    rank's GPU; None: the ranks are on CPUs. image_tokens: of a prompt, those of its images, as a
    mean.
    """
    placement, on_gpu = place(config, world), gpu_gib is not None
    roles = role_memories(config, placement, prompt_tokens, on_gpu, image_tokens)
    shared = reference_is_base(config, placement)
    lines = ["parameters and memory of a rank (estimate, GiB)"]
    base = roles.pop("ref").weights if shared else 0.0
    lines += [memory_line(name, m) for name, m in roles.items()]
    if shared:
        lines.append("  ref      the actor's weights with its adapter off: saves "
                     f"{base:.2f} of weights of its own")  # fmt: skip
    num_engines = len(placement.roles["rollout"]) // config.rollout.tensor_parallel
    engine = engine_memory(config, num_engines, gpu_gib)
    sleeps = config.rollout.sleep and bool(
        set(placement.roles["rollout"]) & set(placement.training)
    )
    push = min(config.weights.bucket_mib / 1024, 4 * shape_of(config.model).count / GIB)
    lines += [engine_line(config, engine, sleeps), *push_lines(config, push)]
    judge = judge_memory(config, placement, gpu_gib)
    if judge is not None:
        lines.append(judge_line(config, placement, judge))
    timelines = []
    kept = saved_roles(config)
    saves = [Work(f"save {name}", "save", name) for name in kept if saves_any(config)]
    works = [*works_of(config), *saves]
    for names, ranks in ranks_by_roles(placement).items():
        own = {name: m for name, m in roles.items() if place_of(name) in names}
        copy = copied(config, [m for n, m in own.items() if n in kept])
        timeline = timeline_of(
            works, own, engine if "rollout" in names else None, sleeps, push, copy, on_gpu,
            judge if "reward" in names else None,
        )  # fmt: skip
        if timeline.phases:
            timelines.append(replace(timeline, roles=names, ranks=ranks))
    saved = [[m for n, m in roles.items() if n in kept and place_of(n) in names]
             for names in ranks_by_roles(placement)]  # fmt: skip
    most = max(saved, key=lambda memories: sum(m.saved for m in memories))
    lines += copies_of_checkpoint(config, most)
    process = process_gib(*(ENGINES[name] for name in engine_names(config)))
    process += teacher_gib_of_rl(config, placement, prompt_tokens)
    return MemoryPlan(
        tuple(lines), tuple(timelines), world, gpu_gib, process, engine, judge,
        any(map(sends_to_all, training_roles(config).values())),
    )  # fmt: skip


def sends_to_all(role: TrainConfig) -> bool:
    """Whether a role's ranks exchange heads, tokens of experts or whole matrices by all-to-all."""
    gathers_matrices = role.optim.name == "muon" and role.engine == "fsdp"
    return role.ulysses > 1 or role.expert_parallel > 1 or gathers_matrices


def engine_names(config: PpoConfig) -> set[str]:
    """Returns the rollout engines of a run: that of the policy, and of a judge."""
    named = config.judge.engine if config.judge is not None else None
    return {config.rollout.engine, named or config.rollout.engine}


def place_of(name: str) -> str:
    """The role of `placement` that says where the model of `name` lives."""
    return "reward" if name == "reward_model" else name


def ranks_by_roles(placement: Placement) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Ranks that have the same roles, by these; the first rank's come first."""
    names_of: dict[int, list[str]] = {}
    for name, ranks in placement.roles.items():
        for rank in ranks:
            names_of.setdefault(rank, []).append(name)
    found: dict[tuple[str, ...], tuple[int, ...]] = {}
    by_names: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(names_of):
        by_names.setdefault(tuple(names_of[rank]), []).append(rank)
    for names, members in by_names.items():
        found[names] = tuple(members)
    return found


def role_memories(
    config: PpoConfig, placement: Placement, prompt_tokens: Array | None, on_gpu: bool,
    image_tokens: float,
) -> dict[str, Memory]:  # fmt: skip
    """The memory of each role that has a model; the reference's too where it shares the actor's."""
    step = config.data.prompts_per_step * config.rollout.n
    lens = config.data.max_prompt_tokens if prompt_tokens is None else prompt_tokens
    sequences = np.atleast_1d(lens) + config.rollout.max_tokens
    images = min((image_tokens + images_of_replies(config)) / float(sequences.mean()), 1.0)
    hinted = sequences
    if config.data.hint_key is not None:  # as long as they may be
        hinted = np.full_like(sequences, config.data.max_hint_prompt_tokens)
        hinted += config.rollout.max_tokens
    roles = {}
    for name, role in training_roles(config).items():
        ranks = len(placement.roles[name])
        samples = step * sharing_ranks(role) / ranks
        tokens = fullest(role, samples, hinted)
        asked = memory_of(
            name, role, config.model, ranks, tokens=tokens, on_gpu=on_gpu, images=images
        )
        if is_frozen(name):
            roles[name] = asked
            continue
        tokens = fullest(role, samples / config.algo.mini_batches, sequences)
        trained = memory_of(
            name, role, config.model, ranks, tokens=tokens, on_gpu=on_gpu, images=images
        )
        is_teacher = name == "actor" and config.algo.policy_teaches
        roles[name] = replace(trained, forward=asked.forward) if is_teacher else trained
    if config.reward_model is not None:
        role, scorers = train_config(config.reward_model), len(placement.roles["reward"])
        tokens = fullest(role, step / scorers, sequences)  # about those of its own tokenizer
        roles["reward_model"] = memory_of(
            "reward_model", role, config.model, scorers, "reward", tokens, on_gpu, images
        )
    return roles


def images_of_replies(config: PpoConfig) -> int:
    """Returns the tokens of images that tools, an environment or agents may show in a sample."""
    limits = (config.multi_turn, config.agents)
    return sum(each.max_images * each.max_image_tokens for each in limits)


def engine_line(config: PpoConfig, engine: EngineMemory, sleeps: bool) -> str:
    kept = ""
    if ENGINES[config.rollout.engine].has_kv_cache:
        share = f"up to {config.rollout.gpu_memory_utilization:.0%} of the GPU with the weights"
        kept = f", KV cache {share if engine.cache is None else f'{engine.cache:.2f}'}"
    asleep = "kept while training"
    if sleeps:
        asleep = f"asleep while training, when it has {engine.asleep:.2f}"
    return f"  rollout  weights {engine.weights:.2f}{kept}; {asleep}"


def push_lines(config: PpoConfig, push: float) -> list[str]:
    lines = [f"  sync     at most {push:.2f} beside the weights, while they are sent"]
    if config.actor.lora is not None:
        sent = {"merge": "with its adapter in them: every weight at each push",
                "adapter": "once; then the adapter alone"}  # fmt: skip
        lines.append(f"           the base's weights go {sent[config.weights.lora]}")
    return lines


def sharing_ranks(role: TrainConfig) -> int:
    """Returns how many ranks work on the same sequences."""
    megatron = role.tensor_parallel * role.pipeline_parallel * role.context_parallel
    return role.ulysses if role.engine == "fsdp" else megatron


def fullest(role: TrainConfig, sequences: float, tokens: Array) -> MicroBatches:
    """Returns the tokens that a rank has in its fullest micro-batch, and in the fullest after it,
    as the data's lengths let expect.

    A sequence that is longer than micro_batch_tokens is a micro-batch by itself.
    sequences: of a group of ranks that share them, for an update; tokens: lengths to draw from.
    """
    sharers, longest = sharing_ranks(role), int(tokens.max())
    if role.engine == "megatron":  # the ranks of a pipeline stage have all the tokens
        sharers = role.context_parallel
    expected = math.ceil(max(math.ceil(sequences) * tokens.mean(), longest) / sharers)
    most = max(role.micro_batch_tokens, math.ceil(longest / sharers))
    return MicroBatches(min(most, expected), min(most, max(expected - most, 0)))


def memory_line(name: str, m: Memory) -> str:
    label = LABELS[m.config.optim.name]
    leaves = [word for word, is_on in (("weights", m.config.offload_params),
                                       (label, m.config.offload_optimizer))
              if is_on]  # fmt: skip
    average = f" and average {m.average:.2f}" if m.average else ""
    away = f"; {' and '.join(leaves)} on the host while idle" if leaves else ""
    only = "" if m.config.lora is None else f", {m.trainable / 1e6:,.3f}M of them trained (lora)"
    return (
        f"  {name:8} {m.parameters / 1e6:,.1f}M parameters{only}; weights {m.weights:.2f}, "
        f"gradients {m.gradients:.2f}, {label} {m.adam:.2f}{average}, activations "
        f"{m.activations:.2f}{away}"
    )


# ---- learning from rows


def supervised_plan(
    config: SupervisedConfig, world: int, kind: str, row_tokens: Array,
    gpu_gib: float | None = None, image_tokens: float = 0.0,
) -> MemoryPlan:  # fmt: skip
    """The plan of fine-tuning and of reward models. kind: of engine; row_tokens: (num_rows,)
    lengths; image_tokens: of a row, those of its images, as a mean.

    The model is written at the end, by the first rank, a tensor at a time: in float32, and in its
    own dtype.
    """
    on_gpu, roles = gpu_gib is not None, {}
    images = min(image_tokens / float(row_tokens.mean()), 1.0)
    for name, role in training_roles(config).items():
        tokens = fullest(role, config.data.batch_size * sharing_ranks(role) / world, row_tokens)
        roles[name] = memory_of(name, role, config.model, world, kind, tokens, on_gpu, images)
    memory = roles["actor"]
    written = 2 * 4 * shape_of(config.model, kind).matrix / GIB
    works = [
        Work("ref_logprobs", "look", "ref", frozenset({"ref"})),
        Work("update", "update", "actor", frozenset({"actor"})),
    ]
    copy = copied(config, [memory])
    timeline = timeline_of(works, roles, None, False, 0.0, copy, on_gpu)
    if on_gpu:
        host = max(timeline.on_host, written)
        timeline = replace(timeline, on_host=host)
    else:
        saving = dict.fromkeys(PARTS, 0.0) | {"save": written}
        for each in roles.values():
            add(saving, each.on_device(at_work=True))
        timeline = replace(timeline, phases=[*timeline.phases, Phase("save", saving)])
    timeline = replace(timeline, roles=tuple(roles), ranks=tuple(range(world)))
    lines = (
        "parameters and memory of a rank (estimate, GiB)",
        *(memory_line(name, each) for name, each in roles.items()),
        *copies_of_checkpoint(config, [memory]),
    )  # fmt: skip
    process = process_gib() + teacher_gib(config, world, row_tokens)
    all_to_all = any(map(sends_to_all, training_roles(config).values()))
    return MemoryPlan(lines, (timeline,), world, gpu_gib, process, all_to_all=all_to_all)


def teacher_gib(config: SupervisedConfig, world: int, row_tokens: Array) -> float:
    """GiB on the host of what the teacher says of a rank's rows in a step."""
    if not isinstance(config, SftConfig) or config.distillation is None:
        return 0.0
    rows = config.data.batch_size * sharing_ranks(config.actor) / world
    return gib_of_teacher(rows, float(row_tokens.mean()), config.distillation.topk)


def teacher_gib_of_rl(
    config: PpoConfig, placement: Placement, prompt_tokens: Array | None
) -> float:
    """GiB on the host of what the teacher says of a rank's samples in a step. prompt_tokens: as of
    memory_plan.
    """
    if config.algo.distillation is None:
        return 0.0
    lens = config.data.max_prompt_tokens if prompt_tokens is None else prompt_tokens
    mean = float(np.mean(lens)) + config.rollout.max_tokens
    samples = config.data.prompts_per_step * config.rollout.n
    roles = training_roles(config)
    holders = {n: role for n, role in roles.items() if n == "actor" or is_frozen(n)}
    share = max(sharing_ranks(role) / len(placement.roles[n]) for n, role in holders.items())
    return gib_of_teacher(samples * share, mean, config.algo.distillation.topk)


def gib_of_teacher(num_seqs: float, mean_tokens: float, topk: int) -> float:
    """GiB of an id and a log-probability of each of the teacher's tokens, in each place."""
    return math.ceil(num_seqs) * mean_tokens * 8 * topk / GIB


# ---- checkpoints


def least_checkpoint_bytes(
    trained: Mapping[str, TrainConfig], model: str, kind: str = "policy"
) -> int:
    """Returns the least bytes of a checkpoint of these roles: what they learn, in float32."""
    parts = [memory_of(name, role, model, 1, kind) for name, role in trained.items()]
    return sum(part.trainable * 4 for part in parts)


def saves_any(config: RunConfig) -> bool:
    """Whether the run makes checkpoints, in its folder or in memory."""
    return config.checkpoint.every_steps > 0 or in_memory(config, 1.0) > 0


def copied(config: RunConfig, roles: Sequence[Memory]) -> float:
    """GiB of the host's memory for the copy that a checkpoint is written from, and for those that
    stand in memory. roles: what a rank saves."""
    copy = sum(m.gathered if config.checkpoint.blocking else m.saved for m in roles)
    return in_memory(config, sum(m.saved for m in roles)) + copy * saves_any(config)


def in_memory(config: RunConfig, saved: float) -> float:
    """GiB that a rank takes of /dev/shm for checkpoints in memory: its own part and the copy of
    another's, of the one that stands and of the one that is being written.
    """
    every = ElasticJob.read().in_memory_every_steps(config.checkpoint.in_memory_every_steps)
    return IN_MEMORY * saved if every > 0 else 0.0


def copies_of_checkpoint(config: RunConfig, roles: Sequence[Memory]) -> list[str]:
    """Returns lines about the memory that a checkpoint takes while it is written in the background.
    roles: of the rank that saves most.
    """
    most, gathered = sum(m.saved for m in roles), sum(m.gathered for m in roles)
    held, lines = in_memory(config, most), list[str]()
    copy = copied(config, roles) - held
    if gathered and copy:
        lines.append(
            f"  checkpoint copy on the host {copy:.2f}; megatron's optimizer is "
            f"{gathered:.2f} of it, until it is written, also with checkpoint.blocking"
        )
    elif copy:
        lines.append(f"  checkpoint copy on the host {most:.2f}, kept from the first save on (none "
                     "with checkpoint.blocking)")  # fmt: skip
    if held > 0:
        lines.append(f"  checkpoints in memory: up to {held:.2f} of /dev/shm for each rank, and "
                     "after a change of hosts a whole one on each")  # fmt: skip
    return lines
