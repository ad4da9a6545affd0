"""Runs the user's reward functions off the training thread: in parallel, limited in time, in order.

Plain functions run in worker processes that can be killed, so an endless loop, a hang in C or a
segmentation fault costs one sample. Coroutine functions (judges, remote services) share the event
loop of one more process. A sample without a reward is invalid and says why; it never scores 0.
"""

from __future__ import annotations

import base64
import contextlib
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.config import ConfigError, PpoConfig, RewardConfig, RewardFn, SandboxConfig
from spmdrl.config.words import counted, verb
from spmdrl.data.visuals import Video
from spmdrl.distributed.collectives import broadcast_object
from spmdrl.distributed.topology import Topology
from spmdrl.rewards.builtin import BUILT_INS, CHECKED_FIRST, agent, graded_math, gsm8k, math
from spmdrl.rewards.sandbox.remote import check_remote
from spmdrl.rewards.workers.caller import Caller, arguments_of
from spmdrl.rewards.workers.pool import innermost
from spmdrl.rewards.workers.worker import REWARD_FUNCTION, RewardResult, cause_of, image_part
from spmdrl.types import Picture

if TYPE_CHECKING:
    from spmdrl.types import Sample


def file_of(video: Video) -> str | list[str]:
    """Returns the path of a video's file; a data: URI where it is bytes; of frames a list of them,
    as of images.
    """
    if isinstance(video.source, Path):
        return str(video.source)
    if isinstance(video.source, tuple):
        return [image_part(frame.encoded)["image"] for frame in video.source]
    return f"data:application/octet-stream;base64,{base64.b64encode(video.source).decode()}"


# What a reward function can ask for by naming a parameter.
ARGUMENTS: dict[str, Callable[[Sample], Any]] = {
    "response": lambda sample: sample.response,
    "solution_str": lambda sample: sample.response,  # verl's name for it
    "ground_truth": lambda sample: sample.prompt.ground_truth,
    "data_source": lambda sample: sample.prompt.data_source,
    "extra_info": lambda sample: sample.prompt.extra_info,
    "prompt": lambda sample: sample.prompt.text,
    "prompt_ids": lambda sample: sample.prompt.token_ids,
    "response_ids": lambda sample: sample.response_ids,
    "finish_reason": lambda sample: sample.finish_reason,
    "sample_index": lambda sample: sample.index,
    "messages": lambda sample: sample.chat,
    "images": lambda sample: [
        image_part(i.encoded)["image"] for i in sample.prompt.images if isinstance(i, Picture)
    ],
    "videos": lambda sample: [file_of(i) for i in sample.prompt.images if isinstance(i, Video)],
    "num_turns": lambda sample: sample.num_turns,
    "model_score": lambda sample: sample.model_score,
    "agent_output": lambda sample: sample.agent_output,
    "judge_score": lambda sample: sample.judgement.score if sample.judgement else None,
    "judge_verdicts": lambda sample: sample.judgement.verdicts if sample.judgement else [],
}


# PpoConfig.reward: one, or one per data_source
Rewards = RewardFn | str | Mapping[str, RewardFn | str]
ONLY_BY_NAME = ("images", "videos", "judge_score", "judge_verdicts")
LATE_IS_WRONG = (math, graded_math)  # an answer that cannot be read in time is a wrong one


class TooManyInvalid(RuntimeError):
    """More samples than allowed have no reward; the same text on every rank."""


@dataclass(frozen=True)
class Reward:
    """A reward function, and which of ARGUMENTS it takes."""

    function: RewardFn
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Scoring:
    """Samples that are being scored in the background."""

    samples: list[Sample]
    calls: dict[Future[Any], tuple[Reward, Sample]]  # of those that have to be scored

    def is_ready(self) -> bool:
        """Whether RewardRunner.finish would not have to wait."""
        return all(call.done() for call in self.calls)


