"""The run around the step: build, resume, then steps with evaluations and checkpoints between."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from spmdrl import checkpoint
from spmdrl.algo.checks import require
from spmdrl.cli import as_source
from spmdrl.collect import Source, collect, evaluate
from spmdrl.config import PpoConfig
from spmdrl.data import PromptDataset, PromptOrder
from spmdrl.engines import base_of, build_engine
from spmdrl.engines.engine import TrainEngine
from spmdrl.engines.models import vocab_size_of
from spmdrl.leftover import Leftover
from spmdrl.metrics import RunLog, memory_of_process, write_samples
from spmdrl.phases import Span
from spmdrl.placement import Ranks, place, reference_is_base, training_roles
from spmdrl.plan import describe
from spmdrl.program import Runtime, keep_what_stands, load_tokenizer
from spmdrl.replay import ReplayBuffer
from spmdrl.resume import find_start, take_folder
from spmdrl.rewards.runner import RewardRunner
from spmdrl.roles import Roles, Sampler, Trainer
from spmdrl.rollout import build_engine as build_rollout
from spmdrl.rollout.mailbox import Mailbox
from spmdrl.rollout.scheduler import Scheduler
from spmdrl.routing import Post
from spmdrl.saver import Keepsake, Saver, check_metric
from spmdrl.step import hand_over, learn
from spmdrl.stopping import BROKEN, STOP, StopVotes
from spmdrl.sync import sync, take_weights
from spmdrl.topology import Topology, train_degrees
from spmdrl.trace import TraceFile, busy_and_waiting, phase_metrics
from spmdrl.types import Prompt, Sample
from spmdrl.weights.sync import WeightSync

logger = logging.getLogger(__name__)

SHOWN = ("reward/mean", "reward/invalid", "actor/entropy", "actor/logprob_diff_max")


@dataclass
class Run:
    """What the loop works with."""

    config: PpoConfig
    runtime: Runtime
    roles: Roles
    prompts: PromptDataset
    held_out: list[tuple[int, Prompt]]  # the same on every rank
    order: PromptOrder  # moves on the ranks that sample; facts tell the others where it stands
    samples: list[Sample] = field(default_factory=list)  # of the last step, made by this rank

    @property
    def engines(self) -> dict[str, TrainEngine]:
        """Those on this rank that are trained, so saved and resumed."""
        return {
            trainer.name: trainer.engine
            for trainer in self.roles.trainers
            if trainer.name != "ref" and trainer.engine is not None
        }

    @property
    def is_log(self) -> bool:
        """The actor's first rank knows all metrics."""
        return self.roles.actor.topology.rank == 0

    def take(self, count: int) -> list[Prompt]:
        """The next prompts of the data."""
        return [self.prompts.prompt(i) for i in self.order.take(count)]


