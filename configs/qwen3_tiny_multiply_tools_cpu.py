"""GRPO with a tool, on two CPU cores: the model learns to call it instead of guessing.

Starts from the model that configs/qwen3_tiny_multiply_sft_cpu.py leaves. docs/multi_turn.md

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_multiply_tools_cpu.py
"""

from spmdrl.config import (
    AlgoConfig,
    CheckpointConfig,
    DataConfig,
    MultiTurnConfig,
    OptimConfig,
    PpoConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)


def multiply(a: int, b: int) -> int:
    """Multiplies two whole numbers.

    Args:
        a: one of them
        b: the other
    """
    return a * b


def exact_match(response: str, ground_truth: str) -> float:
    """response: the last turn, so that a call is no answer."""
    return float(response == ground_truth)


config = PpoConfig(
    model="runs/multiply/sft_model",
    run_dir="runs/multiply/tools",
    data=DataConfig(
        train="runs/multiply/train.parquet",
        eval="runs/multiply/eval.parquet",
        prompts_per_step=64,
        max_prompt_tokens=16,
    ),
    tools=(multiply,),
    multi_turn=MultiTurnConfig(max_turns=3),
    reward=exact_match,
    rewards=RewardConfig(workers=1),
    steps=30,
    eval_every=10,
    eval_temperature=1.0,
    algo=AlgoConfig(advantage="grpo", mini_batches=2),
    rollout=RolloutConfig(n=8, max_tokens=32, dtype="float32", kv_cache_mib=64),
    actor=TrainConfig(
        dtype="float32", optim=OptimConfig(lr=1e-3, weight_decay=0.0, warmup_steps=5)
    ),
    checkpoint=CheckpointConfig(every_steps=30, keep=1),
)
