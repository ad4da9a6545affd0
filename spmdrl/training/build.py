"""Makes what a run works with from its config: data, engines, and who is where."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from spmdrl.config import KeepSamplesConfig, PpoConfig, SamplerConfig, require
from spmdrl.config.words import counted
from spmdrl.data.image_limits import ImageLimits
from spmdrl.data.images import BatchImages, ImageProcessor
from spmdrl.data.prompt_sampler import PromptSampler
from spmdrl.data.prompts import PromptDataset
from spmdrl.data.source_adapters import adapter_routes_of, check_adapter_sources
from spmdrl.distributed.agreement import broadcast_from_first
from spmdrl.distributed.placement import (
    TEACHERS,
    Placement,
    is_frozen,
    place,
    reference_is_base,
    training_roles,
)
from spmdrl.distributed.progress import PROGRESS, model_text
from spmdrl.distributed.topology import Topology
from spmdrl.engines.base import TrainEngine
from spmdrl.engines.build import build_engine
from spmdrl.engines.fsdp.layer_kinds import shares_prefixes
from spmdrl.engines.fsdp.router_replay import routing_of
from spmdrl.hub.hf_folder import load_hf_config, load_tokenizer
from spmdrl.rewards.reward_model import RewardModel, train_config
from spmdrl.rewards.runner import RewardRunner, needs_truth, rewards_of, takes_truth
from spmdrl.rewards.truths import truth_checker
from spmdrl.rollout.agents.pool import AgentPool
from spmdrl.rollout.base import RolloutEngine
from spmdrl.rollout.build import build_engine as build_rollout
from spmdrl.rollout.build import engine_text, is_filled_by_push
from spmdrl.rollout.multi_turn.conversation import Dialogue, has_dialogue
from spmdrl.rollout.multi_turn.environment import check_environments
from spmdrl.rollout.multi_turn.reply_encoder import prompts_of
from spmdrl.rollout.scheduler import Scheduler
from spmdrl.training.batch_exchange import P2PChannel
from spmdrl.training.checks.agents import check_parser
from spmdrl.training.checks.length import check_steps
from spmdrl.training.checks.memory_fit import rl_planner
from spmdrl.training.checks.memory_plan import gpu_gib_here
from spmdrl.training.checks.shown import check_kept, check_shown
from spmdrl.training.elastic import check_memory_of_sizes
from spmdrl.training.language_judge import LanguageJudge, build_judge, shares_ranks
from spmdrl.training.logs.flops import Flops
from spmdrl.training.logs.trace import SpanLog
from spmdrl.training.overlap import StepRequests, can_overlap
from spmdrl.training.partial_rollouts import PartialRollouts
from spmdrl.training.replay.keeper import SampleKeeper
from spmdrl.training.replay_buffer import ReplayBuffer
from spmdrl.training.roles import Roles, Sampler, Trainer
from spmdrl.training.run_images import batch_images, with_replies
from spmdrl.training.run_length import with_length
from spmdrl.training.runtime import Runtime
from spmdrl.training.teacher_endpoint import connect_teachers, endpoints_of
from spmdrl.training.teacher_prompts import check_sources, hints_of, routes_of
from spmdrl.training.topologies import Topologies, build_topologies
from spmdrl.training.weight_sync import WeightSync, exhaust
from spmdrl.training.weight_versions import WeightVersions
from spmdrl.types import Prompt, Sample


@dataclass
class RlRun:
    """A run of reinforcement learning: all that its loop works with."""

    config: PpoConfig
    runtime: Runtime
    roles: Roles
    prompts: PromptDataset
    held_out: list[tuple[int, Prompt]]  # the same on every rank
    order: PromptSampler  # draws on the ranks that sample; step_info tells the others what
    samples: list[Sample] = field(default_factory=list)  # of the last step, made by this rank
    # of the next step, where its sampling begins while this one is scored
    next_requests: StepRequests | None = None
    keeper: SampleKeeper | None = None  # on the ranks that sample, where samples are kept whole
    parts: ExitStack = field(default_factory=ExitStack)  # engines and workers, which it ends
    spans: SpanLog = field(init=False)

    def __post_init__(self) -> None:
        self.spans = SpanLog(self.runtime.phases)

    @property
    def engines(self) -> dict[str, TrainEngine]:
        """Returns the engines of this rank whose weights change, so saved and resumed."""
        return {t.name: t.model for t in self.roles.saved if t.engine is not None}

    @cached_property
    def flops(self) -> Flops:
        """Returns how to count the actor's FLOPs for what it learns from."""
        frozen = self.config.actor.lora is not None
        return Flops.of_model(load_hf_config(self.config.model), frozen)

    @property
    def is_log(self) -> bool:
        """The actor's first rank knows all metrics."""
        return self.roles.actor.topology.rank == 0

    def take(self, count: int, step: int) -> list[Prompt]:
        """The next prompts of the data, for a step."""
        return [self.prompts.prompt(i) for i in self.order.take(count, step)]


