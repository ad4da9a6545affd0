"""Prepares a program's process before it imports torch and transformers.

torchao has our 8-bit optimizer and FP8 layers, bitsandbytes quantises the base of adapters.
transformers, peft and vLLM import them wherever they are installed, for quantised models: a second
for each rank, and lines about libraries that do not load.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from spmdrl.distributed.limits import warn_of_limits, warn_of_locked_memory

MODULES: dict[str, Any] = sys.modules

# oneDNN keeps the code of a product for each shape, 0.3 MiB, and ideep, which torch calls it
# through, keeps its own: 1024 each. Packed batches bring new shapes in every step. oneDNN's own
# saves the half a millisecond that it takes to make one; ideep's saves nothing beside it.
PRODUCTS_KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "16"}


def before_torch() -> None:
    """Prepares the environment; for programs, before their first import of torch."""
    warn_of_limits()
    if has_several_hosts():
        warn_of_locked_memory()
    for name in ("torchao", "bitsandbytes"):  # they look as if they were not installed
        MODULES.setdefault(name, None)
    # a rank that ends takes a store along, of which every other's torch shows a C++ stack
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name, value in PRODUCTS_KEPT.items():
        os.environ.setdefault(name, value)
    keep_kernels_on_this_host()


def has_several_hosts() -> bool:
    """Whether a launcher says that ranks of the job are on other hosts."""
    world = os.environ.get("WORLD_SIZE", "1")
    return os.environ.get("LOCAL_WORLD_SIZE", world) != world


def keep_kernels_on_this_host() -> None:
    """Has Triton keep its kernels in the folder for temporary files where the job has several hosts
    or the home cannot be written. Hosts share a home, and all ranks compile the same kernels at the
    same time: some read a file that another host replaces ("Stale file handle",
    triton-lang/triton#11512). Does nothing where the user has chosen a place.
    """
    at_home = not has_several_hosts() and os.access(os.path.expanduser("~"), os.W_OK)
    if not at_home and "TRITON_HOME" not in os.environ:
        cache = os.path.join(tempfile.gettempdir(), f"spmdrl_triton_{os.getuid()}")
        os.environ.setdefault("TRITON_CACHE_DIR", cache)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Imports what stands in its body faster: the collector looks through half a million new
    objects several times, a fifth of the time that torch and transformers take, and finds next to
    nothing. Later collections leave out all that is there at the end.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def show_package(module: str) -> None:
    """A module of such a package is imported, where it is installed, without what it logs:
    libraries of other GPUs and of other Pythons that it cannot load, and deprecations between it
    and torch.
    """
    package = module.partition(".")[0]
    if package in MODULES and MODULES[package] is None:
        del MODULES[package]
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with suppress(ModuleNotFoundError):
            importlib.import_module(module)
    finally:
        logging.disable(before)
