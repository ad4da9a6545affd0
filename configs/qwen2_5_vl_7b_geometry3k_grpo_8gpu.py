"""GRPO on Geometry3K with Qwen2.5-VL-7B: 8 GPUs of 80 GB.

python examples/data/geometry3k.py --out runs/geometry3k
python -m spmdrl.launch --nproc-per-node 8 -m spmdrl.ppo \\
    --config configs/qwen2_5_vl_7b_geometry3k_grpo_8gpu.py

Made from the config for Qwen3-8B and MATH. Problems of geometry with a figure each; the tower for
images stays as it is. Planned, not run.
"""

from dataclasses import replace

from qwen3_8b_math_grpo_8gpu import config as qwen3_8b

config = replace(
    qwen3_8b,
    model="Qwen/Qwen2.5-VL-7B-Instruct",
    run_dir="runs/geometry3k/qwen2_5_vl_7b_grpo",
    data=replace(
        qwen3_8b.data,
        train="runs/geometry3k/train.parquet",
        eval="runs/geometry3k/test.parquet",
        max_prompt_tokens=2048,
        image_max_pixels=1024 * 28 * 28,  # 1,024 tokens
        chat_template_kwargs={},
    ),
    rollout=replace(qwen3_8b.rollout, max_tokens=2048),
    actor=replace(qwen3_8b.actor, freeze_vision=True),
)
