"""Whole runs that explain their largest difference (explain_mismatch)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import metrics_of, set_up, train

pytestmark = [pytest.mark.ranks]


CRITIC = """
import dataclasses
config = dataclasses.replace(
    config, algo=AlgoConfig(advantage="gae"), placement={"critic": "0"},
    critic=TrainConfig(dtype="float32", micro_batch_tokens=128))
"""


def explained(run: Path) -> dict[str, dict]:
    """The reports of a run, by the names of their files."""
    found = {path.name: json.loads(path.read_text()) for path in run.glob("mismatch/*.json")}
    texts = {path.with_suffix(".json").name for path in run.glob("mismatch/*.txt")}
    assert texts == found.keys()
    return found


@pytest.mark.vllm
def test_a_run_on_two_ranks_explains_each_step(tmp_path, qwen3):
    """One vLLM of two tensor-parallel ranks, which sleeps while the actor's two shards learn; a
    critic on one of them.
    """
    set_up(tmp_path, qwen3)
    with Path(tmp_path, "cfg.py").open("a") as file:
        file.write(CRITIC)
    done = train(
        tmp_path, 2, "--config", "cfg.py", "--explain_mismatch", "--rollout.engine", "vllm",
        "--rollout.tensor_parallel", "2",
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    assert done.output.count("Nothing parts by more than rounding") == 2
    assert all(row["actor/logprob_diff_max"] < 1e-4 for row in metrics_of(tmp_path / "run")[1:])
    reports = explained(tmp_path / "run")
    assert reports.keys() == {"step_1.json", "step_2.json"}
    for report in reports.values():
        assert report["divergence"] is None and "all 24 tensors" in report["weights"]
        names = {point["name"] for point in report["points"]}
        # of heads that each rank has half of
        assert {"model.layers.0.self_attn.qkv_proj", "model.layers.1.self_attn.attn",
                "model.layers.1.mlp.down_proj"} <= names  # fmt: skip
        assert all(point["returned"]["relative"] < 1e-5 for point in report["points"])


def test_one_step_is_explained_and_the_numbers_of_the_run_stay(tmp_path, qwen3):
    """The first step whose difference is above the limit; engine hf, several updates a step."""
    set_up(tmp_path, qwen3)
    plain = ("--config", "cfg.py", "--log_samples", "0")
    done = train(tmp_path, 1, *plain, "--run_dir", "plain")
    assert done.code == 0, done.output[-4000:]
    done = train(tmp_path, 1, *plain, "--run_dir", "above", "--explain_mismatch_above", "1e-9")
    assert done.code == 0, done.output[-4000:]
    assert done.output.count("weights: all 24 tensors") == 1
    assert metrics_of(tmp_path / "above") == metrics_of(tmp_path / "plain")
    ((name, report),) = explained(tmp_path / "above").items()
    assert name == "step_1.json" and report["divergence"] is None
    names = {point["name"] for point in report["points"]}
    assert {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.attn"} <= names
