"""The run around the step: build, resume, then steps with evaluations and checkpoints between."""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from spmdrl.checkpoint import format as checkpoint
from spmdrl.checkpoint.disk_space import check_room_for_checkpoint, writing
from spmdrl.checkpoint.writer import Keepsake, Saver, check_metric
from spmdrl.cli.arguments import as_source, shown_config
from spmdrl.config import ConfigError, PpoConfig, RewardConfig
from spmdrl.data.prompts import PromptDataset, PromptOrder, left_out_lines
from spmdrl.distributed.placement import place, training_roles
from spmdrl.distributed.process import Heap, keep_what_stands
from spmdrl.distributed.progress import PROGRESS
from spmdrl.distributed.topology import Topology
from spmdrl.hub.hf_folder import load_tokenizer
from spmdrl.rewards.runner import RewardRunner
from spmdrl.rollout.multi_turn.conversation import Dialogue, has_replies
from spmdrl.training.build import Run, build, check_enough, close, load_dataset
from spmdrl.training.checks.dry_run import describe, least_checkpoint_bytes
from spmdrl.training.collect import RolloutResult, Source, collect, evaluate
from spmdrl.training.dispatch import TrainBatches
from spmdrl.training.logs.curves import REWARD
from spmdrl.training.logs.flops import peak_tflops
from spmdrl.training.logs.learning_signs import signs_of_rl
from spmdrl.training.logs.metrics import RunLog, memory_of_process, write_samples
from spmdrl.training.logs.profiler import Profiler
from spmdrl.training.logs.report import Report
from spmdrl.training.logs.step_line import of_evaluation, of_sampling
from spmdrl.training.logs.trace import TraceFile, phase_metrics
from spmdrl.training.logs.trackers import open_trackers
from spmdrl.training.overlap import can_overlap, collect_overlapping
from spmdrl.training.push_weights import push_weights, take_weights
from spmdrl.training.resume import compare, find_start, opening_lines, take_folder
from spmdrl.training.runtime import Runtime
from spmdrl.training.step import train_step
from spmdrl.training.stop import Ending
from spmdrl.types import Prompt, Sample

logger = logging.getLogger(__name__)

EXAMPLES = 8  # prompts of each data set that a dry run scores


def train(config: PpoConfig, runtime: Runtime) -> None:
    """Every rank runs it from the first line to the last."""
    profiled = Profiler(config, runtime)
    with runtime.phases("check folders"):
        trained = {name: role for name, role in training_roles(config).items() if name != "ref"}
        if runtime.is_main and config.checkpoint.every_steps > 0:
            least = least_checkpoint_bytes(trained, config.model)
            check_room_for_checkpoint(runtime.run_dir, least)
    run = build(config, runtime)
    roles, steps = run.roles, config.steps
    done, log = resume(run)
    roles.policy_version = done - 1  # of what the engine was built with: not to be sampled from
    push_weights(roles, version=done)
    take_weights(roles, done)
    keep_what_stands()
    heap = Heap()
    write_transfers(run)
    saver = build_saver(run, log)
    ending = Ending(config, runtime, saver, lag=config.async_steps)
    report = Report(config, runtime, log, "spmdrl.ppo", REWARD, signs_of_rl(config))
    PROGRESS.now("")
    if run.held_out and done == 0:
        metrics = held_out_metrics(run, 0, log)
        log.write(0, metrics)
        report.after_step(0, metrics)
    run.spans.report(done)  # of what comes before the first step
    met = step = done  # met: the last step after which all ranks did
    for step in range(done + 1, steps + 1):
        with profiled(step), PROGRESS.step(step, steps):
            metrics = run_step(run, step)
        heap.after_step()
        if metrics:
            log.step_line(step, metrics, of_sampling(metrics, with_tools=bool(config.tools)))
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
            metrics |= held_out_metrics(run, step, log)
        if saver:
            metrics |= saver.take_metrics()
        log.write(step, metrics)
        report.after_step(step, metrics)
        if saver and ending.saves:
            log.sync()
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
    PROGRESS.now("ending the run")
    close(roles)
    PROGRESS.now("")
    report.at_end(step, ending.stops)


def run_step(run: Run, step: int, push: bool = True) -> dict[str, float]:
    """Runs one training step, and measures it.

    push: see train_step. Returns the step's metrics; {} on ranks that sample only.
    """
    roles, started_at = run.roles, time.perf_counter()
    ahead = run.config.async_steps > 0
    batches = train_step(roles, partial(generate_and_score, run), step, push)
    # ranks that sample ahead have reported with their answers: they are elsewhere in time
    everyone = [] if ahead else reports(run, step, roles.topology)
    if batches is None:
        return {}
    run.order.load_state_dict(batches.step_info["order"])
    if ahead:
        everyone = batches.step_info["reports"] + reports(run, step, roles.training)
    metrics = batches.metrics
    metrics |= timing(metrics, everyone, time.perf_counter() - started_at)
    return metrics | utilisation(run, batches, metrics)


