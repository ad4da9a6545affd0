"""Dr. GRPO: no division by the group's standard deviation, and none by an answer's length.

Source: arXiv 2503.20783. Its sum over tokens is divided by the longest answer that there may be.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_dr_grpo_cpu.py
"""

from dataclasses import replace

from qwen3_tiny_arithmetic_grpo_cpu import config as grpo

config = replace(
    grpo,
    run_dir="runs/arithmetic/dr_grpo",
    algo=replace(grpo.algo, advantage="dr_grpo"),
)
