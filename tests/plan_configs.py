"""Small configs of RL runs that every check accepts, for tests that change one thing in them."""

from pathlib import Path
from typing import Any

from spmdrl.config import DataConfig, PpoConfig, RolloutConfig

CONFIG_FILE = """
from spmdrl.config import *
def reward(response, ground_truth):
    return float(response == ground_truth)
config = PpoConfig(model="m", data=DataConfig(train="t.parquet"), reward=reward)
"""


def ppo_config(folder: str | Path, **changes: Any) -> PpoConfig:
    settings: dict[str, Any] = {
        "model": str(folder),
        "data": DataConfig(train="t.jsonl", prompts_per_step=12, max_prompt_tokens=100),
        "reward": "gsm8k",
        "rollout": RolloutConfig(n=4, max_tokens=50),
    }
    return PpoConfig(**settings | changes)


def data_config(**changes: Any) -> DataConfig:
    return DataConfig(**{"train": "t", "prompts_per_step": 12, "max_prompt_tokens": 100} | changes)


def rollout_config(**changes: Any) -> RolloutConfig:
    return RolloutConfig(**{"n": 4, "max_tokens": 50} | changes)
