"""Measures what a request costs an agent by the client that it uses, in processor time.

    python examples/bench/agent_clients.py [--agents 256]

All agents of a process ask at once, as they do in a step, and a server in another process answers
once all have asked. Prints a line for each client: processor time for a request of this process
alone, in ms, the median of three rounds. The first round, which opens connections, is dropped.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import time
from collections.abc import Awaitable, Callable
from statistics import median

import aiohttp
import openai
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

LIMIT_S = 300
ROUNDS = 3
MESSAGES = [{"role": "user", "content": "1+1="}]
ANSWER = {
    "id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": "policy",
    "choices": [{"index": 0, "finish_reason": "stop",
                 "message": {"role": "assistant", "content": "2"}}],
}  # fmt: skip


class Server:
    """Answers once as many have asked as there are agents."""

    def __init__(self, num_agents: int) -> None:
        self.num_agents, self.asked = num_agents, 0
        self.all_asked = asyncio.Event()

    async def chat(self, request: Request) -> JSONResponse:
        await request.body()
        self.asked, all_asked = self.asked + 1, self.all_asked
        if self.asked == self.num_agents:
            self.asked, self.all_asked = 0, asyncio.Event()
            all_asked.set()
        await all_asked.wait()
        return JSONResponse(ANSWER)


def serve(listener: socket.socket, num_agents: int) -> None:
    async def run() -> None:
        routes = [Route("/v1/chat/completions", Server(num_agents).chat, methods=["POST"])]
        config = uvicorn.Config(Starlette(routes=routes), log_level="error")
        await uvicorn.Server(config).serve([listener])

    asyncio.run(run())


async def measure(name: str, ask: Callable[[], Awaitable[object]], num_agents: int) -> None:
    costs = []
    for _ in range(1 + ROUNDS):
        before = time.process_time()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(ask() for _ in range(num_agents)))
        costs.append((time.process_time() - before) / num_agents * 1e3)
    print(f"{name:<45} {median(costs[1:]):6.2f} ms", flush=True)


async def measure_all(url: str, num_agents: int) -> None:
    async def by_openai(http_client: openai.DefaultAsyncHttpxClient | None = None) -> object:
        client = openai.AsyncOpenAI(
            base_url=url, api_key="-", http_client=http_client, max_retries=0
        )
        try:
            return await client.chat.completions.create(model="policy", messages=MESSAGES)
        finally:
            if http_client is None:
                await client.close()

    async def by_aiohttp() -> object:
        body = {"model": "policy", "messages": MESSAGES}
        async with session.post(f"{url}/chat/completions", json=body) as answer:
            return await answer.json()

    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        openai.DefaultAioHttpClient() as shared,
        openai.DefaultAsyncHttpxClient() as shared_httpx,
    ):
        await measure("aiohttp, one session", by_aiohttp, num_agents)
        await measure("openai, one DefaultAioHttpClient", lambda: by_openai(shared), num_agents)
        await measure(
            "openai, one DefaultAsyncHttpxClient", lambda: by_openai(shared_httpx), num_agents
        )
        await measure("openai, a client for each agent", by_openai, num_agents)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--agents", type=int, default=256)
    num_agents = parser.parse_args().agents
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    server = multiprocessing.Process(target=serve, args=(listener, num_agents), daemon=True)
    server.start()
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        asyncio.run(measure_all(url, num_agents))
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
