"""Checks whether a run can train on the cut distributions that its tokens were drawn from
(rollout.keep_sampling_mask; docs/correction.md).
"""

from __future__ import annotations

from spmdrl.algo.losses import loss_of
from spmdrl.config import PpoConfig, require
from spmdrl.rollout.build import ENGINES

ASKED = "rollout.keep_sampling_mask=True"


def check_sampling_mask(config: PpoConfig) -> None:
    """Raises ConfigError."""
    rollout = config.rollout
    if not rollout.keep_sampling_mask:
        return
    require(
        rollout.top_k > 0,
        f"{ASKED} needs rollout.top_k, which bounds how many token ids are recorded for each "
        "token: beside top_p=0.95, for example, top_k=50",
    )
    can = [name for name, spec in ENGINES.items() if spec.records_supports]
    require(
        rollout.engine in can,
        f"{ASKED}: rollout.engine={rollout.engine!r} does not say among which tokens it draws; use "
        f"one of {can}",
    )
    for reason, is_so in reasons_against(config).items():
        require(not is_so, f"{ASKED} does not go with {reason}; leave one of them out")


def reasons_against(config: PpoConfig) -> dict[str, bool]:
    """Returns what the option does not go with and why, and whether the config has it."""
    algo, actor = config.algo, config.actor
    explains = config.explain_mismatch or config.explain_mismatch_above is not None
    return {
        "rollout.speculative: it was not tried": bool(config.rollout.speculative),
        "agent: the rows of a trajectory have no record of it": config.agent is not None,
        "algo.demonstrations: nobody drew the tokens of a demonstration": algo.demonstrations > 0,
        "algo.distillation: the teacher's most probable tokens need not be among those that were "
        "left": algo.distillation is not None,
        "prm: its implicit rewards are of whole distributions": config.prm is not None,
        "a loss of pairs: it compares answers by their probability under the whole distribution": (
            loss_of(algo).pairs is not None
        ),
        "actor.mtp_loss_scaling_factor: the layers for multi-token prediction predict later "
        "tokens, of which the record says nothing": actor.mtp_loss_scaling_factor > 0,
        "explain_mismatch: the passes that it compares are of whole distributions": explains,
    }
