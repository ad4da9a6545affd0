"""A mixture of two data sources with weights, for three passes over the data.

Three questions in four need a carry, which the model has to learn; in the data it is two in three.
The rate warms up and decays over the steps that the passes have. docs/mixtures.md.
Made from its sibling; see there for the model.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_mixture_cpu.py
"""

from dataclasses import replace

from qwen3_tiny_arithmetic_grpo_cpu import config as grpo

from spmdrl.config import SamplerConfig

optim = replace(grpo.actor.optim, warmup_steps=0, warmup_ratio=0.1, decay_steps=0, min_lr_ratio=0.2)

config = replace(
    grpo,
    run_dir="runs/arithmetic/mixture",
    steps=0,
    epochs=3,
    data=replace(
        grpo.data,
        train="runs/arithmetic/mixture.parquet",
        sampler=SamplerConfig(weights={"carry": 3, "plain": 1}),
    ),
    actor=replace(grpo.actor, optim=optim),
)
