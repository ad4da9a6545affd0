"""GRPO on MATH with Gemma 3 12B: 8 GPUs of 80 GB.

python examples/data/math_problems.py --out runs/math
python -m spmdrl.launch --nproc-per-node 8 -m spmdrl.ppo \\
    --config configs/gemma3_12b_math_grpo_8gpu.py

Made from its sibling for Llama 3.1 8B. The language model is trained without its tower. The model
is gated: set HF_TOKEN. Planned, not run.
"""

from dataclasses import replace

from llama3_8b_math_grpo_8gpu import config as llama3_8b

config = replace(
    llama3_8b,
    model="google/gemma-3-12b-it",
    run_dir="runs/math/gemma3_12b_grpo",
    rollout=replace(llama3_8b.rollout, tensor_parallel=2),
    actor=replace(llama3_8b.actor, micro_batch_tokens=8192),
)
