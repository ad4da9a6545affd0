"""Every recipe of configs/ as a user runs it, and what the recipes carry from step to step."""

import json
import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from programs import CONFIG, ROOT, make_arithmetic, metrics_of, train, write_task
from safetensors.torch import load_file, save_file
from tiny_models import save_qwen3

pytestmark = pytest.mark.ranks

TINY = Path(ROOT, "configs").glob("qwen3_tiny_arithmetic_*_cpu.py")
RECIPES = {config.stem.split("_")[3]: config for config in sorted(TINY)}
TOGETHER = ("async", "grpo", "lora")  # with roles apart, and one of each way to move weights
LENGTHS = {"mixture": ["--epochs", "0.0125"]}  # of 178 steps
SMALL = ["--data.prompts_per_step", "8", "--rollout.engine", "hf", "--eval_every", "0",
         "--checkpoint.every_steps", "0", "--trackers", "()",
         "--data.max_eval_prompts", "4"]  # fmt: skip


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory):
    """The arithmetic task with a model that nobody has trained."""
    folder = tmp_path_factory.mktemp("arithmetic")
    make_arithmetic(folder)
    os.rename(folder / "runs/arithmetic/model", folder / "runs/arithmetic/sft_model")
    os.symlink("sft_model", folder / "runs/arithmetic/teacher")
    return folder


def test_the_recipe_of_preferences_runs_end_to_end(arithmetic):
    """On the first rows: it computes the reference of all before its first step."""
    rows = arithmetic / "runs/arithmetic/preferences.parquet"
    pq.write_table(pq.read_table(rows).slice(0, 128), rows)
    done = train(
        arithmetic, 1, "--config", str(RECIPES["dpo"]), "--run_dir", "run_dpo", "--steps", "2",
        "--eval_every", "2", "--checkpoint.every_steps", "2", "--trackers", "()",
        program="spmdrl.preference",
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    rows = metrics_of(arithmetic / "run_dpo")
    assert rows[-1]["step"] == 2 and "eval/rewards/accuracies" in rows[-1]


OTHERS = ("sft", "reward", "dpo")  # whose program is another


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r not in OTHERS])
def test_recipe_runs_end_to_end(arithmetic, recipe):
    """Mostly on one rank: test_invariance.py holds what the recipes choose to it on several."""
    config, ranks = str(RECIPES[recipe]), 1 + (recipe in TOGETHER)
    done = train(arithmetic, ranks, "--config", config, "--run_dir", f"run_{recipe}", *SMALL,
                 *LENGTHS.get(recipe, ["--steps", "2"]))  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    rows = metrics_of(arithmetic / f"run_{recipe}")
    assert [row["step"] for row in rows] == [0, 1, 2]
    expected = {
        "dapo": ["dynamic_sampling/rounds"], "vapo": ["critic/loss"], "prime": ["prm/loss"],
        "pf": ["filter/kept", "correction/ess", "critic/loss"], "ppo": ["critic/loss"],
        "mixture": ["carry/share"], "curriculum": ["prompts/dropped"],
        "difficulty": ["prompts/known"], "own": ["prompts/known"],
    }  # fmt: skip
    for key in ["rollout/loss_tokens", *expected.get(recipe, [])]:
        assert key in rows[-1], key


SPREAD = CONFIG.replace(
    "def reward(response, ground_truth):\n    return float(response.startswith(ground_truth))"
    " + 0.01 * len(response)",
    "def reward(response, ground_truth):\n    return float(sum(map(ord, response)) % 5 == 0)",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, qwen3):
    path = tmp_path_factory.mktemp("runs")
    Path(path, "model").symlink_to(qwen3)
    write_task(path)
    Path(path, "cfg.py").write_text(SPREAD)
    return path


def run(folder, ranks, name, *args):
    done = train(folder, ranks, "--config", "cfg.py", "--run_dir", name, *args)
    assert done.code == 0, done.output[-4000:]
    return metrics_of(folder / name)


def test_dynamic_sampling_fills_the_step_with_unequal_groups(folder):
    args = ["--algo.dynamic_sampling", "6", "--log_samples", "1000", "--algo.advantage", "dr_grpo"]
    results = [run(folder, ranks, f"dapo{ranks}", *args) for ranks in (1, 2)]
    for row in results[0][1:3]:
        assert row["dynamic_sampling/groups"] == 8
        assert row["dynamic_sampling/rounds"] > 1
    for one, two in zip(*results, strict=True):
        one.pop("balance/imbalance", None), two.pop("balance/imbalance", None)
        assert two == pytest.approx(one, rel=1e-4, abs=1e-5)  # the same prompts for 1 and 2 ranks
    asked = [json.loads(line) for line in (folder / "dapo1/samples/step_1.jsonl").open()]
    assert len(asked) > 8 * 4  # the left out ones are shown too
    by_prompt = {}
    for row in asked:
        by_prompt.setdefault(row["prompt_id"], set()).add(row["reward"])
    assert sum(len(rewards) > 1 for rewards in by_prompt.values()) >= 8


