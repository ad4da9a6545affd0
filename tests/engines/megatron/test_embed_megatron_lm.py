"""Megatron-LM's own pretrain() with our step in place of its train_step, given a checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ROOT, free_port, write_task

LM = os.environ.get("MEGATRON_LM", "")
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.megatron,
    pytest.mark.skipif(
        not Path(LM, "pretrain_gpt.py").is_file(),
        reason="MEGATRON_LM names no checkout of Megatron-LM core_v0.16.1",
    ),
]
# Megatron-LM asks for the last one where tensors are parallel
ENV = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
EXAMPLE = ROOT / "examples" / "embed_megatron" / "pretrain_gpt_rl.py"
RL_CONFIG = """
from spmdrl.config import *

def reward(response, ground_truth):
    return float(response.startswith(ground_truth)) + 0.01 * len(response)

config = PpoConfig(
    model="bare",
    data=DataConfig(train="train.jsonl", eval="eval.jsonl", prompts_per_step=8,
                    max_prompt_tokens=16),
    reward=reward, rewards=RewardConfig(workers=1), run_dir="run", trackers=(),
    algo=AlgoConfig(kl_coef=0.01), log_samples=0,
    rollout=RolloutConfig(engine="hf", n=4, max_tokens=8, dtype="float32"),
    actor=TrainConfig(micro_batch_tokens=128),
)
"""
# the model of tiny.save_qwen3, on a CPU
ARGS = """
--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --kv-channels 32
--group-query-attention --num-query-groups 2 --qk-layernorm --normalization RMSNorm
--norm-epsilon 1e-6 --swiglu --disable-bias-linear --position-embedding-type rope
--rotary-base 10000 --max-position-embeddings 512 --seq-length 32 --tokenizer-type NullTokenizer
--vocab-size 94 --transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion
--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --use-cpu-initialization
--no-gradient-accumulation-fusion --distributed-backend gloo --micro-batch-size 2
--global-batch-size 8 --lr 1e-3 --lr-decay-style constant --train-iters 3 --eval-interval 3
--eval-iters 1 --log-interval 1 --ckpt-format torch_dist --save-interval 2
--no-check-for-nan-in-loss-and-grad
"""


def pretrain(folder, *args):
    """Standard output of the example on two ranks."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
        str(free_port()), str(ROOT / "tests" / "megatron_lm_cpu.py"), str(EXAMPLE), *ARGS.split(),
        "--rl-config", "rl_config.py", "--save", "saved", "--hf-model", "model", *args,
    ]  # fmt: skip
    env = os.environ | ENV | {"PYTHONPATH": ":".join(
        [LM, str(ROOT), str(ROOT / "kernels")])}  # fmt: skip
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout


def iterations(said):
    """What Megatron's log says of each iteration, but for times."""
    lines = re.findall(r" iteration +(\d+)/ +\d+ \|(.*\|)", said)
    return {int(n): re.sub(r"elapsed time[^|]*\||throughput[^|]*\|", "", line) for n, line in lines}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", ["tp", "pp", "dp"])
def test_pretrain_runs_our_step_and_goes_on_bit_for_bit(qwen3, tmp_path, layout):
    degrees = {
        "tp": ["--tensor-model-parallel-size", "2"], "pp": ["--pipeline-model-parallel-size", "2"],
        "dp": ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"],
    }[layout]  # fmt: skip
    write_task(tmp_path)
    Path(tmp_path, "model").symlink_to(qwen3)
    bare = shutil.ignore_patterns("*.safetensors*")
    shutil.copytree(qwen3, tmp_path / "bare", ignore=bare)
    Path(tmp_path, "rl_config.py").write_text(RL_CONFIG)
    said = pretrain(tmp_path, *degrees)
    whole = iterations(said)
    assert sorted(whole) == [1, 2, 3]
    assert "eval/reward" in said and "consumed samples:           24" in said
    assert all("grad norm: 0.000" not in line for line in whole.values())
    state = json.loads((tmp_path / "saved" / "rl" / "iter_0000003" / "state.json").read_text())
    Path(tmp_path, "saved", "latest_checkpointed_iteration.txt").write_text("2")
    again = iterations(pretrain(tmp_path, "--load", "saved", *degrees))
    assert again == {3: whole[3]}
    after = json.loads((tmp_path / "saved" / "rl" / "iter_0000003" / "state.json").read_text())
    assert after == state
