"""The draw of prompts: mixtures, curricula, prompts that rest, functions of the user's."""

import itertools
import json
import math
import operator
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from spmdrl.config import ConfigError, DataConfig, SamplerConfig
from spmdrl.data.prompt_checks import marks_of
from spmdrl.data.prompt_draw import (
    counts_of,
    draw_by_weight,
    random_words,
    shares_of,
    success_weights,
    uniform,
)
from spmdrl.data.prompt_order import PromptOrder
from spmdrl.data.prompt_sampler import PromptSampler
from spmdrl.data.prompt_stats import PromptRows, histogram
from spmdrl.data.prompts import PromptDataset
from spmdrl.distributed.topology import Topology
from spmdrl.training.checks.sampler import check_sampler

SIZES = {"a": 60, "b": 30, "c": 10}


def sampler_of(
    sizes: dict[str, int] = SIZES, per_step: int = 8, shuffle: bool = True, **fields: Any
) -> PromptSampler:
    """Rows of each source behind those of the one before; ids are 3, 6, ..., the first is the
    hardest."""
    sampler = SamplerConfig(**fields)
    data = DataConfig("t", prompts_per_step=per_step, shuffle=shuffle, sampler=sampler)
    check_sampler(data)
    source = np.repeat(np.arange(len(sizes)), list(sizes.values()))
    difficulty = -np.arange(len(source)) / 7 if sampler.curriculum == "difficulty" else None
    rows = PromptRows(tuple(sizes), source, difficulty, 3 * np.arange(1, len(source) + 1))
    return PromptSampler(len(source), rows, data, seed=5)


def answer(sampler: PromptSampler, step: int, picked: list[int], rates: dict[int, float]) -> None:
    """Four answers to each prompt, of which as many succeed as its rate says; of others none."""
    assert sampler.stats is not None
    ids = sampler.stats.rows.ids
    right = [round(4 * rates.get(place, 0.0)) for place in picked]
    rewards = [[1.0] * n + [0.5] * (4 - n) for n in right]
    sampler.hear(step, list(zip(ids[picked].tolist(), rewards, strict=True)))


def run(
    sampler: PromptSampler, steps: range, rates: dict[int, float], count: int = 8
) -> list[list[int]]:
    drawn = []
    for step in steps:
        drawn.append(sampler.take(count, step))
        answer(sampler, step, drawn[-1], rates)
        sampler.event(step)
    return drawn


def sources_in(drawn: list[list[int]], sampler: PromptSampler) -> Counter[str]:
    assert sampler.stats is not None
    rows = sampler.stats.rows
    return Counter(rows.names[rows.source[place]] for step in drawn for place in step)


def test_shares_are_the_weights_or_the_sizes_at_a_temperature() -> None:
    def shares(**fields: Any) -> list[float]:
        return shares_of(SIZES, SamplerConfig(**fields)).tolist()

    assert shares() == pytest.approx([0.6, 0.3, 0.1])
    roots = [math.sqrt(size) for size in SIZES.values()]
    assert shares(temperature=2.0) == pytest.approx([root / sum(roots) for root in roots])
    assert shares(temperature=1e9) == pytest.approx([1 / 3] * 3)
    weights = {"a": 1, "b": 3, "c": 0}
    assert shares(weights=weights) == pytest.approx([0.25, 0.75, 0])
    assert shares(weights=weights, temperature=0.5) == pytest.approx([0.1, 0.9, 0])
    with pytest.raises(ConfigError, match=r"names 'd'.*there are 'a', 'b', 'c'"):
        shares(weights={**weights, "d": 1})
    with pytest.raises(ConfigError, match=r"lacks 'b', 'c'.*0 to leave it out"):
        shares(weights={"a": 1})


def test_counts_are_the_expected_number_rounded_and_on_average_exact() -> None:
    shares, words = np.array([0.13, 0.0, 0.55, 0.32]), random_words("a test")
    drawn = np.array([counts_of(shares, 10, uniform(words)) for _ in range(4000)])
    assert (drawn.sum(axis=1) == 10).all() and (np.abs(drawn - 10 * shares) < 1).all()
    bound = 4 * 0.5 / math.sqrt(len(drawn))  # a count is one of two neighbours: deviation <= 0.5
    assert drawn.mean(axis=0) == pytest.approx(10 * shares, abs=bound)
    assert counts_of(np.array([1.0, 0.0]), 3, 0.999).tolist() == [3, 0]


