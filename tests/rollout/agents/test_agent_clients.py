"""examples/bench/agent_clients.py measures what docs/agents.md says of clients."""

import re
import subprocess
import sys

import pytest
from programs import ROOT


@pytest.mark.clock
def test_a_client_for_each_agent_costs_most_and_a_session_of_aiohttp_least():
    command = [sys.executable, str(ROOT / "examples/bench/agent_clients.py"), "--agents", "16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    costs = [float(cost) for cost in re.findall(r"([\d.]+) ms$", done.stdout, re.M)]
    session, shared, shared_httpx, own = costs
    assert session < shared < own and shared_httpx < own, done.stdout
