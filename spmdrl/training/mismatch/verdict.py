"""Finds where two passes part first by more than rounding, and the likely reason."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from spmdrl_kernels.device import allows_tf32
from torch import Tensor

from spmdrl.config.words import counted
from spmdrl.engines.recorded_pass import RecordedPass
from spmdrl.rollout.engine_names import own_name
from spmdrl.training.mismatch.points import FINAL_NAME, ROTARY, Point

# Multiples of a dtype's epsilon that a single operator may differ by, as RMS of a token. In float32
# sums of thousands of numbers are added in another order; in half precision they are added in
# float32, and results are rounded once.
ROUNDINGS = {torch.float32: 64, torch.float16: 16, torch.bfloat16: 6}
GAIN = 4.0  # by how much an operator may enlarge what its inputs differ by
EVENS_OUT = 100  # a difference of which a layer's result has less than this part is made up for
TF32_EPS = 2.0**-10  # of products of float32 on GPUs that are allowed to use it
LAYER = re.compile(r"\blayers\.(\d+)\b")


def rounding_of(*dtypes: torch.dtype) -> float:
    """Returns by how much rounding lets one operator differ, as TensorDifference.relative."""
    found = [ROUNDINGS[dtype] * torch.finfo(dtype).eps for dtype in dtypes]
    in_tf32 = torch.cuda.is_available() and allows_tf32()
    return max(found + [ROUNDINGS[torch.bfloat16] * TF32_EPS] * in_tf32)


@dataclass(frozen=True)
class Flip:
    """The first token of a layer that the two sides send to other experts."""

    router: str  # the trainer's path
    owner: str  # what has the router, by the engine's name
    layer: int
    token: int
    engine: list[int]  # experts that the engine alone chose
    trainer: list[int]
    count: int  # of the layer's tokens that differ
    margin: float | None  # between the trainer's scores of these; None: not known
    apart: float | None  # the largest difference of both sides' scores of this token


@dataclass(frozen=True)
class Divergence:
    """The first place where both sides part by more than rounding explains."""

    kind: str  # "output": this module's; "input": what comes before it; "experts": a router's
    name: str
    index: int  # among the points
    flip: Flip | None = None


def layer_of(path: str) -> int | None:
    found = LAYER.search(path)
    return int(found.group(1)) if found else None


def flips_of(engine: RecordedPass, trainer: RecordedPass) -> dict[int, Flip]:
    """Returns the first flip of each layer of experts, by the layer's number."""
    theirs = {layer_of(path): (path, chosen) for path, chosen in trainer.experts.items()}
    found: dict[int, Flip] = {}
    for path, chosen in engine.experts.items():
        layer = layer_of(path)
        router, other = theirs.get(layer, ("", chosen))
        count = min(len(chosen), len(other))
        differs = (chosen[:count].sort(1).values != other[:count].sort(1).values).any(1)
        if layer is None or not router or not bool(differs.any()):
            continue
        token = int(differs.nonzero()[0])
        mine, trainers = set(chosen[token].tolist()), set(other[token].tolist())
        owner = own_name(path).rpartition(".")[0]
        flip = Flip(router, owner, layer, token, sorted(mine - trainers), sorted(trainers - mine),
                    int(differs.sum()), None, None)  # fmt: skip
        found[layer] = with_margin(flip, engine, trainer)
    return found


def with_margin(flip: Flip, engine: RecordedPass, trainer: RecordedPass) -> Flip:
    """Adds how near the scores were, where the token's are kept on both sides."""
    scores = trainer.records.get(flip.router)
    named = {own_name(path): record for path, record in engine.records.items()}
    theirs = named.get(f"{flip.owner}.{flip.router.rpartition('.')[2]}")
    row = (trainer.rows == flip.token).nonzero().flatten()
    if scores is None or theirs is None or not len(row):
        return flip
    mine, other = scores.output[row[0]].float(), theirs.output[row[0]].float()
    margin = float(mine[flip.trainer].min() - mine[flip.engine].max())
    return replace(flip, margin=margin, apart=float((mine - other).abs().max()))


