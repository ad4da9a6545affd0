"""Estimates the memory of a training role on a rank: weights, gradients, optimizer, activations.

pass_memory.py has what a pass takes, timeline.py what is there in which phase of a step,
host_memory.py what a process takes beside, and memory_fit.py what helps where it is too much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from spmdrl.config import TrainConfig, checkpointing_of
from spmdrl.distributed.placement import is_frozen
from spmdrl.engines.fsdp.quantized_base import BYTES
from spmdrl.engines.megatron.layout import num_experts, stage_layers
from spmdrl.engines.megatron.parts import degrees_of
from spmdrl.engines.stored_dtype import DTYPES
from spmdrl.hub.mtp_layers import num_mtp_layers
from spmdrl.training.checks.model_shape import (
    ModelShape,
    adapter_parameters,
    optimizer_bytes,
    parameters_in,
    quantized_weights,
    shape_of,
)
from spmdrl.training.checks.pass_memory import (
    HEAD_CHUNK_BYTES,
    PassMemory,
    fsdp_pass,
    head_bytes,
    layer_sizes,
    sparse_layers,
    tower_of,
)

GIB = 2**30


class MicroBatches(NamedTuple):
    """The tokens that a rank has in the micro-batches of an update."""

    first: int  # of the fullest
    later: int  # of the fullest one after it; 0: the update has one micro-batch


@dataclass(frozen=True)
class Memory:
    """GiB that a training role takes on each of its ranks."""

    parameters: int
    trainable: int
    weights: float  # float32; of megatron, and of a base with adapters, in the role's dtype
    gradients: float  # float32
    adam: float  # what the optimizer keeps, and megatron's float32 weights beside others
    config: TrainConfig
    first: PassMemory  # bytes of the fullest pass of an update; of a frozen role without gradient
    later: PassMemory  # bytes of the fullest pass after it, when gradients are there already
    forward: PassMemory  # bytes of a pass without gradient
    step: float = 0.0  # temporaries of the optimizer's step
    average: float = 0.0  # of the weights, float32; goes where the optimizer goes
    on_host: bool = False  # states and gradients, while the role works too: offload_policy on a GPU
    # of the optimizer's state in a checkpoint, on the rank that has most of it; None: as on a rank
    saved_optimizer: float | None = None

    @property
    def activations(self) -> float:
        return self.first.activations / GIB

    @property
    def keeps_gradients(self) -> bool:
        """Whether their memory is there between updates: megatron's, unless something leaves."""
        leaves = self.config.offload_params or self.config.offload_optimizer
        return self.config.engine == "megatron" and not leaves

    def on_device(self, at_work: bool, only_weights: bool = False) -> dict[str, float]:
        """The GiB of states that are on the device; at_work: False while the role is idle.
        only_weights: for a push, before which all that may leave has left.

        The one place that says what an option keeps on the host.
        """
        idle, config = not at_work, self.config
        weights_leave = self.on_host or (config.offload_params and idle)
        optimizer_leaves = self.on_host or (config.offload_optimizer and (only_weights or idle))
        return {
            "weights": 0.0 if weights_leave else self.weights,
            "optimizer": 0.0 if optimizer_leaves else self.adam + self.average,
            "gradients": self.gradients if self.keeps_gradients else 0.0,
        }

    def update(self) -> dict[str, float]:
        """The GiB that an update takes beside the states that are on the device.

        FSDP's gradients come to be while the first pass gives its activations back, and are there
        whole in later passes and in the optimizer's step, when nothing of a pass is left.
        """
        step, first = {"temporary": self.step}, gib(self.first.parts)
        if self.on_host:
            return larger(first, gib(self.later.parts))
        if self.config.engine == "megatron":
            gradients = 0.0 if self.keeps_gradients else self.gradients
            return {"gradients": gradients} | larger(first, step)
        ends = {"temporary": self.first.after_activations / GIB}
        beside = {"gradients": self.gradients} | larger(ends, gib(self.later.parts), step)
        return larger(first, beside)

    def look(self) -> dict[str, float]:
        """The GiB that a pass without gradient takes beside the states."""
        return gib(self.forward.parts)

    def back_to_save(self) -> dict[str, float]:
        """The GiB that come back to the device while a checkpoint of the idle role is made.

        FSDP's shards are copied from where they are. Megatron's weights come back, and with
        adapters or an average all that has left.
        """
        if self.config.engine != "megatron":
            return {}
        every = self.config.lora is not None or self.average > 0
        stays = self.on_device(at_work=False)
        back = {"weights": self.weights - stays["weights"]}
        if every:
            back["optimizer"] = self.adam + self.average - stays["optimizer"]
            back["gradients"] = self.gradients - stays["gradients"]
        return back

    @property
    def gathered(self) -> float:
        """The GiB of the host's memory in which megatron's optimizer is gathered for a checkpoint,
        on the rank that writes it.
        """
        return self.saved_optimizer or 0.0

    @property
    def saved(self) -> float:
        """The GiB that are saved; of adapters, without the base."""
        learnt = self.weights if self.config.lora is None else self.gradients
        own = self.adam + self.average
        return learnt + (own if self.saved_optimizer is None else self.saved_optimizer)

    @property
    def states(self) -> float:
        """The GiB that live as long as the run."""
        return self.weights + self.adam + self.average

    @property
    def busy(self) -> float:
        """The GiB of an update: states, and what it takes beside."""
        return self.states + sum(self.update().values())


