"""What a judge is asked, how its verdicts are read, and which configs are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plan_configs import ppo_config, rollout_config
from transformers import CONFIG_MAPPING, Qwen3Config, Qwen3NextConfig

from spmdrl.cli.arguments import load_config
from spmdrl.config import AlgoConfig, ConfigError, JudgeConfig, PpoConfig, RolloutConfig
from spmdrl.distributed.placement import place
from spmdrl.rewards.judge import (
    answer_of,
    asked_messages,
    better_messages,
    check_words,
    read_verdict,
    score_messages,
)
from spmdrl.rewards.runner import asks_judge
from spmdrl.rollout.kv_storage import move_back, move_to_host
from spmdrl.rollout.vllm import model_types
from spmdrl.training.checks.describe import describe
from spmdrl.training.checks.judge import check_comparisons, check_sampling
from spmdrl.training.checks.judge_memory import judge_memory
from spmdrl.training.checks.memory_plan import memory_plan
from spmdrl.training.checks.ranges import check_bounds
from spmdrl.training.checks.rl import check, check_held_out
from spmdrl.training.language_judge import (
    NOBODY,
    JudgeVerdict,
    Question,
    judgements,
    opponents,
    take,
    verdict_seed,
)
from spmdrl.types import Judgement, Prompt, Sample

ROOT = Path(__file__).parents[2]
EACH, PAIRS = JudgeConfig("m"), JudgeConfig("m", compare="pairs")


def sample_of(response: str = "4", messages: list[dict[str, Any]] | None = None) -> Sample:
    prompt = Prompt(3, [5], "sums", "4", "2+2=", {"level": 1})
    said = messages or [{"role": "assistant", "content": response}]
    return Sample(prompt, 0, 1, [], [], [], [], "stop", response, said)


# ---- what it is asked


def test_the_default_templates_have_all_that_is_known_in_their_order() -> None:
    [each] = asked_messages(replace(EACH, rubric="Be brief."), sample_of(), ["four"])
    places = [each["content"].index(text) for text in ("2+2=", "\n4\n", "four", "Be brief.")]
    assert each["role"] == "user"
    assert places == sorted(places)
    [pair] = asked_messages(PAIRS, sample_of(), ["four", "five"])
    assert pair["content"].index("four") < pair["content"].index("five")
    assert "right answer" in score_messages("q", "a", "4", "r").lower()
    assert "right answer" not in better_messages("q", "a", "b", None, "r").lower()


def test_places_of_a_template_are_filled_once() -> None:
    """What an answer says in braces is text, and other braces stay."""
    config = replace(EACH, template='{"q": {question}} {answer} {ground_truth}|{other}')
    [asked] = asked_messages(config, sample_of(), ["{rubric} {question}"])
    assert asked["content"] == '{"q": 2+2=} {rubric} {question} 4|{other}'


def test_a_function_names_what_it_wants_and_returns_a_text_or_a_chat() -> None:
    def chat(answer: str, extra_info: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "system", "content": str(extra_info)}, {"role": "user", "content": answer}]

    asked = asked_messages(replace(EACH, template=chat), sample_of(), ["four"])
    assert [turn["content"] for turn in asked] == ["{'level': 1}", "four"]
    for wrong in (7, [{"role": 3, "content": "a"}], [{"role": "user", "content": None}]):
        with pytest.raises(ConfigError, match=rf"judge\.template returned {re.escape(str(wrong))}"):
            asked_messages(replace(EACH, template=lambda answer, w=wrong: w), sample_of(), ["four"])


def test_of_several_turns_all_that_was_said_is_judged() -> None:
    turns = [
        {"role": "assistant", "content": "calling"},
        {"role": "tool", "name": "add", "content": [{"type": "text", "text": "4"}]},
        {"role": "assistant", "content": "four"},
    ]
    assert answer_of(sample_of("four", turns)) == (
        "assistant: calling\n\ntool: 4\n\nassistant: four"
    )
    assert answer_of(sample_of("four")) == "four"


# ---- what it says


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 3. No: the last counts.\nScore: 7", 7.0),
        ("**score = -1.5**", -1.5),
        ("Score: **8**", 8.0),
        ("Score: very good", None),
        ("", None),
    ],
)
def test_scores_are_read(text: str, score: float | None) -> None:
    assert read_verdict(EACH, text) == score


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("Better: A", 1.0),
        ("At first better: a, then\nBetter: (B)", 0.0),
        ("better: tie", 0.5),
        ("Better: both", None),
        ("Better: answer", None),
    ],
)
def test_comparisons_are_read(text: str, share: float | None) -> None:
    assert read_verdict(PAIRS, text) == share


def test_rules_of_the_users_own_read_verdicts() -> None:
    assert read_verdict(replace(EACH, verdict=r"\[\[(\d+)\]\]"), "so [[9]]") == 9
    assert read_verdict(replace(EACH, verdict=lambda text: float(text)), "2.5") == 2.5
    assert read_verdict(replace(EACH, verdict=lambda text: float(text)), "none") is None
    assert read_verdict(replace(EACH, verdict=lambda text: None), "none") is None
    assert read_verdict(replace(PAIRS, verdict=r"(\S+)$"), "share 0.25") == 0.25
    assert read_verdict(replace(PAIRS, verdict=r"(\S+)$"), "share 25") is None  # no share
    assert read_verdict(replace(EACH, verdict=lambda text: float("nan")), "2.5") is None
    for wrong in ("good", [1.0], 10**400):
        with pytest.raises(ConfigError, match=r"judge\.verdict returned .*expected a number"):
            read_verdict(replace(EACH, verdict=lambda text, wrong=wrong: wrong), "good")


def test_everyone_is_as_often_first_as_second() -> None:
    indices = [-1, 0, 2, 5, 7]
    for count in (0, 1, 2, 4):
        asked = [(i, other) for i in indices for other in opponents(indices, i, count)]
        assert len(set(asked)) == len(asked) == 5 * (count or 4)
        assert all(i != other for i, other in asked)
        for index in indices:
            firsts = sum(i == index for i, _ in asked)
            assert firsts == sum(other == index for _, other in asked)


def test_a_win_rate_is_the_mean_of_what_can_be_read() -> None:
    ids = np.array([1], np.int32)
    a, b = (0, 0), (0, 1)
    said = {"Better: A": (a, b), "Better: B": (b, a), "Better: ?": (a, b)}
    questions = [Question(*pair, ids) for pair in said.values()]
    found = judgements(PAIRS, questions, [JudgeVerdict(text, 2) for text in said])
    assert found[a] == Judgement(1.0, list(said), 1, 6)
    assert found[b].score == 0.0
    alone = judgements(EACH, [Question(a, NOBODY, ids)], [JudgeVerdict("Score: 4", 3)])
    assert alone == {a: Judgement(4.0, ["Score: 4"], 0, 3)}


def test_a_sample_without_a_verdict_is_invalid_or_has_the_default() -> None:
    unread, sample = Judgement(None, ["hm"], 1, 1), sample_of()
    take(sample, replace(unread), EACH)
    assert "cannot be read (judge.verdict): 'hm'" in str(sample.invalid)
    sample = sample_of()
    take(sample, replace(unread), replace(EACH, unparsable=-2.0))
    assert sample.invalid is None
    assert sample.judgement == Judgement(-2.0, ["hm"], 1, 1)


def test_seeds_are_of_what_is_asked_and_of_the_run() -> None:
    seeds = {verdict_seed(run, text) for run in (0, 1) for text in (b"a", b"b")}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert verdict_seed(0, b"a") == verdict_seed(0, b"a")


def test_weights_that_sleep_come_back_as_they_were() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    model[0].bias = model[1].bias  # shared
    before = {name: t.clone() for name, t in model.state_dict().items()}
    places = [id(t) for t in model.state_dict(keep_vars=True).values()]
    moved = move_to_host(model)
    assert all(t.untyped_storage().nbytes() == 0 for t in model.parameters())
    move_back(moved)
    assert [id(t) for t in model.state_dict(keep_vars=True).values()] == places
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


# ---- configs


ALONE = {
    "rollout": rollout_config(engine="hf", n=1), "algo": AlgoConfig(advantage="reinforce")
}  # fmt: skip
CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"judge": None}, "asks for judge_score, but there is no judge"),
    ({}, {"reward": "gsm8k"}, "judge has no effect: no reward function"),
    ({"model": ""}, {}, "judge.model is not set"),
    ({"max_tokens": 400}, {}, "200 + judge.max_tokens=400 = 600 tokens, but"),
    ({"opponents": 2}, {}, "judge.opponents=2 has no effect"),
    ({"compare": "pairs", "opponents": 9}, {}, "an answer has 3 others"),
    ({"compare": "pairs"}, ALONE, "but rollout.n=1"),
    ({"top_p": 0.5}, {}, "judge.top_p=0.5 has no effect on greedy"),
    ({"engine": "vllm", "temperature": 0.001}, {}, "would raise it to 0.01"),
    ({"tensor_parallel": 2}, {}, "'hf' has no tensor parallelism"),
    ({"tensor_parallel": 3, "engine": "vllm"}, {}, "4 attention heads; use one of 1, 2, 4"),
    ({"template": "no places"}, {}, "judge.template has no {answer}"),
    ({"template": "{answer_a}{answer_b}"}, {}, "judge.template has no {answer}"),
    ({"template": "{answer}{answer_a}"}, {}, "has nothing for {answer_a}"),
    ({"template": "{answer_a}", "compare": "pairs"}, {}, "has no {answer_b}"),
    ({"template": "{answer}", "rubric": "r"}, {}, "no place {rubric}"),
    ({"template": lambda response: ""}, {}, "judge.template function"),
    ({"verdict": r"score: \d"}, {}, "has no group"),
    ({"verdict": r"("}, {}, "is no regular expression"),
    ({"chat_template_kwargs": {"tokenize": True}}, {}, "'tokenize' is not yours to set"),
    ({"unparsable": float("inf")}, {}, "is not a finite number"),
]  # fmt: skip


@pytest.mark.parametrize(("judge", "rest", "why"), CASES, ids=[why for *_, why in CASES])
def test_what_cannot_work_is_refused(qwen3: Any, judge: Any, rest: Any, why: str) -> None:
    settings = {"model": str(qwen3), "max_prompt_tokens": 200, "max_tokens": 50, "engine": "hf"}
    given = {
        "reward": "judge",
        "judge": JudgeConfig(**settings | judge),
        "rollout": rollout_config(engine="hf"),
    }
    with pytest.raises(ConfigError) as error:
        check(ppo_config(qwen3, **given | rest), 1)
    assert why in str(error.value)


def test_an_engine_that_only_a_push_fills_holds_no_judge(qwen3: Any) -> None:
    config = ppo_config(qwen3, rollout=rollout_config(engine="sglang"))
    with pytest.raises(ConfigError, match=r"set judge\.engine to 'vllm' or 'hf'"):
        check_sampling(JudgeConfig("m"), config)


def test_two_engines_of_one_library_have_the_same_groups_on_a_rank(qwen3: Any) -> None:
    def config(degree: int, judges: int, placement: dict[str, str]) -> Any:
        judge = JudgeConfig(
            str(qwen3), max_prompt_tokens=200, max_tokens=50, tensor_parallel=judges
        )
        rollout = replace(RolloutConfig(n=4, max_tokens=50), tensor_parallel=degree)
        return ppo_config(qwen3, reward="judge", judge=judge, rollout=rollout, placement=placement)

    check(config(2, 2, {}), 4)
    check(config(1, 1, {"reward": "1"}), 4)
    check(config(2, 1, {"rollout": "0-1", "reward": "2"}), 4)
    for degree, judges, placement in ((2, 1, {}), (2, 2, {"reward": "1-2"})):
        with pytest.raises(ConfigError, match="make other groups of rank"):
            check(config(degree, judges, placement), 4)
    with pytest.raises(ConfigError, match=r"on ranks 0-2 of reward"):
        check(config(1, 2, {"reward": "0-2"}), 4)
    with pytest.raises(ConfigError, match="make other groups of rank 0"):
        check_held_out(config(2, 1, {}), num_scorers=2, world=2)


def test_a_judge_whose_states_may_not_move_is_kept_awake_on_gpus(
    qwen3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(**settings: Any) -> Any:
        judge = JudgeConfig(str(qwen3), max_prompt_tokens=200, max_tokens=50, **settings)
        return ppo_config(qwen3, reward="judge", judge=judge, rollout=rollout_config())

    check(config(), 1)
    model_types.check_frozen_sleep(Qwen3NextConfig())  # vLLM's kernels of CPUs keep no address
    monkeypatch.setattr(model_types, "runs_on_cpu", lambda: False)
    model_types.check_frozen_sleep(Qwen3Config())
    with pytest.raises(ConfigError, match=r"'qwen3_next' has layers that carry a state .*judge"):
        model_types.check_frozen_sleep(Qwen3NextConfig())
    with pytest.raises(ConfigError, match=r"'glm_moe_dsa' has sparse attention, .* two precisions"):
        model_types.check_frozen_sleep(CONFIG_MAPPING["glm_moe_dsa"]())
    monkeypatch.setattr(model_types, "carries_state", lambda text: True)
    with pytest.raises(ConfigError, match=r"set judge\.sleep=False, or place 'reward'"):
        check(config(), 1)
    check(config(sleep=False), 1)
    check(replace(config(), placement={"reward": "1", "rollout": "0", "actor": "0"}), 2)


def test_the_plan_counts_its_memory_awake_and_asleep(qwen3: Any) -> None:
    judge = JudgeConfig(str(qwen3), max_prompt_tokens=200, max_tokens=50, compare="pairs")
    config = ppo_config(qwen3, reward="judge", judge=judge, rollout=rollout_config())
    text = describe(config, 2, 100)
    assert "judge    ranks 0-1: 2 vllm engines x tp 1; 12 comparisons a prompt" in text
    assert "judge    weights" in text
    for gpu_gib in (None, 80.0):
        plan = memory_plan(config, 2, gpu_gib=gpu_gib)
        parts = {phase.name: phase.parts for phase in plan.timelines[0].phases}
        assert parts["judge"]["judge"] > parts["update_actor"]["judge"]
        assert parts["judge"]["engine"] == parts["rollout"]["engine"]
    memory = judge_memory(config, place(config, 2), 80.0)
    assert memory is not None
    assert memory.awake == pytest.approx(0.3 * 80)
    assert memory.asleep_on_host == memory.weights > 0
    apart = replace(config, placement={"actor": "0", "rollout": "0", "reward": "1"})
    plan = memory_plan(apart, 2, gpu_gib=80.0)
    assert [[phase.name for phase in t.phases] for t in plan.timelines][1] == ["judge"]


def test_functions_with_open_keywords_do_not_ask_for_it() -> None:
    assert not asks_judge(lambda response, **rest: 0.0)
    assert asks_judge(lambda judge_verdicts: 0.0)
    assert asks_judge({"a": "gsm8k", "b": "judge"})


@pytest.mark.parametrize("name", ["rubric", "pairs"])
def test_the_examples_ask_what_they_are_to_ask(name: str) -> None:
    config = load_config(str(ROOT / "examples" / "judge" / f"{name}.py"), PpoConfig, {})
    assert config.judge is not None and asks_judge(config.reward)
    check_bounds(config)
    check_words(config.judge)
    check_comparisons(config.judge, config)
    answers = ["four"] if config.judge.compare == "each" else ["four", "five"]
    asked = asked_messages(config.judge, sample_of(), answers)
    assert all(answer in asked[-1]["content"] for answer in answers)
    place(config, 8)
