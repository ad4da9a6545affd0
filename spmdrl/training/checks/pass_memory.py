"""Estimates what a forward and backward pass takes on a rank beside weights and optimizer state.

docs/memory.md has the formulas. Elements are counted from what the backward pass reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from spmdrl.config import TrainConfig, checkpointing_of
from spmdrl.engines.fsdp.float8 import fp8_layers
from spmdrl.engines.fsdp.sharding import gathers_once
from spmdrl.engines.megatron.families import FAMILIES
from spmdrl.engines.megatron.layout import moe_layers, settings_of
from spmdrl.engines.stored_dtype import DTYPES
from spmdrl.hub.hf_folder import head_size, layer_size
from spmdrl.training.checks.model_shape import ModelShape, layers_in_float32, quantized_weights
from spmdrl.training.checks.tower_memory import TowerMemory, tower_memory

# of what a layer keeps of its forward pass; examples/bench/activations.py measures the ratios
KEPT_SHARE = {False: 1.0, "selective": 20 / 34}
HEAD_CHUNK_BYTES = 256 << 20  # of d loss / d logits, at most: spmdrl_kernels.lm_head.CHUNK_BYTES


@dataclass(frozen=True)
class PassMemory:
    """Bytes of one pass over the fullest micro-batch; 0 where the engine has no such part."""

    activations: float  # kept for the backward pass, and one layer's at work
    root: float  # gathered while the pass runs: embedding and head, or all; the head's gradient
    head: float  # the LM head's workspace: logits are never there as a whole
    units: float  # layers that FSDP has gathered, with their gradients until these are reduced
    end: float  # the root and its gradients while these are reduced; activations are gone then

    @property
    def parts(self) -> dict[str, float]:
        """Bytes at the peak. The head and the layers work one after the other, the root's
        reduction comes last."""
        beside = self.root + max(self.head, self.units)
        if self.activations + beside < self.end:
            return {"activations": 0.0, "temporary": self.end}
        return {"activations": self.activations, "temporary": beside}

    @property
    def after_activations(self) -> float:
        """The most of a pass whose activations are given back, all but the last layer's."""
        return max(self.root + self.units, self.end)


def fsdp_pass(
    role: TrainConfig, shape: ModelShape, tokens: int, trained: bool, on_gpu: bool, sharers: int,
    images: float = 0.0,
) -> PassMemory:  # fmt: skip
    """tokens: of the fullest micro-batch. sharers: ranks that share one copy of the weights.
    images: the share of the tokens that stand for images; the tower is passed with those of a whole
    row.
    """
    width = DTYPES[role.dtype].itemsize
    learns = trained and role.lora is None
    # the head; an embedding of its own is a unit that is given back
    root: float = shape.matrix * width
    once = gathers_once(role, sharers)  # the whole model, through all micro-batches
    if once or (trained and not role.reshard_after_forward):  # layers, until they are passed
        elsewhere = shape.experts * (1 - 1 / role.expert_parallel)  # experts of other ranks
        root += (shape.count - shape.matrix - elsewhere) * width
    end = 0.0
    if learns:  # gradients in the dtype of compute, and in float32 to be reduced
        both = shape.matrices * shape.matrix
        end = both * width + both * (width + 4 * (1 if sharers > 1 else 2))
        if once:  # an earlier micro-batch ends with all weights and these gradients
            end = max(end, root + both * width)
        root += shape.matrix * width  # the head's, which comes first and stays
    layers = activation_bytes(role, shape.hf, tokens, trained, on_gpu)
    tower = tower_of(role, shape, images * tokens * role.ulysses, trained, on_gpu)
    return PassMemory(
        activations=tower.kept + max(layers, tower.at_work),
        root=root,
        head=head_bytes(shape, tokens, trained, on_gpu),
        units=layer_bytes(role, shape, width, learns, sharers)
        - (shape.layer * width if once else 0)
        + 4 * layers_in_float32(shape, role) * trained
        + fp8_bytes(role, shape, tokens),
        end=end,
    )