def train(config: PpoConfig, runtime: Runtime) -> None:
    """Every rank runs it from the first line to the last."""
    run = build(config, runtime)
    roles, phases, steps = run.roles, runtime.phases, config.steps
    done, log, trace = resume(run)
    phases.on_change = log.phase
    roles.policy_version = done - 1  # of what the engine was built with: not to be sampled from
    sync(roles, version=done)
    take_weights(roles, done)
    keep_what_stands()
    for line in roles.weights.describe():
        log.line(line)
    if config.checkpoint.every_steps > 0:
        runtime.stopping.arm(config.checkpoint.grace_s)
    saver = build_saver(run, log)
    votes = StopVotes(runtime.topology, config.async_steps)
    if run.held_out and done == 0:
        log.write(0, held_out_accuracy(run, 0, log))
    trace.write(done, phases.take_spans())
    met = step = done  # met: the last step after which all ranks did
    for step in range(done + 1, steps + 1):
        log.begin_step(step)
        metrics = one_step(run, step, partial(trace.write, step), sync_after=True)
        if metrics:
            log.step_line(step, metrics, SHOWN)
        if roles.sampling.here:
            # a rank that samples ahead stays within async_steps of what the trainers have learnt;
            # before the vote, for which trainers come when their weights are taken
            take_weights(roles, max(step - config.async_steps, met))
        asked = STOP if runtime.stopping.asked is not None else 0
        wish = votes.agree(BROKEN if saver and saver.failed else asked)
        stopping = wish == STOP and step < steps
        if saver and wish == BROKEN:
            take_weights(roles, step)
            saver.wait()  # raises
        evaluating = (
            bool(run.held_out)
            and not stopping
            and (step == steps or is_due(step, config.eval_every))
        )
        saving = saver is not None and (
            step == steps or stopping or is_due(step, config.checkpoint.every_steps)
        )
        if evaluating or saving:
            take_weights(roles, step)
            met = step
        if saver:
            metrics |= saver.take_metrics()
        if evaluating:
            if saver:
                saver.wait()
            metrics |= held_out_accuracy(run, step, log)
        log.write(step, metrics)
        if saver and saving:
            with phases("checkpoint"):
                if run.is_log and not stopping:
                    check_metric(config.checkpoint, metrics, evaluating)
            save(run, saver, step, metrics)
        if saver and stopping:
            saver.wait()
            runtime.stopped = f"stopped after step {step} of {steps}; --resume auto goes on"
            log.line(f"spmdrl: {runtime.stopped}")
            break
    if saver:
        saver.wait()
    take_weights(roles, step)
    votes.close()
    roles.post.wait_until_delivered()
    trace.write(step, phases.take_spans())
    log.close()
    close(roles)


def one_step(
    run: Run, step: int, trace: Callable[[list[Span]], None], sync_after: bool
) -> dict[str, float]:
    """Samples, learns, and gives the engine the new weights. Returns {} on ranks that sample only.

    trace: hears of the phases as they end.
    """
    roles, started_at, collected = run.roles, time.perf_counter(), None
    if roles.sampling.here:
        collected = collect(roles, Source(run.take, run.prompts.by_id), step)
        run.samples = collected.asked
        show_samples(run, f"step_{step}", collected.asked)
        mine = reports(run, trace, roles.sampling)
        collected.facts = {"order": run.order.state_dict(), "reports": mine}
    lesson = hand_over(roles, collected, step)
    metrics = learn(roles, lesson, step)
    if sync_after:
        sync(roles, version=step)
    if lesson is None:
        return {}
    run.order.load_state_dict(lesson.facts["order"])
    everyone = lesson.facts["reports"] + reports(run, trace, roles.training)
    return metrics | timing(metrics, everyone, time.perf_counter() - started_at)


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def close(roles: Roles) -> None:
    if roles.sampler.rewards is not None:
        roles.sampler.rewards.close()
    if roles.sampler.here:
        roles.sampler.engine.shutdown()


