"""The add2 workload: 32 prompts x 8 samples of exactly 64 tokens, one optimizer step each.

Fixed so that different frameworks do the same work; it measures speed and learns little.
"""

import re

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


def leading_number(response: str, ground_truth: str) -> float:
    """1 for the right number at the start; else up to 0.1 for its leading digits."""
    match = re.match(r"\d+", response)
    number = match.group(0) if match else ""
    if number == ground_truth:
        return 1.0
    right = 0
    for got, wanted in zip(number, ground_truth, strict=False):
        if got != wanted:
            break
        right += 1
    return 0.1 * right / len(ground_truth)


config = PpoConfig(
    model="runs/add2/model",
    run_dir="runs/add2/run",
    data=DataConfig(train="runs/add2/train.parquet", prompts_per_step=32, max_prompt_tokens=16),
    reward=leading_number,
    rewards=RewardConfig(workers=1),
    steps=12,
    algo=AlgoConfig(aggregation="seq_mean_token_mean"),
    rollout=RolloutConfig(
        n=8,
        max_tokens=64,
        ignore_eos=True,
        dtype="bfloat16",
        sleep=False,
        enforce_eager=False,  # compiled, as vLLM is in other frameworks; also on a CPU
    ),
    actor=TrainConfig(
        dtype="float32",
        micro_batch_tokens=4480,  # 64 sequences of at most 6 + 64 tokens
        optim=OptimConfig(lr=1e-4, weight_decay=0.0, clip_norm=1.0),
    ),
    checkpoint=CheckpointConfig(every_steps=0),
    trackers=(),
    log_samples=0,
)
