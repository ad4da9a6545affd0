"""GRPO on questions about images, on two CPU cores: from random weights. docs/vision.md

python examples/colours/make_assets.py
python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen2_5_vl_tiny_colours_cpu.py
"""

from spmdrl.config import (
    AlgoConfig,
    CheckpointConfig,
    DataConfig,
    OptimConfig,
    PpoConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)


def names_them(response: str, ground_truth: str) -> float:
    """1 for the right letters and nothing else; half of their share where some are right."""
    right = sum(said == true for said, true in zip(response, ground_truth, strict=False))
    return 1.0 if response == ground_truth else 0.5 * right / max(len(response), len(ground_truth))


config = PpoConfig(
    model="runs/colours/model",
    run_dir="runs/colours/grpo",
    data=DataConfig(
        train="runs/colours/train.parquet",
        eval="runs/colours/eval.parquet",
        prompts_per_step=32,
        max_prompt_tokens=80,
    ),
    reward=names_them,
    rewards=RewardConfig(workers=1),
    algo=AlgoConfig(entropy_coef=0.03),
    steps=150,
    eval_every=50,
    rollout=RolloutConfig(n=8, max_tokens=4, dtype="float32", kv_cache_mib=32),
    actor=TrainConfig(
        dtype="float32", micro_batch_tokens=8192, optim=OptimConfig(lr=1e-3, warmup_steps=5)
    ),
    checkpoint=CheckpointConfig(every_steps=0),
)
