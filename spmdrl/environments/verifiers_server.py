"""Serves an environment of the package verifiers to an engine, in an interpreter that has it.

Started by path (`python verifiers_server.py TASK SPEC`), since that interpreter has neither spmdrl
nor its packages: uses verifiers and the standard library only. SPEC is a JSON object with
`environment` and `args`. TASK is one of

- check: writes {"verifiers": its version}, or {"failed": why there is no such environment}.
- rows: writes a line for each row of the data set; SPEC has `split` and `limit`, too.
- serve: writes {"ready": true} or {"failed": traceback}. Then each line of stdin is a request,
  {"number", "row", "base_url", "api_key", "model"}, and has a reply, {"number", "output"} or
  {"number", "error"}; {"cancel": number} gives one up. The end of stdin ends the process.

Two kinds of environments are known. Classic ones (verifiers up to 0.3) come from
`verifiers.load_environment(name, **args)`; those of `verifiers.v1` (0.4) are tasksets.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # the script's folder has modules with names of installed packages

import asyncio
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

KEY = "SPMDRL_POLICY_API_KEY"  # the variable from which verifiers.v1 reads the key
MOST_REASON = 4000  # characters of an error, those of its end
CLOSE_LIMIT_S = 10.0  # for environments to release what they hold, once nobody asks any more

Row = dict[str, Any]


def main(task: str, spec: dict[str, Any]) -> None:
    out = own_stdout()
    if task == "check":
        say(out, checked(spec["environment"]))
    elif task == "rows":
        for row in load(spec).rows(spec["split"], spec["limit"]):
            say(out, row)
    else:
        asyncio.run(serve(spec, out))


def own_stdout() -> IO[str]:
    """Returns what stdout was. What environments print goes to stderr from now on."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def say(out: IO[str], message: dict[str, Any]) -> None:
    """Writes a message as a line of JSON, other objects in it as text."""
    out.write(json.dumps(message, default=str) + "\n")
    out.flush()


# ---- which environment it is


def checked(name: str) -> dict[str, Any]:
    """Returns verifiers' version, or why there is no such environment. Imports nothing: that
    would take seconds."""
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        return {"failed": "it has no package verifiers: pip install verifiers, and the environment"}
    package = importlib.util.find_spec("verifiers")
    own = [
        Path(place, "v1/tasksets")
        for place in (package and package.submodule_search_locations) or ()
    ]
    module = module_of(name)
    if exists(module.partition(".")[0]) or any((place / module).is_dir() for place in own):
        return {"verifiers": version}
    return {"failed": f"it has no module {module!r}, of the environment {name!r}"}


