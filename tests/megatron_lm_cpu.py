"""Runs a program of Megatron-LM on CPUs and gloo, unchanged: python megatron_lm_cpu.py PROGRAM ARGS

PROGRAM is a file with a function main().

megatron.training asks for CUDA in more places than megatron.core, which mcore_cpu answers for.
"""

import importlib.util
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

from spmdrl.engines.megatron import cpu_shim as mcore_cpu

mcore_cpu.install()

import torch  # noqa: E402

# imported by its tokenizers, and not among our dependencies
sys.modules.setdefault("six", SimpleNamespace(PY2=False, PY3=True))  # type: ignore[arg-type]

CUDA = {
    "is_available": lambda: True, "device_count": lambda: 1,
    "set_device": lambda _: None, "empty_cache": lambda: None,
    "memory_allocated": lambda *_: 0, "max_memory_allocated": lambda *_: 0,
    "memory_reserved": lambda *_: 0, "max_memory_reserved": lambda *_: 0,
    "device_memory_used": lambda *_: 0, "memory_stats": lambda *_: {},
    "stream": lambda _: nullcontext(), "set_rng_state": torch.set_rng_state,
    "get_device_properties": lambda *_: SimpleNamespace(major=8, multi_processor_count=1),
    "get_device_capability": lambda *_: (8, 0),
    "reset_peak_memory_stats": lambda *_: None,
}  # fmt: skip


class Cuda:
    """torch.cuda with some answers of our own; for megatron.training's modules alone."""

    def __getattr__(self, name):
        return CUDA[name] if name in CUDA else getattr(torch.cuda, name)


class Torch(mcore_cpu._CpuTorch):
    cuda = Cuda()


def imported(path):
    """The program as a module: processes that Megatron starts import this file, and not that."""
    spec = importlib.util.spec_from_file_location("program", path)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def main():
    sys.argv = sys.argv[1:]
    with mcore_cpu.scope():
        import megatron.training.arguments
        import megatron.training.checkpointing
        import megatron.training.initialize
        import megatron.training.training
        import megatron.training.utils

        own = Torch(torch)
        for name in ("arguments", "checkpointing", "initialize", "training", "utils"):
            module = getattr(megatron.training, name)
            module.torch = own
        with (
            mock.patch.object(megatron.training.initialize, "_compile_dependencies"),
            mock.patch.object(megatron.training.training, "set_jit_fusion_options"),
        ):
            imported(sys.argv[0]).main()


if __name__ == "__main__":
    main()
