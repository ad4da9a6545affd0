"""Tells what is found about a mismatch, as text for people and as JSON."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from spmdrl.checkpoint.disk_space import writing
from spmdrl.config.words import counted
from spmdrl.training.mismatch.points import Point, TensorDifference
from spmdrl.training.mismatch.verdict import LAYER, Divergence, layer_of

WIDTH = 100
NAME = 40  # columns of a module's name
MOST_LAYERS = 8  # of which the table has a row; the first, the last, and those around the verdict


@dataclass
class MismatchReport:
    """One rank's findings."""

    step: int
    sample: dict[str, Any]  # prompt, group, index, num_tokens, policy versions
    token: dict[str, Any]  # the worst: its place, id, and its log-probabilities
    verdict: list[str]  # sentences, the verdict first
    rounding: float
    points: list[Point] = field(default_factory=list)
    divergence: Divergence | None = None
    weights: str = ""  # what the comparison of weights says

    def text(self) -> str:
        """Some 10 to 25 lines."""
        prompt, group, index = (self.sample[key] for key in ("prompt", "group", "index"))
        token = self.token
        said = "; ".join(f"{who} {value:.4f}" for who, value in token["logprobs"].items())
        parts = [
            *wrapped(" ".join(self.verdict)),
            f"step {self.step}: sample {index} of prompt {prompt} (group {group}), "
            f"{self.sample['num_tokens']} tokens; worst token at {token['place']} "
            f"(id {token['id']}), {token['difference']:.4g} nats",
            f"log-probability of it: {said}",
            *wrapped(f"weights: {self.weights}"),
            *self.table(),
        ]
        return "\n".join(parts)

    def table(self) -> list[str]:
        """A row for each layer that is shown, and for the operators of one of them."""
        marked = self.divergence.index if self.divergence else -1
        wanted = self.detailed_layer()
        rows, left_out = [], 0
        shown = shown_layers(self.points, wanted)
        for index, point in enumerate(self.points):
            layer = layer_of(point.name)
            is_layer = point.name.rpartition(".")[2].isdigit()
            keep = layer is None or layer == wanted or (is_layer and layer in shown)
            if keep or index == marked:
                if left_out:
                    rows.append(f"  ... {counted(left_out, 'more layer')}")
                    left_out = 0
                rows.append(row_of(point, index == marked, self.divergence))
            elif is_layer:
                left_out += 1
        head = (
            f"  {'module':<{NAME}}{'given: max':>12}{'relative':>10}"
            f"{'returned':>12}{'relative':>10}"
        )
        return [head, *rows, f"  rounding explains {self.rounding:.1e} of a single operator"]

    def detailed_layer(self) -> int | None:
        """Returns the layer of the verdict; else the one whose result differs most."""
        if self.divergence is not None:
            found = layer_of(self.points[self.divergence.index].name)
            return self.divergence.flip.layer if self.divergence.flip else found
        layers = [p for p in self.points if LAYER.search(p.name)]
        if not layers:
            return None
        return layer_of(max(layers, key=lambda point: point.returned.relative).name)


def shown_layers(points: list[Point], wanted: int | None) -> set[int]:
    layers = sorted({layer for p in points if (layer := layer_of(p.name)) is not None})
    if len(layers) <= MOST_LAYERS:
        return {*layers}
    at = layers.index(wanted) if wanted in layers else 0
    return {layers[0], layers[-1], *layers[max(at - 2, 0) : at + 4]}


def row_of(point: Point, is_marked: bool, divergence: Divergence | None) -> str:
    name = point.name if len(point.name) <= NAME else f"..{point.name[2 - NAME :]}"
    note = ""
    if is_marked and divergence is not None:
        note = {"output": " <-- returned", "input": " <-- given"}.get(
            divergence.kind, " <-- experts"
        )
    return f"  {name:<{NAME}}{cells(point.given)}{cells(point.returned)}{note}"


def cells(difference: TensorDifference | None) -> str:
    if difference is None:
        return f"{'-':>12}{'-':>10}"
    return f"{difference.largest:>12.2e}{difference.relative:>10.1e}"


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def write_report(report: MismatchReport, run_dir: Path) -> Path:
    """Writes mismatch/step_N.json and .txt; returns the path of the text."""
    folder = Path(run_dir, "mismatch")
    text, data = folder / f"step_{report.step}.txt", folder / f"step_{report.step}.json"
    with writing(text):
        folder.mkdir(exist_ok=True)
        text.write_text(f"{report.text()}\n")
        data.write_text(json.dumps(asdict(report), indent=1) + "\n")
    return text
