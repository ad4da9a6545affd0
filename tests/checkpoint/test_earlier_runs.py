"""The run folder: nothing twice, nothing mixed, nothing lost."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from spmdrl import evaluate
from spmdrl.checkpoint import job
from spmdrl.checkpoint.earlier_runs import set_aside
from spmdrl.checkpoint.format import find, read_run
from spmdrl.config import ConfigError
from spmdrl.distributed.exit import write_failure
from spmdrl.training.logs.metrics import RunLog
from spmdrl.training.logs.trace import TraceFile


def rows_of(path):
    return [json.loads(line) for line in Path(path).open()]


def test_resumed_metrics_are_cut_back_and_a_torn_line_is_dropped(tmp_path):
    log = RunLog(tmp_path, active=True, total_steps=5)
    for step in range(1, 5):
        log.write(step, {"x": step})
    log.close()
    with Path(tmp_path, "metrics.jsonl").open("a") as f:
        f.write('{"step": 5, "x"')
    set_aside(tmp_path, done=2)
    log = RunLog(tmp_path, active=True, total_steps=5, resume_step=2)
    log.write(3, {"x": 30})
    log.close()
    rows = rows_of(tmp_path / "metrics.jsonl")
    assert [(r["step"], r["x"]) for r in rows] == [(1, 1), (2, 2), (3, 30)]
    cut = Path(tmp_path, "earlier-1/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in cut[:2]] == [3, 4]
    assert cut[2] == '{"step": 5, "x"'


JUNK = [b"\x00\x00\x00", b"\xff\xfe junk", b"[1, 2]", b'{"step": "3"}', b'{"x": 1}', b"7", b"",
        b"[" * 100_000, b'"step"']  # fmt: skip


@pytest.mark.parametrize("junk", JUNK)
def test_a_line_that_is_no_row_is_named_and_kept_aside(tmp_path, junk, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + junk + b'\n\x00\x00{"step": 2}\n{"step": 3}')
    set_aside(tmp_path, done=2)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert f"{path}, line 2 is no row of metrics" in caplog.text
    assert Path(tmp_path, "earlier-1/metrics.jsonl").read_bytes() == junk + b'\n{"step": 3}\n'
    assert "lacks" not in caplog.text
    set_aside(tmp_path, done=2)  # nothing is left to do
    assert not (tmp_path / "earlier-2").exists()
    set_aside(tmp_path, done=5)
    assert f"{path} lacks 3 of the rows up to step 5; the first is that of step 3" in caplog.text


def test_other_ranks_write_nothing(tmp_path):
    log = RunLog(tmp_path / "run", active=False, total_steps=5)
    log.write(1, {"x": 1})
    log.line("hello")
    log.close()
    assert not (tmp_path / "run").exists()


def earlier_run(folder):
    for step in (10, 20, 30):
        Path(folder, "checkpoints", f"step_{step:08d}").mkdir(parents=True)
        for part in ("samples/step_{}.jsonl", "samples/eval_{}.jsonl", "profile/step_{}_rank_0.gz"):
            path = Path(folder, part.format(step))
            path.parent.mkdir(exist_ok=True)
            path.write_text(str(step))
        TraceFile(folder, 0, "host", 100).write(step, [])
    rows = "".join(f'{{"step": {step}}}\n' for step in range(31))
    Path(folder, "metrics.jsonl").write_text(rows)
    Path(folder, "errors").mkdir()


def test_a_new_run_sets_all_of_an_earlier_one_aside(tmp_path):
    earlier_run(tmp_path)
    set_aside(tmp_path, done=0)
    assert [p.name for p in tmp_path.iterdir()] == ["earlier-1"]
    assert len(list((tmp_path / "earlier-1" / "checkpoints").iterdir())) == 3
    earlier_run(tmp_path)
    (tmp_path / "earlier-1").rename(tmp_path / "earlier-7")  # others may have been removed
    (tmp_path / "earlier-notes").mkdir()
    set_aside(tmp_path, done=0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["earlier-7", "earlier-8", "earlier-notes"]


def test_a_resumed_run_sets_aside_what_is_later(tmp_path):
    earlier_run(tmp_path)
    aside = set_aside(tmp_path, done=20)
    TraceFile(tmp_path, 0, "host", 20, aside=aside)
    for folder, steps in ((tmp_path, [10, 20]), (aside, [30])):
        assert [rows["step"] for rows in rows_of(folder / "trace/rank_00000.jsonl")] == steps
        assert {int(p.name.split("_")[1].split(".")[0]) for p in folder.glob("samples/*")} == set(
            steps
        )
        assert len(list(folder.glob("profile/*"))) == len(steps)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "step_00000010", "step_00000020",
    ]  # fmt: skip
    assert sorted(p.name for p in aside.iterdir()) == [
        "errors", "metrics.jsonl", "profile", "samples", "step_00000030", "trace",
    ]  # fmt: skip
    assert [r["step"] for r in rows_of(tmp_path / "metrics.jsonl")] == list(range(21))
    assert [r["step"] for r in rows_of(aside / "metrics.jsonl")] == list(range(21, 31))


class Killed(BaseException):
    pass


def files_of(folder):
    return {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("done", [0, 20])
def test_a_kill_between_any_two_changes_loses_nothing(tmp_path, monkeypatch, done):
    """Whatever was there is there afterwards, and the next start ends what was begun."""
    seen = 0
    for moment in range(40):
        folder = tmp_path / str(moment)
        earlier_run(folder)
        before, left = files_of(folder), moment

        def dies(act):
            def acted(*args):
                nonlocal left
                if left == 0:
                    raise Killed
                left -= 1
                return act(*args)

            return acted

        with monkeypatch.context() as patch:
            for name in ("rename", "replace"):
                patch.setattr(os, name, dies(getattr(os, name)))
                patch.setattr(Path, name, dies(getattr(Path, name)))
            with suppress(Killed):
                set_aside(folder, done)
        seen += left == 0
        whole = set(before["metrics.jsonl"].split(b"\n")[:-1])
        assert {row for p in folder.rglob("metrics.jsonl") for row in p.read_bytes().split()} >= {
            part for row in whole for part in row.split()
        }
        set_aside(folder, done)
        rows = b"".join(p.read_bytes() for p in sorted(folder.rglob("metrics.jsonl")))
        assert set(rows.split(b"\n")[:-1]) == whole
        after = files_of(folder)
        assert {n: c for n, c in before.items() if n != "metrics.jsonl"}.items() <= after.items()
        if done == 0:
            assert all(p.name.startswith("earlier-") for p in folder.iterdir())
        else:
            assert [r["step"] for r in rows_of(folder / "metrics.jsonl")] == list(range(done + 1))
            assert not (folder / "checkpoints/step_00000030").exists()
    assert seen > 3  # the kill did come between


def test_the_checkpoint_that_is_loaded_stays_where_it_is(tmp_path):
    earlier_run(tmp_path)
    loaded = tmp_path / "mine/step_00000020"
    loaded.mkdir(parents=True)
    set_aside(tmp_path, 0, loaded)
    assert loaded.is_dir() and not (tmp_path / "metrics.jsonl").exists()


# ---- none, or none that is whole


def test_none_is_not_none_that_is_whole(tmp_path, topology):
    root = tmp_path / "run/checkpoints"
    assert find("auto", root, topology) is None
    for step in range(1, 6):
        Path(root, f"step_{step:08d}").mkdir(parents=True)
    with pytest.raises(ConfigError) as error:
        find("auto", root, topology)
    told = [f"none of the 5 checkpoints in {root} is whole", "step_00000005: manifest.json",
            "and 2 more", "--checkpoint.on_damage anew", f"{tmp_path}/run/earlier-N"]  # fmt: skip
    for words in told:
        assert words in str(error.value)
    assert find("auto", root, topology, on_damage="anew") is None
    assert find("auto", root, topology, last_resort=False) is None
    assert find("auto", root, topology, after=5) is None


@pytest.mark.parametrize("content", ["", "\0\0", "{", "[]", '{"step": 1}', None])
def test_a_run_json_that_cannot_be_read_is_named(tmp_path, content):
    if content is not None:
        Path(tmp_path, "run.json").write_text(content)
    with pytest.raises(ConfigError, match=f"{tmp_path}/run.json"):
        read_run(tmp_path)


@pytest.mark.parametrize("content", ["", "\0\0", '{"job": "x"', "[]", "{}", "7"])
def test_a_restart_whose_job_json_is_torn_says_so(tmp_path, topology, monkeypatch, content):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    job.write_job(tmp_path, 12)
    assert job.began_at(tmp_path, topology) == 12
    assert [p.name for p in tmp_path.iterdir()] == ["job.json"]
    Path(tmp_path, "job.json").write_text(content)
    with pytest.raises(ConfigError, match=f"{tmp_path}/job.json cannot be read"):
        job.began_at(tmp_path, topology)


@pytest.mark.parametrize(
    ("slurm", "launcher", "requeued", "is_same"),
    [
        ("7", "a", "0", True),
        ("8", "a", "0", True),  # the host of the first rank is of another allocation now
        (None, "a", "0", True),
        ("7", "b", "0", False),  # two launches in one allocation, one after the other
        ("7", "b", "1", True),
        ("8", "b", "1", False),
        ("7", None, "0", True),
    ],
)  # fmt: skip
def test_a_job_is_known_again_by_its_launchers_or_by_slurm(
    tmp_path, topology, monkeypatch, slurm, launcher, requeued, is_same
):
    def describe(slurm, launcher, requeued):
        for name, value in (("SLURM_JOB_ID", slurm), ("SPMDRL_JOB", launcher)):
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        monkeypatch.setenv("SLURM_RESTART_COUNT", requeued)
        monkeypatch.setenv("SPMDRL_ROUND", "1")

    describe("7", "a", "0")
    job.write_job(tmp_path, 12)
    describe(slurm, launcher, requeued)
    assert job.began_at(tmp_path, topology) == (12 if is_same else None)


def test_an_evaluation_overwrites_no_earlier_samples(tmp_path):
    assert evaluate.next_number(tmp_path) == 1
    Path(tmp_path, "metrics.jsonl").write_bytes(b'{"step": 1}\n\xff\x00\n')
    assert evaluate.next_number(tmp_path) == 3
    Path(tmp_path, "samples").mkdir()
    Path(tmp_path, "samples/9.jsonl").write_text("")
    assert evaluate.next_number(tmp_path) == 10


def test_an_error_of_an_earlier_start_is_kept(tmp_path):
    """Of a start that failed before it took the folder, under the same name."""
    failure = {"exit_code": 1, "rank": 0, "cause": "first"}
    write_failure(failure, tmp_path)
    write_failure(failure | {"cause": "second"}, tmp_path)  # of this process: it knows more
    old = time.time() - psutil.Process().create_time() + 60
    os.utime(tmp_path / "rank_0.json", (time.time() - old, time.time() - old))
    write_failure(failure | {"cause": "third"}, tmp_path)
    causes = {p.name: json.loads(p.read_text())["cause"] for p in tmp_path.iterdir()}
    assert causes.pop("rank_0.json") == "third"
    assert list(causes.values()) == ["second"]
