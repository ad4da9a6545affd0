"""Weights made whole one at a time, as exports and tests take them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks

from spmdrl.weights import transfer
from spmdrl.weights.shards import Shards


def test_the_work_for_each_weight_does_not_grow_with_their_number(
    topology: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"w{n}": torch.randn(n + 1, 2) for n in range(20)}
    named = {
        name: Shards((len(t), 2), (((0, len(t)), (0, 2)),), lambda t=t: [t])  # type: ignore[misc]
        for name, t in tensors.items()
    }
    looked: list[torch.Tensor] = []
    lies = transfer._lies
    monkeypatch.setattr(transfer, "_lies", lambda t: looked.append(t) or lies(t))  # type: ignore[func-returns-value]
    found = dict(transfer.gathered(named, torch.float32, 1 << 20, topology))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert len(looked) == 2 * len(tensors)  # its part and its place


WHOLE = {"rows of all": torch.arange(12.0).view(3, 4), "of the last": torch.arange(3.0)}


def given_on(topology: Any) -> dict[str, torch.Tensor]:
    """What a rank is given of weights that are for the first alone. Each has a row of one."""
    row = topology.rank
    named = {"rows of all": Shards((3, 4), (((row, row + 1), (0, 4)),),
                                   lambda: [WHOLE["rows of all"][row : row + 1]])}  # fmt: skip
    if row == 2:
        named["of the last"] = Shards((3,), (((0, 3),),), lambda: [WHOLE["of the last"]])
    return dict(transfer.gathered(named, torch.float32, 1 << 20, topology, to_first=True))


@pytest.mark.ranks
@pytest.mark.strict_nccl
def test_what_one_rank_writes_is_sent_to_no_other() -> None:
    first, *others = run_ranks(3, given_on, timeout_s=30)
    assert first.keys() == WHOLE.keys() and others == [{}, {}]
    assert all(torch.equal(first[name], tensor) for name, tensor in WHOLE.items())
