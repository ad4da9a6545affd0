"""Policy losses: one number per token, before aggregation; and how those become one number.

Every policy loss is f(logprobs, old_logprobs, mb, algo) -> (losses, metrics). logprobs carry the
gradient; mb has the advantages A, the mask, the sequence lengths; losses is (num_tokens,), metrics
are (num_tokens,) without gradient. r = exp(logprobs - old_logprobs). A loss of whole sequences
stands on every token of its sequence, which `seq_mean_token_mean` makes one term per sequence.
`POLICY_LOSSES` is all of them; algo.policy_loss may also be a function of yours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spmdrl.algo.advantages import estimator_of
from spmdrl.config import AlgoConfig
from spmdrl.types import Batch, segment_expand, segment_sum

Loss = tuple[Tensor, dict[str, Tensor]]


def ppo(logprobs: Tensor, old_logprobs: Tensor, mb: Batch, algo: AlgoConfig) -> Loss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), for A < 0 at most -A dual_clip.

    Source: Schulman 2017, arXiv 1707.06347, eq. 7; dual clip: Ye 2020, arXiv 1912.09729, eq. 5.
    """
    advantages = advantages_of(mb)
    loss, metrics = clipped_surrogate(ratio_of(logprobs, old_logprobs), advantages, algo)
    capped = torch.minimum(loss, -advantages * algo.dual_clip)
    metrics["dual_clip_fraction"] = ((advantages < 0) & (loss > capped)).float()
    return torch.where(advantages < 0, capped, loss), metrics


def gspo(logprobs: Tensor, old_logprobs: Tensor, mb: Batch, algo: AlgoConfig) -> Loss:
    """max(-A s, -A clip(s, 1 - low, 1 + high)), s = exp(mean_t log r) with the token's gradient.

    s_t = stopgrad(s) pi / stopgrad(pi). Source: GSPO-token, arXiv 2507.18071, eq. 13 and 14.
    """
    mean = sequence_mean(logprobs - old_logprobs, mb).detach()
    ratio = bounded_exp(mean + logprobs - logprobs.detach())
    return clipped_surrogate(ratio, advantages_of(mb), algo)


def cispo(logprobs: Tensor, old_logprobs: Tensor, mb: Batch, algo: AlgoConfig) -> Loss:
    """-stopgrad(clip(r, 1 - low, 1 + high)) A log pi. Source: MiniMax-M1, arXiv 2506.13585.

    Clipped tokens keep their gradient.
    """
    ratio = ratio_of(logprobs, old_logprobs).detach()
    clipped = ratio.clamp(1 - algo.clip_low, 1 + algo.clip_high)
    return -clipped * advantages_of(mb) * logprobs, {"clip_fraction": (ratio != clipped).float()}


def sapo(logprobs: Tensor, old_logprobs: Tensor, mb: Batch, algo: AlgoConfig) -> Loss:
    """-A sigmoid(tau (r - 1)) 4 / tau, tau_pos where A > 0, else tau_neg.

    Source: arXiv 2511.20347.
    """
    advantages = advantages_of(mb)
    tau = torch.where(advantages > 0, algo.sapo_tau_pos, algo.sapo_tau_neg)
    gate = torch.sigmoid(tau * (ratio_of(logprobs, old_logprobs) - 1)) * 4 / tau
    return -advantages * gate, {}


def reinforce(logprobs: Tensor, old_logprobs: Tensor, mb: Batch, algo: AlgoConfig) -> Loss:
    """-A log pi; the weight of a rollout correction makes it -stopgrad(w) A log pi.

    Source: Williams 1992; as `gpg`: arXiv 2504.02546.
    """
    return -advantages_of(mb) * logprobs, {}


