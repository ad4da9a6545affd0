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
    end.
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
    ]
    return np.concatenate(parts).tobytes()


def unpack(packed: bytes) -> dict[int, Completion]:
    words = np.frombuffer(packed, np.int32)
    count, size = words[:2].tolist()
    start = 2 + 3 * count
    head, text = words[2:start].reshape(-1, 3), words[start : start + size].tobytes()
    body = words[start + size :].reshape(3, -1)
    replies = json.loads(text) if text else [[]] * count
    ends = head[:, 2].cumsum()
    answers = {}
    for (position, reason, length), end, said in zip(
        head.tolist(), ends.tolist(), replies, strict=True
    ):
        tokens, versions, logprobs = body[:, end - length : end]
        answers[position] = Completion(
            tokens.tolist(), logprobs.view(np.float32).tolist(), REASONS[reason],
            versions.tolist(), list(said),
        )  # fmt: skip
    return answers


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
    )  # fmt: skip
