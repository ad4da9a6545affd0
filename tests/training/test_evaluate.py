"""Held-out prompts answered several times, in a run and by themselves: the same numbers."""

import json
import math
import shutil
from collections import Counter
from itertools import combinations
from pathlib import Path
from statistics import fmean, pstdev

import pytest
from programs import CONFIG, metrics_of, torchrun, train, write_task

from spmdrl.config import ConfigError, DataConfig, PpoConfig, RolloutConfig
from spmdrl.evaluate import evaluation_of
from spmdrl.training.checks.rl import check_held_out

# a prompt whose sum is divisible by 3 loses an answer, one whose sum is 11 all
SAMPLED = CONFIG.replace(
    """def reward(response, ground_truth):
    return float(response.startswith(ground_truth)) + 0.01 * len(response)
""",
    """def reward(response, ground_truth, sample_index):
    truth = int(ground_truth)
    if truth == 11 or (truth % 3 == 0 and sample_index == 1):
        raise ValueError("not for this one")
    read = str(sum(map(ord, response)) % 3)
    right = float(read == "1")
    return {"score": right, "pred": f"answer {read}", "accuracy": right, "half": right / 2}
""",
).replace("eval_every=0", "eval_every=1, eval_samples=4, eval_temperature=1.0, eval_top_k=30")
WORSE = CONFIG.replace(
    "def reward(response, ground_truth):\n",
    "def reward(response, ground_truth, data_source):\n"
    '    if data_source == "held out": raise ValueError("not for these")\n',
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, qwen3):
    path = tmp_path_factory.mktemp("evaluations")
    Path(path, "model").symlink_to(qwen3)
    write_task(path)
    rows = [json.loads(line) for line in (path / "eval.jsonl").open()]
    for name, source_of in (("eval", lambda i: "ab"[i % 2]), ("worse", lambda i: "held out")):
        text = [json.dumps(row | {"data_source": source_of(i)}) for i, row in enumerate(rows)]
        Path(path, f"{name}.jsonl").write_text("\n".join(text))
    Path(path, "cfg.py").write_text(SAMPLED)
    Path(path, "worse.py").write_text(WORSE.replace("eval.jsonl", "worse.jsonl"))
    return path


