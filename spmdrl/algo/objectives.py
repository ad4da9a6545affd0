"""The loss functions that an engine is given: of the actor, the critic, the process reward model.

Each is made from the config and has the signature of the seam (engines/base.py):
(logprobs, entropy, micro-batch) -> (loss, metric sums).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from spmdrl_kernels import policy_loss
from spmdrl_kernels.policy_loss_terms import ALIASES, CONSTANTS, Inputs, Terms
from torch import Tensor

from spmdrl.algo.advantages import PRIME_BETA, advantage_options, estimator_of, prime
from spmdrl.algo.correction import (
    MISMATCH_SUMS,
    correction_weights,
    mismatch_sums,
    off_policy_keep,
    rejection_keep,
)
from spmdrl.algo.demonstrations import Objective, mixing
from spmdrl.algo.distillation import distilling
from spmdrl.algo.kl import ESTIMATORS, above_cut, k1, k3, with_gradient_of_k2
from spmdrl.algo.losses import (
    advantages_of,
    loss_of,
    loss_options,
    policy_loss_of,
    ratio_of,
    value_loss,
)
from spmdrl.algo.own_functions import checked_kl
from spmdrl.config import AlgoConfig
from spmdrl.segments import segment_expand, segment_sum, to_device
from spmdrl.types import Batch


def policy_objective(
    algo: AlgoConfig, kl_coef: float | None = None, entropy_coef: float | None = None
) -> Callable[[Tensor, Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]:
    """The actor's loss function for a training engine (the seam, engines/base.py).

    kl_coef and entropy_coef: of this step, where adaptive; None: as configured.
    """
    kl_coef = algo.kl_coef if kl_coef is None else kl_coef
    entropy_coef = algo.entropy_coef if entropy_coef is None else entropy_coef
    token_loss = policy_loss_of(algo)
    kl = kl_in_loss(algo)
    terms = kernel_terms(algo, kl_coef, entropy_coef)
    in_update, counts_cut = corrects_in_update(algo), has_cut(algo)

    def objective(logprobs: Tensor, entropy: Tensor, mb: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        # with one update per rollout the policy that sampled is the policy at hand
        old = logprobs.detach() if mb.old_logprobs is None else mb.old_logprobs
        weights, further = mb.policy_weights, dict[str, Tensor]()
        if counts_cut and mb.ref_logprobs is not None:
            further = tokens_above_cut(logprobs, mb.ref_logprobs, mb.loss_mask, algo)
        if algo.correction.bypass or in_update:
            mb, weights, log_ratio = with_correction(logprobs.detach(), mb, algo)
            if in_update:
                further |= mismatch_of(log_ratio, weights, mb)
        factors = weights
        if algo.off_policy_mask_threshold is not None:
            near = near_policy(logprobs.detach(), mb, algo.off_policy_mask_threshold)
            factors = near if weights is None else weights * near
            further["off_policy_masked"] = over_tokens("off_policy_masked", 1 - near, mb.loss_mask)
        if terms is not None:  # on a GPU the rest is one pass over memory
            inputs = kernel_inputs(mb, factors)
            if policy_loss.fits(logprobs, entropy, inputs):
                loss, sums = policy_loss.policy_loss(logprobs, entropy, inputs, terms)
                return loss, sums | further
        losses, metrics = token_loss(logprobs, old, mb)
        losses = losses if factors is None else losses * factors
        if kl_coef and algo.kl_in == "loss":
            assert mb.ref_logprobs is not None
            losses = losses + kl_coef * kl(logprobs, old, mb.ref_logprobs)
        if entropy_coef:
            losses = losses - entropy_coef * entropy
        assert mb.loss_weights is not None
        loss = (losses * mb.loss_weights).sum()
        if mb.nll_weights is not None:
            loss = loss - algo.positive_nll_coef * (logprobs * mb.nll_weights).sum()
        with torch.no_grad():
            metrics["entropy"] = entropy
            metrics["ppo_kl"] = k1(old, logprobs)
            ours = logprobs.detach() if algo.correction.bypass else old
            metrics |= rollout_difference(ours, mb.rollout_logprobs)
            if mb.ref_logprobs is not None:
                metrics["ref_kl"] = kl(logprobs, old, mb.ref_logprobs)
            if algo.correction.bypass and mb.kept_mask is not None and weights is not None:
                metrics |= {"rejected": 1 - mb.kept_mask, "correction_weight": weights}
            sums = {name: over_tokens(name, value, mb.loss_mask) for name, value in metrics.items()}
            sums["ratio_max"] = masked_max((logprobs - old).exp(), mb.loss_mask)
            sums["logprob_diff_max"] = masked_max((ours - mb.rollout_logprobs).abs(), mb.loss_mask)
        return loss, sums | further

    whole: Objective = objective
    if algo.demonstrations:
        whole = mixing(objective, algo, loss_of(algo).pairs is not None, kl, kl_coef, entropy_coef)
    return whole if algo.distillation is None else distilling(whole, algo.distillation)


def kernel_terms(algo: AlgoConfig, kl_coef: float, entropy_coef: float) -> Terms | None:
    """Returns what spmdrl_kernels.policy_loss is asked for; None where it does not do it: a loss
    that it has not got, a function of the user's, a KL that is cut or times r, and a mask beside
    the weight of a bypass, which is logged without it.
    """
    if algo.kl_cut is not None or algo.kl_bias_correction:
        return None
    if algo.off_policy_mask_threshold is not None and algo.correction.bypass:
        return None
    if not isinstance(algo.policy_loss, str) or not isinstance(algo.kl_estimator, str):
        return None
    loss = ALIASES.get(algo.policy_loss, algo.policy_loss)
    if loss not in CONSTANTS:
        return None
    options = loss_options(algo)
    return Terms(
        loss=loss,
        constants=tuple(options[name] for name in CONSTANTS[loss]),
        kl=algo.kl_estimator,
        kl_coef=kl_coef if algo.kl_in == "loss" else 0.0,
        entropy_coef=entropy_coef,
        nll_coef=algo.positive_nll_coef,
        bypass=algo.correction.bypass,
    )


def kernel_inputs(mb: Batch, weights: Tensor | None) -> Inputs:
    """weights: of the policy loss, (num_tokens,)."""
    assert mb.advantages is not None and mb.loss_weights is not None
    (cu_seqlens,) = to_device([mb.cu_seqlens], mb.loss_mask.device)
    return Inputs(
        mb.advantages, mb.loss_mask, mb.rollout_logprobs, mb.loss_weights, cu_seqlens,
        mb.old_logprobs, mb.ref_logprobs, weights, mb.kept_mask, mb.nll_weights, mb.selected_mask,
    )  # fmt: skip


def needs_old_logprobs(algo: AlgoConfig) -> bool:
    """Says whether a pass for old log-probabilities is needed: with one update per rollout the
    update's own forward pass has them (`policy_objective`).
    """
    return asks_before_update(algo) or (corrects(algo) and not corrects_in_update(algo))


def asks_before_update(algo: AlgoConfig) -> bool:
    """Whether old log-probabilities are needed for anything but a rollout correction."""
    return (
        algo.epochs * algo.mini_batches > 1
        or (algo.kl_coef > 0 and algo.kl_in == "reward")
        or algo.top_entropy_fraction < 1
        or selects(algo)
        or weighs_pairs(algo)
        or estimator_of(algo).token_sums
    )


def selects(algo: AlgoConfig) -> bool:
    """Whether tokens are chosen over the mini-batch before each update."""
    return loss_of(algo).selects is not None


def weighs_pairs(algo: AlgoConfig) -> bool:
    """Whether the loss is one of pairs, whose gradient is computed before each update."""
    return loss_of(algo).pairs is not None


def corrects(algo: AlgoConfig) -> bool:
    return algo.correction.level != "off" or bool(algo.correction.reject)


def corrects_before_update(algo: AlgoConfig) -> bool:
    """Whether the correction's weights come from a pass of their own for old log-probabilities."""
    return corrects(algo) and not algo.correction.bypass and not corrects_in_update(algo)


