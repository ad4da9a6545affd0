"""Losses of preference optimisation: DPO and its relatives.

A loss is f(answers, *, options) -> (losses, metrics). `answers` are the `Pairs` or the
`LabelledAnswers` of a micro-batch; losses are float64 of shape (num_pairs,) or (num_answers,), and
so is every metric. What is learnt is the mean of the losses over the global batch. No loss reads
another pair's numbers, so that this mean is the same on any ranks and in any micro-batches; what
one needs of the global batch, as the KL of `kto`, is computed before and given to it.

`PREFERENCE_LOSSES` at the end is all of them; preference.loss may also be a function of yours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from spmdrl.algo.options import (
    BelowHalf,
    NotNegative,
    Positive,
    given_options,
    option_values,
)
from spmdrl.config import PreferenceConfig

Loss = tuple[Tensor, dict[str, Tensor]]

CERTAIN = -1e-12  # nats per token: of a likelier answer log(1 - p) has no use


@dataclass(frozen=True)
class Pairs:
    """The better (chosen) and the worse (rejected) answers to some prompts; (num_pairs,) float64.

    An answer's log-probability is the sum over its tokens, its end included, in nats. Those of the
    reference have no gradient, and are 0 for a loss without a reference.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_tokens: Tensor  # how many tokens each answer has
    rejected_tokens: Tensor

    @property
    def chosen_ratios(self) -> Tensor:
        """log pi(y|x) - log ref(y|x) of the better answers."""
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratios(self) -> Tensor:
        return self.rejected - self.ref_rejected

    @property
    def chosen_means(self) -> Tensor:
        """Log-probability per token of the better answers."""
        return self.chosen / self.chosen_tokens

    @property
    def rejected_means(self) -> Tensor:
        return self.rejected / self.rejected_tokens


@dataclass(frozen=True)
class LabelledAnswers:
    """Answers that are desirable or not; (num_answers,) float64, as those of `Pairs`."""

    logprobs: Tensor
    ref_logprobs: Tensor
    desirable: Tensor  # 1: desirable, 0: not
    num_tokens: Tensor
    kl: float  # of the policy from the reference, in nats, at least 0: see `kto`

    @property
    def ratios(self) -> Tensor:
        """log pi(y|x) - log ref(y|x)."""
        return self.logprobs - self.ref_logprobs


def smoothed(differences: Tensor, label_smoothing: float) -> Tensor:
    """-log sigmoid(d), where a share of the labels is taken to be wrong. Mitchell, 2023, "A note on
    DPO with noisy preferences", eq. 3 (cDPO).
    """
    losses = -(1 - label_smoothing) * logsigmoid(differences)
    return losses - label_smoothing * logsigmoid(-differences) if label_smoothing else losses


