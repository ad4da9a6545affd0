"""Serves an endpoint from a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn

from spmdrl.config import ConfigError, ServeConfig
from spmdrl.rollout.agents.endpoint import Endpoint

CLOSE_S = 5.0  # for it to end


class EndpointServer:
    """A running endpoint. Raises ConfigError where its port cannot be had. `close` when done."""

    def __init__(self, config: ServeConfig, endpoint: Endpoint, engine: int) -> None:
        """engine: its number, which is added to the port."""
        self.endpoint = endpoint
        self.socket = listen(config.host, config.port + engine if config.port else 0)
        self.host, self.port = self.socket.getsockname()[:2]
        settings = uvicorn.Config(
            endpoint.app, log_level="warning", lifespan="off", timeout_keep_alive=75,
            access_log=False,
        )  # fmt: skip
        self.server = uvicorn.Server(settings)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.serve, name="endpoint", daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        """The address that agents call."""
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self.server.serve([self.socket]))

    def post(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Has the endpoint's event loop run a function, before what comes to it later, and does not
        wait: a thread that samples would wait for Python's lock each time.
        """
        self.loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(CLOSE_S)
        self.socket.close()


def listen(host: str, port: int) -> socket.socket:
    """Raises ConfigError for an address that cannot be listened at."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(2048)
    except OSError as error:
        found.close()
        raise ConfigError(
            f"serve.host={host!r}, serve.port: cannot listen at port {port} of it "
            f"({error.strerror}). serve.port=0 takes ports that are free"
        ) from error
    return found
