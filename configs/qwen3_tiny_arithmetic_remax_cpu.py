"""ReMax: the reward of the greedy answer to the same prompt is the baseline; one sample would do.

Source: arXiv 2310.10505.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_remax_cpu.py
"""

from dataclasses import replace

from qwen3_tiny_arithmetic_grpo_cpu import config as grpo

config = replace(
    grpo,
    run_dir="runs/arithmetic/remax",
    algo=replace(grpo.algo, advantage="remax"),
    rollout=replace(grpo.rollout, greedy_baseline=True),
)