def build(
    config: PpoConfig, runtime: Runtime, host: Trainer | None = None, undo: ExitStack | None = None
) -> Run:
    """Data first, since its mistakes are cheap to find; then the engines. Collective.

    host: the actor, where it stands already (embed.py); undo: takes away what was started.
    """
    undo = undo or ExitStack()
    topology, phases = runtime.topology, runtime.phases
    placement = place(config, topology.world)
    scores = topology.rank in placement.roles["reward"]
    rewards = RewardRunner(config.reward, config.rewards) if scores else None
    if rewards is not None:
        undo.callback(rewards.close)
    tokenizer, vocab_size = load_tokenizer(config.model), vocab_size_of(config.model)
    with phases("load data"):
        prompts = PromptDataset.load(
            config.data.train, tokenizer, config.data, topology, vocab_size
        )
        order = PromptOrder(
            len(prompts), config.data.prompts_per_step, config.seed, config.data.shuffle
        )
        asked = math.ceil(config.data.prompts_per_step * config.rollout.oversample)
        require(
            asked <= len(prompts),
            f"data.prompts_per_step={config.data.prompts_per_step} x rollout.oversample="
            f"{config.rollout.oversample} = {asked} prompts, but the data has {len(prompts)}",
        )
        sources = set(prompts.data_sources)
        held_out: list[tuple[int, Prompt]] = []
        if config.data.eval is not None:
            dataset = PromptDataset.load(
                config.data.eval, tokenizer, config.data, topology, vocab_size
            )
            sources |= set(dataset.data_sources)
            count = min(len(dataset), config.data.max_eval_prompts or len(dataset))
            held_out = [(i, dataset.prompt(i)) for i in range(count)]
        if rewards is not None:
            rewards.check_sources(sorted(sources))
    places = Places(topology)
    trainers: dict[str, Trainer] = {}
    if host is not None:
        trainers["actor"] = host
    for name, role in training_roles(config).items():
        if name in trainers:
            continue
        if name == "ref" and reference_is_base(config, placement):
            actor = trainers["actor"]
            trainers[name] = Trainer(name, actor.topology, base_of(actor.engine))
            continue
        with phases(f"build {name}"):
            ranks = places.of(placement.roles[name], **train_degrees(role))
            kind = "value" if name == "critic" else "policy"
            engine = build_engine(
                kind, role.model or config.model, role, ranks, name == "ref", topology,
                strict=config.strict and name == "actor",
            )  # fmt: skip
            if engine is not None:
                engine.offload()
            trainers[name] = Trainer(name, ranks, engine)
    actor = trainers["actor"]
    with phases("build rollout"):
        ranks = places.of(placement.roles["rollout"], dp=-1, tp=config.rollout.tensor_parallel)
        longest = config.data.max_prompt_tokens + config.rollout.max_tokens
        beside = config.actor.lora if config.weights.lora == "adapter" else None
        rollout = build_rollout(
            config.model, config.rollout, longest, ranks, topology, config.strict, beside
        )
        if rollout is not None:
            undo.callback(rollout.shutdown)
    with phases("plan weights"):
        weights = WeightSync(
            actor.engine, actor.topology, rollout, ranks, config.rollout.dtype, config.weights,
            places.of,
        )  # fmt: skip
        driver = Scheduler(rollout, ranks, config.rollout.static_split) if rollout else None
        scoring = places.of(placement.roles["reward"], dp=-1)
        roles = Roles(
            config, topology, places.of(placement.sampling, dp=-1),
            places.of(placement.training, dp=-1), weights.topology, phases, Post(topology),
            tokenizer, Sampler(ranks, driver, scoring, rewards), weights,
            mailbox=Mailbox(topology) if config.async_steps else None,
            actor=actor, ref=trainers.get("ref"), critic=trainers.get("critic"),
            prm=trainers.get("prm"), kl_coef=config.algo.kl_coef,
            entropy_coef=config.algo.entropy_coef,
            replay=ReplayBuffer(config.algo.replay_steps) if config.algo.sample_filter else None,
            leftover=Leftover(config.rollout) if config.rollout.oversample > 1 else None,
        )  # fmt: skip
        if rollout is not None and roles.sleeps:
            rollout.sleep()
    return Run(config, runtime, roles, prompts, held_out, order)


class Places:
    """Topologies by their ranks; those of the same ranks share their groups."""

    def __init__(self, everyone: Topology) -> None:
        self.known: dict[Ranks, Topology] = {everyone.ranks: everyone}
        self.device = everyone.device

    def of(self, ranks: Ranks, **degrees: Any) -> Topology:
        """Collective over the job."""
        share = self.known.get(ranks)
        topology = Topology.build(self.device, ranks, share=share, **degrees)
        return self.known.setdefault(ranks, topology) if share is None else topology


