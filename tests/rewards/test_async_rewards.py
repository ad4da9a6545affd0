"""Rewards that are coroutine functions: how many run at once, and how they fail."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
import time
from itertools import pairwise

import pytest
from reward_processes import children, run, sample

from spmdrl.config import ConfigError, RewardConfig
from spmdrl.rewards.runner import RewardRunner

pytestmark = pytest.mark.clock


def make_misbehave_async():
    async def exits():
        sys.exit()

    async def misbehave_async(response):
        if response == "its own task":
            asyncio.get_running_loop().create_task(exits())
        await asyncio.sleep(0.3)
        if response == "raise":
            raise KeyError("unit")
        if response == "sleep":
            await asyncio.sleep(1e6)
        if response == "own limit":
            await asyncio.wait_for(asyncio.sleep(10), 0.1)
        if response == "cancel":
            raise asyncio.CancelledError
        if response == "stop the loop":
            asyncio.get_running_loop().stop()
        if response == "fork" and os.fork() == 0:
            await asyncio.sleep(0.01)
            return -1.0
        return {"sys.exit": sys.exit, "none": lambda: None}.get(response, lambda: 1)()

    return misbehave_async


misbehave_async = make_misbehave_async()


def test_what_ends_or_cancels_the_process_of_coroutines():
    """All that was under way there fails and says so; what comes later runs in another."""

    async def reward(response):
        await asyncio.sleep(0.1)
        if response == "os._exit":
            os._exit(0)
        if response == "close":
            os.closerange(3, 1 << 16)
        if response == "write":
            for fd in map(int, os.listdir("/proc/self/fd")):
                with contextlib.suppress(OSError):
                    os.write(fd, b"" if fd < 3 else b"hello")
        if response == "cancel":
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
        await asyncio.sleep(0.1)
        return 1.0

    told = {
        "os._exit": "its process exited with code 0",
        "close": "its process closed its connection",
        "write": "what is no reply to its connection with the trainer: b'hello'",
        "cancel": "cancel",
    }
    runner = RewardRunner(reward, RewardConfig(timeout_s=5))
    for bad, words in told.items():
        samples = [sample("ok"), sample(bad)]
        runner.score(samples)
        assert [s.reward for s in samples] == [None, None], bad
        assert all(words in s.invalid for s in samples), samples[0].invalid
        after = [sample("ok")]
        runner.score(after)
        assert after[0].reward == 1.0
    runner.close()
    assert not children()


def test_coroutines_run_at_once_and_fail_alone():
    bad = {
        "raise": "KeyError: 'unit'",
        "sleep": "timed out after 1 s",
        "own limit": "TimeoutError",
        "cancel": "CancelledError",
        "sys.exit": "SystemExit",
        "none": "returned None",
    }
    good = ("stop the loop", "fork", "its own task", *["ok"] * 100)
    samples = [sample(name) for name in (*bad, *good)]
    start = time.monotonic()
    run(misbehave_async, samples, timeout_s=1.0)
    assert time.monotonic() - start < 4  # not 100 times 0.3 s
    for s in samples:
        assert s.reward == (None if s.response in bad else 1.0), s.invalid
        assert s.reward is not None or bad[s.response] in s.invalid
    assert "timed out after" not in samples[2].invalid  # its own limit, not ours


def test_thousands_of_coroutines_that_end_at_once():
    """More requests and replies than the connection holds are under way in both directions."""

    async def reward(response):
        return float(len(response))

    samples = [sample("x" * 4000 + "y" * (i % 7)) for i in range(2000)]
    start = time.monotonic()
    run(reward, samples, timeout_s=3)
    assert [s.invalid for s in samples if s.invalid] == []
    assert [s.reward for s in samples] == [float(len(s.response)) for s in samples]
    assert time.monotonic() - start < 12  # 13 s of a time limit with its grace never passed


def test_coroutines_wait_for_their_turn_and_that_costs_them_nothing():
    """Of a service that takes 4 calls at a time, shared by two ranks; the time limit is one's."""
    running = [0]

    async def reward(response):
        running[0] += 1
        at_once = running[0]
        await asyncio.sleep(0.2)
        running[0] -= 1
        return float(at_once)

    runner = RewardRunner(reward, RewardConfig(timeout_s=0.5, max_concurrent=4), ranks=2)
    samples = [sample(str(i)) for i in range(10)]
    start = time.monotonic()
    runner.score(samples)
    runner.close()
    assert time.monotonic() - start >= 5 * 0.2
    assert [s.invalid for s in samples] == [None] * 10
    assert {s.reward for s in samples} == {1.0, 2.0}


