"""Draws docs/pictures/micro_batches.svg: prompts, their samples, the rank of each, micro-batches.

    python docs/pictures/micro_batches.py

The samples are dealt to ranks and cut into micro-batches by the functions that a run uses.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from spmdrl.data.packing import micro_batches, partition

PROMPTS = (5, 3, 4)  # tokens of each prompt
ANSWERS = ((14, 6, 9, 4), (3, 11, 8, 16), (7, 12, 5, 10))  # tokens of each answer to it
MAX_TOKENS = 32  # actor.micro_batch_tokens
RANKS = 2
COLOURS = ("#4477aa", "#228833", "#cc6633")  # of a prompt and its answers
INK, PALE = "#222222", 0.35
UNIT = 0.1  # width of a token


def lengths() -> list[int]:
    """Returns the tokens of every sample, prompt and answer."""
    pairs = zip(PROMPTS, ANSWERS, strict=True)
    return [prompt + answer for prompt, answers in pairs for answer in answers]


def draw_sample(axes: Axes, number: int, x: float, y: float) -> float:
    """Draws a sample, its prompt pale, with its left end at x; returns where its right end is."""
    group, index = divmod(number, len(ANSWERS[0]))
    prompt, answer = PROMPTS[group] * UNIT, ANSWERS[group][index] * UNIT
    for left, width, alpha in ((x, prompt, PALE), (x + prompt, answer, 1.0)):
        axes.add_patch(Rectangle((left, y), width, 0.34, facecolor=COLOURS[group], alpha=alpha,
                                 edgecolor="white"))  # fmt: skip
    label = f"{group}.{index}"
    axes.text(x + prompt + answer / 2, y + 0.16, label, ha="center", va="center", size=7.5,
              color="white")  # fmt: skip
    return x + prompt + answer


def draw_samples(axes: Axes) -> None:
    """Draws the samples as they were made, one below the other."""
    axes.text(0, 0.75, "samples: prompt (pale) and answer", size=9.5, color=INK)
    for number in range(len(lengths())):
        draw_sample(axes, number, 0, -0.46 * number)


def draw_ranks(axes: Axes) -> None:
    """Draws each rank's samples, packed into its micro-batches."""
    tokens = lengths()
    y = 0.75
    for rank, mine in enumerate(partition([float(n) for n in tokens], RANKS)):
        work = sum(tokens[i] for i in mine)
        axes.text(4.6, y, f"rank {rank}: {len(mine)} samples, {work} tokens", size=9.5, color=INK)
        for place, chosen in enumerate(micro_batches([tokens[i] for i in mine], MAX_TOKENS)):
            y -= 0.6
            x = 6.1
            axes.text(4.6, y + 0.1, f"micro-batch {place}", size=9, color=INK)
            for i in chosen:
                x = draw_sample(axes, mine[i], x, y)
            axes.add_patch(Rectangle((6.1, y - 0.05), MAX_TOKENS * UNIT, 0.44, fill=False,
                                     edgecolor=INK, linewidth=0.8))  # fmt: skip
        y -= 0.65


def main() -> None:
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "micro_batches"  # the same file from every run
    figure, axes = pyplot.subplots(figsize=(9.6, 5.2))
    axes.set(xlim=(-0.1, 9.5), ylim=(-5.2, 1.1))
    axes.axis("off")
    draw_samples(axes)
    draw_ranks(axes)
    caption = f"frames: micro_batch_tokens={MAX_TOKENS}"
    axes.text(6.1, -4.1, caption, size=9, color=INK)
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    main()