class RewardRunner:
    """Scores samples with `PpoConfig.reward`. Starts its processes at once and in the background.

    Raises ConfigError for an unknown built-in, a signature that asks for what is not known, and a
    function that cannot be sent to a worker. Use from one thread; `close` when done.
    """

    def __init__(self, reward: Rewards, config: RewardConfig, ranks: int = 1) -> None:
        """reward: as rewards_of returns it. ranks: how many have a runner, and share the limits for
        coroutines.
        """
        self.rewards = resolve_rewards(reward)  # by data_source; None: every data_source
        self.ranks, self.per_turn, self.config = ranks, config.per_turn, config
        self.caller = Caller([r.function for r in self.rewards.values()], config, ranks)

    def check_sources(self, data_sources: Iterable[str]) -> None:
        """Raises ConfigError where a data_source has no reward function."""
        for source in data_sources:
            self.reward_of(source)

    def reward_of(self, data_source: str) -> Reward:
        reward = self.rewards.get(data_source) or self.rewards.get(None)
        if reward is None:
            raise ConfigError(
                f"no reward function for data_source {data_source!r}; `reward` has "
                f"{', '.join(repr(name) for name in self.rewards)}"
            )
        return reward

    def asks_judge(self, sample: Sample) -> bool:
        """Whether the reward of a sample reads what the judge says. Raises ConfigError."""
        return takes_judgement(self.reward_of(sample.prompt.data_source))

    def score(
        self, samples: list[Sample], scored: Callable[[Sample], None] = lambda sample: None
    ) -> None:
        """Sets reward, turn_rewards and reward_info, or invalid, of every sample; returns when all
        are done.

        scored is called with each one once it is, in whatever order; it may raise to stop.

        Raises ConfigError for a data_source without a reward function, and where a worker process
        cannot load the functions.
        """
        self.finish(self.begin(samples), scored)

    def begin(self, samples: list[Sample]) -> Scoring:
        """Has the samples scored in the background, for `finish`. Raises ConfigError as `score`."""
        todo = [
            (self.reward_of(sample.prompt.data_source), sample)
            for sample in samples
            if sample.invalid is None  # its environment failed
        ]
        calls = {self.submit(reward, sample): (reward, sample) for reward, sample in todo}
        return Scoring(samples, calls)

    def finish(
        self, begun: Scoring, scored: Callable[[Sample], None] = lambda sample: None
    ) -> None:
        """Waits for what `begin` has begun, and sets what `score` does."""
        for sample in begun.samples:
            if sample.invalid is not None:
                scored(sample)
        for call in as_completed(begun.calls):
            reward, sample = begun.calls[call]
            outcome = call.result()
            if self.per_turn or outcome.turns is not None:
                outcome = with_turns(outcome, sample.num_turns, self.per_turn)
            if is_late(outcome) and innermost(reward.function) in LATE_IS_WRONG:
                outcome = RewardResult(0.0, {"not_compared": 1.0}, None, "")
            sample.reward, sample.invalid = outcome.reward, outcome.invalid
            if sample.invalid is not None and innermost(reward.function) is agent:
                sample.invalid = sample.invalid.replace(REWARD_FUNCTION, "the agent", 1)
            sample.reward_info, sample.pred = outcome.info, outcome.pred
            sample.turn_rewards = outcome.turns or []
            scored(sample)

    def submit(self, reward: Reward, sample: Sample) -> Future[Any]:
        arguments = {name: ARGUMENTS[name](sample) for name in reward.arguments}
        return self.caller.submit(reward.function, arguments)

    def close(self) -> None:
        """Ends the processes."""
        self.caller.close()


def is_late(outcome: RewardResult) -> bool:
    return outcome.invalid is not None and outcome.invalid.startswith("timed out")


def with_turns(outcome: RewardResult, num_turns: int, per_turn: bool) -> RewardResult:
    """The outcome; one that failed where it says of turns what is not asked for."""
    if outcome.invalid is not None:
        return outcome
    if not per_turn:
        return RewardResult.failed(
            f"{REWARD_FUNCTION} returned 'turns', and rewards.per_turn is False: set it to True, "
            "or give that entry another name"
        )  # fmt: skip
    got = "no list" if outcome.turns is None else f"a list of {len(outcome.turns)}"
    if outcome.turns is None or len(outcome.turns) != num_turns:
        return RewardResult.failed(
            f"{REWARD_FUNCTION} returned {got} under 'turns'; with rewards.per_turn expected a "
            f"list of {num_turns}, one finite number for each turn of the policy's"
        )
    return outcome


def rewards_of(config: PpoConfig) -> Rewards:
    """Returns config.reward with "code" bound to remote sandboxes, where the config has any."""
    reward, sandbox = config.reward, config.sandbox
    if sandbox is None:
        return reward
    if isinstance(reward, Mapping):
        return {source: bound(each, sandbox) for source, each in reward.items()}
    return bound(reward, sandbox)


def bound(reward: RewardFn | str, sandbox: SandboxConfig) -> RewardFn | str:
    """Binds the reward to the sandbox, unless a user has bound it to one of its own."""
    if not is_code(reward) or getattr(reward, "keywords", {}).get("sandbox") is not None:
        return reward
    return partial(BUILT_INS[reward] if isinstance(reward, str) else reward, sandbox=sandbox)


def is_code(reward: RewardFn | str) -> bool:
    """Returns True for the built-in reward that runs programs, by name or with other limits."""
    return reward == "code" or (callable(reward) and innermost(reward) is BUILT_INS["code"])


def runs_programs(reward: Rewards) -> bool:
    """Whether a reward runs programs in a sandbox."""
    return any(map(is_code, reward.values() if isinstance(reward, Mapping) else [reward]))


def resolve_rewards(reward: Rewards) -> dict[str | None, Reward]:
    """Returns the rewards by data_source; None stands for every data_source. Raises ConfigError."""
    if not isinstance(reward, Mapping):
        return {None: resolve_reward(reward)}
    if not reward:
        raise ConfigError("`reward` is an empty mapping; expected {data_source: function or name}")
    return {source: resolve_reward(each) for source, each in reward.items()}


