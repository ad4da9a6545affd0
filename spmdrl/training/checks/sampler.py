"""Checks data.sampler: fields that contradict each other, and those that nothing would read."""

from __future__ import annotations

import dataclasses
from typing import Any

from spmdrl.config import DataConfig, SamplerConfig, require

# fields that one curriculum alone reads
OF_CURRICULUM = {
    "difficulty": ("difficulty_key", "pace_start", "pace_steps"),
    "success_rate": ("target_rate", "floor"),
}
BESIDE_FUNCTION = ("success_reward", "rate_decay", "function")  # what your own sampler leaves


def check_sampler(data: DataConfig) -> None:
    """Raises ConfigError for fields of data.sampler that contradict each other, or that nothing
    would read. What the data must have: PromptSampler.
    """
    sampler = data.sampler
    if sampler.function is not None:
        check_function(data)
        return
    require(
        not sampler.weights or any(weight > 0 for weight in sampler.weights.values()),
        f"data.sampler.weights={dict(sampler.weights)}: at least one must be above 0",
    )
    for curriculum, names in OF_CURRICULUM.items():
        for name in names if sampler.curriculum != curriculum else ():
            require(
                is_default(sampler, name),
                f"data.sampler.{name}={getattr(sampler, name)!r} has no effect: it is of "
                f"curriculum={curriculum!r}",
            )
    if sampler.curriculum == "difficulty":
        check_pace(data)
    require(
        sampler.curriculum != "success_rate" or data.shuffle,
        "data.shuffle=False has no effect with data.sampler.curriculum='success_rate', which draws "
        "at random: leave it out",
    )
    require(
        sampler.drop_solved > 0 or not sampler.return_after,
        f"data.sampler.return_after={sampler.return_after} has no effect: drop_solved=0 drops no "
        "prompt",
    )


def check_pace(data: DataConfig) -> None:
    sampler = data.sampler
    require(
        sampler.difficulty_key.strip() != "",
        "data.sampler.difficulty_key='' names no column",
    )
    require(
        sampler.pace_steps > 0 or not data.shuffle,
        "data.sampler.curriculum='difficulty' with pace_steps=0 and data.shuffle=True would ask "
        "all prompts in random order: set pace_steps, the steps until the hardest may be asked, or "
        "data.shuffle=False for the order of their difficulty",
    )
    require(
        sampler.pace_steps > 0 or is_default(sampler, "pace_start"),
        f"data.sampler.pace_start={sampler.pace_start} has no effect with pace_steps=0",
    )


def check_function(data: DataConfig) -> None:
    sampler = data.sampler
    function: Any = sampler.function
    require(callable(function), f"data.sampler.function={function!r} cannot be called")
    bases = function.__mro__ if isinstance(function, type) else ()
    require(
        not bases or any("__call__" in vars(base) for base in bases),
        "data.sampler.function: the class has no method __call__(state, step, count, rng)",
    )
    both = [hasattr(function, name) for name in ("state_dict", "load_state_dict")]
    require(
        both[0] == both[1],
        "data.sampler.function has only one of state_dict and load_state_dict: checkpoints need "
        "both, or neither",
    )
    for field in dataclasses.fields(sampler):
        require(
            field.name in BESIDE_FUNCTION or is_default(sampler, field.name),
            f"data.sampler.{field.name}={getattr(sampler, field.name)!r} has no effect: "
            "data.sampler.function chooses the prompts",
        )
    require(
        data.shuffle,
        "data.shuffle=False has no effect: data.sampler.function chooses the prompts; leave it out",
    )


def is_default(sampler: SamplerConfig, name: str) -> bool:
    return bool(getattr(sampler, name) == getattr(SamplerConfig(), name))