def first_divergence(
    points: list[Point], flips: dict[int, Flip], rounding: float
) -> Divergence | None:
    """Returns the first module whose result parts by more than its inputs and rounding explain.
    None: there is none.

    Two models may compute the same in different places: a factor of the embedding, say, inside a
    module or behind it. So a difference counts where the layer's result parts as well.
    """
    noise = 0.0  # the largest difference so far
    for index, point in enumerate(points):
        flip = flip_before(point, flips)
        if flip is not None:
            return Divergence("experts", flip.router, index, flip)
        given = point.given.relative if point.given is not None else noise
        kind = ""
        if given > rounding + GAIN * noise:
            kind = "input"
        elif point.returned.relative > rounding + GAIN * max(given, noise):
            kind = "output"
        size = given if kind == "input" else point.returned.relative
        if kind and goes_on(points, index, size, noise, rounding):
            return Divergence(kind, point.name, index)
        noise = noise if kind else max(noise, point.returned.relative)
    return None


def goes_on(points: list[Point], index: int, found: float, noise: float, rounding: float) -> bool:
    """Says whether a difference of this size is there at the end of its layer, too."""
    ends = [point for point in points[index + 1 :] if is_layer(point.name)]
    left = ends[0].returned.relative if ends else found
    evens_out = left <= rounding and left < found / EVENS_OUT
    return not evens_out and left > rounding / GAIN + 2 * noise


def is_layer(name: str) -> bool:
    """Says whether the name is of a decoder layer as a whole, or of what stands outside of them."""
    return layer_of(name) is None or name.rpartition(".")[2].isdigit()


def flip_before(point: Point, flips: dict[int, Flip]) -> Flip | None:
    """Returns the flip of a layer's router if this is the first module that is computed with it."""
    layer = layer_of(point.name)
    for flip in flips.values():
        within = point.name.startswith(f"{flip.owner}.") and ".shared_expert" not in point.name
        is_router = point.name.rpartition(".")[2] == flip.router.rpartition(".")[2]
        behind = point.name in (flip.owner, FINAL_NAME) or (layer or -1) > flip.layer
        if behind or (within and not is_router):
            return flip
    return None


def steepest(points: list[Point]) -> tuple[Point, Point] | None:
    """Returns the neighbouring layers between which differences grow most; None of fewer than 2."""
    layers = [p for p in points if LAYER.search(p.name) and is_layer(p.name)]
    if len(layers) < 2:
        return None
    return max(pairwise(layers), key=lambda pair: growth(*pair))


def growth(before: Point, after: Point) -> float:
    return after.returned.relative / max(before.returned.relative, 1e-12)


def settings_apart(engine: RecordedPass, trainer: RecordedPass) -> list[str]:
    """Returns a sentence for each setting of attention that differs between the models."""
    found = []
    names = {own_name(path): path for path in engine.scales}
    for path, scale in trainer.scales.items():
        theirs = engine.scales.get(names.get(own_name(path), ""))
        if theirs is not None and abs(theirs - scale) > 1e-3 * abs(scale):
            found.append((path, theirs, scale))
    sentences = []
    if found:
        path, theirs, scale = found[0]
        sentences.append(
            f"The attention scale differs in {len(found)} of "
            f"{counted(len(trainer.scales), 'layer')}, first "
            f"in {path.rpartition('.')[0]}: the engine multiplies scores by {theirs:.6g}, the "
            f"trainer by {scale:.6g}."
        )
    if len(engine.rotations) == len(trainer.rotations) == 1:
        sentences += rotations_apart(engine, trainer)
    return sentences


