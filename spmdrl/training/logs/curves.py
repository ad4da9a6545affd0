"""The picture that a run leaves: what it is to improve, by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, float]  # one line of metrics.jsonl
Points = list[tuple[int, float]]  # (step, value)

TRAINING, HELD_OUT = "#4e79a7", "#e15759"
FEWEST_SMOOTHED = 20  # steps: fewer are shown as they are
TITLE_WIDTH = 80


@dataclass(frozen=True)
class Curve:
    """A curve shows what a kind of run is to improve."""

    name: str  # in words, and of the picture: <name>.png
    training: str  # metric of each step
    held_out: str  # metric of evaluations
    unit: str  # on the picture's axis
    best: Literal["largest", "smallest"]

    @property
    def picture(self) -> str:
        return f"{self.name}.png"


REWARD = Curve("reward", "reward/mean", "eval/reward", "mean reward of an answer", "largest")
LOSS = Curve("loss", "sft/loss", "eval/loss", "loss (nats per token)", "smallest")
DIVERGENCE = Curve(
    "divergence", "sft/distillation_loss", "eval/distillation_loss",
    "divergence to the teacher (nats per token)", "smallest",
)  # fmt: skip
ACCURACY = Curve(
    "accuracy", "reward_model/accuracy", "eval/accuracy",
    "share of pairs whose better answer scores higher", "largest",
)  # fmt: skip
PREFERENCE = Curve(
    "accuracy", "preference/rewards/accuracies", "eval/rewards/accuracies",
    "share of answers whose reward is on the right side", "largest",
)  # fmt: skip


def points(rows: Sequence[Row], metric: str) -> Points:
    """Returns (step, value) in order of the steps, without values that are not finite."""
    found = [(int(row["step"]), row[metric]) for row in rows if metric in row]
    return sorted((step, value) for step, value in found if abs(value) < float("inf"))


def moving_average(values: Sequence[float]) -> list[float]:
    """Over a tenth of the values, as many before as after; fewer at both ends."""
    reach = max(len(values) // 20, 1)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    bounds = [(max(i - reach, 0), min(i + reach + 1, len(values))) for i in range(len(values))]
    return [(sums[last] - sums[first]) / (last - first) for first, last in bounds]


def draw_curve(rows: Sequence[Row], curve: Curve, title: str, path: Path) -> bool:
    """Writes the picture; False where there is nothing to draw. Takes a second: imports
    matplotlib."""
    training, held_out = points(rows, curve.training), points(rows, curve.held_out)
    if not training and not held_out:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    # Figure.savefig would draw it twice
    FigureCanvasAgg(curve_figure(training, held_out, curve, title)).print_png(path)
    return True


def curve_figure(training: Points, held_out: Points, curve: Curve, title: str) -> Figure:
    """Every step's value, thin, with its moving average; held-out values as dots."""
    from matplotlib.figure import Figure  # without pyplot: no display is asked for
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    if training:
        draw_training(axes, training)
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color=HELD_OUT, label="held-out data")
    axes.set(xlabel="step", ylabel=curve.unit)
    shown = title if len(title) <= TITLE_WIDTH else "..." + title[-TITLE_WIDTH:]
    axes.set_title(shown, loc="left", parse_math=False)  # a path may hold $
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(loc="best", frameon=False)
    return figure


def draw_training(axes: Axes, training: Points) -> None:
    steps, values = zip(*training, strict=True)
    if len(values) < FEWEST_SMOOTHED:
        axes.plot(steps, values, ".-", color=TRAINING, label="training data, each step")
        return
    axes.plot(steps, values, color=TRAINING, alpha=0.5, linewidth=1,
              label="training data, each step")  # fmt: skip
    average = moving_average(values)
    axes.plot(steps, average, color=TRAINING, linewidth=2,
              label="training data, moving average")  # fmt: skip