def resume(run: Run) -> tuple[int, RunLog, TraceFile]:
    """Loads the checkpoint that config.resume asks for; the steps it had done, and the logs."""
    config, runtime = run.config, run.runtime
    topology, done = runtime.topology, 0
    with runtime.phases("resume"):
        start = find_start(config, runtime)
        if start.folder is not None:
            saved = checkpoint.load(start.folder, run.engines, topology)
            done = saved["step"]
            run.order.load_state_dict(saved["order"])
            restore(run, saved, start.folder)
    with runtime.phases("resume"):
        take_folder(config, runtime, start, done)
    log = RunLog(runtime.run_dir, run.is_log, config.steps, config.tensorboard, done)
    trace = TraceFile(runtime.run_dir, topology.rank, topology.host, done, topology.world)
    if start.folder is not None:
        log.line(f"resumed from {start.folder}: {done} steps done")
    return done, log, trace


def restore(run: Run, saved: dict[str, Any], folder: Path) -> None:
    """What the algorithm carries from step to step; a coefficient where it did and does adapt."""
    roles = run.roles
    algo, sampling = roles.config.algo, roles.sampling
    adaptive = saved.get("adaptive", {})
    if algo.kl_target is not None and adaptive.get("kl_coef") is not None:
        roles.kl_coef = adaptive["kl_coef"]
    if algo.entropy_target is not None and adaptive.get("entropy") is not None:
        roles.entropy_coef, roles.entropy = adaptive["entropy_coef"], adaptive["entropy"]
    if not sampling.here:
        return
    shares = sorted(folder.glob("replay_*.pt"))
    if roles.replay is not None and shares:
        roles.replay.load(shares, sampling.rank, sampling.world, num_keys=len(algo.reward_keys))
    shares = sorted(folder.glob("leftover_*.pt"))
    if roles.leftover is not None and shares:
        roles.leftover.load(
            shares, run.prompts.by_id, roles.tokenizer, sampling.rank, sampling.world
        )
    elif shares and sampling.rank == 0:
        logger.warning("rollout.oversample is off: what %s had begun is not asked again", folder)


def build_saver(run: Run, log: RunLog) -> Saver | None:
    config = run.config
    if config.checkpoint.every_steps <= 0:
        return None

    def say(step: int, folder: Path) -> None:
        log.line(f"step {step}/{config.steps} | saved {folder}")

    root, phases = run.runtime.run_dir / "checkpoints", run.runtime.phases
    trained = {t.name: t.topology for t in run.roles.trainers if t.name != "ref"}
    return Saver(root, config.checkpoint, phases, trained, say)


def save(run: Run, saver: Saver, step: int, metrics: dict[str, float]) -> None:
    roles = run.roles
    facts = {
        "engines": sorted(trainer.name for trainer in roles.trainers if trainer.name != "ref"),
        "order": run.order.state_dict(),
        "config": as_source(run.config),
        "metrics": metrics,
        "adaptive": {
            "kl_coef": roles.kl_coef if run.config.algo.kl_target else None,
            "entropy_coef": roles.entropy_coef if roles.entropy is not None else None,
            "entropy": roles.entropy,
        },
    }
    writer = roles.actor.topology.ranks[0]
    parts = [*roles.actor.model.pretrained, roles.tokenizer] if run.is_log else []
    own: dict[str, Keepsake] = {}
    if roles.sampling.here:
        if roles.replay is not None:
            own["replay"] = roles.replay
        if roles.leftover is not None:
            own["leftover"] = roles.leftover
    saver.save(step, run.engines, facts, parts, own, writer)


def held_out_accuracy(run: Run, step: int, log: RunLog) -> dict[str, float]:
    roles = run.roles
    told: list[Any] = [None]
    if roles.sampling.here:
        samples, told[0] = evaluate(roles, run.held_out, step)
        show_samples(run, f"eval_{step}", samples)
    # the rank that logs may not sample
    with roles.phases("evaluate" if roles.sampling.here else "wait evaluation"):
        dist.broadcast_object_list(told, src=roles.sampling.ranks[0], group=roles.topology.control)
    metrics = told[0]
    scores = " ".join(f"{k} {v:.4g}" for k, v in metrics.items() if "accuracy" in k)
    log.line(f"step {step}/{run.config.steps} | held out: {scores} ({len(run.held_out)} prompts)")
    return metrics


