"""Answers as bytes, from rank to rank: what an engine gives away, another goes on with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from spmdrl.collectives import all_gather_rows
from spmdrl.rollout.engine import Completion, Request
from spmdrl.topology import Topology

REASONS = ("abort", "stop", "length")


def pack(answers: Mapping[int, Completion]) -> bytes:
    """Answers by the position of their request in a list that both sides know; int32 throughout.

    num_answers, then (position, reason, length) of each, then the token ids, versions and logprobs
    (the bits of float32) of all of them, end to end.
    """
    head = [len(answers)]
    for position, answer in answers.items():
        head += [position, REASONS.index(answer.finish_reason), len(answer.token_ids)]
    parts = [
        np.array(head, np.int32),
        np.array([t for a in answers.values() for t in a.token_ids], np.int32),
        np.array([v for a in answers.values() for v in a.versions], np.int32),
        np.array([x for a in answers.values() for x in a.logprobs], np.float32).view(np.int32),
    ]
    return np.concatenate(parts).tobytes()


def unpack(packed: bytes) -> dict[int, Completion]:
    words = np.frombuffer(packed, np.int32)
    start = 1 + 3 * int(words[0])
    head, body = words[1:start].reshape(-1, 3), words[start:].reshape(3, -1)
    ends = head[:, 2].cumsum()
    answers = {}
    for (position, reason, length), end in zip(head.tolist(), ends.tolist(), strict=True):
        tokens, versions, logprobs = body[:, end - length : end]
        answers[position] = Completion(
            tokens.tolist(), logprobs.view(np.float32).tolist(), REASONS[reason], versions.tolist()
        )
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
        request, response_ids=begun.token_ids, logprobs=begun.logprobs, versions=begun.versions
    )


def pick(ids: Sequence[int], count: int, num_waiting: int) -> list[int]:
    """Which of an engine's requests to give away, `ids` in the order they were added.

    Those that wait first, since nothing was computed for them; then evenly over those that run, so
    that old and young ones are left on both sides.
    """
    waiting = min(count, num_waiting)
    running = list(ids[: len(ids) - num_waiting])
    wanted = min(count - waiting, len(running))
    spread = [running[i * len(running) // wanted] for i in range(wanted)]
    return spread + list(ids[len(ids) - waiting :])