def test_coroutines_begin_no_more_often_than_allowed():
    async def reward(response):
        return time.monotonic()

    runner = RewardRunner(reward, RewardConfig(timeout_s=0.1, max_per_minute=600), ranks=2)
    samples = [sample(str(i)) for i in range(8)]
    for four in (samples[:4], samples[4:]):  # a step's first waits for the last step's
        runner.score(four)
    runner.close()
    began = sorted(s.reward for s in samples)
    apart = [later - earlier for earlier, later in pairwise(began)]
    assert len(apart) == 7 and sum(apart) > 1.3  # 10 a second, of which half is another rank's
    assert min(apart) > 0.06


def test_one_that_ignores_its_cancellation_costs_itself_alone(monkeypatch):
    monkeypatch.setattr("spmdrl.rewards.workers.async_loop.ASYNC_GRACE_S", 0.2)

    async def reward(response):
        while response == "swallow":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1e6)
        await asyncio.sleep(0.1)
        return 1.0

    runner = RewardRunner(reward, RewardConfig(timeout_s=0.3, max_concurrent=2))
    samples = [sample("swallow"), *(sample("ok") for _ in range(20))]
    runner.score(samples)
    runner.close()
    assert "must let itself be cancelled" in samples[0].invalid
    assert [s.reward for s in samples[1:]] == [1.0] * 20


def test_one_that_blocks_does_not_end_those_that_wait_for_their_turn(monkeypatch):
    monkeypatch.setattr("spmdrl.rewards.workers.async_loop.ASYNC_GRACE_S", 0.3)

    async def reward(response):
        if response == "block":
            time.sleep(3)
        return 1.0

    runner = RewardRunner(reward, RewardConfig(timeout_s=0.3, max_concurrent=1))
    samples = [sample("ok"), sample("block"), sample("ok")]
    start = time.monotonic()
    runner.score(samples)
    runner.close()
    assert time.monotonic() - start < 2.5
    assert [s.reward for s in samples] == [1.0, None, 1.0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_concurrent": 3}, "is shared by 4 ranks"),
        ({"max_per_minute": -1}, "or more"),
    ],
)
def test_limits_that_cannot_be(settings, words):
    async def reward(response):
        return 1.0

    with pytest.raises(ConfigError, match=words):
        RewardRunner(reward, RewardConfig(**settings), ranks=4)


def test_a_blocked_event_loop_does_not_hang_the_run(monkeypatch):
    monkeypatch.setattr("spmdrl.rewards.workers.async_loop.ASYNC_GRACE_S", 0.3)

    async def reward(response):
        if response == "block":
            time.sleep(4)
        if response == "swallow":
            while True:
                try:
                    await asyncio.sleep(1e6)
                except asyncio.CancelledError:
                    await asyncio.sleep(1e6)
        return 1.0

    runner = RewardRunner(reward, RewardConfig(timeout_s=0.5))
    for bad in ("swallow", "block"):
        samples = [sample("ok"), sample(bad), sample("ok")]
        start = time.monotonic()
        runner.score(samples)
        assert time.monotonic() - start < 2
        assert "must await and not block" in samples[1].invalid
        assert bad == "block" or samples[0].reward == samples[2].reward == 1.0
    after = [sample("ok")]
    runner.score(after)  # on a fresh loop, though the old one still blocks
    runner.close()
    assert after[0].reward == 1.0


def test_objects_with_async_call_and_partials():
    class Judge:
        async def __call__(self, response):
            return 2.0

    async def scaled(response, scale):
        return scale

    assert run(Judge(), [sample("")])[0].reward == 2.0
    assert run(functools.partial(scaled, scale=3), [sample("")])[0].reward == 3.0
