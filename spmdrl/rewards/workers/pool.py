"""Processes that run a user's functions, and can be killed: rewards, tools, an environment."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from types import ModuleType
from typing import Any, NamedTuple

import cloudpickle

from spmdrl.config import AgentConfig, ConfigError, MultiTurnConfig, RewardConfig
from spmdrl.rewards.builtin import IMPORTED_FIRST
from spmdrl.rewards.workers.process import Kind, Setup, WorkerProcess
from spmdrl.rewards.workers.stateful_tools import Objects
from spmdrl.rewards.workers.worker import RewardResult, with_cache

CACHED = type(functools.cache(len))
MOST_HOMES = 1 << 16  # of samples that went elsewhere before they were over, for the most part

Function = Callable[..., Any]
Limits = RewardConfig | MultiTurnConfig | AgentConfig


class Job(NamedTuple):
    function: int  # its index
    arguments: dict[str, Any]
    future: Future[Any]
    home: str = ""  # of the same function, those of one home go to the same worker
    times: int = 1  # the time limit, where it has no home yet


class Jobs:
    """The jobs that wait for a worker: for any, or for the one where a job's home is."""

    def __init__(self, num_workers: int) -> None:
        self.shared: deque[Job] = deque()
        self.own: list[deque[Job]] = [deque() for _ in range(num_workers)]
        self.homes: OrderedDict[tuple[int, str], int] = OrderedDict()
        self.closed = False
        self.changed = threading.Condition()

    def put(self, job: Job) -> None:
        with self.changed:
            home = self.homes.get((job.function, job.home))
            (self.shared if home is None else self.own[home]).append(job)
            self.changed.notify_all()

    def take(self, worker: int) -> Job | None:
        """The next of `worker`'s; None: there will be no more."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self.own[worker] or self.shared)
            if self.closed:
                return None
            job = (self.own[worker] or self.shared).popleft()
            if not job.home:
                return job
            has_home = (job.function, job.home) in self.homes
            self.homes[job.function, job.home] = worker
            if len(self.homes) > MOST_HOMES:
                self.homes.popitem(last=False)
            return job._replace(times=1) if has_home else job

    def give_up(self, home: str, last: Job) -> None:
        """last: for the worker that has it, if one has; what is put there later may go to any."""
        with self.changed:
            worker = self.homes.pop((last.function, home), None)
            if worker is not None:
                self.own[worker].append(last)
                self.changed.notify_all()

    def lost(self, worker: int) -> None:
        """Its process has ended: nothing is at home there."""
        with self.changed:
            self.homes = OrderedDict((k, w) for k, w in self.homes.items() if w != worker)

    def close(self) -> list[Job]:
        """Closes the queue; returns the jobs that were not taken."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
            return [job for jobs in (self.shared, *self.own) for job in jobs]


class WorkerPool:
    """Worker processes, each driven by a thread of its own."""

    def __init__(
        self, functions: list[Function], config: Limits, kind: Kind = RewardResult
    ) -> None:
        """kind: what is made of what a function returns, and of a call that failed."""
        self.timeout_s = config.timeout_s
        self.index = {id(function): i for i, function in enumerate(functions)}
        self.objects = [function for function in functions if isinstance(function, Objects)]
        self.jobs = Jobs(config.workers)
        setup = worker_setup(functions, kind)
        self.workers = [WorkerProcess(setup) for _ in range(config.workers)]
        self.threads = [
            threading.Thread(target=self.serve, args=(i, w), name="worker", daemon=True)
            for i, w in enumerate(self.workers)
        ]
        for thread in self.threads:
            thread.start()

    def submit(
        self, function: Function, arguments: dict[str, Any], home: str = "", times: int = 1
    ) -> Future[Any]:
        """home: what is called with the same runs in the same process, as long as that lives.
        times: how often the time limit the call may take where that is another one."""
        assert not self.jobs.closed, "nobody would take the job"
        future: Future[Any] = Future()
        self.jobs.put(Job(self.index[id(function)], arguments, future, home, times))
        return future

    def give_up(self, home: str) -> None:
        """The objects of a sample that is over."""
        for function in self.objects:
            no_calls = {"key": home, "given": {}, "before": [], "calls": []}
            self.jobs.give_up(home, Job(self.index[id(function)], no_calls, Future()))

    def serve(self, number: int, process: WorkerProcess) -> None:
        with contextlib.suppress(OSError):  # the first call tries again and tells
            process.start()
        while (job := self.jobs.take(number)) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue  # nobody waits for it any more
            before, limit_s = process.starts, job.times * self.timeout_s
            try:
                result = process.call(job.function, job.arguments, limit_s)
                if process.starts != before:
                    self.jobs.lost(number)
                job.future.set_result(result)
            except Exception as error:  # noqa: BLE001  it is raised by whoever waits for the result
                process.stop()
                job.future.set_exception(error)
        process.stop()

    def close(self) -> None:
        """Drops what has not started and kills what runs."""
        for job in self.jobs.close():
            job.future.cancel()
        for process in self.workers:
            process.kill()
        for thread in self.threads:
            thread.join(timeout=5)


