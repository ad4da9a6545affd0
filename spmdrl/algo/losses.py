"""Policy losses: one number per token, before aggregation; and how those become one number.

Every policy loss is f(logprobs, old_logprobs, mb, *, options) -> (losses, metrics). logprobs carry
the gradient; mb has the advantages A, the mask, the sequence lengths; losses is (num_tokens,),
metrics are (num_tokens,) without gradient. r = exp(logprobs - old_logprobs). The options are what
algo.loss_args may set, see options.py; low and high are clip_low and clip_high. A loss of whole
sequences stands on every token of its sequence, which `seq_mean_token_mean` makes one term per
sequence. `POLICY_LOSSES` at the end is all of them; algo.policy_loss may also be a function of
yours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from spmdrl.algo.advantages import estimator_of
from spmdrl.algo.options import (
    AboveOne,
    BelowOne,
    Fraction,
    Positive,
    given_options,
    option_values,
)
from spmdrl.algo.own_functions import checked_aggregation, checked_loss, name_of
from spmdrl.algo.preference_losses import PREFERENCE_LOSSES, PreferenceLoss
from spmdrl.config import Aggregation, AlgoConfig
from spmdrl.segments import segment_expand, segment_sum
from spmdrl.types import Batch

Loss = tuple[Tensor, dict[str, Tensor]]


def ppo(
    logprobs: Tensor, old_logprobs: Tensor, mb: Batch, *,
    clip_low: BelowOne = 0.2, clip_high: Positive = 0.2, dual_clip: AboveOne = 3.0,
) -> Loss:  # fmt: skip
    """max(-A r, -A clip(r, 1 - low, 1 + high)), for A < 0 at most -A dual_clip.

    Source: Schulman 2017, arXiv 1707.06347, eq. 7; dual clip: Ye 2020, arXiv 1912.09729, eq. 5.
    """
    advantages, ratio = advantages_of(mb), ratio_of(logprobs, old_logprobs)
    loss, metrics = clipped_surrogate(ratio, advantages, clip_low, clip_high)
    capped = torch.minimum(loss, -advantages * dual_clip)
    metrics["dual_clip_fraction"] = ((advantages < 0) & (loss > capped)).float()
    return torch.where(advantages < 0, capped, loss), metrics


def gspo(
    logprobs: Tensor, old_logprobs: Tensor, mb: Batch, *,
    clip_low: BelowOne = 0.2, clip_high: Positive = 0.2,
) -> Loss:  # fmt: skip
    """max(-A s, -A clip(s, 1 - low, 1 + high)), s = exp(mean_t log r) with the token's gradient.

    s_t = stopgrad(s) pi / stopgrad(pi). Source: GSPO-token, arXiv 2507.18071, eq. 13 and 14.
    `luspo` is this loss summed over the tokens, so that a sequence's term is its length times that
    of GSPO. Source: arXiv 2602.05261.
    """
    mean = sequence_mean(logprobs - old_logprobs, mb).detach()
    ratio = bounded_exp(mean + logprobs - logprobs.detach())
    return clipped_surrogate(ratio, advantages_of(mb), clip_low, clip_high)


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, mb: Batch, *,
    clip_low: Positive = 0.2, clip_high: Positive = 0.2,
) -> Loss:  # fmt: skip
    """-stopgrad(clip(r, 1 - low, 1 + high)) A log pi. Source: MiniMax-M1, arXiv 2506.13585.

    Clipped tokens keep their gradient.
    """
    ratio = ratio_of(logprobs, old_logprobs).detach()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -clipped * advantages_of(mb) * logprobs, {"clip_fraction": (ratio != clipped).float()}


def sapo(
    logprobs: Tensor, old_logprobs: Tensor, mb: Batch, *,
    tau_pos: Positive = 1.0, tau_neg: Positive = 1.05,
) -> Loss:  # fmt: skip
    """-A sigmoid(tau (r - 1)) 4 / tau, tau_pos where A > 0, else tau_neg.

    Source: arXiv 2511.20347.
    """
    advantages = advantages_of(mb)
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (ratio_of(logprobs, old_logprobs) - 1)) * 4 / tau
    return -advantages * gate, {}


def vespo(
    logprobs: Tensor, old_logprobs: Tensor, mb: Batch, *,
    k_pos: Positive = 2.0, lambda_pos: Positive = 3.0,
    k_neg: Positive = 3.0, lambda_neg: Positive = 2.0,
) -> Loss:  # fmt: skip
    """-stopgrad(phi(W)) A log pi, phi(W) = W^k exp(lambda (1 - W)), W the sequence's product of r.

    k and lambda are k_pos and lambda_pos where A >= 0, else k_neg and lambda_neg. The paper's W is
    to the policy that sampled: that is correction.bypass. Source: VESPO, arXiv 2602.10693, section
    3.4, with the constants of its code (github.com/FloyedShen/VESPO) and of TRL.
    """
    advantages, log_ratio = advantages_of(mb), (logprobs - old_logprobs).detach().clamp(-20, 20)
    of_sequence = segment_sum(log_ratio * trained_mask(mb), mb.seq_lens).clamp(-20, 20)
    log_weight = segment_expand(of_sequence, mb.seq_lens)
    excess = 1 - log_weight.exp()
    of_good, of_bad = (
        k * log_weight + decay * excess for k, decay in ((k_pos, lambda_pos), (k_neg, lambda_neg))
    )
    phi = torch.where(advantages >= 0, of_good, of_bad).exp()
    return -phi * advantages * logprobs, {"vespo_weight": phi}


def reinforce(logprobs: Tensor, old_logprobs: Tensor, mb: Batch) -> Loss:
    """-A log pi; the weight of a rollout correction makes it -stopgrad(w) A log pi.

    Source: Williams 1992; as `gpg`: arXiv 2504.02546.
    """
    return -advantages_of(mb) * logprobs, {}


def clip_cov(
    logprobs: Tensor, old_logprobs: Tensor, mb: Batch, *,
    clip_low: BelowOne = 0.2, clip_high: Positive = 0.2, cov_fraction: Fraction = 0.0002,
    cov_low: float = 1.0, cov_high: float = 5.0,
) -> Loss:  # fmt: skip
    """max(-A r, -A clip(r, 1 - low, 1 + high)), 0 on the tokens that were selected.

    Selected are cov_fraction of the mini-batch's tokens, drawn from those with a covariance between
    cov_low and cov_high (algo/selection.py). Source: arXiv 2505.22617.
    """
    assert mb.selected_mask is not None
    ratio = ratio_of(logprobs, old_logprobs)
    loss, metrics = clipped_surrogate(ratio, advantages_of(mb), clip_low, clip_high)
    return loss * (1 - mb.selected_mask), {**metrics, "cov_fraction": mb.selected_mask}


def kl_cov(
    logprobs: Tensor, old_logprobs: Tensor, mb: Batch, *,
    cov_fraction: Fraction = 0.0002, cov_kl_coef: Positive = 1.0,
) -> Loss:  # fmt: skip
    """-A r, plus cov_kl_coef |log r| on the cov_fraction of tokens of the highest covariance.

    algo/selection.py selects them. Source: arXiv 2505.22617.
    """
    assert mb.selected_mask is not None
    log_ratio = logprobs - old_logprobs
    loss = -advantages_of(mb) * bounded_exp(log_ratio)
    penalty = cov_kl_coef * log_ratio.abs() * mb.selected_mask
    return loss + penalty, {"cov_fraction": mb.selected_mask}


def geo_mean(
    logprobs: Tensor, old_logprobs: Tensor, mb: Batch, *,
    clip_low: Positive = 0.2, clip_high: Positive = 0.2,
) -> Loss:  # fmt: skip
    """-A exp(mean_t clipped log r) of a sequence; A the mean of its tokens' advantages.

    log r is clipped to [-low, high] on the side where clipping lowers the objective.
    Source: GMPO, arXiv 2507.20673.
    """
    advantages, log_ratio = sequence_mean(advantages_of(mb), mb), logprobs - old_logprobs
    clipped = log_ratio.clamp(-clip_low, clip_high)
    pessimistic = torch.where(
        advantages > 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped)
    )
    loss = -advantages * bounded_exp(sequence_mean(pessimistic, mb))
    return loss, {"clip_fraction": (pessimistic != log_ratio).float()}


def sequence_product(
    logprobs: Tensor, old_logprobs: Tensor, mb: Batch, *,
    clip_low: BelowOne = 0.2, clip_high: Positive = 0.2,
) -> Loss:  # fmt: skip
    """max(-A S, -A clip(S, 1 - low, 1 + high)), S = prod_t r of a sequence, which is one action; A
    the mean of its tokens' advantages.

    Source: Back to Basics (RLOO), arXiv 2402.14740, section 3.1; so does TRL's RLOOTrainer.
    """
    mask = trained_mask(mb)
    total = segment_sum((logprobs - old_logprobs) * mask, mb.seq_lens)
    ratio = bounded_exp(segment_expand(total, mb.seq_lens))
    return clipped_surrogate(ratio, sequence_mean(advantages_of(mb), mb), clip_low, clip_high)


def dppo_tv(
    logprobs: Tensor, old_logprobs: Tensor, mb: Batch, *,
    clip_low: Positive = 0.2, clip_high: Positive = 0.2, ratio_cap: Positive = 20.0,
) -> Loss:  # fmt: skip
    """-A r, 0 where the token's probability has moved too far in the direction of A.

    Too far: by more than high upwards for A > 0, low downwards otherwise; total variation of
    (token, any other). The paper measures from the policy that sampled: that is correction.bypass.
    Source: DPPO, arXiv 2602.04879.
    """
    moved = (logprobs.exp() - old_logprobs.exp()).detach()
    distance = moved.abs()
    return trust_region(logprobs, old_logprobs, distance, mb, clip_low, clip_high, ratio_cap)


def dppo_kl(
    logprobs: Tensor, old_logprobs: Tensor, mb: Batch, *,
    clip_low: Positive = 0.2, clip_high: Positive = 0.2, ratio_cap: Positive = 20.0,
) -> Loss:  # fmt: skip
    """Computes dppo_tv's loss with another distance: the KL of (token, any other), old to new."""
    new, old = (x.detach().double().clamp(max=-1e-12) for x in (logprobs, old_logprobs))
    others = torch.log(-torch.expm1(old)) - torch.log(-torch.expm1(new))
    divergence = old.exp() * (old - new) - torch.expm1(old) * others
    return trust_region(logprobs, old_logprobs, divergence, mb, clip_low, clip_high, ratio_cap)


