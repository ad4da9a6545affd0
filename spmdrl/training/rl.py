"""Reinforcement learning in the loop (`loop.py`): steps, evaluations, what is saved of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from spmdrl.algo.advantages import reward_keys_of
from spmdrl.checkpoint.disk_space import writing
from spmdrl.checkpoint.writer import RankState
from spmdrl.config import ConfigError, PpoConfig, support_width
from spmdrl.config.words import counted
from spmdrl.distributed.agreement import gather_to_first
from spmdrl.distributed.collectives import broadcast_object
from spmdrl.distributed.placement import saved_roles
from spmdrl.distributed.progress import PROGRESS
from spmdrl.distributed.topology import Topology
from spmdrl.rollout.multi_turn.conversation import has_replies
from spmdrl.training import loop
from spmdrl.training.build import RlRun, build
from spmdrl.training.checks.memory_plan import least_checkpoint_bytes
from spmdrl.training.collect import PromptSource, RolloutResult, collect, evaluate
from spmdrl.training.dispatch import TrainBatches
from spmdrl.training.elastic import in_memory_every
from spmdrl.training.logs.curves import REWARD
from spmdrl.training.logs.flops import peak_tflops
from spmdrl.training.logs.learning_signs import signs_of_rl
from spmdrl.training.logs.metrics import RunLog, SampleDetail, write_rows, write_samples
from spmdrl.training.logs.sample_tokens import trained_rows
from spmdrl.training.logs.step_line import of_evaluation, of_sampling
from spmdrl.training.loop import TrainingRun
from spmdrl.training.measurements import StepReport, report, timing
from spmdrl.training.overlap import can_overlap, collect_overlapping
from spmdrl.training.push_weights import push_weights, take_weights
from spmdrl.training.replay.keeper import is_kept, kept_file, remove_older, write_whole
from spmdrl.training.replay.sequence_sums import packed_sums, sums_of
from spmdrl.training.roles import Roles
from spmdrl.training.run_state import RunState
from spmdrl.training.runtime import Runtime
from spmdrl.training.step import train_step
from spmdrl.types import Prompt, Sample

logger = logging.getLogger(__name__)


def train(config: PpoConfig, runtime: Runtime) -> None:
    """Trains from the start, or from a checkpoint, to the last step. Every rank runs every line."""
    least_bytes = partial(least_checkpoint_bytes, saved_roles(config), config.model)
    loop.train(config, runtime, partial(training_run, config, runtime), least_bytes)


def training_run(config: PpoConfig, runtime: Runtime) -> TrainingRun:
    """Builds the run and says what the loop is to call. Collective."""
    run = build(config, runtime)
    config = run.config
    return TrainingRun(
        state=state_of(run),
        spans=run.spans,
        program="spmdrl.ppo",
        curve=REWARD,
        signs=signs_of_rl(config),
        line_every=1,
        begin=partial(begin, run),
        step=partial(run_step, run),
        shown=partial(of_sampling, with_tools=bool(config.tools)),
        lag=config.async_steps,
        catch_up=partial(take_weights, run.roles),
        evaluate=partial(held_out_metrics, run) if run.held_out else None,
        saves_first=True,
        close=partial(end, run),
    )


def begin(run: RlRun, done: int) -> None:
    """Gives the rollout engine the actor's weights, before the first step. Collective."""
    run.roles.policy_version = done - 1  # of what the engine was built with: not to be sampled from
    push_weights(run.roles, version=done)
    take_weights(run.roles, done)
    write_transfers(run)


def end(run: RlRun) -> None:
    PROGRESS.now("ending the run")
    run.roles.post.wait_until_delivered()
    if run.keeper is not None:
        run.keeper.wait()
    run.parts.close()
    PROGRESS.now("")


def run_step(run: RlRun, step: int, push: bool = True) -> dict[str, float]:
    """Runs one training step, and measures it.

    push: see train_step. Returns the step's metrics; {} on ranks that sample only.
    """
    roles, started_at = run.roles, time.perf_counter()
    ahead = run.config.async_steps > 0
    batches = train_step(roles, partial(generate_and_score, run), step, push)
    # ranks that sample ahead have reported with their answers: they are elsewhere in time
    found = None if ahead else report_of(run, step, roles.topology)
    if batches is None:
        return {}
    if not roles.sampling.here:
        run.order.follow(step, batches.step_info["order"])
    show_trained(run, step, batches)
    keep_computed(run, step, batches)
    if ahead:
        sampled = StepReport.read(*batches.step_info["report"])
        found = sampled.add(report_of(run, step, roles.training))
    assert found is not None
    metrics = batches.metrics
    metrics |= timing(found, metrics["response/tokens"], time.perf_counter() - started_at)
    return metrics | utilisation(run, batches, metrics)


def report_of(run: RlRun, step: int, topology: Topology) -> StepReport:
    """Adds up what the ranks of `topology` did since their last report. Collective over it."""
    roles = run.roles
    moved = {"samples": roles.post.moved_bytes, "weights": roles.weight_bytes}
    roles.post.moved_bytes = roles.weight_bytes = 0
    return report(run.spans, step, topology, moved)


