"""A curriculum by a column of the data: the questions with the smallest digits first.

The easiest fifth of the questions in the first step, all of them after 15 steps. docs/mixtures.md.
Made from its sibling; see there for the model.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_difficulty_cpu.py
"""

from dataclasses import replace

from qwen3_tiny_arithmetic_grpo_cpu import config as grpo

from spmdrl.config import SamplerConfig

config = replace(
    grpo,
    run_dir="runs/arithmetic/difficulty",
    data=replace(
        grpo.data,
        train="runs/arithmetic/mixture.parquet",
        sampler=SamplerConfig(curriculum="difficulty", pace_start=0.2, pace_steps=15),
    ),
)
