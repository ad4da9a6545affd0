"""The add2 workload by an agent, which asks for each answer at the endpoint of its engine.

`python examples/add2/bench.py --workload add2,agent` says what that costs. The client is aiohttp,
whose time for a request does not grow with the number of those under way, as that of httpx does.
"""

import functools
from dataclasses import replace

from config import config as plain
from config import leading_number

from spmdrl.config import AgentConfig


@functools.cache
def session():
    """Returns what all agents of the process send their requests by."""
    import aiohttp

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(600)
    )


async def ask(messages, ground_truth, base_url, api_key, model):
    """Asks once, and scores the answer."""
    async with session().post(
        f"{base_url}/chat/completions",
        headers={"authorization": f"Bearer {api_key}"},
        json={"model": model, "messages": messages},
        raise_for_status=True,
    ) as reply:
        said = (await reply.json())["choices"][0]["message"]["content"]
    return leading_number(said or "", ground_truth)


config = replace(plain, agent=ask, agents=AgentConfig(timeout_s=300), reward="agent")
