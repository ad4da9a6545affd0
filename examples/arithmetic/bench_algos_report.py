"""The page and the picture of `make bench-algos`, from what its runs left."""

from __future__ import annotations

import os
import platform
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev, variance
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from noisy import ERRORS, config

from spmdrl.config import AlgoConfig

COLUMNS = 5  # of the picture
COLOURS = {"estimators": "tab:blue", "losses": "tab:orange"}
DEFAULTS = {"estimators": AlgoConfig().advantage, "losses": AlgoConfig().policy_loss}
TITLES = {
    "estimators": f"Advantage estimators, with the policy loss {DEFAULTS['losses']}",
    "losses": f"Policy losses, with the advantage estimator {DEFAULTS['estimators']}",
}
NAMES = ("algo.advantage", "algo.policy_loss")


@dataclass(frozen=True)
class Result:
    """One run. Accuracies are of greedy answers to the held-out questions."""

    kind: str  # "estimators" or "losses"
    name: str
    settings: tuple[tuple[str, Any], ...]  # of the config, by dotted names
    curve: tuple[tuple[int, float], ...]  # step, accuracy
    samples_right: float  # share of right samples in the last steps
    cpu_s: float  # of all processes of the run, start-up included
    seed: int
    machine: str  # its processor and number of cores

    @property
    def after(self) -> float:
        return self.curve[-1][1]


@dataclass(frozen=True)
class Summary:
    """The runs of one method, in the order of their seeds."""

    kind: str
    name: str
    runs: tuple[Result, ...]

    @property
    def after(self) -> list[float]:
        return [run.after for run in self.runs]

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.runs[0].curve]

    def at(self, place: int) -> list[float]:
        """Returns the accuracy of every seed at one place of the curves."""
        return [run.curve[place][1] for run in self.runs]


@dataclass(frozen=True)
class Separation:
    """How far the methods lie apart, and how far the seeds of one method do.

    f_ratio: variance of the methods' means times the number of seeds, over the mean variance of a
    method's seeds, of a one-way analysis of variance. It is about 1 where methods are equal.
    """

    methods: int
    between: float  # standard deviation of the methods' means
    within: float  # of one method's seeds: the root of the mean variance
    f_ratio: float


def write(
    results: Sequence[Result], without_runs: Mapping[str, Mapping[str, str]],
    pages: Path, pictures: Path,
) -> None:  # fmt: skip
    """Writes bench_algos.md into `pages` and bench_algos.png into `pictures`."""
    summaries = summarise(results)
    page, picture = pages / "bench_algos.md", pictures / "bench_algos.png"
    draw(summaries).savefig(picture, dpi=100)
    link = os.path.relpath(picture, pages)
    page.write_text(document(summaries, without_runs, link))
    for line in separation_lines(summaries):
        print(line)
    print(f"{page}, {picture}")


def summarise(results: Sequence[Result]) -> list[Summary]:
    """Returns the methods, those of one kind together, from the highest median to the lowest."""
    names = dict.fromkeys((result.kind, result.name) for result in results)
    summaries = [
        Summary(kind, name, tuple(r for r in results if (r.kind, r.name) == (kind, name)))
        for kind, name in names
    ]
    kinds = list(TITLES)
    return sorted(summaries, key=lambda s: (kinds.index(s.kind), -median(s.after), -fmean(s.after)))


def of_kind(summaries: Sequence[Summary], kind: str) -> list[Summary]:
    return [summary for summary in summaries if summary.kind == kind]


def separation(summaries: Sequence[Summary]) -> Separation | None:
    """Returns None where there are less than two methods, or seeds, to compare."""
    finals = [summary.after for summary in summaries]
    if len(finals) < 2 or min(map(len, finals)) < 2:
        return None
    within = fmean(variance(values) for values in finals)
    between = stdev(fmean(values) for values in finals)
    num_seeds = fmean(len(values) for values in finals)
    f_ratio = num_seeds * between**2 / within if within else float("inf")
    return Separation(len(finals), between, within**0.5, f_ratio)


def learners(summaries: Sequence[Summary]) -> list[Summary]:
    """Returns the methods each of whose seeds ends above the accuracy that it began with."""
    return [s for s in summaries if all(run.after > run.curve[0][1] for run in s.runs)]


def with_default(summaries: Sequence[Summary]) -> list[Summary]:
    """Returns the methods that ran with the default of the other kind: SPPO's estimator and loss
    belong together, and are no comparison of estimators, nor of losses.
    """
    usual = {"algo.advantage": DEFAULTS["estimators"], "algo.policy_loss": DEFAULTS["losses"]}
    others = {"estimators": "algo.policy_loss", "losses": "algo.advantage"}
    return [
        s for s in summaries
        if dict(s.runs[0].settings)[others[s.kind]] == usual[others[s.kind]]
    ]  # fmt: skip


