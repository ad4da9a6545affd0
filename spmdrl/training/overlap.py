"""Scoring a step's answers while the next step's are asked, where sampling runs ahead of training.

Rewards that wait for a service, or that take processes of their own, cost the rollout no time then.
As soon as all of them are there the asking pauses, the step goes to those that train, and what was
begun goes on: ranks that train do not wait for the next step's answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spmdrl.rollout.demonstrations import demonstration_samples, without_demonstrated
from spmdrl.rollout.multi_turn.conversation import has_replies
from spmdrl.rollout.sampling import (
    SampleRequest,
    questions_of,
    sample_questions,
    training_params,
)
from spmdrl.training.collect import (
    PromptSource,
    RolloutResult,
    check_scores,
    hooks,
    keep_groups,
    take,
)
from spmdrl.training.push_weights import take_weights
from spmdrl.training.remote_scoring import finish_scoring
from spmdrl.training.roles import Roles
from spmdrl.types import Sample


@dataclass
class StepRequests:
    """The requests of one step so far."""

    step: int
    samples: list[Sample]  # that ended on this rank, or are demonstrations; not scored yet
    left: list[SampleRequest]  # unanswered, some of them begun; the same on every rank


def can_overlap(roles: Roles) -> bool:
    """Whether a step's answers depend on nothing that is scored, and their rewards are given where
    they are made, off the training thread."""
    config = roles.config
    return (
        config.async_steps > 0
        and not config.algo.dynamic_sampling
        and not config.rollout.greedy_baseline
        and not has_replies(config)
        and config.reward_model is None
        and config.judge is None
        and roles.leftover is None
        and roles.sampler.scoring.ranks == roles.sampler.topology.ranks
    )


def collect_overlapping(
    roles: Roles, source: PromptSource, step: int, requests: StepRequests | None, asks_next: bool,
) -> tuple[RolloutResult, StepRequests | None]:  # fmt: skip
    """Does what `collect` does, and asks part of the next step meanwhile; returns both. On the
    ranks that sample.

    requests: of this step, made during the last one. asks_next: whether the next step may be asked
    before this one has been handed over.
    """
    rewards = roles.sampler.rewards
    assert rewards is not None
    requests = requests or begin(roles, source, step)
    assert requests.step == step, (requests.step, step)
    ask(roles, requests)
    with roles.phases("reward", roles.sampling):
        begun = rewards.begin(requests.samples)
    following = None
    if asks_next:
        # free: those that train use this step's samples after they have sent these weights
        take_weights(roles, step - roles.config.async_steps)
        following = begin(roles, source, step + 1)
        ask(roles, following, until=begun.is_ready)
    with roles.phases("reward", roles.sampling):
        finish_scoring(begun, rewards, roles)
        check_scores(roles, requests.samples)
    result = RolloutResult([], 0, list(requests.samples), rounds=1)
    wanted = roles.config.data.prompts_per_step
    source.hear(step, keep_groups(result, requests.samples, wanted, roles))
    return result, following


def begin(roles: Roles, source: PromptSource, step: int) -> StepRequests:
    config = roles.config
    prompts = list(enumerate(take(roles, source, config.data.prompts_per_step, step)))
    topology = roles.sampler.topology
    given = demonstration_samples(prompts, config, step, topology, roles.tokenizer)
    questions = questions_of(prompts, config.rollout.n, run_seed=config.seed, step=step)
    return StepRequests(step, given, without_demonstrated(questions, config))


def ask(roles: Roles, requests: StepRequests, until: Callable[[], bool] | None = None) -> None:
    """Adds answers to requests.samples until none is left, or `until` holds on every engine."""
    if not requests.left:
        return
    sampler = roles.sampler
    with roles.phases("rollout", sampler.topology):
        made, requests.left = sample_questions(
            sampler.scheduler, requests.left, training_params(roles.config.rollout), until=until,
            **hooks(roles),
        )  # fmt: skip
        requests.samples += made
