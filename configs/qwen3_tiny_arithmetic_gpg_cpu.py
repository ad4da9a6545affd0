"""GPG: a plain policy gradient, scaled up by the share of answers that have no reward.

Source: arXiv 2504.02546. Nothing holds its policy near the one that sampled: one update per step.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_gpg_cpu.py
"""

from dataclasses import replace

from qwen3_tiny_arithmetic_grpo_cpu import config as grpo

config = replace(
    grpo,
    run_dir="runs/arithmetic/gpg",
    algo=replace(grpo.algo, advantage="gpg", policy_loss="gpg", mini_batches=1),
)
