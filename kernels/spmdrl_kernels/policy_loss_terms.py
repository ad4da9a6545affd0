"""What a policy loss is made of: the losses that the kernel knows, their inputs, terms and sums.

`policy_loss` and the kernel in `policy_loss_triton` share these.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

import torch
from torch import Tensor

ALIASES = {"vanilla": "ppo", "luspo": "gspo", "gpg": "reinforce"}
# the constants of each loss, by the names of its options
CONSTANTS: dict[str, tuple[str, ...]] = {
    "ppo": ("clip_low", "clip_high", "dual_clip"), "gspo": ("clip_low", "clip_high"),
    "cispo": ("clip_low", "clip_high"), "sapo": ("tau_pos", "tau_neg"),
    "reinforce": (), "clip_cov": ("clip_low", "clip_high"), "kl_cov": ("cov_kl_coef",),
    "geo_mean": ("clip_low", "clip_high"), "dppo_tv": ("clip_low", "clip_high", "ratio_cap"),
    "dppo_kl": ("clip_low", "clip_high", "ratio_cap"), "dro": ("beta",),
    "sppo": ("beta",),
}  # fmt: skip
METRICS: dict[str, tuple[str, ...]] = {  # of its own
    "ppo": ("clip_fraction", "dual_clip_fraction"), "gspo": ("clip_fraction",),
    "cispo": ("clip_fraction",), "clip_cov": ("clip_fraction", "cov_fraction"),
    "kl_cov": ("cov_fraction",), "geo_mean": ("clip_fraction",), "dppo_tv": ("clip_fraction",),
    "dppo_kl": ("clip_fraction",),
}  # fmt: skip
OF_SEQUENCES = frozenset({"gspo", "geo_mean", "sppo"})  # take sums over whole sequences
KL_ESTIMATORS = frozenset({"k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"})
# what the kernel adds up, in this order; the last two are maxima
TOTALS = (
    "loss", "clip_fraction", "dual_clip_fraction", "cov_fraction", "entropy", "ppo_kl",
    "logprob_diff_mean", "rollout_kl", "ref_kl", "rejected", "correction_weight",
    "ratio_max", "logprob_diff_max",
)  # fmt: skip
NUM_MAXIMA = 2


@dataclass(frozen=True)
class Terms:
    """Which loss, of which parts. A coefficient of 0 leaves its part out."""

    loss: str  # a key of CONSTANTS
    constants: tuple[float, ...]  # of it
    kl: str  # of KL_ESTIMATORS, for the metric ref_kl and the loss
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    nll_coef: float = 0.0
    bypass: bool = False  # metrics compare the policy at hand with the engine, not the old one


@dataclass(frozen=True)
class Inputs:
    """(num_tokens,) float32 each, as in the Batch of the same names; masked places are not read."""

    advantages: Tensor
    mask: Tensor
    rollout_logprobs: Tensor
    loss_weights: Tensor
    cu_seqlens: Tensor  # (num_seqs + 1,) int64, on any device
    old_logprobs: Tensor | None = None  # None: those of the policy at hand
    ref_logprobs: Tensor | None = None
    policy_weights: Tensor | None = None  # None: 1
    kept_mask: Tensor | None = None  # None: the mask
    nll_weights: Tensor | None = None
    selected_mask: Tensor | None = None

    def of_tokens(self) -> dict[str, Tensor | None]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "cu_seqlens"}


@lru_cache(maxsize=16)
def numbers_of(terms: Terms, device: torch.device) -> Tensor:
    """(6,) float64: the coefficients of KL, entropy and NLL, then up to three of the loss.

    Of a clipped ratio these are its bounds. On the device once for all micro-batches; as an
    argument of a kernel a number would be rounded to float32.
    """
    own = list(terms.constants)
    if terms.loss in ("ppo", "gspo", "cispo", "clip_cov"):
        own[:2] = [1 - own[0], 1 + own[1]]
    own += [0.0] * (3 - len(own))
    numbers = [terms.kl_coef, terms.entropy_coef, terms.nll_coef, *own]
    return torch.tensor(numbers, dtype=torch.float64).to(device)
