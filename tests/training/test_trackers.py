"""A run in the services that people watch: their real packages, without their servers."""

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from programs import CONFIG, set_up, train

from spmdrl.cli.arguments import load_config
from spmdrl.config import TRACKERS, ConfigError, DataConfig, PpoConfig, Tracker, TrainConfig
from spmdrl.training.checks.rl import check
from spmdrl.training.logs.metrics import RunLog
from spmdrl.training.logs.trackers import SERVICES, check_trackers, flat

BLOCK, HEAD = 1 << 15, 7


def records_of(data: bytes) -> Iterator[bytes]:
    """Of a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    at, parts = HEAD, b""
    while at + HEAD <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEAD:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + HEAD : at + HEAD + size]
        at += HEAD + size
        if kind in (1, 4):  # whole, or its last part
            yield parts
            parts = b""


def rows_of(path: Path) -> list[dict[str, Any]]:
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for data in records_of(path.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            found = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
            rows.append(found)
    return rows


OWN = """
class Mine(Tracker):
    def log(self, step, metrics):
        with open("mine.jsonl", "a") as file:
            file.write(__import__("json").dumps({"step": step, **metrics}) + chr(10))
        metrics.clear()  # its own copy
        from spmdrl.distributed.progress import PROGRESS
        assert PROGRESS.heard.__self__.watchdog  # micro-batches tell it that a phase gets on

    def open(self, run_dir, options, done):
        assert options["rollout.n"] == 4 and run_dir.name == "run"

import dataclasses
config = dataclasses.replace(config, trackers=(
    Mine(), "tensorboard", "wandb", "mlflow", "swanlab", "trackio"), project="sums")
