"""DPO of the arithmetic example: the fine-tuned model, which forgets carries, learns right sums.

python examples/arithmetic/make_assets.py
python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.sft \\
    --config configs/qwen3_tiny_arithmetic_sft_cpu.py
python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.preference \\
    --config configs/qwen3_tiny_arithmetic_dpo_cpu.py
"""

from spmdrl.config import (
    AnswerDataConfig,
    CheckpointConfig,
    OptimConfig,
    PreferenceConfig,
    PreferenceTrainingConfig,
    TrainConfig,
)

config = PreferenceTrainingConfig(
    model="runs/arithmetic/sft_model",
    out="runs/arithmetic/dpo_model",
    run_dir="runs/arithmetic/dpo",
    steps=200,
    eval_every=50,
    data=AnswerDataConfig(
        train="runs/arithmetic/preferences.parquet",
        eval="runs/arithmetic/preferences_eval.parquet",
        batch_size=64,
        max_tokens=16,
    ),
    preference=PreferenceConfig(loss="dpo", loss_args={"beta": 0.1}),
    actor=TrainConfig(
        dtype="float32",
        optim=OptimConfig(lr=1e-4, warmup_steps=10, schedule="linear", decay_steps=200),
    ),
    checkpoint=CheckpointConfig(
        every_steps=100, keep_best=1, best_metric="eval/rewards/accuracies"
    ),
)
