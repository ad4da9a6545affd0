"""Checks a policy loss of pairs: what it does not read is refused (docs/online_preference.md)."""

from __future__ import annotations

from spmdrl.algo.losses import loss_of
from spmdrl.config import AlgoConfig, PpoConfig, require
from spmdrl.training.checks.options import shown

# why a loss of pairs does not go with a field of AlgoConfig, by the field's name
UNREAD = {
    **dict.fromkeys(
        ("advantage", "advantage_args", "aggregation", "norm_length", "seq_mean_over",
         "whiten_over", "off_policy_mask_threshold", "top_entropy_fraction"),
        "it has no advantages, and is the mean over pairs: leave it out",
    ),
    "kl_coef": "its own beta holds the policy to the reference: leave it 0",
    "distillation": "it learns from pairs alone: leave it out",
    "entropy_coef": "it is no sum over tokens to which a bonus could be added: leave it 0",
    "entropy_target": "it is no sum over tokens to which a bonus could be added: leave it out",
    "positive_nll_coef": "its own options (rpo_alpha, cpo_alpha) weigh the likelihood of the "
    "better answer: leave it 0",
    "correction": "it has no ratio, and takes answers of any policy as they are: leave it out",
    "sample_filter": "a pair is the best and the worst answer to a prompt, not what a filter drew: "
    "leave it out",
}  # fmt: skip


def check_pairs(config: PpoConfig) -> None:
    """Raises ConfigError where the policy loss is one of pairs, and an option has no say in it."""
    algo, default, loss = config.algo, AlgoConfig(), loss_of(config.algo)
    if loss.pairs is None:
        return
    name = f"algo.policy_loss={shown(algo.policy_loss)}"
    require(
        not loss.pairs.unpaired,
        f"{name} takes single answers that are desirable or not, and a step's samples become pairs "
        "of the best and the worst answer to each prompt: use a loss of Pairs",
    )
    for field, reason in UNREAD.items():
        value = getattr(algo, field)
        require(
            value == getattr(default, field),
            f"algo.{field}={shown(value)} does not go with {name}, a loss of pairs: {reason}",
        )
    require(
        config.rollout.n > 1,
        f"{name} compares answers to one prompt: rollout.n={config.rollout.n} gives no pair; use n "
        "of 2 or more",
    )
    require(
        not config.rewards.per_turn,
        f"rewards.per_turn=True does not go with {name}: answers are compared as a whole, by their "
        "reward",
    )
    require(
        config.actor.mtp_loss_scaling_factor == 0,
        f"actor.mtp_loss_scaling_factor={config.actor.mtp_loss_scaling_factor:g} does not go with "
        f"{name}: the layers for multi-token prediction would learn the worse answers as well",
    )
