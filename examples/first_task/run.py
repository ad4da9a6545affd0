"""`make first-task`: a real model from PyPI, GRPO on this machine, answers before and after.

    python examples/first_task/run.py

Runs the commands that docs/first_task.md goes through. All that it makes is in runs/first_task;
what stands there already, the model and a run that was stopped, is used. Ends with the exit code of
the first command that fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spmdrl.training.logs.answers import one_line

FOLDER = Path("runs/first_task")
RUN = FOLDER / "grpo"
MOST_SHOWN = 12  # answers
WIDTH = 60  # characters of an answer

Row = dict[str, Any]  # of samples/eval_N.jsonl


def main() -> None:
    os.chdir(Path(__file__).resolve().parents[2])
    script = "examples/first_task/{}.py".format
    run([sys.executable, script("get_model"), "--out", str(FOLDER / "model")])
    run([sys.executable, script("make_data"), "--out", str(FOLDER)])
    run(training_command(torch.cuda.device_count()))
    Console().print(answers_table(*first_and_last_answers(RUN)))
    print(f"all held-out answers: {RUN}/samples/eval_*.jsonl; the curve: {RUN}/reward.png")


def training_command(gpus: int) -> list[str]:
    """On two CPU ranks, or on the GPUs that are here, at most 8: a step has 8 prompts."""
    ranks = min(gpus, 8) or 2
    config = ["--config", "examples/first_task/config.py", "--resume", "auto"]
    on_gpu = ["--rollout.dtype", "bfloat16"] if gpus else []  # there vLLM has no float32
    launch = [sys.executable, "-m", "spmdrl.launch", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launch, "-m", "spmdrl.ppo", *config, *on_gpu]


def run(command: list[str]) -> None:
    """Runs one command, its output on the terminal. Exits the process where it fails."""
    words = ["python" if word == sys.executable else word for word in command]
    print(f"\n== {' '.join(words)}", flush=True)
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, env=os.environ | env)
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the terminal has sent it to the command too, which ends its step
        process.wait()
        sys.exit(130)
    if code != 0:
        print(f"first-task: the command above failed with exit code {code}", file=sys.stderr)
        sys.exit(code if code > 0 else 1)


def first_and_last_answers(run_dir: Path) -> tuple[list[Row], list[Row]]:
    """Returns held-out answers of the first and of the last evaluation, in the same order."""
    files = sorted(run_dir.glob("samples/eval_*.jsonl"), key=lambda p: int(p.stem.split("_")[1]))
    before, after = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in (files[0], files[-1])
    )
    return before, after


def answers_table(before: list[Row], after: list[Row]) -> Table:
    """Answers to the same questions side by side, each with its reward."""
    table = Table("city", "before", "reward", "after", "reward", title="held-out questions")
    for old, new in list(zip(before, after, strict=True))[:MOST_SHOWN]:
        table.add_row(old["ground_truth"], *shown(old), *shown(new))
    return table


def shown(row: Row) -> tuple[Text, str]:
    """Returns the answer on one line and its reward."""
    reward = "none" if row["reward"] is None else f"{row['reward']:.0f}"
    return Text(one_line(row["response"], WIDTH)), reward


if __name__ == "__main__":
    main()
