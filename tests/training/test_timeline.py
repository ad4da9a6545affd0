"""The trace: what the ranks leave, what is computed from it, and the picture's program."""

import json
import subprocess
import sys
from collections import Counter
from functools import reduce
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from spmdrl.config import ConfigError
from spmdrl.distributed.phases import Span
from spmdrl.timeline import WAITING, chrome_events, draw, fitting, read_trace, tables
from spmdrl.training.logs import trace as recording
from spmdrl.training.logs.trace import (
    TraceFile,
    add_totals,
    busy_and_waiting,
    parse,
    phase_metrics,
    totals_of,
)

T0 = 1.7e9  # seconds since the epoch
# A step of 10 s: rank 0 learns for 4 s and waits for samples, rank 1 samples for 8 s.
ACTOR = [
    Span("update_actor", T0, T0 + 4, T0 + 4),
    Span("wait samples", T0 + 4, T0 + 4.5, T0 + 8),
    Span("sync", T0 + 8, T0 + 9, T0 + 10),
]
ROLLOUT = [Span("rollout", T0, T0 + 8, T0 + 8), Span("sync", T0 + 8, T0 + 10, T0 + 10)]


def later(spans, seconds):
    return [Span(name, *(t + seconds for t in times)) for name, *times in spans]


@pytest.fixture
def run_dir(tmp_path):
    """Steps 1 to 6, ten seconds each, of two ranks on two hosts."""
    files = [TraceFile(tmp_path, 0, "left"), TraceFile(tmp_path, 1, "right")]
    for step in range(1, 7):
        files[0].write(step, later(ACTOR, 10 * step))
        files[1].write(step, later(ROLLOUT, 10 * step))
    return tmp_path


def steps_in(path):
    return [parse(row).step for row in Path(path).open()]


def damaged(run_dir, text):
    path = Path(run_dir, "trace", "rank_00001.jsonl")
    with path.open("a") as f:
        f.write(text)
    return path


# --- what a run records ---


def test_a_line_holds_the_spans_to_the_microsecond(tmp_path):
    span = Span("sync", T0 + 0.1234567, T0 + 1, T0 + 2.0000004)
    TraceFile(tmp_path, 3, "node-a").write(7, [span])
    (row,) = Path(tmp_path, "trace", "rank_00003.jsonl").open()
    assert json.loads(row) == {
        "step": 7, "host": "node-a", "spans": [["sync", T0 + 0.123457, T0 + 1, T0 + 2]],
    }  # fmt: skip


def test_a_resumed_run_drops_later_and_torn_lines(run_dir):
    path = damaged(run_dir, '{"step": 2, "host": "right", "spans": [["ro')
    TraceFile(run_dir, 1, "right", resume_step=4).write(5, ROLLOUT)
    assert steps_in(path) == [1, 2, 3, 4, 5]
    assert steps_in(path.with_name("rank_00000.jsonl")) == [1, 2, 3, 4, 5, 6]  # is rank 0's matter


@pytest.mark.parametrize("lost", [1, 2, 40])
def test_a_torn_line_goes_even_if_only_its_end_is_missing(tmp_path, lost):
    file = TraceFile(tmp_path, 0, "a")
    file.write(1, ACTOR)
    whole = file.path.read_text()
    file.write(2, ACTOR)
    file.path.write_text(file.path.read_text()[:-lost])  # characters
    TraceFile(tmp_path, 0, "a", resume_step=2)
    assert file.path.read_text() == whole


def test_a_new_run_starts_with_an_empty_trace(run_dir):
    TraceFile(run_dir, 0, "left")
    assert Path(run_dir, "trace", "rank_00000.jsonl").read_text() == ""


def test_a_run_that_goes_on_with_fewer_ranks_cuts_the_files_of_the_others_too(tmp_path):
    for rank in range(5):
        for step in (1, 2, 3):
            TraceFile(tmp_path, rank, "a", resume_step=step).write(step, ACTOR)
    for rank in range(2):
        TraceFile(tmp_path, rank, "a", resume_step=2, world=2)
    files = sorted(Path(tmp_path, "trace").iterdir())
    assert [steps_in(path) for path in files] == [[1, 2]] * 5


