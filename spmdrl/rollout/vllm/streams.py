"""Keeps the CUDA stream on which an engine of vLLM works apart from that of its rank.

Where an engine has several tensor-parallel ranks vLLM makes a stream and leaves it the current one
of the thread, for good (current_stream in vllm/utils/torch_utils.py). Two things would then depend
on who was first:

- megatron-core's DistributedDataParallel with several instances of the distributed optimizer waits
  for torch.cuda.default_stream() before it sums gradients, and has that stream wait for the sums
  (param_and_grad_buffer.py). With another current stream it would sum gradients that are not
  complete, and the optimizer would step with sums that are not.
- vLLM's second model runner keeps the stream of its first step and has the copies of sampled tokens
  wait for that one alone (main_stream). A program that calls a step from a stream of its own would
  read tokens that are not there yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class EngineStream:
    """The stream of one engine: the one that vLLM left current when it returned from a call."""

    def __init__(self) -> None:
        self.on_gpu = torch.cuda.is_available()
        self.stream: torch.cuda.Stream | None = None  # None: vLLM was not called yet

    @contextmanager
    def current(self) -> Iterator[None]:
        """Meanwhile the engine's stream is the current one, and afterwards the caller's is again.

        Whichever comes next waits for what the other was given. On a CPU nothing happens.
        """
        if not self.on_gpu:
            yield
            return
        callers = torch.cuda.current_stream()
        switch(callers, self.stream or callers)
        try:
            yield
        finally:
            self.stream = torch.cuda.current_stream()
            switch(self.stream, callers)


def switch(source: torch.cuda.Stream, target: torch.cuda.Stream) -> None:
    """Makes `target` the current stream in place of `source`, behind what `source` was given."""
    if source != target:
        target.wait_stream(source)
        torch.cuda.set_stream(target)  # vLLM's own, which remembers it, once vLLM is imported
