"""A folder without room or rights is named before a run starts, and while it runs."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ranks import run_calls

from spmdrl.checkpoint import disk_space as room
from spmdrl.checkpoint.disk_space import (
    check_room,
    check_room_for_checkpoint,
    check_shared,
    nearest,
    writing,
)
from spmdrl.config import ConfigError
from spmdrl.distributed.exit import FAILED, format_failure, write_failure
from spmdrl.distributed.phases import Phases
from spmdrl.rollout.build import shared_bytes
from spmdrl.training.logs.metrics import RunLog, write_rows
from spmdrl.training.logs.trace import SpanLog, TraceFile
from spmdrl.training.logs.trackers import Tensorboard


def test_what_is_in_the_way_is_named(tmp_path, monkeypatch):
    Path(tmp_path, "file").touch()
    Path(tmp_path, "link").symlink_to(tmp_path / "nowhere")
    for run_dir, words in (("file/run", "file is a file"), ("link/run", "link is a link to noth")):
        with pytest.raises(ConfigError, match=words):
            check_room(tmp_path / run_dir)
    check_room(tmp_path / "new" / "run")
    assert not Path(tmp_path, "new").exists()  # a dry run leaves nothing behind
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]
    Path(tmp_path, "run", "samples").mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"TMPDIR: \S+gone cannot be written: No such file"):
        check_room(tmp_path / "run")
    assert nearest(tmp_path / "a" / "b", "run_dir") == tmp_path


def look_for_shared(topology, folders, hosts):
    """What each rank hears of a run's folder that lies in `folders[topology.rank]`."""
    room.SHARED_S = 0.3
    folder, told = Path(folders[topology.rank]), None
    try:
        check_shared(folder / "run", topology, here=hosts[topology.rank])
    except ConfigError as error:
        told = str(error)
    topology.lowest(0)  # rank 0 has removed its file
    return told or sorted(path.name for path in folder.iterdir())