def asks_model(reward: Rewards) -> bool:
    """Whether a reward reads what the reward model says. Raises ConfigError."""
    return any("model_score" in each.arguments for each in resolve_rewards(reward).values())


def asks_judge(reward: Rewards) -> bool:
    """Whether a reward reads what the judge says. Raises ConfigError."""
    return any(takes_judgement(each) for each in resolve_rewards(reward).values())


def takes_judgement(reward: Reward) -> bool:
    return not {"judge_score", "judge_verdicts"}.isdisjoint(reward.arguments)


def built_ins_of(reward: Rewards) -> list[str]:
    """The names of the built-in functions among the rewards. Raises ConfigError."""
    names = {function: name for name, function in BUILT_INS.items()}
    names |= {gsm8k: "gsm8k", math: "math"}
    functions = [innermost(each.function) for each in resolve_rewards(reward).values()]
    return [names[function] for function in functions if function in names]


def needs_truth(reward: Rewards) -> Callable[[str], bool]:
    """Whether the reward of a data_source cannot be called without a ground truth.

    What is no reward function is not told here, but where rewards are resolved.
    """

    def needs(data_source: str) -> bool:
        truth = truth_parameter(reward, data_source)
        return truth is not None and truth.default is truth.empty

    return needs


def takes_truth(reward: Rewards) -> Callable[[str], bool]:
    """Whether the reward of a data_source names a ground truth among its parameters."""
    return lambda data_source: truth_parameter(reward, data_source) is not None


def truth_parameter(reward: Rewards, data_source: str) -> inspect.Parameter | None:
    found = reward.get(data_source) if isinstance(reward, Mapping) else reward
    function = BUILT_INS.get(found) if isinstance(found, str) else found
    if not callable(function):
        return None
    with contextlib.suppress(ValueError, TypeError):
        return inspect.signature(function).parameters.get("ground_truth")
    return None


def resolve_reward(reward: RewardFn | str) -> Reward:
    if isinstance(reward, str):
        if reward not in BUILT_INS:
            near = difflib.get_close_matches(reward, BUILT_INS, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ConfigError(f"no built-in reward '{reward}'; there are {list(BUILT_INS)}{hint}")
        reward = BUILT_INS[reward]
    if not callable(reward):
        raise ConfigError(f"a reward is a function or one of {list(BUILT_INS)}, got {reward!r}")
    remote = reward.keywords.get("sandbox") if isinstance(reward, partial) else None
    if remote is not None:
        check_remote(remote)
    elif (needs := innermost(reward)) in CHECKED_FIRST:
        CHECKED_FIRST[needs]()
    names = arguments_of(reward, ARGUMENTS, "reward")
    # not through **kwargs: megabytes for nobody, and a judge that the run may not have
    named = inspect.signature(reward).parameters
    names = tuple(name for name in names if name in named or name not in ONLY_BY_NAME)
    return Reward(reward, names)


def check_invalid(samples: list[Sample], config: RewardConfig, topology: Topology) -> None:
    """Raises TooManyInvalid on every rank where over max_invalid_fraction of all samples are bad.

    Costs one all-reduce. The error quotes the first invalid sample of the lowest rank that has one.
    """
    assert all((s.reward is None) != (s.invalid is None) for s in samples), "not scored"
    invalid = [sample for sample in samples if sample.invalid is not None]
    counts = torch.zeros(topology.world, 2, dtype=torch.int64)  # per rank: invalid, all
    counts[topology.rank] = torch.tensor([len(invalid), len(samples)])
    dist.all_reduce(counts, group=topology.group)
    num_invalid, num_samples = counts.sum(dim=0).tolist()
    if num_invalid > config.max_invalid_fraction * num_samples:
        raise_too_many(invalid, counts, config, topology)


def raise_too_many(
    invalid: list[Sample], counts: Tensor, config: RewardConfig, topology: Topology
) -> NoReturn:
    """Raises the error of `check_invalid`. invalid: this rank's; counts: (ranks, 2) int64, of the
    invalid samples and of all. Collective.
    """
    num_invalid, num_samples = counts.sum(dim=0).tolist()
    quoted = int(counts[:, 0].nonzero()[0])
    first = None
    if topology.rank == quoted:
        where = f"prompt {invalid[0].prompt.id} on rank {topology.ranks[quoted]}"
        first = f"{where}: {cause_of(invalid[0].invalid or '')}"
    first = broadcast_object(first, topology.group, quoted)
    raise TooManyInvalid(
        f"{num_invalid} of {counted(num_samples, 'sample')} {verb(num_invalid, 'have')} no "
        "reward, more than "
        f"rewards.max_invalid_fraction={config.max_invalid_fraction} allows. First: {first}"
    )
