"""Has one rank of each host do what all ranks of that host then share, such as a download."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from spmdrl.config import ConfigError
from spmdrl.distributed.agreement import gather_to_all
from spmdrl.distributed.topology import Topology

T = TypeVar("T")


def once_per_host(work: Callable[[], T], topology: Topology) -> list[T]:
    """Calls `work` on the first rank of each host. Returns its results of all hosts, that of this
    rank's own first. Collective; `work` holds no collective, and its result can be pickled.

    The others wait in a collective: what bounds `work` is the limit for a phase without progress
    (stall_timeout_s). Raises on all ranks where it fails on any: a ConfigError as it is, anything
    else as a RuntimeError that names the host.
    """
    places = gather_to_all(topology.place, topology.control)
    own = places.index(topology.place)
    failure: Exception | None = None
    mine: Any = None
    if own == topology.rank:
        try:
            mine = (work(), None)
        except Exception as error:  # noqa: BLE001  raised again on every rank below
            failure = error
            wrong = isinstance(error, ConfigError)
            mine = (None, (wrong, str(error) if wrong else repr(error)))
    told = gather_to_all(mine, topology.control)
    for (host, _), answer in zip(places, told, strict=True):
        if answer is not None and answer[1] is not None:
            wrong, text = answer[1]
            kind = ConfigError if wrong else RuntimeError
            raise kind(text if wrong else f"on {host}: {text}") from failure
    first = told[own][0]
    return [first, *(answer[0] for answer in told if answer is not None and answer[0] is not first)]