def build(
    config: PpoConfig, runtime: Runtime, host: Trainer | None = None, undo: ExitStack | None = None
) -> RlRun:
    """Data first, since its mistakes are cheap to find; then the engines. Collective.

    host: the actor, where it stands already (embed.py): other roles start from its weights unless
    they name a model, and no other weights are read. undo: takes away what was started.
    """
    parts = ExitStack() if undo is None else undo.enter_context(ExitStack())
    topology, phases = runtime.topology, runtime.phases
    placement = place(config, topology.world)
    topologies = build_topologies(config, placement, topology, host.topology if host else None)
    rewards = start_rewards(config, placement, topology, parts)
    tokenizer = load_tokenizer(config.model)
    with phases("load data"):
        prompts, held_out, order, looks = load_prompts(config, tokenizer, rewards, topology)
        config = with_length(config, len(prompts))
        check_steps(config, topology.world)
        if host is None:  # nobody knows what another program's model takes
            planner = rl_planner(prompts.num_tokens, gpu_gib_here(), prompts.image_tokens)
            check_memory_of_sizes(config, topology.world, planner, runtime)
    looks = with_replies(looks, config)
    check_kept(config, looks)
    images = batch_images(config, looks, prompts)
    require(
        images is None or not endpoints_of(config),
        "teachers: an endpoint is given token ids alone, and prompts of this data show images",
    )
    endpoints = connect_teachers(config, tokenizer, topologies.trainers["actor"], phases)
    trainers = build_trainers(config, runtime, topologies, placement, images, host)
    with phases("build reward model"):
        reward_model = build_reward_model(config, topologies.scoring, topology)
    judge = build_judge_of_run(config, runtime, topologies, placement, parts)
    with phases("build rollout"):
        rollout = build_rollout_of_run(config, topologies, looks, host, parts)
        dialogue, agents = build_turns(config, tokenizer, topologies.rollout, looks, parts)
    with phases("plan weights"):
        weights = plan_weights(config, placement, topologies, trainers["actor"], rollout)
        static = config.rollout.static_split
        sampler = Sampler(
            topologies.rollout, Scheduler(rollout, topologies.rollout, static) if rollout else None,
            topologies.scoring, rewards, reward_model, dialogue, agents, judge,
        )  # fmt: skip
        roles = build_roles(
            config, runtime, topologies, tokenizer, sampler, weights, trainers, images, prompts
        )
        roles.endpoints = endpoints
        if rollout is not None and roles.sleeps:
            rollout.sleep()
    order.lag = int(can_overlap(roles))
    keeper = keeper_of(config, runtime, topologies.sampling, len(prompts))
    return RlRun(config, runtime, roles, prompts, held_out, order, keeper=keeper, parts=parts)


def keeper_of(
    config: PpoConfig, runtime: Runtime, sampling: Topology, num_rows: int
) -> SampleKeeper | None:
    """None where no samples are kept whole. num_rows: of the data to train on."""
    if config.keep_samples == KeepSamplesConfig() or not sampling.here:
        return None
    return SampleKeeper(
        runtime.run_dir, config.keep_samples, sampling.rank, sampling.world, num_rows
    )


def start_rewards(
    config: PpoConfig, placement: Placement, topology: Topology, undo: ExitStack
) -> RewardRunner | None:
    """Starts the workers of the reward functions; None on ranks that do not score."""
    scorers = placement.roles["reward"]
    if topology.rank not in scorers:
        return None
    rewards = RewardRunner(rewards_of(config), config.rewards, len(scorers))
    undo.callback(rewards.close)
    return rewards


