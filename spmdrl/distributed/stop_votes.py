"""The vote of all ranks after a step, in which a signal that one of them has heard ends the run."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spmdrl.distributed.topology import Topology, new_group

# what a rank may wish: an end in order, to start again with other hosts; an end in order; that all
# hear what failed
REGROUP, STOP, BROKEN = 1, 2, 3
LEFT = 4  # what a rank votes that has left the loop
LEAVE_S = 60.0  # for the others to leave it, too: their steps have ended with this rank's
APART = (
    "a `break` has ended the training loop on some ranks, and others go on: all must leave it "
    "after the same step. A rank that only samples has no metrics, so share what one rank decides: "
    "`if broadcast_object(metrics.get('reward/mean', 0) > 0.9, runtime.topology.control, "
    "run.state.log_rank): break`"
)
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
        if vote.item() == LEFT:
            raise RuntimeError(APART)
        return int(vote.item())

    def leave(self) -> None:
        """Agrees that all ranks leave the loop here, before its last step. Every rank that leaves
        must call it. Raises RuntimeError where others go on: here, after LEAVE_S, or where they
        vote next.
        """
        vote = torch.tensor([LEFT])
        try:
            self.group.allreduce([vote], LARGEST).wait(timedelta(seconds=LEAVE_S))
        except RuntimeError as error:
            raise RuntimeError(APART) from error

    def close(self) -> None:
        """Waits for the votes that were not counted. Every rank must call it."""
        for _, work in self.votes:
            work.wait()
