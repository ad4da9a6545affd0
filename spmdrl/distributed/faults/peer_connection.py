"""A connection from a rank's watchdog to that of the rank it watches, if that is on another host.

Nothing is said on it: the kernel ends it with the process, at once, also where nothing else
connects the two ranks. One that ended is made again. Only where the other's port is closed by then,
or another's, has its process ended; a cable that is pulled or a proxy that drops connections tells
nothing, and the rank's signs of life decide. Deaths that keep sockets open for long, as a core dump
of many gigabytes does, are noticed by these too.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from weakref import ref

import torch.distributed as dist

from spmdrl.distributed.faults.network import address_towards, addresses_of, own_addresses

TRY_S = 5.0  # for a connection, and for the first word on it
AGAIN_S = 0.5  # from a try to the next, at first
SELDOM_S = 30.0  # of a rank that was never reached: it may not be possible
CALLERS = 16  # let in at a time: strangers must not keep the watchdog from its beat
# a firewall forgets connections on which nothing goes
KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}

logger = logging.getLogger(__name__)


class Anchor:
    """The end to which the rank that watches this one ties its tether: a listening port, for a job
    of several hosts. Tells whoever connects a word that stands in the store; holds the connections
    open.

    Raises OSError where this process may not listen.
    """

    def __init__(self, store: dist.Store, rank: int, master: tuple[str, int]) -> None:
        """master: address and port of the job's store, to which every rank finds its way."""
        self.word = secrets.token_hex(8).encode()
        self.held: deque[socket.socket] = deque(maxlen=8)  # of strangers too, if any come
        self.door = opened()
        self.door.setblocking(False)
        port = self.door.getsockname()[1]
        offer = {"word": self.word.decode(), "port": port, "addresses": ways_to(master)}
        store.set(f"tether/{rank}", json.dumps(offer))
        itself = ref(self)  # a child that does not exec would keep the connections open
        os.register_at_fork(after_in_child=lambda: close_if_there(itself()))

    def hold(self) -> None:
        """Takes in who has called since. To be called again and again."""
        for _ in range(CALLERS):
            try:
                caller, _ = self.door.accept()
            except OSError:  # nobody there; or no file left to open, which may pass
                return
            if len(self.held) == self.held.maxlen:
                self.held.popleft().close()
            self.held.append(caller)
            with suppress(OSError):
                caller.send(self.word)

    def close(self) -> None:
        for sock in (self.door, *self.held):
            sock.close()


class Tether:
    """A tether to another rank's anchor; a thread of its own holds it until `close`."""

    def __init__(self, offer: str, rank: int) -> None:
        """offer: what the anchor of that rank has put into the store. Raises RuntimeError where the
        system has no thread left."""
        told = json.loads(offer)
        self.word: bytes = told["word"].encode()
        self.places = [(address, told["port"]) for address in told["addresses"]]
        self.rank = rank
        self.tied = False  # it has been reached once
        self.ended_at: float | None = None  # since then the other process is known to be gone
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._keep, name="watchdog-tether", daemon=True)
        self.thread.start()

    def ended_for(self) -> float:
        """Seconds since the other process is known to be gone; 0 while it is not."""
        ended_at = self.ended_at
        return time.monotonic() - ended_at if ended_at else 0.0

    def close(self) -> None:
        self.done.set()
        self.thread.join(TRY_S)

    def _keep(self) -> None:
        pause_s = AGAIN_S
        while not self.done.is_set():
            if any(map(self._hold, list(self.places))):
                continue
            self.done.wait(pause_s)
            if not self.tied and pause_s < SELDOM_S:
                pause_s = min(2 * pause_s, SELDOM_S)
                if pause_s == SELDOM_S:
                    logger.warning(
                        "rank %d cannot be reached at %s: should its process die, that may be "
                        "noticed after lost_timeout_s only", self.rank, self.places,
                    )  # fmt: skip

    def _hold(self, place: tuple[str, int]) -> bool:
        """Whether the anchor is there; returns when the connection has broken, or at `close`."""
        try:
            with socket.create_connection(place, TRY_S) as sock:
                keep_alive(sock)
                if self._is_anchor(sock):
                    self.places, self.tied, self.ended_at = [place], True, None
                    self._wait_for_its_end(sock)
                    return True
        except ConnectionRefusedError:  # nobody listens there
            self._has_ended()
        except OSError:  # no answer in time, or none at all, or no way there: nothing is known
            pass
        return False

    def _has_ended(self) -> None:
        if self.tied and self.ended_at is None:
            self.ended_at = time.monotonic()

    def _is_anchor(self, sock: socket.socket) -> bool:
        """Raises ConnectionAbortedError where it hangs up before it has said all."""
        heard = b""
        while len(heard) < len(self.word):
            more = sock.recv(len(self.word) - len(heard))
            if not more:
                raise ConnectionAbortedError
            heard += more
        if heard != self.word:  # the port is another's by now
            self._has_ended()
        return heard == self.word

    def _wait_for_its_end(self, sock: socket.socket) -> None:
        sock.settimeout(AGAIN_S)
        with suppress(OSError):
            while not self.done.is_set():
                with suppress(TimeoutError):
                    if not sock.recv(1):
                        return


def ways_to(master: tuple[str, int]) -> list[str]:
    """Addresses of this host, the likeliest first: the one on its way to the job's store, those of
    its name, of its interfaces, and its own for itself, for several launchers on one host."""
    by_name = sorted(addresses_of(socket.gethostname()))
    found = [address_towards(*master), *by_name, *own_addresses(), "127.0.0.1"]
    return list(dict.fromkeys(address for address in found if address))


def opened() -> socket.socket:
    """Listens on a port that the system chooses, for IPv4 and, where there is, IPv6."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def close_if_there(anchor: Anchor | None) -> None:
    if anchor is not None:
        anchor.close()