def build_rollout_of_run(
    config: PpoConfig, topologies: Topologies, looks: ImageLimits | None, host: Trainer | None,
    undo: ExitStack,
) -> RolloutEngine | None:  # fmt: skip
    """Builds the engine that samples; None on ranks without one. Collective."""
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    beside = config.actor.lora if config.weights.lora == "adapter" else None
    PROGRESS.detail(engine_text(config.rollout, config.model))
    rollout = build_rollout(
        config.model, config.rollout, longest, topologies.rollout, topologies.everyone,
        config.strict, beside, looks,
        load_weights=host is None and not is_filled_by_push(config.model, config.rollout),
        return_routed_experts=config.actor.router_replay is not None,
    )  # fmt: skip
    if rollout is not None:
        undo.callback(rollout.shutdown)
    return rollout


def build_turns(
    config: PpoConfig, tokenizer: Any, ranks: Topology, looks: ImageLimits | None, undo: ExitStack
) -> tuple[Dialogue | None, AgentPool | None]:
    """Builds what answers of several turns need. ranks: of the rollout. Collective over these."""
    dialogue = build_dialogue(config, tokenizer, ranks, looks)
    agents = build_agents(config, tokenizer, ranks, looks)
    for started in (dialogue, agents):
        if started is not None:
            undo.callback(started.close)
    return dialogue, agents


def plan_weights(
    config: PpoConfig, placement: Placement, topologies: Topologies, actor: Trainer,
    rollout: RolloutEngine | None,
) -> WeightSync:  # fmt: skip
    """Plans how weights travel from the actor to the engine that samples. Collective."""
    return WeightSync(
        actor.engine, actor.topology, rollout, topologies.rollout, config.rollout.dtype,
        config.weights, topologies.weights, in_place=weights_stay(config, placement),
    )  # fmt: skip


def build_roles(
    config: PpoConfig, runtime: Runtime, topologies: Topologies, tokenizer: Any, sampler: Sampler,
    weights: WeightSync, trainers: dict[str, Trainer], images: BatchImages | None,
    prompts: PromptDataset,
) -> Roles:  # fmt: skip
    """Puts together all that a step works with. Collective."""
    replays = config.actor.router_replay is not None
    # replies, or agents' messages, may show images that are not the data's
    replies_show = bool(config.multi_turn.max_images or config.agents.max_images)
    return Roles(
        config, runtime.topology, topologies.sampling, topologies.training, weights.topology,
        runtime.phases, P2PChannel(runtime.topology), tokenizer, sampler, weights,
        mailbox=WeightVersions(runtime.topology) if config.async_steps else None,
        actor=trainers["actor"], ref=trainers.get("ref"), critic=trainers.get("critic"),
        prm=trainers.get("prm"), kl_coef=config.algo.kl_coef,
        entropy_coef=config.algo.entropy_coef,
        replay=ReplayBuffer(config.algo.replay_steps) if config.algo.sample_filter else None,
        leftover=leftover_of(config),
        routing=routing_of(load_hf_config(config.model)) if replays else None,
        reply_images=images if replies_show else None,
        hints=hints_of(prompts, images), routes=routes_of(config, prompts),
        adapter_routes=adapter_routes_of(config.actor.lora, prompts.data_source),
        teachers={name: each for name, each in trainers.items() if name.startswith(TEACHERS)},
    )  # fmt: skip


def build_judge_of_run(
    config: PpoConfig, runtime: Runtime, topologies: Topologies, placement: Placement,
    undo: ExitStack,
) -> LanguageJudge | None:  # fmt: skip
    """Builds the judge, if the config has one. It comes before the engine that samples, which
    measures how much memory is free.
    """
    if config.judge is None:
        return None
    with runtime.phases("build judge"):
        PROGRESS.detail(model_text(config.judge.model))
        sleeps = shares_ranks(config, placement)
        judge = build_judge(config, topologies.judge, runtime.topology, sleeps)
        if judge is not None:
            undo.callback(judge.engine.shutdown)
    return judge