def test_dynamic_sampling_gives_up_after_its_rounds(folder):
    Path(folder, "same.py").write_text(SPREAD.replace("% 5 == 0", "% 5 == 9"))
    done = train(
        folder, 2, "--config", "same.py", "--run_dir", "same", "--algo.dynamic_sampling", "2"
    )
    assert done.code == 0, done.output[-4000:]
    for row in metrics_of(folder / "same")[1:]:
        assert row["dynamic_sampling/groups"] == 0
        assert row["dynamic_sampling/rounds"] == 2
        assert row["reward/frac_reward_zero_std"] == 1
        assert "actor/loss" not in row  # nothing to learn from, nothing learnt


def test_the_greedy_answer_is_the_baseline_of_remax(folder):
    """Temperature near 0 samples the greedy answer, so nothing is better than the baseline."""
    args = ["--algo.advantage", "remax", "--rollout.greedy_baseline", "--steps", "1"]
    cold = run(folder, 2, "remax_cold", *args, "--rollout.temperature", "0.001")[1]
    assert cold["reward/mean"] in (0, 1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8, 6 / 8, 7 / 8, 1)
    assert (cold["advantage/mean"], cold["advantage/std"], cold["actor/grad_norm"]) == (0, 0, 0)
    assert cold["advantage/all_zero"] == 1 and "reward/frac_reward_zero_std" not in cold
    assert "warning: every advantage of step 1 is 0" in Path(folder, "log").read_text()
    warm = run(folder, 2, "remax_warm", *args)[1]
    assert warm["advantage/all_zero"] == 0
    assert warm["advantage/std"] > 0
    assert warm["actor/grad_norm"] > 0


