"""PRIME: a third model learns from the outcomes which tokens led to them, and rewards those.

Source: arXiv 2502.01456. The process reward model starts as a copy of the policy; the frozen copy
of the same model is its reference.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_prime_cpu.py
"""

from dataclasses import replace

from qwen3_tiny_arithmetic_grpo_cpu import config as grpo

from spmdrl.config import OptimConfig, TrainConfig

config = replace(
    grpo,
    run_dir="runs/arithmetic/prime",
    algo=replace(grpo.algo, advantage="prime", advantage_args={"beta": 0.05}),
    ref=TrainConfig(dtype="float32"),
    prm=TrainConfig(dtype="float32", optim=OptimConfig(lr=1e-4, weight_decay=0.0)),
)
