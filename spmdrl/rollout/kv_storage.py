"""Gives the memory of an engine's tensors back while the tensors stay, and takes it again."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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


@torch.no_grad()
def move_to_host(model: nn.Module) -> list[tuple[torch.UntypedStorage, Tensor]]:
    """Copies what parameters and buffers hold to the host and gives their memory back; returns what
    `move_back` needs.
    """
    tensors = [*model.parameters(), *model.buffers()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.numel()}
    moved = []
    for storage in storages.values():
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        on_gpu = storage.device.type != "cpu"
        copy = torch.empty(len(whole), dtype=torch.uint8, pin_memory=on_gpu)
        copy.copy_(whole)
        storage.resize_(0)
        moved.append((storage, copy))
    return moved


@torch.no_grad()
def move_back(moved: list[tuple[torch.UntypedStorage, Tensor]]) -> None:
    """Puts the weights of `move_to_host` where new memory is; their tensors are what they were."""
    for storage, copy in moved:
        storage.resize_(len(copy))
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(copy)