def test_a_teacher_alone_teaches(folder, tmp_path):
    """Distillation: rewards are logged and have no say, a student of its own teacher has nothing to
    learn, and another's distribution comes nearer; by the teacher's likeliest tokens, and with the
    teacher on a rank of its own, soon."""
    other = save_qwen3(tmp_path / "teacher", seed=5)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] *= 8  # a teacher with a mind of its own
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    args = ["--algo.advantage", "reinforce", "--algo.advantage_args.gamma", "0",
            "--algo.reward_coef", "0", "--algo.kl_coef", "1", "--algo.kl_in", "reward",
            "--algo.kl_estimator", "k1", "--ref.dtype", "float32", "--rollout.n", "1"]  # fmt: skip
    Path(folder, "twin").symlink_to("model")
    own = run(folder, 2, "own_teacher", *args, "--steps", "1", "--ref.model", "twin")[1]
    assert own["reward/std"] > 0
    assert abs(own["advantage/mean"]) < 1e-6
    taught = ["--ref.model", str(other), "--data.prompts_per_step", "32",
              "--actor.optim.lr", "1e-2", "--rollout.static_split", "True"]  # fmt: skip
    rows = run(folder, 2, "other_teacher", *args, *taught, "--steps", "40")[1:]
    for row in rows:
        assert row["advantage/mean"] == pytest.approx(-row["reward/kl"], rel=1e-5)
    kl = [row["reward/kl"] for row in rows]
    assert sum(kl[-10:]) < 0.95 * sum(kl[:10]), kl
    likely = ["--algo.advantage", "reinforce", "--algo.reward_coef", "0", "--ref.dtype", "float32",
              "--algo.distillation.loss", "jsd", "--algo.distillation.topk", "16",
              "--rollout.n", "1", "--placement.actor", "0", "--placement.ref", "1",
              "--steps", "10"]  # fmt: skip
    rows = run(folder, 2, "likely_tokens", *likely, *taught)[1:]
    losses = [row["actor/distillation_loss"] for row in rows]
    assert losses[-1] < 0.7 * losses[0], losses
    assert [row["actor/loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    log = Path(folder, "log").read_text()
    assert "every advantage of step" not in log  # there is a teacher to learn from


STATEFUL = [
    "--algo.advantage", "reinforce_plus_plus", "--algo.sample_filter", "pow",
    "--algo.replay_steps", "1", "--algo.correction.level", "token", "--algo.kl_coef", "0.05",
    "--algo.kl_target", "0.001", "--algo.kl_horizon", "100", "--algo.entropy_target", "9.0",
    "--actor.optim.schedule", "linear", "--actor.optim.decay_steps", "8",
    "--checkpoint.every_steps", "2", "--checkpoint.keep", "5",
    # Hugging Face's last bits depend on what else is in a batch
    "--rollout.static_split", "True",
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(folder):
    return run(folder, 2, "whole", *STATEFUL, "--steps", "4")


def test_replay_and_coefficients_resume_bit_for_bit(folder, whole):
    coefs = [(row["actor/kl_coef"], row["actor/entropy_coef"]) for row in whole[1:]]
    assert len({c for pair in coefs for c in pair}) == 8  # they move in every step
    rates = [row["actor/lr"] for row in whole[1:]]
    assert rates == pytest.approx([1e-3 * (1 - done / 8) for done in range(4)])
    # a run that died after its fourth step's line and before that step's checkpoint
    shutil.copytree(folder / "whole", folder / "resumed")
    shutil.rmtree(folder / "resumed/checkpoints/step_00000004")
    resumed = run(folder, 2, "resumed", *STATEFUL, "--steps", "4", "--resume", "auto")
    assert resumed[3:] == whole[3:]
    other = run(folder, 1, "one_rank", *STATEFUL, "--steps", "4", "--resume",
                "whole/checkpoints/step_00000002")  # fmt: skip
    for want, got in zip(whole[3:], other[-2:], strict=True):
        for name in ("reward/mean", "filter/kept", "actor/loss", "actor/kl_coef", "correction/ess"):
            assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), name


def test_replayed_samples_are_weighed_for_their_age(whole):
    rows = whole
    assert rows[1]["correction/ess"] == pytest.approx(1, abs=1e-6)  # all are new
    assert rows[2]["correction/ess"] < 0.9999  # half are a step old
    assert rows[2]["actor/ratio_max"] == 1.0  # the ratio is to the policy the step starts from
    assert rows[2]["filter/kept"] < 8 * 4  # some were drawn twice


FILTERED = ["--algo.advantage", "reinforce_plus_plus", "--algo.sample_filter", "max_random",
            "--algo.replay_steps", "1", "--algo.correction.level", "token",
            "--actor.dtype", "bfloat16", "--actor.fp8", "rowwise_with_gw_hp",
            "--weights.check", "True", "--checkpoint.every_steps", "2"]  # fmt: skip


@pytest.fixture(scope="module")
def filtered(folder):
    return run(folder, 2, "filtered", *FILTERED, "--steps", "2")


def test_the_ratio_is_one_on_policy_with_a_filter_in_half_precision(filtered):
    """The drawn samples are packed once, for the old logprobs and for the update alike; products in
    FP8 are the same in both."""
    for row in filtered[1:]:
        assert (row["actor/ratio_max"], row["actor/ppo_kl"]) == (1.0, 0.0)


def test_options_that_changed_between_runs(folder, filtered):
    """A coefficient that did not adapt is not taken over; fewer prompts fit an older buffer."""
    more = ["--steps", "3", "--resume", "auto", "--data.prompts_per_step", "3",
            "--algo.kl_coef", "0.1", "--algo.kl_target", "0.05"]  # fmt: skip
    assert run(folder, 2, "filtered", *FILTERED, *more)[-1]["actor/kl_coef"] == 0.1


def test_a_mini_batch_of_nothing_makes_no_update(folder):
    """All answers of a prompt are invalid: its mini-batch has no token to learn from."""
    broken = SPREAD.replace(
        "    return float(",
        '    assert ground_truth not in ("2", "3", "4", "5")\n    return float(',
    )
    Path(folder, "broken.py").write_text(broken)
    args = ["--config", "broken.py", "--run_dir", "broken", "--algo.mini_batches", "8",
            "--rewards.max_invalid_fraction", "1.0", "--steps", "3"]  # fmt: skip
    done = train(folder, 2, *args)
    assert done.code == 0, done.output[-4000:]
    rows = metrics_of(folder / "broken")
    assert any(row["reward/invalid"] >= 4 for row in rows[1:])


def test_old_and_new_logprobs_are_equal_in_the_first_update(folder):
    """Computed in a pass of their own, with the same packing: the ratio is exactly 1."""
    args = ["--algo.correction.level", "token", "--rollout.top_p", "0.9", "--steps", "2"]
    for row in run(folder, 2, "first", *args)[1:]:
        assert row["actor/ratio_max"] == 1.0
        assert row["actor/ppo_kl"] == 0.0
        assert row["correction/kl"] > 0.01  # the engine's distribution was cut
        assert row["correction/weight_mean"] < 0.99
