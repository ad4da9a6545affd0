"""GRPO on capitals with SmolLM2-135M: it learns to name the city and to stop.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo --config examples/first_task/config.py

`make first-task` makes the model and the data and runs this. docs/first_task.md goes through it.
"""

from spmdrl.config import (
    AlgoConfig,
    CheckpointConfig,
    DataConfig,
    LoraConfig,
    OptimConfig,
    PpoConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)

MOST_WORDS = 7  # "The capital of New Zealand is Wellington."


def short_and_right(response: str, ground_truth: str) -> dict[str, float]:
    """1 for an answer that names the city in a few words, else 0."""
    right = ground_truth.lower() in response.lower()
    short = len(response.split()) <= MOST_WORDS
    return {"score": right and short, "right": right, "short": short}


config = PpoConfig(
    model="runs/first_task/model",
    run_dir="runs/first_task/grpo",
    data=DataConfig(
        train="runs/first_task/train.parquet",
        eval="runs/first_task/eval.parquet",
        prompts_per_step=8,
        max_prompt_tokens=64,
    ),
    reward=short_and_right,
    rewards=RewardConfig(workers=1),
    steps=20,
    eval_every=5,
    eval_temperature=0.8,  # as it samples while it learns; greedy answers are right more often
    algo=AlgoConfig(advantage="grpo"),
    rollout=RolloutConfig(
        n=8,
        temperature=0.8,
        max_tokens=12,
        dtype="float32",
        kv_cache_mib=256,
    ),
    actor=TrainConfig(
        dtype="float32",
        lora=LoraConfig(rank=16, alpha=32),
        optim=OptimConfig(lr=5e-4, weight_decay=0.0, warmup_steps=3),
    ),
    checkpoint=CheckpointConfig(every_steps=10, keep=1),
    log_samples=64,
)
