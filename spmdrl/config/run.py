"""Configs that every run has, whatever it trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from spmdrl.config.base import Change, NotGiven
from spmdrl.config.training import TrainConfig


@dataclass(frozen=True)
class WeightsConfig:
    """Trainer -> engine."""

    bucket_mib: int = 512  # bound on extra memory while gathering
    check: bool = False  # prove after every sync, bit by bit, that engine and trainer agree
    # with actor.lora: "merge" sends W + scale B A; "adapter" sends W once, then A and B alone
    lora: Literal["merge", "adapter"] = "merge"


@dataclass(frozen=True)
class CheckpointConfig:
    """Saved after every `every_steps` steps and after the last; 0: never."""

    every_steps: int = 50
    keep: int = 2  # newest
    keep_best: int = 0  # of the older ones, by the value that best_metric had after their step
    best_metric: str = "eval/reward"
    best_is: Literal["largest", "smallest"] = "largest"
    # training goes on while a copy in the host's memory is written; True: it waits, with no copy
    blocking: bool = False
    # of --resume auto that finds a damaged one: the one before is used, or the run does not start.
    # Where none is whole it does not start either; "anew": it then begins again at step 0
    on_damage: Literal["previous", "stop", "anew"] = "previous"
    # what may be another than it was in the run that is resumed: ("data", "model"). Content that
    # the config only names; changes of the config itself are logged. docs/operations.md
    accept_changes: tuple[Change, ...] = ()
    # what SIGTERM, SIGHUP, SIGUSR1 or Ctrl-C leaves the run to end its step and save: torchrun
    # kills ranks 30 s after it passed a signal on (--shutdown-timeout), Slurm KillWait after its
    # own. 0: the step is abandoned, the last checkpoint stands
    grace_s: float = 25.0
    # after every so many steps a checkpoint also stands in the memory of the hosts, in /dev/shm,
    # each host's part on the next host too: a job that loses a rank or a host goes on from it. 0:
    # none; None: 1 in an elastic job (--nnodes MIN:MAX), else 0. docs/elastic.md
    in_memory_every_steps: int | None = None


@dataclass(frozen=True)
class ProfileConfig:
    """Steps whose operators and kernels torch.profiler records, in run_dir/profile.

    A rank that writes a trace gives no sign of life: such a run's lost_timeout_s is at least
    stall_timeout_s. See docs/operations.md.
    """

    steps: str | int | tuple[int, ...] = 3  # "3-4", 3 or "3,5-7"; none is longer than its run
    ranks: str | int | tuple[int, ...] = 0  # as in placement: "0,2", "0-3", "all"
    stacks: bool = False  # with the Python functions that called: several times as large, and slow
    shapes: bool = False  # of the operators' arguments
    memory: bool = False  # each allocation
    trace: bool = True  # False: on GPUs, only nsys's window and its ranges of phases


@dataclass(frozen=True)
class KeepSamplesConfig:
    """Steps whose samples are kept whole in run_dir/kept_samples, for spmdrl.replay. 0: none."""

    last: int = 0  # the newest steps; no fewer than checkpoint.every_steps, or some have no start
    # the first of so many steps, for good: 1, n + 1, 2n + 1, .. each behind a checkpoint where
    # checkpoint.every_steps divides n. docs/replay.md
    every: int = 0


class Tracker(Protocol):
    """A place where a run is shown. An object of your own in `trackers` has these methods, or some
    of them where its class inherits this one. They are called on the first rank alone.
    """

    def open(self, run_dir: Path, options: Mapping[str, Any], done: int) -> None:
        """Begins a run, or goes on with it. options: its config by dotted names; done: the steps
        that it has done.
        """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the numbers of a step. A run that resumes from an earlier checkpoint gives a step
        again.
        """

    def log_answers(self, step: int, name: str, answers: list[dict[str, Any]]) -> None:
        """Takes some rows of a file in samples/. name: "samples/train", "samples/eval"."""

    def close(self) -> None:
        """Ends the run."""


TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")  # those that have a name


# Former fields of every run -> how they are written now.
REPLACED = {"tensorboard": "trackers", "wandb": "trackers and project"}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Holds what every run has; the configs of the programs add their own."""

    # a folder; or a model of a hub: "Qwen/Qwen3-0.6B", with @revision, or "modelscope:owner/name".
    # So is every other model of a config, and an adapter. docs/hubs.md
    model: str = field(kw_only=False)
    data: Any = field(kw_only=False)  # the rows, and how they are read
    steps: int = NotGiven(100)
    epochs: float = 0.0  # passes over data.train, in place of steps. docs/mixtures.md
    run_dir: str
    seed: int = 0
    trust_remote_code: bool = False  # run Python files that a model's folder brings along
    # train the tower for images of a model whose language model could be loaded alone, too
    vision_tower: bool = False
    resume: str = "never"  # "never" | "auto" | a checkpoint folder
    eval_every: int  # steps; 0: only before and after
    # what is trained; it is saved under this name in every program
    actor: TrainConfig
    checkpoint: CheckpointConfig
    # where numbers and answers go, beside the run's own files: "tensorboard", "wandb", "mlflow",
    # "swanlab", "trackio", or an object of your own (Tracker). docs/trackers.md
    trackers: tuple[Any, ...] = ("tensorboard",)
    project: str = "spmdrl"  # in wandb, mlflow, swanlab and trackio
    profile: ProfileConfig | None = None
    # more metrics in the line of a step, by their names in metrics.jsonl: ("actor/entropy",)
    show_metrics: tuple[str, ...] = ()
    # the line of a step: in 100 columns; or with every part of the reward and every phase of the
    # step, as long as that is. docs/output.md
    log_lines: Literal["short", "full"] = "short"
    # updates in a row that may be skipped for a loss or a gradient that is not finite; one more
    # ends the run
    nan_updates: int = 0
    # what to do with a run whose memory plan is more than its GPUs have; the plan is an estimate
    memory_check: Literal["refuse", "warn"] = "refuse"
    start_timeout_s: float = 600.0  # until all ranks have started and are connected
    stall_timeout_s: float = 1800.0  # a rank that makes no progress for so long ends the run
    lost_timeout_s: float = 10.0  # so does one without a sign of life: frozen, or cut off

    def __new__(cls, *_: Any, **fields: Any) -> Self:
        """Raises TypeError, with the new spelling, for a former field."""
        for name in REPLACED.keys() & fields.keys():
            raise TypeError(
                f"{cls.__name__} has no field {name!r} any more; it is {REPLACED[name]}: "
                'trackers=("tensorboard", "wandb"), project="sums"'
            )
        return super().__new__(cls)
