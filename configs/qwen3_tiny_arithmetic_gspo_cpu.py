"""GSPO: one clipped ratio per sequence, the geometric mean of its tokens' ratios.

Source: arXiv 2507.18071, whose clip range is this narrow because the mean of many ratios is near 1.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_gspo_cpu.py
"""

from dataclasses import replace

from qwen3_tiny_arithmetic_grpo_cpu import config as grpo

config = replace(
    grpo,
    run_dir="runs/arithmetic/gspo",
    algo=replace(grpo.algo, policy_loss="gspo", loss_args={"clip_low": 3e-4, "clip_high": 4e-4}),
)
