"""The points at which two models are compared: modules that both have, and how far they are apart.

A module's name is the same on both sides where vLLM keeps a checkpoint's names. What vLLM fuses
(qkv_proj) is compared with the trainer's parts side by side. Between the projections and the
attention function stands a point that no module is: the rotary embedding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.engines.recorded_pass import FINAL, ModuleRecord, RecordedPass
from spmdrl.rollout.engine_names import own_name, spellings

ROTARY = "rotary_emb"
FINAL_NAME = "the last hidden states"
# vLLM's give other things than transformers' of that name: with shared experts, with the gate
OTHERWISE = (".experts", ".act_fn")
LEAST_SHARE = 1e-3  # of a tensor's size: smaller tokens are measured by it


@dataclass(frozen=True)
class TensorDifference:
    """Says how far two tensors of tokens are apart."""

    largest: float  # absolute, of one element
    relative: float  # of the worst token: RMS of the difference over RMS of the trainer's


@dataclass(frozen=True)
class Point:
    """A module of both models."""

    name: str  # that both have in common
    engine_path: str
    trainer_path: str
    given: TensorDifference | None  # of what the modules were given; None: not known
    returned: TensorDifference


def difference_of(engine: Tensor, trainer: Tensor) -> TensorDifference:
    """engine, trainer: (num_rows, width)."""
    engine, trainer = engine.double(), trainer.double()
    apart = engine - trainer
    if not bool(apart.isfinite().all()):
        same = bool((engine.isfinite() == trainer.isfinite()).all())
        return TensorDifference(float("nan") if same else float("inf"), float("inf"))
    sizes = trainer.square().mean(1).sqrt()
    least = max(
        float(trainer.square().mean().sqrt()) * LEAST_SHARE, torch.finfo(torch.float32).tiny
    )
    relative = apart.square().mean(1).sqrt() / sizes.clamp(min=least)
    return TensorDifference(float(apart.abs().max()), float(relative.max()))


def local_part(full: Tensor, width: int, tp_rank: int, tp_size: int) -> Tensor | None:
    """Returns what a tensor-parallel rank has of (num_rows, full width) heads; None where it does
    not fit. Where there are fewer heads than ranks, neighbours have the same one.
    """
    if full.shape[1] == width:
        return full
    parts = full.shape[1] // width
    if tp_size == 1 or parts == 0 or full.shape[1] % width or tp_size % parts:
        return None
    return full[:, tp_rank * parts // tp_size * width :][:, :width]


@dataclass(frozen=True)
class ModulePair:
    """The records of a module on both sides."""

    name: str
    engine_path: str
    trainer_path: str
    engine: ModuleRecord
    trainer: ModuleRecord


def fused_record(
    name: str, engine: RecordedPass, trainer: dict[str, tuple[str, ModuleRecord]], width: int,
    tp_size: int, tp_rank: int,
) -> tuple[str, ModuleRecord] | None:  # fmt: skip
    """Returns the trainer's parts of a module that the engine has fused, side by side, with their
    names. width: of the engine's result.
    """
    owner, _, leaf = name.rpartition(".")
    parts = [trainer.get(f"{owner}.{part}") for part in engine.fused.get(leaf, ())]
    found = [part for part in parts if part is not None]
    if not found or len(found) < len(parts):
        return None
    full = [record.output.shape[1] for _, record in found]
    widths = [w // tp_size for w in full]
    if tp_size > 1 and sum(widths) < width and len(full) == 3:  # key-value heads on several ranks
        widths[1:] = [(width - widths[0]) // 2] * 2
    cut = [
        local_part(record.output, w, tp_rank, tp_size)
        for (_, record), w in zip(found, widths, strict=True)
    ]
    if any(part is None for part in cut):
        return None
    leaves = ", ".join(path.rpartition(".")[2] for path, _ in found)
    path = f"{found[0][0].rpartition('.')[0]}.({leaves})"
    output = torch.cat([part for part in cut if part is not None], dim=1)
    return path, ModuleRecord(found[0][1].inputs, output)


def names_of(path: str) -> list[str]:
    """Returns what either side may call a module, its own name first: Mixtral's block_sparse_moe is
    transformers' mlp.
    """
    return [name.removesuffix(".") for name in spellings(None, f"{path}.")] if path else [path]


def pairs_of(
    engine: RecordedPass, trainer: RecordedPass, tp_rank: int, tp_size: int
) -> list[ModulePair]:
    """Returns the modules that both have, in the order in which the engine's ended."""
    theirs: dict[str, tuple[str, ModuleRecord]] = {}
    for path, record in trainer.records.items():
        for name in names_of(path):
            theirs.setdefault(name, (path, record))
    found = []
    for path, record in engine.records.items():
        name, width = own_name(path), record.output.shape[1]
        other = next((theirs[other] for other in names_of(path) if other in theirs), None)
        other = other or fused_record(name, engine, theirs, width, tp_size, tp_rank)
        if other is not None and not name.endswith(OTHERWISE):
            found.append(ModulePair(name, path, other[0], record, other[1]))
    return found