def exists(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def module_of(name: str) -> str:
    """Returns the module of an environment: "owner/my-env@1.0" is my_env, as verifiers has it."""
    name = name.partition(":")[0].rpartition("/")[2].partition("@")[0]
    return name.replace("-", "_")


def load(spec: dict[str, Any]) -> Classic | Taskset:
    """Loads an environment. Raises whatever that does."""
    name, args = spec["environment"], spec["args"]
    return Classic(name, args) if is_classic(name) else Taskset(name, args)


def is_classic(name: str) -> bool:
    """Whether verifiers' older API has the environment, from version 0.4 on there is none."""
    if ":" in name:
        return True
    if not (exists("verifiers.legacy") or exists("verifiers.envs")):
        return False
    with contextlib.suppress(ModuleNotFoundError):
        return hasattr(importlib.import_module(module_of(name)), "load_environment")
    return False


class Classic:
    """An environment of `verifiers.load_environment`, or of "module:callable"."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        import verifiers

        if ":" in name:
            make: Callable[..., Any] = importlib.import_module(module_of(name))  # type: ignore
            for part in name.partition(":")[2].split("."):
                make = getattr(make, part)
            self.env = make(**args)
        else:
            self.env = verifiers.load_environment(name.partition("@")[0], **args)
        if self.env.requires_group_rollouts:
            raise ValueError(
                f"{name}: its rubric compares the rollouts of a group, and here each is scored by "
                "itself"
            )
        self.http: Any = None

    def rows(self, split: str, limit: int | None) -> Iterator[Row]:
        is_eval = split == "eval"
        data = self.env.get_eval_dataset() if is_eval else self.env.get_dataset()
        for row in itertools.islice(data, limit):
            prompt, answer = row["prompt"], row.get("answer", "")
            yield {
                "prompt": asked(prompt) if isinstance(prompt, str) else prompt,
                "ground_truth": answer if isinstance(answer, str) else json.dumps(answer),
                "row": row,
            }

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Holds one HTTP client for all rollouts: each of its own would load certificates."""
        from openai import DefaultAsyncHttpxClient

        limits = importlib.import_module("httpx").Limits(max_connections=None)
        async with DefaultAsyncHttpxClient(timeout=None, limits=limits) as self.http:
            yield

    async def play(self, row: Row, base_url: str, api_key: str, model: str) -> dict[str, Any]:
        """Plays a row and scores it by the environment's rubric. Raises RuntimeError for a rollout
        that verifiers says has failed.
        """
        import verifiers as vf
        from openai import AsyncOpenAI

        connection = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=self.http)
        is_chat = self.env.message_type == "chat"
        kind = vf.OpenAIChatCompletionsClient if is_chat else vf.OpenAICompletionsClient
        output = await self.env.run_rollout(row, kind(connection), model, self.sampling_args())
        if output["error"]:
            raise RuntimeError(told(output["error"]))
        about = {"stop_condition": output["stop_condition"]}
        return scored(output["reward"], output["metrics"] or {}, about)

    def sampling_args(self) -> dict[str, Any]:
        return dict(self.env.sampling_args)


class Taskset:
    """An environment of `verifiers.v1`: a taskset and the agents that play it.

    args: the fields of verifiers' [env] block. A role for which they name neither a harness nor a
    runtime has the harness "null", a loop of messages and tool calls, in a process on this host,
    unless the taskset brings a harness; verifiers' own choice is a shell in a rented sandbox.
    """

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        import verifiers.v1 as vf

        self.vf, self.name = vf, name
        block = {**args, "taskset": {**args.get("taskset", {}), "id": name}}
        if vf.default_harness_id(name) == "bash":
            for role in self.roles(block):
                given = dict(block.get(role, {}))
                if not {"harness", "runtime"} & set(given):
                    given |= {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
                block[role] = given
        self.env = vf.load_environment(vf.resolve_env_config(block))
        self.task_class = type(self.env.taskset).task_type()

    def roles(self, block: dict[str, Any]) -> list[str]:
        fields = self.vf.env_config_type(self.name, block.get("id", "")).model_fields
        return [n for n, field in fields.items() if isinstance(field.default, self.vf.AgentConfig)]

    def rows(self, split: str, limit: int | None) -> Iterator[Row]:
        if split != "train":
            raise ValueError(f"a taskset has no split {split!r}: its args choose the tasks")
        if limit is None and not self.env.taskset.bounded:
            raise ValueError(f"the taskset {self.name} never ends: give a limit")
        for task in itertools.islice(self.env.taskset, limit):
            row = task.data.model_dump(mode="json")
            answer = row.get("answer", "")
            yield {
                "prompt": list(self.prompt(row)),
                "ground_truth": answer if isinstance(answer, str) else json.dumps(answer),
                "row": row,
            }

    def prompt(self, row: Row) -> Iterable[dict[str, Any]]:
        """Returns what the policy sees first; of a task that a user opens, what it is called."""
        if row["system_prompt"]:
            yield {"role": "system", "content": row["system_prompt"]}
        if isinstance(row["prompt"], list):
            yield from ({k: m[k] for k in ("role", "content")} for m in row["prompt"])
        else:
            yield from asked(row["prompt"] or row["description"] or row["name"] or self.name)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with self.env.serving():
            yield

    async def play(self, row: Row, base_url: str, api_key: str, model: str) -> dict[str, Any]:
        """Plays a task as an episode. Raises RuntimeError for one that has failed, or in which the
        policy plays several roles.
        """
        vf = self.vf
        os.environ[KEY] = api_key  # the same for all rows of a run
        data = self.task_class.data_type().model_validate(row)
        (slot,) = self.env.slots(self.task_class(data, self.env.config.taskset.task))
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=KEY)
        context = vf.ModelContext(client=client, model=model, sampling=vf.SamplingConfig())
        episode = await self.env.run_slot(slot, context)
        if not episode.ok:
            errors = [e for part in (episode, *episode.traces) for e in part.errors]
            raise RuntimeError("\n".join(f"{e.type}: {e.message}" for e in errors) or "not ok")
        trace = self.trained(episode.traces, base_url)
        rewards = {name: part.value for name, part in trace.rewards.items() if part is not None}
        about = {"stop_condition": trace.stop_condition}
        return scored(trace.reward, {**rewards, **trace.metrics}, about)

    def trained(self, traces: list[Any], base_url: str) -> Any:
        """Returns the trace of the role that the policy plays. All that it says is trained on with
        one reward, so it must be one. Raises RuntimeError.
        """
        own = [t for t in traces if t.agent.config.client.base_url == base_url]
        if len(own) != 1 or not own[0].agent.trainable:
            names = ", ".join(str(t.agent.name) for t in own)
            raise RuntimeError(
                f"the policy plays the roles {names or 'of nobody'} of {self.name}; it is trained "
                "in one, once an episode: give each other role a client (and a model) in args"
            )
        return own[0]


