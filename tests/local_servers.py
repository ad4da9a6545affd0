"""Servers that tests start, each a program that listens at the port it is given."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

START_S = 60.0


@contextmanager
def served(command: Sequence[Any], **options: Any) -> Iterator[int]:
    """Yields the port at which the program listens, once it does. options: of subprocess.Popen."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([*map(str, command), str(port)], **options)
    end = time.monotonic() + START_S
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                assert time.monotonic() < end and server.poll() is None
                time.sleep(0.1)
        yield port
    finally:
        server.kill()
        server.wait()
