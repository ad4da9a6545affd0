"""`make recipes`: every config for CPUs as a whole run; its curve and its row in docs/recipes.md.

    python examples/recipes/run.py [--only dapo,lora] [--again] [--report] [--picture FILE]

Runs the commands that docs/recipes.md tells, each on two ranks and under a time limit, one after
the other. A run that has been made is not made again, but with --again. Every end of a run writes
docs/pictures/recipe_curves.png, or FILE, and the cells "score", "steps" and "time" of the rows that
have run. --report does this alone. What a run printed is in runs/recipes/<name>.log.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spmdrl.training.logs.curves import (
    ACCURACY,
    HELD_OUT,
    LOSS,
    PREFERENCE,
    REWARD,
    TRAINING,
    Curve,
    moving_average,
    points,
)

LOGS = Path("runs/recipes")
PAGE = Path("docs/recipes.md")
PICTURE = Path("docs/pictures/recipe_curves.png")
LIMIT_S = 1800  # of one command
END_S = 45  # torchrun gives its ranks 30 s to end
COLUMNS = 5  # of the picture
SCORE, STEPS, TIME = 2, 3, 4  # cells of a row, counted from 0

Row = dict[str, float]  # one line of metrics.jsonl


@dataclass(frozen=True)
class Recipe:
    """One config, and what has to be there before it runs."""

    name: str  # of the panel, and for --only
    config: str  # in configs/, without the ending
    run_dir: str
    program: str = "spmdrl.ppo"
    curve: Curve = REWARD
    before: tuple[str, ...] = ()  # commands; one that has been run is not run again
    server: str = ""  # a command that runs beside it


ADD = ("examples/arithmetic/make_assets.py",)
MULTIPLY = ("examples/multiply/make_assets.py",)
SEARCH = ("examples/search/make_assets.py",)
COLOURS = ("examples/colours/make_assets.py",)
TEACHER = (
    "-m spmdrl.export --checkpoint runs/arithmetic/grpo/checkpoints/step_00000120 "
    "--out runs/arithmetic/teacher"
)


def addition(name: str, **fields: Any) -> Recipe:
    """A config of the arithmetic example, whose run folder has its name."""
    config = f"qwen3_tiny_arithmetic_{name}_cpu"
    fields = {"run_dir": f"runs/arithmetic/{name}", "before": ADD} | fields
    return Recipe(name, config, **fields)


RECIPES = (
    addition("sft", program="spmdrl.sft", curve=LOSS),
    addition("grpo"),
    addition("lora"),
    addition("async"),
    addition("distill", before=(TEACHER,)),
    addition("mixture"),
    addition("curriculum"),
    addition("difficulty"),
    addition("own_sampler"),
    addition("dpo", program="spmdrl.preference", curve=PREFERENCE),
    addition("reward_model", program="spmdrl.reward_model", curve=ACCURACY,
             run_dir="runs/arithmetic/reward_model_run"),
    Recipe("multiply_sft", "qwen3_tiny_multiply_sft_cpu", "runs/multiply/sft", "spmdrl.sft", LOSS,
           MULTIPLY),
    Recipe("multiply_tools", "qwen3_tiny_multiply_tools_cpu", "runs/multiply/tools"),
    Recipe("multiply_agent", "qwen3_tiny_multiply_agent_cpu", "runs/multiply/agent"),
    Recipe("colours", "qwen2_5_vl_tiny_colours_cpu", "runs/colours/grpo", before=COLOURS),
    Recipe("look", "qwen2_5_vl_tiny_look_cpu", "runs/colours/look", before=COLOURS),
    addition("ppo"),
    addition("dapo"),
    addition("vapo"),
    addition("prime"),
    addition("remax"),
    Recipe("gdpo", "qwen3_tiny_arithmetic_bench_cpu", "runs/arithmetic/gdpo"),
    addition("gspo"),
    addition("sppo"),
    addition("pf_ppo"),
    *map(addition, ("dr_grpo", "opo", "gpg", "cispo", "sapo", "dppo", "clip_cov", "kl_cov")),
    Recipe("search_sft", "qwen3_tiny_search_sft_cpu", "runs/search/sft", "spmdrl.sft", LOSS,
           SEARCH),
    Recipe("search_grpo", "qwen3_tiny_search_grpo_cpu", "runs/search/grpo",
           server="examples/search/retriever.py --port 8817"),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="run every recipe for CPUs")
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--again", action="store_true", help="also those that have run")
    parser.add_argument("--report", action="store_true", help="write page and picture alone")
    parser.add_argument("--picture", type=Path, default=PICTURE, help=f"to draw ({PICTURE})")
    args = parser.parse_args()
    os.chdir(Path(__file__).resolve().parents[2])
    names = set(filter(None, args.only.split(",")))
    unknown = names - {recipe.name for recipe in RECIPES}
    if unknown:
        parser.error(f"no recipe is called {', '.join(sorted(unknown))}")
    if not args.report:
        chosen = [recipe for recipe in RECIPES if not names or recipe.name in names]
        run_all(chosen, args.again, args.picture)
    report(args.picture)


def run_all(recipes: list[Recipe], again: bool, picture: Path) -> None:
    """Goes on where a recipe fails; then exits with 1 and the names of those that failed."""
    failed = []
    for recipe in recipes:
        if not again and seconds_file(recipe).exists():
            continue
        if not run(recipe):
            failed.append(recipe.name)
        report(picture)
    if failed:
        sys.exit(f"recipes: failed: {', '.join(failed)}; what they printed is in {LOGS}")


def run(recipe: Recipe) -> bool:
    """Prepares and runs one recipe; writes its seconds. Returns whether it ended well."""
    LOGS.mkdir(parents=True, exist_ok=True)
    for command in recipe.before:
        done = LOGS / f"{slug(command)}.done"
        if not done.exists() and not execute(command, LOGS / f"{slug(command)}.log"):
            return False
        done.touch()
    server = recipe.server and subprocess.Popen([sys.executable, *recipe.server.split()])
    command = f"-m spmdrl.launch --nproc-per-node 2 -m {recipe.program} --config configs/"
    start, cpu = time.monotonic(), cpu_seconds()
    try:
        ended_well = execute(f"{command}{recipe.config}.py", LOGS / f"{slug(recipe.name)}.log")
    finally:
        if server:
            server.terminate()
            server.wait()
    if ended_well:
        spent = {"wall_s": time.monotonic() - start, "cpu_s": cpu_seconds() - cpu}
        seconds_file(recipe).write_text(json.dumps(spent) + "\n")
    return ended_well


def execute(command: str, log: Path) -> bool:
    """Runs one Python command with its output in a file. Returns whether it exited with 0."""
    print(f"== python {command}", flush=True)
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, *command.split()]
    with log.open("w") as out:
        process = subprocess.Popen(words, env=env, stdout=out, stderr=subprocess.STDOUT)
        try:
            return process.wait(LIMIT_S) == 0
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
            process.send_signal(signal.SIGTERM)  # the launcher passes it on to its ranks
            process.wait(END_S)
            if isinstance(error, KeyboardInterrupt):
                sys.exit(130)
            return False


def cpu_seconds() -> float:
    """Returns the processor time of all commands that have ended, of their children too."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def slug(text: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in text)[-60:]


