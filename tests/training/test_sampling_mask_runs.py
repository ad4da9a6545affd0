"""Runs that train on the cut distributions which their tokens were drawn from, and what is refused
(rollout.keep_sampling_mask).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_configs import ppo_config, rollout_config
from programs import CONFIG, metrics_of, set_up, train

from spmdrl.config import (
    AgentConfig,
    AlgoConfig,
    ConfigError,
    CorrectionConfig,
    TrainConfig,
)
from spmdrl.training.checks.rl import check

CUT = CONFIG.replace(
    'engine="hf"',
    'engine="hf", top_k=8, top_p=0.9, min_p=0.02, min_tokens=3, keep_sampling_mask=True',
).replace("config = PpoConfig(", "config = PpoConfig(algo=AlgoConfig(mini_batches=2, kl_coef=0.1),")
# Turns end with a digit or a small letter; the environment answers twice.
TALK = CUT.replace('engine="hf"', 'engine="hf", oversample=1.5, stop_token_ids=tuple(range(4, 44))')
TALK = TALK.replace(
    "kl_coef=0.1", "kl_coef=0.1, correction=CorrectionConfig(level='token')"
).replace("max_tokens=8", "max_tokens=24").replace("config = PpoConfig(", '''
def environment(messages, num_turns, sample_index):
    return None if num_turns == 3 or sample_index == 3 else "(more)"

config = PpoConfig(
    environment=environment,
''')  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, qwen3: Path) -> Path:
    path = set_up(tmp_path_factory.mktemp("cut"), qwen3)
    Path(path, "cfg.py").write_text(CUT)
    Path(path, "talk.py").write_text(TALK)
    return path


def run(folder: Path, ranks: int, name: str, *args: str, config: str = "cfg.py") -> list[dict]:
    done = train(folder, ranks, "--config", config, "--run_dir", name, *args)
    assert done.code == 0, done.output[-4000:]
    return metrics_of(folder / name)


@pytest.mark.ranks
@pytest.mark.vllm
def test_engine_trainer_and_reference_agree_and_a_replay_and_a_resume_repeat_it(folder):
    """The reference is the policy of the start: of whole distributions, or of supports of other
    tokens, one of the three would be apart from the others."""
    rows = run(
        folder, 2, "engine", "--rollout.engine", "vllm", "--keep_samples.last", "2",
        "--checkpoint.every_steps", "1",
    )  # fmt: skip
    for row in rows[1:]:
        assert row["actor/logprob_diff_max"] < 1e-4 < row["actor/entropy"]
        assert 0 < row["actor/ref_kl"] < 0.05
    assert rows[1]["actor/entropy"] < 2.1  # 8 tokens have ln 8
    done = train(folder, 2, "engine", "--step", "2", program="spmdrl.replay")
    assert done.code == 0, done.output[-3000:]
    found = json.loads(Path(folder, "engine/replay/step_2.json").read_text())
    assert found["first_difference"] is None and len(found["compared"]) > 30
    again = run(folder, 2, "again", "--rollout.engine", "vllm", "--resume",
                "engine/checkpoints/step_00000001")  # fmt: skip
    names = {name for name in rows[-1] if name.startswith(("actor/", "reward/", "response/"))}
    assert len(names) > 15 and all(again[-1][name] == rows[-1][name] for name in names)


@pytest.mark.ranks
def test_ranks_that_train_and_do_not_sample_are_sent_the_supports(folder):
    rows = run(
        folder, 3, "placed", "--placement", '{"actor":"0","ref":"1","rollout":"2"}',
        "--async_steps", "1", "--algo.correction.level", "token",
        "--algo.mini_batches", "1",
    )  # fmt: skip
    assert rows[1]["actor/logprob_diff_max"] < 1e-4 and abs(rows[1]["actor/ref_kl"]) < 1e-5
    assert rows[-1]["step"] == 2


@pytest.mark.ranks
def test_a_run_of_several_turns_resumes_with_the_supports_of_what_was_begun(folder):
    saving = ("--checkpoint.every_steps", "1", "--checkpoint.keep", "9", "--steps", "3")
    whole = run(folder, 2, "turns", *saving, config="talk.py")
    resumed = ("--resume", "turns/checkpoints/step_00000001")
    again = run(folder, 2, "again", *saving, *resumed, config="talk.py")
    assert whole[1]["actor/logprob_diff_max"] < 1e-4 and whole[1]["turns/mean"] > 1.5
    assert whole[2]["staleness/max"] == 1
    assert again[-1]["step"] == 3 and again[-2]["staleness/max"] == 1
    assert all(row["reward/invalid"] == 0 and row["actor/ref_kl"] < 0.05 for row in again[1:])
    done = train(
        folder, 2, "--config", "talk.py", "--run_dir", "other", *resumed, "--rollout.top_k", "9"
    )
    assert done.code == 2 and "among which tokens they were drawn" in done.output


MASKED = rollout_config(top_k=20, top_p=0.9, min_p=0.01, min_tokens=2, keep_sampling_mask=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"algo": AlgoConfig(kl_coef=0.1, advantage="gae"), "critic": TrainConfig()}, None),
    ({"actor": TrainConfig(engine="megatron")}, None),
    ({"rollout": replace(MASKED, engine="hf")}, None),
    ({"rollout": replace(MASKED, keep_sampling_mask=False)}, r"top_k=20.*keep_sampling_mask=True"),
    ({"rollout": replace(MASKED, repetition_penalty=1.2)}, "rollout: repetition_penalty=1.2 sampl"),
    (
        {
            "rollout": replace(MASKED, repetition_penalty=1.2),
            "algo": AlgoConfig(correction=CorrectionConfig(level="token")),
        },
        None,
    ),
    ({"rollout": replace(MASKED, top_k=0)}, "needs rollout.top_k, which bounds"),
    ({"rollout": replace(MASKED, engine="sglang")}, r"does not say among which.*\['vllm', 'hf'\]"),
    (
        {"rollout": replace(MASKED, min_p=0.0, speculative=NGRAM)},
        "does not go with rollout.speculative",
    ),
    ({"explain_mismatch": True}, "does not go with explain_mismatch"),
    ({"strict": True, "actor": TrainConfig(dtype="bfloat16")}, "strict=True does not go with"),
    ({"algo": AlgoConfig(policy_loss="dpo")}, "does not go with a loss of pairs"),
    ({"agent": lambda prompt: None, "agents": AgentConfig()}, "does not go with agent"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_what_a_sampling_mask_does_not_go_with_is_refused(qwen3, monkeypatch, changes, said):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())  # SGLang is there
    config = ppo_config(qwen3, **{"rollout": MASKED} | changes)
    if said is None:
        check(config, 1)
        return
    with pytest.raises(ConfigError, match=said):
        check(config, 1)
