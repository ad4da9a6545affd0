"""Gives the memory of a KV cache on a CPU back while its tensors stay, and takes it again."""

from __future__ import annotations

import torch
from torch import Tensor


def free_kv_cache(kv_caches: list[Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    """Gives the memory back to the system; returns what `restore_kv_cache` needs."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in kv_caches}
    sizes = [(storage, storage.nbytes()) for storage in storages.values()]
    for storage, _ in sizes:
        storage.resize_(0)
    return sizes


def restore_kv_cache(
    kv_caches: list[Tensor], sizes: list[tuple[torch.UntypedStorage, int]]
) -> None:
    """Memory of the old sizes, zeroed: what malloc hands out may read as NaN."""
    for storage, num_bytes in sizes:
        storage.resize_(num_bytes)
    for cache in kv_caches:
        cache.zero_()
