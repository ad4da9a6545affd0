"""The private APIs of torch.distributed.elastic (torchrun) that the launcher uses.

Checked with torch 2.13.0. When torch moves, tests/distributed/test_elastic_compat.py says
which of these broke.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import api as rendezvous_api
from torch.distributed.elastic.rendezvous.utils import (
    _parse_rendezvous_config,
    parse_rendezvous_endpoint,
)
from torch.distributed.run import parse_args, parse_min_max_nnodes

_monitor_workers = LocalElasticAgent._monitor_workers  # torchrun's own, before it is replaced


def observe_ranks(agent: Any, group: Any) -> Any:
    """Returns what torchrun's agent sees of its ranks: a RunResult. Calls the original
    LocalElasticAgent._monitor_workers.
    """
    return _monitor_workers(agent, group)


def replace_monitor(monitor: Callable[[Any, Any], Any]) -> None:
    """Has every agent ask monitor(agent, group) how its ranks are, ten times a second. Replaces
    LocalElasticAgent._monitor_workers.
    """
    agent: Any = LocalElasticAgent
    agent._monitor_workers = lambda *args: monitor(*args)


def forbid_restarts(agent: Any) -> None:
    """Makes the agent end the job at the next failure. Writes its _remaining_restarts."""
    agent._remaining_restarts = 0


def rank_processes(agent: Any) -> list[Any]:
    """Returns the subprocess.Popen of each rank that this agent has started; none before it has.
    Reads the agent's _pcontext, a SubprocessContext, and its subprocess_handlers.
    """
    context = agent._pcontext
    return [] if context is None else [rank.proc for rank in context.subprocess_handlers.values()]


def rank_pids(agent: Any) -> list[int]:
    """Returns the process ids of the ranks that this agent has started; none before it has. Reads
    the agent's _pcontext.
    """
    return list(agent._pcontext.pids().values()) if agent._pcontext else []


def replace_free_port(choose: Callable[[], int]) -> None:
    """Has torchrun ask `choose` for the port of the job's store. Replaces get_free_port in
    elastic.rendezvous.api.
    """
    rendezvous_api.get_free_port = choose


def parse_rendezvous_config(text: str) -> dict[str, str]:
    """Reads torchrun's --rdzv-conf: "a=1,b=2" -> {"a": "1", "b": "2"}. Calls
    elastic.rendezvous.utils._parse_rendezvous_config.
    """
    return _parse_rendezvous_config(text)


def parse_endpoint(text: str, default_port: int) -> tuple[str, int]:
    """Reads torchrun's --rdzv-endpoint: "host:29400" -> (host, port). Calls
    elastic.rendezvous.utils.parse_rendezvous_endpoint.
    """
    return parse_rendezvous_endpoint(text, default_port)


def parse_options(arguments: list[str]) -> Any:
    """Reads torchrun's command line into a namespace. Calls torch.distributed.run.parse_args."""
    return parse_args(arguments)


def parse_num_nodes(text: str) -> tuple[int, int]:
    """Reads torchrun's --nnodes, "2" or "1:4", into the fewest and the most. Calls
    torch.distributed.run.parse_min_max_nnodes.
    """
    return parse_min_max_nnodes(text)
