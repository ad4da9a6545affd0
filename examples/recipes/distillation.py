"""What a teacher is worth: rewards alone, a teacher alone, and both, on as many answers.

    python examples/recipes/run.py --only sft,grpo,distill        # the student and the teacher
    python examples/recipes/distillation.py [--seeds 0 1 2] [--report]

Every run has the student's weights and 60 steps of 256 answers. Writes held-out accuracy by step
into docs/pictures/distillation.png, mean, least and most of the seeds, and prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure
from run import LOGS, execute

from spmdrl.training.logs.curves import Points, points

PICTURE = Path("docs/pictures/distillation.png")
TEACHER = "runs/arithmetic/teacher"
GOAL = 0.9  # the table says in which step it is reached
COMMAND = "-m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo --config configs/qwen3_tiny_arithmetic"
EQUAL = "--steps 60 --eval_every 5 --checkpoint.every_steps 0"
REWARDS = f"{COMMAND}_grpo_cpu.py --data.prompts_per_step 32 {EQUAL}"  # 8 answers to each
DISTILL = f"{COMMAND}_distill_cpu.py {EQUAL}"
TOP = "--algo.distillation.topk 8"
VARIANTS = {
    "rewards alone: GRPO, 4 updates a step": REWARDS,
    "teacher, KL of the sampled token": DISTILL,
    "teacher, its 8 likeliest tokens": f"{DISTILL} {TOP} --algo.kl_coef 0 --algo.kl_in loss "
    "--algo.kl_estimator k3",
    "rewards and the 8 likeliest tokens": f"{REWARDS} {TOP} --ref.model {TEACHER} "
    "--ref.dtype float32",
}
COLOURS = ("#4e79a7", "#f28e2b", "#e15759", "#59a14f")


def main() -> None:
    parser = argparse.ArgumentParser(description="rewards, a teacher, and both, by step")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--report", action="store_true", help="of the runs that are there")
    args = parser.parse_args()
    os.chdir(Path(__file__).resolve().parents[2])
    LOGS.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for number, command in enumerate(VARIANTS.values()):
            folder = run_dir(number, seed)
            done = folder.with_suffix(".done")
            if args.report or done.exists():
                continue
            if not execute(
                f"{command} --seed {seed} --run_dir {folder}", LOGS / "distillation.log"
            ):
                sys.exit(f"a run failed: {LOGS}/distillation.log")
            done.touch()
    report(args.seeds)


def run_dir(variant: int, seed: int) -> Path:
    return Path(f"runs/recipes/distillation_{variant}_{seed}")


def report(seeds: list[int]) -> None:
    """Draws the picture and prints the table."""
    figure = Figure(figsize=(7.5, 4), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    print(f"| | held-out accuracy after 10 steps | after 60 | step that first has {GOAL} |")
    print("|---|---|---|---|")
    for number, (label, colour) in enumerate(zip(VARIANTS, COLOURS, strict=True)):
        curves = [held_out(run_dir(number, seed)) for seed in seeds]
        steps = [step for step, _ in curves[0]]
        values = [[value for _, value in curve] for curve in curves]
        by_step = list(zip(*values, strict=True))
        axes.plot(steps, [mean(v) for v in by_step], "o-", color=colour, markersize=3, label=label)
        axes.fill_between(steps, [min(v) for v in by_step], [max(v) for v in by_step],
                          color=colour, alpha=0.15, linewidth=0)  # fmt: skip
        after = {step: f"{mean(v):.2f}" for step, v in zip(steps, by_step, strict=True)}
        reached = [next((s for s, value in curve if value >= GOAL), None) for curve in curves]
        shown = ", ".join("never" if step is None else str(step) for step in reached)
        print(f"| {label} | {after[10]} | {after[60]} | {shown} |")
    axes.set(xlabel="step of 256 answers", ylabel="held-out accuracy, greedy")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(PICTURE)


def held_out(folder: Path) -> Points:
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return points([json.loads(line) for line in lines], "eval/reward")


if __name__ == "__main__":
    main()
