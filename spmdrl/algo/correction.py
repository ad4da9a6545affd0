"""Rollout correction: the engine that sampled is not quite the policy that is trained.

Its numerics differ, top-p and top-k cut its distribution, its weights may be older. rho is the
probability of a token under the trainer's policy over that under the engine's; log_ratio is log rho
of every token, (num_tokens,), 0 where masked.
Sources: truncated importance sampling, https://fengyao.notion.site/off-policy-rl (2025); IcePop,
https://ringtech.notion.site/icepop (2025); k1 to k3: J. Schulman, Approximating KL Divergence
(2020).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spmdrl.config import CorrectionConfig
from spmdrl.segments import segment_expand, segment_sum, to_device

Bound = float | tuple[float, float]


def correction_weights(
    log_ratio: Tensor, mask: Tensor, seq_lens: Tensor, config: CorrectionConfig
) -> Tensor:
    """(num_tokens,) weight of each token's policy loss, 0 where masked; not yet normalised.

    rho of the token, its product over the sequence, or the geometric mean over the sequence; then
    min(w, high) ("truncate"), or 0 unless low <= w <= high ("mask").
    """
    log_weight = LEVELS[config.level](log_ratio, mask, seq_lens)
    weights = log_weight.clamp(-20, 20).exp()
    if config.mode == "truncate":
        return weights.clamp(max=config.high) * mask
    return torch.where((weights >= config.low) & (weights <= config.high), weights, 0.0) * mask


def of_token(log_ratio: Tensor, mask: Tensor, seq_lens: Tensor) -> Tensor:
    return log_ratio


def of_sequence(log_ratio: Tensor, mask: Tensor, seq_lens: Tensor) -> Tensor:
    return segment_expand(segment_sum(log_ratio * mask, seq_lens), seq_lens)


def geometric(log_ratio: Tensor, mask: Tensor, seq_lens: Tensor) -> Tensor:
    sums, counts = segment_sum(log_ratio * mask, seq_lens), segment_sum(mask, seq_lens)
    return segment_expand(sums / counts.clamp(min=1), seq_lens)


LEVELS = {"token": of_token, "sequence": of_sequence, "geometric": geometric}


def weight_moments(weights: Tensor, mask: Tensor, seq_lens: Tensor, level: str) -> Tensor:
    """(2,) float64: sum and number of the weights, one per token or one per sequence.

    Added up over all ranks they are what `normalize` divides by: weights / (sum / number).
    """
    if level == "token":
        return torch.stack([weights.double().sum(), mask.double().sum()])
    counts = segment_sum(mask, seq_lens)
    per_seq = segment_sum(weights.double(), seq_lens) / counts.clamp(min=1)
    return torch.stack([per_seq.sum(), (counts > 0).double().sum()])


def divergences(log_ratio: Tensor) -> dict[str, Tensor]:
    """Returns what the tests measure, by name; k1 is log rho itself, so that its bounds are bounds
    of rho.
    """
    bounded = log_ratio.clamp(-20, 20)
    return {"k1": log_ratio, "k2": 0.5 * bounded**2, "k3": bounded.exp() - 1 - bounded}


def rejection_keep(
    log_ratio: Tensor, mask: Tensor, seq_lens: Tensor, tests: Mapping[str, Bound]
) -> Tensor:
    """(num_tokens,) float32: 1 where every test is passed, 0 where one fails or masked.

    tests: names of TESTS -> an upper bound, or for k1 (low, high) of the ratio: of the token
    (token_k1), of the whole sequence (seq_sum_k1), the geometric mean (seq_mean_k1). A sequence
    that fails loses all of its tokens.
    """
    keep = mask.clone()
    counts = segment_sum(mask, seq_lens).clamp(min=1)
    for name, bound in tests.items():
        level, kind = TESTS[name]
        value = divergences(log_ratio * mask)[kind]
        if level == "sum":
            value = segment_expand(segment_sum(value * mask, seq_lens), seq_lens)
        elif level == "mean":
            value = segment_expand(segment_sum(value * mask, seq_lens) / counts, seq_lens)
        elif level == "max":
            (lengths,) = to_device([seq_lens], value.device)
            largest = torch.segment_reduce(value * mask, "max", lengths=lengths, unsafe=True)
            value = segment_expand(largest, seq_lens)
        if isinstance(bound, tuple | list):
            low, high = torch.tensor(bound).log().tolist()
            keep = keep * ((value >= low) & (value <= high))
        else:
            keep = keep * (value <= bound)
    return keep


def off_policy_keep(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, seq_lens: Tensor, threshold: float
) -> Tensor:
    """(num_tokens,): 0 where A < 0 and the sequence's mean of -log rho is above the threshold.

    log_ratio: of the policy at hand, so that its own updates count. Source: DeepSeek-V3.2, arXiv
    2512.02556, section 3.1 (off-policy sequence masking).
    """
    far = -geometric(log_ratio, mask, seq_lens) > threshold
    return 1 - ((advantages < 0) & far).to(log_ratio.dtype)


TESTS = {
    "token_k1": ("token", "k1"), "token_k2": ("token", "k2"), "token_k3": ("token", "k3"),
    "seq_sum_k1": ("sum", "k1"), "seq_sum_k2": ("sum", "k2"), "seq_sum_k3": ("sum", "k3"),
    "seq_mean_k1": ("mean", "k1"), "seq_mean_k2": ("mean", "k2"), "seq_mean_k3": ("mean", "k3"),
    "seq_max_k2": ("max", "k2"), "seq_max_k3": ("max", "k3"),
}  # fmt: skip


MISMATCH_SUMS = tuple(
    f"correction_{name}"
    for name in ("tokens", "seqs", "kl", "k3", "ppl", "rho2", "seq_rho2", "w", "w2", "kept")
)


def mismatch_sums(
    log_ratio: Tensor, weights: Tensor, keep: Tensor, mask: Tensor, seq_lens: Tensor
) -> Tensor:
    """(10,) float64 sums of this rank, MISMATCH_SUMS, to be added up over ranks for
    `mismatch_metrics`.
    """
    log_rho = log_ratio.double() * mask
    rho = log_rho.clamp(-20, 20).exp()
    counts = segment_sum(mask.double(), seq_lens)
    per_seq = segment_sum(log_rho, seq_lens)
    has = (counts > 0).double()
    w = weights.double() * mask
    return torch.stack([
        mask.double().sum(), has.sum(), -log_rho.sum(), ((rho - 1 - log_rho) * mask).sum(),
        ((-per_seq / counts.clamp(min=1)).clamp(-20, 20).exp() * has).sum(), (rho**2 * mask).sum(),
        ((2 * per_seq).clamp(-40, 40).exp() * has).sum(), w.sum(), (w**2).sum(),
        (keep.double() * mask).sum(),
    ])  # fmt: skip


def mismatch_metrics(sums: Tensor) -> dict[str, float]:
    """Returns metrics of how far sampling is from training, over the global batch. sums: or any
    multiple of all of them.

    kl: mean of log(engine / trainer), an estimate of KL(engine || trainer); k3: the same, never
    negative; ppl_ratio: the trainer's perplexity of a sequence over the engine's, mean over
    sequences; chi2: E[rho^2] - 1 of tokens and of sequences; ess: effective sample size of the
    weights, (sum w)^2 / (n sum w^2), 1 where all are equal.
    """
    tokens, seqs, kl, k3, ppl, rho2, seq_rho2, w, w2, kept = sums.tolist()
    tokens, seqs = tokens or 1.0, seqs or 1.0
    return {
        "correction/kl": kl / tokens,
        "correction/k3": k3 / tokens,
        "correction/ppl_ratio": ppl / seqs,
        "correction/chi2_token": rho2 / tokens - 1,
        "correction/chi2_seq": seq_rho2 / seqs - 1,
        "correction/ess": w**2 / (tokens * w2) if w2 else 0.0,
        "correction/weight_mean": w / tokens,
        "correction/rejected": 1 - kept / tokens,
    }


def take_mismatch(sums: dict[str, float]) -> dict[str, float]:
    """Takes MISMATCH_SUMS out of an update's metrics; returns `mismatch_metrics` of them, {} where
    there are none.
    """
    if MISMATCH_SUMS[0] not in sums:
        return {}
    return mismatch_metrics(torch.tensor([sums.pop(n) for n in MISMATCH_SUMS], dtype=torch.float64))
