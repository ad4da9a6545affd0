"""Describes what a run will do and need: batch arithmetic, who is where, what the names mean,
memory of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from spmdrl.algo.advantages import estimator_of
from spmdrl.algo.losses import aggregation_of
from spmdrl.algo.objectives import needs_old_logprobs
from spmdrl.config import (
    CPU_KV_CACHE_MIB,
    PpoConfig,
    RunConfig,
    SupervisedConfig,
    TrainConfig,
)
from spmdrl.distributed.placement import (
    Ranks,
    place,
    reference_is_base,
    show_ranks,
    training_roles,
)
from spmdrl.distributed.topology import resolve_degrees, train_degrees
from spmdrl.engines.fsdp.optimizers import LABELS
from spmdrl.engines.stored_dtype import DTYPES, stored_dtype
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.rewards.reward_model import train_config
from spmdrl.rollout.build import ENGINES
from spmdrl.training.checks.host_memory import host_lines, process_gib
from spmdrl.training.checks.memory import GIB, Memory, memory_of, parameter_count
from spmdrl.training.checks.options import shown
from spmdrl.training.checks.rl import updates_per_run

Array = np.ndarray[Any, Any]
HOLES = 1.15  # of what comes and goes in a step, on the CPU: malloc's heap does not fit it exactly


def describe(
    config: PpoConfig, world: int, num_prompts: int, prompt_tokens: Array | None = None
) -> str:
    """Batch arithmetic, placement, parameters and memory, as text.

    prompt_tokens: (num_prompts,) lengths; None: all are as long as they may be.
    """
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
    memory, peak = memory_plan(config, world, prompt_tokens)
    remedy = "lower actor.micro_batch_tokens, or start fewer ranks"
    return "\n".join([*lines, *memory, *host_lines(peak.host + peak.process, world, remedy)])


def describe_supervised(
    config: SupervisedConfig, world: int, num_rows: int, kind: str, row_sequences: int,
    row_tokens: Array,
) -> str:  # fmt: skip
    """Describes a run that learns from rows, as `describe` does one of reinforcement learning.
    kind: of engine; row_sequences: see Task; row_tokens: (num_rows,) lengths.
    """
    data, actor = config.data, config.actor
    sharing = sharing_ranks(actor)
    tokens = fullest(actor, data.batch_size * sharing / world, row_tokens)
    memory = memory_of("actor", actor, config.model, world, kind, tokens)
    most = data.batch_size * data.max_tokens * row_sequences
    written = 4 * memory.parameters / GIB  # at the end, by the first rank
    peak = peak_of([memory], 0.0, 2 * written, copied(config, memory.saved))
    peak = replace(peak, process=process_gib())
    remedy = "lower actor.micro_batch_tokens, or start fewer ranks"
    holders = "ranks" if sharing == 1 else f"groups of {sharing} ranks"
    budget = actor.micro_batch_tokens * actor.context_parallel * actor.ulysses
    return "\n".join([
        "batch",
        f"  {data.batch_size} rows a step, at most {most:,} tokens, "
        f"about {data.batch_size * sharing / world:g} on each of {world // sharing} {holders}; "
        f"micro-batches of {budget} tokens",
        f"  {num_rows} rows / {data.batch_size} = {num_rows // data.batch_size} steps an epoch: "
        f"{config.steps} steps are {config.steps * data.batch_size / max(num_rows, 1):.2f} epochs",
        f"  {config.out} is written in {out_dtype(config)}",
        "placement",
        role_line("actor", actor, tuple(range(world))),
        "parameters and memory of a rank (estimate, GiB)",
        memory_line("actor", memory),
        *copies_of_checkpoint(config, memory.saved),
        *peak.lines(""),
        *host_lines(peak.host + peak.process, world, remedy),
    ])  # fmt: skip


def out_dtype(config: SupervisedConfig) -> str:
    if config.out_dtype is not None:
        return config.out_dtype
    stored = stored_dtype(load_hf_config(config.model), config.model)
    return f"{str(stored).removeprefix('torch.')}, the dtype in which the model is stored"


def sharing_ranks(role: TrainConfig) -> int:
    """Returns how many ranks work on the same sequences."""
    megatron = role.tensor_parallel * role.pipeline_parallel * role.context_parallel
    return role.ulysses if role.engine == "fsdp" else megatron


def placement_lines(config: PpoConfig, world: int) -> list[str]:
    roles, rollout = place(config, world).roles, config.rollout
    lines = ["placement"]
    for name, role in training_roles(config).items():
        lines.append(role_line(name, role, roles[name]))
    engines = len(roles["rollout"]) // rollout.tensor_parallel
    lines.append(f"  rollout  ranks {show_ranks(roles['rollout'])}: {engines} {rollout.engine} "
                 f"engines x tp {rollout.tensor_parallel}")  # fmt: skip
    lines.append(f"  reward   ranks {show_ranks(roles['reward'])}: {config.rewards.workers} "
                 "processes each")  # fmt: skip
    if config.async_steps:
        lines.append(f"  sampling runs up to {config.async_steps} steps ahead of training; both "
                     "meet where the run evaluates or saves")  # fmt: skip
    return lines


def role_line(name: str, role: TrainConfig, ranks: Ranks) -> str:
    degrees = resolve_degrees(train_degrees(role), len(ranks))
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
    return f"  {name:8} ranks {show_ranks(ranks)}: {layout}"


def algorithm_lines(config: PpoConfig) -> list[str]:
    """Returns lines that say what the names resolve to, and which passes they cost."""
    algo, estimator = config.algo, estimator_of(config.algo)
    seen = "on its last token" if estimator.sees == "tokens" else "of which it sees the sum"
    over = "all unmasked tokens of the step" if estimator.whiten else "nothing"
    if estimator.whiten and algo.whiten_over == "samples":
        over = "all valid samples of the step"
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
        f"a reward for each turn, {seen}": config.rewards.per_turn,
        "the mean over sequences is one over all, those without a token to train on too": (
            algo.seq_mean_over == "all"
        ),
        f"the KL estimate {algo.kl_estimator} is cut at {algo.kl_cut}": algo.kl_cut is not None,
    }
    return [
        "algorithm",
        f"  advantage {shown(algo.advantage)}, whitened over {over}; policy loss "
        f"{shown(algo.policy_loss)}, aggregation {shown(aggregation_of(algo))}",
        f"  old logprobs: {old}",
        *[f"  {text}" for text, is_on in extra.items() if is_on],
    ]


def memory_plan(
    config: PpoConfig, world: int, prompt_tokens: Array | None = None
) -> tuple[list[str], Peak]:  # fmt: skip
    """Estimates the fullest rank, in GiB, and says what leaves the device when."""
    placement = place(config, world)
    step = config.data.prompts_per_step * config.rollout.n
    lens = config.data.max_prompt_tokens if prompt_tokens is None else prompt_tokens
    sequences = np.atleast_1d(lens) + config.rollout.max_tokens
    roles = {}
    for name, role in training_roles(config).items():
        ranks = len(placement.roles[name])
        samples = step * sharing_ranks(role) / ranks
        if name != "ref":
            samples /= config.algo.mini_batches
        tokens = fullest(role, samples, sequences)
        roles[name] = memory_of(name, role, config.model, ranks, tokens=tokens)
    shared = reference_is_base(config, placement)
    if shared:
        saved = roles.pop("ref").weights
    lines = ["parameters and memory of a rank (estimate, GiB)"]
    lines += [memory_line(name, m) for name, m in roles.items()]
    if shared:
        lines.append("  ref      the actor's weights with its adapter off: saves "
                     f"{saved:.2f} of weights of its own")  # fmt: skip
    ranks_of = dict(placement.roles)
    saved_by = [
        sum(m.saved for name, m in roles.items() if name != "ref" and rank in ranks_of[name])
        for rank in range(world)
    ]
    lines += copies_of_checkpoint(config, max(saved_by))
    if config.reward_model is not None:
        role, ranks_of["reward_model"] = train_config(config.reward_model), ranks_of["reward"]
        roles["reward_model"] = memory_of(
            "reward_model", role, config.model, len(ranks_of["reward"]), "reward"
        )
        lines.append(memory_line("reward_model", roles["reward_model"]))
    count = parameter_count(load_hf_config(config.model))
    weights = count * DTYPES[config.rollout.dtype].itemsize / config.rollout.tensor_parallel / GIB
    spec = ENGINES[config.rollout.engine]
    cache = (config.rollout.kv_cache_mib or CPU_KV_CACHE_MIB) / 1024
    sleeps = config.rollout.sleep and set(placement.roles["rollout"]) & set(placement.training)
    asleep = "given back while training" if sleeps else "kept while training"
    share = f"{config.rollout.gpu_memory_utilization:.0%}"
    kept = f", KV cache {cache:.2f}"
    if config.rollout.kv_cache_mib is None:
        kept += f" (CPU; on a GPU up to {share} of its memory)"
    kept = kept if spec.has_kv_cache else ""
    lines.append(f"  rollout  weights {weights:.2f}{kept}; {asleep}")
    bucket = min(config.weights.bucket_mib / 1024, 4 * count / GIB)
    lines.append(f"  sync     at most {bucket:.2f} beside the weights, while they are sent")
    if config.actor.lora is not None:
        sent = {"merge": "with its adapter in them: every weight at each push",
                "adapter": "once; then the adapter alone"}  # fmt: skip
        lines.append(f"           the base's weights go {sent[config.weights.lora]}")
    peaks = []
    for rank in range(world):
        mine = [m for name, m in roles.items() if rank in ranks_of[name]]
        samples = rank in placement.roles["rollout"]
        engine = weights + cache * spec.has_kv_cache if samples else 0.0
        beside = weights * samples if sleeps else engine
        copy = copied(config, saved_by[rank])
        peaks.append((peak_of(mine, beside, engine + bucket, copy), rank))
    peak, rank = max(peaks, key=lambda found: (found[0].device + found[0].host, -found[1]))
    peak = replace(peak, process=process_gib(spec))
    return lines + peak.lines(f" on rank {rank}, the fullest"), peak


@dataclass(frozen=True)
class Peak:
    """GiB that a rank takes at most: on its GPU, and of the host's memory. On CPUs all is host."""

    device: float
    host: float
    process: float = 0.0  # interpreter, libraries and data

    def lines(self, where: str) -> list[str]:
        process = f"  process  {self.process:.2f} of interpreter, libraries and data, on the host"
        if not torch.cuda.is_available():
            return [process, f"  peak     {self.host + self.process:.2f}{where}"]
        total = torch.cuda.mem_get_info()[1] / GIB
        return [
            process,
            f"  host     {self.host + self.process:.2f}",
            f"  GPU      {total:.2f} in all" + (": too little" if self.device > total else ""),
            f"  peak     {self.device:.2f}{where}",
        ]


