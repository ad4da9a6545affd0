"""Sums up what a step has computed of every sequence: one sum for each field of its Batch.

A run keeps these beside its samples, so that a replay can say which number is the first that
differs, and of which sample. A sum does not depend on the rank that a sequence is on.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from spmdrl.segments import segment_sum
from spmdrl.training.replay.sample_files import telling_damage
from spmdrl.types import SEQ_FIELDS, Batch

# in the order in which a step computes them, with the words for a reader
FIELDS = {
    "token_ids": "tokens",
    "loss_mask": "loss mask",
    "rollout_logprobs": "rollout log-probs",
    "rewards": "rewards",
    "turn_rewards": "rewards of turns",
    "greedy_rewards": "greedy rewards",
    "ref_logprobs": "ref log-probs",
    "values": "values",
    "old_logprobs": "old log-probs",
    "old_entropy": "entropy",
    "pi_squared": "squared probabilities",
    "prm_logprobs": "prm log-probs",
    "kept_mask": "tokens kept by the correction",
    "advantages": "advantages",
    "returns": "returns",
    "policy_weights": "weights of the policy loss",
    "loss_weights": "loss weights",
    "nll_weights": "weights of the NLL",
}
SMALL = frozenset({"loss_weights", "nll_weights"})  # compared by their own size, far below 1


class SequenceSums(NamedTuple):
    """A row for each sequence."""

    addresses: np.ndarray  # (num_seqs, 2) int64: group and index in the step's batch
    lens: np.ndarray  # (num_seqs,) int64: tokens that are learnt from, at least 1
    sums: dict[str, np.ndarray]  # by the field of Batch: (num_seqs,) float64
    sizes: dict[str, np.ndarray]  # the same of absolute values


def sums_of(batches: list[Batch]) -> SequenceSums:
    """Adds up this rank's mini-batches. Only fields that all of them have are taken."""
    names = [name for name in FIELDS if all(getattr(b, name) is not None for b in batches)]
    parts = [sums_of_batch(batch, names) for batch in batches]
    addresses = [torch.stack([b.groups, b.indices], dim=1).cpu().numpy() for b in batches]
    lens = [segment_sum(b.loss_mask.cpu(), b.seq_lens).clamp(min=1).long() for b in batches]
    return SequenceSums(
        np.concatenate(addresses),
        np.concatenate([each.numpy() for each in lens]),
        {name: np.concatenate([sums[name] for sums, _ in parts]) for name in names},
        {name: np.concatenate([sizes[name] for _, sizes in parts]) for name in names},
    )


def sums_of_batch(
    batch: Batch, names: list[str]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(sums, sums of absolute values) by field, (num_seqs,) float64 each."""
    sums: dict[str, np.ndarray] = {}
    sizes: dict[str, np.ndarray] = {}
    for name in names:
        values = getattr(batch, name).cpu().double()
        for found, each in ((sums, values), (sizes, values.abs())):
            of_seq = each if name in SEQ_FIELDS else segment_sum(each, batch.seq_lens)
            found[name] = of_seq.numpy()
    return sums, sizes


def merged_sums(parts: list[SequenceSums]) -> SequenceSums:
    """Returns the rows of all ranks in the order of their addresses."""
    addresses = np.concatenate([part.addresses for part in parts])
    order = np.lexsort((addresses[:, 1], addresses[:, 0]))
    names = [name for name in FIELDS if all(name in part.sums for part in parts)]
    return SequenceSums(
        addresses[order],
        np.concatenate([part.lens for part in parts])[order],
        {name: np.concatenate([part.sums[name] for part in parts])[order] for name in names},
        {name: np.concatenate([part.sizes[name] for part in parts])[order] for name in names},
    )


def packed_sums(found: SequenceSums, world: int) -> bytes:
    """The content of a rank's file. world: ranks that have one."""
    file = io.BytesIO()
    arrays = {f"sum_{name}": values for name, values in found.sums.items()}
    arrays |= {f"size_{name}": values for name, values in found.sizes.items()}
    np.savez_compressed(
        file, allow_pickle=False, addresses=found.addresses, lens=found.lens,
        world=np.array(world), **arrays,
    )  # fmt: skip
    return file.getvalue()


def read_sums(path: Path) -> tuple[SequenceSums, int]:
    """(what packed_sums was given). Raises ConfigError where the file is damaged."""
    with telling_damage(path):
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        names = [name for name in FIELDS if f"sum_{name}" in arrays]
        sums = {name: arrays[f"sum_{name}"] for name in names}
        sizes = {name: arrays[f"size_{name}"] for name in names}
        found = SequenceSums(arrays["addresses"], arrays["lens"], sums, sizes)
        return found, int(arrays["world"])
