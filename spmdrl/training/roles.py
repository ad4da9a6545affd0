"""The roles of a step: who takes part, and on which ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spmdrl.algo.algorithm import Algorithm
from spmdrl.algo.own_functions import TAKEN, name_of
from spmdrl.config import PpoConfig
from spmdrl.data.images import BatchImages
from spmdrl.data.routing import Routing
from spmdrl.data.source_adapters import AdapterRoutes
from spmdrl.distributed.phases import Phases
from spmdrl.distributed.placement import Ranks, saved_roles
from spmdrl.distributed.progress import PROGRESS
from spmdrl.distributed.topology import Topology
from spmdrl.engines.base import LossFn, TrainEngine
from spmdrl.rewards.reward_model import RewardModel
from spmdrl.rewards.runner import RewardRunner
from spmdrl.rollout.agents.pool import AgentPool
from spmdrl.rollout.base import RolloutEngine
from spmdrl.rollout.multi_turn.conversation import Dialogue
from spmdrl.rollout.scheduler import Scheduler
from spmdrl.training.batch_exchange import P2PChannel
from spmdrl.training.language_judge import LanguageJudge
from spmdrl.training.partial_rollouts import PartialRollouts
from spmdrl.training.replay_buffer import ReplayBuffer
from spmdrl.training.teacher_endpoint import EndpointClient
from spmdrl.training.teacher_prompts import HintedPrompts, TeacherRoutes
from spmdrl.training.weight_sync import WeightSync
from spmdrl.training.weight_versions import WeightVersions
from spmdrl.types import Batch

logger = logging.getLogger(__name__)


@dataclass
class Trainer:
    """A role that holds a trainer's model. On a rank outside there is no engine."""

    name: str
    topology: Topology  # axes dp, fsdp, sp, or those of megatron: pp, dp, cp, tp
    engine: TrainEngine | None
    images: BatchImages | None = None  # of the run's data, where there are any
    shares_prefixes: bool = False  # whether a micro-batch has the prompt of a group's samples once
    started_from: str | None = None  # digest of weights that another engine gave it at the start
    skipped: int = 0  # updates, for a loss or a gradient that is not finite
    skipped_in_a_row: int = 0
    step: int = 0  # that is under way; 0: not known
    told: set[str] = field(default_factory=set)  # metrics of which it was said that they overflow

    @property
    def here(self) -> bool:
        return self.topology.here

    @property
    def ranks(self) -> Ranks:
        """The ranks of the role that are given sequences; the others help them with these."""
        return self.topology.data_ranks

    @property
    def model(self) -> TrainEngine:
        assert self.engine is not None, f"no {self.name} on this rank"
        return self.engine


@dataclass
class Sampler:
    """The role that samples, and the one that scores. On a rank outside they are None."""

    topology: Topology  # axes dp, tp: one engine per tp group
    driver: Scheduler | None
    scoring: Topology  # ranks that run reward functions
    rewards: RewardRunner | None
    reward_model: RewardModel | None = None  # on ranks that score
    dialogue: Dialogue | None = None  # on an engine's leader, where answers may have several turns
    agents: AgentPool | None = None  # on an engine's leader, where agents make the samples
    judge: LanguageJudge | None = None  # on ranks that score

    @property
    def here(self) -> bool:
        return self.topology.here

    @property
    def scheduler(self) -> Scheduler:
        assert self.driver is not None, "no rollout on this rank"
        return self.driver

    @property
    def engine(self) -> RolloutEngine:
        return self.scheduler.engine


