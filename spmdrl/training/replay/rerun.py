"""Runs a step of a run again: the same train_step, with the samples that the run has kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from spmdrl.algo.advantages import estimator_of
from spmdrl.checkpoint import format as checkpoint
from spmdrl.config import ConfigError, PpoConfig
from spmdrl.distributed.agreement import gather_to_first
from spmdrl.distributed.placement import TEACHERS, place, training_roles
from spmdrl.distributed.progress import PROGRESS
from spmdrl.engines.fsdp.router_replay import routing_of
from spmdrl.hub.hf_folder import load_hf_config, load_tokenizer
from spmdrl.rewards.runner import RewardRunner, rewards_of
from spmdrl.rollout.sampling import lost_support
from spmdrl.training.batch_exchange import P2PChannel
from spmdrl.training.build import build_trainers
from spmdrl.training.checks.rl import require_sound
from spmdrl.training.coefficients import entropy_bonus
from spmdrl.training.collect import RolloutResult, check_scores
from spmdrl.training.remote_scoring import score
from spmdrl.training.replay.plan import ReplayPlan, read_share
from spmdrl.training.replay.run_config import EDITABLE, placed
from spmdrl.training.replay.sequence_sums import SequenceSums, merged_sums, sums_of
from spmdrl.training.replay.token_gradients import measured
from spmdrl.training.replay.token_table import TokenTable, token_table
from spmdrl.training.replay_buffer import ReplayBuffer
from spmdrl.training.rl import restore_algorithm
from spmdrl.training.roles import Roles, Sampler
from spmdrl.training.runtime import Runtime
from spmdrl.training.step import train_step
from spmdrl.training.teacher_endpoint import connect_teachers
from spmdrl.training.teacher_prompts import load_again
from spmdrl.training.topologies import build_topologies
from spmdrl.types import Sample

EVERY = 2**40  # samples and tokens


@dataclass(frozen=True)
class Edit:
    """Another config for the step, and whether its reward functions are asked again."""

    config: PpoConfig
    rescores: bool

    def of(self, config: PpoConfig) -> Edit:
        """Returns the edit of the run's config as it is here, where models are local folders."""
        edited = {name: getattr(self.config, name) for name in EDITABLE}
        return replace(self, config=replace(config, **edited))


@dataclass(frozen=True)
class StepNumbers:
    """Holds what a step has come to. On the first rank."""

    metrics: dict[str, float]
    sums: SequenceSums
    tokens: TokenTable | None  # of the sample that was asked for


def rerun(
    plan: ReplayPlan, runtime: Runtime, edit: Edit | None, address: tuple[int, int] | None,
    gradients: bool = False,
) -> StepNumbers | None:  # fmt: skip
    """Loads the checkpoint and runs the steps up to plan.step; the last with the edit, if any.

    address: group and index of the sample whose tokens are looked at; gradients: also at what each
    adds to the gradient. Returns None on all ranks but the first. Collective.
    """
    roles = build_roles(plan, runtime, edit)
    try:
        start_from(plan, roles)
        for step in range(plan.done + 1, plan.step):
            with PROGRESS.step(step, plan.step):
                train_step(roles, partial(kept_samples, plan, roles), step, push=False)
        return last_step(plan, roles, edit, address, gradients)
    finally:
        if roles.sampler.rewards is not None:
            roles.sampler.rewards.close()


def last_step(
    plan: ReplayPlan, roles: Roles, edit: Edit | None, address: tuple[int, int] | None,
    gradients: bool,
) -> StepNumbers | None:  # fmt: skip
    """Runs plan.step itself and gathers what it has computed. Collective."""
    config = plan.config if edit is None else edit.config
    logged = 0 if address is None else EVERY
    alone = without_engine(config)
    roles.set_config(replace(alone, log_samples=logged, log_sample_tokens=logged))
    if edit is not None:
        roles.kl_coef = roles.kl_coef if config.algo.kl_target else config.algo.kl_coef
        roles.entropy_coef = (
            roles.entropy_coef if config.algo.entropy_target else config.algo.entropy_coef
        )
    coefs = roles.kl_coef, entropy_bonus(roles)  # the step sets those of the next one
    make = partial(kept_samples, plan, roles)
    make = make if edit is None else partial(judged_again, roles, edit, make)
    engine = measured(roles, address) if address is not None and gradients else None
    with PROGRESS.step(plan.step, plan.step):
        batches = train_step(roles, make, plan.step, push=False)
    roles.post.wait_until_delivered()
    assert batches is not None  # every rank trains
    with roles.phases("log samples"):
        own = batches.of(roles.actor)
        tokens = None
        if address is not None:
            found = None if engine is None else engine.last
            tokens = token_table(roles, own, batches.recorder, address, coefs, found)
        everyone = gather_to_first((sums_of(own), tokens), roles.topology.control)
    if everyone is None:
        return None
    sums = merged_sums([part for part, _ in everyone])
    table = next((table for _, table in everyone if table is not None), None)
    return StepNumbers(dict(batches.metrics), sums, table)


