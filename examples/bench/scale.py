"""What grows with the number of ranks: measured, fitted and drawn; docs/scale.md has the results.

    python examples/bench/scale.py --draw docs/scale.png --points runs/scale.jsonl

Real ranks are gloo processes of this machine with light functions, so 64 of them need 3 GB; figures
for more are simulated or by a model. A line of JSON for each point, then a table: for each series
the value at the fewest and the most ranks, the exponent k of value ~ ranks^k, by least squares on
logarithms, and for what is measured the value at 1,024 ranks by that fit, which is too high for
what grows with the logarithm. With --only some of the measurements; their names are those of
MEASUREMENTS.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import fire
import numpy as np
from scale_control import Point, checkpoint, descriptors, phase_end, reports, show, store
from scale_plan import plan_points

REAL, SIMULATED = (2, 4, 8, 16, 32, 64), (128, 256, 512, 1024)
# name -> (numbers of real ranks, of simulated ones) -> points
MEASUREMENTS: dict[str, Callable[[list[int], list[int]], list[Point]]] = {
    "descriptors": descriptors,
    "phase_end": phase_end,
    "reports": reports,
    "checkpoint": checkpoint,
    "store": store,
    "plan": plan_points,
}
STYLES = {"measured": "o-", "simulated": "s--", "model": "^:"}

Curves = dict[tuple[str, str, str], list[tuple[int, float]]]  # (series, unit, kind) -> points


def main(
    only: str | tuple[str, ...] = (), real: tuple[int, ...] = REAL,
    simulated: tuple[int, ...] = SIMULATED, draw: str = "", points: str = "",
) -> None:  # fmt: skip
    """only: names of measurements; none: all. real, simulated: numbers of ranks. draw: a picture's
    path. points: the path of a file of points; those of measurements that are not run are read
    from it, so that a picture can be drawn anew.
    """
    chosen = [only] if isinstance(only, str) and only else list(only) or list(MEASUREMENTS)
    unknown = [name for name in chosen if name not in MEASUREMENTS and name != "none"]
    if unknown:
        raise SystemExit(f"no measurement {unknown}; there are {', '.join(MEASUREMENTS)}, none")
    kept = [json.loads(line) for line in Path(points).read_text().splitlines()] if (
        points and Path(points).exists()) else []  # fmt: skip
    found = {row["of"]: [] for row in kept} | {name: [] for name in chosen if name != "none"}
    for row in kept:
        if row["of"] not in chosen:
            found[row.pop("of")].append(Point(**row))
    for name in chosen:
        if name != "none":
            found[name] = MEASUREMENTS[name](numbers(real), numbers(simulated))
            show(found[name])
    if points:
        Path(points).parent.mkdir(parents=True, exist_ok=True)
        rows = [json.dumps({"of": name} | p._asdict()) for name in found for p in found[name]]
        Path(points).write_text("\n".join([*rows, ""]))
    print("\n".join(table(curves_of([p for own in found.values() for p in own]))))
    if draw:
        draw_all({name: curves_of(own) for name, own in found.items()}, Path(draw))


def numbers(given: int | tuple[int, ...]) -> list[int]:
    """fire reads 4 as a number and 2,4 as a tuple."""
    return [given] if isinstance(given, int) else list(given)


def curves_of(points: list[Point]) -> Curves:
    curves: Curves = defaultdict(list)
    for point in points:
        curves[point.series, point.unit, point.kind].append((point.ranks, point.value))
    return {name: sorted(values) for name, values in curves.items()}


def exponent(curve: list[tuple[int, float]]) -> float | None:
    """k of value ~ ranks^k; None for fewer than three points or a value of 0."""
    if len(curve) < 3 or min(value for _, value in curve) <= 0:
        return None
    ranks, values = np.log(np.array(curve).T)
    return float(np.polyfit(ranks, values, 1)[0])


def extrapolated(curve: list[tuple[int, float]], ranks: int) -> float:
    known, values = np.log(np.array(curve).T)
    return float(np.exp(np.polyval(np.polyfit(known, values, 1), np.log(ranks))))


def table(curves: Curves) -> list[str]:
    rows = ["| series | unit | how | fewest ranks | most ranks | k | 1,024 by the fit |",
            "|---|---|---|---|---|---|---|"]  # fmt: skip
    for (series, unit, kind), curve in curves.items():
        k = exponent(curve)
        ends = [f"{value:.3g} at {ranks:,}" for ranks, value in (curve[0], curve[-1])]
        shown = "" if k is None else f"{k:.2f}"
        far = f"{extrapolated(curve, 1024):.3g}" if kind == "measured" and k is not None else ""
        rows.append(f"| {series} | {unit} | {kind} | {ends[0]} | {ends[1]} | {shown} | {far} |")
    return rows


def draw_all(found: dict[str, Curves], path: Path) -> None:
    """A panel for each unit of each measurement, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [(name, unit) for name, curves in found.items()
              for unit in dict.fromkeys(unit for _, unit, _ in curves)]  # fmt: skip
    columns = 3
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5 * columns, 3.6 * rows), squeeze=False)
    for axis in axes.flatten()[len(panels) :]:
        axis.axis("off")
    for axis, (name, unit) in zip(axes.flatten(), panels, strict=False):
        for (series, of, kind), curve in found[name].items():
            if of == unit and len(curve) > 1:
                k = exponent(curve)
                label = f"{series} ({kind}{'' if k is None else f', k = {k:.2f}'})"
                axis.plot(*zip(*curve, strict=True), STYLES[kind], markersize=3, label=label)
        axis.set(xscale="log", yscale="log", xlabel="ranks", ylabel=unit, title=name)
        axis.set_xticks(ticks := [2, 8, 32, 128, 512], [str(tick) for tick in ticks])
        axis.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    fire.Fire(main)
