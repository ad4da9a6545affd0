"""Finds the addresses by which hosts reach each other."""

from __future__ import annotations

import socket
from contextlib import suppress

import psutil

ANYWHERE = "192.0.2.1"  # RFC 5737: nobody's; to ask which of our addresses the default route has


def address_towards(host: str, port: int) -> str | None:
    """This machine's address on the way to `host`; None where that is a loopback, or there is none.

    A head asks for the way to itself: then the default route's.
    """
    for target in (host, ANYWHERE):
        with suppress(OSError, UnicodeError):  # the latter: no name of a host
            family, kind, _, _, there = socket.getaddrinfo(target, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:  # sends nothing
                probe.connect(there)
                own = probe.getsockname()[0]
            if not (own.startswith("127.") or own == "::1"):
                return own
    return None


def interface_of(address: str) -> str | None:
    """The network interface that has the address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.partition("%")[0] == address for a in addresses):
            return name
    return None


def addresses_of(name: str) -> set[str]:
    """Empty where the name does not resolve."""
    with suppress(OSError, UnicodeError):
        return {str(info[4][0]) for info in socket.getaddrinfo(name, None)}
    return set()
