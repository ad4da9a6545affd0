"""Whether the engine that samples computes what another program's model computes."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from spmdrl.config import require
from spmdrl.config.words import counted
from spmdrl.data.packing import pack_samples
from spmdrl.distributed.agreement import gather_to_all
from spmdrl.engines.external_actor import ExternalActor
from spmdrl.rollout.base import Request, SamplingParams
from spmdrl.rollout.seeds import seed_of
from spmdrl.training.build import RlRun
from spmdrl.types import Prompt, Sample

logger = logging.getLogger(__name__)

# how far log-probabilities may differ, as the mean of absolute differences over the tokens
TOLERANCE = {"float32": 3e-4, "bfloat16": 0.05, "float16": 0.05, "fp8": 0.2}
WITH_EXPERTS = 2.0  # times as far in half precision: rounding sends tokens to other experts
PROMPTS, TOKENS = 4, 16  # of each engine, and at most so many of each answer


def check_gap(run: RlRun, host: ExternalActor, tolerance: float | None) -> float:
    """Compares log-probabilities of tokens that every engine samples; their mean difference.

    The engines have the host's weights. Raises ConfigError above the tolerance, on every rank.
    Collective over all ranks.
    """
    roles, config = run.roles, run.config
    allowed = tolerance_of(run, host) if tolerance is None else tolerance
    with roles.phases("sample to compare"):
        rows = few_answers(run)
        if roles.sampler.here and roles.sleeps:
            roles.sampler.engine.sleep()
    with roles.phases("compare logprobs"):
        mean, largest, count = gap_of(run, rows)
        require(
            mean <= allowed,  # not where it is no number
            f"attach: the host's model is not what config.model ({config.model}) describes: over "
            f"{counted(count, 'sampled token')} the log-probabilities of the rollout engine and "
            "of the host "
            f"differ by {mean:.3g} on average, by {largest:.3g} at most, and "
            f"{allowed:g} is allowed ({precision(run, host.dtype)}). The engine has the host's "
            "weights, so the two compute something else with them: compare the host's arguments "
            "with config.json. attach(..., tolerance=...) allows more",
        )
    if roles.topology.rank == 0:
        logger.info(
            "rollout engine and host agree: log-probabilities of %d tokens differ by %.3g on "
            "average, by %.3g at most (%g is allowed)", count, mean, largest, allowed,
        )  # fmt: skip
    return mean


def precision(run: RlRun, host_dtype: torch.dtype) -> str:
    """The coarsest that engine or host computes in; a key of TOLERANCE."""
    rollout = run.config.rollout
    if rollout.quantization == "fp8":
        return "fp8"
    host = str(host_dtype).removeprefix("torch.")
    return host if rollout.dtype == "float32" else rollout.dtype


def tolerance_of(run: RlRun, host: ExternalActor) -> float:
    name = precision(run, host.dtype)
    factor = WITH_EXPERTS if host.has_experts and name != "float32" else 1.0
    return TOLERANCE[name] * factor


def few_answers(run: RlRun) -> list[tuple[list[int], list[int], list[float]]]:
    """(prompt, answer, its log-probabilities) of all engines, on every rank. Collective."""
    roles, config = run.roles, run.config
    mine = []
    if roles.sampler.here:
        ranks = roles.sampler.topology
        number = ranks.axis_rank("dp")
        prompts = [run.prompts.prompt(i) for i in range(min(PROMPTS, len(run.prompts)))]
        requests = [
            Request(prompt.token_ids, seed_of(config.seed, 0, prompt.id, number, "compare"))
            for prompt in prompts
        ]
        length = min(TOKENS, config.rollout.max_tokens)
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        done = roles.sampler.engine.generate(requests, params)
        if ranks.axis_rank("tp") == 0:
            mine = [
                (request.prompt_ids, answer.token_ids, answer.logprobs)
                for request, answer in zip(requests, done, strict=True)
            ]
    everyone = gather_to_all(mine, roles.topology.control)
    return [row for rows in everyone for row in rows]


def gap_of(
    run: RlRun, rows: list[tuple[list[int], list[int], list[float]]]
) -> tuple[float, float, int]:  # fmt: skip
    """(mean, largest absolute difference, number of tokens). Collective over all ranks."""
    actor = run.roles.actor
    own, me = list(actor.ranks), run.roles.topology.rank  # those that are given sequences
    share = rows[own.index(me) :: len(own)] if me in own else []
    samples = [
        Sample(
            prompt=Prompt(number, prompt_ids, "", None, ""),
            group=number,
            index=0,
            response_ids=answer,
            rollout_logprobs=logprobs,
            loss_mask=[1] * len(answer),
            policy_version=[0] * len(answer),
            finish_reason="length",
        )
        for number, (prompt_ids, answer, logprobs) in enumerate(share)
    ]
    batch = pack_samples(samples)
    actor.model.onload()
    found = actor.model.logprobs(batch, temperature=1.0).logprobs
    gaps = (found - batch.rollout_logprobs).abs()[batch.loss_mask > 0].double()
    sums = torch.stack([gaps.sum(), torch.tensor(float(len(gaps)), dtype=torch.float64)])
    largest = gaps.max() if len(gaps) else torch.zeros((), dtype=torch.float64)
    dist.all_reduce(sums, group=run.roles.topology.control)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=run.roles.topology.control)
    return float(sums[0] / sums[1]), float(largest), int(sums[1])