def test_a_long_run_keeps_the_newest_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "KEPT_LINES", 4)
    file = TraceFile(tmp_path, 0, "a")
    sizes = []
    for step in range(1, 31):
        if step == 14:  # a resumed run counts the lines that it finds
            file = TraceFile(tmp_path, 0, "a", resume_step=13)
        file.write(step, ACTOR)
        steps = steps_in(file.path)
        sizes.append(len(steps))
        assert steps == list(range(step - len(steps) + 1, step + 1))
    assert max(sizes) == 7
    assert min(sizes[3:]) == 4


def test_busy_ends_with_the_work_and_a_wait_is_never_busy():
    spans = [*ACTOR, Span("sync", T0 + 10, T0 + 10.5, T0 + 12)]
    seconds = busy_and_waiting(spans)
    assert seconds == {
        "update_actor": pytest.approx((4, 0)),
        "wait samples": pytest.approx((0, 4)),
        "sync": pytest.approx((1.5, 2.5)),
    }
    whole = sum(span.agreed - span.start for span in spans)
    assert sum(busy + waiting for busy, waiting in seconds.values()) == pytest.approx(whole)


def test_a_clock_that_is_set_back_makes_no_negative_seconds():
    assert busy_and_waiting([Span("sync", T0, T0 - 5, T0 - 4)]) == {"sync": (0, 0)}


def metrics_of(*ranks):
    """Of ranks by their seconds; they are added up as in a step."""
    return phase_metrics(reduce(add_totals, (totals_of(*rank) for rank in ranks)))


def test_metrics_of_split_roles():
    metrics = metrics_of((busy_and_waiting(ACTOR), 10.0), (busy_and_waiting(ROLLOUT), 10.0))
    assert metrics == pytest.approx({
        "time/update_actor_s": 4, "time_min/update_actor_s": 4, "time_mean/update_actor_s": 4,
        "time_max/update_actor_s": 4,
        "time/wait_samples_s": 4,
        "time/sync_s": 2, "time_min/sync_s": 1, "time_mean/sync_s": 1.5, "time_max/sync_s": 2,
        "time/rollout_s": 8, "time_min/rollout_s": 8, "time_mean/rollout_s": 8,
        "time_max/rollout_s": 8,
        "idle/share": 0.25, "idle/share_max": 0.5,
    })  # fmt: skip


def test_a_rank_without_phases_is_idle_and_none_is_less_than_that():
    metrics = metrics_of(({"sync": (1.1, 0.2)}, 1.0), ({}, 1.0))
    assert metrics["time_mean/sync_s"] == 1.1  # of the one that took part
    assert (metrics["idle/share"], metrics["idle/share_max"]) == (0.5, 1.0)


def test_a_rank_that_is_elsewhere_in_time_is_idle_by_its_own_seconds():
    """It samples ahead: busy for 6 of the 8 seconds that its report is of, in a step of 3 s."""
    metrics = metrics_of(({"update_actor": (3.0, 0.0)}, 3.0), ({"rollout": (6.0, 1.0)}, 8.0))
    assert (metrics["idle/share"], metrics["idle/share_max"]) == (0.125, 0.25)


# --- reading it ---


@pytest.mark.parametrize(
    ("steps", "shown"),
    [(None, [4, 5, 6]), ("2:3", [2, 3]), ("5:", [5, 6]), (":2", [1, 2]), ("4", [4]), ("6:9", [6])],
)
def test_the_steps_that_are_asked_for(run_dir, steps, shown):
    trace = read_trace(run_dir, steps)
    assert list(trace.steps) == shown
    assert list(trace.steps.values()) == pytest.approx([10 * i for i in range(len(shown))])
    assert {p.step for p in trace.pieces} == set(shown)
    assert trace.total_s == pytest.approx(10 * len(shown))
    assert [trace.idle(rank) for rank in (0, 1)] == pytest.approx([0.5, 0.0])


