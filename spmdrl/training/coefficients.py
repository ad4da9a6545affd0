"""Coefficients of the loss that follow what a step has measured: of the KL and of the entropy."""

from __future__ import annotations

from spmdrl.algo.kl import next_entropy_coef, next_kl_coef
from spmdrl.training.roles import Roles


def adapt(roles: Roles, metrics: dict[str, float], num_samples: int) -> dict[str, float]:
    """Returns the coefficients that this step was run with, and sets those of the next."""
    algo = roles.config.algo
    used: dict[str, float] = {}
    if "actor/entropy" not in metrics:  # there was nothing to learn from
        return used
    if algo.kl_target is not None:
        used["actor/kl_coef"] = roles.kl_coef
        kl = metrics["reward/kl" if algo.kl_in == "reward" else "actor/ref_kl"]
        roles.kl_coef = next_kl_coef(
            roles.kl_coef, kl, algo.kl_target, algo.kl_horizon, num_samples
        )
    if algo.entropy_target is not None:
        used["actor/entropy_coef"] = entropy_bonus(roles)
        roles.entropy = metrics["actor/entropy"]
        roles.entropy_coef = next_entropy_coef(
            roles.entropy_coef, metrics["actor/entropy"], algo.entropy_target, algo.entropy_delta,
            algo.entropy_coef_min, algo.entropy_coef_max,
        )  # fmt: skip
    return used


def entropy_bonus(roles: Roles) -> float:
    """Returns the coefficient of this step. An adaptive one rests while the entropy is above its
    target.
    """
    target = roles.config.algo.entropy_target
    if target is not None and roles.entropy is not None and roles.entropy > target:
        return 0.0
    return roles.entropy_coef
