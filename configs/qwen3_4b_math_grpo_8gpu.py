"""GRPO on MATH with Qwen3-4B: 8 GPUs of 80 GB.

python examples/data/math_problems.py --out runs/math
python -m spmdrl.launch --nproc-per-node 8 -m spmdrl.ppo \\
    --config configs/qwen3_4b_math_grpo_8gpu.py

Made from its sibling for Qwen3-8B; see there for the rest. Planned, not run.
"""

from dataclasses import replace

from qwen3_8b_math_grpo_8gpu import config as qwen3_8b

config = replace(
    qwen3_8b,
    model="Qwen/Qwen3-4B",
    run_dir="runs/math/qwen3_4b_grpo",
    actor=replace(qwen3_8b.actor, offload_optimizer=False),
)
