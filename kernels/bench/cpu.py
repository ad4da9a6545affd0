"""Kernels on a CPU against torch's own: python kernels/bench/cpu.py

Best of several runs, forward plus backward where there is one; a JSON line each. The shapes are
those of the add2 workload: 64 sequences of 70 tokens, hidden 256, intermediate 768; and a batch of
256 answers of 16,384 tokens for the scan.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch
from spmdrl_kernels.linear import linear
from spmdrl_kernels.norm import rms_norm
from spmdrl_kernels.scan import discounted_suffix_sums
from torch.nn import functional as F

TOKENS, HIDDEN, INTERMEDIATE = 64 * 70, 256, 768


def best_ms(work: Callable[[], object], runs: int = 10) -> float:
    work()
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def report(name: str, ours: Callable[[], object], theirs: Callable[[], object], runs: int) -> None:
    a, b = best_ms(ours, runs), best_ms(theirs, runs)
    row = {"kernel": name, "ms": round(a, 3), "torch_ms": round(b, 3), "ratio": round(b / a, 2)}
    print(json.dumps(row | {"threads": torch.get_num_threads()}), flush=True)


def with_backward(function: Callable, *leaves: torch.Tensor) -> Callable[[], object]:
    up = torch.randn_like(function(*leaves))
    return lambda: torch.autograd.grad(function(*leaves), leaves, up)


def loop(x: torch.Tensor, decay: float) -> torch.Tensor:
    out, carry = torch.empty_like(x), torch.zeros(len(x))
    for t in range(x.shape[1] - 1, -1, -1):
        carry = x[:, t] + decay * carry
        out[:, t] = carry
    return out


def main() -> None:
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight = torch.randn(INTERMEDIATE, HIDDEN, requires_grad=True)
    scale = torch.ones(HIDDEN, requires_grad=True)

    def plain_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:  # what transformers computes
        return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    report("linear", with_backward(linear, x, weight), with_backward(F.linear, x, weight), 10)
    ours = with_backward(lambda x, w: rms_norm(x, w, 1e-6), x, scale)
    report("rms_norm", ours, with_backward(plain_norm, x, scale), 10)
    rewards = torch.randn(256, 16_384)
    report(
        "gae scan", lambda: discounted_suffix_sums(rewards, 0.95), lambda: loop(rewards, 0.95), 3
    )


if __name__ == "__main__":
    main()
