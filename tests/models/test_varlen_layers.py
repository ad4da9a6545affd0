"""Recurrent layers that are given a packed row whole, where kernels keep its sequences apart.

flash-linear-attention and causal-conv1d need a GPU. Functions stand in for them here that take the
same arguments and compute each sequence of a row by itself with transformers' own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import BY_KIND, config_of
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from spmdrl.engines.fsdp import attention, per_sequence_layers
from spmdrl.engines.fsdp.activations import use_checkpointing
from spmdrl.engines.fsdp.per_sequence_layers import run_per_sequence
from spmdrl.engines.fsdp.trial import (
    gradients_of,
    logprobs_one_by_one,
    logprobs_packed,
    random_sequences,
    tiny_copy,
)

Stand = Callable[..., Any]


def convolution_of_sequences(own: Stand, rows: list[int]) -> Stand:
    """Stands in for causal_conv1d_fn. x: (1, width, tokens); seq_idx: (1, tokens) int32."""

    def run(x: Tensor, *args: Any, seq_idx: Tensor | None = None, **kwargs: Any) -> Tensor:
        if seq_idx is None:
            return own(x, *args, **kwargs)
        rows.append(x.shape[-1])
        assert seq_idx.dtype == torch.int32 and seq_idx.shape == (1, x.shape[-1])
        lens = torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()
        return torch.cat([own(part, *args, **kwargs) for part in x.split(lens, dim=2)], dim=2)

    return run


def delta_rule_of_sequences(own: Stand) -> Stand:
    """Stands in for chunk_gated_delta_rule. Tensors: (1, tokens, heads, ...)."""

    def run(*args: Tensor, cu_seqlens: Tensor | None = None, **kwargs: Any) -> Any:
        if cu_seqlens is None:
            return own(*args, **kwargs)
        parts = []
        for begin, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            cut = {n: v[:, begin:end] if isinstance(v, Tensor) else v for n, v in kwargs.items()}
            parts.append(own(*(a[:, begin:end] for a in args), **cut)[0])
        return torch.cat(parts, dim=1), None

    return run


def both_ways(checkpointing: Any = False) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probabilities and gradients of a packed row, and of transformers' own, one by one.

    checkpointing: as activation_checkpointing of the model with the packed row.
    """
    config = config_of(BY_KIND["qwen3_5_text"])
    sequences, wanted = random_sequences(torch.device("cpu"))
    plain, ours = tiny_copy(config), tiny_copy(config)
    run_per_sequence(ours)
    ours.set_attn_implementation(attention.NAME)
    use_checkpointing(ours.train(), checkpointing)
    found = []
    for model, logprobs in (
        (ours, logprobs_packed(ours, sequences)),
        (plain, logprobs_one_by_one(plain, sequences)),
    ):
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        found.append([logprobs, *gradients_of(logprobs, wanted, named).values()])
    return found[0], found[1]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the rows that a varlen convolution has computed."""
    found: list[int] = []
    monkeypatch.setattr(per_sequence_layers, "varlen_packages", lambda: ["fla"])
    own: Stand = qwen3_5.causal_conv1d_fn
    monkeypatch.setattr(qwen3_5, "causal_conv1d_fn", convolution_of_sequences(own, found))
    return found


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_a_row_is_computed_whole_where_kernels_keep_its_sequences_apart(
    checkpointing: Any, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pass is one with gradients, as in fine-tuning."""
    kernel = delta_rule_of_sequences(qwen3_5.torch_chunk_gated_delta_rule)
    monkeypatch.setattr(qwen3_5, "torch_chunk_gated_delta_rule", kernel)
    sequences, _ = random_sequences(torch.device("cpu"))
    for got, want in zip(*both_ways(checkpointing), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert len(rows) > 1 and {*rows} == {sum(map(len, sequences))}


def test_a_row_is_padded_where_a_kernel_mixes_its_sequences(rows: list[int]) -> None:
    """transformers' own delta rule carries its state over; the convolution alone is not enough."""
    sequences, _ = random_sequences(torch.device("cpu"))
    for got, want in zip(*both_ways(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert rows == [sum(map(len, sequences))]  # the one trial


@pytest.mark.parametrize("kind", ["falcon_h1", "lfm2", "minimax"])
def test_what_transformers_computes_on_cpus_stays_padded(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of recurrent layer is tried and found to mix what is packed."""
    decisions: list[bool] = []
    own = per_sequence_layers.keeps_apart

    def noted(*args: Any) -> bool:
        decisions.append(own(*args))
        return decisions[-1]

    monkeypatch.setattr(per_sequence_layers, "varlen_packages", lambda: ["mamba_ssm"])
    monkeypatch.setattr(per_sequence_layers, "keeps_apart", noted)
    sequences, _ = random_sequences(torch.device("cpu"))
    plain, ours = tiny_copy(config_of(BY_KIND[kind])), tiny_copy(config_of(BY_KIND[kind]))
    run_per_sequence(ours)
    ours.set_attn_implementation(attention.NAME)
    got, want = logprobs_packed(ours, sequences), logprobs_one_by_one(plain, sequences)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert not any(decisions)
    assert len(decisions) <= 1  # a layer that takes no such arguments is not tried