def show_samples(run: Run, name: str, samples: list[Sample]) -> None:
    if run.config.log_samples == 0:
        return
    path = Path(run.runtime.run_dir, "samples", f"{name}.jsonl")
    with run.roles.phases("log samples", run.roles.sampling):
        write_samples(path, samples, run.config.log_samples, run.roles.sampling)


def reports(
    run: Run, trace: Callable[[list[Span]], None], topology: Topology
) -> list[dict[str, Any]]:  # fmt: skip
    """What each rank of `topology` did since it was last asked. Collective over it."""
    roles = run.roles
    spans = roles.phases.take_spans()
    trace(spans)
    mine = {"rank": roles.topology.rank, "seconds": busy_and_waiting(spans),
            "samples": roles.post.moved_bytes, "weights": roles.weight_bytes,
            "memory": memory_of_process()}  # fmt: skip
    roles.post.moved_bytes = roles.weight_bytes = 0
    everyone: list[Any] = [None] * topology.world
    dist.all_gather_object(everyone, mine, group=topology.control)
    return everyone


def timing(
    metrics: dict[str, float], everyone: list[dict[str, Any]], total_s: float
) -> dict[str, float]:
    """Seconds by phase over the ranks, idle share, MiB moved, the most memory and files of a rank,
    and response tokens per second."""
    by_rank: dict[int, dict[str, tuple[float, float]]] = {}
    for report in everyone:  # a rank that samples and trains reports twice
        seconds = by_rank.setdefault(report["rank"], {})
        for name, (busy, waiting) in report["seconds"].items():
            before = seconds.get(name, (0.0, 0.0))
            seconds[name] = (before[0] + busy, before[1] + waiting)
    times = phase_metrics(list(by_rank.values()), total_s)
    for what in ("samples", "weights"):
        times[f"moved/{what}_mib"] = sum(report[what] for report in everyone) / 2**20
    for what in everyone[0]["memory"]:
        times[f"memory/{what}"] = max(report["memory"][what] for report in everyone)
    tokens = metrics["response/tokens"]
    return {**times, "time/step_s": total_s, "throughput/tokens_per_s": tokens / total_s}


def dry_run(config: PpoConfig, runtime: Runtime, ranks: int) -> None:
    """--dry-run: resolved config, arithmetic, and one scored sample per data set."""

    rewards = RewardRunner(config.reward, config.rewards)
    tokenizer = load_tokenizer(config.model)
    sets = {"train": config.data.train, "eval": config.data.eval}
    lines, num_prompts = [], 0
    for name, paths in sets.items():
        if paths is None:
            continue
        dataset = PromptDataset.load(
            paths, tokenizer, config.data, runtime.topology, vocab_size_of(config.model)
        )
        rewards.check_sources(dataset.data_sources)
        if name == "train":
            num_prompts = len(dataset)
            PromptOrder(num_prompts, config.data.prompts_per_step, config.seed)
        lines += [f"{name} data: {len(dataset)} prompts, {dataset.num_overlong} over-long, "
                  f"{dataset.num_bad} bad rows left out, {dataset.num_escaped} with control tokens "
                  "in their text",
                  *scored_example(dataset.prompt(0), rewards)]  # fmt: skip
    rewards.close()
    if runtime.is_main:
        print(as_source(config), describe(config, ranks, num_prompts), *lines, sep="\n")


def scored_example(prompt: Prompt, rewards: Any) -> list[str]:
    """Scores the ground truth as if it were the answer."""
    answer = str(prompt.ground_truth)
    sample = Sample(prompt, 0, 0, [], [], [], [], "stop", response=answer)
    rewards.score([sample])
    verdict = f"{sample.reward:g}" if sample.invalid is None else f"invalid: {sample.invalid}"
    if sample.reward == 0:
        verdict += " (right only if the grader wants more than the bare answer)"
    return [f"  prompt {prompt.id} ({prompt.data_source}): ...{prompt.text[-200:]!r}",
            f"  reward of its ground truth {answer!r} as the answer: {verdict}"]  # fmt: skip
