"""Log-probabilities of the reference, computed once for all rows before the first step.

The reference of preference optimisation is the model that a run starts from. So it is the actor
before a checkpoint is loaded, and with adapters the actor without them: no second model is ever in
memory. What it says is kept in the run's folder, in parts of BLOCK_ROWS rows:

    reference/train-3f2a9c01d4e5b677/000000000000.npy    (rows, 2) float64, see AnswerDataset

A folder is named by a digest of all that the numbers depend on: the model's weights, the tokenizer,
the data, and how both are read. A run that is resumed, on whatever ranks, reads the parts that are
there and computes the others.
"""

from __future__ import annotations

import io
import json
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from spmdrl.algo.preference_losses import needs_reference
from spmdrl.algo.preference_terms import answer_sums
from spmdrl.checkpoint.earlier_runs import REFERENCE, replace_synced
from spmdrl.config import PreferenceTrainingConfig
from spmdrl.data.answers import AnswerDataset
from spmdrl.distributed.collectives import broadcast_object
from spmdrl.distributed.progress import PROGRESS
from spmdrl.engines.base import TrainEngine
from spmdrl.training.row_share import share_of
from spmdrl.training.run_identity import digest_of, files_print, model_print, tokenizer_print
from spmdrl.training.supervised import SupervisedRun
from spmdrl.types import Batch

BLOCK_ROWS = 1024
FORMAT = 1  # of the parts


def add_reference(run: SupervisedRun) -> None:
    """Gives the rows of a run what the reference says of them, if the loss reads it. Collective."""
    assert isinstance(run.config, PreferenceTrainingConfig)
    if not needs_reference(run.config.preference):
        return
    for name, rows in (("train", run.rows), ("eval", run.held_out)):
        if rows is not None:
            assert isinstance(rows, AnswerDataset)
            with run.runtime.phases("ref_logprobs"):
                rows.reference = reference_of(run, run.config, name, rows)


def reference_of(
    run: SupervisedRun, config: PreferenceTrainingConfig, name: str, rows: AnswerDataset
) -> np.ndarray:
    """(len(rows), 2) float64, the same on every rank. Collective. name: "train" or "eval"."""
    runtime, began = run.runtime, time.perf_counter()
    control, found, folder = runtime.topology.control, np.zeros((0, 2)), Path()
    if runtime.is_main:
        folder = runtime.run_dir / REFERENCE / f"{name}-{digest(run, config, name, rows)}"
        found = stored(folder, len(rows))
    found = broadcast_object(found, control)
    num_stored, model = len(found), run.actor.model
    reference = model.base() if config.actor.lora is not None else model
    for first in range(num_stored, len(rows), BLOCK_ROWS):
        indices = list(range(first, min(first + BLOCK_ROWS, len(rows))))
        block = compute(run, config, rows, indices, reference)
        if runtime.is_main:
            write_part(folder, first, block)
        found = np.concatenate([found, block])
        runtime.phases.still_going()
        PROGRESS.count(len(found), len(rows), "rows")
    if runtime.is_main:
        computed, seconds = len(rows) - num_stored, time.perf_counter() - began
        PROGRESS.line(
            f"reference log-probabilities of {len(rows):,} {name} rows: {num_stored:,} read, "
            f"{computed:,} computed in {seconds:.1f} s; kept in {folder}"
        )
    return found


def digest(
    run: SupervisedRun, config: PreferenceTrainingConfig, name: str, rows: AnswerDataset
) -> str:
    """Names what the numbers depend on; 16 hexadecimal digits. name: "train" or "eval"."""
    data = {
        key: value
        for key, value in asdict(config.data).items()
        if key not in ("train", "eval", "batch_size", "shuffle")
    }
    known = {
        "format": FORMAT,
        "model": model_print(config.model, with_weights=True),
        "dtype": config.actor.dtype,
        "tokenizer": tokenizer_print(run.tokenizer),
        "files": files_print(getattr(config.data, name)),
        "data": data,
        "labelled": rows.labelled,
        "rows": len(rows),
        "ld_alpha": config.preference.ld_alpha,
    }
    return digest_of(json.dumps(known, sort_keys=True, default=str))


def stored(folder: Path, num_rows: int) -> np.ndarray:
    """(n, 2) float64: the first rows, as many as whole parts have."""
    parts = [np.zeros((0, 2))]
    for first in range(0, num_rows, BLOCK_ROWS):
        path = part_path(folder, first)
        if not path.is_file():
            break
        part = np.load(path, allow_pickle=False)
        if part.shape != (min(BLOCK_ROWS, num_rows - first), 2) or part.dtype != np.float64:
            break  # of another program: it is computed again
        parts.append(part)
    return np.concatenate(parts)


def part_path(folder: Path, first: int) -> Path:
    return folder / f"{first:012}.npy"


def write_part(folder: Path, first: int, block: np.ndarray) -> None:
    """Written aside, then renamed: a part that is there is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.save(buffer, block, allow_pickle=False)
    replace_synced(part_path(folder, first), buffer.getvalue())


def compute(
    run: SupervisedRun, config: PreferenceTrainingConfig, rows: AnswerDataset,
    indices: list[int], reference: TrainEngine,
) -> np.ndarray:  # fmt: skip
    """(len(indices), 2) float64, the same on every rank. Collective."""
    mine = share_of(rows, indices, run.actor)
    batches = [rows.batch(mine), rows.mismatched(mine)] if rows.labelled else [rows.batch(mine)]

    def sums(batch: Batch) -> torch.Tensor:
        logprobs = reference.logprobs(batch, temperature=1.0, images=rows.images).logprobs
        return answer_sums(logprobs, batch, config.preference.ld_alpha)

    found = torch.zeros(len(indices), 2, dtype=torch.float64)
    places = torch.tensor(mine, dtype=torch.int64) - indices[0]
    made = [sums(batch) for batch in batches]  # collective also where this rank has no row
    found[places] = torch.stack(made, 1) if rows.labelled else made[0].view(-1, 2)
    dist.all_reduce(found, group=run.runtime.topology.group)
    return found.numpy()
