"""Scans over packed sequences with masked tokens: backward ones, and running sums either way.

Compiled once per process (numba, half a second), so the loops below are the recurrences of the
papers and yet run at the speed of memory. Numba is imported when a scan is first asked for: most
algorithms need none. Its own thread pool is not used: it would change the number of threads of
every torch operation after it; the loops let go of the GIL instead.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spmdrl_kernels.switch import on_triton

TOKENS_PER_THREAD = 1 << 18  # at least; below that starting a thread costs more than it saves


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float, lam: Tensor
) -> tuple[Tensor, Tensor]:
    """A_t = r_t + gamma V_{t'} - V_t + gamma lam A_{t'}, and A_t + V_t.

    t' is the next unmasked token of the sequence; after the last one V and A are 0.
    rewards, values, mask: (num_tokens,) float32; cu_seqlens: (num_seqs + 1,) int64;
    lam: (num_seqs,) float64. Returns two (num_tokens,) float32, 0 where masked; sums are float64.
    All on the CPU, or all on one GPU that has Triton.
    """
    if on_triton(rewards, values, mask):
        from spmdrl_kernels import scan_triton

        return scan_triton.gae(rewards, values, mask, cu_seqlens, gamma, lam)
    out = torch.empty(2, len(values))
    inputs = arrays(rewards, values, mask, cu_seqlens)
    over_sequences(scans()[0], *inputs, gamma, lam.double().numpy(), *out.numpy())
    return out[0], out[1]


def returns_to_go(rewards: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t'}, t' the next unmasked token. Shapes and dtypes as in `gae`."""
    if on_triton(rewards, mask):
        from spmdrl_kernels import scan_triton

        return scan_triton.returns_to_go(rewards, mask, cu_seqlens, gamma)
    out = torch.empty(len(rewards))
    inputs = arrays(rewards, mask, cu_seqlens)
    over_sequences(scans()[1], *inputs, gamma, out.numpy())
    return out


def running_sum(
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    exclusive: bool = False,
    reverse: bool = False,
) -> Tensor:
    """S_t = sum of the x_s of the sequence's unmasked tokens s <= t; 0 where masked.

    exclusive: s < t. reverse: s >= t, or s > t.
    values: (num_tokens,) float32 or float64; mask: (num_tokens,) float32; cu_seqlens: (num_seqs +
    1,) int64. Returns (num_tokens,) like values, summed in float64; its gradient is the same sum in
    the other direction. All on the CPU, or all on one GPU that has Triton.
    """
    return _RunningSum.apply(values, mask, cu_seqlens, exclusive, reverse)


class _RunningSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, mask: Tensor, cu_seqlens: Tensor, exclusive: bool, reverse: bool
    ) -> Tensor:
        ctx.save_for_backward(mask, cu_seqlens)
        ctx.directions = exclusive, reverse
        if values.is_cuda and on_triton(mask):
            from spmdrl_kernels import scan_triton

            return scan_triton.running_sum(values, mask, cu_seqlens, exclusive, reverse)
        out = torch.empty_like(values, memory_format=torch.contiguous_format)
        over_sequences(scans()[2], *arrays(values, mask, cu_seqlens), exclusive, reverse,
                       out.numpy())  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (mask, cu_seqlens), (exclusive, reverse) = ctx.saved_tensors, ctx.directions
        found = running_sum(grads[0], mask, cu_seqlens, exclusive, not reverse)
        return found, None, None, None, None


def arrays(*tensors: Tensor) -> list[np.ndarray]:
    return [t.detach().contiguous().numpy() for t in tensors]


def over_sequences(loop: Callable[..., None], *args: Any) -> None:
    """loop(first, end, *args) over all sequences, parts of even size on torch's threads.

    args: cu_seqlens is the only int64 array among them.
    """
    cu_seqlens = next(a for a in args if isinstance(a, np.ndarray) and a.dtype == np.int64)
    num_tokens = int(cu_seqlens[-1])
    threads = max(1, min(torch.get_num_threads(), num_tokens // TOKENS_PER_THREAD))
    cuts = np.searchsorted(cu_seqlens, np.linspace(0, num_tokens, threads + 1))
    cuts[0], cuts[-1] = 0, len(cu_seqlens) - 1
    spans = list(pairwise(cuts.tolist()))
    if threads == 1:
        loop(*spans[0], *args)
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(loop, first, end, *args) for first, end in spans]:
            done.result()


@cache
def scans() -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    """The compiled loops; f(first, end, ...) goes over sequences first .. end - 1."""
    import numba

    compiled = numba.njit(nogil=True, fastmath={"contract"})  # a * b + c may be one rounding

    @compiled
    def gae_loop(  # type: ignore[no-untyped-def]
        first, end, rewards, values, mask, cu_seqlens, gamma, lam, advantages, returns
    ):
        for seq in range(first, end):
            next_value, advantage = 0.0, 0.0
            for t in range(cu_seqlens[seq + 1] - 1, cu_seqlens[seq] - 1, -1):
                if mask[t] == 0:
                    advantages[t] = returns[t] = 0.0
                    continue
                delta = rewards[t] + gamma * next_value - values[t]
                advantage = delta + gamma * lam[seq] * advantage
                next_value = values[t]
                advantages[t], returns[t] = advantage, advantage + next_value

    @compiled
    def returns_loop(first, end, rewards, mask, cu_seqlens, gamma, out):  # type: ignore[no-untyped-def]
        for seq in range(first, end):
            total = 0.0
            for t in range(cu_seqlens[seq + 1] - 1, cu_seqlens[seq] - 1, -1):
                if mask[t] == 0:
                    out[t] = 0.0
                    continue
                total = rewards[t] + gamma * total
                out[t] = total

    @compiled
    def sum_loop(first, end, values, mask, cu_seqlens, exclusive, reverse, out):  # type: ignore[no-untyped-def]
        for seq in range(first, end):
            total = 0.0
            begin, length = cu_seqlens[seq], cu_seqlens[seq + 1] - cu_seqlens[seq]
            for i in range(length):
                t = begin + (length - 1 - i if reverse else i)
                if mask[t] == 0:
                    out[t] = 0.0
                    continue
                before = total
                total += values[t]
                out[t] = before if exclusive else total

    return gae_loop, returns_loop, sum_loop