def rotations_apart(engine: RecordedPass, trainer: RecordedPass) -> list[str]:
    """Compares the cosines and sines of the positions that both have."""
    mine, theirs = engine.rotations[0], trainer.rotations[0]
    count = min(len(mine.cos), len(theirs.cos))
    if mine.cos.shape[1] != theirs.cos.shape[1]:  # in another form
        return []
    apart = torch.maximum(
        (mine.cos[:count] - theirs.cos[:count]).abs(), (mine.sin[:count] - theirs.sin[:count]).abs()
    ).amax(1)  # fmt: skip
    # angles of thousands of radians are rounded in float32 before their cosine is taken
    allowed = 4 * max(torch.finfo(d).eps for d in (engine.dtype, trainer.dtype))
    beyond = (apart > allowed + 1e-6 * torch.arange(count)).nonzero().flatten()
    if not len(beyond):
        return []
    bases = [base_of(rotation.cos, rotation.sin) for rotation in (mine, theirs)]
    at = int(beyond[0])
    sentence = (
        f"Rotary cosines and sines differ from position {at} on, by up to {float(apart.max()):.2g}"
    )
    if None not in bases and abs(bases[0] - bases[1]) > 0.03 * bases[1]:  # type: ignore[operator]
        sentence += (
            f": the rotary base is {bases[0]:.4g} in the engine, {bases[1]:.4g} in the trainer"
        )
    return [f"{sentence}."]


def base_of(cos: Tensor, sin: Tensor) -> float | None:
    """Returns the base whose powers the frequencies are: that of pair i of n is base ** (-i / n).
    None where they are no such powers, as with YaRN or other ways to longer texts. cos, sin:
    (num_tokens, pairs).
    """
    pairs = cos.shape[1]
    if len(cos) < 2 or pairs < 2:
        return None
    frequencies = torch.atan2(sin[1], cos[1]).double()
    middle = float(frequencies[pairs // 2])
    if middle <= 0:
        return None
    base = middle ** (-pairs / (pairs // 2))
    powers = base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    # tables in bfloat16 have 8 bits
    return base if torch.allclose(frequencies, powers, rtol=0.05, atol=0.0) else None


def described(divergence: Divergence, points: list[Point], engine: str, dtype: str) -> list[str]:
    """Returns sentences, the verdict first. engine: the rollout engine's title; dtype: of the
    computation.
    """
    if divergence.flip is not None:
        return describe_flip(divergence.flip, engine, dtype)
    point = points[divergence.index]
    where = f"{point.trainer_path} (in {engine} {point.engine_path})"
    if point.engine_path == point.trainer_path:
        where = point.trainer_path
    if divergence.kind == "output":
        kind = reason_of(point)
        return [f"The first operator whose results part is {kind}{where}: what it is given agrees."]
    before = points[divergence.index - 1].name if divergence.index else "the begin of the model"
    return [f"Both sides part between {before}, whose results agree, and what {where} is given."]


def reason_of(point: Point) -> str:
    """Names what a module is, where its own name may not say it."""
    leaf = point.name.rpartition(".")[2]
    known = {ROTARY: "the rotary embedding, ", "attn": "the attention function, "}
    return known.get(leaf, "")


def describe_flip(flip: Flip, engine: str, dtype: str) -> list[str]:
    sentences = [
        f"The first flipped expert: in layer {flip.layer} token {flip.token} goes to expert "
        f"{listed(flip.engine)} in {engine}, and to {listed(flip.trainer)} in the trainer "
        f"({flip.router}). All before it agrees; in this layer it is so for "
        f"{counted(flip.count, 'token')}."
    ]
    if flip.margin is not None and flip.apart is not None:
        near = 0 <= flip.margin <= 2 * flip.apart
        sentences.append(
            f"The trainer's scores of these are {flip.margin:.2g} apart, and its scores differ "
            f"from the engine's by up to {flip.apart:.2g}: "
            + (f"rounding of {dtype} explains the flip. actor.router_replay='R3' has the trainer "
               "use the engine's experts (docs/experts.md)." if near else
               "so the routers choose by different rules.")
        )  # fmt: skip
    return sentences


def listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
