"""`make bench-algos`: the arithmetic task with every advantage estimator, on one budget.

    python examples/arithmetic/bench_algos.py [--seeds 0 1 2] [--steps 25] [--only NAMES] [--jobs 2]
        [--report]

Every run starts from the fine-tuned model of the quickstart, and is the command that a user types:
spmdrl.ppo on one rank with one thread, under a time limit. Writes docs/bench_algos.md and .png; if
only some of the names were asked for, or a run failed, into runs/bench_algos instead, so that the
documents always hold all of them. --report writes them again from the runs that are there, for who
changes how they look. The seed is that of training; data and model stay the same. On two cores all
of it takes some 20 minutes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from quickstart import ASSETS, OUT_OF_TIME, end, read_metrics, run_stage

from spmdrl.algo.advantages import ESTIMATORS as ESTIMATORS_BY_NAME

RUNS = Path("runs/bench_algos")
DOCS = Path("docs")
TICKS = (0.4, 0.6, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)  # of the plot's accuracies
FLOOR = 1 / 64  # added to the wrong ones in the plot: 1 has a place, one question is no leap
LIMIT_S = 300  # of one run
LAST_STEPS = 5  # whose train reward is reported
CONFIG = "configs/qwen3_tiny_arithmetic_{}_cpu.py"
PROMPTS, SAMPLES, UPDATES = 128, 8, 4  # of a step
SETTINGS = {
    "data.prompts_per_step": PROMPTS,
    "rollout.n": SAMPLES,
    "algo.mini_batches": UPDATES,
    "eval_every": 0,  # before and after
    "checkpoint.every_steps": 0,
    "trackers": (),
}

# Which config a name is run from. An estimator without one is GRPO's config with its name put in.
OWN_CONFIG = {
    "grpo": "grpo", "gae": "ppo", "gdpo": "bench", "prime": "prime", "remax": "remax",
    "win_rate": "sppo",
}  # fmt: skip
# The bonus would drown the few advantages that it gives: the entropy rose to 3 of 4.2 nats.
OVERRIDES = {"grpo_passk": ["--algo.entropy_coef", "0"]}
RECIPES = ("dapo", "gspo", "pf_ppo", "vapo")
ESTIMATORS: tuple[str, ...] = tuple(ESTIMATORS_BY_NAME)
NAMES = ESTIMATORS + RECIPES

# What a reader would otherwise ask about a row.
NOTES = {
    "grpo_passk": "a prompt teaches only if exactly one of its eight answers is right (a fifth of "
    "the prompts at first, 2 to 9 % later): its goal is that one of the eight is, which "
    "is so for nearly all prompts at the end, and not that most are.",
    "win_rate": "SPPO's squared loss asks for a log ratio of at most 1/2, so a step moves the "
    "policy less far.",
    "remax": "one greedy answer is a noisier baseline than the mean of eight, and costs a sample "
    "more.",
    "dapo": "up to four rounds of prompts fill a step with unequal groups, so it samples more than "
    "the others; no entropy bonus, so its samples are surer.",
    "vapo": "the first five steps train the critic alone.",
    "gdpo": "is told which digit is right; the others are not.",
    "optimal_token_baseline": "equals its `tir` form to the last digit, as it must without tools.",
}
HEADING = """# Every estimator on one small task

    make bench-algos"""
HOW_TO_READ = """\
- `before`, `after`: share of right greedy answers to 256 held-out questions. The standard error of
  so few is 0.009 at an accuracy of 0.98, so neighbours in this table are equals.
- `reward`: share of right samples, at temperature 1, in the last 5 steps.
- `s/step`: median of `time/step_s` on busy cores; start-up and evaluation are not in it.

Between answers of one length with a reward of 0 or 1, `dr_grpo`, `rloo`, `opo`, `gpg` and
`reinforce_plus_plus_baseline` differ by little more than a factor, which Adam takes out: what lies
between them is chance. With a learning rate that stays high, runs ended anywhere between 0.85 and
0.99, from one step to the next; that is why it falls to 0. A harder task is needed to rank these
estimators; this one shows that each of them learns.

About single rows:

"""


@dataclass(frozen=True)
class Result:
    """One run. Accuracies are of greedy answers to the held-out questions."""

    name: str
    before: float
    after: float
    reward: float  # mean over the last steps
    step_s: float  # median


@dataclass(frozen=True)
class Summary:
    """All seeds of one name. Tuples are (mean, least, most)."""

    name: str
    before: float
    after: tuple[float, float, float]
    reward: tuple[float, float, float]
    step_s: float


def main() -> None:
    args = arguments()
    os.chdir(Path(__file__).resolve().parents[2])
    names = [name for name in NAMES if name in (args.only or NAMES)]
    todo = [(name, seed) for seed in args.seeds for name in names]
    if args.report:
        results = [read_result(name, RUNS / f"{name}_{seed}", args.steps) for name, seed in todo]
    else:
        make_start()
        with ThreadPoolExecutor(args.jobs) as pool:
            results = list(pool.map(lambda run: run_one(run[0], run[1], args.steps), todo))
    good = [result for result in results if result is not None]
    complete = len(good) == len(todo) and len(names) == len(NAMES)
    write(good, args, DOCS if complete else RUNS)
    sys.exit(len(good) < len(todo))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="every advantage estimator on one small task")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--report", action="store_true", help="run nothing, read what was run")
    return parser.parse_args()


# ---- running


def make_start() -> None:
    """The model that all runs start from, by the quickstart's own commands, unless it is there."""
    if not (ASSETS / "train.parquet").exists():
        run_stage("assets", [sys.executable, "examples/arithmetic/make_assets.py"])
    if not (ASSETS / "sft_model/model.safetensors").exists():
        run_stage("sft", torchrun("spmdrl.sft", "--config", CONFIG.format("sft")))


def torchrun(*words: str) -> list[str]:
    """One rank; --standalone picks a free port, or two runs could not go side by side."""
    launch = ["spmdrl.launch", "--standalone", "--nproc-per-node", "1", "-m"]
    return [sys.executable, "-m", *launch, *words]


def variant(name: str) -> list[str]:
    """What makes a run of this name, as words of the command line."""
    if name in RECIPES:
        return ["--config", CONFIG.format(name)]
    if name in OWN_CONFIG:
        return ["--config", CONFIG.format(OWN_CONFIG[name])]
    chosen = ["--algo.advantage", name, *OVERRIDES.get(name, [])]
    return ["--config", CONFIG.format("grpo"), *chosen]


def run_one(name: str, seed: int, steps: int) -> Result | None:
    """Runs it and says so on one line; None where it failed, its output being in a file."""
    run_dir = RUNS / f"{name}_{seed}"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    started_at = time.monotonic()
    code = launch(command(name, seed, steps, run_dir), run_dir / "output.txt")
    label = f"{name:28} seed {seed} {time.monotonic() - started_at:4.0f} s"
    if code != 0:
        print(f"{label}  exit code {code}: {run_dir}/output.txt", file=sys.stderr, flush=True)
        return None
    result = read_result(name, run_dir, steps)
    assert result is not None
    print(f"{label}  accuracy {result.before:.3f} -> {result.after:.3f}", flush=True)
    return result