def worker_setup(
    functions: list[Function], kind: Kind, loop: dict[str, Any] | None = None
) -> Setup:
    """Returns what a worker receives first. Raises ConfigError where a function cannot be pickled.

    loop: of a worker for coroutine functions, the arguments of worker_loop.serve.

    Functions of a config file and of its neighbours, lambdas and closures travel by value, with the
    globals they use; those of modules on sys.path are imported by the worker.
    """
    by_value = modules_by_value(functions)
    for module in by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        pickled = by_value_of(functions, {"__main__", *(module.__name__ for module in by_value)})
    except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
        names = ", ".join(map(name_of, functions))
        raise ConfigError(
            f"cannot be sent to a worker process ({names}): {error}. Create clients, "
            "locks and open files inside the function, or in a module that it imports."
        ) from error
    finally:
        for module in by_value:
            cloudpickle.unregister_pickle_by_value(module)
    imports = [IMPORTED_FIRST[function] for function in functions if function in IMPORTED_FIRST]
    sent = {"functions": pickled, "sys_path": sys.path, "imports": imports, "loop": loop,
            "kind": kind.__name__}  # fmt: skip
    return Setup(pickle.dumps(sent), kind)


class ByValue(cloudpickle.Pickler):
    """Sends functions of functools.cache and lru_cache by value too, which cloudpickle sends as
    names alone. modules: names of those whose functions travel by value.
    """

    def __init__(self, file: io.BytesIO, modules: Collection[str]) -> None:
        super().__init__(file)
        self.modules = modules

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CACHED) and obj.__module__ in self.modules:
            return with_cache, (obj.__wrapped__, obj.cache_parameters())
        return super().reducer_override(obj)


def by_value_of(functions: list[Function], modules: Collection[str]) -> bytes:
    """Raises what cloudpickle raises."""
    file = io.BytesIO()
    ByValue(file, modules).dump(functions)
    return file.getvalue()


def modules_by_value(functions: list[Function]) -> list[ModuleType]:
    """The functions' modules that a worker could not import, and the like from their folders.

    Without __main__: cloudpickle sends what is defined there by value anyway.
    """
    parts = [part for function in functions for part in parts_of(function)]
    modules = [sys.modules.get(module_name(part)) for part in parts]
    own = {m for m in modules if m is not None and not is_importable(m)}
    folders = {folder_of(m) for m in own} - {""}
    loaded = [m for m in list(sys.modules.values()) if folder_of(m) in folders]
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


def module_name(function: Function) -> str:
    """Returns the name of the module that defines a function."""
    return getattr(function, "__module__", None) or type(function).__module__


def parts_of(function: Function) -> list[Function]:
    """Returns the functions that one is made of: an object's class, and of a partial the function
    in it and those that it is given.
    """
    function = function.cls if isinstance(function, Objects) else function
    given: list[Any] = []
    while isinstance(function, functools.partial):
        given += [*function.args, *function.keywords.values()]
        function = function.func
    return [function, *(part for each in given if callable(each) for part in parts_of(each))]


def innermost(function: Function) -> Function:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def name_of(function: Function) -> str:
    named = innermost(function.cls) if isinstance(function, Objects) else function
    return getattr(named, "__qualname__", None) or repr(named)
