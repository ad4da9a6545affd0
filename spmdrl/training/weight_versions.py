"""Tells ranks that sample ahead that new weights are there, by a number in the store."""

from __future__ import annotations

import secrets

import torch
import torch.distributed as dist

from spmdrl.distributed.topology import Topology
from spmdrl.distributed.torch_compat import default_store


class WeightVersions:
    """Steps whose weights the trainers are ready to send, in order."""

    def __init__(self, topology: Topology) -> None:
        """Collective over `topology`: trainers and rollout."""
        # torchrun's store outlives a crash: what an earlier attempt left there has another name
        nonce = torch.tensor(list(secrets.token_bytes(8)))
        dist.broadcast(nonce, group=topology.control, group_src=0)
        # a connection of its own, since calls on a store block each other
        self.store = dist.PrefixStore(
            f"weights/{bytes(nonce.tolist()).hex()}", default_store().clone()
        )

    def announce(self, version: int) -> None:
        self.store.set("version", str(version))

    def newest(self) -> int:
        """-1 before the first."""
        return int(self.store.get("version")) if self.store.check(["version"]) else -1