"""


@pytest.mark.ranks
def test_a_run_and_its_resumption_are_one_entry_everywhere(tmp_path, qwen3, monkeypatch):
    for name, value in (("WANDB_MODE", "offline"), ("SWANLAB_MODE", "offline"),
                        ("TRACKIO_DIR", str(tmp_path / "trackio")),
                        ("MLFLOW_ALLOW_FILE_STORE", "true")):  # fmt: skip
        monkeypatch.setenv(name, value)
    folder = set_up(tmp_path, qwen3)
    Path(folder, "cfg.py").write_text(CONFIG + OWN)
    run = ("--config", "cfg.py", "--checkpoint.every_steps", "1", "--checkpoint.keep", "2",
           "--eval_every", "0")  # fmt: skip
    back = "run/checkpoints/step_00000001"
    for more in (("--steps", "2"), ("--steps", "3", "--resume", back)):
        done = train(folder, 2, *run, *more)
        assert done.code == 0, done.output[-4000:]
    rows = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").open()]
    rewards = {row["step"]: row["reward/mean"] for row in rows if row["step"] > 0}
    assert sorted(rewards) == [1, 2, 3]
    own = [json.loads(line) for line in Path(folder, "mine.jsonl").open()]
    assert [row["step"] for row in own] == [0, 1, 2, 2, 3]
    assert {row["step"]: row["reward/mean"] for row in own[1:]} == rewards
    assert list(Path(folder, "run").glob("events.out.tfevents.*"))
    check_wandb(folder)
    check_mlflow(folder, rewards)
    check_swanlab(folder)
    check_trackio(folder, rewards)


def check_wandb(folder: Path) -> None:
    files = sorted(Path(folder, "run/wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1
    first, second = (rows_of(file) for file in files)
    tables = [row for row in first + second if "samples/" in str(row)]
    steps = [row["step"] for row in tables if "samples/train" in str(row)]
    assert steps == [1, 2, 2, 3]
    first, second = ([row for row in part if row not in tables] for part in (first, second))
    assert [row["step"] for row in first] == [0, 1, 2]
    assert [row["step"] for row in second] == [2, 3]
    assert all("reward/mean" in row for row in (*first[1:], second[-1]))


def check_mlflow(folder: Path, rewards: dict[int, float]) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=Path(folder, "run/mlruns").as_uri())
    experiment = client.get_experiment_by_name("sums")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["rollout.n"] == "4"
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert sorted(row.step for row in history) == [1, 2, 2, 3]  # step 2 was done again
    assert {row.step: row.value for row in history} == pytest.approx(rewards)
    page = client.download_artifacts(run.info.run_id, "samples/train/step_3.md", str(folder))
    assert "answer" in Path(page).read_text()


def check_swanlab(folder: Path) -> None:
    files = list(Path(folder, "run/swanlab").rglob("*.swanlab"))
    assert len(files) == 2 and len({file.name for file in files}) == 1
    written = b"".join(file.read_bytes() for file in files)
    assert b"reward/mean" in written and b"samples/train" in written
    assert any(b"rollout.n" in f.read_bytes() for f in Path(folder, "run").rglob("config.yaml"))


def check_trackio(folder: Path, rewards: dict[int, float]) -> None:
    import sqlite3

    (file,) = Path(folder, "trackio").glob("*.db")
    with sqlite3.connect(file) as base:
        rows = base.execute("select run_name, step, metrics from metrics").fetchall()
    found = [(run, step, t if isinstance(t, str) else t.decode()) for run, step, t in rows]
    assert {run for run, _, _ in found} == {"run"}
    logged = {step: json.loads(text) for _, step, text in found if "reward/mean" in text}
    assert {step: row["reward/mean"] for step, row in logged.items()} == pytest.approx(rewards)
    assert any("samples/train" in text for _, _, text in found)


class Own(Tracker):
    pass


MINE = Own()


def test_what_a_tracker_does_has_a_phase_of_its_own(tmp_path):
    """An error in it is told with that phase, not with what the run did last."""
    phases, seen = [], []

    @contextmanager
    def named(name):
        phases.append(name)
        yield
        phases.append("")

    class Notes(Own):
        def log(self, step, metrics):
            seen.append(phases[-1])

        def close(self):
            seen.append(phases[-1])

    log = RunLog(tmp_path, True, 1, [Notes()], named=named)
    log.write(1, {"a": 1.0})
    log.close()
    assert seen == ["write metrics", "close trackers"] and phases[-1] == ""


def test_a_tracker_that_is_not_there_is_a_mistake_told_at_start(tmp_path, qwen3, monkeypatch):
    folder = set_up(tmp_path, qwen3)
    monkeypatch.chdir(folder)
    check(load_config("cfg.py", PpoConfig, {"trackers": "wandb"}), 1)
    for trackers, words in (
        (("wandp",), "there is no 'wandp'; did you mean 'wandb'"),
        (("foo",), r"there is no 'foo'\. There are tensorboard, wandb"),
        (("wandb", "wandb"), "one stands there twice"),
        ((MINE, MINE), "one stands there twice"),
        ((object(),), "is without open; inherit spmdrl.config.Tracker"),
        ((Own,), r"Own is a class, not an object; write Own\(\)"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_trackers(load_config("cfg.py", PpoConfig, {"trackers": trackers}))
    check_trackers(load_config("cfg.py", PpoConfig, {"trackers": (MINE, Own())}))  # two of a class
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="mlflow is not installed: pip install mlflow-skinny"):
        check_trackers(load_config("cfg.py", PpoConfig, {"trackers": "mlflow"}))


def test_former_fields_are_told_with_the_new_ones(tmp_path, qwen3, monkeypatch):
    folder = set_up(tmp_path, qwen3)
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match="it is now trackers and project: --trackers"):
        load_config("cfg.py", PpoConfig, {"wandb": "sums"})
    Path("cfg.py").write_text(CONFIG.replace("trackers=()", "wandb='sums'"))
    with pytest.raises(ConfigError, match=r"has no field 'wandb' any more.*trackers=\("):
        load_config("cfg.py", PpoConfig, {})


def test_every_name_has_a_tracker():
    assert {*TRACKERS} == {"tensorboard", *SERVICES}


def test_options_by_their_names(tmp_path, qwen3):
    folder = set_up(tmp_path, qwen3)
    options = flat(load_config(str(folder / "cfg.py"), PpoConfig, {"algo.kl_coef": 0.5}))
    assert options["algo.kl_coef"] == 0.5 and options["rollout.engine"] == "hf"
    assert options["reward"] == "reward"
    assert "def reward" in CONFIG


def test_what_was_downloaded_has_the_names_of_its_hub():
    """A run has folders of the cache in their place, which tell nothing to those who look on."""
    cache, commit = "/home/me/.cache/hub", "0123456789abcdef0123456789abcdef01234567"
    rows = f"{cache}/datasets--tiny--sums/snapshots/{commit}/train.jsonl"
    folder = f"{cache}/models--tiny--qwen/snapshots/{commit}"
    config = PpoConfig(folder, DataConfig((rows,)), len, actor=TrainConfig(model=folder))
    options = flat(config)
    assert options["model"] == options["actor.model"] == f"tiny/qwen@{commit}"
    assert options["data.train"] == f"('hf://datasets/tiny/sums@{commit}/train.jsonl',)"
    assert "/home/me" not in str(options)