def command(name: str, seed: int, steps: int, run_dir: Path) -> list[str]:
    """The rate falls to 0 at the last update, or the luck of the last step would be compared."""
    settings = {
        "run_dir": run_dir,
        "seed": seed,
        "steps": steps,
        "actor.optim.warmup_steps": steps * UPDATES // 4,
        "actor.optim.decay_steps": steps * UPDATES,
        **SETTINGS,
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    return ["nice", "-n", "5", *torchrun("spmdrl.ppo", *variant(name), *words)]


def launch(words: list[str], output: Path) -> int:
    """The exit code."""
    env = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with output.open("w") as file:
        process = subprocess.Popen(
            words, env=os.environ | env, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            return process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            end(process)
            return OUT_OF_TIME


def read_result(name: str, run_dir: Path, num_steps: int) -> Result | None:
    """None where there is no such run of so many steps."""
    path = run_dir / "metrics.jsonl"
    rows = read_metrics(path) if path.exists() else []
    if not rows or rows[-1]["step"] != num_steps:
        return None
    accuracies = [row["eval/reward"] for row in rows if "eval/reward" in row]
    steps = [row for row in rows if "time/step_s" in row]
    reward = mean(row["reward/mean"] for row in steps[-LAST_STEPS:])
    step_s = median(row["time/step_s"] for row in steps)
    return Result(name, accuracies[0], accuracies[-1], reward, step_s)


# ---- reporting


def write(results: Sequence[Result], args: argparse.Namespace, folder: Path) -> None:
    names = dict.fromkeys(result.name for result in results)
    summaries = [summarise([r for r in results if r.name == name]) for name in names]
    summaries.sort(key=lambda s: (s.after, s.reward), reverse=True)
    if not summaries:
        return
    figure = accuracy_figure(summaries, args.steps, len(args.seeds))
    figure.savefig(folder / "bench_algos.png", dpi=120)
    Path(folder, "bench_algos.md").write_text(document(summaries, args))
    print(f"{folder}/bench_algos.md, {folder}/bench_algos.png")


def summarise(runs: Sequence[Result]) -> Summary:
    return Summary(
        name=runs[0].name,
        before=mean(run.before for run in runs),
        after=spread([run.after for run in runs]),
        reward=spread([run.reward for run in runs]),
        step_s=median(run.step_s for run in runs),
    )


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    return mean(values), min(values), max(values)


def accuracy_figure(summaries: Sequence[Summary], steps: int, num_seeds: int) -> Figure:
    """A row per name, best on top: a dot at the mean, a bar over all seeds."""
    figure = Figure(figsize=(9, 1.6 + 0.29 * len(summaries)), layout="constrained")
    axes = figure.add_subplot()
    for row, summary in enumerate(summaries):
        draw_row(axes, row, summary)
    axes.axvline(summaries[0].before, color="0.4", ls="--", lw=1)
    axes.set_yticks(range(len(summaries)), [summary.name for summary in summaries])
    axes.set_ylim(len(summaries) - 0.4, -0.6)
    shape_accuracy_axis(axes, min(summary.after[1] for summary in summaries))
    axes.set_title(f"Two-digit addition after {steps} steps: mean and range of {num_seeds} seeds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(handles=legend_handles(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_row(axes: Axes, row: int, summary: Summary) -> None:
    average, least, most = summary.after
    colour = colour_of(summary.name)
    axes.plot([least, most], [row, row], color=colour, lw=3, alpha=0.4, solid_capstyle="butt")
    axes.plot(average, row, "o", color=colour, ms=6, clip_on=False)


def shape_accuracy_axis(axes: Axes, least: float) -> None:
    """Logarithmic in the share of wrong answers, or all dots but one would be a heap near 1."""
    scale = (lambda a: -np.log(1 + FLOOR - a), lambda x: 1 + FLOOR - np.exp(-x))
    axes.set_xscale("function", functions=scale)
    axes.set_xlim(min(0.4, least - 0.02), 1.0)
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_xlabel("held-out accuracy (greedy answers), wide near 1")
    axes.grid(axis="x", alpha=0.3)


def colour_of(name: str) -> str:
    return "tab:orange" if name in RECIPES else "tab:blue"


def legend_handles() -> list[Line2D]:
    def dot(name: str, label: str) -> Line2D:
        return Line2D([], [], marker="o", ls="", color=colour_of(name), label=label)

    start = Line2D([], [], color="0.4", ls="--", lw=1, label="before training")
    return [dot(ESTIMATORS[0], "advantage estimator"), dot(RECIPES[0], "recipe"), start]


def document(summaries: Sequence[Summary], args: argparse.Namespace) -> str:
    noted = [bullet(f"`{s.name}`: {NOTES[s.name]}") for s in summaries if s.name in NOTES]
    plot = "![held-out accuracy after training](bench_algos.png)"
    parts = [introduction(args), plot, table(summaries), HOW_TO_READ + "\n".join(noted)]
    return "\n\n".join(parts) + "\n"


def introduction(args: argparse.Namespace) -> str:
    """What was run, on what, how often, and what stands behind a name."""
    what = f"""Two-digit addition, as in `make quickstart`: a Qwen3 of 0.4 million weights,
        fine-tuned once on solved additions most of which forget the carry. Every run starts from
        that model and has the same budget: {args.steps} steps x {PROMPTS} prompts x {SAMPLES}
        samples, {UPDATES} updates a step, over which the learning rate rises to 5e-4 and falls to
        0. Training seeds: {listed(args.seeds)}. A run has one rank and one thread; {args.jobs} went
        at a time on {os.cpu_count()} CPU cores, without a GPU."""
    return "\n\n".join([HEADING, paragraph(what), paragraph(behind_the_names())])


def behind_the_names() -> str:
    """So that a reader can run any row by hand."""
    own = [f"`{name}` (`{config}`)" for name, config in OWN_CONFIG.items() if name != "grpo"]
    changed = [f"`{name}` has `{' '.join(words)}`" for name, words in OVERRIDES.items()]
    return f"""An estimator is `--algo.advantage NAME` on `{CONFIG.format("grpo")}`, with PPO's
        clipped loss; {listed(changed)}. These have a config of their own, `{CONFIG.format("*")}`:
        {listed(own)}. The recipes {listed(f"`{name}`" for name in RECIPES)} are the configs of
        those names."""


def paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 100, break_on_hyphens=False)


def bullet(text: str) -> str:
    return textwrap.fill(text, 100, initial_indent="- ", subsequent_indent="  ")


def listed(items: Iterable[object]) -> str:
    return ", ".join(str(item) for item in items)


def table(summaries: Sequence[Summary]) -> str:
    lines = [
        "| name | before | after: mean | min..max | reward: mean | min..max | s/step |",
        "|---|---|---|---|---|---|---|",
    ]
    for s in summaries:
        cells = [f"`{s.name}`", f"{s.before:.3f}", *shown(s.after), *shown(s.reward)]
        lines.append("| " + " | ".join([*cells, f"{s.step_s:.2f}"]) + " |")
    return "\n".join(lines)


def shown(values: tuple[float, float, float]) -> tuple[str, str]:
    average, least, most = values
    return f"{average:.3f}", f"{least:.3f}..{most:.3f}"


if __name__ == "__main__":
    main()