def generate_and_score(run: Run, step: int) -> RolloutResult:
    """Makes this rank's answers of a step, with rewards, and writes some of them to samples/.

    On the ranks that sample or score. step_info["order"] says where the data stood for this step.
    """
    roles, source = run.roles, Source(run.take, run.prompts.by_id)
    if can_overlap(roles):
        rollout, run.asked = collect_overlapping(
            roles, source, step, run.asked, run.order.state_dict, asks_next=not ends_here(run, step)
        )
    else:
        rollout = collect(roles, source, step)
        rollout.step_info = {"order": run.order.state_dict()}
    run.samples = rollout.asked
    show_samples(run, f"step_{step}", rollout.asked)
    if run.config.async_steps > 0:
        rollout.step_info["reports"] = reports(run, step, roles.sampling)
    return rollout


def ends_here(run: Run, step: int) -> bool:
    """Whether all ranks meet after this step, so that none may be ahead of it: at the end, and
    where the run evaluates or saves."""
    config = run.config
    evaluates = bool(run.held_out) and is_due(step, config.eval_every)
    return step == config.steps or evaluates or is_due(step, config.checkpoint.every_steps)


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def resume(run: Run) -> tuple[int, RunLog]:
    """Loads the checkpoint that config.resume asks for; the steps it had done, and the log."""
    config, runtime = run.config, run.runtime
    topology, done = runtime.topology, 0
    with runtime.phases("resume"):
        start = find_start(config, runtime)
        seen = [run.prompts.files] if run.prompts.vision is not None else []
        same = compare(config, runtime, start, run.roles.tokenizer, seen)
        run.identity, goes_on = same.identity, True
        if start.folder is not None:
            saved = checkpoint.load(start.folder, run.engines, topology)
            done = saved["step"]
            accepts = "data" in config.checkpoint.accept_changes
            goes_on = run.order.load_state_dict(saved["order"], accepts)
            restore(run, saved, start.folder, goes_on and not same.has_other_data)
    with runtime.phases("resume"):
        aside = take_folder(config, runtime, start, done)
    with runtime.phases("resume"):  # of a folder that nothing is moved out of any more
        trackers = open_trackers(config, runtime.run_dir, done) if run.is_log else []
        log = RunLog(
            runtime.run_dir, run.is_log, config.steps, trackers, done, runtime.phases.alone,
            config.show_metrics,
        )  # fmt: skip
        run.spans.trace = TraceFile(
            runtime.run_dir, topology.rank, topology.host, done, topology.world, aside
        )
    for line in opening_lines(config, start, same, done, goes_on):
        log.line(line)
    return done, log


def write_transfers(run: Run) -> None:
    """run_dir/weights.txt: which ranks send how much to which when the engine gets new weights."""
    if run.is_log:
        path = Path(run.runtime.run_dir, "weights.txt")
        with writing(path):
            path.write_text("\n".join([*run.roles.weights.describe(), ""]))


def restore(run: Run, saved: dict[str, Any], folder: Path, same_data: bool) -> None:
    """What the algorithm carries from step to step; a coefficient where it did and does adapt.
    Answers that were begun are gone on with where the prompts are the same."""
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
    if shares and not same_data:
        logger.warning("the data is not what it was: what %s had begun is not asked again", folder)
    elif roles.leftover is not None and shares:
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
        "identity": run.identity,
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


def held_out_metrics(run: Run, step: int, log: RunLog) -> dict[str, float]:
    roles = run.roles
    told: list[Any] = [None]
    if roles.sampling.here:
        show = partial(show_samples, run, f"eval_{step}")
        told[0] = evaluate(roles, run.held_out, step, show)
    # the rank that logs may not sample
    with roles.phases("evaluate" if roles.sampling.here else "wait evaluation"):
        dist.broadcast_object_list(told, src=roles.sampling.ranks[0], group=roles.topology.control)
    metrics = told[0]
    log.held_out_line(step, of_evaluation(metrics), f"{len(run.held_out)} prompts")
    return metrics


def show_samples(run: Run, name: str, samples: list[Sample]) -> None:
    if run.config.log_samples == 0:
        return
    path = Path(run.runtime.run_dir, "samples", f"{name}.jsonl")
    with run.roles.phases("log samples", run.roles.sampling):
        write_samples(
            path, samples, run.config.log_samples, run.roles.sampling, has_replies(run.config)
        )


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


def utilisation(run: Run, batches: TrainBatches, metrics: dict[str, float]) -> dict[str, float]:
    """Model FLOP/s of the actor's updates over what its GPUs can do; {} where that is not known, as
    on a CPU, or nothing was updated."""
    peak, seconds = peak_tflops(run.runtime.topology.device), metrics.get("time/update_actor_s")
    if peak is None or not seconds:
        return {}
    flops = run.config.algo.epochs * run.flops.of(batches.deal.seq_lens)
    gpus = len(run.roles.actor.topology.ranks)
    return {"throughput/mfu": flops / (seconds * gpus * peak * 1e12)}


