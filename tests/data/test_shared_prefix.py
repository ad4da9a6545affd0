"""Sequences that share a prefix, the row that has it once, the deal that keeps them together."""

from __future__ import annotations

import pytest
import torch
from training_batches import LENS, whole_batch, with_shared_prompts

from spmdrl.data.packing import assign_to_ranks, deal, prompt_lens, sequence_work
from spmdrl.data.shared_prefix import SharedRow, Unit, shared_work, single_units, units_by_prefix

GROUPS = [(3, 6), (2, 11), (4, 2)]  # sequences, and tokens that they begin with


def grouped():
    return with_shared_prompts(whole_batch(), GROUPS)


def test_groups_are_units_with_all_that_they_share():
    batch = grouped()
    assert units_by_prefix(batch, 1000) == [
        Unit((0, 1, 2), 6), Unit((3, 4), 11), Unit((5, 6, 7, 8), 2),
    ]  # fmt: skip
    batch.groups[3] = 7  # one that is alone shares nothing
    assert units_by_prefix(batch, 1000)[1:] == [Unit((4,)), Unit((5, 6, 7, 8), 2), Unit((3,))]


def test_a_prefix_leaves_each_sequence_a_token_of_its_own():
    batch = grouped()
    same = batch.select([1, 1, 1])  # a sample that a filter drew three times
    assert units_by_prefix(same, 1000) == [Unit((0, 1, 2), LENS[1] - 1)]


def test_what_saves_little_is_not_shared():
    batch = with_shared_prompts(whole_batch(), [(3, 2), (2, 3), (4, 0)])
    saved = 2 * 2 + 3
    assert saved < 0.05 * batch.num_tokens and units_by_prefix(batch, 1000) == single_units(batch)


@pytest.mark.parametrize("budget", [10, 30, 45, 60])
def test_units_fit_a_micro_batch(budget):
    batch = grouped()
    units = units_by_prefix(batch, budget)
    assert sorted(seq for unit in units for seq in unit.seqs) == list(range(9))
    for unit in units:
        assert unit.num_tokens(LENS) <= budget or len(unit.seqs) == 1
        assert (unit.prefix > 0) == (len(unit.seqs) > 1)


def test_copies_of_a_long_prefix_are_bounded():
    unit = Unit(tuple(range(16)), 1000)
    lens = [1010] * 16
    assert unit.num_tokens(lens) == 16 * 1010 // 2 > 1000 + 16 * 10


def test_the_row_has_every_token_of_every_sequence():
    batch, units = grouped(), units_by_prefix(grouped(), 1000)
    row = SharedRow.build(batch.seq_lens, units)
    assert len(row.tokens) == batch.num_tokens - 2 * 6 - 11 - 3 * 2 == int(row.run_lens.sum())
    assert torch.equal(batch.token_ids[row.tokens][row.places], batch.token_ids)
    behind = row.prefixes >= 0
    assert row.run_lens[~behind].tolist() == [6, 11, 2]
    assert (row.run_lens + row.run_lens[row.prefixes])[behind].tolist() == LENS
    plain = SharedRow.build(batch.seq_lens, single_units(batch))
    assert torch.equal(plain.tokens, torch.arange(batch.num_tokens))
    assert torch.equal(plain.places, plain.tokens) and not bool((plain.prefixes >= 0).any())


def table_of(num_groups, n, prompt, answers, seed=0):
    """(group, index, tokens, tokens of the prompt, rank) of each sample."""
    draw = torch.Generator().manual_seed(seed)
    low, high = answers
    return torch.tensor([
        (g, i, prompt + int(torch.randint(low, high, (1,), generator=draw)), prompt, 0)
        for g in range(num_groups) for i in range(n)
    ])  # fmt: skip


def computed(found, ranks, prompt):
    """The tokens that each rank computes, the prompt once for each of its groups."""
    where = found.train_ranks[ranks]
    return [
        int((found.seq_lens - prompt)[where == rank].sum())
        + prompt * len(found.groups[where == rank].unique())
        for rank in ranks
    ]


def test_prompts_that_are_not_computed_again():
    table = table_of(4, 3, 50, (10, 11))
    found = assign_to_ranks(table, 1, {(0, 1): True})
    again = found.repeated_prefixes((0, 1))
    assert 12 * 60 - int(again.sum()) == sum(computed(found, (0, 1), 50)) == 4 * (50 + 3 * 10)
    assert len(assign_to_ranks(table[:0], 1, {(0, 1): True}).repeated_prefixes((0, 1))) == 0


def test_a_deal_keeps_groups_together_where_ranks_stay_even():
    ranks = (0, 1, 2, 3)
    table = table_of(32, 8, 300, (20, 60))
    together = assign_to_ranks(table, 1, {ranks: True})
    apart = assign_to_ranks(table, 1, {ranks: False})
    tokens = computed(together, ranks, 300)
    assert max(tokens) < 1.05 * sum(tokens) / 4 and together.imbalance(ranks) < 1.05
    assert max(tokens) < 0.45 * max(computed(apart, ranks, 300))
    assert not apart.prefix_lens.any() and apart.imbalance(ranks) < 1.01


def test_a_group_is_divided_where_there_are_more_ranks_than_groups():
    ranks = tuple(range(8))
    found = assign_to_ranks(table_of(2, 8, 100, (400, 401)), 1, {ranks: True})
    assert torch.bincount(found.train_ranks[ranks], minlength=8).tolist() == [2] * 8
    for rank in ranks:  # of one group, whose prompt they then share
        assert len(found.groups[found.train_ranks[ranks] == rank].unique()) == 1


def test_a_deal_is_never_worse_than_one_by_one():
    for seed in range(5):
        table = table_of(5, 6, 80, (1, 400), seed)
        groups, lens = table[:, 0], table[:, 2]
        shared = deal(groups, lens, table[:, 3], 3)
        alone = deal(groups, lens, torch.zeros_like(lens), 3)
        prefix = sequence_work(table[:, 3])

        def heaviest(parts):
            units = torch.stack([parts, groups], 1).unique(dim=0, return_inverse=True)  # noqa: B023
            work = shared_work(sequence_work(lens), prefix, units[1])  # noqa: B023
            return max(float(work[units[0][:, 0] == part].sum()) for part in range(3))

        assert heaviest(shared) <= heaviest(alone) * (1 + 1e-9)


def test_prompts_of_a_packed_batch():
    batch = whole_batch()
    batch.loss_mask[:] = 1
    for begin, length in zip(batch.cu_seqlens[:-1].tolist(), [2, 5, 6, 1, 0, 2, 3, 4, 8],
                             strict=True):  # fmt: skip
        batch.loss_mask[begin : begin + length] = 0
    batch.loss_mask[batch.cu_seqlens[1] : batch.cu_seqlens[2]] = 0  # an invalid sample
    assert prompt_lens(batch).tolist() == [2, LENS[1] - 1, 6, 1, 0, 2, 3, 4, 8]
