"""What a reward is given, and what it returns."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import pytest
from reward_processes import children, run, sample

from spmdrl.config import ConfigError, RewardConfig
from spmdrl.rewards.runner import RewardRunner
from spmdrl.rewards.workers.worker import cause_of
from spmdrl.training.dry_run import scored_examples
from spmdrl.types import Sample

pytestmark = pytest.mark.clock


def test_it_gets_what_it_names():
    def reward(response, ground_truth, prompt, data_source, extra_info, *, finish_reason, eps=0.25):
        assert (prompt, data_source, finish_reason) == ("2+3?", "a", "stop")
        return (response == ground_truth) + extra_info["bonus"] + eps

    got = run(reward, [sample("5", extra={"bonus": 2}), sample("4", extra={"bonus": 2})])
    assert [s.reward for s in got] == [3.25, 2.25]


def test_verl_functions_run_unchanged():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": solution_str == ground_truth, "acc": True, "pred": solution_str}

    def with_kwargs(solution_str, ground_truth, **kwargs):
        return float(kwargs["data_source"] == "a" and kwargs["response_ids"] == [4, 5])

    got = run(compute_score, [sample("5"), sample("6")])
    assert [(s.reward, s.reward_info) for s in got] == [(1.0, {"acc": 1.0}), (0.0, {"acc": 1.0})]
    assert [s.pred for s in got] == ["5", "6"]
    assert run(with_kwargs, [sample("5")])[0].reward == 1.0


RETURNS = [
    (1, 1.0, None),
    (-0.5, -0.5, None),
    (True, 1.0, None),
    ({"score": 0.5, "format": 1, "exact": False, "note": "text"}, 0.5, None),
    (None, None, "returned None; expected a finite number"),
    ("1.0", None, "returned str '1.0'"),
    ([1.0], None, "returned list [1.0]"),
    (float("nan"), None, "returned nan as its score"),
    (float("-inf"), None, "returned -inf as its score"),
    ({"reward": 1}, None, "without the key 'score' (it has reward)"),
    ({}, None, "without the key 'score' (it has nothing)"),
    ({"score": None}, None, "returned None"),
    ({"score": 1, "format": float("nan")}, None, "returned nan as its format"),
    (10**400, None, "returned inf as its score"),
]


@pytest.fixture(scope="module")
def returned() -> list[Sample]:
    values = [value for value, _, _ in RETURNS]

    def reward(sample_index, extra_info):
        return values[extra_info["i"]]

    return run(reward, [sample("", extra={"i": i}) for i in range(len(RETURNS))])


def test_what_an_agent_returned_is_said_to_be_the_agents():
    samples = [
        dataclasses.replace(sample(""), agent_output=value) for value in (None, {"turns": [1.0]}, 2)
    ]
    none, turns, number = run("agent", samples)
    assert none.invalid.startswith("the agent returned None; expected a finite number, or a dict")
    assert turns.invalid.startswith("the agent returned 'turns', and rewards.per_turn is False")
    assert (number.reward, number.invalid) == (2.0, None)


@pytest.mark.parametrize("i", range(len(RETURNS)))
def test_returned_value(returned, i):
    _, reward, words = RETURNS[i]
    assert returned[i].reward == reward
    assert words is None or words in returned[i].invalid
    if isinstance(RETURNS[i][0], dict) and reward is not None:
        assert returned[i].reward_info == {"format": 1.0, "exact": 0.0}


WORDS = "expected a list of finite numbers, one for each turn of the policy's"
TURNS = [
    # returned for a sample of two turns -> reward, its turns', words of the refusal
    ({"turns": [0.25, -1]}, -0.75, [0.25, -1.0], None),
    ({"turns": (True, 2.5), "score": 1, "format": 0.5, "pred": "7"}, 4.5, [1.0, 2.5], None),
    ({"turns": [0.1, 0.2], "score": 0}, 0.1 + 0.2, [0.1, 0.2], None),
    (
        {"turns": [1.0]},
        None,
        [],
        "returned a list of 1 under 'turns'; with rewards.per_turn "
        "expected a list of 2, one finite number for each turn",
    ),
    ({"turns": [1.0] * 3, "score": 1.0}, None, [], "a list of 3 under 'turns'"),
    ({"turns": []}, None, [], "a list of 0 under 'turns'"),
    (1.0, None, [], "returned no list under 'turns'; with rewards.per_turn expected a list of 2"),
    ({"score": 1.0}, None, [], "returned no list under 'turns'"),
    ({"turns": [1.0, float("nan")]}, None, [], "returned nan for turn 2 of 2; " + WORDS),
    ({"turns": [10**400, 1.0]}, None, [], "returned inf for turn 1 of 2; " + WORDS),
    ({"turns": [9e29, 9e29]}, None, [], "returned 2 turns that make its reward 1.8e+30; "),
    ({"turns": [1.0, None]}, None, [], "returned [1.0, None] as its turns; " + WORDS),
    ({"turns": "12"}, None, [], "returned a dict without the key 'score' (it has turns)"),
    ({"turns": 2.0, "score": 1.0}, None, [], "returned no list under 'turns'"),
    ({"turns": [1.0, 1.0], "score": None}, None, [], "returned None; expected a finite number"),
    ({"turns": [1.0, 1.0], "x": float("inf")}, None, [], "returned inf as its x"),
    (None, None, [], "with rewards.per_turn a dict with a list of them under 'turns'"),
]


def two_turns(i: int, source: str = "a") -> Sample:
    """The prompt has a turn of the assistant's too, which is nobody's to score."""
    found = sample("", source=source, extra={"i": i})
    chat = [{"role": r, "content": "x"} for r in ("user", "assistant", "user")]
    found.prompt = dataclasses.replace(found.prompt, chat=chat)
    found.messages = [{"role": r, "content": "x"} for r in ("assistant", "tool", "assistant")]
    return found


def returning(values: list[Any]) -> Any:
    def reward(extra_info, num_turns, messages):
        assert num_turns == 2 and len(messages) == 6
        return values[extra_info["i"]]

    return reward


def test_a_reward_for_each_turn():
    values = [value for value, *_ in TURNS]
    got = run(returning(values), [two_turns(i) for i in range(len(TURNS))], per_turn=True)
    for found, (value, reward, turns, words) in zip(got, TURNS, strict=True):
        assert (found.reward, found.turn_rewards) == (reward, turns), value
        assert (found.invalid is None) == (words is None), value
        assert words is None or words in found.invalid, (words, found.invalid)
    assert (got[1].reward_info, got[1].pred) == ({"format": 0.5}, "7")


def test_turns_that_nobody_asked_for():
    values = [{"turns": [1.0, 1.0]}, {"score": 1.0, "turns": [1.0]}, {"score": 1.0, "turns": 2}]
    got = run(returning(values), [two_turns(i) for i in range(3)])
    for found in got[:2]:
        assert (found.reward, found.turn_rewards) == (None, [])
        assert "rewards.per_turn is False: set it to True" in found.invalid
    assert (got[2].reward, got[2].reward_info) == (1.0, {"turns": 2.0})  # a number for the log


def test_coroutines_and_data_sources_have_turns_too():
    async def slowly(messages, num_turns):
        await asyncio.sleep(0.01)
        return {"turns": [0.5] * num_turns}

    def whole(num_turns):
        return {"turns": [0.25] * num_turns, "score": 1.0}

    def none(num_turns):
        return 1.0

    rewards = {"a": slowly, "b": whole, "c": none}
    got = run(rewards, [two_turns(0, source) for source in "abc"], per_turn=True)
    assert [s.reward for s in got] == [1.0, 1.5, None]
    assert [s.turn_rewards for s in got] == [[0.5, 0.5], [0.25, 0.25], []]


def test_a_dry_run_scores_one_turn():
    def reward(response, ground_truth, num_turns, messages):
        assert len(messages) == 1 + num_turns
        return {"turns": [0.5] * num_turns, "score": response == ground_truth}

    runner = RewardRunner(reward, RewardConfig(per_turn=True))
    try:
        _, line = scored_examples([sample("").prompt], runner, RewardConfig())
        with pytest.raises(ConfigError, match=r"asks for \['format'\], .* gave \['score'\]"):
            scored_examples([sample("").prompt], runner, RewardConfig(), ("format", "score"))
    finally:
        runner.close()
    assert line.endswith("reward of its ground truth '5' as the answer: 1.5")


def test_a_dry_run_leaves_rewards_be_that_give_keys_with_a_well_formed_answer_alone():
    def reward(response):
        boxed = "boxed" in response
        return {"score": 1.0, "accuracy": 1.0} if boxed else {"score": 0.0}

    runner = RewardRunner(reward, RewardConfig())
    try:
        _, line = scored_examples([sample("").prompt], runner, RewardConfig(), ("accuracy",))
    finally:
        runner.close()
    assert line.endswith("as the answer: none, it fails")


def test_numpy_and_torch_scalars():
    def reward(response):
        import numpy as np

        return {"f": np.float32(0.5), "i": np.int64(2), "b": np.bool_(True), "a": np.ones(1)}[
            response
        ]

    got = run(reward, [sample(c) for c in "fiba"])
    assert [s.reward for s in got] == [0.5, 2.0, 1.0, None]


def test_the_cause_of_an_error_is_its_message_and_no_advice_behind_it():
    def reward(response):
        raise ConnectionError("Client error '401 Unauthorized'\nFor more information see: a page")

    [got] = run(reward, [sample("")])
    assert got.invalid.endswith("see: a page")
    assert cause_of(got.invalid) == "ConnectionError: Client error '401 Unauthorized'"
    assert cause_of("timed out after 3 s") == "timed out after 3 s" and cause_of("") == ""


def test_a_coroutine_out_of_a_plain_function():
    async def later():
        return 1.0

    got = run(lambda response: later(), [sample("")])
    assert "returned a coroutine; declare it with `async def`" in got[0].invalid


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (lambda response, answer: 1, "requires 'answer', .* response, solution_str, ground_truth"),
        (lambda response, /: 1, "requires 'response', which is not known by keyword"),
        ("gsm8", "no built-in reward 'gsm8'.*did you mean 'gsm8k'"),
        (lambda response: (yield 1.0), "has `yield`, so a call returns a generator and no value"),
        (3, "a reward is a function"),
        ({}, "empty mapping"),
        ({"a": "gsm8k", "b": "nope"}, "no built-in reward 'nope'"),
    ],
)
def test_config_errors(reward, words):
    with pytest.raises(ConfigError, match=words):
        RewardRunner(reward, RewardConfig())
    assert not children()


@pytest.mark.parametrize("settings", [{"workers": 0}, {"timeout_s": 0.0}])
def test_settings_without_which_nothing_would_end(settings):
    with pytest.raises(ConfigError, match="at least one worker and a time limit above 0"):
        RewardRunner("gsm8k", RewardConfig(**settings))


def test_a_function_that_cannot_travel():
    lock = threading.Lock()

    def reward(response):
        with lock:
            return 1.0

    with pytest.raises(
        ConfigError, match=r"cannot be sent to a worker process .*inside the function"
    ):
        RewardRunner(reward, RewardConfig())


def test_several_data_sources():
    async def judge(response):
        return 0.25

    rewards = {"a": lambda response: 1.0, "b": "gsm8k", "c": judge}
    sources = ["c", "a", "b", "a", "c", "b"] * 5
    got = run(rewards, [sample("#### 5", source=source) for source in sources])
    assert [s.reward for s in got] == [{"a": 1.0, "b": 1.0, "c": 0.25}[s] for s in sources]
    runner = RewardRunner(rewards, RewardConfig())
    runner.check_sources(["a", "b"])
    with pytest.raises(
        ConfigError, match=r"no reward function for data_source 'd'; .*'a', 'b', 'c'"
    ):
        runner.check_sources(["a", "d"])
    with pytest.raises(ConfigError, match="data_source 'd'"):
        runner.score([sample("", source="d")])
    runner.close()
