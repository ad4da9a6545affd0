"""The sample of a step whose log-probabilities differ most between trainer and rollout engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spmdrl.algo.demonstrations import sampled_mask
from spmdrl.distributed.agreement import gather_to_all
from spmdrl.distributed.collectives import broadcast_object
from spmdrl.engines.base import TrainEngine
from spmdrl.training.roles import Trainer
from spmdrl.types import Batch

MOST_ROWS = 256  # tokens of which the modules' results are kept


@dataclass(frozen=True)
class WorstSample:
    """A sample, on every rank of the actor. Fields of `batch` are as the step has them."""

    batch: Batch  # of this sequence alone; old_logprobs: the trainer's
    difference: float  # the largest of a token's log-probability, nats

    @property
    def token_ids(self) -> list[int]:
        return self.batch.token_ids.tolist()

    @property
    def differences(self) -> Tensor:
        """(num_tokens,) float32 nats, -1 where masked."""
        return differences_of(self.batch)

    @property
    def worst_token(self) -> int:
        """The token's place in the sequence."""
        return int(self.differences.argmax())


def differences_of(batch: Batch) -> Tensor:
    """(num_tokens,) float32 nats: |trainer - engine|, -1 where masked, and on demonstrations. What
    is not a finite number counts as infinitely far.
    """
    assert batch.old_logprobs is not None
    found = (batch.old_logprobs - batch.rollout_logprobs).abs()
    found = found.nan_to_num(nan=torch.inf, posinf=torch.inf)
    return found.masked_fill(sampled_mask(batch) == 0, -1.0)


def with_trainer_logprobs(
    model: TrainEngine, batch: Batch, temperature: float, is_there: bool
) -> Batch:
    """Returns the batch with the trainer's log-probabilities as old_logprobs. is_there: the step
    has computed them. Collective.
    """
    if is_there:
        return batch
    return replace(batch, old_logprobs=model.logprobs(batch, temperature).logprobs)


def worst_sample(actor: Trainer, batches: list[Batch]) -> WorstSample | None:
    """Returns the sample with the largest difference of all ranks; of several the first rank's.
    None where no token is unmasked. batches: this rank's, with old_logprobs. Collective.
    """
    found, place = -1.0, (0, 0)
    for number, batch in enumerate(batches):
        differences = differences_of(batch)
        if batch.loss_mask.any():
            token = int(differences.argmax())
            if float(differences[token]) > found:
                seq = int(torch.searchsorted(batch.cu_seqlens, token, right=True)) - 1
                found, place = float(differences[token]), (number, seq)
    control = actor.topology.control
    everyone = gather_to_all(found, control)
    largest = max(everyone)
    if largest < 0:
        return None
    source = everyone.index(largest)
    own = None
    if actor.topology.rank == source:
        number, seq = place
        own = batches[number].select([seq])
    return WorstSample(broadcast_object(own, control, source), largest)


def rows_of_interest(sample: WorstSample, most: int = MOST_ROWS) -> Tensor:
    """Returns (num_rows,) int64, ascending: the places whose results are compared, in which the
    next token is known. All of a short sample; of a long one those before its worst tokens and
    others at even distances.
    """
    count = sample.batch.num_tokens - 1
    if count <= most:
        return torch.arange(count)
    worst = sample.differences[1:].topk(most // 2).indices
    even = torch.linspace(0, count - 1, most - most // 2).long()
    return torch.cat([worst, even]).unique()
