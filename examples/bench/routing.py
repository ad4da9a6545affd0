"""Moving a rollout batch from the ranks that made it to those that train on it, against one raw
all-to-all of the same bytes:

    torchrun --standalone --nproc-per-node 2 examples/bench/routing.py --mib 92

Batches with sequences of log-normal length (median 2,000 tokens), token ids, mask, logprobs and
versions of each token, spread evenly over the ranks; every rank keeps 1/ranks of what it made. Raw:
one packed uint8 buffer per rank through all_to_all_single, the output allocated anew each time as
ours is. `route`: send_batch and receive_batch, with one mini-batch; `whole` adds the exchange of
the table, the deal (Karmarkar-Karp) and the order by address. Alternating, medians over the slowest
rank; a JSON line each.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

import fire

from spmdrl.distributed.env import before_torch

before_torch()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from spmdrl.data.packing import assign_to_ranks, empty_batch  # noqa: E402
from spmdrl.distributed.collectives import all_gather_rows  # noqa: E402
from spmdrl.distributed.phases import Phases  # noqa: E402
from spmdrl.distributed.process import keep_freed_memory  # noqa: E402
from spmdrl.distributed.topology import Topology  # noqa: E402
from spmdrl.training.batch_exchange import (  # noqa: E402
    FIELDS,
    P2PChannel,
    packing_order,
    receive_batch,
    send_batch,
)
from spmdrl.types import Batch  # noqa: E402

LIMIT_S = 300


def main(mib: float = 92.0, runs: int = 15, seed: int = 0) -> None:
    """mib: of the whole job's batch."""
    keep_freed_memory()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    topology = Topology.build(torch.device("cpu"), dp=-1)
    table, batch = made_here(mib, seed, topology)
    post, sets = P2PChannel(topology), {topology.ranks: False}  # by ranks: shared prefixes
    dealt = assign_to_ranks(torch.cat(all_gather_rows(table, topology)), 1, sets)
    batch = in_order(batch, dealt, topology)
    total = torch.tensor([batch.num_tokens * 24 + batch.num_seqs * 24])
    dist.all_reduce(total)
    num_bytes = int(total) // topology.world**2 * topology.world  # per rank
    buffer = torch.zeros(num_bytes, dtype=torch.uint8)

    def raw() -> object:
        out = torch.empty_like(buffer)
        dist.all_to_all_single(out, buffer, group=topology.group)
        return out

    arrived: list = []

    def route() -> object:
        own = send_batch(batch, dealt, topology.ranks, FIELDS, post)
        arrived[:] = [own]
        minis = receive_batch(own, dealt, topology.ranks, FIELDS, 0, post)
        post.wait_until_delivered()
        return minis

    def whole() -> object:
        tables = torch.cat(all_gather_rows(table, topology))
        found = assign_to_ranks(tables, 1, sets)
        packing_order(found, topology.ranks, topology.rank)
        return route()

    phases = Phases(topology)

    def empty_phase() -> None:
        with phases("empty"):
            pass

    timed = {"raw all-to-all": raw, "route": route, "whole": whole}
    seconds = alternate(timed, runs, topology)
    size = {"mib": round(num_bytes * topology.world / 2**20, 1), "ranks": topology.world}
    for name, median in seconds.items():
        row = {"what": name, "ms": round(median * 1e3, 2)}
        row["ratio_to_raw"] = round(median / seconds["raw all-to-all"], 2)
        tell(row | size)
    flag = torch.zeros(1, dtype=torch.int64)
    small = {"empty phase": empty_phase, "all-reduce of one number": lambda: dist.all_reduce(flag)}
    for name, work in small.items():
        tell({"what": name, "ms": round(median_of(work, 1000) * 1e3, 3)})
    dist.destroy_process_group()


def made_here(mib: float, seed: int, topology: Topology) -> tuple[torch.Tensor, Batch]:
    """Table (n, 5) and Batch of this rank's part: every world-th sequence."""
    generator = torch.Generator().manual_seed(seed)
    lens = (2000 * torch.randn(100_000, generator=generator).mul(0.6).exp()).long().clamp(min=16)
    lens = lens[: int((lens.cumsum(0) * 24 < mib * 2**20).sum())]
    mine = torch.arange(len(lens))[topology.rank :: topology.world]
    batch = empty_batch(lens[mine])
    batch.token_ids = torch.randint(0, 1 << 17, (batch.num_tokens,))
    batch.loss_mask, batch.rollout_logprobs = (
        torch.ones(batch.num_tokens),
        -torch.rand(batch.num_tokens),
    )
    batch.groups, batch.indices = mine // 8, mine % 8
    makers = torch.full_like(mine, topology.rank)
    prompts = torch.zeros_like(mine)  # none is shared
    return torch.stack([batch.groups, batch.indices, lens[mine], prompts, makers], dim=1), batch


def in_order(batch: Batch, dealt, topology: Topology) -> Batch:
    """As dispatch.assign_and_pack packs it."""
    order = packing_order(dealt, topology.ranks, topology.rank)
    place = {(g, i): at for at, (g, i) in enumerate(
        zip(batch.groups.tolist(), batch.indices.tolist(), strict=True))}  # fmt: skip
    addresses = zip(dealt.groups[order].tolist(), dealt.indices[order].tolist(), strict=True)
    return batch.select([place[address] for address in addresses])


def alternate(
    work: dict[str, Callable[[], object]], runs: int, topology: Topology
) -> dict[str, float]:
    """Median seconds of each, on the slowest rank; every run starts on all ranks together."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    end = time.monotonic() + LIMIT_S
    for run in range(runs + 2):
        for name, function in work.items():
            dist.barrier()
            start = time.perf_counter()
            function()
            taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if run >= 2:
                seconds[name].append(float(taken))
        assert time.monotonic() < end, f"over the limit of {LIMIT_S} s"
    return {name: sorted(found)[len(found) // 2] for name, found in seconds.items()}


def median_of(work: Callable[[], object], count: int) -> float:
    """Seconds, of calls that follow each other."""
    found = []
    for _ in range(count):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return sorted(found)[count // 2]


def tell(row: dict) -> None:
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    fire.Fire(main)
