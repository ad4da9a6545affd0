"""Explains the largest difference of a step between trainer and rollout engine.

The worst sample's tokens go through both models in one process, with the weights that the step
began with, and what their modules compute is compared. The run's numbers are the same with it and
without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from spmdrl.algo.objectives import needs_old_logprobs
from spmdrl.config import PpoConfig
from spmdrl.config.words import counted, verb
from spmdrl.distributed.agreement import gather_to_all
from spmdrl.distributed.collectives import broadcast_object
from spmdrl.distributed.progress import PROGRESS
from spmdrl.engines.recorded_pass import RecordedPass
from spmdrl.rollout.base import WeightMismatch
from spmdrl.rollout.build import ENGINES
from spmdrl.training.dispatch import TrainBatches
from spmdrl.training.mismatch.points import FINAL_NAME, Point, compare_passes
from spmdrl.training.mismatch.report import MismatchReport, write_report
from spmdrl.training.mismatch.sample import (
    WorstSample,
    rows_of_interest,
    with_trainer_logprobs,
    worst_sample,
)
from spmdrl.training.mismatch.verdict import (
    GAIN,
    described,
    first_divergence,
    flips_of,
    rounding_of,
    settings_apart,
    steepest,
)
from spmdrl.training.push_weights import transfer
from spmdrl.training.roles import Roles

CUT_OFFS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}


def explain_mismatch(roles: Roles, batches: TrainBatches, step: int) -> None:
    """Explains the worst sample of the step, where the config asks for it, and writes
    what is found to run_dir/mismatch. With explain_mismatch_above it does so once. To be called
    before the actor learns. Collective over all ranks.
    """
    actor, config = roles.actor, roles.config
    if roles.mismatch_explained and not config.explain_mismatch:
        return
    with roles.phases("explain mismatch", actor.topology):
        actor.model.onload()
        there = needs_old_logprobs(config.algo) and not config.algo.correction.bypass
        known = [
            with_trainer_logprobs(actor.model, batch, roles.temperature, there)
            for batch in batches.of(actor)
        ]
        sample = worst_sample(actor, known)
        limit = config.explain_mismatch_above
        if sample is None or (not config.explain_mismatch and sample.difference <= (limit or 0)):
            return
        roles.mismatch_explained = True
        report = explain(roles, sample, step)
        if actor.topology.rank == 0:
            path = write_report(report, Path(config.run_dir))
            PROGRESS.line(f"{report.text()}\n  written to {path}")


def explain(roles: Roles, sample: WorstSample, step: int) -> MismatchReport:
    """Returns the findings of the rank that has most to say, on every rank. Collective."""
    rows = rows_of_interest(sample)
    weights, engine = read_engine(roles, sample, rows)
    trainer = roles.actor.model.record_pass(sample.batch, rows, roles.temperature)
    report = reported(roles, sample, step, weights, engine, trainer)
    control = roles.actor.topology.control
    # the earliest divergence of all engines, since each has weights of its own
    earliest = report.divergence.index if report.divergence else len(report.points)
    everyone = gather_to_all(earliest, control)
    return broadcast_object(report, control, everyone.index(min(everyone)))


@dataclass(frozen=True)
class Weights:
    """Holds what the comparison of the engine's weights with the trainer's has found."""

    count: int  # of tensors that were compared on this rank
    wrong: list[str]  # a sentence for each rank whose engine differs

    @property
    def sentence(self) -> str:
        if not self.wrong:
            return (
                f"all {counted(self.count, 'tensor')} of the engine are the trainer's, bit by bit"
            )
        more = (
            f" (and on {counted(len(self.wrong) - 1, 'more rank')})" if len(self.wrong) > 1 else ""
        )
        return f"{self.wrong[0]}{more}"


def read_engine(
    roles: Roles, sample: WorstSample, rows: torch.Tensor
) -> tuple[Weights, RecordedPass]:
    """Compares the engine's weights with the trainer's, and runs the sample through its model.
    Collective.

    An engine that sleeps is woken up for it. On a GPU it has given its weights back, and is pushed
    the same ones again; the trainer's leave the GPU meanwhile where the config has them leave.
    """
    engine, device = roles.sampler.engine, roles.actor.topology.device
    critic, sent = roles.critic, roles.weight_bytes
    if critic is not None and critic.here:
        critic.model.offload()  # it has computed its values, and the engine needs the room
    if roles.sleeps and device.type == "cuda":
        transfer(roles, roles.policy_version)
        roles.weight_bytes = sent  # of the step's own push
    elif roles.sleeps:
        engine.wake()
    weights = check_weights(roles)
    read = ENGINES[roles.config.rollout.engine].read_pass
    assert read is not None  # checks/mismatch.py
    found = read(engine, sample.token_ids, rows, roles.temperature)
    if roles.sleeps:
        engine.sleep()
    roles.actor.model.onload()
    if critic is not None and critic.here:
        critic.model.onload()
    return weights, found


def check_weights(roles: Roles) -> Weights:
    """Compares all weights, as weights.check does. Collective."""
    assert roles.weights is not None
    count, wrong, topology = 0, "", roles.actor.topology
    try:
        count = roles.weights.check()
    except WeightMismatch as error:
        wrong = f"on rank {topology.rank}, {error}" if topology.world > 1 else str(error)
    everyone = gather_to_all(wrong, topology.control)
    return Weights(count, [sentence for sentence in everyone if sentence])


def reported(
    roles: Roles, sample: WorstSample, step: int, weights: Weights, engine: RecordedPass,
    trainer: RecordedPass,
) -> MismatchReport:  # fmt: skip
    """Returns this rank's findings. Local."""
    rounding = rounding_of(engine.dtype, trainer.dtype)
    tp = roles.sampler.topology
    points = compare_passes(engine, trainer, tp.axis_rank("tp"), tp.axis_size("tp"))
    divergence = first_divergence(points, flips_of(engine, trainer), rounding)
    batch, place = sample.batch, sample.worst_token
    row = int((engine.rows == place - 1).nonzero()[0])
    said = {"sampled": float(batch.rollout_logprobs[place])}
    if engine.logprobs is not None:
        said["engine now"] = float(engine.logprobs[row])
    assert trainer.logprobs is not None
    said["trainer"] = float(trainer.logprobs[row])
    title, config = ENGINES[roles.config.rollout.engine].title, roles.config
    verdict = []
    if weights.wrong:
        verdict.append(
            f"{title} does not hold the trainer's weights, because a push missed a tensor or "
            f"something wrote to it: {weights.sentence}."
        )
    if divergence is not None:
        dtype = config.actor.dtype
        verdict += described(divergence, points, title, dtype) + settings_apart(engine, trainer)
    if not verdict:
        verdict = sentences_of_logprobs(roles, sample, engine, trainer, points, rounding)
    older = older_sentence(sample, roles.policy_version)
    return MismatchReport(
        step=step,
        sample={
            "prompt": int(batch.prompts[0]),
            "group": int(batch.groups[0]) // (1 + config.algo.replay_steps),  # as in samples/
            "index": int(batch.indices[0]), "num_tokens": batch.num_tokens,
        },
        token={
            "place": place, "id": sample.token_ids[place], "difference": sample.difference,
            "logprobs": said,
        },
        verdict=verdict + older, rounding=rounding, points=points, divergence=divergence,
        weights="not the trainer's, see above" if weights.wrong else weights.sentence,
    )  # fmt: skip


