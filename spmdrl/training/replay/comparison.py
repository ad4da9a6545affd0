"""A replayed step beside what the run has noted of it, number by number in order of computation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmdrl.config import PpoConfig
from spmdrl.config.words import counted, verb
from spmdrl.training.replay.sequence_sums import FIELDS, SMALL, SequenceSums

EXACT = frozenset({"token_ids", "loss_mask"})
OF_LAYOUT = ("balance/",)  # metrics that depend on the number of ranks
BY_THEIR_OWN_SIZE = ("grad_norm", "/lr")  # ends of the names of metrics that may be far below 1
LAST = "actor/grad_norm"
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2}  # by the dtype of the actor's compute


@dataclass(frozen=True)
class Compared:
    """One number of the run and of the replay, or one field of all sequences."""

    name: str
    run: str
    replay: str
    difference: float  # relative to the number, or to 1 where it is below that
    where: str = ""  # the sequence that differs most


def tolerance_of(config: PpoConfig, same_ranks: bool) -> float:
    """Returns the difference up to which numbers count as equal: none in strict mode on as many
    ranks, else what rounding is in the dtype of compute."""
    return 0.0 if config.strict and same_ranks else TOLERANCE[config.actor.dtype]


def compare(
    run: Mapping[str, Any], computed: SequenceSums | None, metrics: Mapping[str, float],
    sums: SequenceSums, replay_steps: int = 0,
) -> list[Compared]:  # fmt: skip
    """run: the step's row of metrics.jsonl. computed: what the run has kept of its sequences.
    replay_steps: of its algorithm.
    """
    found = [] if computed is None else [*compared_sums(computed, sums, replay_steps)]
    return [*found, *compared_metrics(run, metrics)]


def compared_sums(run: SequenceSums, replay: SequenceSums, replay_steps: int) -> Iterator[Compared]:
    """Compares the fields that both have. Sequences that only one has differ without end."""
    if not np.array_equal(run.addresses, replay.addresses):
        yield Compared(
            "sequences", str(len(run.addresses)), str(len(replay.addresses)), math.inf
        )  # fmt: skip
        return
    count = counted(len(run.addresses), "sequence")
    for name in FIELDS:
        if name not in run.sums or name not in replay.sums or not len(run.addresses):
            continue
        with np.errstate(invalid="ignore"):  # of two infinite sums
            difference = np.abs(run.sums[name] - replay.sums[name])
        difference[same(run.sums[name], replay.sums[name])] = 0.0
        scale = np.maximum(run.sizes[name], replay.sizes[name])
        if name not in SMALL:
            scale = np.maximum(scale, run.lens)
        relative = np.divide(
            difference, scale, out=difference.copy(), where=(scale > 0) & np.isfinite(scale)
        )
        relative[np.isnan(relative)] = math.inf
        most = float(relative.max())
        group, index = run.addresses[int(relative.argmax())].tolist()
        where = named_sample(group, index, replay_steps) if most else ""
        if name in EXACT and most:
            most = math.inf
        yield Compared(FIELDS[name], count, "", most, where)


def named_sample(group: int, index: int, replay_steps: int) -> str:
    """Returns a sequence's name as in samples/ and --sample. group: as in a Batch, where groups of
    the replay_steps steps before stand between those of the step (ReplayBuffer.mix).
    """
    number, age = divmod(group, 1 + replay_steps)
    name = f"sample {number}.{index}"
    return f"{name} of {counted(age, 'step')} before" if age else name


def same(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """(num_seqs,) bool: equal numbers, infinite ones too, and no number on both sides."""
    return (one == other) | (np.isnan(one) & np.isnan(other))


def compared_metrics(run: Mapping[str, Any], replay: Mapping[str, float]) -> Iterator[Compared]:
    names = [n for n in replay if n in run and not n.startswith(OF_LAYOUT)]
    for name in sorted(names, key=lambda name: name == LAST):
        # metrics.jsonl has null for infinities too
        ours, theirs = (x if math.isfinite(x) else math.nan for x in (replay[name], run[name]))
        yield Compared(
            name, f"{theirs:.8g}", f"{ours:.8g}", relative_difference(name, theirs, ours)
        )


def relative_difference(name: str, one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    floor = 0.0 if name.endswith(BY_THEIR_OWN_SIZE) else 1.0
    difference = abs(one - other) / max(abs(one), abs(other), floor)
    return math.inf if math.isnan(difference) else difference


def first_difference(found: list[Compared], tolerance: float) -> Compared | None:
    return next((each for each in found if each.difference > tolerance), None)


# ---- as text


def comparison_lines(found: list[Compared], tolerance: float) -> list[str]:
    """A table, and below it what it says."""
    rows: list[tuple[str, ...]] = [("computed", "run", "replay", "difference")]
    rows += [(c.name, c.run, c.replay, shown(c, tolerance)) for c in found]
    return [*aligned(rows), "", verdict(found, tolerance)]


def shown(each: Compared, tolerance: float) -> str:
    if each.difference == 0:
        return "0"
    where = f" at {each.where}" if each.where else ""
    mark = "  <-- differs" if each.difference > tolerance else ""
    return f"{each.difference:.1e}{where}{mark}"


def verdict(found: list[Compared], tolerance: float) -> str:
    first = first_difference(found, tolerance)
    exact = sum(each.difference == 0 for each in found)
    if first is None:
        most = max((each.difference for each in found), default=0.0)
        return (
            f"equal: all {counted(len(found), 'number')}, {exact} of them in every bit; the "
            "largest "
            f"difference is {most:.1e}, the limit {tolerance:g}"
        )
    values = f": {first.run} in the run, {first.replay} now" if first.replay else ""
    where = f" of {first.where}" if first.where else ""
    number = sum(each.difference > tolerance for each in found)
    return (
        f"{number} of {counted(len(found), 'number')} {verb(number, 'differ')} by more than "
        f"{tolerance:g}. The "
        "first, in the "
        f"order in which a step computes them: {first.name}{where}{values} "
        f"(difference {first.difference:.1e})"
    )


def edit_lines(
    usual: Mapping[str, float], edited: Mapping[str, float], sums: SequenceSums,
    edited_sums: SequenceSums,
) -> list[str]:  # fmt: skip
    """The replayed step and the edited one side by side: what differs between them."""
    rows: list[tuple[str, ...]] = [("metric", "replay", "edited", "change")]
    names = [*usual, *(name for name in edited if name not in usual)]
    for name in sorted(names, key=lambda name: name == LAST):
        one, other = usual.get(name), edited.get(name)
        if one != other:
            change = f"{other - one:+.3g}" if one is not None and other is not None else ""
            rows.append((name, number(one), number(other), change))
    equal = len(names) - len(rows) + 1
    fields = [
        f"{c.name} differ in {c.replay}" for c in differing_fields(sums, edited_sums)
    ]  # fmt: skip
    return [
        *aligned(rows),
        f"{counted(equal, 'other metric')} {verb(equal, 'are')} the same",
        *fields,
    ]


def differing_fields(one: SequenceSums, other: SequenceSums) -> Iterator[Compared]:
    if not np.array_equal(one.addresses, other.addresses):
        yield Compared("sequences", "", f"their choice: {len(one.addresses)} and "
                       f"{len(other.addresses)} are learnt from", math.inf)  # fmt: skip
        return
    for name in FIELDS:
        if name in one.sums and name in other.sums:
            count = int((one.sums[name] != other.sums[name]).sum())
            if count:
                yield Compared(
                    FIELDS[name], "", f"{count} of {counted(len(one.addresses), 'sequence')}", 1.0
                )


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


SHOWN_COLUMNS = (
    "engine", "trainer", "update", "ratio", "ref", "value", "advantage", "mask", "weight", "clip",
    "gradient", "grad_norm", "grad_share",
)  # fmt: skip
SMALL_COLUMNS = frozenset({"gradient", "grad_share"})  # of either sign, and far below 1


def token_lines(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each token, with the columns that there are."""
    names = [name for name in SHOWN_COLUMNS if rows and name in rows[0]]
    table: list[tuple[str, ...]] = [("token", *names)]
    for row in rows:
        cells = (
            f"{row[name]:+.2e}" if name in SMALL_COLUMNS else f"{row[name]:.4g}" for name in names
        )
        table.append((f"{row['position']} {row['text']!r}", *cells))
    return aligned(table)
