"""DPPO: a token learns while the policy's probability of it has moved by less than a bound.

Source: arXiv 2602.04879, with the total variation as the distance.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_dppo_cpu.py
"""

from dataclasses import replace

from qwen3_tiny_arithmetic_grpo_cpu import config as grpo

config = replace(
    grpo,
    run_dir="runs/arithmetic/dppo",
    algo=replace(grpo.algo, policy_loss="dppo_tv", loss_args={"clip_low": 0.2, "clip_high": 0.2}),
)
