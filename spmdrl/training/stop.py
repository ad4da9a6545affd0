"""The agreement of all ranks after a step: go on, save, or end the run in order."""

from __future__ import annotations

from spmdrl.checkpoint.writer import Saver
from spmdrl.config import RunConfig
from spmdrl.distributed.signals import BROKEN, STOP, StopVotes
from spmdrl.training.runtime import Runtime


class StopController:
    """Agrees with all ranks after a step whether to go on, save, or end the run in order.

    From now on a signal leaves the run time to end its step, where there is a checkpoint to save.
    lag: see StopVotes.
    """

    def __init__(
        self, config: RunConfig, runtime: Runtime, saver: Saver | None, lag: int = 0
    ) -> None:
        """Collective over all ranks."""
        self.config, self.runtime, self.saver = config, runtime, saver
        if saver is not None:
            runtime.stopping.arm(config.checkpoint.grace_s)
        self.votes = StopVotes(runtime.topology, lag)
        self.stops = False  # after this step, because of a signal
        self.saves = False
        self.failed = False  # a save did, somewhere: Saver.wait raises it

    def vote(self, step: int) -> None:
        """Every rank must call it."""
        stopping = self.runtime.stopping
        asked = stopping.armed and stopping.asked is not None
        failed = self.saver is not None and self.saver.failed
        wish = self.votes.agree(BROKEN if failed else STOP if asked else 0)
        last, every = step == self.config.steps, self.config.checkpoint.every_steps
        self.stops, self.failed = wish == STOP and not last, wish == BROKEN
        self.saves = self.saver is not None and (last or self.stops or step % every == 0)

    def stop(self, step: int) -> str:
        """Waits for what is being saved; what there is to say. Every rank must call it."""
        if self.saver is not None:
            self.saver.wait()
        self.runtime.stopped = (
            f"stopped after step {step} of {self.config.steps}; --resume auto goes on"
        )
        self.runtime.stopping.told = True  # that it will stop is no news any more
        return self.runtime.stopped

    def close(self) -> None:
        """Every rank must call it."""
        self.votes.close()
