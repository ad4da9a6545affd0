"""Chooses what a page that stands alone can hold: curves whole, of the samples as many as fit."""

from __future__ import annotations

import base64
import json
from typing import Any

from spmdrl.config.words import counted
from spmdrl.view.runs import Answer, Questions, Run
from spmdrl.view.server import image_type

MOST_POINTS = 1000  # of a curve
MOST_ROWS = 64  # of a step's samples
OF_TIMELINE = 4_000_000  # bytes; a larger one is left out


def exported(questions: Questions, most_bytes: int) -> Answer:
    """Returns all that the page shows, with `left_out`: sentences that say what it lacks.

    most_bytes: of all samples together, in JSON. Every run has the same share.
    """
    overview = questions.overview()
    data: Answer = {"curves": [], "rows": [], "timeline": [], "config": [], "images": []}
    for number, (run, known) in enumerate(zip(questions.runs, overview["runs"], strict=True)):
        curves = questions.curves(number, known["metrics"], MOST_POINTS)
        data["curves"].append(curves)
        data["config"].append(questions.config(number))
        timeline = questions.timeline(number) if known["has_timeline"] else {}
        if len(json.dumps(timeline)) > OF_TIMELINE:
            timeline = {"error": "The timeline is too large for this page: use spmdrl.timeline."}
        data["timeline"].append(timeline)
        if any(len(c["steps"]) >= MOST_POINTS - 2 for c in curves.values()):
            overview["left_out"].append(
                f"{run.name}: of each stretch of a curve the lowest and the highest point are "
                f"shown, some {MOST_POINTS} of {known['rows']:,}."
            )
        budget = most_bytes // len(questions.runs)
        rows, images = samples_of(questions, number, run, budget, overview["left_out"])
        data["rows"].append(rows)
        data["images"].append(images)
        known["samples"] = {kind: sorted(map(int, steps)) for kind, steps in rows.items()}
        known["going_on"] = False
    return {"overview": overview, **data}


def samples_of(
    questions: Questions, number: int, run: Run, budget: int, left_out: list[str]
) -> tuple[dict[str, dict[int, Answer]], dict[str, str]]:
    """Returns the answers of `rows` by kind and step, and images by name, as far as they fit."""
    chosen: dict[str, dict[int, Answer]] = {kind: {} for kind in run.samples.found}
    images: dict[str, str] = {}
    total = sum(map(len, run.samples.found.values()))
    shortened = 0
    for kind, step in in_order_of_worth(run):
        answer = questions.rows(number, kind, step, most=MOST_ROWS)
        new = {name: found for name in names_of(answer) if name not in images
               and (found := as_url(run, name))}  # fmt: skip
        budget -= len(json.dumps(answer)) + sum(map(len, new.values()))
        if budget < 0:
            break
        shortened += answer["next"] is not None
        answer["next"] = None
        chosen[kind][step] = answer
        images |= new
    held = sum(map(len, chosen.values()))
    if held < total:
        left_out.append(f"{run.name}: samples of {held:,} of {total:,} files are on this page.")
    if shortened:
        left_out.append(
            f"{run.name}: of {counted(shortened, 'file')} the first {MOST_ROWS} samples are on "
            "this page."
        )
    return {kind: dict(sorted(steps.items())) for kind, steps in chosen.items() if steps}, images


def in_order_of_worth(run: Run) -> list[tuple[str, int]]:
    """Held-out answers before and after first, then steps that halve the longest gap."""
    kinds = sorted(run.samples.found, key=lambda kind: kind != "eval")
    orders = {kind: halving(run.samples.steps(kind)) for kind in kinds}
    most = max(map(len, orders.values()), default=0)
    found = [(kind, order[:2]) for kind, order in orders.items()]
    first = [(kind, step) for kind, steps in found for step in steps]
    rest = [
        (kind, orders[kind][place])
        for place in range(2, most) for kind in kinds if place < len(orders[kind])
    ]  # fmt: skip
    return first + rest


def halving(steps: list[int]) -> list[int]:
    """The last, the first, then those in the middle of what is left, and so on."""
    if len(steps) <= 2:
        return steps[::-1]
    order, gaps = [steps[-1], steps[0]], [(0, len(steps) - 1)]
    for low, high in gaps:  # it grows meanwhile
        middle = (low + high) // 2
        if low < middle < high:
            order.append(steps[middle])
            gaps += [(low, middle), (middle, high)]
    return order


def names_of(answer: Answer) -> list[str]:
    """Returns the names of the images of prompts and of replies."""
    rows = answer["rows"]
    of_prompts = [name for row in rows for name in row.get("images") or [] if name]
    contents = [m.get("content") for row in rows for m in row.get("messages") or []]
    parts = [part for c in contents if isinstance(c, list) for part in c if isinstance(part, dict)]
    of_replies = [str(part["image"]).removeprefix("images/") for part in parts if "image" in part]
    return of_prompts + of_replies


def as_url(run: Run, name: str) -> str:
    """An image as a data URL; "" where it is not there, or is no picture."""
    path = run.samples.image(name)
    content = b"" if path is None else path.read_bytes()
    kind: Any = image_type(content[:12])
    if not kind.startswith("image/"):
        return ""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
