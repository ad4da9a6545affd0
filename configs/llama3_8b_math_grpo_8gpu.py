"""GRPO on MATH with Llama 3.1 8B: 8 GPUs of 80 GB.

python examples/data/math_problems.py --out runs/math
python -m spmdrl.launch --nproc-per-node 8 -m spmdrl.ppo \\
    --config configs/llama3_8b_math_grpo_8gpu.py

Made from its sibling for Qwen3-8B; see there for the rest. The model is gated: set HF_TOKEN.
Planned, not run.
"""

from dataclasses import replace

from qwen3_8b_math_grpo_8gpu import config as qwen3_8b

config = replace(
    qwen3_8b,
    model="meta-llama/Llama-3.1-8B-Instruct",
    run_dir="runs/math/llama3_8b_grpo",
    data=replace(qwen3_8b.data, chat_template_kwargs={}),  # its template has no switch for thoughts
)
