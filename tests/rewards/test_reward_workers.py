"""How a reward fails, costs one sample and ends, in the processes that run it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from reward_processes import children, make_leave_children, run, sample, wait_until

from spmdrl.cli.arguments import load_config
from spmdrl.config import ConfigError, PpoConfig, RewardConfig
from spmdrl.rewards.runner import RewardRunner
from spmdrl.rewards.workers import keeper

pytestmark = pytest.mark.clock


def make_misbehave():
    """Nested, so that it travels by value and workers do not import this file and torch."""

    def misbehave(response):
        if response == "raise":
            raise ValueError("no such unit")
        if response == "sys.exit":
            sys.exit(2)
        if response == "sleep":
            time.sleep(1e6)
        if response == "loop":
            while True:
                pass
        if response == "C":  # holds the interpreter lock and sees no signal: only SIGKILL ends it
            import re

            re.match(r"(a+)+$", "a" * 60 + "b")
        if response == "stubborn":
            for name in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
                signal.signal(name, signal.SIG_IGN)
            time.sleep(1e6)
        if response == "os._exit":
            os._exit(3)
        if response == "segfault":
            import ctypes

            ctypes.string_at(0)
        if response == "close":
            os.closerange(3, 1 << 16)
        if response == "replace":
            null = os.open("/dev/null", os.O_RDWR)
            for fd in set(map(int, os.listdir("/proc/self/fd"))) - {0, 1, 2, null}:
                os.dup2(null, fd)
        if response == "write":
            for fd in map(int, os.listdir("/proc/self/fd")):
                with contextlib.suppress(OSError):
                    os.write(fd, b"" if fd < 3 else b"\x00\x00\x00\x05hello")
        if response == "Ctrl-C":
            raise KeyboardInterrupt
        if response == "of its own":

            class Stop(BaseException):
                pass

            raise Stop("now")
        if response == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if response == "kill above":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(10)
        return 1.0

    return misbehave


misbehave = make_misbehave()


REASONS = {
    "raise": "ValueError: no such unit",
    "sys.exit": "SystemExit: 2",
    "sleep": "timed out after 1 s",
    "loop": "timed out after 1 s",
    "C": "timed out after 1 s",
    "stubborn": "timed out after 1 s",
    "os._exit": "its process exited with code 3",
    "segfault": "its process died of SIGSEGV",
    "close": "its process closed its connection with the trainer",
    "replace": "its process closed its connection with the trainer",
    "write": "its process wrote what is no reply to its connection with the trainer: b'\\x00\\x00",
    "Ctrl-C": "KeyboardInterrupt",
    "of its own": "Stop: now",
    "kill": "its process died of SIGKILL, which spmdrl did not send: out of memory",
    "kill above": "its process died with its killed keeper",
}


def test_failures_cost_one_sample_each():
    """Good samples between the bad ones, through the same two workers, all keep their reward."""
    mixed = [s for bad in REASONS for s in (sample(bad), sample("ok"), sample("ok"))]
    start = time.monotonic()
    run(misbehave, mixed, timeout_s=1.0)
    assert time.monotonic() - start < 20
    assert [s.reward for s in mixed if s.response == "ok"] == [1.0] * 2 * len(REASONS)
    for s in mixed:
        if s.response != "ok":
            assert s.reward is None
            assert REASONS[s.response] in s.invalid, s.invalid
    trace = mixed[0].invalid
    assert trace.startswith("Traceback")
    assert 'raise ValueError("no such unit")' in trace
    assert "worker.py" not in trace  # the reader's code only
    assert not children()


def test_a_function_that_forks_answers_once_and_for_its_own_sample():
    """The fork comes back too, at once or while others are scored; or it raises, or sleeps on."""

    def reward(response):
        kind, _, number = response.partition(" ")
        if kind != "plain" and os.fork() == 0:
            if kind == "raise":
                raise ValueError
            time.sleep({"late": 0.1, "on": 1000}.get(kind, 0))
            return -1.0
        return float(number)

    kinds = ("plain", "fork", "raise", "late", "on")
    samples = [sample(f"{kinds[i % 5]} {i}") for i in range(100)]
    run(reward, samples, workers=1)
    assert [s.reward for s in samples] == list(map(float, range(100)))
    assert not children()


def test_what_a_call_leaves_is_not_for_the_next():
    """An alarm, and a thread that writes to the connection when no call is under way."""

    def write_later(delay_s):
        time.sleep(delay_s)
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                os.write(fd, b"" if fd < 3 else b"late")

    def reward(response):
        if response == "alarm":
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        elif response == "thread":
            threading.Thread(target=write_later, args=(0.1,)).start()
        else:
            time.sleep(0.3)
        return 1.0

    runner = RewardRunner(reward, RewardConfig(workers=1))
    samples = [sample("alarm"), sample("ok"), sample("thread"), sample("ok")]
    runner.score(samples[:3])
    time.sleep(0.3)
    runner.score(samples[3:])
    runner.close()
    assert [s.invalid for s in samples] == [None] * 4


def test_a_worker_killed_while_it_starts_again_is_replaced(tmp_path):
    """As by the kernel where memory ends. Again and again is no mistake of the config's."""

    class Reward:
        """Loading takes half a second; the first two are killed meanwhile."""

        def __call__(self, response):
            if response == "die":
                os._exit(3)
            return 1.0

        def __reduce__(self):
            return make_slowly, (str(tmp_path), Reward)

    def make_slowly(folder, cls):
        number = len(os.listdir(folder))
        Path(folder, str(number)).touch()
        if number in (1, 2) or (number > 3 and Path(folder, "0").read_text()):
            os.kill(os.getpid(), signal.SIGKILL)
        return cls.__new__(cls)

    runner = RewardRunner(Reward(), RewardConfig(workers=1))
    samples = [sample("die"), sample("ok"), sample("ok")]
    runner.score(samples[:2])
    assert [s.reward for s in samples] == [None, 1.0, None]
    assert len(os.listdir(tmp_path)) == 4
    Path(tmp_path, "0").write_text("from now on all are")
    runner.score([sample("die")])
    with pytest.raises(RuntimeError, match=r"died of SIGKILL.* 3 times") as raised:
        runner.score(samples[2:])
    assert not isinstance(raised.value, ConfigError)
    runner.close()


