"""Whole runs that train several adapters by data source: resumed, exported, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import CONFIG, metrics_of, train, write_task

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]

BY_SOURCE = (
    CONFIG.replace(
        "    actor=TrainConfig(",
        '    algo=AlgoConfig(kl_coef=0.01, mini_batches=2),\n'
        '    weights=WeightsConfig(lora="adapter", check=True),\n'
        '    actor=TrainConfig(lora=LoraConfig(rank=4, by_source={"sums": "math", "*": "code"}), ',
    )
    .replace('RolloutConfig(engine="hf"', 'RolloutConfig(static_split=True, engine="vllm"')
    .replace("optim=OptimConfig(lr=1e-3)", "optim=OptimConfig(lr=1e-2)")
)  # fmt: skip
SAVING = ("--checkpoint.every_steps", "1", "--checkpoint.keep", "9")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, qwen3: Path) -> Path:
    path = tmp_path_factory.mktemp("source_adapter_runs")
    Path(path, "model").symlink_to(qwen3)
    write_task(path)
    for name in ("train.jsonl", "eval.jsonl"):  # every other row is of another source
        rows = [json.loads(line) for line in (path / name).read_text().splitlines()]
        for row in rows[1::2]:
            row["data_source"] = "mbpp"
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path(path, "cfg.py").write_text(BY_SOURCE)
    return path


def run(folder: Path, name: str, *args: str) -> list[dict[str, Any]]:
    done = train(folder, 2, "--config", "cfg.py", "--run_dir", name, *args)
    assert done.code == 0, done.output[-4000:]
    return metrics_of(folder / name)


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[dict[str, Any]]:
    return run(folder, "whole", *SAVING)


def test_a_run_resumes_bit_for_bit(folder: Path, whole: list[dict[str, Any]]) -> None:
    again = run(folder, "again", "--resume", "whole/checkpoints/step_00000001")
    assert again[-1]["step"] == 2
    assert again[-1] == whole[-1]
    assert whole[-1]["actor/ref_kl"] > 0
    assert whole[0]["mismatch/abs_max"] < 1e-4 if "mismatch/abs_max" in whole[0] else True
