"""Who sends what: every engine rank gets each element it needs exactly once, on any ranks."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from reference_plan import cheapest, cost_of
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


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], int, list[list[int]]]:
    """(trainers, ranks that share a copy, table): any ranks of ten in any order, shared or not."""
    actor = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8, unique=True))
    fsdp = draw(st.sampled_from([d for d in range(1, len(actor) + 1) if len(actor) % d == 0]))
    tp = draw(st.integers(1, 3))
    ranks = draw(st.permutations(range(10)) | st.just(sorted(actor)).filter(lambda r: len(r) >= tp))
    engines = draw(st.integers(1, len(ranks) // tp))
    return actor, fsdp, [list(ranks[i * tp : (i + 1) * tp]) for i in range(engines)]


@settings(max_examples=25, deadline=None, derandomize=True, phases=(Phase.generate,))
@given(layouts(), st.sampled_from([64, 300, 1 << 20]))
def test_any_layout_costs_what_a_list_of_all_messages_does(
    layout: tuple[list[int], int, list[list[int]]], slot_bytes: int
) -> None:
    actor, fsdp, table = layout
    weights, regions = weights_of(actor, fsdp), regions_of(len(table[0]))
    ranks = sorted({*actor, *(rank for row in table for rank in row)})
    plans = {r: make_transfer_plan(r, weights, regions, table, 2, slot_bytes) for r in ranks}
    simulate(plans, weights)
    costs = {(plan.block, plan.cost, plan.memory_bytes) for plan in plans.values()}
    block, shares = cheapest(weights, regions, table)
    cost = cost_of(weights, regions, table, block, shares)
    assert costs == {(block, tuple(2 * n for n in cost), plans[ranks[0]].memory_bytes)}
    fullest = max(max(load_of(plans, number).values(), default=0)
                  for number in range(len(plans[ranks[0]].buckets)))  # fmt: skip
    assert 2 * fullest <= plans[ranks[0]].memory_bytes
    if slot_bytes == 1 << 20:
        assert len(plans[ranks[0]].buckets) == 1


def load_of(plans: dict[int, TransferPlan], number: int) -> Counter[int]:
    """Returns the elements that a bucket takes on each rank, counted in all ranks' plans."""
    load: Counter[int] = Counter()
    for rank, plan in plans.items():
        bucket = plan.buckets[number]
        load[rank] += sum(numel(box) for sent in bucket.sends.values() for _, box in sent)
        sizes = [sum(numel(piece.box) for piece in share) for share in bucket.shares]
        if plan.block > 1:
            load[rank] += plan.block * max(sizes, default=0)
        else:
            load[rank] += sum(sizes)
    return load


def test_no_bucket_is_above_its_bound() -> None:
    """All of a chunk's rows are of one of four trainers, which sends each of them to every engine:
    a fair share of what the fullest rank takes is not what it has to send."""
    shape, engines = (64, 32), [[rank] for rank in range(4, 12)]
    rows = tuple((((16 * i, 16 * i + 16), (0, 32)), (i,)) for i in range(4))
    for rank in range(12):
        args = ([Weight("w", shape, rows)], [[(0, whole(shape))]], engines, 2, 1024)
        plan = make_transfer_plan(rank, *args)
        assert plan.memory_bytes <= 1024 and len(plan.buckets) > 1


@pytest.mark.clock
def test_a_large_job_is_planned_at_once() -> None:
    """256 ranks, engines of 8, 80 layers of 7 matrices: 40 ms, and minutes by lists of messages."""
    sizes = [(1024, 2048), (512, 2048), (2048, 1024), (4096, 2048), (2048, 4096), (2048,), (2048,)]
    world, weights, regions = 256, [], [[] for _ in range(8)]
    for shape in sizes:
        step = -(-shape[0] // world)
        rows = ((i, ((i * step, min(shape[0], i * step + step)), *whole(shape[1:])))
                for i in range(-(-shape[0] // step)))  # fmt: skip
        holders = tuple((box, (rank,)) for rank, box in rows)
        for layer in range(80):
            for t, needed in enumerate(regions):
                box = slab(whole(shape), 8, t)
                assert box is not None
                needed.append((len(weights), box))
            weights.append(Weight(f"{layer}.{shape}", shape, holders))
    table = [list(range(first, first + 8)) for first in range(0, world, 8)]
    start = time.process_time()
    plan = make_transfer_plan(100, weights, regions, table, 2, 256 << 20)
    assert time.process_time() - start < 3
    assert plan.cost.handed and len(plan.regions) == 560


def test_fsdp_ranks_gather_what_they_hold() -> None:
    plan = make_transfer_plan(0, weights_of([0, 1], 2), regions_of(1), [[0], [1]], 2, 1 << 20)
    assert plan.block == 2 and not plan.handover


def test_engines_that_hold_the_same_half_do_not_make_up_the_whole() -> None:
    """Two replicas of two trainers each, and two engines of two ranks: halves of the same size."""
    halves = ((((0, 32),), (0, 2)), (((32, 64),), (1, 3)))
    weights, regions = [Weight("norm", (64,), halves)], [[(0, ((0, 64),))]] * 2
    table = [[0, 1], [2, 3]]
    plans = {r: make_transfer_plan(r, weights, regions, table, 2, 1 << 20) for r in range(4)}
    simulate(plans, weights)  # raises AssertionError where an engine lacks a part
    # each of four ranks is handed the half that it lacks: 32 numbers of 2 bytes
    assert all(plan.cost == (64, 4 * 64, 0) for plan in plans.values())


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
    model.decay = nn.Parameter(torch.zeros(5))
    model.bias = nn.Parameter(torch.zeros(3))

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
            elif name == "a":  # as vLLM loads a decay: copied, then computed from the copy
                model.decay.data.copy_(tensor)
                model.decay.data.copy_(-model.decay.data.exp())
            elif name == "b":  # as vLLM loads a bias that another rank adds
                model.bias.data.copy_(tensor.zero_())
            else:
                model.looked.data.fill_(tensor.item())

    shapes = {"x": (1,), "q": (4, 4), "k": (4, 8), "e": (3, 4, 4), "t": (2, 4), "d": (4, 2)}
    shapes |= {"a": (5,), "b": (3,)}
    layout = record_layout(model, load, shapes, torch.float32)
    assert set(layout.opaque) == {"x", "t", "d", "a", "b"}
    assert layout.float32 == ["q", "k", "e", "a", "b"]
    model.decay.data.zero_()
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
