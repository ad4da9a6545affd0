"""Who sends what: every engine rank gets each element it needs exactly once, on any ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from spmdrl.weights.boxes import Box, numel, slab, whole
from spmdrl.weights.engine_layout import record_layout
from spmdrl.weights.plan import TransferPlan, Weight, make_transfer_plan

SHAPES = [(7, 5), (1, 9), (13,), (4, 6, 5), (64, 32), (), (3, 2)]


def weights_of(ranks: list[int], fsdp: int) -> list[Weight]:
    """Rows over `fsdp` neighbouring ranks, as torch.chunk cuts them; the rest are replicas."""
    weights = []
    for number, shape in enumerate(SHAPES):
        holders: dict[Box, list[int]] = {}
        for i, rank in enumerate(ranks):
            rows = torch.arange(shape[0] if shape else 1).chunk(fsdp)
            if not shape:
                holders.setdefault((), []).append(rank)
            elif i % fsdp < len(rows):
                mine = rows[i % fsdp]
                box = ((int(mine[0]), int(mine[-1]) + 1), *whole(shape[1:]))
                holders.setdefault(box, []).append(rank)
        found = tuple((box, tuple(theirs)) for box, theirs in holders.items())
        weights.append(Weight(f"w{number}", shape, found))
    return weights


def regions_of(tp: int) -> list[list[tuple[int, Box]]]:
    """Rank t of an engine: a slab of rows or columns of large weights, all of the others."""
    regions: list[list[tuple[int, Box]]] = [[] for _ in range(tp)]
    for number, shape in enumerate(SHAPES):
        for t in range(tp):
            box: Box | None = whole(shape)
            if number == 0:  # columns
                box = (whole(shape)[0], (5 * t // tp, 5 * (t + 1) // tp))
            elif number == 4:
                box = slab(whole(shape), tp, t)
            if box is not None and numel(box):
                regions[t].append((number, box))
    return regions


def cells(box: Box) -> Tensor:
    return torch.cartesian_prod(*[torch.arange(a, b) for a, b in box]) if box else torch.zeros(1)


def simulate(plans: dict[int, TransferPlan], weights: list[Weight]) -> None:
    """Plays all ranks' plans against each other; asserts that they fit."""
    for rank, plan in plans.items():
        got: dict[int, list[Box]] = {i: [] for i in range(len(plan.regions))}
        for number, bucket in enumerate(plan.buckets):
            for region, box in bucket.local:
                held = weights[plan.regions[region][0]].held(rank)
                assert any(slab_within(box, part) for part in held)
                got[region].append(box)
            for peer, share in zip(plan.peers, bucket.shares, strict=True):
                for sender in {piece.sender for piece in share} - {peer}:
                    sent = plans[sender].buckets[number].sends[peer]
                    wanted = [p for p in share if p.sender == sender]
                    regions = plans[peer].regions
                    assert sent == [(regions[p.region][0], p.box) for p in wanted]
                    assert all(
                        any(slab_within(b, part) for part in weights[w].held(sender))
                        for w, b in sent
                    )
                for piece in share:
                    got[piece.region].append(piece.box)
        for (_, region), boxes in zip(plan.regions, got.values(), strict=True):
            found = torch.cat([cells(box).view(-1, max(1, len(box))) for box in boxes])
            assert len(found) == len(found.unique(dim=0)) == numel(region)
            assert all(slab_within(box, region) for box in boxes)


def slab_within(box: Box, outer: Box) -> bool:
    return all(a >= c and b <= d for (a, b), (c, d) in zip(box, outer, strict=True))


@pytest.mark.parametrize(
    ("actor", "fsdp", "table"),
    [
        ([0, 1, 2, 3], 4, [[0], [1], [2], [3]]),
        ([0, 1, 2, 3], 2, [[0], [1], [2], [3]]),
        ([0, 1, 2, 3], 4, [[0, 1], [2, 3]]),
        ([0, 1, 2, 3], 1, [[0, 1], [2, 3]]),
        ([0, 1, 2], 3, [[3, 4], [5, 6]]),
        ([0], 1, [[1], [2], [3]]),
        ([2, 3, 4, 5], 2, [[0, 1, 2], [3, 4, 5]]),
        ([0, 1], 2, [[1, 2]]),
        ([0, 1, 2, 3, 4], 5, [[4, 5]]),
    ],
)
@pytest.mark.parametrize("slot_bytes", [64, 1 << 20])
def test_everybody_gets_everything_once(
    actor: list[int], fsdp: int, table: list[list[int]], slot_bytes: int
) -> None:
    weights, regions = weights_of(actor, fsdp), regions_of(len(table[0]))
    ranks = sorted({*actor, *(rank for row in table for rank in row)})
    plans = {r: make_transfer_plan(r, weights, regions, table, 2, slot_bytes) for r in ranks}
    assert len({(plan.block, plan.cost, len(plan.buckets)) for plan in plans.values()}) == 1
    simulate(plans, weights)
    if slot_bytes == 64 and plans[ranks[0]].cost.busiest:
        assert len(plans[ranks[0]].buckets) > len(SHAPES)