def seconds_file(recipe: Recipe) -> Path:
    return LOGS / f"{slug(recipe.name)}.json"


def report(picture: Path) -> None:
    """Writes the picture, and the cells of the page's table, from the runs that are there."""
    rows = {}
    for recipe in RECIPES:
        if seconds_file(recipe).exists():
            text = Path(recipe.run_dir, "metrics.jsonl").read_text()
            rows[recipe] = [json.loads(line) for line in text.splitlines()]
    if not rows:
        return
    draw(rows, picture)
    page = PAGE.read_text()
    for recipe, of_run in rows.items():
        page = with_cells(page, recipe, cells(recipe, of_run))
    PAGE.write_text(page)


def cells(recipe: Recipe, rows: list[Row]) -> dict[int, str]:
    """Returns the cells "score", "steps" and "time" of a run's row in the table."""
    spent = json.loads(seconds_file(recipe).read_text())
    curve = recipe.curve
    values = points(rows, curve.held_out) or points(rows, curve.training)
    first, last = (f"{value:.2f}" for value in (values[0][1], values[-1][1]))
    loss = "loss " if curve is LOSS else ""
    steps = max(int(row["step"]) for row in rows)
    minutes, of_cpu = (f"{spent[key] / 60:.1f}" for key in ("wall_s", "cpu_s"))
    return {SCORE: f"{loss}{first} -> {last}", STEPS: str(steps), TIME: f"{minutes} ({of_cpu})"}


def with_cells(page: str, recipe: Recipe, new: dict[int, str]) -> str:
    """Returns the page with these cells of the recipe's row. Raises ValueError without a row."""
    start = page.find(f"| `configs/{recipe.config}.py` |")
    if start < 0:
        raise ValueError(f"{PAGE} has no row of configs/{recipe.config}.py")
    end = page.index("\n", start)
    row = page[start + 1 : end - 1].split("|")
    row = [f" {new[place]} " if place in new else cell for place, cell in enumerate(row)]
    return f"{page[:start]}|{'|'.join(row)}|{page[end:]}"


def draw(rows: dict[Recipe, list[Row]], picture: Path) -> None:
    """Draws a panel for each recipe: values of each step, their average, held-out values."""
    height = -(-len(rows) // COLUMNS)
    figure = Figure(figsize=(2.6 * COLUMNS, 1.9 * height), dpi=100, layout="constrained")
    panels = list(figure.subplots(height, COLUMNS, squeeze=False).flat)
    for axes, (recipe, of_run) in zip(panels, rows.items(), strict=False):
        draw_panel(axes, recipe, of_run)
    for axes in panels[len(rows) :]:
        axes.set_visible(False)
    figure.savefig(picture)


def draw_panel(axes: Axes, recipe: Recipe, rows: list[Row]) -> None:
    training = points(rows, recipe.curve.training)
    if training:
        steps, values = zip(*training, strict=True)
        axes.plot(steps, values, color=TRAINING, alpha=0.3, linewidth=0.8)
        axes.plot(steps, moving_average(values), color=TRAINING, linewidth=1.5)
    held_out = points(rows, recipe.curve.held_out)
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color=HELD_OUT, markersize=3, linewidth=1)
    axes.set_title(f"{recipe.name}: {recipe.curve.name}", loc="left", fontsize=9)
    axes.tick_params(labelsize=7)
    if recipe.curve is not LOSS:
        axes.set_ylim(-0.03, 1.03)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    main()