def tower_of(
    role: TrainConfig, shape: ModelShape, image_tokens: float, trained: bool, on_gpu: bool
) -> TowerMemory:
    share = KEPT_SHARE["selective" if role.activation_checkpointing == "selective" else False]
    return tower_memory(role, shape, image_tokens, trained, on_gpu, share)


def fp8_bytes(role: TrainConfig, shape: ModelShape, tokens: int) -> float:
    """Returns the bytes that rounding to FP8 takes in the layer that takes most (TrainConfig.fp8).

    Uncompiled it goes through several float32 copies of a factor: at most 15 bytes for each number
    of the largest one, measured on a CPU (docs/fp8.md). What is compiled writes FP8 alone: in a
    backward pass the gradient in two orders, the weight and the input.
    """
    if role.fp8 is None:
        return 0.0
    largest = max(
        max(layer.weight.numel(), tokens * max(layer.weight.shape))
        for layer in fp8_layers(shape.shell).values()
    )
    return (4.0 if role.compile else 15.0) * largest


def layer_bytes(
    role: TrainConfig, shape: ModelShape, width: int, learns: bool, sharers: int
) -> float:
    """Returns the bytes of the layers that are gathered at once. Of a layer's experts a rank has
    its own alone, which it gathers from the ranks that share these.
    """
    if role.expert_parallel == 1:
        quantized, largest = quantized_weights(shape, role)  # one is dequantised at a time
        layer = max(0.0, shape.layer - quantized / len(shape.language_layers))
        return unit_bytes(layer, width, learns, sharers) + largest * width
    experts = shape.layer_experts / role.expert_parallel
    dense = unit_bytes(shape.layer - shape.layer_experts, width, learns, sharers)
    return dense + unit_bytes(experts, width, learns, sharers // role.expert_parallel)


def unit_bytes(layer: float, width: int, learns: bool, sharers: int) -> float:
    """Returns the bytes of the layers that are gathered at once.

    Forward: the layer at work, and two results of all-gathers, its own and that of the next layer.
    Backward: the layer, the next one's result, its gradient, and this once more in float32 for the
    reduce-scatter. On one rank nothing is gathered, and the float32 gradient is there twice.
    Source: torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
    """
    if sharers == 1:
        return layer * (2 * width + 8 if learns else width)
    return layer * (3 * width + 4 if learns else 3 * width)


def head_bytes(shape: ModelShape, tokens: int, trained: bool, on_gpu: bool) -> float:
    """Returns the workspace of the LM head for so many rows (docs/kernels.md)."""
    hidden, vocab = shape.text.hidden_size, shape.text.vocab_size
    if on_gpu:
        forward = 12.0 * tokens * vocab / 256
        backward = HEAD_CHUNK_BYTES + 8.0 * tokens * hidden
        return max(forward, backward) if trained else forward
    chunk = min(4.0 * tokens * min(vocab, max(512, vocab / 32)), HEAD_CHUNK_BYTES)
    return 2 * chunk + (4.0 * tokens * hidden if trained else 0.0)


def activation_bytes(
    role: TrainConfig, hf: PreTrainedConfig, tokens: int, trained: bool, on_gpu: bool = False
) -> float:
    """Returns the bytes that the layers keep of a forward pass of so many tokens for the backward
    pass.

    Checkpointed they keep their inputs, and one layer at a time all; one that is not trained keeps
    nothing, so that one layer's are there. Offloaded activations are on the device for one layer.
    """
    width, text = DTYPES[role.dtype].itemsize, hf.get_text_config()
    kept = [elements * width * tokens for elements in kept_per_token(hf, on_gpu)]
    sent = exchanged_per_token(role, text) * width * tokens
    how = checkpointing_of(role, on_gpu)
    if not trained or role.activation_offload:
        return max(kept) + sent
    if how is True:
        return len(kept) * text.hidden_size * width * tokens + max(kept) + sent
    return sum(kept) * KEPT_SHARE[how] + sent


def exchanged_per_token(role: TrainConfig, text: Any) -> int:
    """Returns the elements of a token that are on their way between ranks that share experts: as
    they are sent, and as they come, for each of its experts.
    """
    if role.engine != "fsdp" or role.expert_parallel == 1:
        return 0
    return 2 * (getattr(text, "num_experts_per_tok", None) or 0) * text.hidden_size


def kept_per_token(hf: PreTrainedConfig, on_gpu: bool = False) -> list[int]:
    """Returns the elements that each layer keeps of a token.

    Two norms keep their input, and their output for the products that follow: four hidden sizes.
    on_gpu: SwiGLU is a kernel that keeps gate and up; without it the activated gate is kept too.
    """
    sizes = layer_sizes(hf, on_gpu)
    return [sizes.norms + sizes.attention + mlp for mlp in sizes.mlps]


@dataclass(frozen=True)
class LayerSizes:
    """Elements that a layer keeps of each token, by part; tensor parallelism cuts all but the
    norms'."""

    norms: int
    attention: int
    mlps: tuple[int, ...]  # of each layer


def layer_sizes(hf: PreTrainedConfig, on_gpu: bool) -> LayerSizes:
    """Counts a layer's parts.

    A mixture of experts keeps, of each expert that a token uses, what a dense one does, and the
    token itself before and after the experts.
    """
    text: Any = hf.get_text_config()
    factor = 3 if on_gpu else 4
    width = layer_size(text, "intermediate_size") or 4 * text.hidden_size
    experts = getattr(text, "num_experts_per_tok", None) or 0
    inside = getattr(text, "moe_intermediate_size", None) or width
    shared = (getattr(text, name, None) for name in ("n_shared_experts", "num_shared_experts"))
    apart = next(filter(None, shared), 0)  # DeepSeek's shared experts, EXAONE's
    always = inside * apart + (getattr(text, "shared_expert_intermediate_size", None) or 0)
    sparse = experts * (2 * text.hidden_size + factor * inside) + factor * always
    mlps = tuple(sparse if is_sparse else factor * width for is_sparse in sparse_layers(hf))
    family = FAMILIES.get(text.model_type)
    norms = 4  # of the two before attention and MLP; as many of those behind
    if family is not None:
        norms = 4 * (family.pre_norms + family.sandwich_norms)
    return LayerSizes(norms * text.hidden_size, attention_elements(text, on_gpu), mlps)


def sparse_layers(hf: PreTrainedConfig) -> list[bool]:
    """Returns for each layer whether its MLP is a mixture of experts."""
    text: Any = hf.get_text_config()
    if text.model_type in FAMILIES:
        return moe_layers(text)
    return [bool(getattr(text, "num_experts_per_tok", None))] * text.num_hidden_layers


def attention_elements(text: Any, on_gpu: bool) -> int:
    """Elements that attention keeps of a token.

    Queries, keys and values as attention reads them, and its output. With norms of queries and keys
    also what goes into these. On a CPU the output is there twice, padded and packed.
    """
    heads = text.num_attention_heads
    if getattr(text, "kv_lora_rank", None):  # DeepSeek's latent attention
        query = heads * (text.qk_nope_head_dim + text.qk_rope_head_dim)
        latent = 2 * (text.kv_lora_rank + text.qk_rope_head_dim + (text.q_lora_rank or 0))
        return 2 * query + 2 * heads * text.v_head_dim + latent
    size = head_size(text)
    groups = layer_size(text, "num_key_value_heads") or heads
    family = FAMILIES.get(text.model_type)
    known = family is not None and (family.joint_qk_norms or settings_of(text).get("qk_layernorm"))
    normed = bool(known) or "qwen3" in text.model_type
    if on_gpu and not normed:
        return (2 * heads + 2 * groups) * size
    return (3 * heads + (3 if on_gpu else 2) * groups) * size