def test_a_long_message_is_cut():
    def reward(response):
        raise ValueError("x" * 100_000 + "the end")

    invalid = run(reward, [sample("")])[0].invalid
    assert len(invalid) < 5000
    assert invalid.endswith("the end")


leave_children = make_leave_children()


def test_what_a_reward_started_ends_with_its_process(tmp_path):
    """That is killed, that exits, that is ended with the run."""

    def reward(response):
        leave_children(tmp_path, response)
        if response == "killed":
            time.sleep(1000)
        if response == "exits":
            os._exit(1)
        return 1.0

    samples = run(reward, [sample(name) for name in ("killed", "exits", "ends")], timeout_s=3.0)
    assert "timed out" in samples[0].invalid and "exited with code 1" in samples[1].invalid
    assert samples[2].reward == 1.0
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    assert len(pids) == 9
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


def test_a_worker_killed_when_idle_costs_nothing():
    runner = RewardRunner(lambda response: 1.0, RewardConfig(workers=1))
    first, second = sample(""), sample("")
    runner.score([first])
    for process in children():
        process.kill()
        process.wait(5)
    runner.score([second])
    runner.close()
    assert first.reward == second.reward == 1.0


def test_a_trainer_with_more_than_a_thousand_descriptors():
    """Its numbers are those of the keeper; select.select knows none above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert max(held) > 1023
        samples = run(lambda response: float(os.getppid()), [sample("") for _ in range(4)])
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [s.invalid for s in samples] == [None] * 4


def test_a_keeper_without_proc_or_orphans(monkeypatch, capfd):
    def unreadable(path):
        raise PermissionError(path)

    monkeypatch.setattr(keeper, "PR_SET_CHILD_SUBREAPER", -1)
    keeper.adopt_orphans()
    told = capfd.readouterr().err
    assert told.count("\n") == 1 and "Invalid argument" in told and "may outlive the run" in told
    monkeypatch.setattr("os.listdir", unreadable)
    assert keeper.children() == []


def test_what_the_worker_cannot_import():
    """Found in the trainer, gone for a worker: a ConfigError with the worker's traceback."""
    code = "import importlib; importlib.import_module('no_such_module_here')"

    class Reward:
        def __call__(self, response):
            return 1.0

        def __reduce__(self):
            return exec, (code,)

    runner = RewardRunner(Reward(), RewardConfig())
    with pytest.raises(
        ConfigError, match=r"PYTHONPATH:(.|\n)*No module named 'no_such_module_here'"
    ):
        runner.score([sample("")])
    runner.close()


# --- processes ---


def test_functions_of_a_config_file(tmp_path):
    """No worker could import these: a config is run by path, and its folder only then on sys.path.

    Loaded as the programs load it. torch in the config must not be paid for in the worker.
    """
    (tmp_path / "my_table.py").write_text(
        "import functools, torch\nTABLE = {'right': 1.0}\n"
        "@functools.lru_cache(maxsize=5)\ndef look_up(word): return TABLE.get(word, 0.0)\n"
    )
    (tmp_path / "my_config.py").write_text(
        "import torch\n"
        "from my_table import look_up\n"
        "from spmdrl.config import DataConfig, PpoConfig\n"
        "import functools\n"
        "@functools.cache\n"
        "def helper(response): return look_up(response)\n"
        "def reward(response):\n"
        "    import sys\n"
        "    kept = look_up.cache_parameters()['maxsize']\n"
        "    return {'score': helper(response), 'torch': 'torch' in sys.modules, 'kept': kept}\n"
        "config = PpoConfig(model='', data=DataConfig(train=''), reward=reward)\n"
    )
    config = load_config(str(tmp_path / "my_config.py"), PpoConfig, {})
    got = run(config.reward, [sample("right"), sample("wrong")])
    told = {"torch": 0, "kept": 5}
    assert [(s.reward, s.reward_info) for s in got] == [(1.0, told), (0.0, told)]


