"""Runs the user's reward functions off the training thread: in parallel, limited in time, in order.

Plain functions run in worker processes that can be killed, so an endless loop, a hang in C or a
segmentation fault costs one sample. Coroutine functions (judges, remote services) share one event
loop in a thread. A sample without a reward is invalid and says why; it never scores 0.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import Pipe
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist

from spmdrl.config import ConfigError, RewardConfig, RewardFn
from spmdrl.rewards import worker
from spmdrl.rewards.coroutines import LoopThread
from spmdrl.rewards.functions import BUILT_INS, CHECKED_FIRST, IMPORTED_FIRST
from spmdrl.rewards.worker import Outcome
from spmdrl.topology import Topology

if TYPE_CHECKING:
    from spmdrl.types import Sample

START_LIMIT_S = 300.0  # for a worker to import what the reward functions need

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
}


class TooManyInvalid(RuntimeError):
    """More samples than allowed have no reward; the same text on every rank."""


@dataclass(frozen=True)
class Reward:
    """A reward function, and which of ARGUMENTS it takes."""

    function: RewardFn
    arguments: tuple[str, ...]
    is_async: bool


def check(config: RewardConfig) -> None:
    """Raises ConfigError for limits under which nothing would end, or begin."""
    if config.workers < 1 or config.timeout_s <= 0:
        raise ConfigError(
            f"rewards.workers={config.workers} and rewards.timeout_s={config.timeout_s:g}: "
            "expected at least one worker and a time limit above 0"
        )
    if config.max_per_minute < 0 or config.max_concurrent < 0:
        raise ConfigError(
            f"rewards.max_concurrent={config.max_concurrent} and rewards.max_per_minute="
            f"{config.max_per_minute:g}: expected 0 (no limit) or more"
        )


def check_shared(config: RewardConfig, ranks: int) -> None:
    """Raises ConfigError where some of the ranks could call nothing."""
    if 0 < config.max_concurrent < ranks:
        raise ConfigError(
            f"rewards.max_concurrent={config.max_concurrent} is shared by {ranks} ranks: "
            f"place `reward` on at most {config.max_concurrent}"
        )


class RewardRunner:
    """Scores samples with `PpoConfig.reward`. Starts its processes at once and in the background.

    Raises ConfigError for an unknown built-in, a signature that asks for what is not known, and a
    function that cannot be sent to a worker. Use from one thread; `close` when done.
    """

    def __init__(
        self,
        reward: RewardFn | str | Mapping[str, RewardFn | str],
        config: RewardConfig,
        ranks: int = 1,
    ) -> None:
        """ranks: how many have a runner, and share the limits for coroutines."""
        check(config)
        self.config, self.ranks = config, ranks
        self.rewards = resolve_rewards(reward)  # by data_source; None: every data_source
        plain = [r.function for r in self.rewards.values() if not r.is_async]
        self.pool = WorkerPool(plain, config) if plain else None
        is_async = any(r.is_async for r in self.rewards.values())
        if is_async:
            check_shared(config, ranks)
        self.loop = LoopThread(config, ranks) if is_async else None

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

    def score(self, samples: list[Sample], still_going: Callable[[], None] = lambda: None) -> None:
        """Sets reward and reward_info, or invalid, of every sample; returns when all are done.

        still_going is called after each one: slow rewards are no hang.

        Raises ConfigError for a data_source without a reward function, and where a worker process
        cannot load the functions.
        """
        rewards = [self.reward_of(sample.prompt.data_source) for sample in samples]
        if self.loop is not None and self.loop.stuck:
            self.loop.close()
            self.loop = LoopThread(self.config, self.ranks)
        futures = [self.submit(r, sample) for r, sample in zip(rewards, samples, strict=True)]
        for reward, sample, future in zip(rewards, samples, futures, strict=True):
            outcome = self.outcome_of(reward, future)
            sample.reward, sample.invalid = outcome.reward, outcome.invalid
            sample.reward_info, sample.pred = outcome.info, outcome.pred
            still_going()

    def submit(self, reward: Reward, sample: Sample) -> Future[Outcome]:
        arguments = {name: ARGUMENTS[name](sample) for name in reward.arguments}
        if not reward.is_async:
            assert self.pool is not None
            return self.pool.submit(reward.function, arguments)
        assert self.loop is not None
        return self.loop.submit(reward.function, arguments)

    def outcome_of(self, reward: Reward, future: Future[Outcome]) -> Outcome:
        """A worker answers or is killed; a coroutine may do neither."""
        if not reward.is_async:
            return future.result()
        assert self.loop is not None
        return self.loop.outcome(future)

    def close(self) -> None:
        """Ends the processes and the event loop."""
        if self.pool is not None:
            self.pool.close()
        if self.loop is not None:
            self.loop.close()


class Job(NamedTuple):
    function: int  # its index
    arguments: dict[str, Any]
    future: Future[Outcome]


class WorkerPool:
    """Worker processes, each driven by a thread of its own that takes jobs from one queue."""

    def __init__(self, functions: list[RewardFn], config: RewardConfig) -> None:
        self.timeout_s = config.timeout_s
        self.index = {id(function): i for i, function in enumerate(functions)}
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.closed = False
        setup = worker_setup(functions)
        self.workers = [WorkerProcess(setup) for _ in range(config.workers)]
        self.threads = [
            threading.Thread(target=self.serve, args=(w,), name="reward worker", daemon=True)
            for w in self.workers
        ]
        for thread in self.threads:
            thread.start()

    def submit(self, function: RewardFn, arguments: dict[str, Any]) -> Future[Outcome]:
        assert not self.closed, "nobody would take the job"
        future: Future[Outcome] = Future()
        self.jobs.put(Job(self.index[id(function)], arguments, future))
        return future

    def serve(self, process: WorkerProcess) -> None:
        with contextlib.suppress(OSError):  # the first call tries again and tells
            process.start()
        while (job := self.jobs.get()) is not None:
            try:
                job.future.set_result(process.call(job.function, job.arguments, self.timeout_s))
            except Exception as error:  # noqa: BLE001  it is raised by whoever waits for the result
                process.stop()
                job.future.set_exception(error)
        process.stop()

    def close(self) -> None:
        """Drops what has not started and kills what runs."""
        self.closed = True
        with contextlib.suppress(Empty):
            while job := self.jobs.get_nowait():
                job.future.cancel()
        for _ in self.threads:
            self.jobs.put(None)
        for process in self.workers:
            process.kill()
        for thread in self.threads:
            thread.join(timeout=5)


class WorkerProcess:
    """One reward process and the pipe to it. Belongs to one thread.

    The kernel kills the process when that thread or the trainer ends. It leads a session of its
    own, so that Ctrl-C does not reach it, and that it is killed with all its children.
    """

    def __init__(self, setup: bytes) -> None:
        self.setup = setup
        self.process: subprocess.Popen | None = None
        self.ready = False  # it has loaded the functions

    def start(self) -> None:
        self.pipe, theirs = Pipe()
        fd, script = theirs.fileno(), worker.__file__
        try:
            self.process = subprocess.Popen(
                # -P: the script's folder must not come before the standard library
                [sys.executable, "-P", script, str(fd), str(os.getpid())],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            theirs.close()
        self.ready = False
        with contextlib.suppress(BrokenPipeError):  # it died at once, which wait_ready will tell
            self.pipe.send_bytes(self.setup)

    def wait_ready(self) -> None:
        """Raises ConfigError where the functions cannot be loaded."""
        if not self.pipe.poll(START_LIMIT_S):
            raise ConfigError(f"a reward worker was not ready after {START_LIMIT_S:g} s of imports")
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError) as error:
            died = f"a reward worker {self.stop()} while it loaded the reward functions"
            raise ConfigError(died) from error
        if answer != worker.READY:
            raise ConfigError(
                "a reward worker cannot load the reward functions; what they import must be "
                f"installed, or its folder in PYTHONPATH:\n{answer}"
            )
        self.ready = True

    def call(self, index: int, arguments: dict[str, Any], timeout_s: float) -> Outcome:
        """Runs one function; afterwards a worker is there, the same or a fresh one.

        `timeout_s` does not count the start of a worker. Raises ConfigError as wait_ready.
        """
        if self.ready and self.pipe.poll():  # it owes nothing, so this is its end: died when idle
            self.stop()
        if self.process is None:
            self.start()
        if not self.ready:
            self.wait_ready()
        try:
            self.pipe.send((index, arguments))
            if self.pipe.poll(timeout_s):
                return Outcome(*self.pipe.recv())
            self.stop()
            reason = f"timed out after {timeout_s:g} s"
        except (EOFError, OSError):
            reason = f"the reward process {self.stop()}"
        self.start()
        return Outcome(None, {}, reason)

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self) -> str:
        """Kills the process with its children, and says how it ended."""
        if self.process is None:
            return "was not running"
        self.kill()
        self.pipe.close()
        code = self.process.wait()
        self.process, self.ready = None, False
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def worker_setup(functions: list[RewardFn]) -> bytes:
    """What a worker receives first. Raises ConfigError where a function cannot be pickled.

    Functions of a config file and of its neighbours, lambdas and closures travel by value, with
    the globals they use; those of modules on sys.path are imported by the worker.
    """
    by_value = modules_by_value(functions)
    for module in by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        pickled = cloudpickle.dumps(functions)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
        names = ", ".join(map(name_of, functions))
        raise ConfigError(
            f"the reward cannot be sent to a worker process ({names}): {error}. Create clients, "
            "locks and open files inside the function, or declare it with `async def`, which runs "
            "in the trainer."
        ) from error
    finally:
        for module in by_value:
            cloudpickle.unregister_pickle_by_value(module)
    imports = [IMPORTED_FIRST[function] for function in functions if function in IMPORTED_FIRST]
    return pickle.dumps({"functions": pickled, "sys_path": sys.path, "imports": imports})


def modules_by_value(functions: list[RewardFn]) -> list[ModuleType]:
    """The functions' modules that a worker could not import, and the like from their folders.

    Without __main__: cloudpickle sends what is defined there by value anyway.
    """
    modules = [sys.modules.get(module_name(function)) for function in functions]
    own = {m for m in modules if m is not None and not is_importable(m)}
    folders = {folder_of(m) for m in own} - {""}
    loaded = [m for m in sys.modules.values() if folder_of(m) in folders]
    found = [*own, *(m for m in loaded if m not in own and not is_importable(m))]
    return [module for module in found if module.__name__ != "__main__"]


def folder_of(module: ModuleType) -> str:
    return os.path.dirname(getattr(module, "__file__", None) or "")


def is_importable(module: ModuleType) -> bool:
    """Whether a fresh process with our sys.path finds this very module by its name."""
    parent = module.__name__.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None)
    for finder in sys.meta_path:
        spec = finder.find_spec(module.__name__, path)
        if spec is not None:
            return spec.origin == getattr(module, "__file__", spec.origin)
    return False


def resolve_rewards(
    reward: RewardFn | str | Mapping[str, RewardFn | str],
) -> dict[str | None, Reward]:
    """By data_source; None stands for every data_source. Raises ConfigError."""
    if not isinstance(reward, Mapping):
        return {None: resolve_reward(reward)}
    if not reward:
        raise ConfigError("`reward` is an empty mapping; expected {data_source: function or name}")
    return {source: resolve_reward(each) for source, each in reward.items()}


def needs_truth(
    reward: RewardFn | str | Mapping[str, RewardFn | str],
) -> Callable[[str], bool]:
    """Whether the reward of a data_source cannot be called without a ground truth.

    What is no reward function is not told here, but where rewards are resolved.
    """

    def needs(data_source: str) -> bool:
        found = reward.get(data_source) if isinstance(reward, Mapping) else reward
        function = BUILT_INS.get(found) if isinstance(found, str) else found
        if not callable(function):
            return False
        with contextlib.suppress(ValueError, TypeError):
            truth = inspect.signature(function).parameters.get("ground_truth")
            return truth is not None and truth.default is truth.empty
        return False

    return needs


def resolve_reward(reward: RewardFn | str) -> Reward:
    if isinstance(reward, str):
        if reward not in BUILT_INS:
            near = difflib.get_close_matches(reward, BUILT_INS, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ConfigError(f"no built-in reward '{reward}'; there are {list(BUILT_INS)}{hint}")
        reward = BUILT_INS[reward]
    if not callable(reward):
        raise ConfigError(f"a reward is a function or one of {list(BUILT_INS)}, got {reward!r}")
    if (needs := innermost(reward)) in CHECKED_FIRST:
        CHECKED_FIRST[needs]()
    is_async = inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(
        getattr(type(reward), "__call__", None)  # noqa: B004  an object with async __call__
    )
    return Reward(reward, arguments_of(reward), is_async)


def arguments_of(function: RewardFn) -> tuple[str, ...]:
    """The names in ARGUMENTS that `function` takes by keyword; all with **kwargs.

    Raises ConfigError for a required parameter that is none of them.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the reward {name_of(function)} has no readable signature") from error
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        names = tuple(ARGUMENTS)
    else:
        by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names = tuple(p.name for p in parameters if p.kind in by_keyword and p.name in ARGUMENTS)
    for p in parameters:
        required = p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        if required and (p.name not in ARGUMENTS or p.kind == p.POSITIONAL_ONLY):
            raise ConfigError(
                f"the reward {name_of(function)} requires '{p.name}', which is not known by "
                f"keyword. A reward takes any of {', '.join(ARGUMENTS)}; give other parameters a "
                "default."
            )
    return names


def module_name(function: RewardFn) -> str:
    """Of the module that defines a function, the function in a partial, or an object's class."""
    function = innermost(function)
    return getattr(function, "__module__", None) or type(function).__module__


def innermost(function: RewardFn) -> RewardFn:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def name_of(function: RewardFn) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


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
    if num_invalid <= config.max_invalid_fraction * num_samples:
        return
    quoted = int(counts[:, 0].nonzero()[0])
    story: list[Any] = [None]
    if topology.rank == quoted:
        reason = (invalid[0].invalid or "").strip().splitlines()
        where = f"prompt {invalid[0].prompt.id} on rank {topology.ranks[quoted]}"
        story = [f"{where}: {reason[-1] if reason else ''}"]
    dist.broadcast_object_list(story, group=topology.group, group_src=quoted)
    raise TooManyInvalid(
        f"{num_invalid} of {num_samples} samples have no reward, more than "
        f"rewards.max_invalid_fraction={config.max_invalid_fraction} allows. First: {story[0]}"
    )
