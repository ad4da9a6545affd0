"""GRPO on two-digit addition that trains adapters of rank 16 alone, on two CPU cores.

Starts from the model that configs/qwen3_tiny_arithmetic_sft_cpu.py leaves. The penalty's reference
is that model too: the actor with its adapter off.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_lora_cpu.py
"""

from dataclasses import replace

from qwen3_tiny_arithmetic_grpo_cpu import config as grpo

from spmdrl.config import LoraConfig, WeightsConfig

config = replace(
    grpo,
    run_dir="runs/arithmetic/lora",
    algo=replace(grpo.algo, kl_coef=0.001),
    actor=replace(
        grpo.actor,
        lora=LoraConfig(rank=16, alpha=32),
        optim=replace(grpo.actor.optim, lr=2e-3),
    ),
    weights=WeightsConfig(lora="merge"),  # "adapter": A and B alone are sent, vLLM adds them
)
