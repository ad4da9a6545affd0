"""Learning from answers that the data has beside those that the policy has sampled (LUFFY).

Nobody knows the log-probabilities of the policy that wrote a demonstration. Its probability is
taken as 1, so that the importance ratio of a token is pi itself, which policy shaping turns into
pi / (pi + gamma). There is no clipping. Source: LUFFY, Yan et al. 2025, arXiv 2504.14945,
mixed-policy GRPO and policy shaping; github.com/ElliottYan/LUFFY has it as p_div_p_0.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from spmdrl.config import AlgoConfig
from spmdrl.segments import segment_sum
from spmdrl.types import DEMONSTRATED, Batch

Objective = Callable[[Tensor, Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]
Kl = Callable[[Tensor, Tensor, Tensor], Tensor]

# Names of sums while they are on their way: take_shares divides them by these shares.
SAMPLED = "sampled:"  # before the name of a sum over sampled tokens
SAMPLED_SHARE, DEMONSTRATED_SHARE = "share:sampled", "share:demonstrated"
OF_DEMONSTRATIONS = ("off_policy_prob", "off_ratio_mean")


def demonstrated_mask(batch: Batch) -> Tensor:
    """(num_tokens,) float32: 1 on tokens of demonstrations that are trained on."""
    return batch.loss_mask * (batch.policy_version == DEMONSTRATED)


def sampled_mask(batch: Batch) -> Tensor:
    """(num_tokens,) float32: 1 on tokens that the policy has sampled and that are trained on."""
    return batch.loss_mask * (batch.policy_version != DEMONSTRATED)


def are_demonstrations(batch: Batch) -> Tensor:
    """(num_seqs,) float32: 1 for demonstrations with a token that is trained on."""
    return (segment_sum(demonstrated_mask(batch), batch.seq_lens) > 0).float()


def policy_shaping(logprobs: Tensor, gamma: float | None) -> Tensor:
    """(num_tokens,): pi / (pi + gamma), with None pi. Source: LUFFY, arXiv 2504.14945."""
    return logprobs.exp() if gamma is None else torch.sigmoid(logprobs - math.log(gamma))


def mixing(
    objective: Objective, algo: AlgoConfig, of_pairs: bool, kl: Kl, kl_coef: float,
    entropy_coef: float,
) -> Objective:  # fmt: skip
    """Returns a loss function of the actor in which `objective` sees sampled tokens alone, and
    tokens of demonstrations have -A f(pi), with the weights that the aggregation gives them.

    of_pairs: A is the derivative of a loss of pairs, and every token has -A log pi. kl,
    kl_coef, entropy_coef: of the terms that all tokens have.
    """

    def mixed(logprobs: Tensor, entropy: Tensor, mb: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        own = demonstrated_mask(mb)
        loss, sums = objective(logprobs, entropy, of_sampled_tokens(mb))
        assert mb.advantages is not None and mb.loss_weights is not None
        shaped = logprobs if of_pairs else policy_shaping(logprobs, algo.policy_shaping_gamma)
        losses = -mb.advantages * shaped
        if kl_coef and algo.kl_in == "loss":
            assert mb.ref_logprobs is not None
            losses = losses + kl_coef * kl(logprobs, logprobs.detach(), mb.ref_logprobs)
        if entropy_coef:
            losses = losses - entropy_coef * entropy
        loss = loss + (losses * mb.loss_weights * own).sum()
        if mb.nll_weights is not None:
            loss = loss - algo.positive_nll_coef * (logprobs * mb.nll_weights * own).sum()
        found = {n if n.endswith("_max") else SAMPLED + n: value for n, value in sums.items()}
        found |= {SAMPLED_SHARE: (mb.loss_mask - own).sum(), DEMONSTRATED_SHARE: own.sum()}
        return loss, found | demonstration_sums(logprobs, None if of_pairs else shaped, own)

    return mixed


def demonstration_sums(logprobs: Tensor, ratios: Tensor | None, own: Tensor) -> dict[str, Tensor]:
    """Returns sums over the tokens of demonstrations: of pi, and of what it counts in the loss.
    ratios: (num_tokens,), None where the loss has none; own: the mask of these tokens.
    """
    found = {"off_policy_prob": (logprobs.detach().exp() * own).sum()}
    if ratios is not None:
        found["off_ratio_mean"] = (ratios.detach() * own).sum()
    return found


def of_sampled_tokens(mb: Batch) -> Batch:
    """Returns the micro-batch in which tokens of demonstrations are masked like those of a
    prompt.
    """
    mask = sampled_mask(mb)
    given = {name: getattr(mb, name) for name in ("loss_weights", "kept_mask", "nll_weights")}
    masked = {name: value * mask for name, value in given.items() if value is not None}
    return replace(mb, loss_mask=mask, **masked)


def take_shares(updates: dict[str, float]) -> None:
    """Makes means over sampled tokens, and over tokens of demonstrations, of metrics that are
    divided by the number of all tokens. In place; does nothing where `mixing` had no part.
    """
    if SAMPLED_SHARE not in updates:
        return
    sampled, demonstrated = updates.pop(SAMPLED_SHARE), updates.pop(DEMONSTRATED_SHARE)
    for name in [name for name in updates if name.startswith(SAMPLED)]:
        total = updates.pop(name)
        updates[name.removeprefix(SAMPLED)] = total / sampled if sampled else 0.0
    for name in OF_DEMONSTRATIONS:
        if name in updates:
            total = updates.pop(name)
            updates |= {name: total / demonstrated} if demonstrated else {}