def corrects_in_update(algo: AlgoConfig) -> bool:
    """Whether the correction's weights come from the update's own log-probabilities.

    That is so where nothing needs them before: weights that are divided by their mean, or tokens
    that are rejected, and so change the loss's divisor, do, and so may functions of the user's that
    see tokens.
    """
    correction = algo.correction
    before = correction.normalize or correction.reject or correction.bypass
    return (
        correction.level != "off"
        and not before
        and not asks_before_update(algo)
        and not users_see_tokens(algo)
    )


def users_see_tokens(algo: AlgoConfig) -> bool:
    """Whether a loss or an estimator of the user's may look at the weights of a correction."""
    of_tokens = estimator_of(algo).sees == "tokens" and not isinstance(algo.advantage, str)
    return of_tokens or not isinstance(algo.policy_loss, str)


def kl_estimator_of(algo: AlgoConfig) -> Callable[[Tensor, Tensor], Tensor]:
    chosen = algo.kl_estimator
    if algo.kl_cut is not None:  # training/checks/algorithms.py refuses it with other estimators
        plain = partial(k3, cut=algo.kl_cut)
        return partial(with_gradient_of_k2, plain) if chosen == "k3+" else plain
    return ESTIMATORS[chosen] if isinstance(chosen, str) else checked_kl(chosen)


