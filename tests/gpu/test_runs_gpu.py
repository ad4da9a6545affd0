"""Whole runs on one GPU, each a program as a user starts it: vLLM, bfloat16, weights sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from programs import CONFIG, ROOT, write_task
from tiny_models import save_qwen3, save_qwen_vl
from vision_task import IMAGE_CONFIG, image_question

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.vllm,
    pytest.mark.skipif(
        not torch.cuda.is_available() or find_spec("vllm") is None,
        reason="needs an NVIDIA GPU and vLLM",
    ),
    pytest.mark.timeout(400),
]

SHAPE = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
USUAL = ("--rollout.engine", "vllm", "--rollout.dtype", "bfloat16", "--actor.dtype", "bfloat16",
         "--rollout.gpu_memory_utilization", "0.08", "--rollout.kv_cache_mib", "1024",
         "--weights.check", "True", "--steps", "3",
         "--rollout.max_num_seqs", "64")  # fmt: skip
MASKED = ("--rollout.top_k", "20", "--rollout.top_p", "0.9",
          "--rollout.keep_sampling_mask", "True", "--eval_every", "1")  # fmt: skip
CASES: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "eager, without sleep": ("--rollout.enforce_eager", "True", "--rollout.sleep", "False"),
    "ppo": ("--algo.advantage", "gae", "--critic.dtype", "bfloat16"),
    "kl to a reference": ("--algo.kl_coef", "0.01", "--algo.kl_in", "loss"),
    "liger": ("--actor.kernels", "liger"),
    "torch": ("--actor.kernels", "torch"),
    "compiled": ("--actor.compile", "True"),
    "no checkpointing": ("--actor.activation_checkpointing", "False"),
    "selective": ("--actor.activation_checkpointing", "selective"),
    "activations offloaded": ("--actor.activation_offload", "True"),
    "state offloaded": ("--actor.offload_params", "True", "--actor.offload_optimizer", "True"),
    "muon": ("--actor.optim.name", "muon"),
    "8-bit adam": ("--actor.optim.name", "adamw8bit"),
    "fp8 rollout": ("--rollout.quantization", "fp8"),
    "fp8 training": ("--actor.fp8", "tensorwise"),
    "fp8 training, compiled": ("--actor.fp8", "rowwise_with_gw_hp", "--actor.compile", "True"),
    "fp8 training by rows, compiled": ("--actor.fp8", "rowwise", "--actor.compile", "True"),
    "adapter merged": ("--actor.lora.rank", "8"),
    "adapter apart": ("--actor.lora.rank", "8", "--weights.lora", "adapter"),
    "oversampled": ("--rollout.oversample", "1.5", "--algo.correction.level", "token"),
    "sampling mask": MASKED,
    "checkpoints": ("--checkpoint.every_steps", "1", "--eval_every", "1"),
    "megatron": ("--actor.engine", "megatron"),
    "hf rollout": ("--rollout.engine", "hf"),
    "float32": ("--actor.dtype", "float32"),
}
# how far vLLM may be from the trainer, in nats per token on average: both in bfloat16
NEAR = {name: 0.2 for name in CASES if name.startswith("fp8")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("model"), **SHAPE)


def run(folder: Path, program: str, *args: str, limit_s: float = 300) -> str:
    """Its output. Exits with the code 0."""
    path = f"{ROOT}:{ROOT / 'kernels'}:{os.environ.get('PYTHONPATH', '')}"
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
         "-m", program, *args], cwd=folder, env=env, text=True, timeout=limit_s,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "run/metrics.jsonl").open()]


@pytest.mark.parametrize("case", CASES)
def test_a_run_learns_with_engine_and_trainer_near(case: str, model: Path, tmp_path: Path) -> None:
    Path(tmp_path, "model").symlink_to(model)
    write_task(tmp_path)
    Path(tmp_path, "cfg.py").write_text(CONFIG)
    run(tmp_path, "spmdrl.ppo", "--config", "cfg.py", *USUAL, *CASES[case])
    rows = [row for row in rows_of(tmp_path) if row["step"]]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["actor/logprob_diff_mean"] < NEAR.get(case, 0.02), row
        assert 0 < row["actor/grad_norm"] < 1e3


def test_it_goes_on_from_a_checkpoint_and_is_evaluated(model: Path, tmp_path: Path) -> None:
    Path(tmp_path, "model").symlink_to(model)
    write_task(tmp_path)
    Path(tmp_path, "cfg.py").write_text(CONFIG)
    usual = ("--config", "cfg.py", *USUAL)
    run(tmp_path, "spmdrl.ppo", *usual, "--checkpoint.every_steps", "1", "--steps", "2")
    text = run(tmp_path, "spmdrl.ppo", *usual, "--steps", "4", "--resume", "auto")
    assert "2 steps done" in text
    assert [row["step"] for row in rows_of(tmp_path)][-2:] == [3, 4]


def test_a_model_that_sees_images_learns(tmp_path: Path) -> None:
    save_qwen_vl(tmp_path / "model")
    for name, seeds in (("train", range(40)), ("eval", range(40, 50))):
        rows = [image_question(seed) for seed in seeds]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    Path(tmp_path, "cfg.py").write_text(IMAGE_CONFIG)
    run(tmp_path, "spmdrl.ppo", "--config", "cfg.py", *USUAL)
    for row in rows_of(tmp_path)[-3:]:
        assert row["actor/logprob_diff_mean"] < 0.02, row


def test_fine_tuning_and_the_quickstart_s_run(tmp_path: Path) -> None:
    """On the arithmetic task from scratch: a curve that rises."""
    Path(tmp_path, "examples").symlink_to(ROOT / "examples")
    Path(tmp_path, "configs").symlink_to(ROOT / "configs")
    subprocess.run(
        [sys.executable, "examples/arithmetic/make_assets.py", "--out", "runs/arithmetic"],
        cwd=tmp_path, check=True, timeout=120,
    )  # fmt: skip
    configs = "configs/qwen3_tiny_arithmetic_{}_cpu.py"
    run(tmp_path, "spmdrl.sft", "--config", configs.format("sft"))
    run(
        tmp_path, "spmdrl.ppo", "--config", configs.format("grpo"), "--run_dir", "run",
        "--rollout.dtype", "bfloat16", "--rollout.gpu_memory_utilization", "0.08", "--steps", "60",
    )  # fmt: skip
    rewards = [row["eval/reward"] for row in rows_of(tmp_path) if "eval/reward" in row]
    assert rewards[0] < 0.6 and rewards[-1] > 0.8
