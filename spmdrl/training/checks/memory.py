"""Estimates the memory of a training role on a rank: weights, gradients, optimizer, activations.

host_memory.py adds what a process takes beside, and compares with what the host has.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from spmdrl.config import TrainConfig
from spmdrl.engines.fsdp.classifier import classifier_config, meta_classifier
from spmdrl.engines.fsdp.lora import adapter_count
from spmdrl.engines.fsdp.optimizers import state_bytes
from spmdrl.engines.megatron.layout import expert_width, moe_layers, num_experts
from spmdrl.engines.stored_dtype import DTYPES
from spmdrl.hub.hf_folder import load_hf_config, meta_model
from spmdrl.weights.checkpoint_names import checkpoint_parts

GIB = 2**30
# of what a layer keeps of its forward pass; examples/bench/activations.py measures the ratios
KEPT_SHARE = {False: 1.0, "selective": 20 / 34}


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
    root: float = 0.0  # gathered during a pass: embedding and head, and their gradients

    @property
    def idle(self) -> float:
        """The GiB that stay on the device while the role has nothing to do."""
        kept = 0.0 if self.config.offload_params else self.weights
        return kept + (0.0 if self.config.offload_optimizer else self.adam + self.average)

    @property
    def saved(self) -> float:
        """The GiB that are saved; of adapters, without the base."""
        learnt = self.weights if self.config.lora is None else self.gradients
        return learnt + self.adam + self.average

    @property
    def states(self) -> float:
        """The GiB that live as long as the run."""
        return self.weights + self.adam + self.average

    @property
    def passing(self) -> float:
        """The GiB that a forward and backward pass takes, and leaves behind for the optimizer."""
        return self.gradients + self.activations + self.root

    @property
    def busy(self) -> float:
        return self.states + self.passing


def memory_of(
    name: str, role: TrainConfig, model: str, num_ranks: int, kind: str = "policy",
    tokens: int | None = None,
) -> Memory:  # fmt: skip
    """kind: "reward", of a classifier; else of a language model.

    tokens: of the fullest micro-batch; None: micro_batch_tokens, as many as there may be.
    """
    is_reward, path = kind == "reward", role.model or model
    hf = classifier_config(path) if is_reward else load_hf_config(path)
    shell = meta_classifier(hf) if is_reward else meta_model(hf)
    count = count_parameters(shell)
    trained = name not in ("ref", "reward_model")
    tokens = min(tokens or role.micro_batch_tokens, role.micro_batch_tokens)
    activations = activation_bytes(role, hf, tokens, trained) / GIB
    root = root_bytes(role, hf, trained, kind) / GIB
    if role.engine == "fsdp":
        sharers = num_ranks if role.fsdp == -1 else role.fsdp
        one = count * 4 / sharers / GIB
        if role.lora is not None and trained:
            return memory_of_adapters(name, role, hf, count, sharers, activations, root)
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
            root,
        )
    cuts = role.tensor_parallel * role.pipeline_parallel
    held = (count - expert_count(hf)) / cuts  # parameters on a rank
    held += expert_count(hf) / (
        role.expert_parallel * role.expert_tensor_parallel * role.pipeline_parallel
    )
    one, shares = held * 4 / GIB, num_ranks / cuts
    states = 2 if role.dtype == "float32" else 3
    return Memory(
        count, count * trained, one * DTYPES[role.dtype].itemsize / 4, one * trained,
        states * one / shares * trained,
        activations / (cuts if role.sequence_parallel else role.pipeline_parallel), role,
        root=root / role.tensor_parallel,
    )  # fmt: skip


def activation_bytes(role: TrainConfig, hf: PreTrainedConfig, tokens: int, trained: bool) -> float:
    """Returns the bytes that the layers keep of a forward pass of so many tokens for the backward
    pass.

    Checkpointed they keep their inputs, and one layer at a time all; so does one that is not
    trained, whose layers keep nothing. Offloaded activations are on the device for one layer.
    """
    text, width = hf.get_text_config(), DTYPES[role.dtype].itemsize
    layer, layers = kept_per_token(hf) * width * tokens, text.num_hidden_layers
    how = role.activation_checkpointing if trained else True
    if role.activation_offload and trained:
        return layer
    if how is True:
        return layers * text.hidden_size * width * tokens
    return layers * layer * KEPT_SHARE[how]


def kept_per_token(hf: PreTrainedConfig) -> int:
    """Elements that a layer keeps of each token, by count of what its backward pass reads.

    Two norms: their normed input, and their output for the products that follow. Attention:
    queries, keys, values, and its output twice, padded and packed. Gated MLP: gate, its activation,
    up, and their product; a mixture of experts has that of each expert that a token uses.
    """
    text: Any = hf.get_text_config()
    heads, hidden = text.num_attention_heads, text.hidden_size
    size = getattr(text, "head_dim", None) or hidden // heads
    queries, keys = heads * size, (getattr(text, "num_key_value_heads", None) or heads) * size
    width = getattr(text, "intermediate_size", None) or 4 * hidden
    experts = getattr(text, "num_experts_per_tok", None)
    if experts:
        width = experts * (getattr(text, "moe_intermediate_size", None) or width)
    return 4 * hidden + 3 * queries + 2 * keys + 4 * width


def root_bytes(role: TrainConfig, hf: PreTrainedConfig, trained: bool, kind: str) -> float:
    """Returns the bytes that are gathered with the root while a pass runs: the embedding whole, and
    its gradient.

    A tied embedding has two gradients, as the head and as the embedding, and their sum.
    """
    text: Any = hf.get_text_config()
    matrix = text.vocab_size * text.hidden_size
    tied = getattr(text, "tie_word_embeddings", False) or kind != "policy"
    weights = matrix * (1 if tied else 2) * DTYPES[role.dtype].itemsize
    is_learnt = trained and role.lora is None
    return weights + (2 * matrix * 4 if is_learnt else 0)


def memory_of_adapters(
    name: str, role: TrainConfig, hf: PreTrainedConfig, count: int, sharers: int,
    activations: float, root: float,
) -> Memory:  # fmt: skip
    """count: parameters of the base, which is held in the role's dtype; the rest is float32."""
    assert role.lora is not None
    learnt = adapter_count(hf, role)
    learnt += (hf.get_text_config().hidden_size + 1) * (name == "critic")  # of its head
    adapters = learnt * 4 / sharers / GIB
    base = count * DTYPES[role.dtype].itemsize / sharers / GIB
    moments = 2 * adapters * (0.27 if role.optim.name == "adamw8bit" else 1)  # codes and scales
    return Memory(
        count + learnt, learnt, base + adapters, adapters, moments, activations, role,
        adapters if role.ema else 0.0, root,
    )  # fmt: skip


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
