"""Checks what the user's own functions return, each time that they are called.

A tensor of another shape would mostly be broadcast: the run would go on and learn something else.
All raise ConfigError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spmdrl.algo.correction import MISMATCH_SUMS
from spmdrl.config import require
from spmdrl.config.words import counted
from spmdrl.types import Batch

TAKEN = frozenset({  # metrics of a step that are no loss's own
    "loss", "loss_sum", "grad_norm", "lr", "entropy", "ppo_kl", "ref_kl", "ratio_max",
    "rollout_kl", "logprob_diff_mean", "logprob_diff_max", "kl_coef", "entropy_coef",
    "rejected", "correction_weight", "off_policy_masked", "ref_kl_cut", *MISMATCH_SUMS,
    "off_policy_prob", "off_ratio_mean", "distillation_loss", "distillation_clamped",
    "teacher_mass", "student_mass", "mtp_loss", "mtp_grad_norm", "router_aux_loss",
    "skipped_updates",
})  # fmt: skip

FAULT = "fault/"  # begins the metrics of fault_of, which no user sees

TAKEN_OF_ANSWERS = frozenset({  # those that preference optimisation writes for every loss
    "loss", "grad_norm", "lr", "entropy", "kl", "desirable", "logps/chosen", "logps/rejected",
})  # fmt: skip


def require_shape(where: str, value: Any, shape: torch.Size, text: str) -> None:
    """text: the shape in words, such as "(num_tokens,)"."""
    has = f"a tensor of shape {tuple(value.shape)}" if torch.is_tensor(value) else repr(value)
    require(
        torch.is_tensor(value) and value.shape == shape,
        f"{where} returned {has[:100]}; it must return a tensor of shape {text}, here "
        f"{tuple(shape)}",
    )


def require_gradient(where: str, value: Tensor, logprobs: Tensor) -> None:
    """The rest of a loss may have a gradient: then the run would go on and learn that alone."""
    learns = torch.is_grad_enabled() and logprobs.requires_grad
    require(
        value.requires_grad or not learns,
        f"{where} must have a gradient with respect to logprobs; nothing is learnt from numbers "
        "without one, as tensor.detach() and torch.no_grad() make them",
    )


def name_of(function: Any) -> str:
    """Returns what errors call a function of the user's."""
    return getattr(function, "__name__", "your function")


def checked_loss(
    function: Callable[..., Any], name: str
) -> Callable[[Tensor, Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]:
    """Returns a policy loss, options given, that is checked. name: of the user's function."""
    where = f"algo.policy_loss: {name}"

    def loss(logprobs: Tensor, old_logprobs: Tensor, mb: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        found = function(logprobs, old_logprobs, mb)
        losses, metrics = losses_and_metrics(where, found, TAKEN, "actor/")
        require_shape(f"{where}, as losses,", losses, logprobs.shape, "(num_tokens,)")
        require_gradient(f"{where}: losses", losses, logprobs)
        for key, value in metrics.items():
            if not torch.is_tensor(value) or value.ndim > 0:  # one number is every token's
                require_shape(
                    f"{where}, as the metric {key!r},", value, logprobs.shape, "(num_tokens,)"
                )
        return losses, metrics | fault_of(where, losses, logprobs, old_logprobs, mb.advantages)

    return loss


def fault_of(where: str, losses: Tensor, *inputs: Tensor | None) -> dict[str, Tensor]:
    """Returns a metric that is 1 where the losses are not finite though their inputs are, else 0.
    Engines take it for what they say of an update that fails (without_faults).
    """
    sound = torch.stack([each.isfinite().all() for each in inputs if each is not None]).all()
    return {f"{FAULT}{where}_max": (sound & ~losses.isfinite().all()).detach().float()}


def without_faults(totals: dict[str, float]) -> tuple[dict[str, float], str]:
    """Returns the totals of an update without the metrics of fault_of, and what is to be said of
    those that are not 0; "" where there is none.
    """
    kept = {name: total for name, total in totals.items() if not name.startswith(FAULT)}
    found = [
        name[len(FAULT) : -len("_max")] for name in totals if totals[name] and name not in kept
    ]
    said = "".join(f", as {where} returned losses that are not finite" for where in found)
    return kept, said


def losses_and_metrics(
    where: str, found: Any, taken: frozenset[str], prefix: str = ""
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns what a loss returned. Its metrics are logged behind `prefix`, where every run has
    those that are `taken`.
    """
    is_pair = isinstance(found, tuple | list) and len(found) == 2 and isinstance(found[1], dict)
    require(is_pair, f"{where} must return a pair: losses, and a dict of metrics, which may "
            f"be {{}}; it returned a {type(found).__name__}")  # fmt: skip
    losses, metrics = found
    for key in metrics:
        require(isinstance(key, str), f"{where}: the name {key!r} of a metric is no text")
        require(key not in taken, f"{where}: {prefix}{key} is a metric of a run's own; "
                "give yours another name")  # fmt: skip
    return losses, metrics


def preference_loss_name(function: Callable[[Any], Any]) -> str:
    """Returns what errors call a loss of preference optimisation, options given."""
    return f"the preference loss {name_of(getattr(function, 'func', function))}"


def checked_answers(
    function: Callable[[Any], Any], answers: Any, logprobs: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Calls a loss of preference optimisation. logprobs: of answers, one for each loss there is."""
    where = preference_loss_name(function)
    losses, metrics = losses_and_metrics(where, function(answers), TAKEN_OF_ANSWERS)
    named = {"losses": losses} | {f"the metric {key!r}": value for key, value in metrics.items()}
    for what, value in named.items():
        require_shape(f"{where}, as {what},", value, logprobs.shape, "(pairs or answers,)")
    require_gradient(f"{where}: losses", losses, logprobs)
    return losses, metrics


def checked_aggregation(function: Callable[..., Any]) -> Callable[..., Tensor]:
    def aggregation(mask: Tensor, seq_lens: Tensor, counts: Tensor, norm_length: int) -> Tensor:
        weights = function(mask, seq_lens, counts, norm_length)
        where = f"algo.aggregation: {name_of(function)}"
        require_shape(where, weights, mask.shape, "(num_tokens,)")
        wrong = weights[(mask == 0) & (weights != 0)]
        require(
            not len(wrong),
            f"{where} gave a weight to {counted(len(wrong), 'masked token')}, the first of "
            f"them {wrong[:1].tolist()}: prompts and what tools say would be trained on. Multiply "
            "the weights by the mask",
        )  # fmt: skip
        return weights

    return aggregation


def checked_kl(function: Callable[..., Any]) -> Callable[[Tensor, Tensor], Tensor]:
    def kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        found = function(logprobs, ref_logprobs)
        where = f"algo.kl_estimator: {name_of(function)}"
        require_shape(where, found, logprobs.shape, "(num_tokens,)")
        require_gradient(where, found, logprobs)
        return found

    return kl


def checked_advantage(
    function: Callable[..., Any], name: str, sees: str, critic: bool
) -> Callable[[Any], Any]:
    """Returns an estimator, options given, that is checked. sees, critic: of its Estimator."""
    where = f"algo.advantage: {name}"

    def advantage(seen: Any) -> Any:
        found = function(seen)
        of_samples = sees == "outcomes"
        text = "(n,)" if of_samples else "(num_tokens,)"
        shape = seen.scores.shape if of_samples else seen.mask.shape
        require(
            not critic or (isinstance(found, tuple | list) and len(found) == 2),
            f"{where} must return a pair, advantages and returns, as its Estimator has critic=True",
        )
        for value in found if critic else (found,):
            require_shape(where, value, shape, text)
        return found

    return advantage
