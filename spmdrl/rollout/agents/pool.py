"""Runs the agents of a rollout engine: each makes a trajectory by requests to its endpoint."""

from __future__ import annotations

import copy
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from spmdrl.config import ConfigError, PpoConfig
from spmdrl.data.images import ImageProcessor
from spmdrl.data.pictures import with_pictures
from spmdrl.data.source_adapters import adapter_of
from spmdrl.rewards.workers.caller import Caller, arguments_of
from spmdrl.rewards.workers.worker import Reply
from spmdrl.rollout.agents.call_queue import CallQueue
from spmdrl.rollout.agents.chat_encoder import ChatEncoders
from spmdrl.rollout.agents.command import CommandAgent, is_command, without_proxy
from spmdrl.rollout.agents.endpoint import Endpoint
from spmdrl.rollout.agents.server import EndpointServer
from spmdrl.rollout.agents.session import Session, SessionLimits
from spmdrl.rollout.agents.trajectory import Trajectory
from spmdrl.rollout.base import Completion, SamplingParams
from spmdrl.rollout.engine_calls import EngineCalls
from spmdrl.types import Picture, Prompt

MODEL = "policy"  # the name of the model at the endpoint

Address = tuple[int, int, int]  # of a sample: its prompt's id, which of the prompt's, its seed


def asked_in(prompt: Prompt) -> str:
    """Returns what a prompt asks as text, without the chat template: its last message."""
    content = prompt.messages[-1].get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content if isinstance(content, str) else prompt.text


@dataclass(frozen=True)
class AgentTask:
    """A sample that an agent is to make."""

    prompt: Prompt
    sample_index: int
    seed: int

    @property
    def address(self) -> Address:
        return self.prompt.id, self.sample_index, self.seed

    @property
    def row(self) -> dict[str, Any]:
        """The row of the data set, as agents get it."""
        prompt = self.prompt
        images = [each for each in prompt.images if isinstance(each, Picture)]
        return {
            "prompt": asked_in(prompt),
            "messages": with_pictures(prompt.messages, images),
            "ground_truth": prompt.ground_truth,
            "data_source": prompt.data_source, "extra_info": prompt.extra_info,
            "sample_index": self.sample_index,
        }  # fmt: skip


# What an agent can ask for by naming a parameter: fields of its row, all of them, the endpoint.
ARGUMENTS = (
    "prompt", "messages", "ground_truth", "data_source", "extra_info", "sample_index", "row",
    "base_url", "anthropic_base_url", "api_key", "model", "trajectory_id",
)  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """A trajectory whose agent has ended."""

    trajectory: Trajectory
    reply: Reply  # what it returned, or why it failed


@dataclass
class Running:
    """A trajectory whose agent is at work."""

    session: Session
    submitted: Future[Any]
    attempt: int = 0
    paused: bool = False  # whether it waited for a step, which its time limit does not know


