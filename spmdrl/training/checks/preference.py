"""Is the config of preference optimisation sound."""

from __future__ import annotations

from spmdrl.algo.preference_losses import (
    PREFERENCE_LOSSES,
    PreferenceLoss,
    preference_loss_of,
    preference_options,
)
from spmdrl.config import PreferenceConfig, PreferenceTrainingConfig, require
from spmdrl.data.answers import as_sft
from spmdrl.engines.fsdp.lora import check_lora
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.training.checks.adapters import check_no_sources
from spmdrl.training.checks.common import check_megatron, check_pixels, check_vision
from spmdrl.training.checks.options import (
    check_inputs,
    check_kind,
    check_name,
    check_options,
    shown,
)
from spmdrl.training.checks.ranges import check_bounds
from spmdrl.training.checks.supervised import check_positions, check_supervised

# the metrics that a checkpoint may be kept for, and which of their values is the best
BEST_PREFERENCE = {
    "eval/loss": "smallest", "eval/rewards/accuracies": "largest",
    "eval/rewards/margins": "largest", "preference/loss": "smallest",
    "preference/rewards/accuracies": "largest", "preference/rewards/margins": "largest",
}  # fmt: skip


def check_preference(config: PreferenceTrainingConfig, world: int, warn: bool = True) -> None:
    """Raises ConfigError, as `check` does for PpoConfig. warn: else nothing is logged."""
    check_bounds(config)
    check_loss(config.preference)
    labelled = preference_loss_of(config.preference).unpaired
    require(
        not labelled or config.actor.shared_prefix is not True,
        "actor.shared_prefix=True has no effect on labelled answers, of which each has a prompt of "
        "its own; leave it out",
    )
    require(
        config.actor.mtp_loss_scaling_factor == 0,
        f"actor.mtp_loss_scaling_factor={config.actor.mtp_loss_scaling_factor:g}: the layers for "
        "multi-token prediction would learn the worse answers as well; leave it 0",
    )
    check_supervised(config, world, "preference optimisation", BEST_PREFERENCE, warn)
    hf = load_hf_config(config.model)
    check_positions(hf, config.data.max_tokens)
    check_lora("actor", config.actor, hf)
    check_no_sources("actor", config.actor, "a row of answers has no data source")
    check_vision(hf, {"actor": config.actor})
    check_pixels(hf, as_sft(config.data))
    if config.actor.engine == "megatron":
        check_megatron("actor", config.actor, config.model, world)


def check_loss(preference: PreferenceConfig) -> None:
    """Raises ConfigError for an unknown loss, or options that it does not have."""
    check_name("preference.loss", preference.loss, PREFERENCE_LOSSES)
    check_kind("preference.loss", preference.loss, type(None))
    loss = preference_loss_of(preference)
    name = f"preference.loss={shown(preference.loss)}"
    check_options("preference.loss_args", preference.loss_args, loss.function, preference.loss)
    check_inputs("preference.loss", loss.function, ("answers",))
    if preference.ld_alpha is None:
        return
    require(
        preference.ld_alpha <= 1,
        f"preference.ld_alpha={preference.ld_alpha:g} must be in 0..1: 1 counts all tokens alike",
    )
    is_own = isinstance(preference.loss, PreferenceLoss) or callable(preference.loss)
    require(
        not loss.unpaired and (is_own or preference.loss == "dpo"),
        f"preference.ld_alpha={preference.ld_alpha:g}: {name} has no longer and shorter answer of "
        "a pair whose log-probabilities are compared as sums; it is of loss='dpo'",
    )
    require(
        not preference_options(preference).get("length_normalized", False),
        "preference.ld_alpha weighs the tokens of the longer answer, and length_normalized divides "
        "by their number: set one of them",
    )
