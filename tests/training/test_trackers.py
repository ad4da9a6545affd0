"""A run in the services that people watch: real wandb, without its server."""

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import CONFIG, set_up, train

from spmdrl.cli.arguments import load_config
from spmdrl.config import ConfigError, PpoConfig
from spmdrl.training.checks.rl import check
from spmdrl.training.logs.trackers import check_trackers, flat

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


@pytest.mark.ranks
def test_a_run_and_its_resumption_are_one_entry(tmp_path, qwen3, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = set_up(tmp_path, qwen3)
    run = ("--config", "cfg.py", "--wandb", "sums", "--checkpoint.every_steps", "1",
           "--checkpoint.keep", "2", "--eval_every", "0")  # fmt: skip
    back = "run/checkpoints/step_00000001"
    for more in (("--steps", "2"), ("--steps", "3", "--resume", back)):
        done = train(folder, 2, *run, *more)
        assert done.code == 0, done.output[-4000:]
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


def test_a_service_that_is_not_there_is_a_mistake_told_at_start(tmp_path, qwen3, monkeypatch):
    folder = set_up(tmp_path, qwen3)
    config = load_config(str(folder / "cfg.py"), PpoConfig, {"wandb": "sums"})
    monkeypatch.chdir(folder)
    check(config, 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="wandb='sums': wandb is not installed"):
        check_trackers(config)


def test_options_by_their_names(tmp_path, qwen3):
    folder = set_up(tmp_path, qwen3)
    options = flat(load_config(str(folder / "cfg.py"), PpoConfig, {"algo.kl_coef": 0.5}))
    assert options["algo.kl_coef"] == 0.5 and options["rollout.engine"] == "hf"
    assert options["reward"] == "reward"
    assert "def reward" in CONFIG


def test_wandb_is_imported_only_where_it_is_asked_for():
    told = "import sys, spmdrl.training.rl; sys.exit('wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", told], timeout=60).returncode == 0