class AgentPool:
    """The agents of one engine, on its leader. Raises ConfigError for an agent that cannot run.

    Agents go on while nothing is sampled: their requests wait for the next round.
    """

    def __init__(
        self, config: PpoConfig, tokenizer: Any, engine: int, num_engines: int, key: str,
        vocab_size: int, vision: ImageProcessor | None = None,
    ) -> None:  # fmt: skip
        """engine: its number, of num_engines. key: that requests must have. vocab_size: tokens that
        the model has embeddings of. vision: of a model that sees images.
        """
        vision = copy.deepcopy(vision)
        tokenizer = copy.deepcopy(tokenizer)  # a call changes it, and the endpoint has a thread
        self.config, self.engine, self.key = config, engine, key
        self.agents = agents_of(config)
        self.arguments = {
            source: arguments_of(agent, ARGUMENTS, "agent") for source, agent in self.agents.items()
        }
        self.limits = SessionLimits(
            config.data.max_prompt_tokens + config.rollout.max_tokens, config.agents.max_turns,
            config.agents.max_images, vocab_size,
        )  # fmt: skip
        self.encoders = ChatEncoders(config, tokenizer, self.limits.max_model_len, vision)
        self.queue = CallQueue()
        self.running: dict[Address, Running] = {}
        self.ended: dict[Address, Ended] = {}
        self.server = EndpointServer(config.serve, Endpoint(config.serve, MODEL, key), engine)
        os.environ |= without_proxy(self.server.url)  # of the processes that agents run in
        functions = list({id(agent): agent for agent in self.agents.values()}.values())
        self.caller = Caller(functions, config.agents, num_engines, Reply)

    def about(self, tasks: Sequence[AgentTask], params: SamplingParams, version: int) -> AgentRound:
        """Returns the handler of one round of the scheduler: the task of each of its requests.

        version: of the weights that the round begins with.
        """
        self.drop_stale(version)
        return AgentRound(self, tasks, params)

    def drop_stale(self, version: int) -> None:
        """Gives up trajectories whose first token is of weights that are too old."""
        most = self.config.agents.max_staleness
        if most is None:
            return
        for address, running in list(self.running.items()):
            oldest = running.session.trajectory.oldest_version
            if oldest is not None and version - oldest > most:
                self.end(address)

    def start(self, task: AgentTask, params: SamplingParams, attempt: int = 0) -> None:
        trajectory = Trajectory(secrets.token_urlsafe(9), task.seed)
        adapter = adapter_of(self.config.actor.lora, task.prompt.data_source)
        session = Session(
            trajectory, params, self.encoders, self.queue, self.limits, MODEL, adapter=adapter
        )  # fmt: skip
        self.server.post(self.server.endpoint.begin, session)  # before any request can come
        url, row = f"{self.server.url}/t/{trajectory.id}", task.row
        told = row | {
            "row": row, "base_url": f"{url}/v1", "anthropic_base_url": url, "api_key": self.key,
            "model": MODEL, "trajectory_id": trajectory.id,
        }  # fmt: skip
        source = source_of(self.agents, task.prompt.data_source)
        given = {name: told[name] for name in self.arguments[source]}
        submitted = self.caller.submit(self.agents[source], given)
        self.running[task.address] = Running(session, submitted, attempt)

    def end(self, address: Address) -> None:
        """Ends a trajectory, and its agent where that is still at work."""
        running = self.running.pop(address)
        running.submitted.cancel()
        running.session.close()
        self.server.post(self.server.endpoint.end, running.session.trajectory.id)

    def collect(self, task: AgentTask, params: SamplingParams) -> bool:
        """Whether the task's agent has ended. One that failed begins anew, if it may."""
        running = self.running[task.address]
        if not running.submitted.done():
            return False
        reply = running.submitted.result()
        self.end(task.address)
        late = running.paused and (reply.error or "").startswith("timed out")
        if late or (reply.error is not None and running.attempt < self.config.agents.retries):
            self.start(task, params, running.attempt + (not late))
            return False
        self.ended[task.address] = Ended(running.session.trajectory, reply)
        return True

    def take(self, task: AgentTask) -> Ended:
        """Returns the trajectory of a task whose agent has ended, once."""
        return self.ended.pop(task.address)

    def close(self) -> None:
        """Ends agents and endpoint."""
        self.caller.close()
        self.server.close()


@dataclass
class AgentRound:
    """The trajectories of one round (scheduler_messages.ReplyHandler)."""

    pool: AgentPool
    tasks: Sequence[AgentTask]
    params: SamplingParams
    under_way: dict[int, Completion] = field(default_factory=dict)  # by position

    def __len__(self) -> int:
        return len(self.under_way)

    def ask(self, position: int, turn: Completion) -> bool:
        """Starts the agent, or goes on with one that an earlier round has left at work."""
        task = self.tasks[position]
        if task.address not in self.pool.running:
            self.pool.start(task, self.params)
        self.under_way[position] = turn
        return True

    def came(self) -> dict[int, Completion]:
        ready = [i for i in self.under_way if self.pool.collect(self.tasks[i], self.params)]
        return {i: self.under_way.pop(i) for i in ready}

    def give_up(self) -> dict[int, Completion]:
        """Returns the trajectories that are not over; their agents go on."""
        left, self.under_way = self.under_way, {}
        for position in left:
            running = self.pool.running.get(self.tasks[position].address)
            if running is not None:
                running.paused = True
        return left

    def has_calls(self) -> bool:
        return bool(self.pool.queue)

    def calls(self) -> EngineCalls:
        return self.pool.queue.take()

    def end_call(self, number: int, answer: Completion) -> None:
        self.pool.queue.end(number, answer)

    def pause_call(self, number: int, answer: Completion) -> None:
        self.pool.queue.pause(number, answer)


def agents_of(config: PpoConfig) -> dict[str | None, Callable[..., Any]]:
    """Returns the agents by data_source; None stands for every other one."""
    given: Mapping[Any, Any] = (
        config.agent if isinstance(config.agent, Mapping) else {None: config.agent}
    )
    return {
        source: CommandAgent(agent, config.agents) if is_command(agent) else agent
        for source, agent in given.items()
    }


def source_of(agents: Mapping[str | None, Any], data_source: str) -> str | None:
    """Returns the key of a data_source's agent. Raises ConfigError where it has none."""
    key = data_source if data_source in agents else None
    if key not in agents:
        raise ConfigError(
            f"`agent` has no data_source {data_source!r}; it has {', '.join(map(repr, agents))}"
        )
    return key


def check_agent_sources(config: PpoConfig, data_sources: Iterable[str]) -> None:
    """Raises ConfigError where the agent of a data_source is not named."""
    if config.agent is not None:
        for source in data_sources:
            source_of(agents_of(config), source)
