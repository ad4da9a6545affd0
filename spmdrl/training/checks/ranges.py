"""The values that the numbers of a config may have; a field without an entry must not be negative.

What depends on several fields at once is checked in rl.py and algorithms.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from spmdrl.config import ConfigError

MOST = {int: 2**40, float: 1e15}  # what is above is a slip, and would overflow somewhere
OPTIONS = ("loss_args", "advantage_args")  # options.py knows their ranges
TINY = 1e-300  # floats at least this are above 0

# field -> (lowest, highest); None: MOST
Bounds = dict[str, tuple[float, float | None]]
POSITIVE: tuple[float, None] = (TINY, None)
COUNT: tuple[float, None] = (1, None)
# seconds, below which what is well would be taken for dead
START_S: tuple[float, None] = (5, None)  # a rank imports torch
STALL_S: tuple[float, None] = (5, None)  # a phase of a step
LOST_S: tuple[float, None] = (2, None)  # ranks give a sign of life twice a second
CALL_S: tuple[float, None] = (0.01, None)  # a process is asked and answers

BOUNDS: Bounds = {
    "DataConfig.prompts_per_step": COUNT, "DataConfig.max_prompt_tokens": COUNT,
    "DataConfig.max_eval_prompts": COUNT, "DataConfig.max_hint_prompt_tokens": COUNT,
    "SamplerConfig.temperature": POSITIVE, "SamplerConfig.pace_start": (TINY, 1),
    "SamplerConfig.target_rate": (0, 1), "SamplerConfig.floor": POSITIVE,
    "SamplerConfig.rate_decay": (0, 1), "SamplerConfig.success_reward": (-1e15, None),
    "PolicyRowsConfig.image_min_pixels": COUNT, "PolicyRowsConfig.image_max_pixels": COUNT,
    "PolicyRowsConfig.video_fps": POSITIVE, "PolicyRowsConfig.video_frames": COUNT,
    "PolicyRowsConfig.video_max_frames": COUNT, "PolicyRowsConfig.video_max_pixels": COUNT,
    "PolicyRowsConfig.max_video_tokens": COUNT,
    "RewardConfig.workers": (1, 4096), "RewardConfig.timeout_s": CALL_S,
    "RewardConfig.max_invalid_fraction": (0, 1),
    "RewardModelConfig.fsdp": (-1, None), "RewardModelConfig.micro_batch_tokens": (2, None),
    "JudgeConfig.tensor_parallel": COUNT, "JudgeConfig.max_prompt_tokens": COUNT,
    "JudgeConfig.max_tokens": COUNT, "JudgeConfig.top_p": (TINY, 1),
    "JudgeConfig.max_num_seqs": COUNT, "JudgeConfig.gpu_memory_utilization": (TINY, 1),
    "JudgeConfig.kv_cache_mib": COUNT, "JudgeConfig.unparsable": (-1e15, None),
    "SandboxConfig.max_concurrent": (1, 256), "SandboxConfig.retries": (0, 100),
    "MultiTurnConfig.max_turns": COUNT, "MultiTurnConfig.max_calls": COUNT,
    "MultiTurnConfig.max_reply_tokens": COUNT, "MultiTurnConfig.max_image_tokens": COUNT,
    "MultiTurnConfig.workers": (1, 4096), "MultiTurnConfig.timeout_s": CALL_S,
    "AgentConfig.workers": (1, 4096), "AgentConfig.timeout_s": CALL_S,
    "AgentConfig.max_turns": COUNT, "ServeConfig.max_body_mib": POSITIVE,
    "ServeConfig.max_requests": COUNT,
    "RolloutConfig.n": COUNT, "RolloutConfig.max_tokens": COUNT,
    "RolloutConfig.temperature": POSITIVE, "RolloutConfig.top_p": (TINY, 1),
    "RolloutConfig.min_p": (0, 1), "RolloutConfig.repetition_penalty": POSITIVE,
    "RolloutConfig.tensor_parallel": COUNT, "RolloutConfig.max_num_seqs": COUNT,
    "RolloutConfig.gpu_memory_utilization": (TINY, 1), "RolloutConfig.kv_cache_mib": COUNT,
    "RolloutConfig.oversample": (1, None),
    "OptimConfig.lr": (0, 1000), "OptimConfig.betas": (0, 1), "OptimConfig.eps": (1e-30, None),
    "OptimConfig.muon_momentum": (0, 1),
    "OptimConfig.min_lr_ratio": (0, 1), "OptimConfig.warmup_ratio": (0, 1),
    "TrainConfig.fsdp": (-1, None), "TrainConfig.tensor_parallel": COUNT,
    "TrainConfig.pipeline_parallel": COUNT, "TrainConfig.virtual_pipeline": COUNT,
    "TrainConfig.num_layers_in_first_pipeline_stage": COUNT,
    "TrainConfig.num_layers_in_last_pipeline_stage": COUNT,
    "TrainConfig.context_parallel": COUNT, "TrainConfig.expert_parallel": COUNT,
    "TrainConfig.expert_tensor_parallel": COUNT, "TrainConfig.micro_batch_tokens": (2, None),
    "TrainConfig.ddp_bucket_size": COUNT,
    "TrainConfig.ema": (0, 1), "TrainConfig.ulysses": COUNT,
    "TeacherEndpoint.max_concurrent": (1, 1024), "TeacherEndpoint.timeout_s": CALL_S,
    "TeacherEndpoint.retries": (0, 100),
    "LoraConfig.rank": COUNT, "LoraConfig.alpha": POSITIVE, "LoraConfig.seed": (0, 2**63 - 1),
    "AlgoConfig.epochs": COUNT, "AlgoConfig.mini_batches": COUNT,
    "AlgoConfig.entropy_coef": (-1e15, None), "AlgoConfig.policy_shaping_gamma": POSITIVE,
    "DistillationConfig.topk": (1, 64), "DistillationConfig.beta": (TINY, 1),
    "DistillationConfig.coef": POSITIVE, "DistillationConfig.loss_max_clamp": POSITIVE,
    "WeightsConfig.bucket_mib": (1, 2**24), "CheckpointConfig.keep": COUNT,
    "RunConfig.seed": (0, 2**63 - 1),
    "RunConfig.start_timeout_s": START_S, "RunConfig.stall_timeout_s": STALL_S,
    "RunConfig.lost_timeout_s": LOST_S,
    "PpoConfig.eval_samples": COUNT, "PpoConfig.eval_top_p": (TINY, 1),
    "PpoConfig.explain_mismatch_above": POSITIVE,
    "PpoConfig.eval_min_p": (0, 1), "PpoConfig.eval_repetition_penalty": POSITIVE,
    "SftDataConfig.batch_size": COUNT, "SftDataConfig.max_tokens": (2, None),
    "AnswerDataConfig.batch_size": COUNT, "AnswerDataConfig.max_tokens": (2, None),
    "PreferenceDataConfig.batch_size": COUNT, "PreferenceDataConfig.max_tokens": COUNT,
}  # fmt: skip


def check_bounds(node: Any, where: str = "") -> None:
    """Raises ConfigError for the first number that is not finite or out of its bounds."""
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        name = f"{where}{field.name}"
        if dataclasses.is_dataclass(value):
            check_bounds(value, f"{name}.")
        elif isinstance(value, Mapping) and any(map(dataclasses.is_dataclass, value.values())):
            for key, group in value.items():
                if dataclasses.is_dataclass(group):
                    check_bounds(group, f"{name}.{key}.")
        elif field.name not in OPTIONS:
            for number in numbers_in(value):
                check_number(name, number, bounds_of(type(node), field.name))


def bounds_of(kind: type, name: str) -> tuple[float, float | None] | None:
    """Returns the bounds of a field of a config class, or of the class that it has the field of."""
    keys = (f"{base.__name__}.{name}" for base in kind.__mro__)
    return next((BOUNDS[key] for key in keys if key in BOUNDS), None)


def numbers_in(value: Any) -> list[int | float]:
    """A number, or those in a tuple or mapping."""
    if isinstance(value, Mapping):
        return [n for item in value.values() for n in numbers_in(item)]
    if isinstance(value, tuple | list):
        return [n for item in value for n in numbers_in(item)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def check_number(name: str, number: int | float, bounds: tuple[float, float | None] | None) -> None:
    lowest, highest = bounds or (0, None)
    if highest is None:
        highest = MOST[float if isinstance(number, float) else int]
    if isinstance(number, float) and not math.isfinite(number):
        raise ConfigError(f"{name}={number} is not a finite number")
    if lowest <= number <= highest:
        return
    if number > highest:
        problem = f"at most {highest:g}"
    elif lowest == TINY:
        problem = "above 0"
    else:
        problem = "not negative" if lowest == 0 else f"at least {lowest:g}"
    raise ConfigError(f"{name}={number} is out of range: it must be {problem}")