def separation_lines(summaries: Sequence[Summary]) -> list[str]:
    lines = []
    for kind in TITLES:
        every = with_default(of_kind(summaries, kind))
        for label, chosen in (("all", every), ("those that learn", learners(every))):
            found = separation(chosen)
            if found is not None:
                lines.append(
                    f"| {kind}, {label} | {found.methods} | {found.between:.3f} | "
                    f"{found.within:.3f} | {found.f_ratio:.1f} |"
                )
    return lines


# ---- picture


def draw(summaries: Sequence[Summary]) -> Figure:
    """A panel for each method; estimators above, losses below."""
    kinds = [kind for kind in TITLES if of_kind(summaries, kind)]
    rows = [-(-len(of_kind(summaries, kind)) // COLUMNS) for kind in kinds]
    size = (2.6 * COLUMNS, 1.7 * sum(rows) + 0.5 * len(kinds))
    figure = Figure(figsize=size, layout="constrained")
    parts = figure.subfigures(len(kinds), 1, squeeze=False, height_ratios=rows)
    for part, kind, num_rows in zip(parts[:, 0], kinds, rows, strict=True):
        draw_kind(part, kind, of_kind(summaries, kind), num_rows)
    return figure


def draw_kind(part: SubFigure, kind: str, summaries: Sequence[Summary], num_rows: int) -> None:
    part.suptitle(TITLES[kind], x=0.01, ha="left", fontsize=12, fontweight="bold")
    part.supylabel("held-out accuracy", fontsize=9)
    part.supxlabel("training step", fontsize=9)
    panels = part.subplots(num_rows, COLUMNS, squeeze=False, sharex=True, sharey=True)
    default = next((s for s in summaries if s.name == DEFAULTS[kind]), None)
    for axes, summary in zip(panels.flat, summaries, strict=False):
        draw_panel(axes, summary, default)
    for axes in panels.flat[len(summaries) :]:
        axes.set_visible(False)


def draw_panel(axes: Axes, summary: Summary, default: Summary | None) -> None:
    """The median of the seeds and a band from the least to the most; the default's median, grey."""
    if default is not None and default is not summary:
        axes.plot(default.steps, medians(default), color="0.6", ls="--", lw=1.2)
    at_steps = [summary.at(place) for place in range(len(summary.steps))]
    colour = COLOURS[summary.kind]
    axes.fill_between(
        summary.steps, [min(a) for a in at_steps], [max(a) for a in at_steps],
        color=colour, alpha=0.3, lw=0,
    )  # fmt: skip
    axes.plot(summary.steps, medians(summary), color=colour, lw=1.8)
    axes.set_title(f"{summary.name}  {median(summary.after):.2f}", loc="left", fontsize=9)
    axes.set_ylim(-0.03, 1.03)
    axes.set_yticks([0, 0.5, 1])
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)


def medians(summary: Summary) -> list[float]:
    return [median(summary.at(place)) for place in range(len(summary.steps))]


# ---- page

BEGINNING = """\
# Every estimator and policy loss on one small task

    make bench-algos

`python examples/arithmetic/bench_algos.py` with `--kind losses`, `--only rloo gpg` or `--seeds 0`
makes a part of the runs. A run that has been made is kept, so a call that was interrupted goes on
where it stopped; `--report` writes page and picture from the runs that are there."""

HOW_TO_READ = """\
- `after`: share of right greedy answers to 256 held-out questions at the end. The standard error of
  so few is 0.02 at an accuracy of 0.9.
- `samples right`: share of right samples at temperature 1 in the last 4 steps, as they are,
  whatever the verifier said.
- `CPU s`: processor time of a run, start-up and evaluations included (median)."""

NOTES = """\
About single rows:

- Between answers of one length with a reward of 0 or 1, `dr_grpo`, `rloo`, `opo`, `gpg` and
  `reinforce_plus_plus_baseline` differ by little more than a factor, which Adam takes out.
- `grpo_passk`: a prompt teaches only if exactly one of its eight answers is called right. Where all
  eight are wrong, that one is so by an error.
- `gdpo`: is told which digit is right, with errors; the others are not.
- `remax`: an error about the greedy answer is an error about every sample of its prompt.
- `prime`: the process reward model learns from the same verdicts.
- `dpo`, `ipo`, `orpo`, `simpo`, `cpo`: learn from one pair of a prompt's answers, and the verdict
  on either may be an error. The estimator has no part in them."""


def document(
    summaries: Sequence[Summary], without_runs: Mapping[str, Mapping[str, str]], picture: str
) -> str:
    plot = f"![held-out accuracy by step]({picture})"
    parts = [BEGINNING, introduction(summaries), plot, caption(summaries)]
    parts += ["## What separates the methods", separation_text(summaries)]
    for kind, title in TITLES.items():
        parts += [f"## {title}", table(of_kind(summaries, kind), without_runs[kind])]
    return "\n\n".join([*parts, HOW_TO_READ, NOTES]) + "\n"


def introduction(summaries: Sequence[Summary]) -> str:
    """What was run, on what, and how often."""
    data, algo, optim = config.data, config.algo, config.actor.optim
    assert data is not None
    seeds = sorted({run.seed for summary in summaries for run in summary.runs})
    return paragraph(
        f"""Two-digit addition, as in `make quickstart`: a Qwen3 of 0.4 million weights, fine-tuned
        once on solved additions most of which forget the carry, which begins at an accuracy of
        {summaries[0].at(0)[0]:.2f}. The verifier of the training data is wrong in {ERRORS:.0%} of
        its verdicts, about right answers and wrong ones alike. The row and the index of the sample
        decide which verdicts these are, so they are the same in every run. Held-out answers are
        judged without error. A run has {config.steps} steps x {data.prompts_per_step} prompts x
        {config.rollout.n} samples and {algo.mini_batches} updates a step, without an entropy bonus;
        the learning rate rises to {optim.lr:g} and falls to 0. The other settings are in
        `examples/arithmetic/noisy.py`. Training seeds: {", ".join(map(str, seeds))}."""
    )


def caption(summaries: Sequence[Summary]) -> str:
    machines = " and ".join(sorted({run.machine for s in summaries for run in s.runs}))
    return paragraph(
        f"""Held-out accuracy over {summaries[0].steps[-1]} steps: median of the seeds, and a band
        from the lowest to the highest. Dashed: `{DEFAULTS["estimators"]}` with
        `{DEFAULTS["losses"]}`, the default. The number is the median at the end. Run by
        `make bench-algos` on {machines}, with other programs beside it; a run has one rank and one
        thread."""
    )


def separation_text(summaries: Sequence[Summary]) -> str:
    text = """The standard deviation of the methods' mean accuracies stands beside that of the seeds
        of one method (the root of the mean variance). F is the ratio of a one-way analysis of
        variance, near 1 where methods are equal: of 13 or more methods with three seeds, chance
        makes it larger than 2.2 in at most one case of twenty. Methods "that learn" end above the
        start with every seed: a collapse is not what separates these. `win_rate` with `sppo` is one
        method, SPPO, and is in no row. Neighbours in a table below are not told apart by three
        seeds. A seed is that of training; data, the errors of the verifier and the start are the
        same in all runs, the learning rate is the same for all methods, and options of some were
        set by hand: this ranks no methods for another task."""
    head = "| methods | number | sd between methods | sd between seeds | F |\n|---|---|---|---|---|"
    return paragraph(text) + "\n\n" + "\n".join([head, *separation_lines(summaries)])


def table(summaries: Sequence[Summary], without_runs: Mapping[str, str]) -> str:
    lines = ["| name | options | after: median | min..max | samples right | CPU s |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for s in summaries:
        cells = [f"`{s.name}`", options_of(s), f"{median(s.after):.3f}",
                 f"{min(s.after):.3f}..{max(s.after):.3f}",
                 f"{median(run.samples_right for run in s.runs):.3f}",
                 f"{median(run.cpu_s for run in s.runs):.0f}"]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"| `{name}` | {reason} | | | | |" for name, reason in without_runs.items()]
    return "\n".join(lines)


def options_of(summary: Summary) -> str:
    """Returns what the method sets beside its own name, as on the command line."""
    settings = dict(summary.runs[0].settings)
    own, other = NAMES if summary.kind == "estimators" else NAMES[::-1]
    usual = {other: DEFAULTS["losses" if summary.kind == "estimators" else "estimators"]}
    changed = {key: value for key, value in settings.items()
               if key != own and usual.get(key) != value}  # fmt: skip
    return ", ".join(f"`--{key} {value}`" for key, value in changed.items())


def paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 100, break_on_hyphens=False)


def this_machine() -> str:
    """Returns its processor and its number of cores."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(named, platform.processor() or platform.machine())}, {os.cpu_count()} cores"
