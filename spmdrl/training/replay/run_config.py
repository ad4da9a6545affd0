"""The config of a run as its folder has it, and what is made of it to replay a step."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import spmdrl.config
from spmdrl.cli.arguments import load_config, override
from spmdrl.config import (
    AgentConfig,
    ConfigError,
    KeepSamplesConfig,
    MultiTurnConfig,
    PpoConfig,
    RewardConfig,
    SamplerConfig,
    TrainConfig,
    require,
)

# fields of algo that choose samples
CHOOSE = ("sample_filter", "replay_steps", "dynamic_sampling", "dynamic_sampling_metric")
EDITABLE = ("algo", "reward", "rewards")  # what a step does with samples that are there


class Absent:
    """Stands for a function of the user's, of which config.py of a run has the name alone."""

    def __init__(self, name: str) -> None:
        self.__qualname__ = name

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__qualname__}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Absent:
        return self


class Names(dict[str, Any]):
    """The names in config.py: those of spmdrl.config, of the config file where it is given, and
    for all others an Absent.
    """

    def __missing__(self, name: str) -> Absent:
        return Absent(name)


def read_run_config(run_dir: Path, file: str = "") -> PpoConfig:
    """Reads run_dir/config.py. file: the config that the run was started with, for its functions.

    Raises ConfigError where there is none, or it is of another program or another version.
    """
    path = Path(run_dir, "config.py")
    names = Names(vars(spmdrl.config) | {"partial": functools.partial, "PosixPath": Path})
    names |= {"inf": math.inf, "nan": math.nan}
    if file:
        load_config(file, PpoConfig, {})
        names = Names(vars(sys.modules["spmdrl_config"]) | names)
    try:
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
        exec(code, {"__builtins__": {}}, names)
    except OSError as error:
        raise ConfigError(f"{run_dir} is no folder of a run: no {path}") from error
    except SyntaxError as error:
        why = f"is no Python: {error.msg}. The run wrote this file; it was changed since"
        if re.search(r"<\w+[^>]*>", error.text or ""):  # as Python shows an object
            why = (
                "names a function that has no name in a file. Give such functions a name at the "
                "top of the config file"
            )
        raise ConfigError(f"{path}, line {error.lineno}, {why}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} does not fit this version of spmdrl: {error}. Replay the step with the "
            "version that ran it"
        ) from error
    config = names["config"]
    if not isinstance(config, PpoConfig):
        raise ConfigError(f"{path} is of {type(config).__name__}: only runs of spmdrl.ppo have "
                          "steps that can be replayed")  # fmt: skip
    require_functions(config, path)
    return config


def require_functions(config: PpoConfig, path: Path) -> None:
    """Raises ConfigError where the step would call a function that is not known."""
    for field in dataclasses.fields(config.algo):
        if isinstance(getattr(config.algo, field.name), Absent):
            raise ConfigError(
                f"algo.{field.name} is a function, of which {path} has the name alone: name the "
                "run's config file by --config FILE"
            )


def edited_config(config: PpoConfig, file: str, overrides: Mapping[str, Any]) -> PpoConfig:
    """Returns the run's config with other fields. file: a config whose algo, reward and rewards
    are taken. Raises ConfigError for a field that says how samples are made or chosen.
    """
    usual = config.algo
    if file:
        other = load_config(file, PpoConfig, {}, flag="--edit")
        config = replace(config, **{name: getattr(other, name) for name in EDITABLE})
    for key in sorted(overrides, key=lambda key: key.count(".")):
        if key.partition(".")[0] not in EDITABLE:
            raise ConfigError(
                f"--{key}: a step is replayed with other algo, reward or rewards, by their names: "
                "--algo.policy_loss gspo. All else is what made its samples"
            )
        config = override(config, key, overrides[key])
    for name in CHOOSE:
        require(
            getattr(config.algo, name) == getattr(usual, name),
            f"algo.{name}={getattr(config.algo, name)!r} would learn from other samples than the "
            f"run did: leave it at {getattr(usual, name)!r}",
        )
    return config


def check_rescoring(config: PpoConfig) -> None:
    """Raises ConfigError where the kept samples cannot be given new rewards."""
    require(
        not isinstance(config.reward, Absent),
        "the run's reward is a function of its config file: name a file with one by --edit FILE",
    )
    refused = {
        "reward_model": config.reward_model is not None,
        "judge": config.judge is not None,
        "agent": config.agent is not None,
        "rollout.greedy_baseline": config.rollout.greedy_baseline,
    }
    for name, given in refused.items():
        require(
            not given,
            f"with {name} samples cannot be scored again: what their rewards are made of is not "
            "kept. Edit fields of algo alone",
        )


def unscored(response: str) -> float:
    """Takes the place of a reward that is not asked."""
    return 0.0


def placed(config: PpoConfig, run_dir: Path, same_ranks: bool) -> PpoConfig:
    """Returns the config by which models are built: every role on all ranks, and nothing of what
    makes samples.

    same_ranks: as many as the actor had; otherwise the layouts of roles are those of plain FSDP,
    or of megatron without any parallelism of models.
    """
    if not same_ranks:
        config = replace(
            config, actor=portable(config.actor), ref=portable(config.ref),
            critic=config.critic and portable(config.critic),
            prm=config.prm and portable(config.prm),
            teachers={source: portable(each) if isinstance(each, TrainConfig) else each
                      for source, each in config.teachers.items()},
        )  # fmt: skip
    return replace(
        config, placement={}, async_steps=0, explain_mismatch=False, explain_mismatch_above=None,
        judge=None, reward_model=None, tools=(),
        environment=None, agent=None, multi_turn=MultiTurnConfig(), agents=AgentConfig(),
        trackers=(), profile=None, reward=unscored, rewards=RewardConfig(), sandbox=None,
        rollout=replace(config.rollout, tensor_parallel=1), keep_samples=KeepSamplesConfig(),
        data=replace(config.data, sampler=SamplerConfig()), resume="never", run_dir=str(run_dir),
    )  # fmt: skip


def portable(role: TrainConfig) -> TrainConfig:
    """Returns the role in a layout that fits any number of ranks."""
    return replace(
        role, fsdp=-1, ulysses=1, expert_parallel=1, tensor_parallel=1, sequence_parallel=False,
        pipeline_parallel=1, virtual_pipeline=1, context_parallel=1, expert_tensor_parallel=1,
        num_layers_in_first_pipeline_stage=None, num_layers_in_last_pipeline_stage=None,
    )  # fmt: skip
