"""megatron-core on CPUs and gloo, for tests and small runs. Does nothing where CUDA exists.

    mcore_cpu.install()            # before the first `import megatron.core`
    with mcore_cpu.scope(): ...    # around everything that runs megatron code

megatron-core asks torch.cuda for its device and writes device="cuda" in places. `install` gives the
modules that write it a `torch` of their own, whose tensor constructors read "cuda" as "cpu";
`scope` answers for torch.cuda and for Tensor.cuda, .type and .pin_memory, and takes that back at
its end. No tensor operation is intercepted, so the hot path costs what it costs without us.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.engines.megatron import patches as mcore_fixes

CPU = torch.device("cpu")
CUDA_TYPES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}
WRITE_CUDA = (  # modules under megatron.core that name "cuda" as a device, or pin memory
    "dist_checkpointing.exchange_utils",
    "dist_checkpointing.strategies.state_dict_saver",
    "distributed.param_and_grad_buffer",
    "models.common.embeddings.rope_utils",
    "optimizer.clip_grads",
    "optimizer.distrib_optimizer",
    "optimizer.grad_scaler",
    "optimizer.optimizer",
    "pipeline_parallel.schedules",
    "rerun_state_machine",
    "tensor_parallel.data",
    "transformer.moe.moe_utils",
    "transformer.utils",
    "utils",
)
CONSTRUCTORS = ("arange", "empty", "empty_like", "ones", "tensor", "zeros")

_installed = False
_depth = 0
_patches = ExitStack()


def install() -> bool:
    """Patches megatron.* modules once; True where there is no CUDA and they are patched.

    Raises RuntimeError where megatron.core was imported before, but for a program in which it is
    at work already.
    """
    global _installed
    if torch.cuda.is_available():
        return False
    if _installed:
        return True
    if "megatron.core" in sys.modules:
        if _import("parallel_state").model_parallel_is_initialized():
            return False  # in a program that made megatron-core run here itself
        raise RuntimeError("without CUDA, mcore_cpu.install() must precede `import megatron.core`")
    with mock.patch.object(torch, "compile", _not_compiled):
        _import("jit")  # binds torch.compile
    cpu_torch = _CpuTorch(torch)
    for name in WRITE_CUDA:
        module: Any = _import(name)
        module.torch = cpu_torch
    _patch_random(_import("tensor_parallel.random"))
    dispatcher: Any = _import("transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = _as_host_value
    _patch_uneven_collectives(_import("tensor_parallel.mappings"))
    layer_wise: Any = _import("optimizer.layer_wise_optimizer").LayerWiseDistributedOptimizer
    layer_wise.allgather_params = layer_wise.broadcast_params  # gloo gathers equal sizes only
    mcore_fixes.install()
    _installed = True
    return True


@contextmanager
def scope() -> Iterator[None]:
    """Inside it torch.cuda answers for the CPU, in this whole process. May be nested."""
    global _depth, _patches
    if torch.cuda.is_available():
        yield
        return
    _depth += 1
    if _depth == 1:
        _patches = ExitStack()
        _patches.enter_context(mock.patch.multiple(torch.cuda, **_TORCH_CUDA))
        _patches.enter_context(mock.patch.multiple(torch.Tensor, **_TENSOR))
    try:
        yield
    finally:
        _depth -= 1
        if _depth == 0:
            _patches.close()


@contextmanager
def without_memory() -> Iterator[None]:
    """Within `scope`: models that are built meanwhile have shapes alone, on the device "meta"."""
    meta = torch.device("meta")
    with mock.patch.object(torch.cuda, "current_device", return_value=meta), meta:
        yield


class _Stream:
    """A stream or event where there is only one. A class, for others annotate with it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        return lambda *args, **kwargs: self  # wait_stream, record_event, synchronize, ...


_THE_STREAM = _Stream()
_TENSOR_TYPE = torch.Tensor.type


def _type(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The optimizer compares type() with names of CUDA types."""
    if args or kwargs:
        return _TENSOR_TYPE(tensor, *args, **kwargs)
    return CUDA_TYPES.get(tensor.dtype) or _TENSOR_TYPE(tensor)


_TORCH_CUDA: dict[str, Any] = {
    "current_device": lambda: CPU,
    "synchronize": lambda *args, **kwargs: None,
    "current_stream": lambda *args: _THE_STREAM,
    "Stream": _Stream,
    "manual_seed": torch.manual_seed,
    "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
}
_TENSOR: dict[str, Any] = {
    "cuda": lambda tensor, *args, **kwargs: tensor,
    "pin_memory": lambda tensor, *args: tensor.clone(),  # a copy: the original may be emptied
    "type": _type,
}


class _CpuTorch(ModuleType):
    """torch, except that its constructors read the device "cuda" as "cpu" and pin nothing."""

    def __init__(self, real: ModuleType) -> None:
        super().__init__("torch")
        for name in CONSTRUCTORS:
            setattr(self, name, _on_cpu(getattr(real, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(constructor: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def construct(*args: Any, **kwargs: Any) -> Tensor:
        if "device" in kwargs and torch.device(kwargs["device"] or CPU).type == "cuda":
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return constructor(*args, **kwargs)

    return construct


def _import(name: str) -> ModuleType:
    return importlib.import_module(f"megatron.core.{name}")


def _not_compiled(function: Callable | None = None, *args: Any, **kwargs: Any) -> Any:
    return function if function is not None else lambda f: f


def _patch_random(module: Any) -> None:
    module._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    logging.getLogger(module.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _as_host_value(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _patch_uneven_collectives(mappings: Any) -> None:
    """Expert tensor parallelism gathers and scatters uneven parts, which gloo cannot."""
    even_gather = mappings._gather_along_first_dim
    even_scatter = mappings._reduce_scatter_along_first_dim

    def gather(
        rows: Tensor, group: dist.ProcessGroup, output_split_sizes: Any = None,
        use_global_buffer: bool = False,
    ) -> Tensor:  # fmt: skip
        if output_split_sizes is None or group.size() == 1:
            return even_gather(rows, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        out = rows.new_empty(sum(sizes), *rows.shape[1:])
        sent = torch.cat([rows] * group.size())
        dist.all_to_all_single(out, sent, sizes, [len(rows)] * group.size(), group=group)
        return out

    def scatter(
        rows: Tensor, group: dist.ProcessGroup, input_split_sizes: Any = None,
        use_global_buffer: bool = False,
    ) -> Tensor:  # fmt: skip
        if input_split_sizes is None or group.size() == 1:
            return even_scatter(rows, group, input_split_sizes, use_global_buffer)
        sizes = [int(size) for size in input_split_sizes]
        mine = sizes[group.rank()]
        out = rows.new_empty(mine * group.size(), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), [mine] * group.size(), sizes, group=group)
        return out.view(group.size(), mine, *rows.shape[1:]).sum(0)

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = scatter
