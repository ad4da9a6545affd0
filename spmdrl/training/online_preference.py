"""Online preference optimisation: pairs of a step's own samples, and the gradient of their loss.

The best and the worst answer to a prompt are a pair; with algo.pairs="demonstration" the answer
that its row has and a sampled one are (SPIN, Chen et al. 2024, arXiv 2401.01335). Only these two
are sent to the ranks that train. They may lie on different ranks and in different micro-batches:
before each update the derivative of the loss by the log-probability of each answer is computed on
all ranks alike, and given to the answer's tokens as their advantage.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.algo.demonstrations import are_demonstrations
from spmdrl.algo.losses import loss_of
from spmdrl.algo.options import given_options
from spmdrl.algo.preference_losses import Pairs
from spmdrl.algo.preference_terms import pair_gradients, summed
from spmdrl.algo.selection import best_and_worst_of_groups
from spmdrl.config import PpoConfig
from spmdrl.data.packing import address_order
from spmdrl.distributed.collectives import all_gather_rows
from spmdrl.distributed.topology import Topology
from spmdrl.segments import segment_expand
from spmdrl.types import Batch, Sample


def keep_pairs(
    samples: list[Sample], config: PpoConfig, topology: Topology
) -> tuple[list[Sample], dict[str, float]]:
    """Returns those of this rank's samples that are in a pair, and metrics of all pairs.

    Rewards are compared with their penalties, within algo.reward_clip. Samples that are invalid or
    have no token to learn from are in no pair. Collective over the ranks that sample.
    """
    rows = [
        [s.group, s.index, is_usable(s), compared_reward(s, config), s.is_demonstration]
        for s in samples
    ]
    table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 5)
    everyone = torch.cat(all_gather_rows(table, topology))
    everyone = everyone[address_order(everyone[:, :2])]
    groups, _, usable, rewards, given = everyone.unbind(1)
    compared = rewards if config.algo.pairs == "best_worst" else given
    pairs = best_and_worst_of_groups(groups.long(), compared, usable > 0)
    kept = {(int(group), int(index)) for group, index, *_ in everyone[pairs.flatten()].tolist()}
    metrics = {"pairs/share": len(pairs) / max(len(groups.unique()), 1)}
    if len(pairs):
        chosen, rejected = rewards[pairs].mean(0).tolist()
        metrics |= {"pairs/chosen_reward": chosen, "pairs/rejected_reward": rejected}
    return [s for s in samples if (s.group, s.index) in kept], metrics


def is_usable(sample: Sample) -> bool:
    """Whether the sample has a reward and a token to learn from, in any of its rows."""
    learns = any(any(row.loss_mask) for row in sample.rows or [sample])
    return sample.invalid is None and sample.reward is not None and learns


def compared_reward(sample: Sample, config: PpoConfig) -> float:
    if sample.reward is None:
        return 0.0
    low, high = config.algo.reward_clip or (-math.inf, math.inf)
    return min(max(sample.reward + sample.penalty, low), high)


def prepare_pairs(batches: list[Batch], topology: Topology) -> dict[str, float]:
    """Sets what the objective reads beside the advantages, which `weigh_pairs` sets. Collective."""
    num_tokens = torch.zeros(1, dtype=torch.float64)
    for batch in batches:
        batch.loss_weights = batch.loss_mask.clone()
        batch.advantages = torch.zeros_like(batch.loss_mask)
        num_tokens += batch.loss_mask.sum(dtype=torch.float64)
    dist.all_reduce(num_tokens, group=topology.group)
    return {"rollout/loss_tokens": float(num_tokens)}


def weigh_pairs(
    batch: Batch, logprobs: Tensor, config: PpoConfig, topology: Topology
) -> dict[str, float]:
    """Sets the advantages of a mini-batch: on each token of an answer -dL / d log pi(answer).

    So the gradient of -advantage log pi, summed over the tokens, is that of the mean loss over the
    mini-batch's pairs. logprobs: (num_tokens,) of the policy at hand. Returns the loss and its
    metrics, means over the pairs, the same on every rank. Collective.
    """
    loss = loss_of(config.algo)
    function = partial(loss.function, **given_options(loss.function, config.algo.loss_args))
    table, rows = gather_answers(batch, logprobs, config, topology)
    groups, _, compared, sums, ref_sums, tokens = table.view(-1, 2, NUM_COLUMNS).unbind(2)
    # both answers to a prompt are in its mini-batch, and nothing else is
    is_pair = (groups[:, 0] == groups[:, 1]) & (compared[:, 0] != compared[:, 1])
    assert is_pair.all()
    order = compared.argsort(dim=1, descending=True)  # the chosen one first
    chosen_first = (part for x in (sums, ref_sums, tokens) for part in x.gather(1, order).unbind(1))
    of_chosen, of_rejected, metrics = pair_gradients(Pairs(*chosen_first), function)
    gradients = torch.stack([of_chosen, of_rejected], dim=1).scatter(
        1, order, torch.stack([of_chosen, of_rejected], dim=1)
    )
    mine = segment_expand(-gradients.flatten()[rows].float(), batch.seq_lens)
    batch.advantages = mine * batch.loss_mask
    return metrics


NUM_COLUMNS, FIRST_SUM = 6, 3  # of the table of answers; the columns from there on are sums


def gather_answers(
    batch: Batch, logprobs: Tensor, config: PpoConfig, topology: Topology
) -> tuple[Tensor, Tensor]:
    """Returns a row for every answer of all ranks, and which row each sequence here belongs to.

    The table is float64, ordered by address: group, which of its answers, what the two of a pair
    are compared by, and sums over the answer's tokens: log-probability by the policy, by the
    reference, number. The sequences of an agent's trajectory are one answer. Collective.
    """
    answers = batch.indices % config.rollout.n if config.agent is not None else batch.indices
    refs = torch.zeros_like(logprobs) if batch.ref_logprobs is None else batch.ref_logprobs
    sums = [summed(x * batch.loss_mask, batch) for x in (logprobs.double(), refs.double())]
    by_reward = config.algo.pairs == "best_worst"
    compared = batch.rewards if by_reward else are_demonstrations(batch)
    columns = [batch.groups, answers, compared, *sums, summed(batch.loss_mask, batch)]
    tables = all_gather_rows(torch.stack([c.double() for c in columns], dim=1), topology)
    first = sum(len(t) for t in tables[: topology.rank])
    everyone = torch.cat(tables)
    order = address_order(everyone[:, :2])
    ordered = everyone[order]
    found, slots = ordered[:, :2].unique_consecutive(dim=0, return_inverse=True)
    table = ordered[torch.searchsorted(slots, torch.arange(len(found)))]
    table[:, FIRST_SUM:] = 0
    table[:, FIRST_SUM:].index_add_(0, slots, ordered[:, FIRST_SUM:])
    return table, slots[torch.argsort(order)[first : first + batch.num_seqs]]
