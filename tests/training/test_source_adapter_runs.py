"""Whole runs that train several adapters by data source: resumed, exported, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import CONFIG, metrics_of, train, write_task
from safetensors.torch import load_file

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
SFT = """
from spmdrl.config import *

config = SftConfig(
    model="model", data=SftDataConfig(train=("sums.jsonl", "rest.jsonl"), batch_size=8,
                                      max_tokens=64),
    out="sft", steps=3, run_dir="sft_run", trackers=(),
    actor=TrainConfig(dtype="float32", optim=OptimConfig(lr=1e-2),
                      lora=LoraConfig(rank=4, by_source={"sums": "math", "rest": "code"})),
)
"""
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
    Path(path, "sft.py").write_text(SFT)
    for name, sign in (("sums", "+"), ("rest", "-")):  # data sources are the files' names
        asked = [{"prompt": f"{a}{sign}{b}=", "response": "1"} for a in range(5) for b in range(5)]
        Path(path, f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in asked))
    return path


def run(folder: Path, name: str, *args: str) -> list[dict[str, Any]]:
    done = train(folder, 2, "--config", "cfg.py", "--run_dir", name, *args)
    assert done.code == 0, done.output[-4000:]
    return metrics_of(folder / name)


@pytest.fixture(scope="module")
def tuned(folder: Path) -> list[dict[str, Any]]:
    """Fine-tuned adapters, in sft/adapter."""
    done = train(folder, 2, "--config", "sft.py", program="spmdrl.sft")
    assert done.code == 0, done.output[-4000:]
    return metrics_of(folder / "sft_run")


@pytest.fixture(scope="module")
def whole(folder: Path, tuned: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return run(folder, "whole", *SAVING, "--actor.lora.adapter", "sft/adapter")


def adapter_of(folder: Path, *names: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder, *names, "adapter_model.safetensors"))


def test_fine_tuning_writes_an_adapter_of_each_source(
    folder: Path, tuned: list[dict[str, Any]]
) -> None:
    assert tuned[-1]["sft/loss"] < tuned[0]["sft/loss"]
    counts = [[row[f"sft/loss_tokens/{name}"] for name in ("math", "code")] for row in tuned]
    assert all(sum(each) == 16 for each in counts) and min(map(min, counts)) > 0
    math, code = (adapter_of(folder, "sft/adapter", name) for name in ("math", "code"))
    assert math.keys() == code.keys()
    assert all(t.any() and not torch.equal(t, code[name]) for name, t in math.items())
    assert not Path(folder, "sft/config.json").exists()  # there is no one model


def test_a_run_starts_from_adapters_and_resumes_bit_for_bit(
    folder: Path, whole: list[dict[str, Any]]
) -> None:
    first, *_ = steps = [row for row in whole if row["step"] > 0]
    assert first["actor/ref_kl"] > 1e-3  # to the base, from which both are away already
    for row in steps:
        assert row["actor/logprob_diff_max"] < 1e-4  # vLLM had each row's own adapter
        assert row["actor/loss_tokens/math"] > 0 and row["actor/loss_tokens/code"] > 0
    again = run(folder, "again", "--resume", "whole/checkpoints/step_00000001")
    assert again[-1]["step"] == 2
    assert again[-1] == whole[-1]


def test_each_adapter_is_exported_and_no_model_is(
    folder: Path, whole: list[dict[str, Any]]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from spmdrl.config import ConfigError
    from spmdrl.engines.hf_export import export, export_adapter

    checkpoint = folder / "whole/checkpoints/step_00000002"
    export_adapter(checkpoint, folder / "adapters", "")
    ids, found = torch.randint(4, 60, (3, 13)), {}
    for name in ("math", "code"):
        before = adapter_of(folder, "sft/adapter", name)
        after = adapter_of(folder, "adapters", name)
        assert all(not torch.equal(after[key], before[key]) for key in before)
        base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        model = PeftModel.from_pretrained(base, folder / "adapters" / name)
        found[name] = model(ids).logits
    assert (found["math"] - found["code"]).abs().max() > 1e-2
    with pytest.raises(ConfigError, match="several adapters, code, math, and one model holds one"):
        export(checkpoint, folder / "merged", "float32")
