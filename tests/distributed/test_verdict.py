"""What a watchdog says of what it has seen: a table, without clocks and processes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from spmdrl.distributed.faults.verdict import (
    FELT_S,
    LAST_WORD_S,
    FailureCause,
    RanksSeen,
    StoreSeen,
    store_verdict,
    verdict,
)

LOST_S, STALL_S, GRACE_S = 10.0, 600.0, 3.0
WELL = RanksSeen(
    neighbour_gone=False, peer_silent_s=0.5, felt=False, own_phase_s=1.0, progress_s=1.0,
    is_own_progress=False,
)  # fmt: skip
STORE_WELL = StoreSeen(silent_s=0.5, refused_s=0.0, felt=False, near=False, neighbour_stopped=False)


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ({}, None),
        ({"neighbour_gone": True}, FailureCause.NEIGHBOUR_DIED),
        ({"peer_silent_s": LOST_S}, None),
        ({"peer_silent_s": LOST_S + 0.1}, FailureCause.PEER_SILENT),
        # a connection broke somewhere: who is silent now is not only slow
        ({"peer_silent_s": FELT_S + 0.1, "felt": True}, FailureCause.PEER_SILENT),
        ({"peer_silent_s": FELT_S - 0.1, "felt": True}, None),
        # a dead process explains a silence
        ({"neighbour_gone": True, "peer_silent_s": LOST_S + 1}, FailureCause.NEIGHBOUR_DIED),
        # a long phase is no hang while another rank gets on
        ({"own_phase_s": STALL_S + 1, "progress_s": 5.0}, None),
        ({"own_phase_s": STALL_S + 1, "progress_s": STALL_S / 2 + 1}, None),
        ({"own_phase_s": STALL_S + 1, "progress_s": STALL_S / 2 + LAST_WORD_S + 1},
         FailureCause.STALLED),
        # the rank that got on last says so first: the others were waiting for it
        ({"own_phase_s": STALL_S + 1, "progress_s": STALL_S / 2 + 1, "is_own_progress": True},
         FailureCause.STALLED),
        ({"own_phase_s": STALL_S - 1, "progress_s": STALL_S, "is_own_progress": True}, None),
        # NCCL's error may be of another's end, which explains it once that is found
        ({"nccl_failed_s": LOST_S, "felt": True}, None),
        ({"nccl_failed_s": LOST_S + 0.1, "felt": True}, FailureCause.NCCL_FAILED),
        ({"nccl_failed_s": LOST_S + 0.1, "neighbour_gone": True}, FailureCause.NEIGHBOUR_DIED),
        ({"nccl_failed_s": LOST_S + 0.1, "peer_silent_s": FELT_S + 0.1, "felt": True},
         FailureCause.PEER_SILENT),
        ({"own_phase_s": math.inf, "progress_s": math.inf, "peer_silent_s": LOST_S + 1},
         FailureCause.PEER_SILENT),
    ],
)  # fmt: skip
def test_what_is_said_of_ranks(seen: dict, said: FailureCause | None) -> None:
    assert verdict(replace(WELL, **seen), LOST_S, STALL_S) is said


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ({}, None),
        ({"silent_s": LOST_S}, None),
        ({"silent_s": LOST_S + 0.1}, FailureCause.STORE_GONE),
        # beside the store's rank one waits for the others' word
        ({"silent_s": LOST_S + 0.1, "near": True}, None),
        ({"silent_s": LOST_S + GRACE_S + 0.1, "near": True}, FailureCause.STORE_GONE),
        ({"silent_s": LOST_S + 0.1, "near": True, "neighbour_stopped": True},
         FailureCause.NEIGHBOUR_FROZEN),
        ({"neighbour_stopped": True}, None),
        ({"refused_s": 2 * GRACE_S - 0.1}, None),
        ({"refused_s": 2 * GRACE_S + 0.1}, FailureCause.STORE_GONE),
        ({"refused_s": GRACE_S + 0.1, "felt": True}, FailureCause.STORE_ENDED),
        ({"refused_s": GRACE_S + 0.1, "felt": True, "near": True}, FailureCause.STORE_GONE),
        ({"silent_s": LOST_S + 0.1, "felt": True}, FailureCause.STORE_GONE),
    ],
)  # fmt: skip
def test_what_is_said_of_the_store(seen: dict, said: FailureCause | None) -> None:
    assert store_verdict(replace(STORE_WELL, **seen), LOST_S, GRACE_S) is said
