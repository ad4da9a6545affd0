"""Traces of torch.profiler, of the steps and ranks that were asked for, from real runs."""

import gzip
import json
from pathlib import Path

import pytest
from programs import set_up, train

from spmdrl.cli.arguments import load_config
from spmdrl.config import ConfigError, PpoConfig
from spmdrl.training.checks.rl import check
from spmdrl.training.logs.profiler import mend_names, steps_of
from spmdrl.training.runtime import lost_timeout_s

GRADIENT = "autograd::engine::evaluate_function"
SFT = """
from spmdrl.config import *

config = SftConfig(
    model="model", data=SftDataConfig(train="rows.jsonl", batch_size=6, max_tokens=32),
    out="out", run_dir="run", steps=3,
    actor=TrainConfig(dtype="float32", micro_batch_tokens=64, optim=OptimConfig(lr=1e-3)),
    checkpoint=CheckpointConfig(every_steps=1, keep=3), trackers=(),
)
"""


def traces(folder):
    return sorted(path.name for path in Path(folder, "run/profile").iterdir())


def trace_of(folder, name):
    with gzip.open(Path(folder, "run/profile", name)) as file:
        return json.load(file)


def spans(trace):
    """Of what is ours, and torch's collectives: name -> (start, end) in us of its first."""
    found = [e for e in trace["traceEvents"] if e.get("cat") == "user_annotation"]
    return {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in reversed(found)}


def operators(trace, start, end):
    """Their names, of those within start to end."""
    return {e["name"] for e in trace["traceEvents"]
            if e.get("cat") == "cpu_op" and start <= e["ts"] <= end}  # fmt: skip