def sentences_of_logprobs(
    roles: Roles, sample: WorstSample, engine: RecordedPass, trainer: RecordedPass,
    points: list[Point], rounding: float,
) -> list[str]:  # fmt: skip
    """Returns the verdict where modules and weights agree: on the LM head, and on how the engine's
    log-probabilities came about while it sampled.
    """
    title = ENGINES[roles.config.rollout.engine].title
    if not any(point.name == FINAL_NAME for point in points) or engine.logprobs is None:
        return [f"The modules of {title} and the trainer that have the same names agree."]
    final = next(point for point in points if point.name == FINAL_NAME)
    assert trainer.logprobs is not None
    behind = trainer.rows + 1
    known = sample.batch.loss_mask[behind] > 0
    ours, now = trainer.logprobs[known], engine.logprobs[known]
    sampled = sample.batch.rollout_logprobs[behind][known]
    allowed = (rounding + GAIN * final.returned.relative) * (1 + ours.abs())
    head, decoding = (now - ours).abs(), (now - sampled).abs()
    if bool((head > allowed).any()):
        return [
            f"The first operator whose results part is the LM head of {title} and the trainer: the "
            f"last hidden states agree, log-probabilities differ by up to {float(head.max()):.3g}."
        ]
    if bool((decoding > allowed).any()):
        return sampling_sentences(roles.config, title, float(decoding.max()))
    sentence = (
        f"Nothing parts by more than rounding: every module that both models have agrees, and so "
        f"do the log-probabilities, to {float(torch.maximum(head, decoding).max()):.2g} nats."
    )
    pair = steepest(points)
    if pair is None or pair[1].returned.relative < rounding:
        return [sentence]
    grown = f"from {pair[0].returned.relative:.1e} to {pair[1].returned.relative:.1e}"
    return [sentence, f"Differences grow most between {pair[0].name} and {pair[1].name}, {grown}."]


def sampling_sentences(config: PpoConfig, title: str, apart: float) -> list[str]:
    """Returns the verdict where the engine agrees with the trainer, and not with itself."""
    changed = [
        f"rollout.{name}={getattr(config.rollout, name)}"
        for name, usual in CUT_OFFS.items()
        if getattr(config.rollout, name) != usual
    ]
    sentence = (
        f"{title} agrees with the trainer when it reads the whole sequence at once; while it "
        f"sampled it gave log-probabilities that differ by up to {apart:.3g}."
    )
    if changed:
        return [sentence, f"It draws from a changed distribution: {', '.join(changed)}."]
    return [
        sentence,
        "Look at what decoding alone uses: the KV cache and its dtype, the cache of prefixes, "
        "weights that changed while it sampled.",
    ]


def older_sentence(sample: WorstSample, version: int) -> list[str]:
    """Says how many tokens older weights chose, whose log-probabilities differ for that alone."""
    batch = sample.batch
    older = int(((batch.policy_version < version) & (batch.loss_mask > 0)).sum())
    if not older:
        return []
    return [f"{older} of its tokens {verb(older, 'were')} chosen with weights of an earlier step."]
