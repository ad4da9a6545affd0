"""A rank's samples of a step as one compressed file, from which its RolloutResult is made again.

The file is numpy's .npz: arrays over the tokens of all samples, end to end, and JSON for the rest.
Nothing in it is code, so one that comes from elsewhere can be read.
"""

from __future__ import annotations

import dataclasses
import io
import json
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from spmdrl.config import ConfigError
from spmdrl.training.collect import RolloutResult
from spmdrl.types import Judgement, Prompt, Sample

FORMAT = 1
# what numpy raises for bytes that are no longer what it wrote: NotImplementedError for another kind
# of compression, TokenError for the header of an array
DAMAGED = (
    OSError, EOFError, ValueError, LookupError, TypeError, NotImplementedError, zipfile.BadZipFile,
    zlib.error, tokenize.TokenError,
)  # fmt: skip
# by the name of the array: the field of a Sample, and its type in the file
TOKEN_ARRAYS = {
    "token_ids": ("response_ids", np.int32),
    "logprobs": ("rollout_logprobs", np.float32),
    "loss_mask": ("loss_mask", np.uint8),
    "versions": ("policy_version", np.int32),
}
PLAIN_FIELDS = (
    "group", "index", "finish_reason", "response", "messages", "reward", "turn_rewards",
    "model_score", "penalty", "greedy_reward", "invalid", "reward_info", "pred", "turn_numbers",
)  # fmt: skip
RESULT_FIELDS = ("num_groups", "rounds", "num_sampled", "num_equal", "metrics")
NO_ROWS = -1  # in place of the number of rows of a sample of which nobody knows any
# Sample's fields of rows, by what their numbers of rows are called in the file
ROW_ARRAYS = {"routed_experts": "routed_rows", "support_ids": "support_rows"}


def packed(rollout: RolloutResult, world: int, num_rows: int) -> bytes:
    """Returns the file's content.

    world: ranks that sampled; each has a file. num_rows: of the data that is trained on, by which
    `epochs` become steps. Values of prompts that JSON does not have are left out.
    """
    flat = [row for sample in rollout.all_samples for row in (sample, *sample.rows)]
    place = {id(sample): i for i, sample in enumerate(rollout.all_samples)}
    prompts = list({id(row.prompt): row.prompt for row in flat}.values())
    number = {id(prompt): i for i, prompt in enumerate(prompts)}
    head = {
        "format": FORMAT,
        "world": world,
        "num_rows": num_rows,
        "result": {name: getattr(rollout, name) for name in RESULT_FIELDS},
        "trained": [place[id(sample)] for sample in rollout.samples],
        "prompts": [prompt_fields(prompt) for prompt in prompts],
        "samples": [sample_fields(row, number[id(row.prompt)]) for row in flat],
    }
    arrays: dict[str, np.ndarray] = {
        "json": np.frombuffer(json.dumps(head, default=plain).encode(), np.uint8),
        "prompt_ids": joined([prompt.token_ids for prompt in prompts], np.int32),
        "prompt_lens": np.array([len(prompt.token_ids) for prompt in prompts], np.int64),
        "lens": np.array([len(row.response_ids) for row in flat], np.int64),
        **row_arrays(flat),
    }
    for name, (field, dtype) in TOKEN_ARRAYS.items():
        arrays[name] = joined([getattr(row, field) for row in flat], dtype)
    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=False, **arrays)
    return file.getvalue()


def joined(lists: Sequence[Sequence[float]], dtype: Any) -> np.ndarray:
    return np.array([value for values in lists for value in values], dtype)


