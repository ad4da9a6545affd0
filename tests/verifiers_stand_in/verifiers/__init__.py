"""A stand-in of the package verifiers with its classic API (0.1.14 to 0.3), as far as the
environments of the tests use it. The package itself cannot be installed beside vLLM.
"""

from __future__ import annotations

import importlib
import inspect
import json
from typing import Any

from verifiers import envs  # noqa: F401


def load_environment(env_id: str, **args: Any) -> Environment:
    return importlib.import_module(env_id.replace("-", "_")).load_environment(**args)


class OpenAIChatCompletionsClient:
    def __init__(self, client: Any) -> None:
        self.client = client


class OpenAICompletionsClient(OpenAIChatCompletionsClient):
    pass


class Rubric:
    def __init__(self, funcs: list[Any], weights: list[float] | None = None) -> None:
        self.funcs, self.weights = funcs, weights or [1.0] * len(funcs)

    def score(self, state: dict[str, Any]) -> None:
        given = {"completion": state["completion"], "answer": state["answer"], "state": state}
        state["metrics"] = {
            f.__name__: f(**{name: given[name] for name in inspect.signature(f).parameters})
            for f in self.funcs
        }
        parts = zip(state["metrics"].values(), self.weights, strict=True)
        state["reward"] = sum(value * weight for value, weight in parts)


class Environment:
    message_type = "chat"
    requires_group_rollouts = False
    tools: list[Any] = []  # noqa: RUF012

    def __init__(
        self, dataset: list[dict[str, Any]], rubric: Rubric, eval_dataset: Any = None,
        max_turns: int = 1,
    ) -> None:  # fmt: skip
        self.data = [
            row | {"example_id": i, "prompt": [{"role": "user", "content": row["question"]}]}
            for i, row in enumerate(dataset)
        ]
        self.rubric, self.max_turns, self.sampling_args = rubric, max_turns, {"n": 1}

    def get_dataset(self) -> list[dict[str, Any]]:
        return self.data

    get_eval_dataset = get_dataset

    async def setup_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    async def env_response(self, messages: list[Any], state: dict[str, Any]) -> list[Any]:
        return []

    async def run_rollout(
        self, input: dict[str, Any], client: Any, model: str, sampling_args: dict[str, Any]
    ) -> dict[str, Any]:
        state = {**input, "error": None, "completion": [], "trajectory": []}
        state["stop_condition"] = "max_turns_reached"
        state = await self.setup_state(state)
        try:
            await self.talk(state, client.client, model, sampling_args)
        except Exception as error:  # noqa: BLE001
            state["error"] = {"error": "ModelError", "error_chain_str": repr(error)}
        self.rubric.score(state)
        return state

    async def talk(self, state: dict[str, Any], client: Any, model: str, sampling: Any) -> None:
        tools = [schema_of(tool) for tool in self.tools]
        for turn in range(self.max_turns):
            if turn:
                state["completion"] += await self.env_response(state["completion"], state)
            answer = await client.chat.completions.create(
                model=model, messages=[*state["prompt"], *state["completion"]],
                **({"tools": tools} if tools else {}), **sampling,
            )  # fmt: skip
            said = answer.choices[0].message.model_dump(exclude_none=True)
            state["completion"].append(said)
            state["trajectory"].append(said)
            if self.tools and not said.get("tool_calls"):
                state["stop_condition"] = "no_tools_called"
                return


class SingleTurnEnv(Environment):
    pass


class MultiTurnEnv(Environment):
    pass


class ToolEnv(Environment):
    def __init__(self, tools: list[Any], **given: Any) -> None:
        super().__init__(**given)
        self.tools = tools

    async def env_response(self, messages: list[Any], state: dict[str, Any]) -> list[Any]:
        tools = {tool.__name__: tool for tool in self.tools}
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": str(
                tools[call["function"]["name"]](**json.loads(call["function"]["arguments"]))
            )}
            for call in messages[-1]["tool_calls"]
        ]  # fmt: skip


def schema_of(tool: Any) -> dict[str, Any]:
    names = list(inspect.signature(tool).parameters)
    parameters = {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
    about = {"name": tool.__name__, "description": tool.__doc__, "parameters": parameters}
    return {"type": "function", "function": about}
