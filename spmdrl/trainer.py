"""The run around the step: build, resume, then steps with evaluations and checkpoints between."""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from spmdrl import checkpoint
from spmdrl.build import Run, build, check_enough, close, load_dataset
from spmdrl.cli import as_source
from spmdrl.collect import Source, collect, evaluate
from spmdrl.config import PpoConfig
from spmdrl.data import PromptDataset, PromptOrder
from spmdrl.describe import describe
from spmdrl.flops import peak_tflops
from spmdrl.metrics import RunLog, memory_of_process, write_samples
from spmdrl.placement import place
from spmdrl.profiling import Profiler
from spmdrl.program import Runtime, keep_what_stands, load_tokenizer
from spmdrl.resume import find_start, take_folder
from spmdrl.rewards.runner import RewardRunner
from spmdrl.rollout.dialogue import Dialogue, has_replies
from spmdrl.saver import Keepsake, Saver, check_metric
from spmdrl.step import Lesson, hand_over, learn
from spmdrl.stopping import Ending
from spmdrl.sync import sync, take_weights
from spmdrl.topology import Topology
from spmdrl.trace import TraceFile, phase_metrics
from spmdrl.trackers import open_trackers
from spmdrl.types import Prompt, Sample

logger = logging.getLogger(__name__)

SHOWN = ("reward/mean", "reward/invalid", "actor/entropy", "actor/logprob_diff_max")


def train(config: PpoConfig, runtime: Runtime) -> None:
    """Every rank runs it from the first line to the last."""
    profiled = Profiler(config, runtime)
    run = build(config, runtime)
    roles, phases, steps = run.roles, runtime.phases, config.steps
    done, log = resume(run)
    phases.on_change = log.phase
    roles.policy_version = done - 1  # of what the engine was built with: not to be sampled from
    sync(roles, version=done)
    take_weights(roles, done)
    keep_what_stands()
    for line in roles.weights.describe():
        log.line(line)
    saver = build_saver(run, log)
    ending = Ending(config, runtime, saver, lag=config.async_steps)
    if run.held_out and done == 0:
        log.write(0, held_out_accuracy(run, 0, log))
    run.spans.report(done)  # of what comes before the first step
    met = step = done  # met: the last step after which all ranks did
    for step in range(done + 1, steps + 1):
        log.begin_step(step)
        with profiled(step):
            metrics = one_step(run, step, sync_after=True)
        if metrics:
            log.step_line(step, metrics, SHOWN)
        if roles.sampling.here:
            # a rank that samples ahead stays within async_steps of what the trainers have learnt;
            # before the vote, for which trainers come when their weights are taken
            take_weights(roles, max(step - config.async_steps, met))
        ending.vote(step)
        evaluating = bool(run.held_out) and not ending.stops
        evaluating &= step == steps or is_due(step, config.eval_every)
        if evaluating or ending.saves or ending.failed:
            take_weights(roles, step)
            met = step
        if saver and (evaluating or ending.failed):
            saver.wait()
        if evaluating:
            metrics |= held_out_accuracy(run, step, log)
        if saver:
            metrics |= saver.take_metrics()
        log.write(step, metrics)
        if saver and ending.saves:
            save(run, saver, step, metrics, ending)
        run.spans.note(step)
        if ending.stops:
            log.line(f"spmdrl: {ending.stop(step)}")
            break
    if saver:
        saver.wait()
    take_weights(roles, step)
    ending.close()
    roles.post.wait_until_delivered()
    run.spans.note(step)
    log.close()
    close(roles)


def one_step(run: Run, step: int, sync_after: bool) -> dict[str, float]:
    """Samples, learns, gives the engine the new weights. Returns {} on ranks that sample only."""
    roles, started_at, collected = run.roles, time.perf_counter(), None
    ahead = run.config.async_steps > 0
    if roles.sampling.here:
        collected = collect(roles, Source(run.take, run.prompts.by_id), step)
        run.samples = collected.asked
        show_samples(run, f"step_{step}", collected.asked)
        collected.facts = {"order": run.order.state_dict()}
        if ahead:  # the trainers are elsewhere in time
            collected.facts["reports"] = reports(run, step, roles.sampling)
    lesson = hand_over(roles, collected, step)
    metrics = learn(roles, lesson, step)
    if sync_after:
        sync(roles, version=step)
    everyone = [] if ahead else reports(run, step, roles.topology)
    if lesson is None:
        return {}
    run.order.load_state_dict(lesson.facts["order"])
    if ahead:
        everyone = lesson.facts["reports"] + reports(run, step, roles.training)
    metrics |= timing(metrics, everyone, time.perf_counter() - started_at)
    return metrics | utilisation(run, lesson, metrics)


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def resume(run: Run) -> tuple[int, RunLog]:
    """Loads the checkpoint that config.resume asks for; the steps it had done, and the log."""
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
    with runtime.phases("resume"):  # of a folder that nothing is moved out of any more
        trackers = open_trackers(config, runtime.run_dir, done) if run.is_log else []
    log = RunLog(runtime.run_dir, run.is_log, config.steps, trackers, done)
    run.spans.trace = TraceFile(runtime.run_dir, topology.rank, topology.host, done, topology.world)
    if start.folder is not None:
        log.line(f"resumed from {start.folder}: {done} steps done")
    return done, log


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
        roles.replay.load(
            shares, sampling.rank, sampling.world, num_keys=len(algo.reward_keys),
            per_turn=roles.config.rewards.per_turn,
        )  # fmt: skip
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


