"""Is the config sound of what learns from rows as they stand: fine-tuning, reward models, and what
preference optimisation (preference.py) has in common with them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from transformers import PreTrainedConfig

from spmdrl.config import (
    RewardTrainingConfig,
    SftConfig,
    SupervisedConfig,
    require,
)
from spmdrl.distributed.placement import training_roles
from spmdrl.engines.fsdp.classifier import check_classifier, classifier_config
from spmdrl.engines.fsdp.lora import check_lora
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.hub.model_files import check_model_files
from spmdrl.hub.remote_code import allow_code
from spmdrl.training.checks.adapters import check_average
from spmdrl.training.checks.common import (
    check_checkpoint,
    check_megatron,
    check_pixels,
    check_places,
    check_sharing,
    check_training_role,
    check_vision,
    check_world,
    keep_towers,
    warnings_of_run,
)
from spmdrl.training.checks.distillation import check_sft_distillation, check_tokenizers
from spmdrl.training.checks.fp8 import check_fp8
from spmdrl.training.checks.hosts import warnings_of_hosts
from spmdrl.training.checks.length import check_length, warnings_of_length
from spmdrl.training.checks.ranges import check_bounds
from spmdrl.training.checks.routers import check_router_aux_loss
from spmdrl.training.logs.profiler import check_profile
from spmdrl.training.logs.trackers import check_trackers
from spmdrl.training.run_length import known_updates

logger = logging.getLogger(__name__)


def check_sft(config: SftConfig, world: int, warn: bool = True) -> None:
    """Raises ConfigError, as `check` does for PpoConfig. warn: else nothing is logged."""
    best = BEST_SFT if config.distillation is None else BEST_SFT | BEST_DISTILLATION
    check_supervised(config, world, "fine-tuning", best, warn)
    hf = load_hf_config(config.model)
    check_sft_distillation(config, hf)
    check_positions(hf, config.data.max_tokens)
    check_lora("actor", config.actor, hf)
    check_average(config)
    roles = training_roles(config)
    check_vision(hf, roles)
    check_pixels(hf, config.data)
    for name, role in roles.items():
        if role.engine == "megatron":
            check_megatron(name, role, role.model or config.model, world)
    if config.ref.model is not None:
        teacher = load_hf_config(config.ref.model)
        check_positions(teacher, config.data.max_tokens, whose="ref.model's")
        check_model_files("ref.model", config.ref.model, teacher)
        check_tokenizers(config.model, config.ref.model)


def check_reward_training(config: RewardTrainingConfig, world: int, warn: bool = True) -> None:
    """Raises ConfigError, as `check` does for PpoConfig. warn: else nothing is logged."""
    check_bounds(config)
    require(
        config.actor.lora is None,
        "actor.lora adapts a language model, whose head is left as it is; a reward model's is to "
        "be learnt, so all weights are trained: leave actor.lora out",
    )
    require(
        config.actor.shared_prefix is not True,
        "actor.shared_prefix=True has no effect on a reward model: its sequences are computed in "
        "pairs, each of them whole; leave it out",
    )
    require(
        config.actor.mtp_loss_scaling_factor == 0,
        f"actor.mtp_loss_scaling_factor={config.actor.mtp_loss_scaling_factor:g}: a reward model "
        "predicts no tokens; leave it 0",
    )
    check_supervised(config, world, "a reward model", BEST_REWARD_MODEL, warn)
    hf = classifier_config(config.model)
    check_vision(hf, {"actor": config.actor})
    check_classifier("model", config.model, hf)
    if config.actor.engine == "megatron":
        check_megatron("actor", config.actor, config.model, world)
    # its reward is read at a token behind the conversation
    check_positions(hf, config.data.max_tokens, behind=1)


def check_positions(
    hf: PreTrainedConfig, max_tokens: int, behind: int = 0, whose: str = "the model's"
) -> None:
    """behind: tokens that stand behind those of the data. whose: config it is."""
    limit = getattr(hf.get_text_config(), "max_position_embeddings", None)
    more = f", of which {behind} is taken" if behind else ""
    require(
        limit is None or max_tokens + behind <= limit,
        f"data.max_tokens={max_tokens}, but {whose} max_position_embeddings is {limit}{more}",
    )


# the metrics that a checkpoint may be kept for, and which of their values is the best
BEST_SFT = {"eval/loss": "smallest", "eval/perplexity": "smallest", "sft/loss": "smallest"}


BEST_DISTILLATION = {"eval/distillation_loss": "smallest", "sft/distillation_loss": "smallest"}


BEST_REWARD_MODEL = {
    "eval/loss": "smallest", "eval/accuracy": "largest", "eval/margin": "largest",
    "reward_model/loss": "smallest", "reward_model/accuracy": "largest",
    "reward_model/margin": "largest",
}  # fmt: skip


def check_supervised(
    config: SupervisedConfig, world: int, what: str, best: Mapping[str, str], warn: bool
) -> None:
    """Checks what is the same for all programs that learn from rows as they stand."""
    check_bounds(config)
    check_world(world)
    check_places(config)
    require(config.actor.model is None, "actor.model: set `model`, which is what is trained")
    check_trackers(config)
    check_profile(config, world)
    check_best(config, what, best)
    check_checkpoint(config, step_metric(best))
    check_length(config)
    roles = training_roles(config)
    for name, role in roles.items():
        check_training_role(name, role, tuple(range(world)), known_updates(config))
    require(
        config.actor.router_replay is None,
        f"actor.router_replay={config.actor.router_replay!r} has no effect on {what}: its tokens "
        "are of no rollout engine; leave it out",
    )
    for field in ("offload_params", "offload_optimizer"):
        require(
            not getattr(config.actor, field),
            f"actor.{field} has no effect on {what}: it clears the device for other roles "
            "while a role is idle, and here the actor trains in every step. To save "
            "memory set actor.activation_checkpointing, actor.optim.name='adamw8bit', "
            "actor.offload_policy or lower actor.micro_batch_tokens",
        )
    others = [role.model for role in roles.values() if role.model is not None]
    for model in [config.model, *others] if config.trust_remote_code else []:
        allow_code(model)
    keep_towers(config, *others)
    for name, role in roles.items():
        check_sharing(name, role, role.model or config.model)
        check_router_aux_loss(name, role, role.model or config.model)
        check_fp8(name, role, role.model or config.model)
    check_model_files(
        "model", config.model, load_hf_config(config.model),
        is_policy=not isinstance(config, RewardTrainingConfig),
    )  # fmt: skip
    if warn:
        found = [*warnings_of_length(config), *warnings_of_run(config)]
        for warning in [*found, *warnings_of_hosts(config, world)]:
            logger.warning(warning)


def step_metric(metrics: Mapping[str, str]) -> str:
    """Returns the first metric that each step has, and not an evaluation alone."""
    return next(name for name in metrics if not name.startswith("eval/"))


def check_best(config: SupervisedConfig, what: str, metrics: Mapping[str, str]) -> None:
    """metrics: those that a checkpoint may be kept for, and which of their values is the best."""
    best = config.checkpoint
    metric = best.best_metric
    if not best.keep_best:
        return
    require(
        metric in metrics or metric.startswith(f"{step_metric(metrics).partition('/')[0]}/"),
        f"checkpoint.keep_best goes by best_metric={metric!r}, which {what} has not: use one of "
        + ", ".join(f"{name!r} with best_is={which!r}" for name, which in metrics.items()),
    )
    require(
        best.best_is == metrics.get(metric, best.best_is),
        f"checkpoint.best_is={best.best_is!r} would keep the worst by best_metric={metric!r}: set "
        f"best_is={metrics.get(metric)!r}",
    )
