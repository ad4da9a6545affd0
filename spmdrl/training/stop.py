"""The agreement of all ranks after a step: go on, save, or end the run in order."""

from __future__ import annotations

from spmdrl.checkpoint.writer import Saver
from spmdrl.config import RunConfig
from spmdrl.distributed.stop_votes import BROKEN, REGROUP, STOP, StopVotes
from spmdrl.training.runtime import Runtime
from spmdrl.training.savers import Savers


class StopController:
    """Agrees with all ranks after a step whether to go on, save, or end the run in order.

    From now on a signal leaves the run time to end its step, where there is a checkpoint to save
    that outlives the ranks. It is saved on the disk where the run ends, in memory where hosts may
    go on with it. lag: see StopVotes.
    """

    def __init__(self, config: RunConfig, runtime: Runtime, savers: Savers, lag: int = 0) -> None:
        """Collective over all ranks."""
        self.config, self.runtime, self.savers = config, runtime, savers
        self.hosts_may_go_on = runtime.elastic.is_elastic and savers.memory is not None
        if savers.disk is not None or self.hosts_may_go_on:
            runtime.stopping.arm(config.checkpoint.grace_s)
        self.votes = StopVotes(runtime.topology, lag)
        self.stops = False  # after this step, because of a signal
        self.regroups = False  # and the ranks are started again, with other hosts
        self.saves = False  # on the disk
        self.keeps = False  # in memory
        self.failed = False  # a save did, somewhere: Saver.wait raises it

    def vote(self, step: int) -> None:
        """Every rank must call it."""
        savers, last = self.savers, step == self.config.steps
        wish = self.votes.agree(self._wish())
        self.stops, self.failed = wish in (REGROUP, STOP) and not last, wish == BROKEN
        self.regroups = self.stops and wish == REGROUP
        all_go_on = self.regroups and savers.memory is not None
        self.saves = savers.saves_on_disk(step, last or (self.stops and not all_go_on))
        # where one host is told to leave, the others start again
        others_go_on = self.stops and self.hosts_may_go_on
        self.keeps = not last and savers.saves_in_memory(step, all_go_on or others_go_on)

    def savers_of_step(self) -> list[Saver]:
        """Returns those that are to save the step that was voted on."""
        savers = self.savers
        chosen = ((savers.memory, self.keeps), (savers.disk, self.saves))
        return [saver for saver, wanted in chosen if saver is not None and wanted]

    def _wish(self) -> int:
        """Returns the vote of this rank."""
        stopping = self.runtime.stopping
        if self.savers.failed:
            return BROKEN
        if not stopping.armed or stopping.asked is None:
            return 0
        return REGROUP if self.runtime.elastic.is_changing() else STOP

    def stop(self, step: int) -> str:
        """Waits for what is being saved; what there is to say. Every rank must call it."""
        self.savers.wait()
        if self.regroups:
            rest = "goes on with other hosts"
        elif self.savers.disk is not None:
            rest = "--resume auto goes on"
        else:
            rest = "hosts that stay go on; without any it is lost (checkpoint.every_steps=0)"
        self.runtime.stopped = f"stopped after step {step} of {self.config.steps}; {rest}"
        self.runtime.stopping.told = True  # that it will stop is no news any more
        return self.runtime.stopped

    def leave(self, step: int) -> None:
        """Agrees that the loop has ended on all ranks, where that was neither the last step nor a
        vote. Raises RuntimeError, see StopVotes.leave.
        """
        if step < self.config.steps and not self.stops:
            with self.runtime.phases.alone("leave the loop"):
                self.votes.leave()

    def close(self) -> None:
        """Every rank must call it."""
        self.votes.close()
