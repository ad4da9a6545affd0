"""The strict mode: rollout and trainer logprobs are bitwise equal, and each step proves it.

What is refused at start, and the comparison itself. The operators: spmdrl_kernels/invariant.py;
the trainer's layers: engines/fsdp/strict.py; the rollout engines': rollout/vllm/strict.py and
rollout/hf/strict.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedConfig

from spmdrl.config import PpoConfig, require
from spmdrl.engines.fsdp.strict import require_none, uncovered
from spmdrl.hub.hf_folder import meta_model
from spmdrl.rollout.build import ENGINES


class LogprobsDiffer(RuntimeError):
    """A strict run's engine and trainer disagree about a token that both gave the same weights."""


def check_strict(config: PpoConfig, hf: PreTrainedConfig, hosted: bool) -> None:
    """Raises ConfigError where strict=True and engine and trainer could not agree in every bit."""
    if not config.strict:
        return
    rollout, actor, algo = config.rollout, config.actor, config.algo
    require(
        actor.engine == "fsdp" and not hosted,
        "strict=True needs actor.engine='fsdp': Megatron-core's layers are not batch-invariant",
    )
    require(
        rollout.dtype == actor.dtype,
        f"strict=True needs one precision on both sides, but rollout.dtype={rollout.dtype!r} and "
        f"actor.dtype={actor.dtype!r}",
    )
    for name, value, default, reason in (
        ("quantization", rollout.quantization, None, "the trainer's weights are not quantised"),
        ("tensor_parallel", rollout.tensor_parallel, 1, "a sum over ranks has another order"),
        ("top_p", rollout.top_p, 1.0, "the trainer's policy has no cut-off"),
        ("top_k", rollout.top_k, 0, "the trainer's policy has no cut-off"),
        ("min_p", rollout.min_p, 0.0, "the trainer's policy has no cut-off"),
        ("repetition_penalty", rollout.repetition_penalty, 1.0, "the trainer's policy has none"),
        ("min_tokens", rollout.min_tokens, 0, "the trainer's policy may stop at any token"),
    ):
        require(
            value == default,
            f"strict=True does not go with rollout.{name}={value}: {reason}; leave it {default}",
        )
    require(
        rollout.enforce_eager is not False,
        "strict=True does not go with rollout.enforce_eager=False: compiled layers have sums in "
        "another order; leave it out",
    )
    for field, usual in (("kernels", "spmdrl"), ("attention", "auto"), ("compile", False),
                          ("ulysses", 1), ("lora", None), ("fp8", None)):  # fmt: skip
        require(
            getattr(actor, field) == usual,
            f"strict=True does not go with actor.{field}={getattr(actor, field)!r}: the operators, "
            f"and the order of their sums, are then not the engine's; leave it {usual!r}",
        )
    require(
        actor.router_replay is None,
        f"strict=True does not go with actor.router_replay={actor.router_replay!r}: engine and "
        "trainer choose the same experts by themselves; leave it out",
    )
    updates = algo.epochs * algo.mini_batches
    require(
        not algo.correction.bypass or updates == 1,
        f"strict=True does not go with algo.correction.bypass and {updates} updates a step: from "
        "the second on, the engine is compared with a policy that it was not",
    )
    older = config.async_steps or rollout.oversample > 1 or algo.replay_steps
    require(
        algo.off_policy_mask_threshold is None or updates > 1 or bool(older),
        f"algo.off_policy_mask_threshold={algo.off_policy_mask_threshold} has no effect with "
        "strict=True and one update a step: policy and engine are equal in every bit",
    )
    check_strict_model(hf, rollout.engine)


def check_strict_model(hf: PreTrainedConfig, engine: str) -> None:
    """Looks at the model without its weights."""
    require_none(uncovered(meta_model(hf)), f"model type {hf.model_type!r}")
    ENGINES[engine].check_strict(hf)


def require_equal(metrics: Mapping[str, float], step: int) -> None:
    """Raises LogprobsDiffer. metrics: of the step, the same on every rank that learnt.

    A step that also learns from samples of older weights (async_steps, oversample, replay) has
    nothing to compare, and one in which there was nothing to learn from either.
    """
    if metrics.get("staleness/max", 0.0) > 0 or "actor/logprob_diff_max" not in metrics:
        return
    largest = metrics["actor/logprob_diff_max"]
    if largest != 0.0:
        raise LogprobsDiffer(
            f"strict=True, but in step {step} a logprob of the trainer differs from the engine's "
            f"of the same token and the same weights by {largest:g}. Engine and trainer must be of "
            "one kind of processor with as many threads; docs/strict.md says what else is assumed"
        )
