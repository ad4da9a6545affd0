"""Processes that run a user's functions, and can be killed: rewards, tools, an environment."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import Pipe
from types import ModuleType
from typing import Any, NamedTuple

import cloudpickle

from spmdrl.config import ConfigError, MultiTurnConfig, RewardConfig
from spmdrl.rewards import worker
from spmdrl.rewards.functions import IMPORTED_FIRST
from spmdrl.rewards.worker import Outcome, Reply
from spmdrl.tool_state import Objects

START_LIMIT_S = 300.0  # for a worker to import what the functions need
MOST_HOMES = 1 << 16  # of samples that went elsewhere before they were over, for the most part

Function = Callable[..., Any]
Kind = type[Outcome] | type[Reply]
Limits = RewardConfig | MultiTurnConfig


class Job(NamedTuple):
    function: int  # its index
    arguments: dict[str, Any]
    future: Future[Any]
    home: str = ""  # of the same function, those of one home go to the same worker
    times: int = 1  # the time limit, where it has no home yet


class Jobs:
    """What waits for a worker: for any, or for the one where a job's home is."""

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
        """Those that were not taken."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
            return [job for jobs in (self.shared, *self.own) for job in jobs]


class WorkerPool:
    """Worker processes, each driven by a thread of its own."""

    def __init__(self, functions: list[Function], config: Limits, kind: Kind = Outcome) -> None:
        """kind: what is made of what a function returns, and of a call that failed."""
        self.timeout_s = config.timeout_s
        self.index = {id(function): i for i, function in enumerate(functions)}
        self.objects = [function for function in functions if isinstance(function, Objects)]
        self.jobs = Jobs(config.workers)
        setup = worker_setup(functions, kind)
        self.workers = [WorkerProcess(setup, kind) for _ in range(config.workers)]
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


class WorkerProcess:
    """One worker process and the pipe to it. Belongs to one thread.

    The kernel kills the process when that thread or the trainer ends. It leads a session of its
    own, so that Ctrl-C does not reach it, and that it is killed with all its children.
    """

    def __init__(self, setup: bytes, kind: Kind) -> None:
        self.setup, self.kind = setup, kind
        self.process: subprocess.Popen | None = None
        self.ready = False  # it has loaded the functions
        self.starts = 0

    def start(self) -> None:
        self.starts += 1
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
            raise ConfigError(
                f"a worker process was not ready after {START_LIMIT_S:g} s of imports"
            )
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError) as error:
            died = f"a worker process {self.stop()} while it loaded your functions"
            raise ConfigError(died) from error
        if answer != worker.READY:
            raise ConfigError(
                "a worker process cannot load your functions (rewards, tools); what they import "
                f"must be installed, or its folder in PYTHONPATH:\n{answer}"
            )
        self.ready = True

    def call(self, index: int, arguments: dict[str, Any], timeout_s: float) -> Any:
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
                return self.kind(*self.pipe.recv())
            self.stop()
            reason = f"timed out after {timeout_s:g} s"
        except (EOFError, OSError):
            reason = f"its process {self.stop()}"
        self.start()
        return self.kind.failed(reason)

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


def worker_setup(functions: list[Function], kind: Kind) -> bytes:
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
            f"cannot be sent to a worker process ({names}): {error}. Create clients, "
            "locks and open files inside the function, or declare it with `async def`, which runs "
            "in the trainer."
        ) from error
    finally:
        for module in by_value:
            cloudpickle.unregister_pickle_by_value(module)
    imports = [IMPORTED_FIRST[function] for function in functions if function in IMPORTED_FIRST]
    return pickle.dumps(
        {"functions": pickled, "sys_path": sys.path, "imports": imports, "kind": kind.__name__}
    )


def modules_by_value(functions: list[Function]) -> list[ModuleType]:
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


def module_name(function: Function) -> str:
    """Of the module that defines a function, the function in a partial, or an object's class."""
    function = function.cls if isinstance(function, Objects) else innermost(function)
    return getattr(function, "__module__", None) or type(function).__module__


def innermost(function: Function) -> Function:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def name_of(function: Function) -> str:
    named = function.cls if isinstance(function, Objects) else function
    return getattr(named, "__qualname__", None) or repr(named)