def kl_in_loss(algo: AlgoConfig) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Returns f(logprobs, old_logprobs, ref_logprobs) -> (num_tokens,), the KL of the loss.

    With kl_bias_correction it is times r, with the gradient of r: over samples of the old policy
    its expectation is then KL(policy || reference), and its gradient that of this KL. Source:
    DeepSeek-V3.2, arXiv 2512.02556, section 3.1 (unbiased KL estimate).
    """
    estimator = kl_estimator_of(algo)

    def kl(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        value = estimator(logprobs, ref_logprobs)
        return value * ratio_of(logprobs, old_logprobs) if algo.kl_bias_correction else value

    return kl


def near_policy(logprobs: Tensor, mb: Batch, threshold: float) -> Tensor:
    """(num_tokens,) 0 where off_policy_mask_threshold masks, else 1. logprobs: of the policy at
    hand.
    """
    log_ratio = (logprobs - mb.rollout_logprobs) * mb.loss_mask
    return off_policy_keep(log_ratio, advantages_of(mb), mb.loss_mask, mb.seq_lens, threshold)


def tokens_above_cut(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, algo: AlgoConfig
) -> dict[str, Tensor]:
    """ref_kl_cut: how many tokens have a k3 above algo.kl_cut, or above 10 where it is None."""
    above = above_cut(logprobs, ref_logprobs, algo.kl_cut)
    return {"ref_kl_cut": over_tokens("ref_kl_cut", above, mask)}


def has_cut(algo: AlgoConfig) -> bool:
    """Whether the KL is k3's, of which single tokens may be huge."""
    return isinstance(algo.kl_estimator, str) and algo.kl_estimator in ("k3", "k3+")


def with_correction(logprobs: Tensor, mb: Batch, algo: AlgoConfig) -> tuple[Batch, Tensor, Tensor]:
    """Correction by the policy at hand, where no pass was spent on the one the step starts from; in
    a step's only update it is the same one.

    Returns the micro-batch with what is kept of it, the tokens' weights, and log rho. With bypass a
    level's weight is for losses without a ratio of their own; the loss's divisor stays that of all
    tokens.
    """
    log_ratio = (logprobs - mb.rollout_logprobs) * mb.loss_mask
    keep = rejection_keep(log_ratio, mb.loss_mask, mb.seq_lens, algo.correction.reject)
    weights = keep
    if algo.correction.level != "off":
        weights = keep * correction_weights(log_ratio, mb.loss_mask, mb.seq_lens, algo.correction)
    return replace(mb, kept_mask=keep), weights, log_ratio


def mismatch_of(log_ratio: Tensor, weights: Tensor, mb: Batch) -> dict[str, Tensor]:
    """Returns the sums that `mismatch_metrics` wants, by name."""
    assert mb.kept_mask is not None
    sums = mismatch_sums(log_ratio, weights, mb.kept_mask, mb.loss_mask, mb.seq_lens)
    return dict(zip(MISMATCH_SUMS, sums, strict=True))


def rollout_difference(logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Tensor]:
    """Measures per token how far the sampling engine is from the trainer: |difference| and k3."""
    return {
        "logprob_diff_mean": (logprobs - rollout_logprobs).abs(),
        "rollout_kl": k3(rollout_logprobs, logprobs),
    }


def over_tokens(name: str, values: Tensor, mask: Tensor) -> Tensor:
    """The sum over unmasked tokens, or their maximum where the name ends in _max."""
    values = values.detach()
    return masked_max(values, mask) if name.endswith("_max") else (values * mask).sum()


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Largest unmasked value, 0 if there is none; values, one for each token or one for all, must
    not be negative."""
    return (values * mask).max() if len(mask) else values.new_zeros(())


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


def prm_objective(
    algo: AlgoConfig,
) -> Callable[[Tensor, Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]:
    """The process reward model's: cross-entropy of the sum of its rewards with the outcome.

    -(y log s + (1 - y) log(1 - s)), s = sigmoid(sum_t beta (log pi_phi - log pi_ref)), y the reward
    of the sample, in 0..1. Source: PRIME, arXiv 2502.01456, eq. 4. loss_weights must be those of
    seq_mean_token_mean, which make it the mean over the mini-batch's samples. beta is the option of
    advantage='prime'.
    """
    is_prime = estimator_of(algo).function is prime
    beta = advantage_options(algo)["beta"] if is_prime else PRIME_BETA

    def objective(logprobs: Tensor, _: Tensor, mb: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        assert mb.ref_logprobs is not None and mb.loss_weights is not None
        process = beta * (logprobs - mb.ref_logprobs) * mb.loss_mask
        logit = segment_sum(process, mb.seq_lens)
        per_seq = torch.nn.functional.binary_cross_entropy_with_logits(
            logit, mb.rewards.to(logit.dtype), reduction="none"
        )
        losses = segment_expand(per_seq, mb.seq_lens)
        with torch.no_grad():
            right = segment_expand(((logit > 0) == (mb.rewards > 0.5)).float(), mb.seq_lens)
            sums = {"process_reward": process.sum(), "accuracy": (right * mb.loss_mask).sum()}
        return (losses * mb.loss_weights).sum(), sums

    return objective
