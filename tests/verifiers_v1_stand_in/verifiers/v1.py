"""The part of verifiers.v1 that the taskset of the tests uses. One role, which asks once."""

from __future__ import annotations

import importlib
import inspect
import os
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from openai import AsyncOpenAI
from pydantic import BaseModel

Data, Kept, Settings = TypeVar("Data"), TypeVar("Kept"), TypeVar("Settings")


class State:
    pass


class TaskConfig(BaseModel):
    pass


class TaskData(BaseModel):
    prompt: str | None = None
    system_prompt: str | None = None
    name: str | None = None
    description: str | None = None


class TasksetConfig(BaseModel):
    id: str = ""
    task: TaskConfig = TaskConfig()


class AgentConfig(BaseModel, extra="forbid"):
    harness: dict[str, Any] = {"id": "bash"}
    runtime: dict[str, Any] = {"type": "prime"}


class EnvConfig(BaseModel):
    agent: AgentConfig = AgentConfig()
    taskset: Any = None


class Task(Generic[Data, Kept, Settings]):
    def __init__(self, data: Any, config: Any) -> None:
        self.data, self.config = data, config

    @classmethod
    def data_type(cls) -> Any:
        return cls.__orig_bases__[0].__args__[0]


class Taskset(Generic[Kept, Settings]):
    bounded = True

    def __init__(self, config: Any) -> None:
        self.config = config

    def __iter__(self) -> Any:
        return iter(self.load())

    @classmethod
    def task_type(cls) -> Any:
        return cls.__orig_bases__[0].__args__[0]


class EvalClientConfig(BaseModel):
    base_url: str
    api_key_var: str


SamplingConfig = ModelContext = SimpleNamespace


def reward(weight: float) -> Any:
    return lambda function: setattr(function, "weight", weight) or function


def metric(function: Any) -> Any:
    function.weight = None
    return function


def taskset_of(name: str) -> Any:
    module = importlib.import_module(name.replace("-", "_"))
    return getattr(module, module.__all__[0])


def default_harness_id(name: str) -> str:
    return "bash"


def env_config_type(name: str, env_id: str) -> type[EnvConfig]:
    return EnvConfig


def resolve_env_config(block: dict[str, Any]) -> EnvConfig:
    settings = taskset_of(block["taskset"]["id"]).__orig_bases__[0].__args__[1]
    return EnvConfig(**block | {"taskset": settings(**block["taskset"])})


def load_environment(config: EnvConfig) -> Environment:
    assert config.agent.runtime == {"type": "subprocess"}
    assert config.agent.harness == {"id": "null"}
    return Environment(config)


class Environment:
    def __init__(self, config: EnvConfig) -> None:
        self.config = config
        self.taskset = taskset_of(config.taskset.id)(config.taskset)

    @asynccontextmanager
    async def serving(self) -> Any:
        yield

    def slots(self, task: Any) -> list[Any]:
        return [task]

    async def run_slot(self, task: Any, context: Any) -> Any:
        client = AsyncOpenAI(
            base_url=context.client.base_url, api_key=os.environ[context.client.api_key_var]
        )
        answer = await client.chat.completions.create(
            model=context.model, messages=[{"role": "user", "content": task.data.prompt}]
        )
        own = SimpleNamespace(
            name="agent", trainable=True, config=SimpleNamespace(client=context.client)
        )
        trace = SimpleNamespace(
            agent=own, branches=[SimpleNamespace(messages=[answer.choices[0].message])],
            rewards={}, metrics={}, errors=[], stop_condition="agent_completed",
        )  # fmt: skip
        for name, function in inspect.getmembers(task, inspect.ismethod):
            if not hasattr(function, "weight"):
                continue
            value = await function(trace)
            if function.weight is None:
                trace.metrics[name] = value
            else:
                trace.rewards[name] = SimpleNamespace(value=function.weight * value)
        trace.reward = sum(part.value for part in trace.rewards.values())
        return SimpleNamespace(ok=True, traces=[trace], errors=[])
