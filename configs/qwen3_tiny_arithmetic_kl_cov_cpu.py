"""KL-Cov: the tokens that would lower the entropy most are held to the policy that sampled.

Source: arXiv 2505.22617, whose share of tokens is 2e-3: of so small a batch that would be one or
two. It is in place of the entropy bonus.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_kl_cov_cpu.py
"""

from dataclasses import replace

from qwen3_tiny_arithmetic_grpo_cpu import config as grpo

config = replace(
    grpo,
    run_dir="runs/arithmetic/kl_cov",
    algo=replace(
        grpo.algo,
        policy_loss="kl_cov",
        loss_args={"cov_fraction": 0.02, "cov_kl_coef": 1.0},
        entropy_coef=0.0,
    ),
)
