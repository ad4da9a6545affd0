"""Answers as bytes, to be sent from rank to rank, and requests that go on with an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from spmdrl.distributed.collectives import all_gather_rows
from spmdrl.distributed.topology import Topology
from spmdrl.rollout.base import Completion, Request

REASONS = ("abort", "stop", "length", "turns", "error")


def pack(answers: Mapping[int, Completion]) -> bytes:
    """Answers by the position of their request in a list that both sides know; int32 throughout.

    num_answers, words of JSON, then (position, reason, length) of each, then the JSON of their
    replies, then the token ids, versions and logprobs (the bits of float32) of all of them, end to
    end. Behind that the routed experts and the supports, if there are any: see pack_rows.
    """
    replies = [answer.replies for answer in answers.values()]
    text = json.dumps(replies).encode() if any(replies) else b""
    text += b" " * (-len(text) % 4)
    head = [len(answers), len(text) // 4]
    for position, answer in answers.items():
        head += [position, REASONS.index(answer.finish_reason), len(answer.token_ids)]
    parts = [
        np.array(head, np.int32),
        np.frombuffer(text, np.int32),
        np.array([t for a in answers.values() for t in a.token_ids], np.int32),
        np.array([v for a in answers.values() for v in a.versions], np.int32),
        np.array([x for a in answers.values() for x in a.logprobs], np.float32).view(np.int32),
        *packed_arrays(list(answers.values())),
    ]
    return np.concatenate(parts).tobytes()


def unpack(packed: bytes) -> dict[int, Completion]:
    words = np.frombuffer(packed, np.int32)
    count, size = words[:2].tolist()
    start = 2 + 3 * count
    head, text = words[2:start].reshape(-1, 3), words[start : start + size].tobytes()
    replies = json.loads(text) if text else [[]] * count
    ends = head[:, 2].cumsum()
    behind = start + size + 3 * int(head[:, 2].sum())
    body = words[start + size : behind].reshape(3, -1)
    experts, words = unpack_rows(words[behind:], count)
    supports, _ = unpack_rows(words, count)
    answers = {}
    for (position, reason, length), end, said, routed, support in zip(
        head.tolist(), ends.tolist(), replies, experts, supports, strict=True
    ):
        tokens, versions, logprobs = body[:, end - length : end]
        answers[position] = Completion(
            tokens.tolist(), logprobs.view(np.float32).tolist(), REASONS[reason],
            versions.tolist(), list(said), routed, None if support is None else support[:, 0],
        )  # fmt: skip
    return answers


def packed_arrays(answers: list[Completion]) -> list[np.ndarray]:
    experts = [answer.routed_experts for answer in answers]
    supports = [
        None if answer.support_ids is None else answer.support_ids[:, None] for answer in answers
    ]
    packed = pack_rows(supports)
    return [pack_rows(experts, leads=len(packed) > 0), packed]


def pack_rows(parts: list[np.ndarray | None], leads: bool = False) -> np.ndarray:
    """Rows of several answers, (num_rows, a, b) uint8, int16 or int32 each, as int32; nothing where
    none has any, unless more is to follow (`leads`).

    a, b, bytes of a number, then the number of rows of each answer (-1: it has none), then the rows
    of all of them, end to end.
    """
    known = [rows for rows in parts if rows is not None]
    if not known and not leads:
        return np.zeros(0, np.int32)
    head = [*known[0].shape[1:], known[0].itemsize] if known else [0, 0, 1]
    head += [-1 if rows is None else len(rows) for rows in parts]
    data = b"".join(rows.tobytes() for rows in known)
    data += bytes(-len(data) % 4)
    return np.concatenate([np.array(head, np.int32), np.frombuffer(data, np.int32)])


def unpack_rows(words: np.ndarray, count: int) -> tuple[list[np.ndarray | None], np.ndarray]:
    """Returns what was given to pack_rows, and the words behind it. count: of the answers."""
    if not len(words):
        return [None] * count, words
    a, b, itemsize = words[:3].tolist()
    counts = words[3 : 3 + count]
    num_rows = int(counts.clip(min=0).sum())
    size = -(-num_rows * a * b * itemsize // 4)
    numbers = words[3 + count :][:size].view(f"i{itemsize}" if itemsize > 1 else np.uint8)
    rows = numbers[: num_rows * a * b].reshape(num_rows, a, b)
    ends = counts.clip(min=0).cumsum()
    parts = [
        None if rows_of < 0 else rows[end - rows_of : end]
        for rows_of, end in zip(counts.tolist(), ends.tolist(), strict=True)
    ]
    return parts, words[3 + count + size :]


def share(answers: Mapping[int, Completion], topology: Topology) -> dict[int, Completion]:
    """Every rank's answers, on every rank of the topology, in order of position. Collective."""
    packed = torch.frombuffer(bytearray(pack(answers)), dtype=torch.uint8)
    everyone: dict[int, Completion] = {}
    for rows in all_gather_rows(packed, topology):
        everyone |= unpack(rows.numpy().tobytes())
    return dict(sorted(everyone.items()))


def resume(request: Request, begun: Completion) -> Request:
    """The request, to be continued behind what there is of its answer."""
    return replace(
        request, response_ids=begun.token_ids, logprobs=begun.logprobs, versions=begun.versions,
        replies=begun.replies, awaits_reply=begun.finish_reason == "stop",
        routed_experts=begun.routed_experts, support_ids=begun.support_ids,
    )  # fmt: skip
