"""Draws docs/pictures/one_step.svg: four ranks run the lines of `train_step`, one below the other.

    python docs/pictures/one_step.py

The names and their order are read from the source of `spmdrl.training.step.train_step`; what each
line does, and with which ranks it exchanges data, is said here.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from spmdrl.training.step import train_step

RANKS = 4
BLUE, GREEN, ORANGE, INK = "#4477aa", "#228833", "#cc6633", "#222222"
# line of train_step: who does it, what it is, and its colour. Between ranks data travel in those of
# ORANGE, by torch.distributed alone.
LINES = {
    "generate_and_score": ("rollout, reward", "vLLM samples inside; your function scores", BLUE),
    "dispatch_batches": ("every rank", "all-to-all: equal work for each rank, no padding", ORANGE),
    "compute_ref_logprobs": ("ref", "the frozen model", GREEN),
    "compute_values": ("critic", "with GAE", GREEN),
    "compute_old_logprobs": ("actor", "only where the update does not give them", GREEN),
    "compute_advantages": ("actor", "all-reduce of the statistics of groups and batch", ORANGE),
    "update_critic": ("critic", "FSDP2 or Megatron-core", GREEN),
    "update_actor": ("actor", "FSDP2 or Megatron-core, on packed sequences", GREEN),
    "push_weights": ("actor to rollout", "shards go into vLLM's tensors, in place", ORANGE),
}  # fmt: skip


def called_in_train_step() -> list[str]:
    """Returns the names of the functions of LINES in the order in which `train_step` calls them."""
    tree = ast.parse(inspect.getsource(train_step))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: call.lineno)
    names = [call.func.id for call in calls if isinstance(call.func, ast.Name)]
    return [name for name in names if name in LINES]


def draw_line(axes: Axes, name: str, y: float) -> None:
    """Draws one line of the step at height y: its name, a box for each rank, and what it does."""
    who, what, colour = LINES[name]
    axes.text(0, y, name, family="monospace", size=10.5, color=INK, va="center")
    for rank in range(RANKS):
        shape = FancyBboxPatch(
            (3.6 + rank, y - 0.24), 0.72, 0.48, boxstyle="round,pad=0.02,rounding_size=0.08",
            facecolor=colour, edgecolor="none",
        )  # fmt: skip
        axes.add_patch(shape)
    if colour == ORANGE:
        axes.plot([3.6, 3.6 + RANKS - 0.28], [y, y], color=ORANGE, linewidth=5, zorder=0)
    axes.text(7.85, y + 0.15, who, size=9.5, color=colour, va="center", weight="bold")
    axes.text(7.85, y - 0.19, what, size=9, color=INK, va="center")


def main() -> None:
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "one_step"  # the same file from every run
    names = called_in_train_step()
    figure, axes = pyplot.subplots(figsize=(11.5, 5.6))
    axes.set(xlim=(-0.2, 13.2), ylim=(-len(names) * 0.9 - 0.3, 1.2))
    axes.axis("off")
    axes.text(0, 0.75, "train_step", family="monospace", size=12, weight="bold", color=INK)
    for rank in range(RANKS):
        axes.text(3.96 + rank, 0.75, f"rank {rank}", size=10, ha="center", color=INK)
    for place, name in enumerate(names):
        draw_line(axes, name, -0.9 * place)
    bottom = -0.9 * (len(names) - 1) - 0.55
    caption = "Bars: samples, statistics or weights travel between ranks, by torch.distributed."
    axes.text(3.6, bottom - 0.35, caption, size=9, color=ORANGE, va="center")
    axes.annotate("", (3.42, 0.3), (3.42, bottom), arrowprops={"arrowstyle": "<-", "color": INK})
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    main()