def dro(
    logprobs: Tensor, old_logprobs: Tensor, mb: Batch, *,
    beta: Positive = 1.0,
) -> Loss:  # fmt: skip
    """-(A log pi - beta / 2 log^2 r). Source: arXiv 2405.19107."""
    penalty = beta / 2 * (logprobs - old_logprobs) ** 2
    return penalty - advantages_of(mb) * logprobs, {}


def sppo(
    logprobs: Tensor, old_logprobs: Tensor, mb: Batch, *,
    beta: Positive = 1.0,
) -> Loss:  # fmt: skip
    """(beta sum_t log r - A)^2 of a sequence, A its centred win probability (`win_rate`).

    Source: SPPO, arXiv 2405.00675, with beta = 1 / eta and the whole divided by eta^2.
    """
    log_ratio = segment_sum((logprobs - old_logprobs) * trained_mask(mb), mb.seq_lens)
    target = sequence_mean(advantages_of(mb), mb)
    return (beta * segment_expand(log_ratio, mb.seq_lens) - target) ** 2, {}


# ---- parts


def advantages_of(mb: Batch) -> Tensor:
    assert mb.advantages is not None
    return mb.advantages


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp, within e^-20 .. e^20: beyond that a ratio says no more, and float32 would overflow."""
    return log_ratio.clamp(-20, 20).exp()


def ratio_of(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return bounded_exp(logprobs - old_logprobs)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Loss:
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(plain, clipped), {"clip_fraction": (clipped > plain).float()}


def trust_region(
    logprobs: Tensor, old_logprobs: Tensor, distance: Tensor, mb: Batch, clip_low: float,
    clip_high: float, ratio_cap: float,
) -> Loss:  # fmt: skip
    """-A min(r, cap), 0 outside of the region; a capped ratio keeps the gradient of log pi."""
    advantages = advantages_of(mb)
    up = (logprobs > old_logprobs).detach()
    outside = torch.where(
        advantages > 0, up & (distance > clip_high), ~up & (distance > clip_low)
    ).float()
    capped = ratio_of(logprobs, old_logprobs).detach().clamp(max=ratio_cap)
    surrogate = capped * (1 + logprobs - logprobs.detach())
    return -advantages * surrogate * (1 - outside), {"clip_fraction": outside}


def sequence_mean(values: Tensor, mb: Batch) -> Tensor:
    """(num_tokens,): the mean over the tokens of each token's sequence that are trained on."""
    mask = trained_mask(mb)
    sums, counts = segment_sum(values * mask, mb.seq_lens), segment_sum(mask, mb.seq_lens)
    return segment_expand(sums / counts.clamp(min=1), mb.seq_lens)