def test_chances_are_proportional_to_weights() -> None:
    weights, words = np.array([0.05, 1.0, 0.5, 0.25, 3.0, 0.2]), random_words("weights")
    picks = [draw_by_weight(weights, 3, words) for _ in range(4000)]
    assert all(len(set(one.tolist())) == 3 for one in picks)
    seen = np.bincount(np.concatenate(picks), minlength=6) / len(picks)
    # 3.0 is over a third of all: always there. Of the other two places 1.0 is exactly a half
    wanted = np.array([0.05, 1.0, 0.5, 0.25, 0, 0.2]) * 2 / 2.0
    wanted[4] = 1
    assert seen == pytest.approx(wanted, abs=4 * 0.5 / math.sqrt(len(picks)))
    assert sorted(draw_by_weight(np.ones(4), 4, words).tolist()) == [0, 1, 2, 3]


def test_a_mixture_has_its_weights_and_walks_through_each_source() -> None:
    sampler = sampler_of(weights={"a": 1, "b": 2, "c": 1})
    drawn = run(sampler, range(1, 201), {})
    assert all(len(set(step)) == 8 for step in drawn)
    assert sources_in(drawn, sampler) == {"a": 400, "b": 800, "c": 400}  # 2, 4, 2 of each step
    asked = Counter(place for step in drawn for place in step)
    assert {asked[place] for place in range(60)} == {6, 7}  # none twice before all were asked
    assert {asked[place] for place in range(90, 100)} == {40}
    firsts = [sampler.stats.rows.source[step[0]] for step in drawn]  # type: ignore[union-attr]
    assert len(set(firsts)) == 3  # no source always stands before the others
    by_size = sampler_of(temperature=2.0, per_step=10)
    drawn = run(by_size, range(1, 101), {}, count=10)
    shares = shares_of(SIZES, by_size.config)
    counts = sources_in(drawn, by_size)
    bound = 4 * math.sqrt(0.25 * 100)  # each step's count has a deviation of at most 0.5
    assert [counts[name] for name in SIZES] == pytest.approx((1000 * shares).tolist(), abs=bound)


def test_rows_in_their_order_where_nothing_is_shuffled() -> None:
    sampler = sampler_of({"a": 6, "b": 6}, 4, shuffle=False, weights={"a": 1, "b": 1})
    assert run(sampler, range(1, 4), {}, count=4) == [[0, 6, 1, 7], [2, 8, 3, 9], [4, 10, 5, 11]]
    by_difficulty = sampler_of({"a": 8}, 4, shuffle=False, curriculum="difficulty")
    assert run(by_difficulty, range(1, 3), {}, count=4) == [[7, 6, 5, 4], [3, 2, 1, 0]]


def test_difficulty_opens_the_data_at_its_pace() -> None:
    sampler = sampler_of({"a": 100}, 4, curriculum="difficulty", pace_start=0.2, pace_steps=10)
    drawn = run(sampler, range(1, 16), {}, count=4)
    for step, picked in enumerate(drawn, start=1):
        easiest = math.ceil(100 * min(0.2 + 0.8 * (step - 1) / 10, 1.0) - 1e-9)
        assert min(picked) >= 100 - easiest, step  # the last rows are the easiest
    assert min(drawn[10] + drawn[11] + drawn[12] + drawn[13]) < 20
    few = sampler_of({"a": 100}, 4, curriculum="difficulty", pace_start=0.01, pace_steps=1000)
    assert sorted(few.take(4, 1)) == [96, 97, 98, 99]  # the next easiest fill the step


