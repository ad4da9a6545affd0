"""A function of one's own chooses the questions of each step. docs/mixtures.md.

Here those that fail most often, once each of them has been asked.
Made from its sibling; see there for the model.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_own_sampler_cpu.py
"""

from dataclasses import replace

import numpy as np
from qwen3_tiny_arithmetic_grpo_cpu import config as grpo

from spmdrl.config import SamplerConfig
from spmdrl.data.prompt_stats import PromptStats


def worst_first(state: PromptStats, step: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """The prompts whose answers succeed least often; before them those of unknown rates."""
    rates = np.nan_to_num(state.rates, nan=-1.0)
    return np.lexsort((rng.random(len(state)), rates))[:count]


config = replace(
    grpo,
    run_dir="runs/arithmetic/own_sampler",
    data=replace(grpo.data, sampler=SamplerConfig(function=worst_first)),
)
