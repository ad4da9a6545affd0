"""A connection from a rank's watchdog to that of the rank it watches, if that is on another host.

Nothing is said on it: the kernel ends it with the process, at once, also where nothing else
connects the two ranks. One that ended is made again. Only where the other's port is closed by then
has its process ended; a cable that is pulled or a proxy that drops idle connections tells nothing.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections import deque
from contextlib import suppress

import torch.distributed as dist

from spmdrl.addresses import address_towards, addresses_of

TRY_S = 5.0  # for a connection, and for the first word on it
AGAIN_S = 0.5  # from a try to the next


class Anchor:
    """Where the rank that watches this one ties its tether: a listening port, for a job of several
    hosts. Tells whoever connects a word that stands in the store; holds the connections open."""

    def __init__(self, store: dist.Store, rank: int, master: tuple[str, int]) -> None:
        """master: address and port of the job's store, to which every rank finds its way."""
        self.word = secrets.token_hex(8).encode()
        self.held: deque[socket.socket] = deque(maxlen=8)  # of strangers too, if any come
        both = socket.has_dualstack_ipv6()
        self.door = socket.create_server(
            ("", 0), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both
        )
        self.door.setblocking(False)
        port = self.door.getsockname()[1]
        offer = {"word": self.word.decode(), "port": port, "addresses": ways_to(master)}
        store.set(f"tether/{rank}", json.dumps(offer))

    def hold(self) -> None:
        """Takes in who has called since. To be called again and again."""
        with suppress(OSError):  # nobody there; or no file left to open, which may pass
            while True:
                caller, _ = self.door.accept()
                if len(self.held) == self.held.maxlen:
                    self.held.popleft().close()
                self.held.append(caller)
                caller.send(self.word)

    def close(self) -> None:
        for sock in (self.door, *self.held):
            sock.close()


class Tether:
    """To another rank's anchor; a thread of its own holds it until `close`."""

    def __init__(self, offer: str) -> None:
        """offer: what the anchor has put into the store."""
        told = json.loads(offer)
        self.word: bytes = told["word"].encode()
        self.places = [(address, told["port"]) for address in told["addresses"]]
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
        while not self.done.is_set():
            if not any(map(self._hold, list(self.places))):
                self.done.wait(AGAIN_S)

    def _hold(self, place: tuple[str, int]) -> bool:
        """Whether the anchor is there; returns when the connection has broken, or at `close`."""
        try:
            with socket.create_connection(place, TRY_S) as sock:
                if not self._is_anchor(sock):
                    raise ConnectionAbortedError
                self.places, self.tied, self.ended_at = [place], True, None
                self._wait_for_its_end(sock)
        except ConnectionError:  # nobody listens there, or somebody else
            if self.tied and self.ended_at is None:
                self.ended_at = time.monotonic()
            return False
        except OSError:  # no answer in time, or no way there: nothing is known
            return False
        return True

    def _is_anchor(self, sock: socket.socket) -> bool:
        heard = b""
        while len(heard) < len(self.word):
            more = sock.recv(len(self.word) - len(heard))
            if not more:
                return False
            heard += more
        return heard == self.word

    def _wait_for_its_end(self, sock: socket.socket) -> None:
        sock.settimeout(AGAIN_S)
        with suppress(ConnectionError):
            while not self.done.is_set():
                with suppress(TimeoutError):
                    if not sock.recv(1):
                        return


def ways_to(master: tuple[str, int]) -> list[str]:
    """Addresses of this host, the likeliest first: the one on its way to the job's store, those of
    its name, and its own for itself, for several launchers on one host."""
    found = [address_towards(*master), *sorted(addresses_of(socket.gethostname())), "127.0.0.1"]
    return list(dict.fromkeys(address for address in found if address))
