"""CISPO: the importance weight is clipped, and each token keeps its gradient.

Source: MiniMax-M1, arXiv 2506.13585. Only the upper bound of the weight is set, as there.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_cispo_cpu.py
"""

from dataclasses import replace

from qwen3_tiny_arithmetic_grpo_cpu import config as grpo

config = replace(
    grpo,
    run_dir="runs/arithmetic/cispo",
    algo=replace(grpo.algo, policy_loss="cispo", loss_args={"clip_low": 1.0, "clip_high": 4.0}),
)