def clip_cov(logprobs: Tensor, old_logprobs: Tensor, mb: Batch, algo: AlgoConfig) -> Loss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), 0 on the tokens that were selected.

    Selected are some of high covariance (algo.selection). Source: arXiv 2505.22617.
    """
    assert mb.selected is not None
    ratio = ratio_of(logprobs, old_logprobs)
    loss, metrics = clipped_surrogate(ratio, advantages_of(mb), algo)
    return loss * (1 - mb.selected), {**metrics, "cov_fraction": mb.selected}


def kl_cov(logprobs: Tensor, old_logprobs: Tensor, mb: Batch, algo: AlgoConfig) -> Loss:
    """-A r, plus cov_kl_coef |log r| on the tokens of highest covariance (algo.selection).

    Source: arXiv 2505.22617.
    """
    assert mb.selected is not None
    log_ratio = logprobs - old_logprobs
    loss = -advantages_of(mb) * bounded_exp(log_ratio)
    penalty = algo.cov_kl_coef * log_ratio.abs() * mb.selected
    return loss + penalty, {"cov_fraction": mb.selected}


def geo_mean(logprobs: Tensor, old_logprobs: Tensor, mb: Batch, algo: AlgoConfig) -> Loss:
    """-A exp(mean_t clipped log r) of a sequence; A the mean of its tokens' advantages.

    log r is clipped to [-low, high] on the side where clipping lowers the objective.
    Source: GMPO, arXiv 2507.20673.
    """
    advantages, log_ratio = sequence_mean(advantages_of(mb), mb), logprobs - old_logprobs
    clipped = log_ratio.clamp(-algo.clip_low, algo.clip_high)
    pessimistic = torch.where(
        advantages > 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped)
    )
    loss = -advantages * bounded_exp(sequence_mean(pessimistic, mb))
    return loss, {"clip_fraction": (pessimistic != log_ratio).float()}


def dppo_tv(logprobs: Tensor, old_logprobs: Tensor, mb: Batch, algo: AlgoConfig) -> Loss:
    """-A r, 0 where the token's probability has moved too far in the direction of A.

    Too far: by more than high upwards for A > 0, low downwards otherwise; total variation of
    (token, any other). The paper measures from the policy that sampled: that is correction.bypass.
    Source: DPPO, arXiv 2602.04879.
    """
    moved = (logprobs.exp() - old_logprobs.exp()).detach()
    return trust_region(logprobs, old_logprobs, moved.abs(), mb, algo)


def dppo_kl(logprobs: Tensor, old_logprobs: Tensor, mb: Batch, algo: AlgoConfig) -> Loss:
    """Computes dppo_tv's loss with another distance: the KL of (token, any other), old to new."""
    new, old = (x.detach().double().clamp(max=-1e-12) for x in (logprobs, old_logprobs))
    others = torch.log(-torch.expm1(old)) - torch.log(-torch.expm1(new))
    divergence = old.exp() * (old - new) - torch.expm1(old) * others
    return trust_region(logprobs, old_logprobs, divergence, mb, algo)


def dro(logprobs: Tensor, old_logprobs: Tensor, mb: Batch, algo: AlgoConfig) -> Loss:
    """-(A log pi - beta / 2 log^2 r). Source: arXiv 2405.19107."""
    penalty = algo.dro_beta / 2 * (logprobs - old_logprobs) ** 2
    return penalty - advantages_of(mb) * logprobs, {}


def sppo(logprobs: Tensor, old_logprobs: Tensor, mb: Batch, algo: AlgoConfig) -> Loss:
    """(beta sum_t log r - A)^2 of a sequence, A its centred win probability (`win_rate`).

    Source: SPPO, arXiv 2405.00675, with beta = 1 / eta and the whole divided by eta^2.
    """
    log_ratio = segment_sum((logprobs - old_logprobs) * kept_mask(mb), mb.seq_lens)
    target = sequence_mean(advantages_of(mb), mb)
    return (algo.sppo_beta * segment_expand(log_ratio, mb.seq_lens) - target) ** 2, {}


POLICY_LOSSES = {
    "ppo": ppo, "vanilla": ppo, "gspo": gspo, "cispo": cispo, "sapo": sapo, "gpg": reinforce,
    "clip_cov": clip_cov, "kl_cov": kl_cov, "geo_mean": geo_mean, "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl, "dro": dro, "sppo": sppo, "reinforce": reinforce,
}  # fmt: skip
SEQUENCE_LOSSES = frozenset({"gspo", "geo_mean", "sppo"})  # of sequences: see aggregation_of
SELECTING_LOSSES = frozenset({"clip_cov", "kl_cov"})  # act on tokens chosen over the mini-batch
NO_RATIO = frozenset({"gpg", "reinforce"})


# ---- parts