def gib(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: size / GIB for name, size in parts.items()}


def larger(*choices: dict[str, float]) -> dict[str, float]:
    """Returns the parts with the largest sum."""
    return max(choices, key=lambda parts: sum(parts.values()))


def memory_of(
    name: str, role: TrainConfig, model: str, num_ranks: int, kind: str = "policy",
    tokens: MicroBatches | None = None, on_gpu: bool = False, images: float = 0.0,
) -> Memory:  # fmt: skip
    """kind: "reward", of a classifier; else of a language model. images: the share of the tokens
    that stand for images.

    tokens: None: all micro-batches have micro_batch_tokens. on_gpu: with the kernels and the
    defaults of GPUs.
    """
    shape = shape_of(role.model or model, "value" if name == "critic" else kind)
    trained = not is_frozen(name) and name != "reward_model"
    tokens = tokens or MicroBatches(role.micro_batch_tokens, role.micro_batch_tokens)
    if role.engine == "fsdp":
        memory = fsdp_memory(role, shape, num_ranks, tokens, trained, on_gpu, images)
        return replace(memory, on_host=role.offload_policy and on_gpu)
    return megatron_memory(role, shape, num_ranks, tokens, trained, on_gpu, images)


def fsdp_memory(
    role: TrainConfig,
    shape: ModelShape,
    num_ranks: int,
    tokens: MicroBatches,
    trained: bool,
    on_gpu: bool,
    images: float,
) -> Memory:
    sharers = num_ranks if role.fsdp == -1 else role.fsdp
    forward = fsdp_pass(role, shape, tokens.first, False, on_gpu, sharers, images)
    first = fsdp_pass(role, shape, tokens.first, trained, on_gpu, sharers, images)
    later = fsdp_pass(role, shape, tokens.later, trained, on_gpu, sharers, images)
    passes = (first, later, forward)
    one = shape.count * 4 / sharers / GIB
    if not trained:
        return Memory(shape.count, 0, one, 0.0, 0.0, role, *passes)
    if role.lora is not None:
        return adapters_memory(role, shape, sharers, passes, on_gpu)
    adam = optimizer_bytes(shape, role.optim.name) / sharers / GIB
    largest = 12 * shape.matrix / sharers / GIB  # one weight's at a time; a fused step has none
    step = 0.0 if steps_fused(role, on_gpu) else min(largest, one)
    average = one if role.ema else 0.0
    return Memory(shape.count, shape.count, one, one, adam, role, *passes, step, average)


def steps_fused(role: TrainConfig, on_gpu: bool) -> bool:
    return on_gpu and role.optim.name == "adamw"


def adapters_memory(
    role: TrainConfig,
    shape: ModelShape,
    sharers: int,
    passes: tuple[PassMemory, PassMemory, PassMemory],
    on_gpu: bool,
) -> Memory:
    """The base is held in the role's dtype; all that is learnt is float32."""
    value_head = shape.text.hidden_size + 1 if shape.kind == "value" else 0
    frozen, learnt = shape.count - value_head, adapter_parameters(shape, role) + value_head
    adapters = learnt * 4 / sharers / GIB
    quantized, _ = quantized_weights(shape, role)  # each rank holds all of these
    base = (frozen - quantized) * DTYPES[role.dtype].itemsize / sharers / GIB
    base += quantized * BYTES / GIB
    moments = 2 * adapters * (0.27 if role.optim.name == "adamw8bit" else 1)  # codes and scales
    step = 0.0 if steps_fused(role, on_gpu) else adapters
    return Memory(
        frozen + learnt, learnt, base + adapters, adapters, moments, role, *passes,
        step, adapters if role.ema else 0.0,
    )  # fmt: skip


# ---- megatron


