"""Weights made whole one at a time, as exports and tests take them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
