"""SPPO: log ratios of whole answers are regressed on how often each beats the others of its prompt.

Source: arXiv 2405.00675.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_sppo_cpu.py
"""

from dataclasses import replace

from qwen3_tiny_arithmetic_grpo_cpu import config as grpo

config = replace(
    grpo,
    run_dir="runs/arithmetic/sppo",
    algo=replace(grpo.algo, advantage="win_rate", policy_loss="sppo"),
)
