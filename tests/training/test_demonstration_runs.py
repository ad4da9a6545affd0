"""Runs whose steps learn from answers that the rows have: LUFFY's mixture, and SPIN's pairs."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from programs import metrics_of, samples_of, set_up, train

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

N, PROMPTS = 4, 8
ASKED = ["--config", "cfg.py", "--data.demonstration_key", "worked", "--algo.demonstrations", "1",
         "--log_samples", "64", "--log_sample_tokens", "8", "--data.eval", "None"]  # fmt: skip


@pytest.fixture
def folder(tmp_path, qwen3):
    """The sums, of which every fifth row has no demonstration, and one has one that is too long."""
    set_up(tmp_path, qwen3)
    path = Path(tmp_path, "train.jsonl")
    rows = [json.loads(line) for line in path.open()]
    for i, row in enumerate(rows):
        truth = row["reward_model"]["ground_truth"]
        row["worked"] = None if i % 5 == 3 else [truth, f"{truth}!"] if i % 2 else truth
    rows[1]["worked"] = "9" * 30
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run(folder: Path, ranks: int, *args: str) -> str:
    done = train(folder, ranks, *ASKED, *args)
    assert done.code == 0, done.output[-5000:]
    return done.output


def trained_of(run_dir: Path, step: int) -> dict[tuple[int, int], dict]:
    rows = map(json.loads, Path(run_dir, f"samples/step_{step}_trained.jsonl").open())
    return {(row["group"], row["sample"]): row for row in rows}


def check_samples(run_dir: Path, metrics: dict, n: int, step: int = 1) -> None:
    """A group has n answers, the last of them the row's own where it has one; metrics of the
    policy's answers do not see it."""
    rows = samples_of(run_dir, step)
    groups: dict[int, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    assert len(groups) == PROMPTS
    for group in groups.values():
        assert [row["sample"] for row in group] == list(range(n))
        marked = ["demonstration" in row for row in group]
        i = group[0]["prompt_id"]
        assert marked == [False] * (n - 1) + [i % 5 != 3 and i != 1], i
        if marked[-1]:
            truth = group[-1]["ground_truth"]
            assert group[-1]["response"] in ((truth, f"{truth}!") if i % 2 else (truth,))
            assert group[-1]["finish_reason"] == "stop"
        assert ["logprobs" in row for row in group] == [not each for each in marked]
    for given, name in ((False, "reward/mean"), (True, "demonstrations/reward")):
        own = [row["reward"] for row in rows if ("demonstration" in row) == given]
        assert metrics[name] == pytest.approx(sum(own) / len(own))
    num_given = sum("demonstration" in row for row in rows)
    assert metrics["demonstrations/share"] == num_given / PROMPTS
    assert 0.5 < metrics["demonstrations/share"] < 1


def test_steps_learn_from_demonstrations_and_resume_bit_for_bit(folder):
    asked = ["--steps", "4", "--checkpoint.every_steps", "2", "--rollout.static_split", "True",
             "--algo.correction.level", "token", "--algo.kl_coef", "0.001", "--ref.dtype",
             "float32", "--algo.entropy_coef", "0.001", "--algo.epochs", "2",
             "--actor.optim.lr", "1e-2", "--data.sampler.success_reward", "1.0"]  # fmt: skip
    output = run(folder, 2, *asked)
    assert "1 of 47 demonstrations is longer than rollout.max_tokens=8" in output
    rows = metrics_of(folder / "run")
    first, last = rows[0], rows[-1]
    check_samples(folder / "run", first, N)
    assert last["actor/off_policy_prob"] > 2 * first["actor/off_policy_prob"] > 0
    assert 0 < first["actor/off_ratio_mean"] < 1
    # demonstrations are compared with no engine, and no weights have chosen them
    assert first["actor/logprob_diff_max"] < 1 and first["staleness/max"] == 0
    assert abs(first["correction/kl"]) < 1e-3 and first["actor/ratio_max"] < 3
    # the policy has given no right answer by itself; its rows' answers are no success of its
    assert first["reward/mean"] < 0.5 < first["demonstrations/reward"]
    rates = {k: v for k, v in first.items() if k.startswith("success_rates/")}
    assert sum(rates.values()) == pytest.approx(rates[min(rates)]), rates
    trained = trained_of(folder / "run", 1)
    given = [r for r in samples_of(folder / "run", 1) if "demonstration" in r]
    assert all(trained[r["group"], r["sample"]]["advantage"] > 0 for r in given)
    shutil.rmtree(folder / "run/checkpoints/step_00000004")
    run(folder, 2, *asked, "--resume", "auto")
    assert metrics_of(folder / "run")[-2:] == rows[-2:]


def test_answers_that_end_in_a_later_step_have_them_beside_them(folder):
    """They are not kept with what is begun: a resumed run reads them from the rows again."""
    asked = ["--rollout.oversample", "1.5", "--algo.correction.bypass", "True",
             "--checkpoint.every_steps", "1"]  # fmt: skip
    run(folder, 1, *asked)
    first, second = metrics_of(folder / "run")
    check_samples(folder / "run", first, N)
    check_samples(folder / "run", second, N, step=2)
    shutil.rmtree(folder / "run/checkpoints/step_00000002")
    done = train(folder, 1, *ASKED, *asked, "--resume", "auto", "--algo.demonstrations", "2")
    assert done.code != 0 and "begun with algo.demonstrations=1; this run has 2" in done.output
    run(folder, 1, *asked, "--resume", "auto")
    assert metrics_of(folder / "run")[-1] == second


def test_a_dry_run_counts_and_scores_them(folder):
    output = run(folder, 1, "--dry-run")
    assert "demonstrations: 47, 1 of them too long; 31 rows have one to learn from" in output
    assert "reward of a demonstration, of 8 prompts: mean 1.0" in output, output[-3000:]


def test_pairs_of_a_demonstration_and_a_sampled_answer(folder):
    """SPIN, whose reference is the policy of the last iteration, here of the last step."""
    run(folder, 1, "--rollout.n", "2", "--algo.policy_loss", "dpo", "--algo.loss_args.beta", "0.3",
        "--algo.pairs", "demonstration", "--algo.ref_model_sync_steps", "1",
        "--algo.ref_model_mixup_alpha", "1.0", "--ref.dtype", "float32")  # fmt: skip
    rows = [row for row in metrics_of(folder / "run") if "actor/loss" in row]
    for step, row in enumerate(rows, start=1):
        check_samples(folder / "run", row, 2, step)
        assert row["pairs/share"] == row["demonstrations/share"]
        assert row["actor/loss"] == pytest.approx(math.log(2), abs=1e-6)  # of the first update
        assert row["actor/logprob_diff_max"] < 1
        trained = trained_of(folder / "run", step)
        for (_, index), each in trained.items():
            assert (each["advantage"] > 0) == (index == 1)
        assert len(trained) == 2 * PROMPTS * row["pairs/share"]
    assert rows[1]["actor/off_policy_prob"] > rows[0]["actor/off_policy_prob"]


def test_sampling_ahead_has_them_too(folder):
    run(folder, 2, "--async_steps", "1", "--placement", '{"actor":"0","rollout":"1"}',
        "--algo.correction.level", "token", "--algo.advantage", "rloo")  # fmt: skip
    first, second = metrics_of(folder / "run")
    check_samples(folder / "run", first, N)
    assert second["staleness/max"] <= 1 and second["actor/off_policy_prob"] > 0
    assert first["actor/logprob_diff_max"] < 1
