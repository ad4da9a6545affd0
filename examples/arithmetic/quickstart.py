"""`make quickstart`: assets, supervised warm-up, reinforcement learning, and what came of it.

    python examples/arithmetic/quickstart.py [--algo grpo|ppo] [--seed 0]

Runs the same commands that a user types, each under a time limit; ends with the exit code of the
first that fails. Leaves everything in runs/quickstart (or runs/quickstart-ppo). The seed is that of
all three stages.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ASSETS = Path("runs/arithmetic")
LIMITS_S = {"assets": 120, "sft": 300, "rl": 900}
OUT_OF_TIME = 124  # exit code, as of timeout(1)
TORCHRUN_GRACE_S = 45  # torchrun gives its ranks 30 s to end

Row = dict[str, float]  # one line of metrics.jsonl


def main() -> None:
    parser = argparse.ArgumentParser(description="train a small model from scratch to add")
    parser.add_argument("--algo", choices=("grpo", "ppo"), default="grpo")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.chdir(Path(__file__).resolve().parents[2])
    run_dir = Path("runs/quickstart" if args.algo == "grpo" else "runs/quickstart-ppo")
    shutil.rmtree(run_dir, ignore_errors=True)
    seconds = run_stages(args.algo, args.seed, run_dir)
    rows = read_metrics(run_dir / "metrics.jsonl")
    summary = summarise(rows, seconds)
    Path(run_dir, "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    Console().print(summary_table(summary, phase_seconds(rows)))
    print(f"reward curve: {run_dir}/reward.png; tensorboard --logdir {run_dir}")


def run_stages(algo: str, seed: int, run_dir: Path) -> dict[str, float]:
    """Seconds of each stage. Exits the process where one fails."""
    python = sys.executable
    gpus = torch.cuda.device_count()
    torchrun = [python, "-m", "spmdrl.launch", "--standalone", "--nproc-per-node"]
    torchrun += [str(min(gpus, 2) or 2), "-m"]
    configs = "configs/qwen3_tiny_arithmetic_{}_cpu.py"
    make_assets = [python, "examples/arithmetic/make_assets.py", "--out", str(ASSETS)]
    sft = [*torchrun, "spmdrl.sft", "--config", configs.format("sft")]
    rl = [*torchrun, "spmdrl.ppo", "--config", configs.format(algo), "--run_dir", str(run_dir)]
    if gpus:
        rl += ["--rollout.dtype", "bfloat16"]  # vLLM's attention on GPUs has no float32
    chosen = ["--seed", str(seed)]
    return {
        "assets": run_stage("assets", make_assets + chosen),
        "sft": run_stage("sft", sft + chosen),
        "rl": run_stage("rl", rl + chosen),
    }


def run_stage(name: str, command: list[str]) -> float:
    """Runs one command, its output on the terminal; returns its seconds."""
    shown = " ".join(["python" if word == sys.executable else word for word in command])
    print(f"\n== {name}: {shown}", flush=True)
    env = {
        "OMP_NUM_THREADS": "1",  # the model is too small for more
        "HF_HUB_OFFLINE": "1",
    }
    start = time.monotonic()
    process = subprocess.Popen(command, env=os.environ | env)
    try:
        code = process.wait(LIMITS_S[name])
    except subprocess.TimeoutExpired:
        end(process)
        print(f"quickstart: stage {name} took over {LIMITS_S[name]} s", file=sys.stderr)
        sys.exit(OUT_OF_TIME)
    except KeyboardInterrupt:
        end(process)
        sys.exit(130)
    if code != 0:
        print(f"quickstart: stage {name} failed with exit code {code}", file=sys.stderr)
        sys.exit(code if code > 0 else 1)
    return time.monotonic() - start


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, which torchrun passes on to its ranks; SIGKILL if that does not help."""
    process.terminate()
    try:
        process.wait(TORCHRUN_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()


def read_metrics(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def summarise(rows: list[Row], seconds: dict[str, float]) -> dict[str, Any]:
    """Held-out greedy accuracy before and after; response tokens per second over all steps.

    wall_s counts the two training commands from launch to exit, start-up and evaluation included.
    """
    accuracies = [row["eval/reward"] for row in rows if "eval/reward" in row]
    steps = [row for row in rows if "time/step_s" in row]
    tokens = sum(row["throughput/tokens_per_s"] * row["time/step_s"] for row in steps)
    return {
        "accuracy_before": accuracies[0],
        "accuracy_after": accuracies[-1],
        "wall_s": round(seconds["sft"] + seconds["rl"], 1),
        "tokens_per_s": round(tokens / sum(row["time/step_s"] for row in steps), 1),
        "steps": len(steps),
        "seconds_by_stage": {name: round(s, 1) for name, s in seconds.items()},
    }


def phase_seconds(rows: list[Row]) -> dict[str, float]:
    """Seconds in each phase of a step, over all steps, longest first."""
    sums: dict[str, float] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith("time/") and key != "time/step_s":
                phase = key.removeprefix("time/").removesuffix("_s")
                sums[phase] = sums.get(phase, 0.0) + value
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def summary_table(summary: dict[str, Any], phases: dict[str, float]) -> Table:
    table = Table("what", "value", title="quickstart", title_justify="left")
    table.columns[1].justify = "right"
    table.add_row("held-out accuracy before", f"{summary['accuracy_before']:.3f}")
    table.add_row("held-out accuracy after", f"{summary['accuracy_after']:.3f}")
    table.add_row("response tokens per second", f"{summary['tokens_per_s']:,.0f}")
    for name, seconds in summary["seconds_by_stage"].items():
        table.add_row(f"stage {name}", f"{seconds:.1f} s")
    table.add_section()
    total = sum(phases.values())
    for name, seconds in phases.items():
        table.add_row(f"rl steps: {name}", f"{seconds:.1f} s {seconds / total:4.0%}")
    return table


if __name__ == "__main__":
    main()
