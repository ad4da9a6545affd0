"""The two places where a run saves its checkpoints: its folder, and the memory of its hosts."""

from __future__ import annotations

from dataclasses import dataclass

from spmdrl.checkpoint.writer import Saver


@dataclass(frozen=True)
class Savers:
    """Holds the savers of a run, the same on every rank; a call is collective."""

    disk: Saver | None = None  # None: the config asks for none there
    disk_every: int = 0  # steps
    memory: Saver | None = None
    memory_every: int = 0

    def all(self) -> list[Saver]:
        return [saver for saver in (self.memory, self.disk) if saver is not None]

    @property
    def failed(self) -> bool:
        """Whether a save has failed somewhere; `wait` raises it."""
        return any(saver.failed for saver in self.all())

    def saves_on_disk(self, step: int, ends: bool) -> bool:
        """ends: the run ends with this step."""
        return self.disk is not None and (ends or step % self.disk_every == 0)

    def saves_in_memory(self, step: int, ends: bool) -> bool:
        """ends: the ranks end after this step, to be started again."""
        return self.memory is not None and (ends or step % self.memory_every == 0)

    def wait(self, but: Saver | None = None) -> None:
        """Waits until what all others than `but` have begun stands. Raises PhaseError where it does
        not.
        """
        for saver in self.all():
            if saver is not but:
                saver.wait()

    def take_metrics(self) -> dict[str, float]:
        """The seconds of saves that ended since the last call."""
        on_disk = {} if self.disk is None else self.disk.take_metrics()
        kept = {} if self.memory is None else self.memory.take_metrics()
        if not kept:
            return on_disk
        return {**on_disk, "checkpoint/in_memory_s": kept["checkpoint/write_s"]}
