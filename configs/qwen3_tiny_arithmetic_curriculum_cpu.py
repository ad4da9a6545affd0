"""A curriculum by success rates: rather questions that are answered rightly half of the time.

A question that was solved twice in a row rests for 20 steps. docs/mixtures.md.
Made from its sibling; see there for the model.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_curriculum_cpu.py
"""

from dataclasses import replace

from qwen3_tiny_arithmetic_grpo_cpu import config as grpo

from spmdrl.config import SamplerConfig

config = replace(
    grpo,
    run_dir="runs/arithmetic/curriculum",
    data=replace(
        grpo.data,
        sampler=SamplerConfig(curriculum="success_rate", drop_solved=2, return_after=20),
    ),
)
