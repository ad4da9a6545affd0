"""torchrun, with an exit code that says what to do next.

    python -m spmdrl.launch --nproc-per-node 8 -m spmdrl.ppo --config cfg.py

takes torchrun's options and does what it does; but torchrun exits with 1 whatever its ranks said.
This exits with the code of the rank that failed first: 1 a failure that a restart may cure, 2 a
mistake in the config or the data, 75 stopped by a signal after a checkpoint: start it again. With
--max-restarts, only failures are started again.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main as torchrun

from spmdrl.exits import BAD_CONFIG, FAILED, INTERRUPTED, REQUEUE

FINAL = (BAD_CONFIG, REQUEUE, INTERRUPTED)
os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # else restarts meet old addresses
watch_ranks = LocalElasticAgent._monitor_workers


def watch_and_give_up(agent: Any, group: Any) -> Any:
    """What torchrun's agent sees of its ranks; what no restart cures takes the restarts away."""
    seen = watch_ranks(agent, group)
    if exit_code_of(seen.failures) in FINAL:
        agent._remaining_restarts = 0
    return seen


def exit_code_of(failures: Mapping[int, ProcessFailure]) -> int:
    """Of the rank that failed first: the others are ended with it."""
    if not failures:
        return 0
    first = min(failures.values(), key=lambda failure: failure.timestamp)
    return first.exitcode if first.exitcode in FINAL else FAILED


def main(arguments: list[str] | None = None) -> int:
    LocalElasticAgent._monitor_workers = watch_and_give_up  # type: ignore[method-assign]
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        return exit_code_of(error.failures)
    except SignalException as error:  # the ranks were told, and had time to end
        return INTERRUPTED if error.sigval == signal.SIGINT else REQUEUE
    return 0


if __name__ == "__main__":
    sys.exit(main())