def utilisation(run: RlRun, batches: TrainBatches, metrics: dict[str, float]) -> dict[str, float]:
    """Model FLOP/s of the actor's updates over what its GPUs can do; {} where that is not known, as
    on a CPU, or nothing was updated."""
    peak, seconds = peak_tflops(run.runtime.topology.device), metrics.get("time/update_actor_s")
    num_predictions = metrics.get("rollout/loss_tokens")  # on ranks that have the actor's metrics
    if peak is None or not seconds or num_predictions is None:
        return {}
    actor, assignment = run.roles.actor, batches.assignment
    flops = run.flops.of(assignment.seq_lens, num_predictions)
    if actor.shares_prefixes:
        flops -= run.flops.of(assignment.repeated_prefixes(actor.ranks), 0)
    gpus = len(actor.topology.ranks)
    return {"throughput/mfu": run.config.algo.epochs * flops / (seconds * gpus * peak * 1e12)}


def generate_and_score(run: RlRun, step: int) -> RolloutResult:
    """Makes this rank's answers of a step, with rewards, and writes some of them to samples/.

    On the ranks that sample or score. step_info["order"] says which prompts the step asked, and
    what came of them.
    """
    roles, source = run.roles, PromptSource(run.take, run.prompts.by_id, run.order.hear)
    if run.config.async_steps > 0 and can_overlap(roles):
        rollout, run.next_requests = collect_overlapping(
            roles, source, step, run.next_requests, asks_next=not ends_here(run, step)
        )
    else:
        rollout = collect(roles, source, step)
    rollout.metrics = run.order.metrics(step)
    rollout.step_info = {"order": run.order.event(step)}
    run.samples = rollout.all_samples
    if run.config.log_samples > 0:
        show_samples(run, f"step_{step}", rollout.all_samples)
    if run.keeper is not None:
        with roles.phases("log samples", roles.sampling):
            run.keeper.keep(step, rollout)
    if run.config.async_steps > 0:
        rollout.step_info["report"] = report_of(run, step, roles.sampling).as_json()
    return rollout


def ends_here(run: RlRun, step: int) -> bool:
    """Whether all ranks meet after this step, so that none may be ahead of it: at the end, and
    where the run evaluates or saves."""
    config = run.config
    evaluates = bool(run.held_out) and loop.is_due(step, config.eval_every)
    saves = (config.checkpoint.every_steps, in_memory_every(config, run.runtime))
    return step == config.steps or evaluates or any(loop.is_due(step, every) for every in saves)


def write_transfers(run: RlRun) -> None:
    """run_dir/weights.txt: which ranks send how much to which when the engine gets new weights."""
    if run.is_log:
        assert run.roles.weights is not None
        path = Path(run.runtime.run_dir, "weights.txt")
        with writing(path):
            path.write_text("\n".join([*run.roles.weights.describe(), ""]))


def held_out_metrics(run: RlRun, step: int, log: RunLog) -> dict[str, float]:
    roles = run.roles
    metrics: dict[str, float] = {}
    if roles.sampling.here:
        if run.config.log_samples > 0:
            show = partial(show_samples, run, f"eval_{step}")
            metrics = evaluate(roles, run.held_out, step, show)
        else:
            metrics = evaluate(roles, run.held_out, step)
    # the rank that logs may not sample
    with roles.phases("evaluate" if roles.sampling.here else "wait evaluation"):
        metrics = broadcast_object(metrics, roles.topology.control, roles.sampling.ranks[0])
    log.held_out_line(step, of_evaluation(metrics), counted(len(run.held_out), "prompt"))
    return metrics


def show_samples(run: RlRun, name: str, samples: list[Sample]) -> None:
    """Writes some samples to samples/<name>.jsonl. Collective over the ranks that sample."""
    config = run.config
    path = Path(run.runtime.run_dir, "samples", f"{name}.jsonl")
    detail = SampleDetail(
        replies=has_replies(config),
        tokenizer=run.roles.tokenizer,
        num_samples=config.log_samples,
        num_tokens=config.log_sample_tokens,
        prompt_of=prompts_with_images(run, name),
    )
    with run.roles.phases("log samples", run.roles.sampling):
        write_samples(path, samples, config.log_samples, run.roles.sampling, detail)


def prompts_with_images(run: RlRun, name: str) -> Callable[[int], Prompt] | None:
    """Returns what finds a prompt of samples/<name>.jsonl by its id; None where no prompt has
    images.
    """
    if run.prompts.vision is None:
        return None
    if not name.startswith("eval_"):
        return run.prompts.by_id
    return {prompt.id: prompt for _, prompt in run.held_out}.__getitem__


