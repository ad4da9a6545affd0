"""Decides what a watchdog says of what it has seen.

These functions are pure: they have no clock, store, thread or process. All times are in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

FELT_S = 3.0  # without a beat, once a rank has felt that a connection broke
LAST_WORD_S = 10.0  # how much sooner the rank that got on last may say that all have stopped


class FailureCause(Enum):
    """Why the job must end."""

    NEIGHBOUR_DIED = "the process of the neighbour on this host is gone"
    PEER_SILENT = "the rank that this one watches gives no sign of life"
    NCCL_FAILED = "NCCL reports an error to this rank, and no rank has been missed since"
    STALLED = "no rank gets on, and this one stopped first"
    NEIGHBOUR_FROZEN = "the process of the neighbour, which has the store, is stopped"
    STORE_ENDED = "connections broke, and the store refuses new ones"
    STORE_GONE = "the store does not answer"


@dataclass(frozen=True)
class RanksSeen:
    """Holds what a rank sees of the others while the store answers."""

    neighbour_gone: bool  # the process of the neighbour on this host has ended
    peer_silent_s: float  # since the last beat of the rank that this one watches
    felt: bool  # some rank has felt that a connection broke
    own_phase_s: float  # since this rank began its phase
    progress_s: float  # since the store's note of the rank that got on last has changed
    is_own_progress: bool  # that note is of this rank
    nccl_failed_s: float = 0.0  # since NCCL told this rank of an error; 0: it has not


@dataclass(frozen=True)
class StoreSeen:
    """Holds what a rank sees of the store, when it may not answer."""

    silent_s: float  # since it answered
    refused_s: float  # for which each call on it has failed at once
    felt: bool  # this rank has felt that a connection broke
    near: bool  # the store's rank is on this host
    neighbour_stopped: bool  # the process of the neighbour is stopped, as by SIGSTOP


def verdict(seen: RanksSeen, lost_s: float, stall_s: float) -> FailureCause | None:
    """Returns why the job must end, or None.

    lost_s: a watched rank may give no sign of life for so long, or for FELT_S where a connection
    broke. stall_s: a phase may take so long, unless another rank gets on, for which this one may be
    waiting. NCCL's error may be of another rank's end, which is told where it is found within
    lost_s. The rank that has stood still longest says so first. Of ranks that stopped within
    LAST_WORD_S of each other it is the one that got on last: the others were waiting for it.
    """
    if seen.neighbour_gone:
        return FailureCause.NEIGHBOUR_DIED
    if seen.peer_silent_s > (min(lost_s, FELT_S) if seen.felt else lost_s):
        return FailureCause.PEER_SILENT
    if seen.nccl_failed_s > lost_s:
        return FailureCause.NCCL_FAILED
    waited_s = seen.progress_s - (0 if seen.is_own_progress else LAST_WORD_S)
    if seen.own_phase_s > stall_s and waited_s > stall_s / 2:
        return FailureCause.STALLED
    return None


def store_verdict(seen: StoreSeen, lost_s: float, grace_s: float) -> FailureCause | None:
    """Returns why this rank must end by itself, without the store, or None.

    lost_s: the store may be silent for so long. grace_s: it may refuse calls for twice as long, or
    for once where a connection broke. A rank beside the store's knows more than others: the others
    come first, and it waits grace_s longer unless it sees why.
    """
    refused = seen.refused_s > (1 if seen.felt else 2) * grace_s
    if seen.silent_s <= lost_s and not refused:
        return None
    if seen.neighbour_stopped:
        return FailureCause.NEIGHBOUR_FROZEN
    if seen.silent_s <= lost_s + (grace_s if seen.near else 0) and not refused:
        return None
    if seen.felt and refused and not seen.near:
        return FailureCause.STORE_ENDED
    return FailureCause.STORE_GONE
