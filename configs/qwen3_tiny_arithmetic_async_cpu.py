"""GRPO that samples one step ahead: the actor on rank 0, vLLM on rank 1, both always at work.

Starts from the model that configs/qwen3_tiny_arithmetic_sft_cpu.py leaves.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_async_cpu.py
"""

from spmdrl.config import (
    AlgoConfig,
    CheckpointConfig,
    CorrectionConfig,
    DataConfig,
    OptimConfig,
    PpoConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)


def exact_match(response: str, ground_truth: str) -> float:
    """1 for the right number and nothing else."""
    return float(response.strip() == ground_truth)


config = PpoConfig(
    model="runs/arithmetic/sft_model",
    run_dir="runs/arithmetic/async",
    data=DataConfig(
        train="runs/arithmetic/train.parquet",
        eval="runs/arithmetic/eval.parquet",
        prompts_per_step=128,
        max_prompt_tokens=16,
    ),
    reward=exact_match,
    rewards=RewardConfig(workers=1),
    steps=120,
    eval_every=40,  # both sides meet there
    placement={"actor": "0", "rollout": "1"},
    async_steps=1,
    algo=AlgoConfig(
        advantage="grpo",
        mini_batches=4,
        correction=CorrectionConfig(level="token"),  # tokens are of weights up to a step old
        entropy_coef=0.02,  # else the model is soon sure of what it gets wrong
    ),
    rollout=RolloutConfig(
        n=8,
        max_tokens=8,
        dtype="float32",
        kv_cache_mib=64,
    ),
    actor=TrainConfig(
        dtype="float32",
        optim=OptimConfig(
            lr=5e-4,
            weight_decay=0.0,
            warmup_steps=20,
            schedule="linear",
            decay_steps=600,  # 4 mini-batches a step: the end is at a fifth of the rate
        ),
    ),
    checkpoint=CheckpointConfig(every_steps=120, keep=1),
)
