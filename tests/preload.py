"""What the processes that tests fork have imported: some ten seconds for a vLLM rank.

Of a program itself nothing has run. A module that is missed here is imported by each.
"""

# ruff: noqa: E402, F401
from spmdrl.imports import before_torch

before_torch()
from spmdrl.engines import mcore_cpu

mcore_cpu.install()
import megatron.core.models.gpt
import torch.distributed.run
import vllm.v1.engine.core

import spmdrl.engines.megatron
import spmdrl.rollout.vllm
import spmdrl.trainer
