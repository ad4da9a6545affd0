"""Policy and value losses: (num_tokens,) in, per-token losses and metric sums out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spmdrl.algo.kl import ESTIMATORS, k1, k3
from spmdrl.config import AlgoConfig
from spmdrl.types import Batch, segment_expand


def ppo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, algo: AlgoConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), for A < 0 at most -A * dual_clip.

    Source: Schulman 2017, arXiv 1707.06347, eq. 7; dual clip: Ye 2020, arXiv 1912.09729, eq. 5.
    """
    ratio = (logprobs - old_logprobs).clamp(-20, 20).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - algo.clip_low, 1 + algo.clip_high)
    loss = torch.maximum(plain, clipped)
    capped = torch.minimum(loss, -advantages * algo.dual_clip)
    return torch.where(advantages < 0, capped, loss), {"clip_fraction": (clipped > plain).float()}


POLICY_LOSSES = {"ppo": ppo}


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Half squared error, the larger of plain and clipped within `clip` of the old value."""
    near = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


def loss_weights(
    mask: Tensor, seq_lens: Tensor, response_lens: Tensor, aggregation: str, counts: Tensor
) -> Tensor:
    """Weight of each token in the loss, (num_tokens,) float32: aggregation as a weighted sum.

    counts: (2,) float64, unmasked tokens and sequences that have any, over all ranks.
    """
    num_tokens, num_seqs = counts.clamp(min=1).tolist()
    if aggregation == "token_mean":
        return mask / num_tokens
    if aggregation == "seq_mean_token_sum":
        return mask / num_seqs
    assert aggregation == "seq_mean_token_mean", aggregation
    own = segment_expand(response_lens.clamp(min=1), seq_lens)
    return mask / (own * num_seqs)


def policy_objective(
    algo: AlgoConfig,
) -> Callable[[Tensor, Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]:
    """The actor's loss function for a training engine (the seam, engines/engine.py)."""
    token_loss = POLICY_LOSSES[algo.policy_loss]

    def objective(logprobs: Tensor, entropy: Tensor, mb: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        assert mb.advantages is not None and mb.loss_weights is not None
        # with one update per rollout the policy that sampled is the policy at hand
        old = logprobs.detach() if mb.old_logprobs is None else mb.old_logprobs
        losses, metrics = token_loss(logprobs, old, mb.advantages, algo)
        metrics["entropy"] = entropy.detach()
        if algo.kl_coef and algo.kl_in == "loss":
            assert mb.ref_logprobs is not None
            losses = losses + algo.kl_coef * ESTIMATORS[algo.kl_estimator](
                logprobs, mb.ref_logprobs
            )
        if algo.entropy_coef:
            losses = losses - algo.entropy_coef * entropy
        with torch.no_grad():
            metrics["ppo_kl"] = k1(old, logprobs)
            metrics |= rollout_difference(old, mb.rollout_logprobs)
            if mb.ref_logprobs is not None:
                metrics["ref_kl"] = ESTIMATORS[algo.kl_estimator](logprobs, mb.ref_logprobs)
            sums = {name: (value * mb.loss_mask).sum() for name, value in metrics.items()}
            sums["ratio_max"] = masked_max((logprobs - old).exp(), mb.loss_mask)
            sums["logprob_diff_max"] = masked_max((old - mb.rollout_logprobs).abs(), mb.loss_mask)
        return (losses * mb.loss_weights).sum(), sums

    return objective


def rollout_difference(old_logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Tensor]:
    """How far the engine that sampled is from the trainer, per token: |difference| and k3."""
    return {
        "logprob_diff_mean": (old_logprobs - rollout_logprobs).abs(),
        "rollout_kl": k3(rollout_logprobs, old_logprobs),
    }


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Largest unmasked value, 0 if there is none; values must not be negative."""
    return (values * mask).max() if len(values) else values.new_zeros(())


def value_objective(
    algo: AlgoConfig,
) -> Callable[[Tensor, Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]:
    """The critic's loss function; `values` takes the place of the log-probabilities."""

    def objective(values: Tensor, _: Tensor, mb: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        assert mb.values is not None and mb.returns is not None and mb.loss_weights is not None
        losses = value_loss(values, mb.values, mb.returns, algo.value_clip)
        with torch.no_grad():
            sums = {
                "value_mean": (values * mb.loss_mask).sum(),
                "return_mean": (mb.returns * mb.loss_mask).sum(),
                "squared_error": ((values - mb.returns) ** 2 * mb.loss_mask).sum(),
            }
        return (losses * mb.loss_weights).sum(), sums

    return objective
