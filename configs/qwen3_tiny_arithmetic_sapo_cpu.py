"""SAPO: a sigmoid of the ratio in place of clipping, steeper for answers worse than their group.

Source: arXiv 2511.20347.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_sapo_cpu.py
"""

from dataclasses import replace

from qwen3_tiny_arithmetic_grpo_cpu import config as grpo

config = replace(
    grpo,
    run_dir="runs/arithmetic/sapo",
    algo=replace(grpo.algo, policy_loss="sapo", loss_args={"tau_pos": 1.0, "tau_neg": 1.05}),
)