@pytest.fixture(scope="module")
def trained(folder):
    """One step on two ranks that both sample and of which one scores; evaluated before and
    after."""
    done = train(
        folder, 2, "--config", "cfg.py", "--steps", "1", "--checkpoint.every_steps", "1",
        "--placement", '{"reward":"1"}', "--log_samples", "100",
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    return metrics_of(folder / "run")


def held_out(row):
    return {name: value for name, value in row.items() if name.startswith("eval/")}


def rows_of(path):
    return [json.loads(line) for line in path.open()]


def evaluated(folder, ranks, *args, program=train):
    done = program(folder, ranks, "--config", "cfg.py", *args, program="spmdrl.evaluate")
    assert done.code == 0, done.output[-4000:]
    return done.output


@pytest.mark.ranks
def test_the_metrics_are_those_of_the_samples(folder, trained):
    got = held_out(trained[0])
    samples = rows_of(folder / "run/samples/eval_0.jsonl")
    assert len(samples) == 40
    assert len({s["response"] for s in samples if s["group"] == 0}) > 1  # they are drawn
    prompts = {group: [] for group in range(10)}
    for s in samples:
        if s["invalid"] is None:
            prompts[s["group"]].append((s["reward"], s["pred"]))
    assert Counter(map(len, prompts.values())) == {4: 5, 3: 3, 0: 2}
    assert got["eval/reward/invalid"] == 11
    assert got["eval/prompts_without_reward"] == 2
    valid = [p for p in prompts.values() if p]
    rewards = [[reward for reward, _ in answers] for answers in valid]
    assert got["eval/reward"] == pytest.approx(fmean(r for own in rewards for r in own))
    assert got["eval/reward/accuracy"] == got["eval/reward"] == 2 * got["eval/reward/half"]
    assert not [name for name in got if name.endswith(("eval/accuracy", "/std"))]
    assert got["eval/mean@4"] == pytest.approx(fmean(map(fmean, rewards)))
    assert got["eval/std@4"] == pytest.approx(fmean(map(pstdev, rewards)))
    for k in (2, 4):
        subsets = [list(combinations(own, k)) for own in rewards if len(own) >= k]
        for name, choose in (("best", max), ("pass", max), ("worst", min)):
            want = fmean(fmean(map(choose, own)) for own in subsets)
            assert got[f"eval/{name}@{k}"] == pytest.approx(want), (name, k)
    votes = [Counter(pred for _, pred in answers) for answers in valid if len(answers) == 4]
    right = [
        fmean(pred == "answer 1" for pred, count in vote.items() if count == max(vote.values()))
        for vote in votes
    ]
    assert got["eval/maj@4"] == pytest.approx(fmean(right))
    assert got["eval/worst@4"] < got["eval/mean@4"] < got["eval/best@4"]
    for source in "ab":
        assert {f"eval/{source}/{name}" for name in ("reward", "mean@4", "maj@2", "pass@4")} <= (
            got.keys()
        )


@pytest.mark.ranks
def test_one_rank_with_the_model_alone_gives_what_two_gave_while_training(folder, trained):
    output = evaluated(folder, 1, "--out", "alone")
    row = metrics_of(folder / "alone")[0]
    assert held_out(row) == held_out(trained[0])
    assert (row["step"], row["model"]) == (0, "model")
    assert "10 prompts, 40 answers" in output
    assert ["eval/maj@4", f"{row['eval/maj@4']:.6g}"] in [
        line.split() for line in output.split("\n")
    ]


@pytest.mark.ranks
def test_a_checkpoint_gives_what_the_run_gave(folder, trained):
    before = sorted(folder.joinpath("run").rglob("*"))
    args = ("--checkpoint", "run/checkpoints/step_00000001")
    output = evaluated(folder, 2, *args, program=torchrun)
    assert not any(word in output for word in ("Warning", "Traceback", "not as in the run"))
    evaluated(folder, 1, "--eval_samples", "1", "--eval_temperature", "0.0", "--eval_top_k", "0")
    sampled, greedy = metrics_of(folder / "run_eval")
    assert held_out(sampled) == held_out(trained[1]) != held_out(trained[0])
    assert held_out(greedy).keys() == {
        "eval/reward", "eval/a/reward", "eval/b/reward", "eval/reward/invalid",
        "eval/reward/accuracy", "eval/reward/half", "eval/response/mean_tokens",
    }  # fmt: skip
    counts = [len(rows_of(folder / "run_eval" / row["samples"])) for row in (sampled, greedy)]
    assert counts == [40, 10]
    assert sorted(path.name for path in folder.joinpath("run_eval").iterdir()) == [
        "config.py", "items", "lock", "metrics.jsonl", "samples",
    ]  # fmt: skip
    assert sorted(folder.joinpath("run").rglob("*")) == before


@pytest.mark.vllm
@pytest.mark.ranks
def test_vllm_on_one_and_on_two_ranks(folder):
    args = ("--rollout.engine", "vllm", "--eval_top_p", "0.9", "--out", "by_vllm")
    evaluated(folder, 1, *args)
    evaluated(folder, 2, *args)
    one, two = metrics_of(folder / "by_vllm")
    assert held_out(one) == held_out(two)
    assert 0 < one["eval/mean@4"] < one["eval/best@4"]
    assert rows_of(folder / "by_vllm/samples/1.jsonl") == rows_of(
        folder / "by_vllm/samples/2.jsonl"
    )


@pytest.mark.ranks
def test_a_damaged_checkpoint_and_what_a_dry_run_says(folder, trained, tmp_path):
    dry = evaluated(folder, 1, "--dry-run", "--out", str(tmp_path / "dry"))
    assert "10 held-out prompts, 40 answers" in dry
    assert not (tmp_path / "dry/metrics.jsonl").exists()
    broken = tmp_path / "checkpoints/step_00000001"
    done = folder.joinpath("run/checkpoints/step_00000001")
    for file in (f for f in done.rglob("*") if f.is_file()):
        target = broken / file.relative_to(done)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    shard = next(broken.glob("actor/*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    args = ("--config", "cfg.py", "--checkpoint", str(broken), "--out", "broken")
    refused = train(folder, 1, *args, program="spmdrl.evaluate")
    assert refused.code == 2, refused.output
    assert f"config error: --checkpoint {broken}: actor/{shard.name} has" in refused.output
    refused = train(folder, 1, *args, "--model", "other", program="spmdrl.evaluate")
    assert refused.code == 2
    assert "--model and --checkpoint both name what is evaluated" in refused.output


@pytest.mark.parametrize(("checkpoint", "out", "words"), [
    ("", "runs/x", "--out runs/x is in the folder of a run"),
    ("", "runs/x/eval", "is in the folder of a run, runs/x"),
    ("none", "", "--checkpoint none: there is no checkpoint"),
    ("other/checkpoints/step_00000001", "other/eval", "is in the folder of a run"),
])  # fmt: skip
def test_an_evaluation_has_a_folder_of_its_own(tmp_path, monkeypatch, checkpoint, out, words):
    monkeypatch.chdir(tmp_path)
    saved = Path("other/checkpoints/step_00000001")
    saved.mkdir(parents=True)
    Path(saved, "run.json").write_text("{}")
    config = PpoConfig("m", DataConfig("t", eval="e"), "gsm8k", run_dir="runs/x")
    with pytest.raises(ConfigError, match=words):
        evaluation_of(config, checkpoint, out)
    assert evaluation_of(config, "", "").run_dir == "runs/x_eval"
    assert evaluation_of(config, str(saved), "").model == f"{saved}/hf"
    without = PpoConfig("m", DataConfig("t"), "gsm8k")
    with pytest.raises(ConfigError, match=r"data\.eval is not set"):
        evaluation_of(without, checkpoint, out)


def test_a_checkpoint_of_a_reward_model_is_refused(qwen3, tmp_path):
    """Its backbone with a head of the embedding would answer, and that without a word."""
    saved = tmp_path / "checkpoints/step_00000001"
    shutil.copytree(qwen3, saved / "hf", ignore=shutil.ignore_patterns("*.safetensors"))
    (saved / "run.json").write_text("{}")
    data, rollout = DataConfig("t", eval="e", max_prompt_tokens=64), RolloutConfig(max_tokens=64)
    asked = PpoConfig("m", data, "gsm8k", rollout=rollout)
    config = evaluation_of(asked, str(saved), "")
    check_held_out(config, 1, 1)
    file = saved / "hf/config.json"
    file.write_text(file.read_text().replace("Qwen3ForCausalLM", "Qwen3ForSequenceClassification"))
    with pytest.raises(ConfigError, match="a classifier, which writes no text"):
        check_held_out(config, 1, 1)


@pytest.mark.ranks
def test_rewards_that_fail_on_held_out_prompts_end_a_run_as_they_do_in_a_step(folder):
    done = torchrun(folder, 2, "--config", "worse.py", "--run_dir", "ended")
    assert done.code == 1, done.output[-4000:]
    assert "failed in phase 'evaluate': TooManyInvalid: 10 of 10 samples" in done.output
    samples = rows_of(folder / "ended/samples/eval_0.jsonl")
    assert all("not for these" in s["invalid"] for s in samples) and len(samples) == 10


@pytest.mark.ranks
def test_where_that_is_allowed_a_run_saves_without_its_best_metric(folder):
    done = train(
        folder, 2, "--config", "worse.py", "--run_dir", "allowed", "--eval_every", "1",
        "--rewards.max_invalid_fraction", "1.0", "--checkpoint.every_steps", "1",
        "--checkpoint.keep_best", "1",
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    for row in metrics_of(folder / "allowed"):
        assert held_out(row).keys() == {"eval/reward/invalid", "eval/response/mean_tokens"}
        assert row["eval/reward/invalid"] == 10
        assert math.isfinite(row.get("reward/mean", 0.0))
    assert len(list((folder / "allowed/checkpoints").iterdir())) == 2