@pytest.fixture
def rows(tmp_path, qwen3):
    Path(tmp_path, "model").symlink_to(qwen3)
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(5) for b in range(5)]
    Path(tmp_path, "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path(tmp_path, "cfg.py").write_text(SFT)
    return tmp_path


def sft(folder, *args):
    return train(folder, 1, "--config", "cfg.py", *args, program="spmdrl.sft")


@pytest.mark.vllm
@pytest.mark.ranks
@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_the_steps_and_ranks_that_were_asked_for(tmp_path, qwen3, engine):
    folder = set_up(tmp_path, qwen3)
    window = ("--profile.steps", "2-3", "--profile.ranks", "1")
    done = train(
        folder, 2, "--config", "cfg.py", "--steps", "3", "--rollout.engine", engine, *window
    )
    assert done.code == 0, done.output[-4000:]
    assert traces(folder) == ["step_2_rank_1.json.gz", "step_3_rank_1.json.gz"]
    for step in (2, 3):
        trace = trace_of(folder, f"step_{step}_rank_1.json.gz")
        assert trace["distributedInfo"]["rank"] == 1
        found = spans(trace)
        assert {"rollout", "agree rollout", "reward", "update_actor", "sync"} <= set(found)
        whole = found[f"step {step}"]
        assert f"step {5 - step}" not in found
        for name in ("rollout", "update_actor", "sync"):
            assert whole[0] <= found[name][0] < found[name][1] <= whole[1]
        assert any(GRADIENT in name for name in operators(trace, *found["update_actor"]))
        assert not any(GRADIENT in name for name in operators(trace, *found["sync"]))
        assert operators(trace, *found["rollout"])


@pytest.mark.ranks
def test_fine_tuning_that_goes_on_amid_the_window(rows):
    window = ("--profile.steps", "2-3", "--profile.ranks", "all")
    more = ("--profile.shapes", "True", "--profile.memory", "True", "--profile.stacks", "True")
    done = sft(rows, *window)
    assert done.code == 0, done.output[-4000:]
    assert traces(rows) == ["step_2_rank_0.json.gz", "step_3_rank_0.json.gz"]
    plain = trace_of(rows, "step_3_rank_0.json.gz")
    for name in traces(rows):
        Path(rows, "run/profile", name).unlink()
    done = sft(rows, *window, *more, "--resume", "run/checkpoints/step_00000002")
    assert done.code == 0, done.output[-4000:]
    assert traces(rows) == ["step_3_rank_0.json.gz"]
    full = trace_of(rows, "step_3_rank_0.json.gz")
    for trace, detailed in ((plain, False), (full, True)):
        assert {"step 3", "data", "update", "agree update"} <= set(spans(trace))
        events = trace["traceEvents"]
        assert any("Input Dims" in e.get("args", {}) for e in events) == detailed
        assert any(e["name"] == "[memory]" for e in events) == detailed
        functions = {e["name"] for e in events if e.get("cat") == "python_function"}
        assert any("cross_entropy" in name for name in functions) == detailed


FAILING_UPDATE = """
import spmdrl.training.supervised
true_update, calls = spmdrl.training.supervised.update, []

def update(*args):
    calls.append(true_update(*args))
    if len(calls) == 2:
        raise FloatingPointError("the second one")
    return calls[-1]

spmdrl.training.supervised.update = update
"""


@pytest.mark.ranks
def test_a_step_that_fails_leaves_what_was_recorded(rows):
    with Path(rows, "cfg.py").open("a") as file:
        file.write(FAILING_UPDATE)
    done = sft(rows, "--profile.steps", "2-3")
    assert done.code == 1 and "failed in phase 'update'" in done.output, done.output[-4000:]
    [name] = traces(rows)
    trace = trace_of(rows, name)
    found = spans(trace)
    # a product by torch, or by oneDNN on processors on which that is faster
    assert {"aten::mm", "_OneDnnLinear"} & operators(trace, *found["update"])


@pytest.mark.ranks
def test_a_trace_that_cannot_be_written_is_no_failure(rows):
    Path(rows, "run").mkdir()
    Path(rows, "run/profile").write_text("a file")
    done = sft(rows, "--profile.steps", "2")
    assert done.code == 0, done.output[-4000:]
    assert "no trace of step 2 on rank 0: [Errno 17] File exists" in done.output


@pytest.mark.ranks
def test_nothing_but_marks_for_nsys_is_nothing_on_a_cpu(rows):
    done = sft(rows, "--profile.trace", "False")
    assert done.code == 2 and "profile.trace=False leaves it to nsys" in done.output
    assert not Path(rows, "run/profile").exists()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("steps", "2-9", r"profile.steps='2-9' names step 9, but the run has steps=2: 1-2"),
     ("steps", 0, r"profile.steps='0' names step 0, but the run has steps=2"),
     ("steps", "1-99999999999999", "names step 99999999999999"),
     ("steps", "first", r"profile.steps='first': expected steps like '3-4'"),
     ("ranks", (0, 2), r"profile.ranks='0,2' needs rank 2, but there are 2 ranks"),
     ("ranks", "", "profile.ranks='': expected ranks like")],
)  # fmt: skip
def test_what_the_run_does_not_have(tmp_path, qwen3, monkeypatch, field, value, words):
    folder = set_up(tmp_path, qwen3)
    monkeypatch.chdir(folder)
    asked = {"profile.steps": "1,2", f"profile.{field}": value}
    with pytest.raises(ConfigError, match=words):
        check(load_config("cfg.py", PpoConfig, asked), 2)


def test_steps_by_any_spelling_and_signs_of_life(tmp_path, qwen3):
    folder = set_up(tmp_path, qwen3)
    config = load_config(str(folder / "cfg.py"), PpoConfig, {"steps": 7})
    assert (config.profile, lost_timeout_s(config)) == (None, config.lost_timeout_s)
    for asked, steps in ((3, {3}), ((2, 5), {2, 5}), ("1,4-6", {1, 4, 5, 6})):
        profiled = load_config(str(folder / "cfg.py"), PpoConfig, {"profile.steps": asked})
        assert steps_of(profiled.profile, 7) == steps
        assert lost_timeout_s(profiled) == config.stall_timeout_s


def test_names_that_torch_does_not_escape(tmp_path):
    """As torch 2.13 writes them for code that is gone; whole names stay as they are."""
    names = [b"a.py(3): f", b'a.py(0): "', b'"', b"a.py(0): \\", b'b"c",d']
    events = [b'  {\n    "cat": "python_function",\n    "name": "%s",\n    "ts": 1\n  }' % name
              for name in names]  # fmt: skip
    trace = tmp_path / "trace.json"
    trace.write_bytes(b"[\n" + b",\n".join(events) + b"\n]")
    mend_names(trace)
    kept = [event["name"] for event in json.loads(trace.read_text())]
    assert kept == ["a.py(3): f", "a.py(0): '", "'", "a.py(0): /", "b'c',d"]
