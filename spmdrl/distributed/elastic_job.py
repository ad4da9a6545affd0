"""Holds what spmdrl.launch tells its ranks, in their environment, about a job of changing hosts.

The launcher writes the variables (membership.py), a program's start reads them. Imports no torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

NNODES = "SPMDRL_NNODES"  # torchrun's --nnodes, "MIN:MAX"
JOB = "SPMDRL_JOB"  # a name that is the same on every host and at every start of the ranks
ROUND = "SPMDRL_ROUND"  # how often the hosts have met before in this job
MEMORY = "SPMDRL_MEMORY_DIR"  # a folder in this host's memory, which outlives the ranks
CHANGE = "SPMDRL_CHANGE_FILE"  # exists once the launcher has stopped the ranks to meet anew
VARIABLES = (NNODES, JOB, ROUND, MEMORY, CHANGE)


@dataclass(frozen=True)
class ElasticJob:
    """A job as its launcher describes it. Without a launcher of ours it has one size."""

    min_nodes: int = 1
    max_nodes: int = 1
    round: int = 0
    memory: Path | None = None
    change: Path | None = None

    @classmethod
    def read(cls) -> ElasticJob:
        """Reads the environment of this rank."""
        least, _, most = os.environ.get(NNODES, "1:1").partition(":")
        paths = [Path(os.environ[n]) if n in os.environ else None for n in (MEMORY, CHANGE)]
        return cls(int(least), int(most), int(os.environ.get(ROUND, "0")), *paths)

    @property
    def is_elastic(self) -> bool:
        """Whether hosts may join and leave."""
        return self.min_nodes < self.max_nodes

    def is_changing(self) -> bool:
        """Whether the launcher of this host has stopped its ranks because hosts join or leave:
        they are started again in a moment."""
        return self.change is not None and self.change.exists()

    def in_memory_every_steps(self, asked: int | None) -> int:
        """asked: checkpoint.in_memory_every_steps of the config."""
        return int(self.is_elastic) if asked is None else asked