def save(
    run: Run, saver: Saver, step: int, metrics: dict[str, float], ending: Ending
) -> None:  # fmt: skip
    roles = run.roles
    with roles.phases("checkpoint"):
        if run.is_log and not ending.stops:
            check_metric(run.config.checkpoint, metrics)
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
        show = partial(show_samples, run, f"eval_{step}")
        told[0] = evaluate(roles, run.held_out, step, show)
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


def reports(run: Run, step: int, topology: Topology) -> list[dict[str, Any]]:
    """What each rank of `topology` did since its last report. Collective over it."""
    roles = run.roles
    mine = {"spans": run.spans.report(step), "samples": roles.post.moved_bytes,
            "weights": roles.weight_bytes, "memory": memory_of_process()}  # fmt: skip
    roles.post.moved_bytes = roles.weight_bytes = 0
    everyone: list[Any] = [None] * topology.world
    dist.all_gather_object(everyone, mine, group=topology.control)
    return everyone


def timing(
    metrics: dict[str, float], everyone: list[dict[str, Any]], total_s: float
) -> dict[str, float]:
    """Seconds by phase over the ranks, idle share, MiB moved, the most memory and files of a rank,
    and response tokens per second."""
    times = phase_metrics([report["spans"] for report in everyone])
    for what in ("samples", "weights"):
        times[f"moved/{what}_mib"] = sum(report[what] for report in everyone) / 2**20
    for what in everyone[0]["memory"]:
        times[f"memory/{what}"] = max(report["memory"][what] for report in everyone)
    tokens = metrics["response/tokens"]
    return {**times, "time/step_s": total_s, "throughput/tokens_per_s": tokens / total_s}


def utilisation(run: Run, lesson: Lesson, metrics: dict[str, float]) -> dict[str, float]:
    """Model FLOP/s of the actor's updates over what its GPUs can do; {} where that is not known, as
    on a CPU, or nothing was updated."""
    peak, seconds = peak_tflops(run.runtime.topology.device), metrics.get("time/update_actor_s")
    if peak is None or not seconds:
        return {}
    flops = run.config.algo.epochs * run.flops.of(lesson.deal.seq_lens)
    gpus = len(run.roles.actor.topology.ranks)
    return {"throughput/mfu": flops / (seconds * gpus * peak * 1e12)}


def dry_run(config: PpoConfig, runtime: Runtime, ranks: int) -> None:
    """--dry-run: resolved config, arithmetic, and one scored sample per data set."""

    scorers = place(config, ranks).roles["reward"]
    rewards = RewardRunner(config.reward, config.rewards, len(scorers))
    tokenizer = load_tokenizer(config.model)
    sets = {"train": config.data.train, "eval": config.data.eval}
    lines, num_prompts = [], 0
    for name, paths in sets.items():
        if paths is None:
            continue
        dataset = load_dataset(paths, config, tokenizer, runtime.topology)
        rewards.check_sources(dataset.data_sources)
        if name == "train":
            num_prompts = len(dataset)
            check_enough(config, num_prompts)
            PromptOrder(num_prompts, config.data.prompts_per_step, config.seed)
        lines += [f"{name} data: {len(dataset)} prompts, {dataset.num_overlong} over-long, "
                  f"{dataset.num_bad} bad rows left out, {dataset.num_escaped} with control tokens "
                  "in their text",
                  *image_lines(dataset), *scored_example(dataset.prompt(0), rewards)]  # fmt: skip
    rewards.close()
    if has_replies(config):
        sampling = place(config, ranks).roles["rollout"]
        dialogue = Dialogue(config, tokenizer, len(sampling) // config.rollout.tensor_parallel)
        lines += dialogue.lines()
        dialogue.close()
    if runtime.is_main:
        print(as_source(config), describe(config, ranks, num_prompts), *lines, sep="\n")


def image_lines(dataset: PromptDataset) -> list[str]:
    most = dataset.images
    if not most.per_prompt:
        return []
    return [f"  images: at most {most.per_prompt} in a prompt, and {most.tokens} tokens in one"]


def scored_example(prompt: Prompt, rewards: Any) -> list[str]:
    """Scores the ground truth as if it were the answer."""
    shown = f"  prompt {prompt.id} ({prompt.data_source}): ...{prompt.text[-200:]!r}"
    if prompt.ground_truth is None:
        return [shown, "  no ground truth, and its reward asks for none"]
    if "model_score" in rewards.reward_of(prompt.data_source).arguments:
        return [shown, "  its reward asks a model, which a dry run does not load"]
    answer = str(prompt.ground_truth)
    sample = Sample(prompt, 0, 0, [], [], [], [], "stop", response=answer)
    sample.messages = [{"role": "assistant", "content": answer}]
    rewards.score([sample])
    verdict = f"{sample.reward:g}" if sample.invalid is None else f"invalid: {sample.invalid}"
    if sample.reward == 0:
        verdict += " (right only if the grader wants more than the bare answer)"
    return [shown, f"  reward of its ground truth {answer!r} as the answer: {verdict}"]
