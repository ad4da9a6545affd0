"""A reward model for the arithmetic example: from random weights to telling right sums from wrong.

python examples/arithmetic/make_assets.py
python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.reward_model \\
    --config configs/qwen3_tiny_arithmetic_reward_model_cpu.py
"""

from spmdrl.config import (
    CheckpointConfig,
    OptimConfig,
    PreferenceDataConfig,
    RewardTrainingConfig,
    TrainConfig,
)

config = RewardTrainingConfig(
    model="runs/arithmetic/model",
    out="runs/arithmetic/reward_model",
    run_dir="runs/arithmetic/reward_model_run",
    steps=400,
    eval_every=100,
    center_coef=0.01,
    data=PreferenceDataConfig(
        train="runs/arithmetic/preferences.parquet",
        eval="runs/arithmetic/preferences_eval.parquet",
        batch_size=128,
        max_tokens=16,
    ),
    actor=TrainConfig(
        dtype="float32",
        optim=OptimConfig(lr=3e-3, warmup_steps=10, schedule="linear", decay_steps=400),
    ),
    checkpoint=CheckpointConfig(every_steps=200, keep_best=1, best_metric="eval/accuracy"),
)