def test_fsdp_ranks_gather_what_they_hold() -> None:
    plan = make_transfer_plan(0, weights_of([0, 1], 2), regions_of(1), [[0], [1]], 2, 1 << 20)
    assert plan.block == 2 and not plan.handover


def test_engines_that_hold_the_same_half_do_not_make_up_the_whole() -> None:
    """Two replicas of two trainers each, and two engines of two ranks: halves of the same size."""
    halves = ((((0, 32),), (0, 2)), (((32, 64),), (1, 3)))
    weights, regions = [Weight("norm", (64,), halves)], [[(0, ((0, 64),))]] * 2
    table = [[0, 1], [2, 3]]
    simulate(
        {r: make_transfer_plan(r, weights, regions, table, 2, 1 << 20) for r in range(4)}, weights
    )


def test_replicas_send_nothing_to_each_other() -> None:
    plan = make_transfer_plan(0, weights_of([0, 1], 1), regions_of(2), [[0, 1]], 2, 1 << 20)
    assert plan.cost == (0, 0, 0)


def test_a_slice_travels_instead_of_the_tensor() -> None:
    """One trainer, an engine of two ranks: half of the large matrix each."""
    weights = [Weight("w", (64, 32), ((whole((64, 32)), (0,)),))]
    regions = [[(0, ((0, 64), (0, 16)))], [(0, ((0, 64), (16, 32)))]]
    plan = make_transfer_plan(0, weights, regions, [[1, 2]], 2, 1 << 20)
    assert plan.cost.handed == 64 * 32 * 2 and plan.cost.gathered == 0
    assert plan.whole_bytes == 2 * plan.cost.handed


def test_copies_are_recorded_not_made() -> None:
    """Fused rows, a column slice and a tensor of experts; what is computed with is opaque."""
    model = nn.Module()
    model.fused = nn.Parameter(torch.zeros(6, 4))
    model.experts = nn.Parameter(torch.zeros(3, 2, 4))
    model.turned = nn.Parameter(torch.zeros(4, 2))
    model.looked = nn.Parameter(torch.zeros(1))

    def load(weights):
        for name, tensor in weights:
            if name == "q":
                model.fused.data[:2].copy_(tensor[2:4])
            elif name == "k":
                model.fused.data[2:].copy_(tensor.narrow(1, 4, 4))
            elif name == "e":
                for i, expert in enumerate(tensor.unbind(0)):
                    model.experts.data[i].copy_(expert.chunk(2, 0)[1])
            elif name == "t":
                model.turned.data.copy_(tensor.t())
            elif name == "d":
                model.turned.data.copy_((tensor * 2).view(4, 2))
            else:
                model.looked.data.fill_(tensor.item())

    shapes = {"x": (1,), "q": (4, 4), "k": (4, 8), "e": (3, 4, 4), "t": (2, 4), "d": (4, 2)}
    layout = record_layout(model, load, shapes, torch.float32)
    assert set(layout.opaque) == {"x", "t", "d"}
    assert not any(p.any() for p in model.parameters())
    assert dict(layout.regions[:2]) == {"q": ((2, 4), (0, 4)), "k": ((0, 4), (4, 8))}
    assert [box for name, box in layout.regions if name == "e"] == [
        ((i, i + 1), (2, 4), (0, 4)) for i in range(3)
    ]
    full = {name: torch.rand(shape) for name, shape in shapes.items()}
    with torch.no_grad():
        for (name, box), place in zip(layout.regions, layout.places, strict=True):
            place.tensor().copy_(full[name][tuple(slice(a, b) for a, b in box)])
    assert torch.equal(model.fused[:2], full["q"][2:4])
    assert torch.equal(model.fused[2:], full["k"][:, 4:])
    assert torch.equal(model.experts.data, full["e"][:, 2:])