@dataclass
class Roles:
    """All that a step works with. Topologies are known on every rank, engines where they live."""

    config: PpoConfig
    topology: Topology  # all ranks
    sampling: Topology  # ranks that make and score samples
    training: Topology  # ranks of actor, ref, critic and prm
    syncing: Topology  # ranks of actor and rollout
    phases: Phases
    post: P2PChannel  # messages from one rank to another
    tokenizer: Any
    sampler: Sampler
    weights: WeightSync | None  # actor -> rollout; None: there is no rollout engine (a replay)
    mailbox: WeightVersions | None  # only where sampling runs ahead of training
    actor: Trainer
    ref: Trainer | None = None
    teachers: Mapping[str, Trainer] = field(default_factory=dict)  # by the names of their roles
    endpoints: Mapping[str, EndpointClient] = field(default_factory=dict)  # teachers behind them
    critic: Trainer | None = None
    prm: Trainer | None = None
    replay: ReplayBuffer | None = None
    leftover: PartialRollouts | None = None  # only where more prompts are asked than trained on
    kl_coef: float = 0.0  # of the next step, where adaptive
    entropy_coef: float = 0.0
    entropy: float | None = None  # of the last step, where its coefficient is adaptive
    mismatch_explained: bool = False  # a step has been explained (config.explain_mismatch)
    policy_version: int = 0  # of the weights that the rollout engine holds
    weight_bytes: int = 0  # that this rank sent, since it was last reported
    routing: Routing | None = None  # of the actor's experts, where their choice is replayed
    reply_images: BatchImages | None = None  # where tools or an environment may show images
    hints: HintedPrompts | None = None  # where the teacher sees hints
    routes: TeacherRoutes | None = None  # where there are several teachers
    adapter_routes: AdapterRoutes | None = None  # where the actor has several adapters
    algorithm: Algorithm = field(init=False)  # what config.algo asks of a step

    def __post_init__(self) -> None:
        self.set_config(self.config)

    def set_config(self, config: PpoConfig) -> None:
        """Replaces the config, and with it what follows from its algorithm."""
        self.config, self.algorithm = config, Algorithm.of(config.algo)

    @property
    def sleeps(self) -> bool:
        """Whether the engines give their memory back: not where nobody beside them trains."""
        shared = set(self.sampler.topology.ranks) & set(self.training.ranks)
        return self.config.rollout.sleep and bool(shared)

    @property
    def temperature(self) -> float:
        """The temperature of the log-probabilities: that at which the policy samples."""
        return self.config.rollout.temperature

    @property
    def teacher_topk(self) -> int:
        """Returns how many tokens a teacher names in each place; 0 where there is none."""
        distillation = self.config.algo.distillation
        return 0 if distillation is None else distillation.topk

    @property
    def trainers(self) -> list[Trainer]:
        found = (self.actor, self.ref, *self.teachers.values(), self.critic, self.prm)
        return [trainer for trainer in found if trainer is not None]

    @property
    def saved(self) -> list[Trainer]:
        """Returns the trainers whose weights change, which checkpoints hold."""
        return [each for each in self.trainers if each.name in saved_roles(self.config)]

    @property
    def trainer_ranks(self) -> dict[Ranks, bool]:
        """The different sets of ranks that sequences are dealt to, the actor's first, and whether
        all roles there compute shared prefixes once.
        """
        found: dict[Ranks, bool] = {}
        for trainer in self.trainers:
            found[trainer.ranks] = found.get(trainer.ranks, True) and trainer.shares_prefixes
        return found


def train(
    trainer: Trainer,
    batches: list[Batch],
    loss_fn: LossFn,
    config: PpoConfig,
    epochs: int,
    before: Callable[[Batch, int], dict[str, float]] | None = None,
) -> dict[str, float]:
    """Makes one update per mini-batch, `epochs` times over. Returns metrics: means over the
    updates, and maxima where the name ends in _max.

    before(batch, number of updates done): is called before each update; its metrics replace those
    of the update. A mini-batch that has nothing to learn from on any rank makes no update.
    """
    updates: list[dict[str, float]] = []
    skipped_before = trainer.skipped
    for batch in PROGRESS.each(epochs * batches, "updates"):
        known = {} if before is None else before(batch, len(updates))
        temperature = config.rollout.temperature
        found = update(trainer, batch, loss_fn, temperature, config.nan_updates)
        updates.append(found | known if found else found)
    done = [update for update in updates if update]
    skipped = {"skipped_updates": float(trainer.skipped - skipped_before)}
    metrics = {
        name: max(u[name] for u in done)
        if name.endswith("_max")
        else sum(u[name] for u in done) / len(done)
        for name in (done[0] if done else ())
    }
    if not all(map(math.isfinite, metrics.values())):
        warn_of_overflow(trainer, metrics, config)
    return (skipped if config.nan_updates else {}) | metrics


def warn_of_overflow(trainer: Trainer, metrics: dict[str, float], config: PpoConfig) -> None:
    """Warns once of each metric that is not finite, and names the user's loss that returned it."""
    loss = config.algo.policy_loss
    for name, value in metrics.items():
        if math.isfinite(value) or name in trainer.told:
            continue
        trainer.told.add(name)
        is_own = trainer.name == "actor" and not isinstance(loss, str) and name not in TAKEN
        whose = f" of algo.policy_loss: {name_of(loss)}" if is_own else ""
        if trainer.topology.rank == 0:
            logger.warning(
                "step %d: the metric %s/%s%s is %g: metrics.jsonl has null in its place",
                trainer.step, trainer.name, name, whose, value,
            )  # fmt: skip


def update(
    trainer: Trainer, batch: Batch, loss_fn: LossFn, temperature: float, nan_updates: int
) -> dict[str, float]:
    """Makes one update. Returns its metrics; {} where there was nothing to learn, or where loss or
    gradient was not finite and nan_updates lets it pass. Else that raises FloatingPointError on
    every rank, with the weights as they were.
    """
    try:
        found = trainer.model.update(batch, loss_fn, temperature, trainer.images)
    except FloatingPointError as error:
        trainer.skipped += 1
        trainer.skipped_in_a_row += 1
        told = f"{error} (step {trainer.step})" if trainer.step else str(error)
        if trainer.skipped_in_a_row > nan_updates:
            raise FloatingPointError(told) from error
        if trainer.topology.rank == 0:
            in_a_row = trainer.skipped_in_a_row
            logger.warning("%s: passed over, %d in a row: %s", trainer.name, in_a_row, told)
        return {}
    trainer.skipped_in_a_row = 0
    return found
