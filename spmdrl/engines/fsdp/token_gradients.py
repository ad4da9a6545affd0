"""The gradient that single tokens of a sequence add to that of an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.data.images import BatchImages
from spmdrl.distributed.agreement import gather_to_all
from spmdrl.distributed.progress import PROGRESS
from spmdrl.engines.base import LossFn
from spmdrl.engines.fsdp.sharding import all_passes
from spmdrl.types import Batch
from spmdrl.weights.shards import local

if TYPE_CHECKING:
    from spmdrl.engines.fsdp.engine import FsdpEngine


@dataclass(frozen=True)
class TokenGradients:
    """Holds what tokens of a sequence add to the gradient of an update, before it is clipped."""

    positions: list[int]  # of the tokens in the sequence: those whose loss_mask is 1
    norms: list[float]  # |g_t|, with g_t the gradient of the loss through token t alone
    shares: list[float]  # g_t . g / |g|: those of all tokens of the update add up to |g|
    whole: float  # |g|, with g the gradient of the update


def token_gradients(
    engine: FsdpEngine, batch: Batch, seq: int | None, loss_fn: LossFn, temperature: float,
    images: BatchImages | None = None, still_going: Callable[[], None] = lambda: None,
) -> TokenGradients | None:  # fmt: skip
    """Computes the gradient of the mini-batch, and that of each token of one of its sequences.

    Takes a forward and a backward pass of the sequence alone for each token, and the memory of one
    more gradient. batch: this rank's part of the mini-batch; seq: the sequence's number in it, None
    on ranks that have it not. still_going: called behind each token, which may take seconds.
    Returns None where none has it, or no token of it is trained on. The weights stay as they are.
    The load-balancing loss of routers is left out: it is of no single token. Collective over the
    engine's ranks.
    """
    positions, own = own_tokens(batch, seq)
    # those of the rank that has any, on all ranks
    positions = list(chain(*gather_to_all(positions, engine.topology.control)))
    if not positions:
        return None
    whole = gradient_of(engine, batch, loss_fn, temperature, images)
    products = [(dot(whole, whole), 0.0)]
    for position in PROGRESS.each(positions, "tokens"):
        through_one = only_through(loss_fn, position)
        found = gradient_of(engine, own, through_one, temperature, images)
        products.append((dot(found, found), dot(found, whole)))
        still_going()
    totals = torch.tensor(products, dtype=torch.float64, device=engine.topology.device)
    dist.all_reduce(totals, group=engine.topology.copies.get_group("fsdp"))
    norm = float(totals[0, 0].sqrt())
    shares = totals[1:, 1] / norm if norm else torch.zeros_like(totals[1:, 1])
    return TokenGradients(positions, totals[1:, 0].sqrt().tolist(), shares.tolist(), norm)


def own_tokens(batch: Batch, seq: int | None) -> tuple[list[int], Batch]:
    """(positions of the sequence's unmasked tokens, the sequence as a batch); where seq is None no
    position, and a batch without sequences.
    """
    if seq is None:
        return [], batch.select([])
    own = batch.select([seq])
    return (own.loss_mask > 0).nonzero()[:, 0].tolist(), own


def gradient_of(
    engine: FsdpEngine, batch: Batch, loss_fn: LossFn, temperature: float,
    images: BatchImages | None,
) -> list[Tensor | None]:  # fmt: skip
    """Returns this rank's shards of the gradient by parameter, in memory of their own."""
    assert engine.optimizer is not None, "a frozen engine has no gradients"
    engine.optimizer.zero_grad()
    parts = engine.micro_batches(batch)
    with all_passes(engine.module, engine.gathers_once):
        engine.backward(parts, loss_fn, temperature, images)
    found = [None if p.grad is None else local(p.grad).detach().clone() for p in engine.params]
    engine.optimizer.zero_grad()
    return found


def dot(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> float:
    """Returns the inner product of two gradients' shards."""
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return float(sum((a.float() * b.float()).sum(dtype=torch.float64) for a, b in pairs))


def only_through(loss_fn: LossFn, position: int) -> LossFn:
    """Returns the loss function of a micro-batch of one sequence, whose value is the same, and
    whose gradient goes through what the model says of the token at `position` alone.

    In the micro-batch of another rank, a stand-in whose tokens are masked, it goes through none.
    """

    def through_one(
        logprobs: Tensor, entropy: Tensor, mb: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        places = torch.arange(len(logprobs), device=logprobs.device)
        chosen = ((places == position) & (mb.loss_mask > 0)).float()
        if mb.student_logprobs is not None:
            mb = replace(mb, student_logprobs=passed(mb.student_logprobs, chosen[:, None]))
        return loss_fn(passed(logprobs, chosen), passed(entropy, chosen), mb)

    return through_one


def passed(values: Tensor, chosen: Tensor) -> Tensor:
    """Returns the same values, with the gradient of those that are chosen."""
    return values.detach() + chosen * (values - values.detach())