def weights_stay(config: PpoConfig, placement: Placement) -> bool:
    """Returns True if neither the actor's weights nor the engine's leave the GPU between pushes.
    An engine on ranks that do not train never sleeps.
    """
    actor = config.actor
    sleeps = config.rollout.sleep and set(placement.roles["rollout"]) & set(placement.training)
    return not (actor.offload_params or actor.offload_policy or sleeps)


def build_order(config: PpoConfig, prompts: PromptDataset) -> PromptSampler:
    """Raises ConfigError where the data has too few prompts for one step, over-sampled."""
    per_step, oversample = config.data.prompts_per_step, config.rollout.oversample
    asked = math.ceil(per_step * oversample)
    order = PromptSampler(len(prompts), prompts.marked, config.data, config.seed)
    require(
        asked <= len(prompts),
        f"data.prompts_per_step={per_step} x rollout.oversample={oversample} = "
        f"{counted(asked, 'prompt')}, "
        f"but the data has {len(prompts)}",
    )
    order.check_enough(asked)
    return order


def load_prompts(
    config: PpoConfig, tokenizer: Any, rewards: RewardRunner | None, topology: Topology
) -> tuple[PromptDataset, list[tuple[int, Prompt]], PromptSampler, ImageLimits | None]:
    """Loads the prompts to train on and those held out, with the order of the first and the image
    limits of both. Collective.
    """
    data = config.data
    prompts = load_train(config, tokenizer, topology)
    order = build_order(config, prompts)
    sources, looks = set(prompts.data_sources), prompts.looks()
    held_out: list[tuple[int, Prompt]] = []
    if data.eval is not None:
        held_out, dataset = load_held_out(config, tokenizer, topology)
        sources |= set(dataset.data_sources)
        looks = prompts.looks(dataset)
        check_shown(config, dataset)
    if rewards is not None:
        rewards.check_sources(sorted(sources))
    check_environments(config.environment, sorted(sources))
    check_shown(config, prompts)
    return prompts, held_out, order, looks


def load_train(config: PpoConfig, tokenizer: Any, topology: Topology) -> PromptDataset:
    """The prompts to train on. Collective."""
    sampler = config.data.sampler
    # success rates are kept where any field of the group is set
    tracked = sampler if sampler != SamplerConfig() else None
    longest = config.rollout.max_tokens if config.algo.demonstrations else 0
    dataset = load_dataset(
        config.data.train, config, tokenizer, topology, "", tracked, longest, hinted=True
    )  # fmt: skip
    check_sources(config, dataset.data_sources)
    check_adapter_sources(config.actor.lora, dataset.data_sources, trained=True)
    return dataset


def load_held_out(
    config: PpoConfig, tokenizer: Any, topology: Topology, benchmark: str = ""
) -> tuple[list[tuple[int, Prompt]], PromptDataset]:
    """(the prompts by number, the whole file). benchmark: whose rows they are, if of one.
    Collective.
    """
    assert config.data.eval is not None
    dataset = load_dataset(config.data.eval, config, tokenizer, topology, benchmark)
    count = min(len(dataset), config.data.max_eval_prompts or len(dataset))
    return [(i, dataset.prompt(i)) for i in range(count)], dataset


def load_dataset(
    paths: str | tuple[str, ...], config: PpoConfig, tokenizer: Any, topology: Topology,
    benchmark: str = "", sampler: SamplerConfig | None = None, demonstration_tokens: int = 0,
    hinted: bool = False,
) -> PromptDataset:  # fmt: skip
    """Collective. sampler, demonstration_tokens, hinted: as of PromptDataset.load."""
    data, hf = prompts_of(config), load_hf_config(config.model)
    vision = ImageProcessor.load(config.model, hf, data)
    reward = rewards_of(config)
    dataset = PromptDataset.load(
        paths, tokenizer, data, topology, hf.get_text_config().vocab_size,
        needs_truth(reward), truth_checker(reward), vision, benchmark, takes_truth(reward), sampler,
        demonstration_tokens, hinted,
    )  # fmt: skip
    check_adapter_sources(config.actor.lora, dataset.data_sources)
    return dataset