def test_two_lines_of_one_step_are_both_shown(run_dir):
    file = TraceFile(run_dir, 0, "left", resume_step=6)
    file.write(6, later([Span("checkpoint", T0 + 10, T0 + 13, T0 + 13)], 60))
    trace = read_trace(run_dir, "6")
    assert trace.busy["checkpoint"] == {0: pytest.approx(3)}
    assert trace.busy["sync"] == {0: pytest.approx(1), 1: pytest.approx(2)}


def test_the_table_names_the_ranks_that_took_part(run_dir):
    rows = [row.split() for row in tables(read_trace(run_dir, "2")).splitlines()]
    assert ["rollout", "1", "8.000", "8.000", "8.000"] in rows
    assert ["sync", "2", "1.000", "1.500", "2.000"] in rows
    assert ["0", "5.000", "50.0%", "left"] in rows
    assert not any("wait" in row for row in rows)


def test_a_torn_end_is_left_out_and_said(run_dir):
    path = damaged(run_dir, '{"step": 7, "host": "right", "spa')
    trace = read_trace(run_dir, None)
    assert max(trace.steps) == 6
    assert trace.notes == [f"the torn last line of {path} is left out"]


def test_a_rank_that_has_none_of_the_steps_is_said(run_dir):
    TraceFile(run_dir, 1, "right", resume_step=3)
    trace = read_trace(run_dir, None)
    assert list(trace.hosts) == [0]
    assert trace.notes == ["no such steps from rank 1"]


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ("7:9", ["steps 7 to 9", "steps 1 to 6"]),
        ("4:2", ["step", "steps 1 to 6"]),
        ("last", ["--steps last", "3:6"]),
        ("-3", ["--steps -3"]),
        (":", ["--steps :"]),
        ("1:2:3", ["--steps 1:2:3"]),
    ],
)
def test_wrong_steps_are_named(run_dir, steps, words):
    with pytest.raises(ConfigError) as error:
        read_trace(run_dir, steps)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    "text",
    ["{torn\n", "[]\n", '{"step": 9}\n', '{"step": 9, "host": "a", "spans": [["sync", 1, 2]]}\n'],
)
def test_a_damaged_line_is_named(run_dir, text):
    path = damaged(run_dir, text)
    with pytest.raises(ConfigError, match=f"{path}:7 is no line of a trace"):
        read_trace(run_dir, "1")


# --- what is made of it ---


def test_chrome_events_are_complete_and_do_not_overlap(run_dir):
    events = chrome_events(read_trace(run_dir, "2:3"))
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    bars = [e for e in events if e["ph"] == "X"]
    assert Counter((named[e["pid"]], e["tid"], e["name"], e["cat"]) for e in bars) == {
        ("left", 0, "update_actor", "phase"): 2,
        ("left", 0, "wait samples", "wait"): 2,
        ("left", 0, "sync", "phase"): 2,
        ("left", 0, "wait", "wait"): 2,  # for rank 1 to have synced
        ("right", 1, "rollout", "phase"): 2,
        ("right", 1, "sync", "phase"): 2,
    }
    assert {e["cname"] for e in bars if e["cat"] == "wait"} == {"grey"}
    for rank in (0, 1):
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in bars if e["tid"] == rank)
        assert own[0][0] == 0
        assert own[-1][1] == 20_000_000  # microseconds
        assert all(end <= start for (_, end), (start, _) in pairwise(own))
    assert [(e["name"], e["ts"]) for e in events if e["ph"] == "i"] == [
        ("step 2", 0), ("step 3", 10_000_000),
    ]  # fmt: skip


