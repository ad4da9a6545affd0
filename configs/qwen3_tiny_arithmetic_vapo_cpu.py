"""VAPO: pretrained critic, decoupled and length-adaptive GAE, clip-higher, positive-example loss.

Source: arXiv 2504.05118. lam_alpha is 0.05 there, for answers of thousands of tokens; here they
have four, and 1 - 1 / (0.05 * 4) would be no lambda at all.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_vapo_cpu.py
"""

from dataclasses import replace

from qwen3_tiny_arithmetic_ppo_cpu import config as ppo

from spmdrl.config import AlgoConfig

config = replace(
    ppo,
    run_dir="runs/arithmetic/vapo",
    algo=AlgoConfig(
        advantage="gae",
        advantage_args={"lam_critic": 1.0, "lam_alpha": 5.0},
        loss_args={"clip_low": 0.2, "clip_high": 0.28},
        critic_warmup_steps=5,  # the critic alone learns to predict the reward
        positive_nll_coef=0.1,
        entropy_coef=0.02,
        mini_batches=4,
    ),
)