def without_engine(config: PpoConfig) -> PpoConfig:
    """Returns the config without what compares a step's models with the rollout engine."""
    return replace(config, strict=False, explain_mismatch=False, explain_mismatch_above=None)


def build_roles(plan: ReplayPlan, runtime: Runtime, edit: Edit | None) -> Roles:
    """Builds every model that trains, on all ranks, and no rollout engine. Collective."""
    config = plan.config if edit is None else edit.config
    topology, phases = runtime.topology, runtime.phases
    built = sound_config(plan, runtime, config)
    if not config.algo.needs_reference:  # but steps before the edited one may ask it
        built = replace(built, algo=plan.config.algo)
    placement = place(built, topology.world)
    topologies = build_topologies(built, placement, topology)
    trainers = build_trainers(built, runtime, topologies, placement, None, None)
    rewards = None
    if edit is not None and edit.rescores:
        rewards = RewardRunner(rewards_of(config), config.rewards, topology.world)
    replays = config.actor.router_replay is not None
    tokenizer = load_tokenizer(config.model)
    with phases("load data"):
        hints, routes, adapters = load_again(built, tokenizer, topology)
    return Roles(
        replace(without_engine(plan.config), log_samples=0), topology, topologies.sampling,
        topologies.training, topologies.weights, phases, P2PChannel(topology),
        tokenizer,
        Sampler(topologies.rollout, None, topologies.scoring, rewards),
        weights=None, mailbox=None,
        actor=trainers["actor"], ref=trainers.get("ref"), critic=trainers.get("critic"),
        prm=trainers.get("prm"), kl_coef=plan.config.algo.kl_coef,
        entropy_coef=plan.config.algo.entropy_coef,
        replay=ReplayBuffer(config.algo.replay_steps) if config.algo.sample_filter else None,
        routing=routing_of(load_hf_config(config.model)) if replays else None,
        hints=hints, routes=routes, adapter_routes=adapters,
        endpoints=connect_teachers(built, tokenizer, trainers["actor"].topology, phases),
        teachers={name: each for name, each in trainers.items() if name.startswith(TEACHERS)},
    )  # fmt: skip


def sound_config(plan: ReplayPlan, runtime: Runtime, config: PpoConfig) -> PpoConfig:
    """Returns the config by which models are built. Raises ConfigError where it is not sound."""
    world = runtime.topology.world
    built = placed(config, runtime.run_dir, plan.actor_ranks == world)
    require_sound(built, world)
    return built


def check_edit(plan: ReplayPlan, runtime: Runtime, edit: Edit) -> None:
    """Raises ConfigError where the edited step cannot be run: before any step is."""
    known, wanted = training_roles(plan.config), estimator_of(edit.config.algo)
    for name, learns in (("critic", wanted.critic), ("prm", wanted.prm)):
        if learns and name not in known:
            raise ConfigError(
                f"the run has no {name}, which would have learnt: start a run with it"
            )
    sound_config(plan, runtime, edit.config)


def start_from(plan: ReplayPlan, roles: Roles) -> None:
    """Gives the models the state that they had before the first of the steps. Collective."""
    if plan.start is None:
        return
    with roles.phases("resume"):
        wrong = checkpoint.damage_together(plan.start, roles.topology)
        if wrong is not None:
            raise ConfigError(f"the checkpoint {plan.start} is damaged: {wrong}")
        saved = checkpoint.load(
            plan.start, {each.name: each.model for each in roles.saved}, roles.topology
        )
        restore_algorithm(roles, saved, plan.start)


def kept_samples(plan: ReplayPlan, roles: Roles, step: int) -> RolloutResult:
    """Returns this rank's share of a step's samples, as the run has kept them."""
    with roles.phases("data", roles.sampling):
        sampling = roles.sampling
        return read_share(plan.run_dir, step, sampling.rank, sampling.world).rollout


def judged_again(
    roles: Roles, edit: Edit, make: Callable[[int], RolloutResult], step: int
) -> RolloutResult:
    """Gives the samples new rewards, or new penalties, before they are learnt from. Which groups
    are learnt from stays as it was. Collective over the ranks that sample.
    """
    rollout = make(step)
    if edit.rescores:
        for sample in rollout.all_samples:
            forget_rewards(sample)
        by_id = {sample.prompt.id: sample.prompt for sample in rollout.all_samples}
        score(rollout.all_samples, roles, by_id.__getitem__, phase="reward")
    for sample in rollout.all_samples:
        sample.penalty = 0.0
    with roles.phases("reward", roles.sampling):
        check_scores(roles, rollout.all_samples)
    return rollout


def forget_rewards(sample: Sample) -> None:
    fields = {field.name: field for field in dataclasses.fields(Sample)}
    for name in ("reward", "pred"):
        setattr(sample, name, fields[name].default)
    sample.invalid = None
    if sample.support_ids is not None:
        sample.invalid = lost_support(sample.support_ids, sample.loss_mask)
    sample.turn_rewards, sample.reward_info = [], {}
