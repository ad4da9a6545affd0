"""Works out what the config's algorithm asks of a step, once, before the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from spmdrl.algo.advantages import (
    Estimator,
    advantage_of,
    asked_keys_of,
    estimator_of,
    reward_keys_of,
)
from spmdrl.algo.demonstrations import Objective
from spmdrl.algo.losses import aggregate_of
from spmdrl.algo.objectives import (
    corrects_before_update,
    corrects_in_update,
    needs_old_logprobs,
    policy_objective,
    selects,
    weighs_pairs,
)
from spmdrl.config import AlgoConfig


@dataclass(frozen=True)
class Algorithm:
    """The functions of the algorithm with the options of the config, and what the step must do
    around them.
    """

    estimator: Estimator
    advantage: Callable[[Any], Any]  # of Outcomes or of Tokens: what the estimator sees
    reward_keys: tuple[str, ...]  # values of the reward function that the estimator reads
    asked_keys: tuple[str, ...]  # and dynamic sampling: a sample without one of them is invalid
    aggregate: Callable[..., Tensor]  # a function of losses.AGGREGATIONS, or the user's
    objective: Objective  # the actor's loss, with the coefficients of the config
    adapts: bool  # coefficients of the loss follow what the steps measure
    weighs_pairs: bool  # the gradient of a loss of pairs is computed before each update
    selects: bool  # tokens are chosen over the mini-batch before each update
    needs_old_logprobs: bool  # a pass is spent on them
    corrects_before_update: bool  # the weights of a rollout correction come from that pass
    corrects_in_update: bool  # or from the update's own log-probabilities

    @classmethod
    def of(cls, algo: AlgoConfig) -> Algorithm:
        return cls(
            estimator=estimator_of(algo),
            advantage=advantage_of(algo),
            reward_keys=reward_keys_of(algo),
            asked_keys=asked_keys_of(algo),
            aggregate=aggregate_of(algo),
            objective=policy_objective(algo),
            adapts=algo.kl_target is not None or algo.entropy_target is not None,
            weighs_pairs=weighs_pairs(algo),
            selects=selects(algo),
            needs_old_logprobs=needs_old_logprobs(algo),
            corrects_before_update=corrects_before_update(algo),
            corrects_in_update=corrects_in_update(algo),
        )
