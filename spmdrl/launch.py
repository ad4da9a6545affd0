"""torchrun, with an exit code that says what to do next, and no more to read than the ranks say.

    python -m spmdrl.launch --nproc-per-node 8 -m spmdrl.ppo --config cfg.py

takes torchrun's options and does what it does; but torchrun exits with 1 whatever its ranks said,
and puts its own summary around it. This exits with the code of the rank that failed first: 1 a
failure that a restart may cure, 2 a mistake in the config or the data, 75 stopped by a signal after
a checkpoint: start it again. With --max-restarts, only failures are started again. On several nodes
it also finds the address under which the others reach this one, which host names often do not say,
and ends where another node's launcher has ended.
"""

from __future__ import annotations

import os
import sys

from spmdrl.distributed.env import without_garbage_collection
from spmdrl.distributed.output import keep_output
from spmdrl.distributed.progress import PROGRESS


def main(arguments: list[str] | None = None) -> int:
    keep_output()
    if os.environ.get("SLURM_PROCID", "0") == "0":  # Slurm starts one launcher on each node
        PROGRESS.line("spmdrl: starting the processes of the run")
    with without_garbage_collection():
        from spmdrl.distributed import launcher  # torch comes in here, which takes seconds

    return launcher.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