def test_success_rates_draw_to_the_target() -> None:
    weights = success_weights(np.array([0.0, 0.25, 0.5, 1.0, math.nan]), 0.5, 0.05)
    assert weights == pytest.approx([0.05, 0.8, 1.05, 0.05, 1.05])  # 4 p (1 - p) + floor
    assert success_weights(np.array([1.0, 0.25]), 0.25, 0.1) == pytest.approx([0.1, 1.1])
    rates = {place: (0.0, 0.5, 1.0, 0.25)[place % 4] for place in range(100)}
    sampler = sampler_of({"a": 100}, 10, curriculum="success_rate")
    drawn = run(sampler, range(1, 301), rates, count=10)
    assert sampler.stats is not None and (sampler.stats.asked > 0).all()
    late = Counter(rates[place] for step in drawn[100:] for place in step)
    chance = {0.0: 0.05, 0.5: 1.05, 1.0: 0.05, 0.25: 0.8}
    for rate, weight in chance.items():
        wanted = 2000 * weight / sum(chance.values())
        # prompts of the last step wait for none here, so that chances are the weights
        assert late[rate] == pytest.approx(wanted, abs=4 * math.sqrt(wanted)), rate


def test_rates_forget_and_a_rate_is_what_was_answered() -> None:
    sampler = sampler_of({"a": 8}, 8, rate_decay=0.5)
    for step, rate in enumerate((1.0, 0.5), start=1):
        picked = sampler.take(8, step)
        answer(sampler, step, picked, dict.fromkeys(range(8), rate))
    sampler.settle(3)
    assert sampler.stats is not None
    assert sampler.stats.rates.tolist() == [(0.5 * 4 + 2) / (0.5 * 4 + 4)] * 8
    sampler.hear(3, [(3, [])])  # all invalid: nothing is known more
    sampler.settle(4)
    assert sampler.stats.rates[0] == 4 / 6


def test_solved_prompts_rest_and_come_back() -> None:
    solved = {place: 1.0 for place in range(20) if place % 2}
    sampler = sampler_of({"a": 20}, 5, drop_solved=2, return_after=10)
    drawn = run(sampler, range(1, 40), solved, count=5)
    when: dict[int, list[int]] = {place: [] for place in range(20)}
    for step, picked in enumerate(drawn, start=1):
        for place in picked:
            when[place].append(step)
    for place, steps in when.items():
        gaps = [b - a for a, b in itertools.pairwise(steps[1:])]
        # after twice solved each further time is a rest of more than ten steps
        assert not solved.get(place) or all(gap > 10 for gap in gaps), (place, steps)
        assert solved.get(place) or max(gaps) <= 5
    assert sampler.metrics(39)["prompts/dropped"] > 0.3
    assert sampler.stats is not None
    for_good = sampler_of({"a": 20}, 5, drop_solved=1)
    asked = Counter(p for step in run(for_good, range(1, 40), solved, count=5) for p in step)
    assert all(asked[place] == 1 for place in solved)


def test_where_all_rest_those_that_rested_longest_are_asked() -> None:
    sampler = sampler_of({"a": 12}, 4, drop_solved=1)
    drawn = run(sampler, range(1, 7), dict.fromkeys(range(12), 1.0), count=4)
    assert [sorted(step) for step in drawn[3:]] == [sorted(step) for step in drawn[:3]]


def test_what_is_waited_for_is_not_asked_again() -> None:
    sampler = sampler_of({"a": 100}, 10, curriculum="success_rate")
    rounds = [sampler.take(10, 1) for _ in range(10)]
    assert sorted(itertools.chain(*rounds)) == list(range(100))
    sampler.forget_begun()
    assert sampler.stats is not None and not sampler.stats.waiting.any()


def test_a_draw_while_the_last_step_is_scored_knows_the_steps_before() -> None:
    """Asked ahead or not, a step's prompts are the same; ranks that follow know the same."""
    fields = {"curriculum": "success_rate", "drop_solved": 2, "weights": dict.fromkeys(SIZES, 1)}
    rates = {place: (0.0, 0.5, 1.0)[place % 3] for place in range(100)}
    ahead, in_turn, follower = (sampler_of(**fields) for _ in range(3))
    for sampler in (ahead, in_turn, follower):
        sampler.lag = 1
    upcoming, states = ahead.take(8, 1), []
    for step in range(1, 31):
        picked = upcoming
        if step % 5:  # else the run saves
            upcoming = ahead.take(8, step + 1)
        answer(ahead, step, picked, rates)
        if step % 5 == 0:
            upcoming = ahead.take(8, step + 1)
        assert picked == in_turn.take(8, step), step
        answer(in_turn, step, picked, rates)
        in_turn.event(step)
        follower.follow(step, json.loads(json.dumps(ahead.event(step))))
        assert follower.state_dict() == in_turn.state_dict()
        states.append(follower.state_dict())
    resumed = sampler_of(**fields)
    resumed.lag = 1
    assert resumed.load_state_dict(json.loads(json.dumps(states[11])))
    again = run(resumed, range(13, 31), rates)
    assert resumed.state_dict() == states[-1] and len(again) == 18