@pytest.mark.parametrize(("ranks", "scale"), [(1, 0.01), (2, 1), (64, 100)])
def test_names_stay_within_their_bars(tmp_path, ranks, scale):
    """Measured in the drawn picture, from 0.2 to 2,000 seconds."""
    for rank in range(ranks):
        file = TraceFile(tmp_path, rank, f"node-{rank // 8}")
        for step in (1, 2):
            spans = later(ROLLOUT if rank % 2 else ACTOR, 10 * step)
            spans = [Span(n, *(T0 + (t - T0) * scale for t in times)) for n, *times in spans]
            file.write(step, spans)
    trace = read_trace(tmp_path, None)
    figure = draw(trace, "a run")
    renderer = FigureCanvasAgg(figure).get_renderer()
    axes = figure.axes[0]
    busy = {(p.start + p.end) / 2: p for p in trace.pieces if not p.waiting}
    named = [text for text in axes.texts if text.get_text().replace("\n", "") in trace.busy]
    assert len(named) >= 2 * ranks
    for text in named:
        box = text.get_window_extent(renderer)
        left, right = (axes.transData.inverted().transform((x, 0))[0] for x in (box.x0, box.x1))
        bar = busy[text.get_position()[0]]
        assert bar.start < left < right < bar.end
    labels = [label.get_window_extent(renderer) for label in axes.get_yticklabels()]
    assert len(labels) == ranks
    assert min(box.x0 for box in labels) > 0
    assert all(low.y1 <= high.y0 for high, low in pairwise(labels))


def test_the_legend_has_every_phase_and_stays_in_the_picture(tmp_path):
    phases = [f"a_phase_of_some_{i}" for i in range(24)]
    spans = [Span(name, T0 + i, T0 + i + 1, T0 + i + 1) for i, name in enumerate(phases)]
    TraceFile(tmp_path, 0, "a").write(1, spans)
    figure = draw(read_trace(tmp_path, None), "a run")
    renderer = FigureCanvasAgg(figure).get_renderer()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [*phases, "waiting"]
    box, axes = legend.get_window_extent(renderer), figure.axes[0].get_tightbbox(renderer)
    assert box.x0 >= 0 and box.y0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert box.y1 <= axes.y0


def test_waiting_is_hatched_and_beneath_no_name(run_dir):
    axes = draw(read_trace(run_dir, "1"), "a run").axes[0]
    hatched = [bars for bars in axes.collections if bars.get_hatch() == WAITING["hatch"]]
    edges = [path.get_extents().intervalx.tolist() for path in hatched[0].get_paths()]
    assert len(hatched) == 1  # rank 1 never waits
    assert edges == [pytest.approx([4, 8]), pytest.approx([9, 10])]


@pytest.mark.parametrize(
    ("width", "height", "text"),
    [(2.0, 0.4, "old_logprobs"), (0.7, 0.4, "old_\nlogprobs"), (0.7, 0.2, ""), (0.3, 0.4, "")],
)
def test_a_name_breaks_or_goes(width, height, text):
    assert fitting("old_logprobs", width, height, font=8) == text


def program(*args):
    command = [sys.executable, "-m", "spmdrl.timeline", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.programs
def test_the_program_writes_both_files(run_dir):
    done = program(run_dir, "--steps", "2:3")
    assert done.returncode == 0, done.stderr
    assert "wrote" in done.stdout and "rollout" in done.stdout
    events = json.loads(Path(run_dir, "trace.json").read_text())["traceEvents"]
    assert {e["args"]["step"] for e in events if e["ph"] == "X"} == {2, 3}
    assert Path(run_dir, "timeline.png").read_bytes().startswith(b"\x89PNG")
    done = program(run_dir, "--steps", "5", "--out", run_dir / "new" / "five.svg")
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (run_dir / "new").iterdir()) == ["five.json", "five.svg"]


@pytest.mark.programs
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nowhere"], "no such folder"),
        (["run", "--step", "3"], "--step: there is no such flag; nearest: --steps"),
        (["run", "--out", "/proc/picture.png"], "--out='/proc': '/proc' cannot be written to"),
        (["run", "--steps", "30:40"], "steps 30 to 40"),
        (["run", "--out", "picture"], ".png"),
    ],
)
def test_the_program_says_in_a_line_what_is_wrong(run_dir, args, words):
    done = program(run_dir if args[0] == "run" else run_dir / args[0], *args[1:])
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("spmdrl: config error:") and words in line
    assert not Path(run_dir, "trace.json").exists()
