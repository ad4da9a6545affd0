"""GRPO on MATH with Llama 3.3 70B: 64 GPUs of 80 GB, 8 nodes.

python examples/data/math_problems.py --out runs/math
sbatch --nodes 8 launch/ppo.sbatch configs/llama3_70b_math_grpo_64gpu.py

Made from its sibling for Llama 3.1 8B. The weights are sharded by FSDP2 over all 64; 8 vLLM engines
have 8 GPUs each. The model is gated: set HF_TOKEN. Planned, not run.
"""

from dataclasses import replace

from llama3_8b_math_grpo_8gpu import config as llama3_8b

config = replace(
    llama3_8b,
    model="meta-llama/Llama-3.3-70B-Instruct",
    run_dir="runs/math/llama3_70b_grpo",
    rollout=replace(llama3_8b.rollout, tensor_parallel=8, gpu_memory_utilization=0.6),
    actor=replace(llama3_8b.actor, offload_params=True),
)
