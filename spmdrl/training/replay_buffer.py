"""Samples of earlier steps that may be trained on again (PF-PPO)."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from spmdrl.checkpoint.safe_load import read_plain
from spmdrl.config import ConfigError
from spmdrl.data.packing import concatenate
from spmdrl.types import Batch

# Fields of Batch by the names that earlier versions saved them under.
EARLIER_NAMES = {"greedy": "greedy_rewards", "keys": "reward_components"}


def of_this_version(fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the saved fields of a Batch under today's names; one that an earlier version did not
    save has its default.
    """
    named = {EARLIER_NAMES.get(name, name): value for name, value in fields.items()}
    return {"prompts": torch.full_like(fields["groups"], -1), **named}


class ReplayBuffer:
    """This rank's share of the samples of the last `steps` steps, as they were packed.

    A replayed sample keeps the logprobs of the engine that sampled it, so that a rollout correction
    sees how old it is. Steps are mixed so that every mini-batch has samples of each.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.past: list[Batch] = []  # newest first

    def mix(self, new: Batch) -> Batch:
        """`new` and the buffered samples as one Batch; `new` is then the newest in the buffer.

        Group g of the samples that are a steps old becomes g * (steps + 1) + a.
        """
        ages = [new, *self.past]
        renumbered = [
            batch.select(list(range(batch.num_seqs))) for batch in ages
        ]  # copies, so that the buffer keeps its own numbers
        for age, batch in enumerate(renumbered):
            batch.groups = batch.groups * (self.steps + 1) + age
        self.past = ages[: self.steps]
        return concatenate(renumbered)

    def save(self, file: BinaryIO) -> None:
        torch.save([dict(b.tensors()) | {"cu_seqlens": b.cu_seqlens} for b in self.past], file)

    def load(
        self, paths: list[Path], rank: int, world: int, num_keys: int, per_turn: bool,
        replays_experts: bool = False, support_width: int = 0,
    ) -> None:  # fmt: skip
        """Takes this rank's part of what all ranks saved: files rank, rank + world, ...

        Raises ConfigError where they were saved with another number of reward keys, or with
        rewards.per_turn or actor.router_replay the other way, or with supports of another width.
        """
        shares = [read_plain(path) for path in paths]
        parts: list[list[dict[str, Tensor]]] = [list(age) for age in zip(*shares, strict=True)]
        parts = [[of_this_version(fields) for fields in age] for age in parts]
        ages = [concatenate([Batch(**fields) for fields in age[rank::world]] or
                            [Batch(**age[0]).select([])]) for age in parts]  # fmt: skip
        self.past = ages[: self.steps]
        if any(batch.reward_components.shape[1] != num_keys for batch in self.past):
            raise ConfigError(
                f"the checkpoint's replayed samples have other reward_keys than these "
                f"{num_keys}: keep them, or start anew with --resume never"
            )
        if any((batch.turn_rewards is not None) != per_turn for batch in self.past):
            raise ConfigError(
                f"the checkpoint's replayed samples were scored with rewards.per_turn="
                f"{not per_turn}, this run has {per_turn}: keep it, or start anew with "
                "--resume never"
            )
        if any((batch.routed_experts is not None) != replays_experts for batch in self.past):
            raise ConfigError(
                "the checkpoint's replayed samples were made with another actor.router_replay: "
                "keep it, or start anew with --resume never"
            )
        supports = [batch.support_ids for batch in self.past]
        if any((0 if ids is None else ids.shape[1]) != support_width for ids in supports):
            raise ConfigError(
                "the checkpoint's replayed samples were made with another "
                "rollout.keep_sampling_mask or rollout.top_k: keep both, or start anew with "
                "--resume never"
            )
