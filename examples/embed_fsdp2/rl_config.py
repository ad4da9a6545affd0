"""What train_rl.py samples, scores and learns by. Layout and optimizer are train_rl.py's own."""

from spmdrl.config import (
    AlgoConfig,
    DataConfig,
    PpoConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)


def exact_match(response: str, ground_truth: str) -> float:
    """1 for the right number and nothing else."""
    return float(response.strip() == ground_truth)


config = PpoConfig(
    model="runs/arithmetic/model",  # config and tokenizer; the weights are the host's
    data=DataConfig(
        train="runs/arithmetic/train.parquet",
        eval="runs/arithmetic/eval.parquet",
        prompts_per_step=64,
        max_prompt_tokens=16,
    ),
    reward=exact_match,
    rewards=RewardConfig(workers=1),
    algo=AlgoConfig(advantage="grpo", mini_batches=2, entropy_coef=0.02),
    rollout=RolloutConfig(n=8, max_tokens=8, dtype="float32", kv_cache_mib=64),
    actor=TrainConfig(micro_batch_tokens=8192),
    log_samples=0,  # the host logs
    trackers=(),
)
