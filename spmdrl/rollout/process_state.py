"""Takes back what importing an engine's library and building an engine changes in the process."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from spmdrl.rollout.rng import preserved_rng


@contextmanager
def preserved_process(library: str) -> Iterator[None]:
    """Puts back environment, random states, number of threads and precision afterwards.

    Meanwhile no garbage is collected, which is a third of the time otherwise. Where the library
    asks for it, it looks through what is made here alone. What the process has frozen stays so. The
    logger of `library` stays off: an error reaches us as an exception, which vLLM would precede
    with a dump of every request.
    """
    environment = dict(os.environ)
    num_threads = torch.get_num_threads()
    collecting = gc.isenabled()
    frozen = gc.get_freeze_count() > 0
    gc.disable()
    if not frozen:
        gc.freeze()
    logging.getLogger(library).setLevel(logging.CRITICAL)
    try:
        with preserved_rng(), preserved_precision(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.getLogger(library).setLevel(logging.CRITICAL)  # it has configured it meanwhile
        if not frozen:
            gc.unfreeze()
        if collecting:
            gc.enable()
        torch.set_num_threads(num_threads)
        os.environ.clear()
        os.environ.update(environment)


@contextmanager
def preserved_precision() -> Iterator[None]:
    """Puts back how exact products of float32 are. A program may have said so by the older of
    torch's settings, whose getter raises where it was by the newer ones.
    """
    torch_backends: Any = torch.backends
    backends = torch_backends.cuda.matmul, torch_backends.mkldnn.matmul
    newer = [backend.fp32_precision for backend in backends]
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = "highest"  # which it is by default
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(older)
        for backend, precision in zip(backends, newer, strict=True):
            backend.fp32_precision = precision


@contextmanager
def frozen_as_before() -> Iterator[None]:
    """Meanwhile gc.freeze and gc.unfreeze do nothing. vLLM freezes an engine that it has started,
    and when it ends one it makes the collector look through half a million imported objects again,
    half a second each time.
    """
    functions = gc.freeze, gc.unfreeze
    gc.freeze = gc.unfreeze = lambda: None
    try:
        yield
    finally:
        gc.freeze, gc.unfreeze = functions
