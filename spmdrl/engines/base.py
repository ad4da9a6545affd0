"""The protocol of engines that train: what the step asks of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from spmdrl.checkpoint.format import Staged
from spmdrl.data.images import BatchImages
from spmdrl.distributed.topology import Topology
from spmdrl.engines.recorded_pass import RecordedPass
from spmdrl.types import Batch, PolicyStats
from spmdrl.weights.shards import Shards

# The seam between algorithms and engines: (logprobs, entropy, micro_batch) -> (loss, metric sums).
# logprobs and entropy are (num_tokens,) float32, 0 on tokens whose loss_mask is 0. The loss is a
# sum already weighted by micro_batch.loss_weights; each metric is a sum over unmasked tokens, or a
# maximum where its name ends in _max. For a critic: logprobs are the values, entropy is zeros.
# Where the batch has teacher_ids, the micro-batch has a policy's student_logprobs, with gradient.
LossFn = Callable[[Tensor, Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]


class TrainEngine(Protocol):
    """One model under training, or a frozen one, on the ranks of its topology.

    Every method is collective over these ranks. images: those of the prompts in the batch, where
    the run's data has any; None: the model is given text alone. An engine raises ConfigError for
    what no model of its library has: images, adapters, a moving average.
    """

    topology: Topology
    pretrained: list[Any]  # configs with save_pretrained, written beside the weights

    def logprobs(
        self, batch: Batch, temperature: float, pi_squared: bool = False,
        images: BatchImages | None = None, top_k: int = 0, teacher: bool = False,
    ) -> PolicyStats:  # fmt: skip
        """Log-probability and entropy of every unmasked token; sums of squares where wanted, or
        with top_k of 1 to 64 the most probable tokens, or with `teacher` the log-probabilities of
        the batch's teacher_ids.
        """
        ...

    def values(self, batch: Batch, images: BatchImages | None = None) -> Tensor:
        """(num_tokens,) float32 value of the state before every unmasked token, 0 elsewhere."""
        ...

    def record_pass(self, batch: Batch, rows: Tensor, temperature: float) -> RecordedPass:
        """Computes the log-probabilities of one sequence, the same on every rank, and returns what
        the model's modules computed. rows: (num_rows,) int64, ascending: the tokens whose results
        are kept. An engine whose modules cannot be read raises ConfigError.
        """
        ...

    def update(
        self, batch: Batch, loss_fn: LossFn, temperature: float, images: BatchImages | None = None
    ) -> dict[str, float]:
        """One optimizer step on the mini-batch that all ranks hold together.

        Returns loss, grad_norm (before clipping), lr, and the loss function's metrics as means over
        the mini-batch's unmasked tokens (maxima for names ending in _max). Where no rank has an
        unmasked token there is no update, and nothing is returned. Raises
        FloatingPointError on every rank where loss or gradient is not finite; weights and optimizer
        are then unchanged.
        """
        ...

    def named_shards(self, merged: bool = True) -> dict[str, Shards]:
        """Returns by Hugging Face name what this rank holds of every weight. Local.

        merged: with its adapter, where there is one; else the base's weights, and as
        `<layer>.lora_A.weight` and `<layer>.lora_B.weight` A and scale B. It stays valid, whatever
        `offload` and `onload` do to the tensors' memory. What an update has changed is all there
        after the next call of one of these two: weights may be gathered until then.
        """
        ...

    def named_weights(self, dtype: torch.dtype, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of every weight on every rank, one at a time.

        Takes the memory of one tensor and bucket_bytes. Collective until it is exhausted.
        """
        ...

    def named_average(self, dtype: torch.dtype, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """The moving average of the weights (config.ema), as named_weights gives the weights; those
        that are not trained are as they are.
        """
        ...

    def save_adapter(self, folder: Path) -> None:
        """Writes the adapters (config.lora) as peft has them."""
        ...

    def base(self) -> TrainEngine:
        """Returns the model without its adapters (config.lora): frozen, in the same memory."""
        ...

    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Starts from these: (Hugging Face name, full tensor) of all but a value head, adapters.

        Before the first update, of an engine that was built without weights. Raises ConfigError
        where one is missing.
        """
        ...

    def offload(self, keep_weights: bool = False) -> None:
        """Moves to the CPU what the config says may leave the device while the role is idle.

        keep_weights: all but the weights, which a push is to send.
        """
        ...

    def onload(self, weights_only: bool = False) -> None:
        """Takes it back; weights_only: what a push needs, not what an update does."""
        ...

    def stage(self) -> Staged:
        """Copies weights and optimizer into memory that is kept for the next time."""
        ...

    def save(self, folder: Path) -> None:
        """Writes weights and optimizer into the folder, which is there and empty.

        Without a copy. Failures are raised as Staged.write raises them.
        """
        ...

    def load(self, folder: Path) -> None:
        """Loads what `save` wrote, on as many ranks as there are, in whatever layout.

        Raises ConfigError where another kind of engine wrote it, or for another base's adapters.
        """
        ...