def advantages_of(mb: Batch) -> Tensor:
    assert mb.advantages is not None
    return mb.advantages


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp, within e^-20 .. e^20: beyond that a ratio says no more, and float32 would overflow."""
    return log_ratio.clamp(-20, 20).exp()


def ratio_of(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return bounded_exp(logprobs - old_logprobs)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, algo: AlgoConfig) -> Loss:
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - algo.clip_low, 1 + algo.clip_high)
    return torch.maximum(plain, clipped), {"clip_fraction": (clipped > plain).float()}


def trust_region(
    logprobs: Tensor, old_logprobs: Tensor, distance: Tensor, mb: Batch, algo: AlgoConfig
) -> Loss:
    """-A min(r, cap), 0 outside of the region; a capped ratio keeps the gradient of log pi."""
    advantages = advantages_of(mb)
    up = (logprobs > old_logprobs).detach()
    outside = torch.where(
        advantages > 0, up & (distance > algo.clip_high), ~up & (distance > algo.clip_low)
    ).float()
    capped = ratio_of(logprobs, old_logprobs).detach().clamp(max=algo.dppo_ratio_cap)
    surrogate = capped * (1 + logprobs - logprobs.detach())
    return -advantages * surrogate * (1 - outside), {"clip_fraction": outside}


def sequence_mean(values: Tensor, mb: Batch) -> Tensor:
    """(num_tokens,): the mean over the tokens of each token's sequence that are trained on."""
    mask = kept_mask(mb)
    sums, counts = segment_sum(values * mask, mb.seq_lens), segment_sum(mask, mb.seq_lens)
    return segment_expand(sums / counts.clamp(min=1), mb.seq_lens)


def kept_mask(mb: Batch) -> Tensor:
    """(num_tokens,): the loss mask, less what a rollout correction rejected."""
    return mb.loss_mask if mb.kept is None else mb.kept


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Half squared error, the larger of plain and clipped within `clip` of the old value."""
    near = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


# ---- aggregation: one weight per token, so that the loss is a plain sum over micro-batches


def token_mean(mask: Tensor, seq_lens: Tensor, counts: Tensor, norm_length: int) -> Tensor:
    """1 / tokens of the mini-batch."""
    return mask / float(counts[0].clamp(min=1))


def token_sum(mask: Tensor, seq_lens: Tensor, counts: Tensor, norm_length: int) -> Tensor:
    """1."""
    return mask.clone()


def seq_mean_token_sum(mask: Tensor, seq_lens: Tensor, counts: Tensor, norm_length: int) -> Tensor:
    """1 / sequences of the mini-batch."""
    return mask / float(counts[1].clamp(min=1))


def seq_mean_token_mean(mask: Tensor, seq_lens: Tensor, counts: Tensor, norm_length: int) -> Tensor:
    """1 / (tokens of its sequence * sequences of the mini-batch)."""
    own = segment_expand(segment_sum(mask, seq_lens).clamp(min=1), seq_lens)
    return mask / (own * float(counts[1].clamp(min=1)))


def seq_mean_token_sum_norm(
    mask: Tensor, seq_lens: Tensor, counts: Tensor, norm_length: int
) -> Tensor:
    """1 / (norm_length * sequences of the mini-batch). Source: Dr. GRPO, arXiv 2503.20783."""
    return mask / (norm_length * float(counts[1].clamp(min=1)))


AGGREGATIONS = {
    "token_mean": token_mean, "token_sum": token_sum, "seq_mean_token_sum": seq_mean_token_sum,
    "seq_mean_token_mean": seq_mean_token_mean, "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
}  # fmt: skip


def aggregation_of(algo: AlgoConfig) -> str | Callable[..., Tensor]:
    """Returns the config's aggregation, or that of the loss's or estimator's paper where it says
    none.
    """
    if algo.aggregation is not None:
        return algo.aggregation
    if isinstance(algo.policy_loss, str) and algo.policy_loss in SEQUENCE_LOSSES | {"sapo"}:
        return "seq_mean_token_mean"
    return estimator_of(algo).aggregation


def loss_counts(mask: Tensor, seq_lens: Tensor) -> Tensor:
    """(2,) float64: unmasked tokens, and sequences that have any; add up over all ranks."""
    lens = segment_sum(mask.double(), seq_lens)
    return torch.stack([lens.sum(), (lens > 0).double().sum()])


def loss_weights(
    mask: Tensor, seq_lens: Tensor, counts: Tensor, algo: AlgoConfig, norm_length: int
) -> Tensor:
    """Weight of each token in the loss, (num_tokens,) float32: aggregation as a weighted sum.

    counts: `loss_counts` over all ranks' tokens of the mini-batch.
    """
    chosen = aggregation_of(algo)
    function = AGGREGATIONS[chosen] if isinstance(chosen, str) else chosen
    return function(mask, seq_lens, counts, norm_length)
