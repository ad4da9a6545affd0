"""The config of an evaluation on a benchmark. Imports no torch: a mistake is told at once."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from spmdrl.cli.arguments import load_config, override
from spmdrl.config import (
    AgentConfig,
    ConfigError,
    DataConfig,
    MultiTurnConfig,
    PpoConfig,
    ServeConfig,
)
from spmdrl.data.benchmarks import BENCHMARKS, data_files, files_of_split, only_file

SHOWN = 5  # files of a folder, in an error


def benchmark_config(name: str, file: str, overrides: Mapping[str, Any]) -> PpoConfig:
    """Returns the config of a benchmark. file: a config whose model, engine and placement are used;
    "": none, and the overrides must name the model. What it says of tools, turns, the end of an
    answer and sampling is the benchmark's. The overrides come last. Raises ConfigError.
    """
    if name not in BENCHMARKS:
        near = difflib.get_close_matches(name, BENCHMARKS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--benchmark {name}: there are {', '.join(BENCHMARKS)}{hint}")
    known = BENCHMARKS[name]
    if file:
        config = load_config(file, PpoConfig, {})
    elif "model" in overrides:
        config = PpoConfig("", DataConfig(known.data), known.reward, run_dir="runs/benchmark")
    else:
        raise ConfigError(
            f"--benchmark {name}: name the model as well, as a folder or on a hub: "
            "--model Qwen/Qwen3-0.6B, or --config FILE with one"
        )
    # no prompt of a benchmark is to be left out without a word
    data = DataConfig(
        known.data, eval=known.data, max_prompt_tokens=4096, overlong_prompts="error",
        chat_template_kwargs=config.data.chat_template_kwargs,
    )  # fmt: skip
    config = replace(
        config, data=data, reward=known.reward, reward_model=None, judge=None,
        sandbox=config.sandbox if known.reward == "code" else None,
        run_dir=f"{config.run_dir}_{name}",
        rewards=replace(config.rewards, per_turn=False), eval_samples=known.samples,
        eval_temperature=known.temperature, eval_top_p=known.top_p, eval_top_k=0,
        eval_min_p=0.0, eval_repetition_penalty=1.0,
        tools=(), environment=None, multi_turn=MultiTurnConfig(),
        agent=None, agents=AgentConfig(), serve=ServeConfig(),
        rollout=replace(
            config.rollout, max_tokens=known.max_tokens, min_tokens=0, stop=(), stop_token_ids=(),
            ignore_eos=False,
        ),
    )  # fmt: skip
    for key in sorted(overrides, key=lambda key: key.count(".")):
        config = override(config, key, overrides[key])
    return replace(config, data=replace(config.data, eval=benchmark_files(name, config.data.eval)))


def benchmark_files(name: str, given: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    """Returns the files of a benchmark's split where a folder is given, or the folder's only one.
    Raises ConfigError.
    """
    if not isinstance(given, str) or not os.path.isdir(given):
        return given
    _, config, split = BENCHMARKS[name].data.split(":")
    found = tuple(map(str, files_of_split(Path(given), config, split)))
    if not found and (only := only_file(Path(given), config)):
        return (str(only),)
    if not found:
        others = [path.name for path in data_files(Path(given), config)[:SHOWN]]
        raise ConfigError(
            f"--data.eval {given}: the benchmark {name} is the split {split!r} of "
            f"{BENCHMARKS[name].data}, and the folder has no {split}-*.parquet, "
            f"{split}.jsonl or folder {split}; it has {', '.join(others) or 'no data files'}"
        )
    return found
