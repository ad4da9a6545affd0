"""What vLLM needs on a CPU and not on a GPU. Nothing here is called where the device is CUDA.

Changes to vLLM are made around one construction and taken back, or on one object of one engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@contextmanager
def patched_construction() -> Iterator[None]:
    """While an engine is built: linear layers keep their weight and multiply with it.

    vLLM would repack each weight for its GEMM and free the original. An update in place then has
    nothing to write to, and a tied lm_head goes on using the packed copy of the old embedding.
    The worker binds the process's memory to one NUMA node: not so, the trainer lives in it too.
    And it replaces `torch.set_num_threads` by a no-op: taken back.
    """
    import vllm.v1.worker.cpu_worker  # noqa: F401  loads the library behind torch.ops._C
    from vllm.model_executor.layers import utils

    pack, set_num_threads = utils.dispatch_cpu_unquantized_gemm, torch.set_num_threads
    bind_memory = torch.ops._C.init_cpu_memory_env

    def keep(layer: nn.Module, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.is_meta or weight.ndim != 2:
            pack(layer, remove_weight)
        else:
            layer.cpu_linear = F.linear

    utils.dispatch_cpu_unquantized_gemm = keep
    torch.ops._C.init_cpu_memory_env = lambda nodes: None
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = pack
        torch.ops._C.init_cpu_memory_env = bind_memory
        torch.set_num_threads = set_num_threads


def repack_experts(model: nn.Module) -> None:
    """Mixture-of-experts layers compute from a packed copy that only the first load makes."""
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)


def free_kv_cache(kv_caches: list[Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    """Gives the memory back to the system; returns what `restore_kv_cache` needs."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in kv_caches}
    sizes = [(storage, storage.nbytes()) for storage in storages.values()]
    for storage, _ in sizes:
        storage.resize_(0)
    return sizes


def restore_kv_cache(sizes: list[tuple[torch.UntypedStorage, int]]) -> None:
    """Memory of the old sizes, zeroed: what malloc hands out may read as NaN."""
    for storage, num_bytes in sizes:
        storage.resize_(num_bytes)
        storage.fill_(0)
