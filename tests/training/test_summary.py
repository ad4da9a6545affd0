"""The summary and the picture that a run leaves, out of files made by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread
from tensorboard.plugin_util import markdown_to_safe_html

from spmdrl.config import CheckpointConfig, DataConfig, PpoConfig, SftConfig, SftDataConfig
from spmdrl.training.logs.answers import as_markdown, few_answers, one_line
from spmdrl.training.logs.curves import (
    LOSS,
    REWARD,
    Row,
    curve_figure,
    draw_curve,
    moving_average,
    points,
)
from spmdrl.training.logs.summary import (
    FinishedRun,
    LaunchCommand,
    read_rows,
    summary,
    without_options,
)

START = LaunchCommand("spmdrl.ppo", ("--config", "my cfg.py", "--steps", "4"), 2, 1, launched=True)
LAUNCH = "python -m spmdrl.launch --nproc-per-node 2 -m "


def history(steps: int, evaluations: dict[int, float]) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = [
        {"step": step, "reward/mean": step / 10, "time/step_s": 2.0, "throughput/tokens_per_s": 50}
        for step in range(1, steps + 1)
    ]
    rows.insert(0, {"step": 0})
    for step, value in evaluations.items():
        rows[step]["eval/reward"] = value
    return rows


def answer(reward: float | None, response: str, prompt: str = "1+1=") -> dict[str, object]:
    return {"prompt": prompt, "response": response, "reward": reward, "ground_truth": "2",
            "invalid": None if reward is not None else "Traceback\nValueError: no",
            "finish_reason": "stop", "response_tokens": 3}  # fmt: skip


def write_lines(path: Path, rows: Sequence[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FinishedRun:
    """A run of 4 steps in run/, whose best checkpoint is that of step 2."""
    monkeypatch.chdir(tmp_path)
    config = PpoConfig(
        model="m", data=DataConfig(train="t", eval="e"), reward=len, steps=4, run_dir="run",
        checkpoint=CheckpointConfig(keep_best=1),
    )  # fmt: skip
    metrics = history(4, {0: 0.25, 2: 0.75, 4: 0.5})
    for step, right in ((0, 0.1), (4, 0.9)):
        metrics[step] |= {"eval/reward/invalid": 0.0, "eval/reward/right": right}
    write_lines(Path("run/metrics.jsonl"), metrics)
    rows = [answer(reward, f"answer {reward}") for reward in (1.0, 0.0, None, 0.5, 0.5)]
    write_lines(Path("run/samples/eval_4.jsonl"), rows)
    for step in (2, 4):
        Path(f"run/checkpoints/step_{step:08d}").mkdir(parents=True)
    return FinishedRun(config, REWARD, START, step=4, stopped=False)


def told(ended: FinishedRun) -> str:
    return summary(ended, read_rows(ended.run_dir))


def test_results_come_from_the_whole_history(ended: FinishedRun) -> None:
    lines = told(ended).splitlines()
    assert lines[0] == "Finished: 4 of 4 steps done; run folder run"
    assert lines[1].startswith("4 steps took 8 s, 2 s each, at 50 tokens/s")
    assert "reward on held-out data  0.25 (step 0) -> 0.5 (step 4)" in lines
    assert "right on held-out data   0.1 (step 0) -> 0.9 (step 4)" in lines
    assert not any("invalid on" in line for line in lines)
    assert "reward in training       0.15 (steps 1 to 2) -> 0.35 (steps 3 to 4)" in lines
    best = (
        "best                     eval/reward 0.75 after step 2; in run/checkpoints/step_00000002"
    )
    assert best in lines


def test_commands_repeat_what_was_typed(ended: FinishedRun) -> None:
    commands = told(ended).partition("next:")[2]
    kept = "run/checkpoints/step_00000002"
    assert f"{LAUNCH}spmdrl.evaluate --config 'my cfg.py' --steps 4 --checkpoint {kept}" in commands
    assert f"python -m spmdrl.export --checkpoint {kept} --out run_step_2" in commands
    assert f"{LAUNCH}spmdrl.ppo --config 'my cfg.py' --steps 8 --resume auto" in commands
    assert "tensorboard --logdir run" in commands and "spmdrl.timeline run" in commands
    assert "python -m spmdrl.view run" in commands


def test_a_run_without_a_launcher_without_held_out_data_and_one_on_two_hosts(
    ended: FinishedRun,
) -> None:
    alone = replace(ended, start=replace(START, launched=False))
    assert "  python -m spmdrl.ppo --config" in told(alone)
    hosts = replace(ended, start=replace(START, hosts=2))
    assert "the command that started the run, with\n  --steps 8 --resume auto" in told(hosts)
    no_eval = replace(ended, config=replace(ended.config, data=DataConfig(train="t")))
    assert "spmdrl.evaluate" not in told(no_eval)
    for folder in sorted(Path("run/checkpoints").iterdir()):
        folder.rmdir()
    assert "that started the run, with\n  --checkpoint.every_steps 4" in told(hosts)


def test_without_checkpoints_the_way_to_have_them_is_told(ended: FinishedRun) -> None:
    for folder in sorted(Path("run/checkpoints").iterdir()):
        folder.rmdir()
    text = told(ended)
    assert "its checkpoint was not kept" in text and "--resume" not in text
    assert f"{LAUNCH}spmdrl.ppo --config 'my cfg.py' --steps 4 --checkpoint.every_steps 4" in text


def test_a_stopped_run_is_told_in_short(ended: FinishedRun) -> None:
    text = told(replace(ended, step=3, stopped=True))
    assert text.startswith("Stopped: 3 of 4 steps done")
    assert "answer:" not in text and "files:" not in text and "evaluate" not in text
    assert text.endswith(f"{LAUNCH}spmdrl.ppo --config 'my cfg.py' --steps 4 --resume auto")


def test_answers_are_the_worst_a_middle_one_and_the_best(ended: FinishedRun) -> None:
    lines = [line.strip() for line in told(ended).splitlines()]
    shown = [
        line for line in lines if line.startswith(("reward ", "answer:")) and "data" not in line
    ]
    assert [line for line in shown if line.startswith("answer:")] == [
        "answer: answer 0.0", "answer: answer 0.5", "answer: answer 1.0"
    ]  # fmt: skip
    assert "reward 0, ground truth: 2" in lines


def test_a_run_of_fine_tuning_names_its_model_and_loss(tmp_path: Path) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "model"
    out.mkdir()
    Path(out, "config.json").write_text("{}")
    rows = [{"step": 0, "eval/loss": 2.0}, {"step": 1, "sft/loss": 1.0, "eval/loss": 1.5}]
    write_lines(run_dir / "metrics.jsonl", rows)
    config = SftConfig(
        model="m", out=str(out), data=SftDataConfig(train="t"), run_dir=str(run_dir), steps=1
    )
    text = told(FinishedRun(config, LOSS, replace(START, program="spmdrl.sft"), 1, stopped=False))
    assert "loss on held-out data  2 (step 0) -> 1.5 (step 1)" in text
    assert "eval/loss 1.5 after step 1" in text and f"{out} " in text
    assert "answer:" not in text and "--resume" not in text


def test_a_damaged_history_is_told_as_far_as_it_goes(ended: FinishedRun) -> None:
    path = Path("run/metrics.jsonl")
    path.write_bytes(b"\0\0" + path.read_bytes() + b'{"step": 5, "rew')
    assert [row["step"] for row in read_rows(ended.run_dir)] == [0, 1, 2, 3, 4]
    path.unlink()
    assert told(ended).startswith("Finished: 4 of 4")


def test_one_line_bears_whatever_a_model_writes() -> None:
    assert one_line("a\nb\x1b[2J\t\u202e\ud800 é") == r"a\nb\x1b[2J\t\u202e\ud800 é"
    long = one_line("start" + 1000 * "x" + "end", 50)
    assert len(long) <= 50 and long.startswith("start") and long.endswith("end")


def test_answers_in_a_file_with_every_kind_of_line_break(tmp_path: Path) -> None:
    path = tmp_path / "step_1.jsonl"
    write_lines(path, [answer(0.0, "a\u2028b\x85c")])
    assert [row["response"] for row in few_answers(path)] == ["a\u2028b\x85c"]
    assert few_answers(tmp_path / "none.jsonl") == []
    write_lines(path, [answer(None, "x")])
    assert "no reward (ValueError: no)" in as_markdown(few_answers(path))


def test_markdown_of_an_answer_stays_text_in_tensorboard() -> None:
    text = "# no title\n````\n<script>x</script> | a | **b** \x1b"
    html = markdown_to_safe_html(as_markdown([answer(1.0, text)]))  # type: ignore[list-item]
    assert "<strong>reward 1</strong>" in html
    inside = "# no title\n````\n&lt;script&gt;x&lt;/script&gt; | a | **b** \\x1b"
    assert f"<code>{inside}\n</code>" in html


def test_options_are_taken_out_in_every_form() -> None:
    words = ["--config", "c.py", "--resume", "auto", "--resume=never", "--profile.steps", "3",
             "--resume_x", "1", "--steps", "-1", "--flag", "--profile.trace=False",
             "--lr", "2"]  # fmt: skip
    kept = without_options(words, ["resume", "profile", "steps"])
    assert kept == ["--config", "c.py", "--resume_x", "1", "--flag", "--lr", "2"]
    assert without_options(["cfg.py", "--keep-best", "3"], ["keep_best"]) == ["cfg.py"]


def test_the_picture_shows_both_curves(tmp_path: Path) -> None:
    rows: list[Row] = history(40, {0: 0.25, 40: 0.5})
    rows[3] = {**rows[3], "reward/mean": float("nan")}
    figure = curve_figure(points(rows, "reward/mean"), points(rows, "eval/reward"), REWARD, "run")
    lines = {line.get_label(): line.get_xydata() for line in figure.axes[0].lines}
    assert lines["held-out data"].tolist() == [[0, 0.25], [40, 0.5]]
    assert len(lines["training data, each step"]) == 39  # without the one that is no number
    assert lines["training data, moving average"][0].tolist() == pytest.approx([1, 0.15])
    assert figure.axes[0].get_ylabel() == "mean reward of an answer"
    assert draw_curve(rows, REWARD, "runs/$x^^$", tmp_path / "reward.png")  # no formula
    assert imread(tmp_path / "reward.png").shape[:2] == (540, 960)
    assert not draw_curve([{"step": 1}], REWARD, "run", tmp_path / "other.png")
    assert not Path(tmp_path, "other.png").exists()


def test_a_moving_average_keeps_means_and_lengths() -> None:
    assert moving_average([1.0, 1.0, 1.0]) == [1.0, 1.0, 1.0]
    assert moving_average([0.0, 3.0, 0.0]) == pytest.approx([1.5, 1.0, 1.5])
