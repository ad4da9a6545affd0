"""Backward scans over packed sequences with masked tokens.

Compiled once per process (numba, about a second), so the loops below are the recurrences of the
papers and yet run at the speed of memory, one sequence per thread. Numba is imported when a scan is
first asked for: most algorithms need none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float, lam: Tensor
) -> tuple[Tensor, Tensor]:
    """A_t = r_t + gamma V_{t'} - V_t + gamma lam A_{t'}, and A_t + V_t.

    t' is the next unmasked token of the sequence; after the last one V and A are 0.
    rewards, values, mask: (num_tokens,) float32 on the CPU; cu_seqlens: (num_seqs + 1,) int64;
    lam: (num_seqs,) float64. Returns two (num_tokens,) float32, 0 where masked; sums are float64.
    """
    out = torch.empty(2, len(values))
    inputs = arrays(rewards, values, mask, cu_seqlens)
    scans()[0](*inputs, gamma, lam.double().numpy(), *out.numpy())
    return out[0], out[1]


def returns_to_go(rewards: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t'}, t' the next unmasked token. Shapes and dtypes as in `gae`."""
    out = torch.empty_like(rewards)
    scans()[1](*arrays(rewards, mask, cu_seqlens), gamma, out.numpy())
    return out


def arrays(*tensors: Tensor) -> list[np.ndarray]:
    return [t.detach().contiguous().numpy() for t in tensors]


@cache
def scans() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The compiled loops, on as many threads as torch has."""
    import numba

    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))

    compiled = numba.njit(parallel=True, fastmath={"contract"})  # a * b + c may be one rounding

    @compiled
    def gae_loop(rewards, values, mask, cu_seqlens, gamma, lam, advantages, returns):  # type: ignore[no-untyped-def]
        for seq in numba.prange(len(cu_seqlens) - 1):
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
    def returns_loop(rewards, mask, cu_seqlens, gamma, out):  # type: ignore[no-untyped-def]
        for seq in numba.prange(len(cu_seqlens) - 1):
            total = 0.0
            for t in range(cu_seqlens[seq + 1] - 1, cu_seqlens[seq] - 1, -1):
                if mask[t] == 0:
                    out[t] = 0.0
                    continue
                total = rewards[t] + gamma * total
                out[t] = total

    return gae_loop, returns_loop
