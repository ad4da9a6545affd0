"""On-policy distillation on two CPU cores: no reward but a teacher's. docs/distillation.md

The teacher is what qwen3_tiny_arithmetic_grpo_cpu.py leaves, the student what that began with:

python -m spmdrl.export --checkpoint runs/arithmetic/grpo/checkpoints/step_00000120 \
    --out runs/arithmetic/teacher
python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_distill_cpu.py
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


def exact_match(response: str, ground_truth: str) -> float:
    """Of what it is not taught, and shown all the same: reward_coef is 0."""
    return float(response.strip() == ground_truth)


config = PpoConfig(
    model="runs/arithmetic/sft_model",
    run_dir="runs/arithmetic/distill",
    data=DataConfig(
        train="runs/arithmetic/train.parquet",
        eval="runs/arithmetic/eval.parquet",
        prompts_per_step=256,
        max_prompt_tokens=16,
    ),
    reward=exact_match,
    rewards=RewardConfig(workers=1),
    steps=60,
    eval_every=20,
    algo=AlgoConfig(
        advantage="reinforce",
        advantage_args={"gamma": 0.0},  # a token answers for itself alone
        reward_coef=0.0,
        kl_in="reward",
        kl_estimator="k1",
        kl_coef=1.0,
    ),
    rollout=RolloutConfig(n=1, max_tokens=8, dtype="float32", kv_cache_mib=64),
    actor=TrainConfig(dtype="float32", optim=OptimConfig(lr=5e-4, weight_decay=0.0)),
    ref=TrainConfig(model="runs/arithmetic/teacher", dtype="float32"),
    checkpoint=CheckpointConfig(every_steps=0),
)