def test_another_seed_draws_others_and_without_a_sampler_the_order_is_what_it_was() -> None:
    data = DataConfig("t", prompts_per_step=8, sampler=SamplerConfig(curriculum="success_rate"))
    rows = sampler_of().stats.rows  # type: ignore[union-attr]
    first, other, same = (PromptSampler(100, rows, data, seed).take(8, 1) for seed in (1, 2, 1))
    assert first == same != other
    plain = PromptSampler(100, None, DataConfig("t", prompts_per_step=8), seed=5)
    tracked, order = sampler_of(success_reward=0.5), PromptOrder(100, 8, seed=5)
    for step in range(1, 30):
        assert plain.take(8, step) == tracked.take(8, step) == order.next_step()
        assert plain.event(step) == {"order": order.state_dict()}
    assert plain.state_dict() == order.state_dict() and plain.metrics(1) == {}
    assert tracked.load_state_dict(order.state_dict())  # of a run that kept no rates
    with pytest.raises(ConfigError, match="with seed 5, this run has 1"):
        PromptSampler(100, rows, data, 1).load_state_dict(tracked.state_dict())


class EveryThird:
    """A sampler with a state of its own."""

    def __init__(self) -> None:
        self.start = 0

    def __call__(self, state: Any, step: int, count: int, rng: np.random.Generator) -> np.ndarray:
        self.start += 1
        return (self.start + 3 * np.arange(count)) % len(state)

    def state_dict(self) -> dict[str, int]:
        return {"start": self.start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["start"]


def least_known(state: Any, step: int, count: int, rng: np.random.Generator) -> np.ndarray:
    return np.lexsort((rng.random(len(state)), state.answers))[:count]


def test_functions_of_the_users_choose() -> None:
    sampler = sampler_of({"a": 100}, 8, function=EveryThird)
    assert sampler.take(3, 1) == [1, 4, 7] and sampler.take(3, 1) == [2, 5, 8]
    resumed = sampler_of({"a": 100}, 8, function=EveryThird)
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert resumed.take(3, 2) == [3, 6, 9]
    follower = sampler_of({"a": 100}, 8, function=EveryThird)
    follower.follow(1, sampler.event(1))
    assert follower.state_dict() == sampler.state_dict()
    least = sampler_of({"a": 24}, 8, function=least_known)
    assert sorted(itertools.chain(*run(least, range(1, 4), {}))) == list(range(24))
    for wrong, words in (
        ([1, 1], "2 places, 1 different"), ([1, 200], "1 outside of 0 to 99"), ([1], "1 place,"),
        ([0.5, 1], "expected 2 integers"), (None, "expected 2 integers"),
    ):  # fmt: skip
        bad = sampler_of({"a": 100}, 8, function=lambda *_, wrong=wrong: wrong)
        with pytest.raises(ConfigError, match=words):
            bad.take(2, 1)


def test_metrics_by_source_and_histogram() -> None:
    sampler = sampler_of({"a": 6, "b": 4}, 10, success_reward=1.0, drop_solved=1)
    picked = sampler.take(10, 1)
    answer(sampler, 1, picked, {0: 1.0, 1: 0.5, 9: 0.25})
    found = sampler.metrics(1)
    assert found["a/share"] == 0.6 and found["b/success_rate"] == 1 / 16
    assert found["a/success_rate"] == 6 / 24 and found["prompts/success_rate"] == 7 / 40
    assert (found["prompts/known"], found["prompts/dropped"]) == (1.0, 0.1)
    assert found["success_rates/0"] == 0.7 and found["success_rates/100"] == 0.1
    assert found["success_rates/20_40"] == found["success_rates/40_60"] == 0.1
    bars = [share for name, share in found.items() if name.startswith("success_rates/")]
    assert len(bars) == 7 and sum(bars) == pytest.approx(1)
    assert histogram(np.array([])) == {}
    assert sampler.stats is not None and not sampler.stats.answers.any()  # not counted before


def test_a_source_that_is_too_small_for_its_weight_is_refused() -> None:
    sampler = sampler_of(weights={"a": 1, "b": 1, "c": 2}, per_step=30)
    with pytest.raises(ConfigError, match=r"'c' 0\.5 of a step.*up to 15 of 30.*it has 10"):
        sampler.check_enough(30)
    fits = sampler_of(weights={"a": 1, "b": 1, "c": 2})
    fits.check_enough(20)
    (line,) = fits.lines()
    assert line.startswith("  a step is 0.25 of 'a', 60 prompts; 0.25 of 'b', 30 prompts; 0.5 of")


ROWS = [
    {"data_source": source, "prompt": [{"role": "user", "content": text}], "ground_truth": "1",
     "extra_info": {"difficulty": difficulty}}
    for source, text, difficulty in (
        ("b", "1+1=", 3), ("a", "2+1=", 0.5), ("a", "", 7), ("b", "1+1=" * 30, 9), ("a", "3=", -1),
    )
]  # fmt: skip


def load(folder: Path, qwen3: Path, topology: Topology, rows: list[dict[str, Any]]) -> PromptRows:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sampler = SamplerConfig(curriculum="difficulty", pace_steps=3)
    data = DataConfig(
        str(folder / "rows.jsonl"), max_prompt_tokens=20, on_bad_row="skip", sampler=sampler
    )
    tokenizer = AutoTokenizer.from_pretrained(qwen3)
    found = PromptDataset.load(str(data.train), tokenizer, data, topology, sampler=sampler)
    assert found.marked is not None
    return found.marked


def test_rows_are_marked_with_source_and_difficulty(
    tmp_path: Path, qwen3: Path, topology: Topology
) -> None:
    rows = load(tmp_path, qwen3, topology, ROWS)  # one is bad, one is too long
    assert rows.names == ("a", "b") and rows.ids.tolist() == [0, 1, 4]
    assert rows.source.tolist() == [1, 0, 0] and rows.difficulty is not None
    assert rows.difficulty.tolist() == [3, 0.5, -1]
    shares = [[("b", 1.0), ("", 0.0)], [("a", 2.0)]]  # of two ranks, rows 0 and 2, row 1
    marks = marks_of(shares, 3, ("a", "b"), SamplerConfig(curriculum="difficulty"))
    assert marks.source.tolist() == [1, 0, 0] and marks.difficulty is not None
    assert marks.difficulty.tolist() == [1, 2, 0]
    named = [row | {"extra_info": {"difficulty": "easy"}} for row in ROWS]
    with pytest.raises(ConfigError, match=r"extra_info\.difficulty.*str 'easy'.*a number, by"):
        load(tmp_path, qwen3, topology, named)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"weights": {"a": 0}}, "at least one must be above 0"),
    ({"pace_steps": 5}, "pace_steps=5 has no effect: it is of curriculum='difficulty'"),
    ({"target_rate": 0.3}, "target_rate=0.3 has no effect: it is of curriculum='success_rate'"),
    ({"curriculum": "difficulty", "floor": 1.0}, "floor=1.0 has no effect"),
    ({"curriculum": "difficulty"}, "with pace_steps=0 and data.shuffle=True"),
    ({"curriculum": "success_rate", "shuffle": False}, "shuffle=False has no effect"),
    ({"return_after": 5}, "return_after=5 has no effect: drop_solved=0"),
    ({"function": 3}, "cannot be called"),
    ({"function": Counter}, "no method __call__"),
    ({"function": least_known, "drop_solved": 1}, "drop_solved=1 has no effect: .*function"),
    ({"function": least_known, "shuffle": False}, "shuffle=False has no effect"),
    ({"curriculum": "difficulty", "pace_steps": 5, "difficulty_key": " "}, "names no column"),
    ({"curriculum": "difficulty", "shuffle": False, "pace_start": 0.5}, "with pace_steps=0"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_fields_that_nothing_reads_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sampler_of(**fields)


def test_a_class_with_half_a_state_is_refused() -> None:
    half = type("Half", (), {"__call__": operator.index, "state_dict": dict})
    with pytest.raises(ConfigError, match="only one of state_dict and load_state_dict"):
        sampler_of(function=half)