def build_trainers(
    config: PpoConfig,
    runtime: Runtime,
    topologies: Topologies,
    placement: Placement,
    images: BatchImages | None,
    host: Trainer | None,
) -> dict[str, Trainer]:
    """Builds the models that are trained, and the reference; by the role's name. Collective."""
    trainers = {} if host is None else {"actor": replace(host, images=images)}
    for name, role in training_roles(config).items():
        if name in trainers:
            continue
        if name == "ref" and reference_is_base(config, placement):
            actor = trainers["actor"]
            base = actor.engine.base() if actor.engine is not None else None
            trainers[name] = Trainer(name, actor.topology, base, images, actor.shares_prefixes)
            continue
        shown = "teachers" if name.startswith(TEACHERS) else name
        with runtime.phases(f"build {shown}"):
            ranks = topologies.trainers[name]
            kind = "value" if name == "critic" else "policy"
            PROGRESS.detail(model_text(role.model or config.model))
            strict = config.strict and name == "actor"
            engine = build_engine(
                kind, role.model or config.model, role, ranks, is_frozen(name), runtime.topology,
                strict=strict,
                load_weights=host is None or role.model is not None,
            )  # fmt: skip
            shares = shares_prefixes(role, strict, load_hf_config(role.model or config.model))
            trainers[name] = Trainer(name, ranks, engine, images, shares)
            if host is not None and role.model is None:
                bucket_bytes = config.weights.bucket_mib << 20
                trainers[name].started_from = start_from(host.model, engine, bucket_bytes)
            if engine is not None:
                engine.offload()
    return trainers


def start_from(source: TrainEngine, engine: TrainEngine | None, bucket_bytes: int) -> str:
    """Gives a new engine another's weights; their digest, the same on every rank and in any layout.

    engine: None on ranks without it. Collective over the ranks of `source`.
    """
    digest = hashlib.sha256()

    def digested() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in source.named_weights(torch.float32, bucket_bytes):
            total = float(tensor.double().sum()), float(tensor.double().square().sum())
            digest.update(f"{name} {total}".encode())
            yield name, tensor

    weights = digested()
    try:
        if engine is not None:
            engine.take_weights(weights)
    finally:
        exhaust(weights)
    return digest.hexdigest()[:16]


def build_dialogue(
    config: PpoConfig, tokenizer: Any, ranks: Topology, looks: ImageLimits | None
) -> Dialogue | None:
    """ranks: of the rollout. On the leaders of its engines."""
    if not (has_dialogue(config) and ranks.here and ranks.axis_rank("tp") == 0):
        return None
    vision = looks.vision if looks is not None else None
    return Dialogue(config, tokenizer, ranks.axis_size("dp"), vision)


def leftover_of(config: PpoConfig) -> PartialRollouts | None:
    """None where a step asks for no more than it trains on."""
    if config.rollout.oversample == 1:
        return None
    given, by_agents = config.algo.demonstrations, config.agent is not None
    return PartialRollouts(config.rollout, demonstrations=given, by_agents=by_agents)


def build_agents(
    config: PpoConfig, tokenizer: Any, ranks: Topology, looks: ImageLimits | None
) -> AgentPool | None:
    """ranks: of the rollout. On the leaders of its engines. Collective over these ranks."""
    if config.agent is None or not ranks.here:
        return None
    check_parser(config, tokenizer)
    key = broadcast_from_first(secrets.token_urlsafe(24), ranks.control)
    if ranks.axis_rank("tp") != 0:
        return None
    number, engines = ranks.axis_rank("dp"), ranks.axis_size("dp")
    vocab_size = load_hf_config(config.model).get_text_config().vocab_size
    vision = looks.vision if looks is not None else None
    return AgentPool(config, tokenizer, number, engines, key, vocab_size, vision)


def build_reward_model(
    config: PpoConfig, scoring: Topology, everyone: Topology
) -> RewardModel | None:
    """None outside of `scoring`, whose axes are dp and fsdp. Collective over everyone."""
    if config.reward_model is None:
        return None
    name, role = config.reward_model.model, train_config(config.reward_model)
    engine = build_engine("reward", name, role, scoring, frozen=True, job=everyone)
    if engine is None:
        return None
    engine.offload()
    return RewardModel(config.reward_model, engine, load_tokenizer(name))
