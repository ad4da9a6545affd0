"""The same run with PPO: a critic, and GAE instead of the group's mean. n=1 would do for it.

The folder of a config file is importable while the file runs, so this one starts from its sibling.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_ppo_cpu.py
"""

from dataclasses import replace

from qwen3_tiny_arithmetic_grpo_cpu import config as grpo

from spmdrl.config import OptimConfig, TrainConfig

config = replace(
    grpo,
    run_dir="runs/arithmetic/ppo",
    algo=replace(grpo.algo, advantage="gae"),
    critic=TrainConfig(dtype="float32", optim=OptimConfig(lr=1e-3, weight_decay=0.0)),
)