def peak_of(roles: list[Memory], beside: float, sampling: float, copy: float) -> Peak:
    """beside: GiB of the engine while a role learns; sampling: of the engine while it samples or
    takes weights; copy: of a checkpoint."""
    if torch.cuda.is_available():
        idle = sum(m.idle for m in roles)
        learning = max((m.busy - m.idle for m in roles), default=0.0) + beside
        return Peak(idle + max(learning, sampling), sum(m.states - m.idle for m in roles) + copy)
    passing = HOLES * max((m.passing for m in roles), default=0.0)
    return Peak(0.0, sum(m.states for m in roles) + max(passing + beside, sampling) + copy)


def fullest(role: TrainConfig, sequences: float, tokens: Array) -> int:
    """Tokens that a rank has in its fullest micro-batch, as the data's lengths let expect.

    sequences: of a group of ranks that share them, for an update; tokens: lengths to draw from.
    """
    expected = max(math.ceil(sequences) * tokens.mean(), tokens.max()) / sharing_ranks(role)
    return min(role.micro_batch_tokens, math.ceil(expected))


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


def least_checkpoint_bytes(
    trained: Mapping[str, TrainConfig], model: str, kind: str = "policy"
) -> int:
    """Returns the least bytes of a checkpoint of these roles: what they learn, in float32."""
    parts = [memory_of(name, role, model, 1, kind) for name, role in trained.items()]
    return sum(part.trainable * 4 for part in parts)


def copied(config: RunConfig, saved: float) -> float:
    """GiB of the host's memory for the copy that a checkpoint is written from."""
    return 0.0 if config.checkpoint.every_steps == 0 or config.checkpoint.blocking else saved


def copies_of_checkpoint(config: RunConfig, most: float) -> list[str]:
    """Returns a line about the memory that a checkpoint takes while it is written in the
    background.
    """
    if not copied(config, most):
        return []
    return [f"  checkpoint copy on the host {most:.2f}, kept from the first save on (none with "
            "checkpoint.blocking)"]  # fmt: skip
