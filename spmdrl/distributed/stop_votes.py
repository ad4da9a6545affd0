"""The vote of all ranks after a step, in which a signal that one of them has heard ends the run."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from spmdrl.distributed.topology import Topology, new_group

# what a rank may wish: an end in order, to start again with other hosts; an end in order; that all
# hear what failed
REGROUP, STOP, BROKEN = 1, 2, 3
LARGEST = dist.AllreduceOptions()
LARGEST.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)


class StopVotes:
    """Agrees on the last step without making ranks that work ahead wait for the others.

    The vote that is cast at the end of a step is counted `lag` steps later, when every rank must
    have come that far anyway; so all hear the same at the same step.
    """

    def __init__(self, topology: Topology, lag: int) -> None:
        """topology: of all ranks. Collective."""
        self.lag = lag
        # of its own: votes that wait for slow ranks would hold up what else goes over a group
        self.group: Any = new_group(topology.ranks, "gloo")
        # a ring whose ranks are connected before a vote may be under way while others do something
        # else: to connect takes the store, which a rank may be waiting in
        self.group.allreduce([torch.zeros(1, dtype=torch.int64)], LARGEST).wait()
        self.votes: deque[tuple[torch.Tensor, Any]] = deque()

    def agree(self, wish: int) -> int:
        """The largest of what the ranks wished `lag` calls ago; 0 before. Every rank must call it.

        wish: 0, REGROUP, STOP or BROKEN.
        """
        vote = torch.tensor([wish])
        self.votes.append((vote, self.group.allreduce([vote], LARGEST)))
        if len(self.votes) <= self.lag:
            return 0
        vote, work = self.votes.popleft()
        work.wait()
        return int(vote.item())

    def close(self) -> None:
        """Waits for the votes that were not counted. Every rank must call it."""
        for _, work in self.votes:
            work.wait()
