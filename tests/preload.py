"""What the processes that tests fork have imported: some ten seconds for a vLLM rank.

Of a program itself nothing has run. A module that is missed here is imported by each. Garbage
collection leaves out all that is imported here: a full one would cost a rank half a second.
"""

# ruff: noqa: E402, F401
import gc
import itertools
import multiprocessing
import sys
import tempfile
from importlib.util import find_spec

gc.disable()
sys.dont_write_bytecode = False  # see conftest.py

from spmdrl.distributed.env import before_torch

before_torch()
from spmdrl.engines.megatron import cpu_shim as mcore_cpu

mcore_cpu.install()
import fire
import matplotlib.backends.backend_agg
import matplotlib.figure
import megatron.core.models.gpt
import peft
import PIL.Image
import pyarrow.compute
import pytest
import torch
import torch.distributed.checkpoint.state_dict
import torch.distributed.run
import transformers
import transformers.models.qwen3.modeling_qwen3
from megatron.core.dist_checkpointing.strategies import filesystem_async
from spmdrl_kernels import scan
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import spmdrl.cli.help
import spmdrl.distributed.output
import spmdrl.engines.fsdp.engine
import spmdrl.engines.megatron.engine
import spmdrl.rollout.hf.engine
import spmdrl.training.rl
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.training.checks.packing import check_packing
from tests.tiny_models import QWEN3

if find_spec("vllm") is not None:  # it is not in SGLang's environment
    import vllm.engine.arg_utils
    import vllm.v1.core.sched.scheduler
    import vllm.v1.engine.core
    from vllm.platforms import current_platform

    import spmdrl.rollout.vllm.engine

    if current_platform.is_cpu():  # on a GPU its modules may ask CUDA, after which nothing forks
        import compressed_tensors
        import vllm.logger
        import vllm.model_executor.layers.quantization.online
        import vllm.model_executor.models.qwen3
        import vllm.model_executor.models.transformers
        import vllm.plugins.lora_resolvers
        import vllm.v1.attention.backends.cpu_attn
        import vllm.v1.worker.cpu_worker
        from vllm.config.logging import LoggingConfig
        from vllm.model_executor.layers.vocab_parallel_embedding import (
            get_masked_input_and_mask as mask_other_ranks_tokens,
        )

        from spmdrl.rollout.vllm.images import import_without_torchvision

        import_without_torchvision()
        # two steps of every engine's start that look through all modules and all loggers, half a
        # second each time; the second is left out by vLLM itself where nothing has changed
        current_platform.register_triton_kernel_overrides()
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
        vllm.logger.configure_logging(LoggingConfig())

        gc.freeze()  # dynamo collects garbage before it compiles
        # what two tensor-parallel ranks compile at their first tokens, a second of a CPU each
        for start, tokens in itertools.product((0, 64), (2, 1)):
            ids = torch.zeros(tokens, dtype=torch.int32)
            with torch.inference_mode():
                mask_other_ranks_tokens(ids, start, start + 64, 0, 128, 128)


def queue_of_a_fork():
    """What filesystem_async._get_write_results_queue returns. The process of that queue is forked
    here. Megatron spawns it, so that the first save of each rank imports the whole program again:
    ten seconds of a CPU."""
    if filesystem_async._results_queue is None:
        manager = multiprocessing.get_context("fork").Manager()
        filesystem_async._results_queue = manager.Queue()
    return filesystem_async._results_queue


filesystem_async._get_write_results_queue = queue_of_a_fork
PIL.Image.preinit()
get_checkpoint_conversion_mapping("qwen3")  # makes the patterns of all models, and keeps them

# the loops over packed sequences, which every process compiles: two seconds for the three, for the
# dtypes that estimators have: rewards are float64
ones, sums, ends = torch.ones(2), torch.ones(2).double(), torch.tensor([0, 2])
scan.gae(sums, ones, ones, ends, 1.0, sums[:1])
scan.returns_to_go(sums, ones, ends, 1.0)
scan.running_sum(sums, ones, ends)

# the trial of packed sequences that each rank makes of its model: most tests have this model. It
# takes a fifth of a second, and a process knows what it has tried.
with tempfile.TemporaryDirectory() as folder:
    made = {"architectures": ["Qwen3ForCausalLM"], "dtype": "float32"}  # as of a saved model
    transformers.Qwen3Config(**QWEN3, **made).save_pretrained(folder)
    check_packing(load_hf_config(folder))

gc.collect()
gc.freeze()
gc.enable()
