"""Says early that rewards hang, and stops a run whose rewards fail while others are awaited."""

from __future__ import annotations

import logging
import secrets
import time

import torch
import torch.distributed as dist

from spmdrl.config import RewardConfig
from spmdrl.config.words import counted, verb
from spmdrl.distributed.topology import Topology
from spmdrl.distributed.torch_compat import default_store
from spmdrl.rewards.runner import TooManyInvalid
from spmdrl.rewards.workers.worker import cause_of
from spmdrl.types import Sample

logger = logging.getLogger(__name__)

MOST_LOGGED = 3  # time-outs, of all ranks, each time that samples are scored
SOON_S = 2.0  # what fails as quickly is counted in full when all is scored, by check_invalid


class InvalidWatch:
    """Counts the invalid samples of all ranks in the store while each rank scores its own."""

    def __init__(self, config: RewardConfig, num_samples: int, topology: Topology) -> None:
        """num_samples: that this rank scores. Collective over the topology."""
        self.config, self.began = config, time.monotonic()
        # a restart finds what an earlier attempt left in the store, so the counters have a nonce
        nonce = secrets.randbits(62) if topology.rank == 0 else 0
        told = torch.tensor([num_samples, nonce], dtype=torch.int64)
        dist.all_reduce(told, group=topology.control)
        self.num_samples, nonce = told.tolist()
        self.store = dist.PrefixStore(f"invalid/{nonce}", default_store())

    def failed(self, sample: Sample, invalid: str) -> None:
        """Counts a sample that has no reward; invalid: why. Raises TooManyInvalid as soon as over
        max_invalid_fraction of all samples are bad.
        """
        count = self.store.add("samples", 1)
        first = f"prompt {sample.prompt.id}: {cause_of(invalid)}"
        late = invalid.startswith("timed out")
        if late and (number := self.store.add("late", 1)) <= MOST_LOGGED:
            # not a warning, which ranks other than 0 do not show
            logger.error("a reward timed out (rewards.timeout_s=%g), number %d of this scoring, %s",
                         self.config.timeout_s, number, first)  # fmt: skip
        most = self.config.max_invalid_fraction * self.num_samples
        if count > most and time.monotonic() - self.began > SOON_S:
            raise TooManyInvalid(
                f"{count} of {counted(self.num_samples, 'sample')} {verb(count, 'have')} no "
                "reward, more than "
                f"rewards.max_invalid_fraction={self.config.max_invalid_fraction} allows, before "
                f"all are scored. The last: {first}"
            )
