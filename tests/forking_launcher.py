"""python tests/forking_launcher.py -m spmdrl.launch ...: the launcher; its ranks are forks of it.

A node's launcher and its ranks then import torch and the trainer once, and not each on its own.
"""

import sys

from spmdrl.distributed.env import before_torch

before_torch()
import programs  # noqa: E402
import torch.distributed.run  # noqa: E402, F401
from torch.distributed.elastic.multiprocessing.subprocess_handler import (  # noqa: E402
    subprocess_handler,
)

import spmdrl.engines.fsdp.engine  # noqa: E402
import spmdrl.launch  # noqa: E402
import spmdrl.rollout.hf.engine  # noqa: E402
import spmdrl.training.rl  # noqa: E402

if __name__ == "__main__":
    assert sys.argv[1:3] == ["-m", "spmdrl.launch"], sys.argv
    subprocess_handler.Popen = programs.ForkedRank
    sys.exit(spmdrl.launch.main(sys.argv[3:]))
