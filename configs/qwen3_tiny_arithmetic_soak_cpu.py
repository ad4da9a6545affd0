"""GRPO on two-digit addition with rewards that fail; `make soak` kills and freezes its ranks too.

One answer in a hundred, chosen by its text and so the same in every run: its reward raises, is not
a number, hangs, or kills the process that scores it.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_soak_cpu.py
"""

import dataclasses
import hashlib
import os
import time

from qwen3_tiny_arithmetic_grpo_cpu import config as plain

from spmdrl.config import CheckpointConfig, RewardConfig


def unreliable(response: str, ground_truth: str, prompt: str) -> float:
    """1 for the right number and nothing else, in 99 of 100 cases."""
    digest = hashlib.sha256(f"{prompt} {response}".encode()).digest()
    fate = int.from_bytes(digest[:4], "big") % 20_000
    if fate < 100:
        raise KeyError("a reward that fails")
    if fate < 190:
        return float("nan")
    if fate < 195:
        time.sleep(3600)
    if fate < 200:
        os._exit(3)
    return float(response.strip() == ground_truth)


config = dataclasses.replace(
    plain,
    run_dir="runs/arithmetic/soak",
    reward=unreliable,
    rewards=RewardConfig(workers=1, timeout_s=1.0),
    steps=500,
    eval_every=50,
    lost_timeout_s=10.0,
    rollout=dataclasses.replace(plain.rollout, static_split=True),  # to repeat bit for bit
    checkpoint=CheckpointConfig(every_steps=10, keep=2),
)
