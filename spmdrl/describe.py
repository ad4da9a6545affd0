"""What --dry-run prints: batch arithmetic, who is where, what the names mean, memory of a rank."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from transformers import PreTrainedConfig, PreTrainedModel

from spmdrl.algo.advantages import estimator_of
from spmdrl.algo.checks import shown
from spmdrl.algo.losses import aggregation_of
from spmdrl.algo.objectives import needs_old_logprobs
from spmdrl.config import (
    CPU_KV_CACHE_MIB,
    CheckpointConfig,
    PpoConfig,
    SupervisedConfig,
    TrainConfig,
)
from spmdrl.engines.classifier import classifier_config, meta_classifier
from spmdrl.engines.fsdp import DTYPES
from spmdrl.engines.lora import adapter_count
from spmdrl.engines.megatron_layout import expert_width, moe_layers, num_experts
from spmdrl.engines.models import load_hf_config, meta_model
from spmdrl.engines.optimizers import LABELS, state_bytes
from spmdrl.placement import (
    Placement,
    Ranks,
    place,
    reference_is_base,
    show_ranks,
    training_roles,
)
from spmdrl.plan import updates_per_run
from spmdrl.rewards.model import train_config
from spmdrl.topology import resolve_degrees, train_degrees
from spmdrl.weights.names import checkpoint_parts

GIB = 2**30
# per token, layer and hidden unit in half precision, by TrainConfig.activation_checkpointing;
# kernels/bench/activations.py measures their ratios
KEPT_BYTES = {False: 34, "selective": 20, True: 2}


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


def describe_supervised(
    config: SupervisedConfig, world: int, num_rows: int, kind: str, row_sequences: int
) -> str:
    """As describe, of what learns from rows. kind: of engine; row_sequences: see Task."""
    data, actor = config.data, config.actor
    sharing, memory = sharing_ranks(actor), memory_of("actor", actor, config.model, world, kind)
    most = data.batch_size * data.max_tokens * row_sequences
    holders = "ranks" if sharing == 1 else f"groups of {sharing} ranks"
    budget = actor.micro_batch_tokens * actor.context_parallel * actor.ulysses
    return "\n".join([
        "batch",
        f"  {data.batch_size} rows a step, at most {most:,} tokens, "
        f"about {data.batch_size * sharing / world:g} on each of {world // sharing} {holders}; "
        f"micro-batches of {budget} tokens",
        f"  {num_rows} rows / {data.batch_size} = {num_rows // data.batch_size} steps an epoch: "
        f"{config.steps} steps are {config.steps * data.batch_size / max(num_rows, 1):.2f} epochs",
        "placement",
        role_line("actor", actor, tuple(range(world))),
        "parameters and memory of a rank (estimate, GiB)",
        memory_line("actor", memory),
        *copies_of_checkpoint(config.checkpoint, memory.saved),
        f"  peak     {memory.busy:.2f}",
    ])  # fmt: skip


def sharing_ranks(role: TrainConfig) -> int:
    """How many ranks work on the same sequences."""
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
    """What the names resolve to, and which passes they cost."""
    algo, estimator = config.algo, estimator_of(config.algo)
    seen = "on its last token" if estimator.sees == "tokens" else "of which it sees the sum"
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
        f"a reward for each turn, {seen}": config.rewards.per_turn,
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


def memory_of(
    name: str, role: TrainConfig, model: str, num_ranks: int, kind: str = "policy"
) -> Memory:
    """kind: "reward", of a classifier; else of a language model.

    Activations: 34 bytes per token, layer and hidden unit in half precision (Korthikanti 2022,
    arXiv 2205.05198, without its attention term), less if checkpointed; of one layer if offloaded.
    """
    is_reward, path = kind == "reward", role.model or model
    hf = classifier_config(path) if is_reward else load_hf_config(path)
    shell = meta_classifier(hf) if is_reward else meta_model(hf)
    count, text = count_parameters(shell), hf.get_text_config()
    trained = name not in ("ref", "reward_model")
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
        adam = state_bytes(shell, parts, role.optim.name) / sharers / GIB
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
    lines += [memory_line(name, m) for name, m in roles.items()]
    if shared:
        lines.append("  ref      the actor's weights with its adapter off: saves "
                     f"{saved:.2f} of weights of its own")  # fmt: skip
    lines += copy_lines(config, roles, placement)
    ranks_of = dict(placement.roles)
    if config.reward_model is not None:
        role, ranks_of["reward_model"] = train_config(config.reward_model), ranks_of["reward"]
        roles["reward_model"] = memory_of(
            "reward_model", role, config.model, len(ranks_of["reward"]), "reward"
        )
        lines.append(memory_line("reward_model", roles["reward_model"]))
    count = parameter_count(load_hf_config(config.model))
    weights = count * DTYPES[config.rollout.dtype].itemsize / config.rollout.tensor_parallel / GIB
    cache = (config.rollout.kv_cache_mib or CPU_KV_CACHE_MIB) / 1024
    sleeps = config.rollout.sleep and set(placement.roles["rollout"]) & set(placement.training)
    asleep = "given back while training" if sleeps else "kept while training"
    share = f"{config.rollout.gpu_memory_utilization:.0%}"
    kept = f", KV cache {cache:.2f}"
    if config.rollout.kv_cache_mib is None:
        kept += f" (CPU; on a GPU up to {share} of its memory)"
    kept = kept if config.rollout.engine == "vllm" else ""
    lines.append(f"  rollout  weights {weights:.2f}{kept}; {asleep}")
    bucket = config.weights.bucket_mib / 1024
    lines.append(f"  sync     at most {bucket:.2f} beside the weights, while they are sent")
    if config.actor.lora is not None:
        sent = {"merge": "with its adapter in them: every weight at each push",
                "adapter": "once; then the adapter alone"}  # fmt: skip
        lines.append(f"           the base's weights go {sent[config.weights.lora]}")
    peaks = []
    for rank in range(world):
        mine = [m for name, m in roles.items() if rank in ranks_of[name]]
        samples = rank in placement.roles["rollout"]
        engine = weights + cache if samples else 0.0
        idle = sum(m.idle for m in mine)
        while_training = max((m.busy - m.idle for m in mine), default=0.0)
        while_training += (weights if sleeps else engine) * samples
        peaks.append((idle + max(while_training, engine + bucket), rank))
    most, rank = max(peaks, key=lambda peak: peak[0])
    lines.append(f"  peak     {most:.2f} on rank {rank}, the fullest")
    return lines


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


def memory_of_adapters(
    name: str, role: TrainConfig, hf: PreTrainedConfig, count: int, sharers: int, activations: float
) -> Memory:
    """count: parameters of the base, which is held in the role's dtype; the rest is float32."""
    assert role.lora is not None
    learnt = adapter_count(hf, role)
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
    ranks = {rank for name in saved for rank in placement.roles[name]}
    most = max(
        sum(m.saved for name, m in saved.items() if rank in placement.roles[name]) for rank in ranks
    )
    return copies_of_checkpoint(config.checkpoint, most)


def copies_of_checkpoint(config: CheckpointConfig, most: float) -> list[str]:
    if config.every_steps == 0 or config.blocking:
        return []
    return [f"  checkpoint copy on the host {most:.2f}, kept from the first save on (none with "
            "checkpoint.blocking)"]  # fmt: skip


def expert_count(hf: PreTrainedConfig) -> int:
    """Parameters of all routed experts."""
    if not any(moe_layers(hf)):
        return 0
    one = 3 * hf.get_text_config().hidden_size * expert_width(hf)
    return sum(moe_layers(hf)) * num_experts(hf) * one


def parameter_count(hf: PreTrainedConfig) -> int:
    return count_parameters(meta_model(hf))


def count_parameters(shell: PreTrainedModel) -> int:
    return sum(prod(p.shape) for p in shell.parameters())
