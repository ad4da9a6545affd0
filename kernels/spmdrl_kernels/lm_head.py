"""LM head -> log-probability and entropy, without ever holding all logits.

logits = softcap(h W^T + b) / T are made for a few rows at a time, in the forward pass and once more
in the backward pass, so memory is bounded by `chunk_bytes` whatever the vocabulary.

On GPUs with Triton the work is that of lm_head_triton.py, whose logits never are in memory; what
follows is its plain form.

With the vocabulary's rows split over the ranks of a group (tensor parallelism) each rank makes its
own logits; what is summed over the vocabulary is summed over the group as well.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl_kernels.switch import on_triton

CHUNK_BYTES = 256 << 20  # float32 logits held at once


def lm_head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    pi_squared: bool = False,
    group: dist.ProcessGroup | None = None,
    first_row: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each target, entropy (nats) and sum of squares of each distribution.

    hidden: (rows, hidden_size); weight: (vocab, hidden_size); targets: (rows,) int64.
    Returns three (rows,) float32 tensors; gradients flow from the first two to hidden, weight and
    bias. The third, sum_v p(v)^2, is 0 unless `pi_squared`.
    Softmax, its sums and the weight's gradient are float32 whatever the inputs are.

    group: its ranks hold the vocabulary's rows in order, this one those from `first_row` on; all
    give the same hidden and targets and get the same result. Collective over it. The gradient of
    hidden is then this rank's part of it, to be summed over the group by whoever copied hidden.
    """
    if on_triton(hidden, weight):
        from spmdrl_kernels import lm_head_triton

        return lm_head_triton.lm_head_logprobs(
            hidden, weight, targets, temperature, bias, softcap, chunk_bytes, pi_squared, group,
            first_row,
        )  # fmt: skip
    # as many rows on every rank of the group, whose shares of the vocabulary may differ
    vocab = len(weight) if group is None else _largest(len(weight), group, weight.device)
    rows_per_chunk = max(1, chunk_bytes // (4 * max(vocab, 1)))
    return _LmHead.apply(
        hidden, weight, bias, targets, temperature, softcap, rows_per_chunk, pi_squared, group,
        first_row,
    )  # fmt: skip


class _LmHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        softcap: float | None,
        rows: int,
        pi_squared: bool,
        group: dist.ProcessGroup | None,
        first_row: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy, lse = torch.empty_like(logprobs), torch.empty_like(logprobs)
        squares = torch.zeros_like(logprobs)
        for part in _chunks(len(hidden), rows):
            logits = _logits(hidden[part], weight, bias, softcap).div_(temperature)
            lse[part] = _over_group(logits.logsumexp(-1), group)
            log_p = logits.sub_(lse[part, None])
            logprobs[part] = _pick(log_p, targets[part] - first_row, group)
            # not lse - sum(p logits): for a sure model that is a small difference of large numbers
            probs = log_p.exp()
            if pi_squared:
                squares[part] = probs.square().sum(-1)
            entropy[part] = -probs.mul_(log_p).sum(-1)
        if group is not None:
            for sums in (logprobs, entropy, squares) if pi_squared else (logprobs, entropy):
                dist.all_reduce(sums, group=group)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.settings = (temperature, softcap, rows, group, first_row)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(squares)
        return logprobs, entropy, squares

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy, _ = grads
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        temperature, softcap, rows, group, first_row = ctx.settings
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for part in _chunks(len(hidden), rows):
            capped = _logits(hidden[part], weight, bias, softcap)
            log_p = (capped / temperature).sub_(lse[part, None])
            probs = log_p.exp()
            grad = torch.zeros_like(probs)  # d loss / d (logits / temperature)
            if grad_logprobs is not None:  # one_hot - p
                grad -= probs * grad_logprobs[part, None]
                _add_at(grad, targets[part] - first_row, grad_logprobs[part], group)
            if grad_entropy is not None:  # -p (log p + H)
                grad -= probs * (log_p + entropy[part, None]) * grad_entropy[part, None]
            grad /= temperature
            if softcap is not None:  # d cap tanh(x / cap) = 1 - tanh^2
                grad *= 1 - (capped / softcap) ** 2
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(weight.dtype)
            grad_hidden[part] = grad @ weight
            grad_weight += grad.T @ hidden[part]
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, *[None] * 7


def _largest(count: int, group: dist.ProcessGroup, device: torch.device) -> int:
    value = torch.tensor(count, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return int(value)


def _over_group(lse: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """log of the sum of exp(lse) over the group: (rows,)."""
    if group is None:
        return lse
    most = lse.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    total = (lse - most).exp_()
    dist.all_reduce(total, group=group)
    return total.log_().add_(most)


def _pick(table: Tensor, columns: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """table[i, columns[i]]: (rows,); 0 where another rank has that column."""
    if group is None:
        return table.gather(-1, columns[:, None]).squeeze(-1)
    here = (columns >= 0) & (columns < table.shape[1])
    if table.shape[1] == 0:
        return table.new_zeros(len(table))
    found = table.gather(-1, columns.clamp(0, table.shape[1] - 1)[:, None]).squeeze(-1)
    return found.where(here, 0.0)


def _add_at(
    table: Tensor, columns: Tensor, values: Tensor, group: dist.ProcessGroup | None
) -> None:
    """table[i, columns[i]] += values[i], where this rank has that column."""
    if table.shape[1] == 0:
        return
    if group is not None:
        values = values * ((columns >= 0) & (columns < table.shape[1]))
        columns = columns.clamp(0, table.shape[1] - 1)
    table.scatter_add_(-1, columns[:, None], values[:, None])


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
