"""Trackers show a run to people, beside its own files: tensorboard, and services.

An entry of a service is made at the first start, and its name kept in the run's folder: a run that
resumes goes on in it. What a service's package takes from the environment stays so: keys, hosts,
offline modes.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spmdrl.checkpoint.disk_space import writing
from spmdrl.cli.function_code import as_text
from spmdrl.cli.hub_names import with_names
from spmdrl.config import TRACKERS, ConfigError, RunConfig, Tracker
from spmdrl.training.logs.answers import SampleRow, as_markdown, escaped

COLUMNS: list[Any] = ["prompt", "answer", "reward"]
METHODS = ("open", "log", "log_answers", "close")


class Tensorboard(Tracker):
    """Event files in the run's folder."""

    def open(self, run_dir: Path, options: Mapping[str, Any], done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.run_dir = run_dir
        with writing(run_dir / "events.out.tfevents.*"):
            self.writer = SummaryWriter(str(run_dir), purge_step=done + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
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


class Service(Tracker):
    """A service of others, which sorts runs by projects. `run` is the entry, as most packages have
    it.
    """

    run: Any

    def __init__(self, project: str) -> None:
        self.project = project

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


class Wandb(Service):
    """Weights & Biases. What cannot be sent is kept and tried again."""

    def open(self, run_dir: Path, options: Mapping[str, Any], done: int) -> None:
        import wandb

        try:
            self.run = wandb.init(
                project=self.project, name=run_dir.name, dir=str(run_dir), config=dict(options),
                id=entry_of(run_dir, "wandb"), resume="allow",
            )  # fmt: skip
        except wandb.Error as error:  # no key, no such project, no way there
            raise ConfigError(f"trackers: wandb, project={self.project!r}: {error}") from error
        # wandb's own step never goes back, as a run does that resumes from an earlier checkpoint
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log({"step": step, **metrics})

    def log_answers(self, step: int, name: str, answers: list[SampleRow]) -> None:
        """Logs answers as a table."""
        import wandb

        self.run.log({"step": step, name: wandb.Table(columns=COLUMNS, data=as_table(answers))})


class Mlflow(Service):
    """MLflow, at MLFLOW_TRACKING_URI; without it in files, in `mlruns` of the run's folder."""

    def open(self, run_dir: Path, options: Mapping[str, Any], done: int) -> None:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (run_dir / "mlruns").resolve().as_uri()
        try:
            self.client = MlflowClient(tracking_uri=uri)
            experiment = self.client.get_experiment_by_name(self.project)
            place = experiment.experiment_id if experiment else None
            place = place or self.client.create_experiment(self.project)
            entry = entry_of(run_dir, "mlflow", lambda: self.made(place, run_dir, options))
            self.client.set_terminated(entry, "RUNNING")
        except MlflowException as error:
            raise ConfigError(f"trackers: mlflow, at {uri}: {error}") from error
        self.run_id = entry

    def made(self, experiment: str, run_dir: Path, options: Mapping[str, Any]) -> str:
        """Makes the entry, whose parameters cannot be changed later. Returns its id."""
        from mlflow.entities import Param

        run = self.client.create_run(experiment, run_name=run_dir.name)
        params = [Param(name, str(value)[:6000]) for name, value in options.items()]
        for start in range(0, len(params), 100):  # MLflow's bound
            self.client.log_batch(run.info.run_id, params=params[start : start + 100])
        return run.info.run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        rows = [Metric(mlflow_name(n), float(v), now, step) for n, v in metrics.items()]
        for start in range(0, len(rows), 1000):  # MLflow's bound
            self.client.log_batch(self.run_id, metrics=rows[start : start + 1000])

    def log_answers(self, step: int, name: str, answers: list[SampleRow]) -> None:
        """Logs answers as a page of markdown."""
        self.client.log_text(self.run_id, as_markdown(answers), f"{name}/step_{step}.md")

    def close(self) -> None:
        self.client.set_terminated(self.run_id)


def mlflow_name(name: str) -> str:
    """Returns a metric's name as MLflow takes it. In its files no name may be the folder of
    another: eval/reward and eval/reward/gsm8k.
    """
    group, _, rest = name.replace("@", "_at_").partition("/")
    return f"{group}/{rest.replace('/', '.')}" if rest else group


class Swanlab(Service):
    """SwanLab; SWANLAB_MODE is its mode."""

    def open(self, run_dir: Path, options: Mapping[str, Any], done: int) -> None:
        import swanlab
        from swanlab.exceptions import ApiError, AuthenticationError

        try:
            self.run = swanlab.init(
                project=self.project, name=run_dir.name, log_dir=str(run_dir / "swanlab"),
                config=dict(options), id=entry_of(run_dir, "swanlab"), resume="allow",
            )  # fmt: skip
        except (ApiError, AuthenticationError) as error:
            raise ConfigError(f"trackers: swanlab, project={self.project!r}: {error}") from error

    def log_answers(self, step: int, name: str, answers: list[SampleRow]) -> None:
        """Logs answers as texts."""
        import swanlab

        self.run.log({name: [swanlab.Text(as_markdown([row])) for row in answers]}, step=step)


class Trackio(Service):
    """Trackio, in TRACKIO_DIR or its own folder, until `trackio sync` sends it elsewhere."""

    def open(self, run_dir: Path, options: Mapping[str, Any], done: int) -> None:
        import trackio

        self.run = trackio.init(
            project=self.project, name=entry_of(run_dir, "trackio", lambda: run_dir.name),
            config=dict(options), resume="allow", embed=False,
        )  # fmt: skip

    def log_answers(self, step: int, name: str, answers: list[SampleRow]) -> None:
        """Logs answers as a table."""
        import trackio

        self.run.log({name: trackio.Table(columns=COLUMNS, data=as_table(answers))}, step=step)


SERVICES: dict[str, type[Service]] = {
    "wandb": Wandb, "mlflow": Mlflow, "swanlab": Swanlab, "trackio": Trackio,
}  # fmt: skip


def open_trackers(config: RunConfig, run_dir: Path, done: int) -> list[Tracker]:
    """Opens the trackers of a run that has done so many steps. Raises ConfigError where a service
    refuses it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    options, trackers = flat(config), []
    for asked in config.trackers:
        tracker = asked
        if isinstance(asked, str):
            tracker = SERVICES[asked](config.project) if asked in SERVICES else Tensorboard()
        tracker.open(run_dir, options, done)
        trackers.append(tracker)
    return trackers


def check_trackers(config: RunConfig) -> None:
    """Raises ConfigError for a name that is none, for an object without a tracker's methods, and
    where a service's package is not there.
    """
    for asked in config.trackers:
        if isinstance(asked, str):
            check_name(asked)
            continue
        name = as_text(asked)
        if isinstance(asked, type):
            raise ConfigError(f"trackers: {name} is a class, not an object; write {name}()")
        missing = [method for method in METHODS if not callable(getattr(asked, method, None))]
        if missing:
            raise ConfigError(
                f"trackers: {name} is without {missing[0]}; inherit spmdrl.config.Tracker"
            )
    distinct = {asked if isinstance(asked, str) else id(asked) for asked in config.trackers}
    if len(distinct) < len(config.trackers):
        raise ConfigError(f"trackers={as_text(config.trackers)}: one stands there twice")


def check_name(name: str) -> None:
    """Raises ConfigError where no tracker has this name, or its package is not there."""
    if name not in TRACKERS:
        near = difflib.get_close_matches(name, TRACKERS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(f"trackers: there is no {name!r}{hint} There are {', '.join(TRACKERS)}")
    if importlib.util.find_spec(name) is None:
        package = "mlflow-skinny" if name == "mlflow" else name
        raise ConfigError(f"trackers: {name} is not installed: pip install {package}")


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Returns {"algo.kl_coef": 0.0, ...}, functions by their names, and what was downloaded by the
    hub's.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value, name = with_names(getattr(config, field.name)), prefix + field.name
        if dataclasses.is_dataclass(value):
            found |= flat(value, name + ".")
        elif value is None or isinstance(value, bool | int | float | str):
            found[name] = value
        else:
            found[name] = as_text(value)
    return found


def as_table(answers: list[SampleRow]) -> list[list[Any]]:
    """Returns the rows of COLUMNS."""
    return [
        [escaped(row["prompt"], "\n\t"), escaped(row["response"], "\n\t"), row["reward"]]
        for row in answers
    ]


def entry_of(run_dir: Path, service: str, make: Callable[[], str] | None = None) -> str:
    """Returns the run's name in a service, from a file of its folder; where there is none, it is
    made and kept.
    """
    path = run_dir / f"{service}_id"
    if path.exists():
        return path.read_text()
    entry = secrets.token_hex(4) if make is None else make()
    with writing(path):
        path.write_text(entry)
    return entry
