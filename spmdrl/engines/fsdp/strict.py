"""A Hugging Face model whose logprobs are bit for bit those of a strict rollout engine.

Each layer that sums or takes an exponential becomes its batch-invariant form (invariant.py); what
is left of the model is elementwise. A layer that has no such form is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from spmdrl_kernels import invariant
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.activations import SiLUActivation

from spmdrl.config import ConfigError
from spmdrl.engines.fsdp.attention import packed_attention
from spmdrl.engines.fsdp.packed_rows import Packing, from_padded, to_padded
from spmdrl.engines.fsdp.strict_experts import FORMS as EXPERT_FORMS
from spmdrl.engines.fsdp.strict_experts import product_shapes

NAME = "spmdrl_strict"
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # whose angles depend on the position alone
AS_THEY_ARE = (nn.Embedding, nn.Dropout, nn.Identity)


class InvariantLinear(nn.Linear):
    """nn.Linear with `invariant.linear` as its forward."""

    def forward(self, input: Tensor) -> Tensor:
        return invariant.linear(input, self.weight, self.bias)


class InvariantRmsNorm(nn.Module):
    """Takes the place of Llama's RMSNorm and its copies."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return invariant.rms_norm(hidden_states, self.weight, self.variance_epsilon)


class InvariantSilu(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return invariant.silu(input)


def make_strict(policy: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Changes a TokenPolicy in place, before it is sharded. dtype: of its computation.

    Raises ConfigError where a layer has no batch-invariant form, or a form is none on this machine.
    """
    hf: Any = policy.hf
    require_sound(weight_shapes(hf), [head_dim_of(hf.config)], dtype, device)
    use_invariant_layers(hf)
    policy.lm_head_logprobs = invariant.lm_head_logprobs  # type: ignore[assignment]


def use_invariant_layers(hf: PreTrainedModel) -> None:
    """Replaces layers by their batch-invariant forms, in place. Raises ConfigError where a layer
    has no batch-invariant form.
    """
    require_none(uncovered(hf), f"{type(hf).__name__}")
    for module in hf.modules():
        form = invariant_form(module)
        if form is not None:
            module.__class__ = form
    hf.set_attn_implementation(NAME)


def uncovered(hf: PreTrainedModel) -> list[str]:
    """Layers without a batch-invariant form."""
    return [
        f"{name} ({type(module).__name__})"
        for name, module in hf.named_modules()
        if invariant_form(module) is None and not is_covered(module)
    ]


def invariant_form(module: nn.Module) -> type[nn.Module] | None:
    """None where the module is to stay what it is."""
    name = type(module).__name__
    if name in EXPERT_FORMS:
        return EXPERT_FORMS[name]
    if name in ("Linear", "FastLinear"):
        return InvariantLinear
    if name.endswith("RMSNorm") or name == "FastRmsNorm":  # Gemma's has another field for epsilon
        return InvariantRmsNorm if hasattr(module, "variance_epsilon") else None
    return InvariantSilu if isinstance(module, (nn.SiLU, SiLUActivation)) else None


def is_covered(module: nn.Module) -> bool:
    """Whether a module that stays what it is gives a token the same bits in any company.

    One that only has others in it is taken to be elementwise beside them: the comparison of every
    step would show where it is not.
    """
    if type(module).__name__.endswith("RotaryEmbedding"):
        return getattr(module, "rope_type", None) in ROPE_TYPES
    if any(module.children()):
        return not any(True for _ in module.parameters(recurse=False))
    return isinstance(module, AS_THEY_ARE)


def require_none(unknown: Iterable[str], where: str) -> None:
    """Raises ConfigError where layers are not covered."""
    found = list(unknown)
    if found:
        raise ConfigError(
            f"strict=True: {where} has layers without a batch-invariant form: "
            f"{', '.join(found[:5])}{' and more' if len(found) > 5 else ''}. Models of the kind of "
            "Llama, Qwen2, Qwen3, Qwen3-MoE and Mixtral have none such; set strict=False for this "
            "one"
        )


def require_sound(
    shapes: Iterable[tuple[int, int]], head_dims: Iterable[int], dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    """Tries the operators on this machine. Raises ConfigError where they are not invariant.

    shapes: (out, in) of the weights.
    """
    found = invariant.faults(shapes, head_dims, dtype, device)
    if found:
        raise ConfigError(
            f"strict=True: on {device}, {torch.get_num_threads()} threads, {found[0]}"
            f"{f' ({len(found)} such findings)' if len(found) > 1 else ''}. Try OMP_NUM_THREADS=1, "
            "or set strict=False"
        )


def weight_shapes(hf: PreTrainedModel) -> set[tuple[int, int]]:
    """(out, in) of each kind of product."""
    head: Any = hf.get_output_embeddings()
    linears = [head, *(m for m in hf.modules() if isinstance(m, nn.Linear))]
    of_experts = [
        parameter
        for module in hf.modules()
        if type(module).__name__ in EXPERT_FORMS
        for parameter in module.parameters()
    ]
    return product_shapes([*(m.weight for m in linears), *of_experts])


def head_dim_of(config: Any) -> int:
    text = config.get_text_config()
    own = getattr(text, "head_dim", None)
    return own or text.hidden_size // text.num_attention_heads


def strict_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Does what `packed_attention` does, with the same bits for a token however it is packed.

    Raises ValueError for what that does not do either.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return packed_attention(
            module, query, key, value, None, packing, scaling, sliding_window=sliding_window,
            **kwargs,
        )[0]  # fmt: skip

    def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = [t[0].transpose(0, 1) for t in (query, key, value)]  # (tokens, heads, head_dim)
        outs = []
        for group in packing.groups:
            q, k, v = (to_padded(part, group) for part in parts)
            places = torch.arange(group.length, device=q.device).expand(group.num_seqs, -1)
            out = invariant.attention(q, k, v, places, scale, sliding_window)
            outs.append(from_padded(out, group, len(parts[0])))
        return sum(outs[1:], start=outs[0])[None]

    refused = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    if refused or not getattr(module, "is_causal", True):
        raise ValueError(f"strict attention lacks {refused or 'non-causal use'}")
    return invariant.with_gradient_of(exact, plain, query, key, value), None


AttentionInterface.register(NAME, strict_attention)
