"""What the step asks of an engine that samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from spmdrl.weights.layout import Layout


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. temperature 0 is greedy; top_k 0 and top_p 1 mean off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Request:
    """One sequence to be continued; equal requests give equal tokens on any rank."""

    prompt_ids: list[int]
    seed: int  # 0 .. 2**63 - 1, made from the sample's address


@dataclass(frozen=True)
class Completion:
    """`logprobs` are of the distribution sampled from: after temperature, top-k and top-p."""

    token_ids: list[int]  # the stop token, if one ended it, is included
    logprobs: list[float]  # natural log, one per token
    finish_reason: str  # "stop" | "length"


class RolloutEngine(Protocol):
    """One engine per tensor-parallel group; every rank of the group makes the same calls."""

    def generate(self, requests: list[Request], params: SamplingParams) -> list[Completion]:
        """Completes every request, in the order given. Local to the tensor-parallel group."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces all weights: (Hugging Face name, full tensor). Forgets cached prefixes."""
        ...

    def layout(self, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
        """Which part of each weight this rank needs, and where in its parameters it belongs.

        shapes: of the full tensors, by Hugging Face name. Raises ValueError where they do not fit
        the model. Whoever writes to these places calls `finish_load` when all is written.
        """
        ...

    def load_opaque(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads full tensors that `layout` had no place for. `finish_load` is to follow."""
        ...

    def finish_load(self, running: bool = False) -> None:
        """Makes new weights take effect and forgets what was computed with the old ones.

        running: requests are in the engine and go on with what they have cached. The caller calls
        again without it once they have ended, before cached prefixes are to be shared.
        """
        ...

    def check_weights(self, weights: Iterator[tuple[str, Tensor]]) -> int:
        """Compares checksums of the engine's weights with those given.

        Returns the number of tensors compared; raises WeightMismatch naming the first that differs,
        or an engine parameter that no given tensor accounts for.
        """
        ...

    def sleep(self) -> None:
        """Gives back what memory it can (KV cache; on GPUs weights too)."""
        ...

    def wake(self) -> None:
        """Takes the memory again; weights must be loaded anew where `sleep` gave them back."""
        ...

    def shutdown(self) -> None:
        """Frees the engine without touching the process groups of the caller."""
        ...


class WeightMismatch(RuntimeError):
    """The engine's weights are not the trainer's."""
