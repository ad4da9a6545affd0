"""Batch-invariant mixtures of experts: which experts a token is sent to, and what they make of it,
does not depend on the tokens beside it. Engine and trainer compute both by the functions here.
"""

from __future__ import annotations

from typing import Any

import torch
from spmdrl_kernels import invariant
from torch import Tensor, nn

FAMILIES = ("qwen3_moe", "mixtral")  # model types; others have shared experts or other scores


def rule_of(text: Any) -> tuple[int, bool, bool]:
    """Returns of a language model's config how many experts a token has, whether their weights are
    divided by their sum, and whether weights stay in float32.
    """
    assert text.model_type in FAMILIES, text.model_type
    is_mixtral = text.model_type == "mixtral"
    return text.num_experts_per_tok, is_mixtral or text.norm_topk_prob, is_mixtral


def route(
    hidden: Tensor, weight: Tensor, top_k: int, normalised: bool, in_float: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden: (num_tokens, hidden_size), weight: (num_experts, hidden_size). Returns the logits,
    (num_tokens, num_experts), and weights and numbers of the experts, (num_tokens, top_k) each.
    """
    logits = invariant.linear(hidden, weight)
    probs = invariant.log_softmax(logits.float()).exp()
    weights, chosen = probs.topk(top_k, dim=-1)
    if normalised:
        weights = weights / invariant.tree_sum(weights)
    return logits, weights if in_float else weights.to(logits.dtype), chosen


def mixture(
    hidden: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Sums the weighted outputs of a token's experts in the order of their numbers.

    hidden: (num_tokens, hidden_size); chosen, weights: (num_tokens, top_k); gate_up: (num_experts,
    2 * width, hidden_size); down: (num_experts, hidden_size, width). Returns what is like hidden.
    """
    out = torch.zeros_like(hidden)
    for expert in chosen.unique().tolist():
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        gate, up = invariant.linear(hidden[tokens], gate_up[expert]).chunk(2, dim=-1)
        made = invariant.linear(invariant.silu(gate) * up, down[expert])
        out.index_add_(0, tokens, (made * weights[tokens, places, None]).to(out.dtype))
    return out


class InvariantRouter(nn.Module):
    """Takes the place of Qwen3MoeTopKRouter and MixtralTopKRouter."""

    weight: Tensor
    top_k: int

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normalised = getattr(self, "norm_topk_prob", None)  # Mixtral has no choice
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        return route(hidden, self.weight, self.top_k, normalised is not False, normalised is None)


class InvariantExperts(nn.Module):
    """Takes the place of Qwen3MoeExperts and MixtralExperts."""

    gate_up_proj: Tensor
    down_proj: Tensor

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return mixture(hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj)


FORMS: dict[str, type[nn.Module]] = {
    "Qwen3MoeTopKRouter": InvariantRouter, "MixtralTopKRouter": InvariantRouter,
    "Qwen3MoeExperts": InvariantExperts, "MixtralExperts": InvariantExperts,
}  # fmt: skip


def product_shapes(weights: Any) -> set[tuple[int, int]]:
    """(out, in) of the products with some matrices, which may be stacked: (..., out, in)."""
    return {(weight.shape[-2], weight.shape[-1]) for weight in weights}
