"""GRPO with a model of 109 million random weights, to watch memory: `make soak` runs it.

Prompts of 4 to 120 tokens, so that no two steps have the same shapes.

python examples/arithmetic/make_assets.py --large --out runs/arithmetic/large
torchrun --nproc-per-node 1 -m spmdrl.ppo --config configs/qwen3_109m_arithmetic_soak_cpu.py
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


def shorter(response: str, ground_truth: str) -> float:
    """More for a shorter answer: there is something to learn in each group."""
    return float(ground_truth in response) - 0.001 * len(response)


config = PpoConfig(
    model="runs/arithmetic/large/model",
    run_dir="runs/arithmetic/soak_large",
    data=DataConfig(
        train="runs/arithmetic/large/train.parquet", prompts_per_step=2, max_prompt_tokens=128
    ),
    reward=shorter,
    rewards=RewardConfig(workers=1),
    steps=60,
    eval_every=0,
    algo=AlgoConfig(advantage="grpo"),
    rollout=RolloutConfig(n=4, max_tokens=48, dtype="float32", kv_cache_mib=64),
    actor=TrainConfig(
        dtype="float32", micro_batch_tokens=2048, optim=OptimConfig(lr=1e-6, weight_decay=0.0)
    ),
    checkpoint=CheckpointConfig(every_steps=10, keep=1),
)  # fmt: skip
