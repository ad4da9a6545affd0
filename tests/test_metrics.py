"""The run folder: nothing twice, nothing mixed, nothing lost."""

import json
from pathlib import Path

from spmdrl.metrics import RunLog, set_aside_earlier_run


def test_resumed_metrics_are_cut_back_and_a_torn_line_is_dropped(tmp_path):
    log = RunLog(tmp_path, active=True, total_steps=5)
    for step in range(1, 5):
        log.write(step, {"x": step})
    log.close()
    with Path(tmp_path, "metrics.jsonl").open("a") as f:
        f.write('{"step": 5, "x"')
    log = RunLog(tmp_path, active=True, total_steps=5, resume_step=2)
    log.write(3, {"x": 30})
    log.close()
    rows = [json.loads(line) for line in Path(tmp_path, "metrics.jsonl").open()]
    assert [(r["step"], r["x"]) for r in rows] == [(1, 1), (2, 2), (3, 30)]


def test_other_ranks_write_nothing(tmp_path):
    log = RunLog(tmp_path / "run", active=False, total_steps=5)
    log.write(1, {"x": 1})
    log.line("hello")
    log.close()
    assert not (tmp_path / "run").exists()


def earlier_run(folder):
    for step in (10, 20, 30):
        Path(folder, "checkpoints", f"step_{step:08d}").mkdir(parents=True)
    Path(folder, "metrics.jsonl").write_text('{"step": 30}\n')
    Path(folder, "errors").mkdir()


def test_a_new_run_sets_all_of_an_earlier_one_aside(tmp_path):
    earlier_run(tmp_path)
    set_aside_earlier_run(tmp_path, done=0)
    assert [p.name for p in tmp_path.iterdir()] == ["earlier-1"]
    assert len(list((tmp_path / "earlier-1" / "checkpoints").iterdir())) == 3
    earlier_run(tmp_path)
    set_aside_earlier_run(tmp_path, done=0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["earlier-1", "earlier-2"]


def test_a_resumed_run_sets_later_checkpoints_aside(tmp_path):
    earlier_run(tmp_path)
    set_aside_earlier_run(tmp_path, done=20)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "step_00000010", "step_00000020",
    ]  # fmt: skip
    assert sorted(p.name for p in (tmp_path / "earlier-1").iterdir()) == [
        "errors", "step_00000030",
    ]  # fmt: skip
    assert (tmp_path / "metrics.jsonl").exists()
