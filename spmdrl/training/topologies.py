"""Every Topology of a run, made in one place before anything else is built.

So the process groups of a config can be looked at without its models: tests/process_groups.py makes
them for 1,024 ranks in one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spmdrl.config import PpoConfig
from spmdrl.distributed.placement import Placement, Ranks, training_roles, union
from spmdrl.distributed.topology import Topology, train_degrees
from spmdrl.rewards.reward_model import train_config


@dataclass(frozen=True)
class Topologies:
    """Says where a run's roles are. Each exists on every rank of the job."""

    everyone: Topology
    trainers: dict[str, Topology]  # actor, ref, critic, prm: those that the run has
    scoring: Topology  # ranks that run reward functions, and the reward model
    judge: Topology | None  # the same ranks, axes dp, tp: one engine of the judge per tp group
    rollout: Topology  # axes dp, tp: one engine per tp group
    weights: Topology  # ranks of actor and rollout
    sampling: Topology  # ranks of rollout and reward
    training: Topology  # ranks of the trainers


class TopologyCache:
    """Topologies by their ranks; those of the same ranks share their groups."""

    def __init__(self, everyone: Topology) -> None:
        self.known: dict[Ranks, Topology] = {everyone.ranks: everyone}
        self.device = everyone.device

    def of(self, ranks: Ranks, **degrees: Any) -> Topology:
        """Collective over the job."""
        share = self.known.get(ranks)
        topology = Topology.build(self.device, ranks, share=share, **degrees)
        return self.known.setdefault(ranks, topology) if share is None else topology


def build_topologies(
    config: PpoConfig, placement: Placement, everyone: Topology, actor: Topology | None = None
) -> Topologies:
    """Makes the process groups of all roles. Collective over the job.

    actor: where a host's program has it already.
    """
    places, roles = TopologyCache(everyone), placement.roles
    trainers = {} if actor is None else {"actor": actor}
    for name, role in training_roles(config).items():
        if name not in trainers:
            trainers[name] = places.of(roles[name], **train_degrees(role))
    return Topologies(
        everyone,
        trainers,
        scoring=places.of(roles["reward"], **reward_degrees(config)),
        judge=None
        if config.judge is None
        else places.of(roles["reward"], dp=-1, tp=config.judge.tensor_parallel),
        rollout=places.of(roles["rollout"], dp=-1, tp=config.rollout.tensor_parallel),
        weights=places.of(union(trainers["actor"].ranks, roles["rollout"]), dp=-1),
        sampling=places.of(placement.sampling, dp=-1),
        training=places.of(placement.training, dp=-1),
    )


def reward_degrees(config: PpoConfig) -> dict[str, Any]:
    """Returns the degrees of parallelism of the ranks that score."""
    model = config.reward_model
    return {"dp": -1} if model is None else train_degrees(train_config(model))