@pytest.mark.ranks
def test_a_folder_that_hosts_do_not_share_is_told_at_the_start(tmp_path):
    """The second rank stands for another host; of two folders each host has one."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    shared, apart, same_host = run_calls(2, [
        (look_for_shared, ([str(one)] * 2, [True, True])),
        (look_for_shared, ([str(one), str(other)], [True, True])),
        (look_for_shared, ([str(one), str(other)], [True, False])),
    ])  # fmt: skip
    assert shared == same_host == [[], []]
    assert apart[0] == [] and "is another folder on host" in apart[1]


@pytest.mark.programs
@pytest.mark.parametrize("where", ["run_dir", "samples", "TMPDIR"])
def test_a_folder_that_cannot_take_a_mebibyte_is_refused(tmp_path, where):
    """By a limit on the size of files, which root too has to keep."""
    folder = tmp_path / ("run/samples" if where == "samples" else "run")
    folder.mkdir(parents=True)
    script = (
        "import resource, sys\nfrom pathlib import Path\n"
        "from spmdrl.checkpoint.disk_space import check_room\n"
        "from spmdrl.config import ConfigError\nimport spmdrl.checkpoint.disk_space as room\n"
        "def probe(folder, field, real=room.probe):\n"
        "    limit = 100_000 if str(folder) == sys.argv[2] else resource.RLIM_INFINITY\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))\n"
        "    real(folder, field)\n"
        "room.probe = probe\n"
        "try:\n    check_room(Path(sys.argv[1]))\nexcept ConfigError as error:\n    print(error)\n"
    )
    small = tmp_path / "tmp" if where == "TMPDIR" else folder
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "run"), str(small)], text=True, timeout=60,
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp")}, capture_output=True, check=True,
    )  # fmt: skip
    field = "TMPDIR" if where == "TMPDIR" else f"run_dir='{tmp_path / 'run'}'"
    assert done.stdout.startswith(f"{field}: {small} cannot be written: File too large; ")
    assert "MiB are free: give one with more room" in done.stdout
    assert list(small.iterdir()) == []  # nor is half a probe left


def test_shared_memory_and_checkpoints_must_fit(tmp_path, monkeypatch):
    rollout = SimpleNamespace(engine="vllm", tensor_parallel=2)
    config: Any = SimpleNamespace(
        rollout=rollout, placement={"rollout": "2-3"}, critic=None, prm=None, actor=None,
        algo=SimpleNamespace(needs_reference=False), teachers={},
    )  # fmt: skip
    assert shared_bytes(config, [0, 1, 2, 3], 4, threads=3) == 2 * 3 * (4 << 20)
    assert shared_bytes(config, [0, 1], 4, threads=3) == 0
    rollout.engine = "hf"
    assert shared_bytes(config, [0, 1, 2, 3], 4, threads=3) == 0
    rollout.engine, rollout.tensor_parallel = "vllm", 1
    assert shared_bytes(config, [0, 1, 2, 3], 4, threads=3) == 0
    assert shared_bytes(SimpleNamespace(), [0], 1, threads=1) == 0  # of fine-tuning
    monkeypatch.setattr(room, "SHARED_MEMORY", tmp_path)
    free = room.free_bytes(tmp_path)
    check_room(tmp_path, free // 2)
    with pytest.raises(ConfigError, match=rf"{tmp_path} has .* MiB free; .* need .* --shm-size"):
        check_room(tmp_path, 2 * free)
    check_room_for_checkpoint(tmp_path / "run", free // 2)
    with pytest.raises(ConfigError, match="MiB free, and a checkpoint takes at least"):
        check_room_for_checkpoint(tmp_path / "run", 2 * free)
    # what a killed save left is removed by the start that asks
    half = Path(tmp_path, "run", "checkpoints", "step_00000004.tmp", "actor")
    half.mkdir(parents=True)
    Path(half, "rank_0").touch()
    os.truncate(half / "rank_0", 2 * free)
    check_room_for_checkpoint(tmp_path / "run", 2 * free)


def write_to(path: Path, named: Path) -> None:
    with writing(named):
        path.write_text("x")


def test_errors_of_files_name_the_file_and_the_room(tmp_path):
    missing = tmp_path / "a" / "b"
    with pytest.raises(OSError, match=r"cannot write \S+/a/b, where [\d.,]+ MiB") as caught:
        write_to(missing, missing)
    assert caught.value.errno == errno.ENOENT
    assert str(caught.value).endswith(f"or directory; the folder {missing.parent} is gone")
    with pytest.raises(OSError, match=r"cannot write \S+full, .*No space left on device$"):
        write_to(Path("/dev/full"), tmp_path / "full")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_between_two_phases_is_told_with_what_was_done(tmp_path, topology):
    """Of trace, metrics and tensorboard, whose folder is gone."""
    phases = Phases(topology)
    spans = SpanLog(phases, TraceFile(tmp_path / "run", 0, "host"))
    log = RunLog(tmp_path / "run", True, 3, named=phases.alone)
    board = Tensorboard()
    board.open(tmp_path / "run", {}, 0)
    with phases("sync"):
        pass
    log.write(1, {"reward/mean": 1.0})
    spans.note(1)
    assert phases.name == "sync"
    Path(tmp_path, "run").rename(tmp_path / "moved")
    found = []
    for name, write in (
        ("write trace", lambda: spans.note(2)),
        ("write metrics", lambda: log.write(2, {"reward/mean": 1.0})),
        ("sync", lambda: board.log(2, {"reward/mean": 1.0})),
    ):
        phases.name = "sync"
        with pytest.raises(OSError, match=r"cannot write .*MiB are free.*is gone") as caught:
            write()
        assert phases.report(caught.value).phase == name
        found.append(str(caught.value))
    assert "/run/trace/rank_00000.jsonl" in found[0]
    assert "/run/metrics.jsonl" in found[1]
    assert "/run/events.out.tfevents." in found[2]
    rows = Path(tmp_path, "moved", "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1]


def test_samples_hold_what_utf_8_lacks(tmp_path):
    write_rows(tmp_path / "samples" / "step_1.jsonl", [{"response": "\u00e4 \ud800 \U0001f600"}])
    line = Path(tmp_path, "samples", "step_1.jsonl").read_text(encoding="utf-8")
    assert json.loads(line) == {"response": "\u00e4 \ud800 \U0001f600"}


def test_a_failure_that_could_not_be_written_is_told_whole(tmp_path):
    failure = {"rank": 1, "host": "node", "phase": "sync", "cause": "OSError: no",
             "exit_code": FAILED, "details": "Traceback: line 7\n"}  # fmt: skip
    write_failure(failure, tmp_path / "errors")
    assert format_failure(failure, tmp_path / "errors").endswith(
        f"details in {tmp_path}/errors/rank_1.json"
    )
    Path(tmp_path, "file").touch()
    write_failure(failure, tmp_path / "file" / "errors")
    told = format_failure(failure, tmp_path / "file" / "errors")
    assert told.endswith("rank_1.json could not be written; details:\nTraceback: line 7")