def trained_mask(mb: Batch) -> Tensor:
    """(num_tokens,): the loss mask, less what a rollout correction rejected."""
    return mb.loss_mask if mb.kept_mask is None else mb.kept_mask


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


def loss_counts(mask: Tensor, seq_lens: Tensor) -> Tensor:
    """(2,) float64: unmasked tokens, and sequences that have any; add up over all ranks."""
    lens = segment_sum(mask.double(), seq_lens)
    return torch.stack([lens.sum(), (lens > 0).double().sum()])


def aggregate_of(algo: AlgoConfig) -> Callable[[Tensor, Tensor, Tensor, int], Tensor]:
    """Returns f(mask, seq_lens, counts, norm_length) -> the weight of each token in the loss,
    (num_tokens,) float32: the config's aggregation as a weighted sum.

    counts: `loss_counts` over all ranks' tokens of the mini-batch.
    """
    chosen = aggregation_of(algo)
    if isinstance(chosen, str):
        return AGGREGATIONS[chosen]
    return chosen if chosen in AGGREGATIONS.values() else checked_aggregation(chosen)


# ---- all policy losses


# What select_tokens reads of the options of a loss that selects tokens.
SELECTION_OPTIONS = {
    "highest": ("cov_fraction",),
    "drawn": ("cov_fraction", "cov_low", "cov_high", "clip_low", "clip_high"),
}