@dataclass(frozen=True)
class Stage:
    """Says what a rank of one pipeline stage holds and computes."""

    layers: tuple[int, ...]  # their numbers
    dense: float  # parameters on the rank
    experts: float
    under_way: float  # micro-batches whose activations its layers keep at the same time
    is_first: bool  # it has the embedding
    is_last: bool  # it has the head
    frozen: float = 0.0  # of the dense parameters those of a tower that is not trained


def pipeline_stages(role: TrainConfig, shape: ModelShape) -> list[Stage]:
    """Tensor parallelism cuts all but the router and what latent attention projects down.

    Tied, and with several stages, both the first and the last stage have the embedding. Layers for
    multi-token prediction that are trained are on the last, a tower for images whole on the first.
    under_way: of 1F1B, and of interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473).
    """
    stages, chunks, tensor = role.pipeline_parallel, role.virtual_pipeline, role.tensor_parallel
    held, found = layers_by_stage(role, shape.text.num_hidden_layers), []
    counted = layer_parameters(shape)
    trains_mtp = shape.kind == "policy" and role.mtp_loss_scaling_factor > 0
    ahead = num_mtp_layers(shape.hf) if trains_mtp else 0
    for rank, layers in enumerate(held):
        is_first, is_last = rank == 0, rank == stages - 1
        more = [counted[-1]] * ahead if is_last else []
        cut, whole, experts = (
            sum(count[part] for count in (*(counted[number] for number in layers), *more))
            for part in range(3)
        )
        cut += len(more) * 2 * shape.text.hidden_size**2
        tower = sum(map(parameters_in, shape.towers)) if is_first else 0
        whole += tower
        ends = shape.matrices if is_first and is_last else int(is_first or is_last)
        after = stages - rank - 1
        found.append(Stage(
            layers, whole + (cut + ends * shape.matrix) / tensor,
            experts / (role.expert_parallel * role.expert_tensor_parallel),
            after + 1 if chunks == 1 else (2 * after + (chunks - 1) * stages + 1) / chunks,
            is_first, is_last, tower * role.freeze_vision,
        ))  # fmt: skip
    return found


