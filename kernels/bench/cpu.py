"""Kernels on a CPU against torch's own: python kernels/bench/cpu.py [lm_head]

Best of several runs, forward plus backward where there is one; a JSON line each. The shapes are
those of the add2 workload: 64 sequences of 70 tokens, hidden 256, intermediate 768; and a batch of
256 answers of 16,384 tokens for the scan. The LM head, 512 rows and a vocabulary of 32,000, is
beside the form that holds all logits: medians of runs that take turns.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from spmdrl_kernels import scan
from spmdrl_kernels.linear import linear
from spmdrl_kernels.lm_head import lm_head_logprobs
from spmdrl_kernels.norm import rms_norm
from torch.nn import functional as F

from spmdrl.distributed.process import keep_freed_memory

TOKENS, HIDDEN, INTERMEDIATE = 64 * 70, 256, 768


def best_ms(work: Callable[[], object], runs: int = 10) -> float:
    """Of at least `runs` runs and half a second, after one that does not count."""
    work()
    best, end = float("inf"), time.perf_counter() + 0.5
    while runs > 0 or time.perf_counter() < end:
        runs -= 1
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


def scan_inputs(num_seqs: int = 256, length: int = 16_384) -> tuple[torch.Tensor, ...]:
    """Rewards, values and a mask, (num_seqs, length) each: of the turns of 64 tokens one in ten is
    a tool's."""
    mask = (torch.rand(num_seqs, length // 64) > 0.1).float().repeat_interleave(64, dim=1)
    return torch.randn(num_seqs, length) * mask, torch.randn(num_seqs, length) * mask, mask


def packed_gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns by the packed scan."""
    num_seqs, length = rewards.shape
    cu_seqlens = torch.arange(num_seqs + 1) * length
    flat = [x.reshape(-1) for x in (rewards, values, mask)]
    return scan.gae(*flat, cu_seqlens, 1.0, torch.full((num_seqs,), 0.95))


def loop_gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, one token at a time over the padded batch, as the field's trainers do it."""
    carry, next_values, out = torch.zeros(len(rewards)), torch.zeros(len(rewards)), []
    for t in range(rewards.shape[1] - 1, -1, -1):
        m = mask[:, t]
        delta = rewards[:, t] + 1.0 * next_values - values[:, t]
        carry = m * (delta + 1.0 * 0.95 * carry) + (1 - m) * carry
        next_values = m * values[:, t] + (1 - m) * next_values
        out.append(carry)
    advantages = torch.stack(out[::-1], dim=1)
    return advantages * mask, (advantages + values) * mask


def packed_returns(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    cu_seqlens = torch.arange(len(rewards) + 1) * rewards.shape[1]
    return scan.returns_to_go(rewards.reshape(-1), mask.reshape(-1), cu_seqlens, 0.95)


def loop_returns(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    carry, out = torch.zeros(len(rewards)), []
    for t in range(rewards.shape[1] - 1, -1, -1):
        m = mask[:, t]
        carry = m * (rewards[:, t] + 0.95 * carry) + (1 - m) * carry
        out.append(carry)
    return torch.stack(out[::-1], dim=1) * mask


def full_logits(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy, all logits in memory."""
    log_p = F.linear(hidden, weight).float().log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), entropy


def report_lm_head(rows: int, size: int, vocab: int, dtype: torch.dtype, backward: bool) -> None:
    hidden = torch.randn(rows, size).to(dtype).requires_grad_(backward)
    weight = (torch.randn(vocab, size) * 0.02).to(dtype).requires_grad_(backward)
    targets = torch.randint(0, vocab, (rows,))

    def seconds(function: Callable) -> float:
        start = time.perf_counter()
        found = function(hidden, weight, targets)
        if backward:
            torch.autograd.grad(found[0].sum() + 0.01 * found[1].sum(), [hidden, weight])
        return time.perf_counter() - start

    forms = (lm_head_logprobs, full_logits)
    times = [[seconds(form) for form in forms] for _ in range(8)][1:]
    ours, theirs = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    name = f"lm_head {rows}x{size}x{vocab} {dtype}{' + backward' if backward else ''}"
    row = {"kernel": name, "ms": round(ours, 1), "torch_ms": round(theirs, 1)}
    print(json.dumps(row | {"ratio": round(theirs / ours, 2)}), flush=True)


def report_lm_heads() -> None:
    for size in (256, 1024):
        for dtype in (torch.float32, torch.bfloat16):
            for backward in (False, True):
                report_lm_head(512, size, 32_000, dtype, backward)


def main() -> None:
    report_lm_heads()
    if "lm_head" not in sys.argv:
        report_layers_and_scans()


def report_layers_and_scans() -> None:
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight = torch.randn(INTERMEDIATE, HIDDEN, requires_grad=True)
    scale = torch.ones(HIDDEN, requires_grad=True)

    def plain_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:  # what transformers computes
        return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    report("linear", with_backward(linear, x, weight), with_backward(F.linear, x, weight), 10)
    ours = with_backward(lambda x, w: rms_norm(x, w, 1e-6), x, scale)
    report("rms_norm", ours, with_backward(plain_norm, x, scale), 10)
    inputs = scan_inputs()
    rewards, mask = inputs[0], inputs[2]
    keep_freed_memory()  # as every program of ours does: 16 MiB of fresh pages cost milliseconds
    for ours, theirs in zip(packed_gae(*inputs), loop_gae(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs.reshape(-1), rtol=1e-4, atol=1e-4)
    report("gae scan", lambda: packed_gae(*inputs), lambda: loop_gae(*inputs), 5)
    report(
        "returns scan",
        lambda: packed_returns(rewards, mask),
        lambda: loop_returns(rewards, mask),
        5,
    )


if __name__ == "__main__":
    main()
