"""The run around the step: build, resume, then steps with evaluations and checkpoints between."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from spmdrl import checkpoint
from spmdrl.cli import as_source
from spmdrl.collect import collect, evaluate
from spmdrl.config import PpoConfig
from spmdrl.data import PromptDataset, PromptOrder
from spmdrl.engines.fsdp import FsdpEngine
from spmdrl.metrics import RunLog, set_aside_earlier_run, write_samples
from spmdrl.phases import seconds_of
from spmdrl.plan import describe, roles_of
from spmdrl.program import Runtime, keep_what_stands, load_tokenizer, write_config
from spmdrl.replay import ReplayBuffer
from spmdrl.rewards.runner import RewardRunner
from spmdrl.roles import Roles
from spmdrl.rollout import build_engine
from spmdrl.rollout.scheduler import Scheduler
from spmdrl.step import learn, sync
from spmdrl.topology import Topology, train_degrees
from spmdrl.types import Prompt, Sample

SHOWN = ("reward/mean", "reward/invalid", "actor/entropy", "actor/logprob_diff_max")


@dataclass
class Run:
    """What the loop works with."""

    config: PpoConfig
    runtime: Runtime
    roles: Roles
    prompts: PromptDataset
    held_out: list[tuple[int, Prompt]]  # the same on every rank
    order: PromptOrder

    @property
    def engines(self) -> dict[str, FsdpEngine]:
        """Those that are trained, so saved and resumed."""
        roles = self.roles
        named: dict[str, Any] = {"actor": roles.actor, "critic": roles.critic, "prm": roles.prm}
        return {name: engine for name, engine in named.items() if engine is not None}


def train(config: PpoConfig, runtime: Runtime) -> None:
    """Every rank runs it from the first line to the last."""
    run = build(config, runtime)
    roles, phases, steps = run.roles, runtime.phases, config.steps
    done, log = resume(run)
    phases.on_change = log.phase
    sync(roles, version=done)
    keep_what_stands()
    if run.held_out and done == 0:
        log.write(0, held_out_accuracy(run, 0, log))
    phases.take_spans()
    for step in range(done + 1, steps + 1):
        log.begin_step(step)
        started_at = time.perf_counter()
        with phases("data"):
            prompts = take_prompts(run, config.data.prompts_per_step)
        collected = collect(roles, prompts, step, more=partial(take_prompts, run))
        show_samples(run, f"step_{step}", collected.asked)
        metrics = learn(roles, collected, step)
        sync(roles, version=step)
        metrics |= timing(
            metrics, seconds_of(phases.take_spans()), time.perf_counter() - started_at
        )
        log.step_line(step, metrics, SHOWN)
        if run.held_out and (step == steps or is_due(step, config.eval_every)):
            metrics |= held_out_accuracy(run, step, log)
        log.write(step, metrics)
        if config.checkpoint.every_steps and (
            step == steps or is_due(step, config.checkpoint.every_steps)
        ):
            save(run, step, log)
        phases.take_spans()
    log.close()
    roles.rewards.close()
    roles.rollout.shutdown()


def take_prompts(run: Run, count: int) -> list[Prompt]:
    """The next prompts of the data, the same on every rank."""
    return [run.prompts.prompt(i) for i in run.order.take(count)]


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def build(config: PpoConfig, runtime: Runtime) -> Run:
    """Data first, since its mistakes are cheap to find; then the engines. Collective."""
    topology, phases = runtime.topology, runtime.phases
    rewards = RewardRunner(config.reward, config.rewards)
    tokenizer = load_tokenizer(config.model)
    with phases("load data"):
        prompts = PromptDataset.load(config.data.train, tokenizer, config.data, topology)
        order = PromptOrder(
            len(prompts), config.data.prompts_per_step, config.seed, config.data.shuffle
        )
        rewards.check_sources(prompts.data_sources)
        held_out: list[tuple[int, Prompt]] = []
        if config.data.eval is not None:
            dataset = PromptDataset.load(config.data.eval, tokenizer, config.data, topology)
            rewards.check_sources(dataset.data_sources)
            count = min(len(dataset), config.data.max_eval_prompts or len(dataset))
            held_out = [(i, dataset.prompt(i)) for i in range(count)]
    engines: dict[str, FsdpEngine] = {}
    for name, role in roles_of(config).items():
        with phases(f"build {name}"):
            ranks = Topology.build(topology.device, **train_degrees(role.fsdp))
            kind = "value" if name == "critic" else "policy"
            engine = FsdpEngine(kind, role.model or config.model, role, ranks, name == "ref")
            engine.offload()
            engines[name] = engine
    with phases("build rollout"):
        ranks = Topology.build(topology.device, dp=-1, tp=config.rollout.tensor_parallel)
        longest = config.data.max_prompt_tokens + config.rollout.max_tokens
        rollout = build_engine(config.model, config.rollout, longest, ranks)
        assert rollout is not None  # it lives on all ranks
        scheduler = Scheduler(rollout, ranks)
        if config.rollout.sleep:
            rollout.sleep()
    roles = Roles(
        config, topology, phases, tokenizer, ranks, rollout, scheduler, rewards,
        actor=engines["actor"], ref=engines.get("ref"), critic=engines.get("critic"),
        prm=engines.get("prm"), kl_coef=config.algo.kl_coef, entropy_coef=config.algo.entropy_coef,
        replay=ReplayBuffer(config.algo.replay_steps) if config.algo.sample_filter else None,
    )  # fmt: skip
    return Run(config, runtime, roles, prompts, held_out, order)


def resume(run: Run) -> tuple[int, RunLog]:
    """Loads the checkpoint that config.resume asks for; the steps it had done, and the log."""
    config, runtime = run.config, run.runtime
    root = runtime.run_dir / "checkpoints"
    done = 0
    with runtime.phases("resume"):
        folder = checkpoint.find(config.resume, root, runtime.topology)
        if folder is not None:
            saved = checkpoint.load(folder, run.engines, runtime.topology)
            done = saved["step"]
            run.order.load_state_dict(saved["order"])
            restore(run.roles, saved, folder)
    if runtime.is_main:
        set_aside_earlier_run(runtime.run_dir, done)
        write_config(config, runtime.run_dir)
    log = RunLog(runtime.run_dir, runtime.is_main, config.steps, config.tensorboard, done)
    if folder is not None:
        log.line(f"resumed from {folder}: {done} steps done")
    return done, log


def restore(roles: Roles, saved: dict[str, Any], folder: Path) -> None:
    """What the algorithm carries from step to step; a coefficient where it did and does adapt."""
    algo, rank, world = roles.config.algo, roles.topology.rank, roles.topology.world
    adaptive = saved.get("adaptive", {})
    if algo.kl_target is not None and adaptive.get("kl_coef") is not None:
        roles.kl_coef = adaptive["kl_coef"]
    if algo.entropy_target is not None and adaptive.get("entropy") is not None:
        roles.entropy_coef, roles.entropy = adaptive["entropy_coef"], adaptive["entropy"]
    shares = sorted(folder.glob("replay_*.pt"))
    if roles.replay is not None and shares:
        roles.replay.load(shares, rank, world, num_keys=len(algo.reward_keys))


def save(run: Run, step: int, log: RunLog) -> None:
    state = {name: engine.state_dict() for name, engine in run.engines.items()}
    facts = {
        "engines": sorted(run.engines),
        "order": run.order.state_dict(),
        "config": as_source(run.config),
        "adaptive": {
            "kl_coef": run.roles.kl_coef if run.config.algo.kl_target else None,
            "entropy_coef": run.roles.entropy_coef if run.roles.entropy is not None else None,
            "entropy": run.roles.entropy,
        },
    }
    root, keep = run.runtime.run_dir / "checkpoints", run.config.checkpoint.keep
    parts = [*run.roles.actor.pretrained, run.roles.tokenizer]
    phases, replay = run.runtime.phases, run.roles.replay
    folder = checkpoint.save(root, step, state, facts, phases, keep, parts, replay)
    log.line(f"step {step}/{run.config.steps} | saved {folder}")


def held_out_accuracy(run: Run, step: int, log: RunLog) -> dict[str, float]:
    samples, metrics = evaluate(run.roles, run.held_out, step)
    show_samples(run, f"eval_{step}", samples)
    scores = " ".join(f"{k} {v:.4g}" for k, v in metrics.items() if "accuracy" in k)
    log.line(f"step {step}/{run.config.steps} | held out: {scores} ({len(run.held_out)} prompts)")
    return metrics


def show_samples(run: Run, name: str, samples: list[Sample]) -> None:
    path = Path(run.runtime.run_dir, "samples", f"{name}.jsonl")
    write_samples(path, samples, run.config.log_samples, run.runtime.topology)


def timing(
    metrics: dict[str, float], seconds: dict[str, float], total_s: float
) -> dict[str, float]:
    """time/<phase>_s of this step, and response tokens per second of the whole job."""
    times = {f"time/{name.replace(' ', '_')}_s": s for name, s in seconds.items()}
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
        dataset = PromptDataset.load(paths, tokenizer, config.data, runtime.topology)
        rewards.check_sources(dataset.data_sources)
        if name == "train":
            num_prompts = len(dataset)
            PromptOrder(num_prompts, config.data.prompts_per_step, config.seed)
        lines += [f"{name} data: {len(dataset)} prompts, {dataset.num_overlong} over-long",
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
