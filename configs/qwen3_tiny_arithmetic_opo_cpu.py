"""OPO: the baseline of a group is the mean of its rewards, weighted by the answers' lengths.

Source: arXiv 2505.23585, which derives it for exact on-policy updates: one update per step.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_opo_cpu.py
"""

from dataclasses import replace

from qwen3_tiny_arithmetic_grpo_cpu import config as grpo

config = replace(
    grpo,
    run_dir="runs/arithmetic/opo",
    algo=replace(grpo.algo, advantage="opo", mini_batches=1),
)
