"""Turns prompts into requests with seeds, and answers into Samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from spmdrl.config import LoraConfig, PpoConfig, RolloutConfig, support_width
from spmdrl.data.source_adapters import adapter_of
from spmdrl.distributed.topology import Topology
from spmdrl.rollout.agents.pool import AgentPool, AgentTask
from spmdrl.rollout.agents.samples import trajectory_sample
from spmdrl.rollout.answer_codec import resume, share
from spmdrl.rollout.base import NOT_CHOSEN, Completion, Request, SamplingParams
from spmdrl.rollout.multi_turn.conversation import Dialogue, messages_of, replies_of
from spmdrl.rollout.multi_turn.reply_encoder import turns_of
from spmdrl.rollout.scheduler import Scheduler
from spmdrl.rollout.scheduler_messages import ReplyHandler, StopCondition
from spmdrl.rollout.seeds import seed_of
from spmdrl.types import Message, Prompt, Sample


def training_params(config: RolloutConfig) -> SamplingParams:
    """Returns how the policy samples while it is trained."""
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_tokens=config.min_tokens,
        max_tokens=config.max_tokens,
        stop=config.stop,
        stop_token_ids=config.stop_token_ids,
        ignore_eos=config.ignore_eos,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        support_width=support_width(config),
    )


def greedy_params(config: RolloutConfig) -> SamplingParams:
    """Returns the same stops and lengths, with the most likely token each time."""
    return replace(
        training_params(config),
        temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, support_width=0,
    )  # fmt: skip


def evaluation_params(config: PpoConfig) -> SamplingParams:
    """Returns how held-out prompts are answered: greedily, unless the config has a temperature for
    it.
    """
    return replace(
        greedy_params(config.rollout),
        temperature=config.eval_temperature,
        top_p=config.eval_top_p,
        top_k=config.eval_top_k,
        min_p=config.eval_min_p,
        repetition_penalty=config.eval_repetition_penalty,
    )


@dataclass(frozen=True)
class SampleRequest:
    """A sample that is to be made, or finished. Its seed stays, whenever it is asked."""

    prompt: Prompt
    group: int
    index: int  # which of the prompt's n samples
    seed: int
    begun: Completion | None = None  # what an earlier round left unfinished
    home: int | None = None  # the number of the engine where an agent makes it already


def questions_of(
    prompts: list[tuple[int, Prompt]], n: int, *, run_seed: int, step: int, purpose: str = "train"
) -> list[SampleRequest]:
    """Each (group, Prompt) `n` times, the samples of a prompt next to each other."""
    return [
        SampleRequest(prompt, group, index, seed_of(run_seed, step, prompt.id, index, purpose))
        for group, prompt in prompts
        for index in range(n)
    ]


def sample_questions(
    scheduler: Scheduler,
    questions: list[SampleRequest],
    params: SamplingParams,
    *,
    tokenizer: Any,
    dialogue: Dialogue | None = None,
    by_agents: bool = False,
    agents: AgentPool | None = None,
    lora: LoraConfig | None = None,
    enough: int | None = None,
    until: Callable[[], bool] | None = None,
    **hooks: Any,
) -> tuple[list[Sample], list[SampleRequest]]:
    """(samples that ended on this engine, questions that are left: the same on every rank).

    questions: of the whole round, the same list on every rank of the rollout topology. Each is
    either among the left ones, begun or not, or a sample on exactly one leader. enough: as many
    complete groups end the round, over all engines; None: all do. A group is complete when all its
    questions of this round are answered, so one that an earlier round had partly answered needs
    only the rest. until: may end the round before, see Scheduler.run. dialogue: on leaders, where
    an answer may have several turns. by_agents: whether agents make the samples; agents: on
    leaders, those of the engine. lora: the actor's, which says whose adapter answers. hooks: see
    Scheduler.run.
    """
    if by_agents:
        return sample_by_agents(
            scheduler, questions, params, agents, enough=enough, until=until, **hooks
        )
    requests = [as_request(question, lora) for question in questions]
    reply_handler: ReplyHandler | None = None
    if dialogue is not None:
        reply_handler = dialogue.about([(q.prompt, q.index) for q in questions], params)
    outcome = scheduler.run(
        requests, params, stop_condition_of(questions, enough), reply_handler=reply_handler,
        until=until, **hooks,
    )  # fmt: skip
    ended = sorted(outcome.finished.items())
    samples = as_samples([questions[i] for i, _ in ended], [c for _, c in ended], tokenizer)
    if enough is None and until is None:
        return samples, []
    left = share(outcome.unfinished, scheduler.topology)
    return samples, [
        replace(questions[i], begun=begun if begun.token_ids else None) for i, begun in left.items()
    ]


def stop_condition_of(questions: list[SampleRequest], enough: int | None) -> StopCondition | None:
    """Returns what ends the round with so many complete groups; None where all are completed."""
    if enough is None:
        return None
    return StopCondition([question.group for question in questions], enough)


def sample_by_agents(
    scheduler: Scheduler, questions: list[SampleRequest], params: SamplingParams,
    agents: AgentPool | None, *, enough: int | None, until: Callable[[], bool] | None, **hooks: Any,
) -> tuple[list[Sample], list[SampleRequest]]:  # fmt: skip
    """Does what `sample_questions` does, where agents make the samples: a request stands for a
    trajectory, whose agent asks, and enters no engine itself.
    """
    requests = [
        Request(q.prompt.token_ids, q.seed, awaits_reply=True, home=q.home) for q in questions
    ]
    tasks = [AgentTask(q.prompt, q.index, q.seed) for q in questions]
    reply_handler: ReplyHandler | None = None
    if agents is not None:
        reply_handler = agents.about(tasks, params, scheduler.engine.policy_version)
    outcome = scheduler.run(
        requests, params, stop_condition_of(questions, enough), reply_handler=reply_handler,
        until=until, **hooks,
    )  # fmt: skip
    left: dict[int, Completion] = {}
    if enough is not None or until is not None:
        left = share(outcome.unfinished, scheduler.topology)
    ended = sorted(outcome.finished.items())
    trajectories = [] if agents is None else [agents.take(tasks[i]) for i, _ in ended]
    samples = [
        trajectory_sample(questions[i].prompt, questions[i].group, questions[i].index, made)
        for (i, _), made in zip(ended, trajectories, strict=True)
    ]
    homes = homes_of(tasks, agents, scheduler.topology) if left else []
    return samples, [replace(questions[i], home=homes[i]) for i in left]


def homes_of(
    tasks: list[AgentTask], agents: AgentPool | None, topology: Topology
) -> list[int | None]:  # fmt: skip
    """Returns the number of the engine where each task's agent is at work, None where none is.
    Collective.
    """
    numbers = torch.full((len(tasks),), -1)
    if agents is not None:
        here = [i for i, task in enumerate(tasks) if task.address in agents.running]
        numbers[torch.tensor(here, dtype=torch.int64)] = agents.engine
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group=topology.control)
    return [None if number < 0 else number for number in numbers.tolist()]


def as_request(question: SampleRequest, lora: LoraConfig | None = None) -> Request:
    prompt = question.prompt
    adapter = 0 if lora is None else adapter_of(lora, prompt.data_source)
    request = Request(prompt.token_ids, question.seed, images=prompt.images, adapter=adapter)
    return request if question.begun is None else resume(request, question.begun)


def as_samples(
    questions: list[SampleRequest], answers: list[Completion], tokenizer: Any
) -> list[Sample]:
    """Makes Samples of answers; what the policy said is decoded turn by turn."""
    turns = [turns_of(answer) if answer.replies else [answer.token_ids] for answer in answers]
    flat = list(chain(*turns))
    texts = iter(tokenizer.batch_decode(flat, skip_special_tokens=True) if flat else ())
    return [
        as_sample(question, answer, list(islice(texts, len(said))))
        for question, answer, said in zip(questions, answers, turns, strict=True)
    ]


def as_sample(question: SampleRequest, completion: Completion, texts: list[str]) -> Sample:
    """texts: of the policy's turns."""
    messages: list[Message] = [{"role": "assistant", "content": texts[0]}]
    mask, support_ids = [1] * len(completion.token_ids), completion.support_ids
    if completion.replies:
        messages = messages_of(completion, texts)
        mask = [int(version != NOT_CHOSEN) for version in completion.versions]
    invalid = None
    if completion.finish_reason == "error":
        invalid = f"the environment: {messages[-1]['content']}"
    elif support_ids is not None:
        invalid = lost_support(support_ids, mask)
    return Sample(
        prompt=question.prompt,
        group=question.group,
        index=question.index,
        response_ids=completion.token_ids,
        rollout_logprobs=completion.logprobs,
        loss_mask=mask,
        policy_version=completion.versions,
        finish_reason=completion.finish_reason,
        response=texts[-1],
        messages=messages,
        invalid=invalid,
        routed_experts=completion.routed_experts,
        support_ids=support_ids,
    )


def lost_support(support_ids: np.ndarray, loss_mask: list[int]) -> str | None:
    """Returns why an answer cannot be trained on whose tokens were drawn among more ids than there
    is room for; None where all are known. Both are those of a Sample.
    """
    lost = np.array(loss_mask) * (support_ids[:, 0] < 0)
    if not lost.any():
        return None
    return (
        f"rollout.keep_sampling_mask: {int(lost.sum())} tokens were drawn among more than "
        f"{support_ids.shape[1]} ids, twice rollout.top_k: as many logits were equal"
    )


def completion_of(sample: Sample) -> Completion:
    """Returns the completion of which as_samples makes the same sample."""
    return Completion(
        sample.response_ids, sample.rollout_logprobs, sample.finish_reason, sample.policy_version,
        replies_of(sample.messages), sample.routed_experts, sample.support_ids,
    )  # fmt: skip
