"""Draws docs/pictures/trajectory_rows.svg: requests of an agent, and the rows that they become.

    python docs/pictures/trajectory_rows.py

The rows are made by the class that a run uses; a word stands for each token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from spmdrl.rollout.agents.trajectory import EncodedMessages, Trajectory
from spmdrl.rollout.base import Completion
from spmdrl.types import Message

ASKED, SAID, INK = "#bbbbbb", "#4477aa", "#222222"
WIDTH, HEIGHT = 0.62, 0.36


@dataclass
class Words:
    """Numbers words, as a tokenizer does."""

    known: list[str]

    def ids(self, text: str) -> list[int]:
        for word in text.split():
            if word not in self.known:
                self.known.append(word)
        return [self.known.index(word) for word in text.split()]

    def encode(self, messages: list[Message]) -> EncodedMessages:
        return EncodedMessages([id for message in messages for id in self.ids(message["content"])])


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


REQUESTS = [  # (what is asked, what is answered, a remark)
    ([user("Q1")], "think call", "1  begins a row"),
    ([user("Q1"), said("think call"), user("result")], "A1", "2  goes on: same row"),
    ([user("sub Q2")], "A2", "3  a sub-agent: another row"),
    ([user("Q1"), said("think call"), user("result")], "A3", "4  asked again: a fork"),
    ([user("Q1"), said("call"), user("result")], "A4", "5  thoughts dropped: another row"),
]


def play(words: Words) -> Trajectory:
    """Returns the trajectory of all requests."""
    trajectory = Trajectory("picture", seed=0)
    for asked, answer, _ in REQUESTS:
        draft = trajectory.draft(
            asked, "", words.encode, lambda messages, last: words.encode(messages)
        )
        ids = words.ids(answer)
        completion = Completion(ids, [-1.0] * len(ids), "stop", [0] * len(ids))
        trajectory.commit(draft, completion, said(answer))
    return trajectory


def draw_word(axes: Axes, text: str, x: float, y: float, colour: str) -> None:
    axes.add_patch(Rectangle((x, y), WIDTH, HEIGHT, facecolor=colour, edgecolor="white"))
    ink = "white" if colour == SAID else INK
    axes.text(x + WIDTH / 2, y + HEIGHT / 2, text, ha="center", va="center", size=8, color=ink)


def draw_requests(axes: Axes) -> None:
    axes.text(0, 0.75, "requests, and what was sampled", size=9.5, color=INK)
    for number, (asked, answer, remark) in enumerate(REQUESTS):
        y = -0.85 * number
        axes.text(0, y + 0.43, remark, size=8.5, color=INK)
        sent = [word for message in asked for word in message["content"].split()]
        for place, word in enumerate([*sent, *answer.split()]):
            draw_word(axes, word, place * WIDTH, y, SAID if place >= len(sent) else ASKED)


def draw_rows(axes: Axes, trajectory: Trajectory, words: Words) -> None:
    axes.text(4.6, 0.75, "rows: blue is trained on, once", size=9.5, color=INK)
    for number, row in enumerate(trajectory.rows):
        y = -1.06 * number
        axes.text(4.6, y + 0.43, f"row {number}", size=8.5, color=INK)
        for place, (id, mask) in enumerate(zip(row.token_ids, row.loss_mask, strict=True)):
            draw_word(axes, words.known[id], 4.6 + place * WIDTH, y, SAID if mask else ASKED)


def main() -> None:
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "trajectory_rows"  # the same file from every run
    figure, axes = pyplot.subplots(figsize=(9.0, 4.6))
    axes.set(xlim=(-0.1, 8.6), ylim=(-3.7, 1.1))
    axes.axis("off")
    words = Words([])
    draw_requests(axes)
    draw_rows(axes, play(words), words)
    figure.savefig(Path(__file__).with_suffix(".svg"), bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