def layers_by_stage(role: TrainConfig, num_layers: int) -> list[tuple[int, ...]]:
    """Returns the numbers of the layers of each pipeline rank: a chunk of each rank in turn."""
    sizes = stage_layers(num_layers, degrees_of(role))
    held: list[list[int]] = [[] for _ in sizes]
    first = 0
    for _ in range(role.virtual_pipeline):
        for rank, size in enumerate(sizes):
            held[rank] += range(first, first + size // role.virtual_pipeline)
            first += size // role.virtual_pipeline
    return [tuple(numbers) for numbers in held]


def layer_parameters(shape: ModelShape) -> list[tuple[int, int, int]]:
    """Returns for each layer the parameters that tensor parallelism cuts, those that it leaves
    whole, and those of routed experts.
    """
    text, sparse = shape.text, sparse_layers(shape.hf)
    experts = shape.experts // sum(sparse) if any(sparse) else 0
    router = text.hidden_size * num_experts(text) if any(sparse) else 0
    down = 0  # what latent attention projects down
    if getattr(text, "kv_lora_rank", None):
        down = text.kv_lora_rank + text.qk_rope_head_dim + (text.q_lora_rank or 0)
    found = []
    for number in range(text.num_hidden_layers):
        whole = text.hidden_size * down + (router if sparse[number] else 0)
        routed = experts if sparse[number] else 0
        cut = parameters_in(shape.language_layers[number]) - whole - routed
        found.append((cut, whole, routed))
    return found


def megatron_memory(
    role: TrainConfig,
    shape: ModelShape,
    num_ranks: int,
    tokens: MicroBatches,
    trained: bool,
    on_gpu: bool,
    images: float,
) -> Memory:
    """The memory of a rank of the pipeline stage that takes most."""
    found = [
        stage_memory(role, shape, stage, num_ranks, tokens, trained, on_gpu, images)
        for stage in pipeline_stages(role, shape)
    ]
    return max(found, key=lambda memory: memory.busy)


def stage_memory(
    role: TrainConfig,
    shape: ModelShape,
    stage: Stage,
    num_ranks: int,
    tokens: MicroBatches,
    trained: bool,
    on_gpu: bool,
    images: float,
) -> Memory:
    """Weights in the role's dtype, gradients in float32 beside them; the distributed optimizer
    shards its float32 weights and moments over the data-parallel ranks, those of experts over the
    ranks that hold the same experts.
    """
    width, stages = DTYPES[role.dtype].itemsize, role.pipeline_parallel
    data = num_ranks / (role.tensor_parallel * stages)
    expert_data = num_ranks / (role.expert_parallel * role.expert_tensor_parallel * stages)
    parameters = stage.dense + stage.experts
    learnt = parameters - stage.frozen
    shard = (stage.dense - stage.frozen) / data + stage.experts / expert_data
    states = 8 if role.dtype == "float32" else 12
    passes = (
        megatron_pass(role, shape, stage, tokens.first, trained, on_gpu, images),
        megatron_pass(role, shape, stage, tokens.later, trained, on_gpu, images),
        megatron_pass(role, shape, stage, tokens.first, False, on_gpu, images),
    )
    if trained and role.lora is not None:
        return megatron_adapters_memory(role, shape, stage, data, parameters * width, passes)
    frozen = sum(map(parameters_in, shape.towers)) if role.freeze_vision else 0
    return Memory(
        shape.count, (shape.count - frozen) * trained, parameters * width / GIB,
        4 * learnt * trained / GIB, states * shard * trained / GIB, role, *passes,
        step=4 * shard * trained / GIB, average=4 * shard * trained * bool(role.ema) / GIB,
        # the first data-parallel rank writes float32 weights, two moments and the average of all
        saved_optimizer=(12 + 4 * bool(role.ema)) * learnt * trained / GIB,
    )  # fmt: skip


def megatron_adapters_memory(
    role: TrainConfig, shape: ModelShape, stage: Stage, data: float, base: float,
    passes: tuple[PassMemory, PassMemory, PassMemory],
) -> Memory:  # fmt: skip
    """The base is held in the role's dtype; of an adapter one factor is cut over the tensor ranks.

    data: the data-parallel ranks, which share the moments. base: bytes of the weights on a rank.
    """
    learnt = adapter_parameters(shape, role)
    learnt += shape.text.hidden_size + 1 if shape.kind == "value" else 0
    share = len(stage.layers) / shape.text.num_hidden_layers
    here = learnt * share * (1 + 1 / role.tensor_parallel) / 2 * 4 / GIB
    added = learnt if shape.kind != "value" else learnt - shape.text.hidden_size - 1
    return Memory(
        shape.count + added, learnt, base / GIB + here, here, 2 * here / data, role, *passes,
        step=here / data, average=here / data if role.ema else 0.0,
    )  # fmt: skip


def megatron_pass(
    role: TrainConfig, shape: ModelShape, stage: Stage, tokens: int, trained: bool, on_gpu: bool,
    images: float = 0.0,
) -> PassMemory:  # fmt: skip
    """Activations of a stage for the micro-batches that are under way there. images: the share of
    the tokens that stand for images; the first stage's tower is passed with those of all tokens.

    Nothing is gathered: what is large beside is the gradient of the embedding and of the head, and
    a layer's experts that grouped products take stacked, all in the role's dtype.
    """
    width, tensor = DTYPES[role.dtype].itemsize, role.tensor_parallel
    sizes, hidden = layer_sizes(shape.hf, False), shape.text.hidden_size
    along = tensor if role.sequence_parallel else 1  # ranks that share a token's norms
    kept = [
        (sizes.norms / along + (sizes.attention + sizes.mlps[number]) / tensor) * width * tokens
        for number in stage.layers
    ]
    how = checkpointing_of(role, on_gpu)
    if not trained:
        activations = max(kept)
    elif how is True:
        inputs = len(kept) * hidden / along * width * tokens
        activations = stage.under_way * inputs + max(kept)
    else:  # core attention alone is computed again, of which flash attention keeps little
        activations = stage.under_way * sum(kept)
    if stage.is_first:
        tower = tower_of(role, shape, images * tokens * role.context_parallel, trained, on_gpu)
        activations = stage.under_way * tower.kept + max(activations, tower.at_work)
    if not on_gpu:
        head = head_bytes(shape, tokens, trained, on_gpu)
    elif trained:
        head = HEAD_CHUNK_BYTES + 8.0 * tokens * hidden
    else:
        head = 12.0 * tokens * (shape.text.vocab_size / tensor) / 256
    learns_matrix = trained and role.lora is None and (stage.is_first or stage.is_last)
    root = shape.matrix / tensor * width if learns_matrix else 0.0
    stacked = 0.0
    several = stage.experts and num_experts(shape.text) > role.expert_parallel
    if role.moe_grouped_gemm and role.lora is None and several:
        stacked = stage.experts / sum(sparse_layers(shape.hf)[number] for number in stage.layers)
    return PassMemory(activations, root, head * stage.is_last, units=stacked * width, end=root)