def show_plan(config: PpoConfig, runtime: Runtime, ranks: int, show_config: bool) -> None:
    """--dry-run: the config, arithmetic, and one scored sample per data set."""
    scorers = place(config, ranks).roles["reward"]
    rewards = RewardRunner(config.reward, config.rewards, len(scorers))
    tokenizer = load_tokenizer(config.model)
    sets = {"train": config.data.train, "eval": config.data.eval}
    lines, num_prompts, lengths = [], 0, None
    for name, paths in sets.items():
        if paths is None:
            continue
        dataset = load_dataset(paths, config, tokenizer, runtime.topology)
        rewards.check_sources(dataset.data_sources)
        if name == "train":
            num_prompts, lengths = len(dataset), dataset.num_tokens
            check_enough(config, num_prompts)
            PromptOrder(num_prompts, config.data.prompts_per_step, config.seed)
        lines += [f"{name} data: {len(dataset)} prompts, {dataset.num_overlong} over-long, "
                  f"{dataset.num_bad} bad rows left out, {dataset.num_escaped} with control tokens "
                  "in their text",
                  *left_out_lines(dataset.left_out), *image_lines(dataset),
                  *held_out_lines(name, len(dataset), config),
                  *scored_examples(examples_of(dataset), rewards, config.rewards)]  # fmt: skip
    rewards.close()
    if has_replies(config):
        sampling = place(config, ranks).roles["rollout"]
        dialogue = Dialogue(config, tokenizer, len(sampling) // config.rollout.tensor_parallel)
        lines += dialogue.lines()
        dialogue.close()
    if runtime.is_main:
        plan = describe(config, ranks, num_prompts, lengths)
        PROGRESS.line("\n".join([shown_config(config, show_config), *lines, plan]))


def image_lines(dataset: PromptDataset) -> list[str]:
    most = dataset.images
    if not most.per_prompt:
        return []
    return [f"  images: at most {most.per_prompt} in a prompt, and {most.tokens} tokens in one"]


def held_out_lines(name: str, num_prompts: int, config: PpoConfig) -> list[str]:
    """What an evaluation asks."""
    if name != "eval":
        return []
    asked = min(num_prompts, config.data.max_eval_prompts or num_prompts)
    return [f"  {asked} of them asked at each evaluation, {asked * config.eval_samples} answers"]


def examples_of(dataset: PromptDataset) -> list[Prompt]:
    """The first prompt and others at equal distances."""
    step = max(len(dataset) // EXAMPLES, 1)
    return [dataset.prompt(i) for i in range(0, len(dataset), step)][:EXAMPLES]


def scored_examples(prompts: list[Prompt], rewards: Any, config: RewardConfig) -> list[str]:
    """Scores each ground truth as if it were the answer, and shows the first.

    Raises ConfigError where the reward fails on more of them than a step may have invalid samples.
    """
    first = prompts[0]
    shown = f"  prompt {first.id} ({first.data_source}): ...{first.text[-200:]!r}"
    asks = {
        source: "model_score" in rewards.reward_of(source).arguments
        for source in {prompt.data_source for prompt in prompts}
    }
    samples = [
        answered_rightly(prompt)
        for prompt in prompts
        if prompt.ground_truth is not None and not asks[prompt.data_source]
    ]
    rewards.score(samples)
    failed = [sample for sample in samples if sample.invalid is not None]
    if failed:
        told = (
            f"the reward fails on {len(failed)} of {len(samples)} ground truths given as answers; "
            f"prompt {failed[0].prompt.id} ({failed[0].prompt.data_source}), "
            f"{str(failed[0].prompt.ground_truth)[:60]!r}: {last_line(failed[0].invalid)}"
        )
        if len(failed) > config.max_invalid_fraction * len(samples):
            raise ConfigError(told)
        logger.warning(told)
    if asks[first.data_source]:
        return [shown, "  its reward asks a model, which a dry run does not load"]
    if first.ground_truth is None:
        return [shown, "  no ground truth, and its reward asks for none"]
    sample = samples[0]
    verdict = f"{sample.reward:g}" if sample.invalid is None else "none, it fails"
    if sample.reward == 0:
        verdict += " (right only if the grader wants more than the bare answer)"
    return [shown, f"  reward of its ground truth {sample.response!r} as the answer: {verdict}"]


def answered_rightly(prompt: Prompt) -> Sample:
    """With the ground truth as the answer."""
    answer = str(prompt.ground_truth)
    sample = Sample(prompt, 0, 0, [], [], [], [], "stop", response=answer)
    sample.messages = [{"role": "assistant", "content": answer}]
    return sample


def last_line(reason: str | None) -> str:
    """Of a traceback what was raised, and where in the user's code."""
    lines = (reason or "").strip().splitlines() or [""]
    places = [line.strip() for line in lines if line.lstrip().startswith("File ")]
    return lines[-1] + (f" ({places[-1]})" if places else "")
