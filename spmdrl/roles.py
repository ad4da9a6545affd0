"""Who takes part in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spmdrl.config import PpoConfig
from spmdrl.engines.engine import TrainEngine
from spmdrl.phases import Phases
from spmdrl.replay import ReplayBuffer
from spmdrl.rewards.runner import RewardRunner
from spmdrl.rollout.engine import RolloutEngine
from spmdrl.topology import Topology
from spmdrl.weights.sync import WeightSync


@dataclass
class Roles:
    """Who takes part in a step. `topology` spans all ranks; each engine knows its own."""

    config: PpoConfig
    topology: Topology
    phases: Phases
    tokenizer: Any
    rollout_topology: Topology
    rollout: RolloutEngine
    rewards: RewardRunner
    actor: TrainEngine
    weight_sync: WeightSync | None = None  # actor -> rollout
    ref: TrainEngine | None = None
    critic: TrainEngine | None = None
    prm: TrainEngine | None = None
    replay: ReplayBuffer | None = None
    kl_coef: float = 0.0  # of the next step, where adaptive
    entropy_coef: float = 0.0
    entropy: float | None = None  # of the last step, where its coefficient is adaptive
    policy_version: int = 0  # of the weights that the rollout engine holds