def plain(value: Any) -> Any:
    """Returns what JSON takes in place of a number of numpy's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a value of JSON")


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    known = {"ground_truth": prompt.ground_truth, "extra_info": prompt.extra_info}
    kept = {name: value for name, value in known.items() if is_plain(value)}
    return {
        "id": prompt.id, "data_source": prompt.data_source, "text": prompt.text,
        "chat": prompt.chat, **kept,
    }  # fmt: skip


def is_plain(value: Any) -> bool:
    try:
        json.dumps(value, default=plain)
    except (TypeError, ValueError):
        return False
    return True


def sample_fields(sample: Sample, prompt: int) -> dict[str, Any]:
    """prompt: its number in the file. A response that the last message says is not said twice."""
    fields = {name: getattr(sample, name) for name in PLAIN_FIELDS}
    if sample.messages and sample.messages[-1].get("content") == sample.response:
        fields.pop("response")
    judgement = sample.judgement
    return {
        "prompt": prompt, "num_rows": len(sample.rows), **fields,
        "judgement": None if judgement is None else dataclasses.astuple(judgement),
    }  # fmt: skip


def row_arrays(flat: list[Sample]) -> dict[str, np.ndarray]:
    """Each field of ROW_ARRAYS of all samples, end to end; {} where none has any."""
    arrays: dict[str, np.ndarray] = {}
    for field, counts in ROW_ARRAYS.items():
        parts = [getattr(s, field) for s in flat]
        known = [part for part in parts if part is not None]
        if known:
            rows = [NO_ROWS if part is None else len(part) for part in parts]
            arrays |= {field: np.concatenate(known), counts: np.array(rows, np.int64)}
    return arrays


# ---- reading


@dataclasses.dataclass(frozen=True)
class KeptFile:
    """Holds what one rank has kept of a step."""

    world: int  # ranks that sampled
    num_rows: int  # of the data that the run trains on
    rollout: RolloutResult


def read(path: Path) -> KeptFile:
    """Reads what `packed` has made. Raises ConfigError where the file is damaged or of another
    version.
    """
    with telling_damage(path):
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        head = json.loads(arrays["json"].tobytes())
        if head.get("format") != FORMAT:
            raise ConfigError(
                f"{path} is of format {head.get('format')}, this version of spmdrl reads {FORMAT}: "
                "replay it with the version that wrote it"
            )
        flat = samples_of(head, arrays)
        everyone = nested(flat, [fields["num_rows"] for fields in head["samples"]])
        taken = [everyone[i] for i in head["trained"]]
        rollout = RolloutResult(taken, all_samples=everyone, **head["result"])
        return KeptFile(head["world"], head["num_rows"], rollout)


@contextmanager
def telling_damage(path: Path) -> Iterator[None]:
    """Raises ConfigError with the path where a file of numpy's cannot be read."""
    try:
        yield
    except ConfigError:
        raise
    except DAMAGED as error:
        raise ConfigError(f"{path} cannot be read: {error or type(error).__name__}") from error


def samples_of(head: dict[str, Any], arrays: dict[str, np.ndarray]) -> list[Sample]:
    ids = split(arrays["prompt_ids"], arrays["prompt_lens"])
    prompts = [
        Prompt(**{"ground_truth": None} | fields, token_ids=own.tolist())
        for fields, own in zip(head["prompts"], ids, strict=True)
    ]
    parts = {
        field: split(arrays[name], arrays["lens"]) for name, (field, _) in TOKEN_ARRAYS.items()
    }
    count = len(head["samples"])
    experts, supports = (rows_of(arrays, field, count) for field in ROW_ARRAYS)
    found = []
    for i, fields in enumerate(head["samples"]):
        judgement = fields["judgement"]
        known = {name: fields[name] for name in PLAIN_FIELDS if name in fields}
        known.setdefault("response", known["messages"][-1]["content"] if known["messages"] else "")
        found.append(
            Sample(
                prompt=prompts[fields["prompt"]],
                judgement=None if judgement is None else Judgement(*judgement),
                routed_experts=experts[i],
                support_ids=supports[i],
                **{field: values[i].tolist() for field, values in parts.items()},
                **known,
            )
        )
    return found


def split(values: np.ndarray, lens: np.ndarray) -> list[np.ndarray]:
    return np.split(values, lens.cumsum()[:-1]) if len(lens) else []


def rows_of(arrays: dict[str, np.ndarray], field: str, count: int) -> list[np.ndarray | None]:
    if field not in arrays:
        return [None] * count
    rows = arrays[ROW_ARRAYS[field]]
    parts = split(arrays[field], rows.clip(min=0))
    return [part if n >= 0 else None for part, n in zip(parts, rows.tolist(), strict=True)]


def nested(flat: list[Sample], counts: list[int]) -> list[Sample]:
    """Gives trajectories their rows, which follow them."""
    found, at = [], 0
    while at < len(flat):
        sample, count = flat[at], counts[at]
        sample.rows = flat[at + 1 : at + 1 + count]
        found.append(sample)
        at += 1 + count
    return found
