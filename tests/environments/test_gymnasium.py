"""Episodes of Gymnasium's own environments and of a text game, as a sample plays them."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from dialogues import PROMPT, config_of, contents, messages_of_sample, played
from text_games import AsyncStep, NoStep, Untold, WrongStep, double, make_guess, shout

from spmdrl.config import ConfigError, MultiTurnConfig, RewardConfig
from spmdrl.environments.episodes import (
    episode_reward,
    last_number,
    spoken_action,
    turn_rewards,
    write_rows,
)
from spmdrl.environments.gymnasium import GymnasiumEpisode, episode_rows
from spmdrl.rewards.runner import RewardRunner
from spmdrl.rollout.multi_turn.environment import check_environments
from spmdrl.training.checks.turns import check_turns
from spmdrl.types import Prompt, Sample

LAKE = {"is_slippery": False, "render_mode": "ansi"}


def prompt_of(row: dict[str, Any]) -> Prompt:
    return replace(
        PROMPT, data_source=row["data_source"], extra_info=row["extra_info"], chat=row["prompt"]
    )


@pytest.mark.programs
def test_a_sample_walks_over_the_lake(talk: Any, tokenizer: Any) -> None:
    [row] = episode_rows("FrozenLake-v1", [3], "Cross the lake.", LAKE)
    assert row["prompt"][0]["content"] == "Cross the lake.\n\n[S]FFF\nFHFH\nFFFH\nHFFG"
    prompt, limits = prompt_of(row), MultiTurnConfig(timeout_s=60, workers=1, max_turns=9)
    round = talk(prompt, environment=GymnasiumEpisode, multi_turn=limits)
    path = ["<action>1</action>", "a 7?", r"2, no: \boxed{1}", "2", "<think>0</think>1", "2", "2"]
    sample = played(round, tokenizer, *path)
    assert sample.finish_reason == "stop"
    said = messages_of_sample(sample, prompt, tokenizer)[1:]
    assert [m["role"] for m in said] == ["assistant", "user"] * 6 + ["assistant"]
    assert said[1]["content"].splitlines()[1:] == ["SFFF", "[F]HFH", "FFFH", "HFFG"]
    assert said[3]["content"].startswith("No action was found in your answer. It must be one of Di")
    assert said[-1]["observation"].endswith("HFF[G]")
    assert [m["reward"] for m in said[::2]] == [0, 0, 0, 0, 0, 0, 1]
    # on another engine, with nothing but the messages
    other = talk(prompt, environment=GymnasiumEpisode, multi_turn=limits)
    again = played(other, tokenizer, *path[:3])
    moved = replace(again, replies=list(again.replies))
    for round in (talk(prompt, environment=GymnasiumEpisode, multi_turn=limits), other):
        assert "FHFH\n[F]FFH" in messages_of_sample(moved, prompt, tokenizer)[6]["content"]
        went_on = played(round, tokenizer, "2", begun=moved)
        assert "F[F]FH" in messages_of_sample(went_on, prompt, tokenizer)[8]["content"]


@pytest.mark.programs
def test_steps_have_their_rewards_in_the_run(talk: Any, tokenizer: Any) -> None:
    """Those of the turn that ends the episode, and of the last that there may be, too."""
    [row] = episode_rows("guess", [13], "Play.", {"most": 9}, make_guess, lambda text, _: text)
    game = functools.partial(
        GymnasiumEpisode, make=make_guess, parse=shout, describe=lambda text, _: text,
        reward_of_bad_action=-1.0,
    )  # fmt: skip
    prompt, limits = prompt_of(row), MultiTurnConfig(timeout_s=60, workers=1, max_turns=3)
    round = talk(prompt, environment=game, multi_turn=limits)
    games = {
        ("I say 1", "hm", "I say 4"): ([-0.25, -1.0, 1.0], "stop"),
        ("I say 1", "I say enough"): ([-0.25, -0.25], "stop"),
        ("I say 1", "I say 2", "I say 3"): ([-0.25, -0.25, -0.25], "turns"),
    }
    rewards = RewardRunner(turn_rewards, RewardConfig(workers=1, per_turn=True))
    for said, (worth, reason) in games.items():
        answer = played(round, tokenizer, *said)
        assert answer.finish_reason == reason
        chat = messages_of_sample(answer, prompt, tokenizer)
        sample = Sample(prompt, 0, 0, [], [], [], [], reason, messages=chat[1:])
        rewards.score([sample])
        assert (sample.turn_rewards, sample.reward) == (worth, sum(worth)), sample.invalid
        assert episode_reward(chat, sample.num_turns) == sum(worth)
    rewards.close()
    assert "partial" not in round.by.lines()[0] and "GymnasiumEpisode" in round.by.lines()[0]


@pytest.mark.programs
def test_a_card_game_by_numbers(talk: Any, tokenizer: Any) -> None:
    [row] = episode_rows("Blackjack-v1", [5], "0: stick, 1: hit.")
    env = gymnasium.make("Blackjack-v1")
    first, _ = env.reset(seed=5)
    assert row["prompt"][0]["content"] == f"0: stick, 1: hit.\n\n{first}"
    _, reward, done, _, _ = env.step(0)
    chat = messages_of_sample(
        played(talk(prompt_of(row), environment=GymnasiumEpisode), tokenizer, "0"),
        prompt_of(row), tokenizer,
    )  # fmt: skip
    assert done and chat[-1]["reward"] == reward


@pytest.mark.programs
def test_each_data_source_has_its_environment(talk: Any, tokenizer: Any) -> None:
    """Which may be none."""
    sources = {"maths": double, "game": Untold, "plain": None}
    prompts = [replace(PROMPT, data_source=source) for source in sources]
    check_environments(sources, sources)
    round = talk(*prompts, environment=sources)
    assert "environment double of maths, environment Untold of game" in round.by.lines()[0]
    expected = {
        ("maths", "hi"): ([["4"]], "abort"),
        ("game", "text"): ([["", "a text"]], "abort"),
        ("game", "turn"): ([["", "listen"]], "abort"),
        ("game", "over"): ([[""]], "stop"),
        ("game", "seen"): ([["", "x"]], "abort"),
        ("game", "ends"): ([[""]], "stop"),
        ("plain", "hi"): ([], "stop"),
    }
    for (source, text), (replies, reason) in expected.items():
        answer = played(round, tokenizer, text, position=[*sources].index(source))
        assert (contents(answer), answer.finish_reason) == (replies, reason)
    problems = {"nan": "nan as a step's reward", "no": "'no' as a step's done",
                "other": "expected None"}  # fmt: skip
    for text, problem in problems.items():
        failed = played(round, tokenizer, text, position=1)
        assert failed.finish_reason == "error" and problem in failed.replies[-1]


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        (NoStep, "NoStep has no plain method `step"),
        (AsyncStep, "AsyncStep has no plain method `step"),
        (WrongStep, "is called with `action`"),
        ({}, "maps no data_source"),
        ({"a": None}, "maps no data_source"),
        ({"a": "double"}, "a function or a class, got 'double'"),
        ({"a": double}, "no data_source 'maths'; it has 'a'"),
    ],
)
def test_what_is_no_environment_is_refused(environment: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_environments(environment, ["maths"])
    if "maths" not in problem:
        with pytest.raises(ConfigError, match=problem):
            check_turns(config_of(environment=environment))


def test_actions_in_text(tmp_path: Path) -> None:
    assert spoken_action("a <action> go\nnorth </action>.") == "go\nnorth"
    assert spoken_action(r"<think>\boxed{1}</think> north ") == "north"
    assert [last_number(text) for text in ("go", "1 or -2", r"\boxed{3} 4")] == [None, -2, 3]
    rows = episode_rows("Taxi-v4", range(2), "Drive.", {"render_mode": "ansi"})
    assert write_rows(tmp_path / "taxi.jsonl", rows) == 2
    assert rows[0] != rows[1] and "\x1b" not in rows[0]["prompt"][0]["content"]