def test_an_importable_module_is_imported(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def reward(response): return len(response)\n")
    monkeypatch.syspath_prepend(tmp_path)
    import my_rewards

    assert run(my_rewards.reward, [sample("four")])[0].reward == 4.0


def test_prints_do_not_disturb(capfd):
    def reward(response):
        print("to stdout", flush=True)
        print(input() if sys.stdin.isatty() else "no terminal", file=sys.stderr)
        return 1.0

    assert run(reward, [sample("")])[0].reward == 1.0
    assert "to stdout" in capfd.readouterr().out


def test_workers_are_small_and_start_in_the_background():
    start = time.monotonic()
    runner = RewardRunner("gsm8k", RewardConfig(workers=2))
    assert time.monotonic() - start < 0.5
    runner.score([sample("#### 5") for _ in range(20)])
    sizes_mib = [p.memory_info().rss / 2**20 for p in children()]
    runner.close()
    assert len(sizes_mib) == 2
    assert max(sizes_mib) < 60
    assert not children()


def test_results_in_order_and_a_thousand_at_a_time():
    samples = [sample(str(i)) for i in range(1000)]
    runner = RewardRunner(lambda response: int(response), RewardConfig())
    runner.score([sample("0") for _ in range(4)])
    start = time.monotonic()
    runner.score(samples)
    took_s = time.monotonic() - start
    runner.close()
    assert [s.reward for s in samples] == list(map(float, range(1000)))
    assert took_s < 1.0  # 0.05 s on an idle machine


def test_slow_rewards_run_in_parallel():
    def reward(response):
        time.sleep(0.3)
        return 1.0

    runner = RewardRunner(reward, RewardConfig(workers=4))
    runner.score([sample("")])
    start = time.monotonic()
    runner.score([sample("") for _ in range(8)])
    assert time.monotonic() - start < 1.5  # 8 * 0.3 s one after the other
    runner.close()


def test_close_kills_what_runs():
    runner = RewardRunner(misbehave, RewardConfig(timeout_s=1000))
    runner.score([sample("ok") for _ in range(20)])
    thread = threading.Thread(target=lambda: runner.score([sample("sleep")]), daemon=True)
    thread.start()
    time.sleep(0.2)
    runner.close()
    assert wait_until(lambda: not children())
    thread.join(5)
    assert not thread.is_alive()


TRAINER = """
import os, sys, time
from spmdrl.config import RewardConfig
from spmdrl.rewards.runner import RewardRunner
sys.path.insert(0, {tests!r})
from reward_processes import children, make_leave_children, sample

leave_children = make_leave_children()

def reward(response):
    if response == "hang":
        leave_children({folder!r}, str(os.getpid()))
        while True:
            pass
    return 1.0

if __name__ == "__main__":
    runner = RewardRunner(reward, RewardConfig(timeout_s=1000))
    runner.score([sample("ok") for _ in range(50)])
    while len(children()) < 2:  # one may have scored all before the other was started
        time.sleep(0.01)
    print(*(p.pid for p in children()), flush=True)
    runner.score([sample("hang"), sample("hang")])
"""


def test_workers_end_with_the_trainer(tmp_path):
    script = tmp_path / "trainer.py"
    (tmp_path / "pids").mkdir()
    folder = str(tmp_path / "pids")
    script.write_text(TRAINER.format(tests=str(Path(__file__).parents[1]), folder=folder))
    signals = {signal.SIGKILL: 0, signal.SIGINT: 1}  # tracebacks: the trainer's, never a worker's
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, str(script)]
    trainers = [subprocess.Popen(command, **pipes, start_new_session=True) for _ in signals]
    for trainer, (number, tracebacks) in zip(trainers, signals.items(), strict=True):
        workers = [int(word) for word in trainer.stdout.readline().split()]
        assert len(workers) == 2
        files = [Path(folder, f"{pid} {i}") for pid in workers for i in range(3)]
        assert wait_until(lambda files=files: all(f.exists() and f.read_text() for f in files))
        workers += [int(file.read_text()) for file in files]
        os.killpg(trainer.pid, number)  # the whole group, as a terminal does on Ctrl-C
        _, errors = trainer.communicate(timeout=20)
        gone = wait_until(lambda pids=workers: not any(psutil.pid_exists(pid) for pid in pids))
        assert gone, (number, workers)
        assert errors.count("Traceback") == tracebacks, errors