def show_trained(run: RlRun, step: int, batches: TrainBatches) -> None:
    """Writes samples/step_N_trained.jsonl: what the actor computed of the samples that are written
    beside it. Collective over the actor's ranks.
    """
    config, actor = run.config, run.roles.actor
    if not actor.here or not batches.recorder.wanted:
        return
    path = Path(run.runtime.run_dir, "samples", f"step_{step}_trained.jsonl")
    with run.roles.phases("log samples", actor.topology):
        rows = trained_rows(
            batches.of(actor), batches.recorder, config.log_sample_tokens,
            1 + config.algo.replay_steps,
        )  # fmt: skip
        everyone = gather_to_first(rows, actor.topology.control)
        if everyone is not None:
            found = {address: row for rows in everyone for address, row in rows.items()}
            with writing(path):
                write_rows(path, [found[address] for address in sorted(found)])


def keep_computed(run: RlRun, step: int, batches: TrainBatches) -> None:
    """Keeps what the step has computed of each sequence, where its samples are kept for a replay.
    On the actor's ranks.
    """
    config, actor = run.config.keep_samples, run.roles.actor
    if not actor.here or not is_kept(config, step):
        return
    ranks, run_dir = actor.topology, run.runtime.run_dir
    with run.roles.phases("log samples", ranks):
        content = packed_sums(sums_of(batches.of(actor)), ranks.world)
        write_whole(kept_file(run_dir, step, "computed", ranks.rank), content)
        remove_older(run_dir, config, step, "computed", ranks.rank, ranks.world)


def state_of(run: RlRun) -> RunState:
    """Returns the state of the run that a checkpoint holds."""
    roles, actor = run.roles, run.roles.actor
    of_rank: dict[str, RankState] = {}
    if roles.sampling.here and roles.replay is not None:
        of_rank["replay"] = roles.replay
    if roles.sampling.here and roles.leftover is not None:
        of_rank["leftover"] = roles.leftover
    return RunState(
        config=run.config,
        runtime=run.runtime,
        trained={t.name: t.topology for t in roles.saved},
        engines=run.engines,
        order=run.order,
        tokenizer=roles.tokenizer,
        files=[run.prompts.files] if run.prompts.vision is not None else [],
        log_rank=actor.topology.ranks[0],
        pretrained=[*actor.model.pretrained, roles.tokenizer] if run.is_log else [],
        algorithm_state=partial(adaptive_coefficients, run),
        of_rank=of_rank,
        restore=partial(restore, run),
    )


def adaptive_coefficients(run: RlRun) -> dict[str, Any]:
    """Returns the coefficients that adapt, for run.json."""
    roles = run.roles
    coefficients = {
        "kl_coef": roles.kl_coef if run.config.algo.kl_target else None,
        "entropy_coef": roles.entropy_coef if roles.entropy is not None else None,
        "entropy": roles.entropy,
    }
    return {"adaptive": coefficients}


def restore(run: RlRun, saved: dict[str, Any], folder: Path, same_data: bool) -> None:
    """Restores what the algorithm carries from step to step; a coefficient where it did and does
    adapt. Answers that were begun are gone on with where the prompts are the same.
    """
    roles = run.roles
    sampling = roles.sampling
    shares = sorted(folder.glob("leftover_*.pt"))
    if not same_data:
        run.order.forget()
    if not same_data or roles.leftover is None or not shares:
        run.order.forget_begun()
    restore_algorithm(roles, saved, folder)
    if not sampling.here:
        return
    if shares and not same_data:
        logger.warning("the data is not what it was: what %s had begun is not asked again", folder)
    elif roles.leftover is not None and shares:
        roles.leftover.load(
            shares, run.prompts.by_id, roles.tokenizer, sampling.rank, sampling.world,
            replays_experts=roles.routing is not None,
        )  # fmt: skip
    elif shares and sampling.rank == 0:
        logger.warning("rollout.oversample is off: what %s had begun is not asked again", folder)


def restore_algorithm(roles: Roles, saved: dict[str, Any], folder: Path) -> None:
    """Restores adaptive coefficients, and the samples of earlier steps that are trained on again.

    saved: run.json of the checkpoint `folder`. Raises ConfigError where it has a reference that the
    run would not take.
    """
    algo, sampling = roles.config.algo, roles.sampling
    if "ref" in saved["engines"] and roles.ref is not None and algo.ref_model_sync_steps == 0:
        raise ConfigError(
            f"{folder} has a reference that followed the policy, and without "
            "algo.ref_model_sync_steps the run would go back to that of its start: set it as it "
            "was; with a number above `steps` the reference stays as it is now"
        )
    adaptive = saved.get("adaptive", {})
    if algo.kl_target is not None and adaptive.get("kl_coef") is not None:
        roles.kl_coef = adaptive["kl_coef"]
    if algo.entropy_target is not None and adaptive.get("entropy") is not None:
        roles.entropy_coef, roles.entropy = adaptive["entropy_coef"], adaptive["entropy"]
    replayed = sorted(folder.glob("replay_*.pt"))
    if sampling.here and roles.replay is not None and replayed:
        roles.replay.load(
            replayed, sampling.rank, sampling.world, num_keys=len(reward_keys_of(algo)),
            per_turn=roles.config.rewards.per_turn,
            replays_experts=roles.routing is not None,
            support_width=support_width(roles.config.rollout),
        )  # fmt: skip