def compare_passes(
    engine: RecordedPass, trainer: RecordedPass, tp_rank: int = 0, tp_size: int = 1
) -> list[Point]:
    """Returns the points in the order in which the engine computes them. tp_rank, tp_size: of the
    engine, which has its part of the heads alone.
    """
    pairs = pairs_of(engine, trainer, tp_rank, tp_size)
    points: list[Point] = []
    by_name: dict[str, Point] = {}
    for pair in pairs:
        compared = compare_pair(pair, tp_rank, tp_size)
        if compared is None:
            continue
        inputs, returned = compared
        name = FINAL_NAME if pair.name == FINAL else pair.name
        point = Point(
            name, pair.engine_path or FINAL_NAME, pair.trainer_path or FINAL_NAME, worst(inputs),
            returned,
        )  # fmt: skip
        if name.endswith(".attn") and len(inputs) == 3:
            points.append(rotary_point(point, inputs[:2], by_name))
        points.append(point)
        by_name[name] = point
    return points


def compare_pair(
    pair: ModulePair, tp_rank: int, tp_size: int
) -> tuple[list[TensorDifference], TensorDifference] | None:
    """Returns how far inputs are apart, and results; None where the two are of other widths."""
    engine, trainer = pair.engine, pair.trainer
    whole = local_part(trainer.output, engine.output.shape[1], tp_rank, tp_size)
    inputs = [
        difference_of(given, part)
        for given, full in zip(engine.inputs, trainer.inputs, strict=False)
        if (part := local_part(full, given.shape[1], tp_rank, tp_size)) is not None
    ]
    if whole is None or (engine.inputs and trainer.inputs and not inputs):
        return None
    returned = difference_of(engine.output, whole)
    if engine.plain is not None and inputs:  # whichever of both is meant
        others = [difference_of(*both) for both in zip(engine.plain, (trainer.inputs[0], whole),
                                                       strict=True)]  # fmt: skip
        inputs = [min(inputs[0], others[0], key=relative)]
        returned = min(returned, others[1], key=relative)
    several = len(engine.inputs) == len(trainer.inputs)  # queries, keys and values
    return (inputs if several else inputs[:1]), returned


def relative(difference: TensorDifference) -> float:
    return difference.relative


def rotary_point(
    attention: Point, rotated: list[TensorDifference], before: dict[str, Point]
) -> Point:
    """Returns the point between the projections, or the norms of queries and keys, and the
    attention function. before: the points so far.
    """
    owner = attention.name.rpartition(".")[0]
    norms = [before.get(f"{owner}.{leaf}") for leaf in ("q_norm", "k_norm")]
    sources = [point for point in norms if point is not None]
    fused = [before.get(f"{owner}.{leaf}") for leaf in ("qkv_proj", "q_proj", "k_proj")]
    sources = sources or [point for point in fused if point is not None]
    returned = worst(rotated)
    assert returned is not None
    return Point(
        f"{owner}.{ROTARY}", f"{attention.engine_path.rpartition('.')[0]}.{ROTARY}",
        f"{attention.trainer_path.rpartition('.')[0]}.{ROTARY}",
        worst(point.returned for point in sources), returned,
    )  # fmt: skip


def worst(found: Iterable[TensorDifference]) -> TensorDifference | None:
    """Returns the largest of each number; None of nothing."""
    listed = list(found)
    if not listed:
        return None
    return TensorDifference(max(d.largest for d in listed), max(d.relative for d in listed))
