"""Trackers show a run to people, beside its own files: tensorboard, Weights & Biases."""

from __future__ import annotations

import dataclasses
import importlib.util
import secrets
from pathlib import Path
from typing import Any, Protocol

from spmdrl.checkpoint.disk_space import writing
from spmdrl.cli.function_code import as_text
from spmdrl.config import ConfigError, RunConfig
from spmdrl.training.logs.answers import SampleRow, as_markdown, escaped

ENTRY = "wandb_id"  # a file of the run's folder


class Tracker(Protocol):
    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def log_answers(self, step: int, name: str, answers: list[SampleRow]) -> None: ...

    def close(self) -> None: ...


class Tensorboard:
    def __init__(self, run_dir: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.run_dir = run_dir
        with writing(run_dir / "events.out.tfevents.*"):
            self.writer = SummaryWriter(str(run_dir), purge_step=done + 1)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        with writing(self.run_dir / "events.out.tfevents.*"):
            for name, value in metrics.items():
                self.writer.add_scalar(name, value, step)
            self.writer.flush()

    def log_answers(self, step: int, name: str, answers: list[SampleRow]) -> None:
        """Logs answers as text, which tensorboard shows as markdown."""
        with writing(self.run_dir / "events.out.tfevents.*"):
            self.writer.add_text(name, as_markdown(answers), step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """A resumed run goes on in the entry that it had. What cannot be sent is kept and tried again.

    What it takes from the environment, such as WANDB_MODE=offline or an entity, stays so.
    """

    def __init__(self, project: str, run_dir: Path, options: dict[str, Any]) -> None:
        import wandb

        entry = entry_of(run_dir) or secrets.token_hex(4)
        try:
            self.run = wandb.init(
                project=project, name=run_dir.name, dir=str(run_dir), config=options, id=entry,
                resume="allow",
            )  # fmt: skip
        except wandb.Error as error:  # no key, no such project, no way there
            raise ConfigError(f"wandb={project!r}: {error}") from error
        # wandb's own step never goes back, as a run does that resumes from an earlier checkpoint
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        with writing(Path(run_dir, ENTRY)):
            Path(run_dir, ENTRY).write_text(entry)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log({"step": step, **metrics})

    def log_answers(self, step: int, name: str, answers: list[SampleRow]) -> None:
        """Logs answers as a table."""
        import wandb

        data = [
            [escaped(row["prompt"], "\n\t"), escaped(row["response"], "\n\t"), row["reward"]]
            for row in answers
        ]
        table = wandb.Table(columns=["prompt", "answer", "reward"], data=data)
        self.run.log({"step": step, name: table})

    def close(self) -> None:
        self.run.finish()


def open_trackers(config: RunConfig, run_dir: Path, done: int) -> list[Tracker]:
    """Opens the trackers of a run that has done so many steps. Raises ConfigError where a service
    refuses it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    trackers: list[Tracker] = [Tensorboard(run_dir, done)] if config.tensorboard else []
    if config.wandb:
        trackers.append(Wandb(config.wandb, run_dir, flat(config)))
    return trackers


def check_trackers(config: RunConfig) -> None:
    """Raises ConfigError where a service's package is not there."""
    if config.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError(f"wandb={config.wandb!r}: wandb is not installed: pip install wandb")


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """{"algo.kl_coef": 0.0, ...}, functions by their names."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            found |= flat(value, name + ".")
        elif value is None or isinstance(value, bool | int | float | str):
            found[name] = value
        else:
            found[name] = as_text(value)
    return found


def entry_of(run_dir: Path) -> str | None:
    path = run_dir / ENTRY
    return path.read_text() if path.exists() else None
