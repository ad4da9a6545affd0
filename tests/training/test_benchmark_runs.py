"""python -m spmdrl.evaluate --benchmark, from a local folder and a model of random weights."""

import json
from pathlib import Path
from statistics import fmean

import pytest
from programs import metrics_of, train

pytestmark = pytest.mark.ranks


def test_a_benchmark_needs_a_model_and_a_folder(tmp_path, qwen3):
    Path(tmp_path, "model").symlink_to(qwen3)
    Path(tmp_path, "rows").mkdir()
    rows = [{"question": f"{i} and {i}?", "answer": f"so\n#### {2 * i}"} for i in range(5)]
    Path(tmp_path, "rows/test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = ("--benchmark", "gsm8k", "--model", "model", "--data.max_prompt_tokens", "200",
            "--rollout.engine", "hf", "--rollout.dtype", "float32", "--rollout.max_tokens", "8",
            "--eval_samples", "4", "--eval_temperature", "1.0")  # fmt: skip
    done = train(tmp_path, 1, *args, "--data.eval", "rows", program="spmdrl.evaluate")
    assert done.code == 0, done.output[-4000:]
    out = tmp_path / "runs/benchmark_gsm8k_eval"
    (row,) = metrics_of(out)
    items = [json.loads(line) for line in (out / "items/1.jsonl").open()]
    samples = [json.loads(line) for line in (out / row["samples"]).open()]
    assert [item["ground_truth"] for item in items] == ["0", "2", "4", "6", "8"]
    assert "step by step" in samples[0]["prompt"] and samples[0]["prompt"] != rows[0]["question"]
    for number, item in enumerate(items):
        own = [s["reward"] for s in samples if s["group"] == number]
        assert len(own) == 4 and item["rewards"] == own and item["mean"] == fmean(own)
    assert row["eval/reward"] == pytest.approx(fmean(item["mean"] for item in items))
    assert row["ci95/low"] <= row["eval/reward"] <= row["ci95/high"] and "eval/pass@4" in row
    assert "ci95/high" in done.output

    done = train(tmp_path, 1, *args, program="spmdrl.evaluate")  # from the hub, which is forbidden
    assert done.code == 2
    assert "openai/gsm8k:main:test" in done.output and "HF_HUB_OFFLINE" in done.output
    assert "Traceback" not in done.output