@dataclass(frozen=True)
class PolicyLoss:
    """A function of tokens, and what the step must know about it.

    Your own: algo.policy_loss=my_function, or a PolicyLoss where a default below does not fit.
    """

    function: Callable[..., Loss]
    aggregation: Aggregation | None = None  # that goes with it by default; None: the estimator's
    # one term per sequence, with one advantage and one weight: nothing may choose single tokens
    of_sequences: bool = False
    has_ratio: bool = True  # False: the gradient of log pi itself; a correction then weighs it
    # acts on tokens that are chosen over the mini-batch before each update (Batch.selected_mask):
    # those of the highest covariance, or some drawn from those between cov_low and cov_high. The
    # function then has the options of SELECTION_OPTIONS
    selects: Literal["highest", "drawn"] | None = None
    # a loss of pairs, whose function this is: the best answer to a prompt, and the worst
    pairs: PreferenceLoss | None = None

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, PolicyLoss):
            raise TypeError(f"PolicyLoss(function={self.function!r}): a function is needed")
        if self.aggregation is not None and self.aggregation not in AGGREGATIONS:
            raise ValueError(
                f"PolicyLoss(aggregation={self.aggregation!r}): there are {list(AGGREGATIONS)}"
            )
        if self.selects is not None and self.selects not in SELECTION_OPTIONS:
            raise ValueError(f"PolicyLoss(selects={self.selects!r}): {list(SELECTION_OPTIONS)}")

    def __call__(self, *args: Any, **options: Any) -> Loss:
        return self.function(*args, **options)


POLICY_LOSSES = {
    "ppo": PolicyLoss(ppo),
    "vanilla": PolicyLoss(ppo),
    "gspo": PolicyLoss(gspo, aggregation="seq_mean_token_mean"),
    "luspo": PolicyLoss(gspo, aggregation="seq_mean_token_sum"),
    "cispo": PolicyLoss(cispo),
    "sapo": PolicyLoss(sapo, aggregation="seq_mean_token_mean"),
    "vespo": PolicyLoss(vespo),
    "gpg": PolicyLoss(reinforce, has_ratio=False),
    "clip_cov": PolicyLoss(clip_cov, selects="drawn"),
    "kl_cov": PolicyLoss(kl_cov, selects="highest"),
    "geo_mean": PolicyLoss(geo_mean, aggregation="seq_mean_token_mean", of_sequences=True),
    "sequence_product": PolicyLoss(
        sequence_product, aggregation="seq_mean_token_mean", of_sequences=True
    ),
    "dppo_tv": PolicyLoss(dppo_tv),
    "dppo_kl": PolicyLoss(dppo_kl),
    "dro": PolicyLoss(dro),
    "sppo": PolicyLoss(sppo, aggregation="seq_mean_token_mean", of_sequences=True),
    "reinforce": PolicyLoss(reinforce, has_ratio=False),
}


def loss_of(algo: AlgoConfig) -> PolicyLoss:
    """Returns the policy loss that the config names, or a record of the user's function."""
    given: Any = algo.policy_loss
    if isinstance(given, str):
        given = POLICY_LOSSES.get(given) or PREFERENCE_LOSSES[given]
    if isinstance(given, PreferenceLoss):
        return PolicyLoss(given.function, aggregation="token_sum", has_ratio=False, pairs=given)
    return given if isinstance(given, PolicyLoss) else PolicyLoss(given)


def policy_loss_of(algo: AlgoConfig) -> Callable[[Tensor, Tensor, Batch], Loss]:
    """Returns the policy loss as f(logprobs, old_logprobs, mb), with the options of the config.

    A loss of pairs has its gradient in the advantages (`pair_gradients`).
    """
    loss = loss_of(algo)
    if loss.pairs is not None:
        return reinforce
    function = loss.function
    given = partial(function, **given_options(function, algo.loss_args))
    return given if isinstance(algo.policy_loss, str) else checked_loss(given, name_of(function))


def loss_options(algo: AlgoConfig) -> dict[str, Any]:
    """Returns the value of every option of the config's policy loss."""
    return option_values(loss_of(algo).function, algo.loss_args)


def aggregation_of(algo: AlgoConfig) -> str | Callable[..., Tensor]:
    """Returns the config's aggregation, or where it says none that of the loss's paper, else that
    of the estimator's paper.
    """
    loss = loss_of(algo)
    of_loss = loss.aggregation or ("seq_mean_token_mean" if loss.of_sequences else None)
    return algo.aggregation or of_loss or estimator_of(algo).aggregation
