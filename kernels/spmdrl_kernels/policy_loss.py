"""The policy loss of a micro-batch in one pass: what is asked of it, and who computes it.

The plain form is the algorithm itself, spmdrl/algo/losses.py and objectives.py: sixty elementwise
operations and as many backward, each a trip through memory. On a GPU that has Triton
`policy_loss_triton` reads every token once and writes its gradient. A loss or an estimator that is
a function of the user's has the plain form alone.
"""

from __future__ import annotations

from torch import Tensor

from spmdrl_kernels.policy_loss_terms import METRICS, TOTALS, Inputs, Terms
from spmdrl_kernels.switch import on_triton


def fits(logprobs: Tensor, entropy: Tensor, inputs: Inputs) -> bool:
    """Whether `policy_loss` can compute it where these tensors are."""
    return on_triton(logprobs, entropy, *inputs.of_tokens().values())


def policy_loss(
    logprobs: Tensor, entropy: Tensor, inputs: Inputs, terms: Terms
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, with its gradient towards logprobs and entropy, and the sums of the metrics.

    logprobs, entropy: (num_tokens,) float32. Asserts that `inputs` has what the terms need.
    """
    from spmdrl_kernels import policy_loss_triton

    assert terms.kl_coef == 0 or inputs.ref_logprobs is not None
    assert terms.loss not in ("clip_cov", "kl_cov") or inputs.selected_mask is not None
    loss, totals = policy_loss_triton.loss_and_totals(logprobs, entropy, inputs, terms)
    by_name = dict(zip(TOTALS, totals.unbind(), strict=True))
    return loss, {name: by_name[name] for name in reported(terms, inputs)}


def reported(terms: Terms, inputs: Inputs) -> list[str]:
    names = {*METRICS.get(terms.loss, ()), "entropy", "ppo_kl", "logprob_diff_mean", "rollout_kl"}
    names |= {"ratio_max", "logprob_diff_max"}
    if inputs.ref_logprobs is not None:
        names.add("ref_kl")
    if terms.bypass:
        names |= {"rejected", "correction_weight"}
    return [name for name in TOTALS if name in names]
