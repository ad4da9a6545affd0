"""The add2 workload by an agent, which asks for each answer at the endpoint of its engine.

`python examples/add2/bench.py --workload add2,agent` says what that costs. The client is httpx, so
that the time is the endpoint's and not that of a client's types.
"""

import functools
from dataclasses import replace

from config import config as plain
from config import leading_number

from spmdrl.config import AgentConfig


@functools.cache
def connections():
    """Returns what all agents of the process send their requests by."""
    import httpx

    return httpx.AsyncClient(limits=httpx.Limits(max_connections=256), timeout=600)


async def ask(messages, ground_truth, base_url, api_key, model):
    """Asks once, and scores the answer."""
    reply = await connections().post(
        f"{base_url}/chat/completions",
        headers={"authorization": f"Bearer {api_key}"},
        json={"model": model, "messages": messages},
    )
    reply.raise_for_status()
    said = reply.json()["choices"][0]["message"]["content"]
    return leading_number(said or "", ground_truth)


config = replace(plain, agent=ask, agents=AgentConfig(timeout_s=300), reward="agent")
