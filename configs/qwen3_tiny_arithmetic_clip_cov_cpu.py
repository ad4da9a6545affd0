"""Clip-Cov: some of the tokens that would lower the entropy most do not learn.

Source: arXiv 2505.22617, whose share of tokens is 2e-4: of so small a batch that would be none. It
is in place of the entropy bonus.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_clip_cov_cpu.py
"""

from dataclasses import replace

from qwen3_tiny_arithmetic_grpo_cpu import config as grpo

config = replace(
    grpo,
    run_dir="runs/arithmetic/clip_cov",
    algo=replace(
        grpo.algo,
        policy_loss="clip_cov",
        loss_args={"cov_fraction": 0.01, "cov_low": 1.0, "cov_high": 5.0},
        entropy_coef=0.0,
    ),
)