def asked(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def scored(reward: Any, metrics: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """Returns a reward and its parts, as agents return them."""
    numbers = {name: float(value) for name, value in metrics.items() if value is not None}
    return {**about, **numbers, "score": float(reward)}


def told(error: Any) -> str:
    """Returns what verifiers says of an error, in all its versions."""
    if isinstance(error, dict):
        return "\n".join(str(text) for text in error.values() if text)
    return str(error)


# ---- requests and replies


async def serve(spec: dict[str, Any], out: IO[str]) -> None:
    """Answers requests until stdin ends."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            environment = load(spec)
            await stack.enter_async_context(environment.serving())
        except Exception:  # noqa: BLE001  of the environment: the trainer tells
            say(out, {"failed": traceback.format_exc()[-MOST_REASON:]})
            return
        say(out, {"ready": True})
        await answer_all(environment, out)


async def answer_all(environment: Classic | Taskset, out: IO[str]) -> None:
    tasks: dict[int, asyncio.Task[None]] = {}
    requests: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    threading.Thread(target=read, args=(asyncio.get_running_loop(), requests), daemon=True).start()
    while (request := await requests.get()) is not None:
        if "cancel" in request:
            if (task := tasks.get(request["cancel"])) is not None:
                task.cancel()
            continue
        number = request.pop("number")
        tasks[number] = asyncio.create_task(answer(environment, out, number, request))
        tasks[number].add_done_callback(functools.partial(tasks.pop, number))
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)


def read(loop: asyncio.AbstractEventLoop, requests: asyncio.Queue[dict[str, Any] | None]) -> None:
    """Reads requests. Ends the process some time after stdin did, whatever the environment does."""
    for line in sys.stdin.buffer:
        loop.call_soon_threadsafe(requests.put_nowait, json.loads(line))
    loop.call_soon_threadsafe(requests.put_nowait, None)
    limit = threading.Timer(CLOSE_LIMIT_S, os._exit, (1,))
    limit.daemon = True
    limit.start()


async def answer(
    environment: Classic | Taskset, out: IO[str], number: int, request: dict[str, Any]
) -> None:
    """Plays one row. Says nothing where it was given up."""
    said: dict[str, Any]
    try:
        said = {"output": await environment.play(**request)}
    except Exception:  # noqa: BLE001  of the environment: the sample is invalid
        said = {"error": traceback.format_exc()[-MOST_REASON:]}
    say(out, {"number": number, **said})


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
