"""GRPO on two-digit addition with a verifier that is wrong in one verdict of five.

Starts from the model that configs/qwen3_tiny_arithmetic_sft_cpu.py leaves. `make bench-algos` runs
this config with every algorithm. Held-out questions are of another data source than those of the
training data, and their answers are judged without error.

python -m spmdrl.launch --nproc-per-node 1 -m spmdrl.ppo --config examples/arithmetic/noisy.py
"""

import random
from typing import Any

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

ERRORS = 0.2  # share of the verdicts that are wrong
STEPS = 16
UPDATES = 8  # of a step


def errs(index: int, sample_index: int, verdict: str) -> bool:
    """Returns whether the verifier is wrong about this sample of a row.

    The draw depends on nothing else, so it is the same on every rank and with every algorithm.
    """
    return random.Random(f"{index} {sample_index} {verdict}").random() < ERRORS


def noisy_match(
    response: str, ground_truth: str, extra_info: dict[str, Any], sample_index: int
) -> dict[str, float]:
    """Returns the verdict on the answer, and those on its digits, which GDPO learns from.

    Each of the three has errors of its own. `right` is the truth; no algorithm learns from it.
    """
    given = response.strip()
    truth = {
        "score": given == ground_truth,
        "units": given[:1] == ground_truth[:1],
        "tens": given[1:] == ground_truth[1:],
    }
    index = extra_info["index"]
    verdicts = {name: float(is_right != errs(index, sample_index, name))
                for name, is_right in truth.items()}  # fmt: skip
    return {**verdicts, "right": float(truth["score"])}


def exact_match(response: str, ground_truth: str) -> float:
    """Returns 1 for the right number and nothing else."""
    return float(response.strip() == ground_truth)


config = PpoConfig(
    model="runs/arithmetic/sft_model",
    run_dir="runs/arithmetic/noisy",
    data=DataConfig(
        train="runs/arithmetic/mixture.parquet",  # its data sources are "carry" and "plain"
        eval="runs/arithmetic/eval.parquet",
        prompts_per_step=64,
        max_prompt_tokens=16,
    ),
    reward={"carry": noisy_match, "plain": noisy_match, "arithmetic": exact_match},
    rewards=RewardConfig(workers=1),
    steps=STEPS,
    eval_every=4,
    algo=AlgoConfig(mini_batches=UPDATES),
    rollout=RolloutConfig(n=8, max_tokens=8, dtype="float32", kv_cache_mib=64),
    actor=TrainConfig(
        dtype="float32",
        optim=OptimConfig(
            lr=3e-4,
            weight_decay=0.0,
            warmup_steps=20,
            schedule="linear",
            decay_steps=STEPS * UPDATES,  # to 0, or the luck of the last step would be compared
        ),
    ),
    checkpoint=CheckpointConfig(every_steps=0),
    trackers=(),
)
