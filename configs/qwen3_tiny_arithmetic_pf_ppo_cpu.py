"""PF-PPO: PPO on samples drawn by their reward, from this step and from a replay buffer.

Source: arXiv 2409.06957. The samples of the step before are of older weights, which the token's
importance weight accounts for.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_pf_ppo_cpu.py
"""

from dataclasses import replace

from qwen3_tiny_arithmetic_ppo_cpu import config as ppo

from spmdrl.config import CorrectionConfig

config = replace(
    ppo,
    run_dir="runs/arithmetic/pf_ppo",
    algo=replace(
        ppo.algo,
        sample_filter="max_random",
        replay_steps=1,
        correction=CorrectionConfig(level="token"),
    ),
)