def rewards(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    return {"rewards/chosen": chosen.detach(), "rewards/rejected": rejected.detach()}


def nll(pairs: Pairs) -> Tensor:
    """Negative log-likelihood of the better answers, in nats per token."""
    return -pairs.chosen_means


def dpo(
    pairs: Pairs, *, beta: Positive = 0.1, label_smoothing: BelowHalf = 0.0,
    reference_free: bool = False, length_normalized: bool = False, rpo_alpha: NotNegative = 0.0,
) -> Loss:  # fmt: skip
    """-log sigmoid(beta (chosen ratio - rejected ratio)). Rafailov et al. 2023, arXiv 2305.18290,
    eq. 7.

    reference_free: the reference is taken to be uniform, so the ratios are log-probabilities.
    length_normalized: a ratio is divided by its answer's tokens (Lambert et al. 2024, Tulu 3, arXiv
    2411.15124, eq. 6). rpo_alpha: weight of the NLL per token of the better answer (Pang et al.
    2024, arXiv 2404.19733, eq. 1).
    """
    chosen = pairs.chosen if reference_free else pairs.chosen_ratios
    rejected = pairs.rejected if reference_free else pairs.rejected_ratios
    if length_normalized:
        chosen, rejected = chosen / pairs.chosen_tokens, rejected / pairs.rejected_tokens
    losses = smoothed(beta * (chosen - rejected), label_smoothing)
    metrics = rewards(beta * chosen, beta * rejected)
    return with_nll(losses, metrics, pairs, rpo_alpha)


def with_nll(losses: Tensor, metrics: dict[str, Tensor], pairs: Pairs, weight: float) -> Loss:
    """Adds the NLL of the better answers to a loss."""
    if not weight:
        return losses, metrics
    return losses + weight * nll(pairs), metrics | {"nll_loss": nll(pairs).detach()}


def ipo(pairs: Pairs, *, beta: Positive = 0.1, length_normalized: bool = True) -> Loss:
    """(chosen ratio - rejected ratio - 1 / (2 beta))^2. Azar et al. 2023, arXiv 2310.12036, eq. 17,
    whose tau is beta.

    length_normalized: a ratio is divided by its answer's tokens, as in TRL, whose authors have it
    from those of the paper; False: as the paper writes it.
    """
    chosen, rejected = pairs.chosen_ratios, pairs.rejected_ratios
    if length_normalized:
        chosen, rejected = chosen / pairs.chosen_tokens, rejected / pairs.rejected_tokens
    losses = (chosen - rejected - 1 / (2 * beta)).square()
    return losses, rewards(beta * chosen, beta * rejected)


def orpo(pairs: Pairs, *, beta: Positive = 0.1) -> Loss:
    """NLL of the better answer - beta log sigmoid(log of the ratio of both answers' odds).

    An answer's probability is the geometric mean over its tokens. Hong et al. 2024, arXiv
    2403.07691, eq. 3 to 7, whose lambda is beta.
    """
    chosen, rejected = pairs.chosen_means, pairs.rejected_means
    log_odds = (chosen - log1mexp(chosen)) - (rejected - log1mexp(rejected))
    ratios = logsigmoid(log_odds)
    metrics = {
        "nll_loss": nll(pairs).detach(),
        "log_odds_chosen": log_odds.detach(),
        "log_odds_ratio": ratios.detach(),
    }
    return nll(pairs) - beta * ratios, rewards(beta * chosen, beta * rejected) | metrics


def log1mexp(logprobs: Tensor) -> Tensor:
    """log(1 - exp(x)) of x below 0, exact near 0 and far from it; of x above CERTAIN that of
    CERTAIN."""
    x = logprobs.clamp(max=CERTAIN)
    # each form where it is exact; elsewhere it is given a place where its gradient is finite
    near = x > -0.693
    return torch.where(
        near,
        (-torch.expm1(torch.where(near, x, -0.5))).log(),
        torch.log1p(-torch.where(near, -1.0, x).exp()),
    )


def simpo(
    pairs: Pairs, *, beta: Positive = 0.1, simpo_gamma: NotNegative = 0.5,
    label_smoothing: BelowHalf = 0.0, cpo_alpha: NotNegative = 0.0,
) -> Loss:  # fmt: skip
    """-log sigmoid(beta (chosen mean - rejected mean) - gamma), of log-probabilities per token.
    Meng et al. 2024, arXiv 2405.14734, eq. 6.

    cpo_alpha: weight of the NLL of the better answer (CPO-SimPO).
    """
    chosen, rejected = beta * pairs.chosen_means, beta * pairs.rejected_means
    losses = smoothed(chosen - rejected - simpo_gamma, label_smoothing)
    return with_nll(losses, rewards(chosen, rejected), pairs, cpo_alpha)


def cpo(
    pairs: Pairs, *, beta: Positive = 0.1, label_smoothing: BelowHalf = 0.0,
    cpo_alpha: NotNegative = 1.0,
) -> Loss:  # fmt: skip
    """-log sigmoid(beta (chosen - rejected)) + cpo_alpha NLL. Xu et al. 2024, arXiv 2401.08417,
    eq. 3 to 5.

    The NLL is per token, as that of TRL.
    """
    chosen, rejected = beta * pairs.chosen, beta * pairs.rejected
    losses = smoothed(chosen - rejected, label_smoothing)
    return with_nll(losses, rewards(chosen, rejected), pairs, cpo_alpha)


def kto(
    answers: LabelledAnswers, *, beta: Positive = 0.1, desirable_weight: NotNegative = 1.0,
    undesirable_weight: NotNegative = 1.0,
) -> Loss:  # fmt: skip
    """weight (1 - sigmoid(beta (ratio - kl))) of desirable answers, weight (1 - sigmoid(beta
    (kl - ratio))) of others. Ethayarajh et al. 2024, arXiv 2402.01306, eq. 7 and 8.

    kl: max(0, mean over the global batch of log pi(y'|x) - log ref(y'|x)), where y' is an answer to
    another prompt than x; no gradient flows through it (section 4.1).
    """
    gains = beta * (answers.ratios - answers.kl)
    signs = 2 * answers.desirable - 1
    weights = torch.where(answers.desirable > 0, desirable_weight, undesirable_weight)
    losses = weights * (1 - torch.sigmoid(signs * gains))
    return losses, {"rewards": beta * answers.ratios.detach()}


@dataclass(frozen=True)
class PreferenceLoss:
    """A function of answers, and what a run must know about it.

    Your own: preference.loss=my_function, or a PreferenceLoss where a default below does not fit.
    """

    function: Callable[..., Loss]
    reference: bool = True  # reads log-probabilities of the reference
    unpaired: bool = False  # is given LabelledAnswers, with their KL, and not Pairs

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, PreferenceLoss):
            raise TypeError(f"PreferenceLoss(function={self.function!r}): a function is needed")
        if self.unpaired and not self.reference:
            raise ValueError(
                "PreferenceLoss(unpaired=True, reference=False): the KL of labelled answers is one "
                "from the reference"
            )

    def __call__(self, *args: Any, **options: Any) -> Loss:
        return self.function(*args, **options)


PREFERENCE_LOSSES = {
    "dpo": PreferenceLoss(dpo),
    "ipo": PreferenceLoss(ipo),
    "kto": PreferenceLoss(kto, unpaired=True),
    "orpo": PreferenceLoss(orpo, reference=False),
    "simpo": PreferenceLoss(simpo, reference=False),
    "cpo": PreferenceLoss(cpo, reference=False),
}


def preference_loss_of(config: PreferenceConfig) -> PreferenceLoss:
    """Returns the loss that the config names, or a record of the user's function."""
    if isinstance(config.loss, str):
        return PREFERENCE_LOSSES[config.loss]
    given = config.loss
    return given if isinstance(given, PreferenceLoss) else PreferenceLoss(given)


def loss_function(config: PreferenceConfig) -> Callable[[Any], Loss]:
    """Returns the loss as f(answers), with the options of the config."""
    function = preference_loss_of(config).function
    return partial(function, **given_options(function, config.loss_args))


def preference_options(config: PreferenceConfig) -> dict[str, Any]:
    """Returns the value of every option of the config's loss."""
    return option_values(preference_loss_of(config).function, config.loss_args)


def needs_reference(config: PreferenceConfig) -> bool:
    """Says whether log-probabilities of the reference are computed at all."""
    free = preference_options(config).get("reference_free", False)
    return preference_loss_of(config).reference and not free
