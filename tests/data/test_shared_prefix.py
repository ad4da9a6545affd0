"""Sequences that share a prefix, the row that has it once, the deal that keeps them together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from training_batches import LENS, whole_batch, with_shared_prompts
from transformers import BloomConfig, Qwen2VLConfig, Qwen3Config

from spmdrl.config import ConfigError, PreferenceDataConfig, RewardTrainingConfig, TrainConfig
from spmdrl.data.packing import (
    assign_to_ranks,
    deal,
    empty_batch,
    micro_batches,
    part_loads,
    prompt_lens,
    sequence_work,
)
from spmdrl.data.shared_prefix import SharedRow, Unit, single_units, units_by_prefix
from spmdrl.engines.fsdp.layer_kinds import prefix_obstacle, shares_prefixes
from spmdrl.engines.fsdp.prefix_sharing import units_for
from spmdrl.training.checks.supervised import check_reward_training

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
    assert max(tokens) < 1.05 * sum(tokens) / 4 and together.imbalance(ranks, True) < 1.05
    assert max(tokens) < 0.45 * max(computed(apart, ranks, 300))
    assert not apart.prefix_lens.any() and apart.imbalance(ranks, False) < 1.01


def test_a_group_is_divided_where_there_are_more_ranks_than_groups():
    ranks = tuple(range(8))
    found = assign_to_ranks(table_of(2, 8, 100, (400, 401)), 1, {ranks: True})
    assert torch.bincount(found.train_ranks[ranks], minlength=8).tolist() == [2] * 8
    for rank in ranks:  # of one group, whose prompt they then share
        assert len(found.groups[found.train_ranks[ranks] == rank].unique()) == 1


@pytest.mark.parametrize(
    ("role", "strict", "hf", "reason"),
    [
        (TrainConfig(), False, Qwen3Config(), None),
        (TrainConfig(engine="megatron"), False, Qwen3Config(), "counts a token's position"),
        (TrainConfig(), True, Qwen3Config(), "strict=True"),
        (TrainConfig(), False, Qwen2VLConfig(), "'qwen2_vl' sees images"),
        (TrainConfig(), False, BloomConfig(), "'bloom' compute attention by themselves"),
    ],
)
def test_who_can_share(role, strict, hf, reason):
    found = prefix_obstacle(role, strict, hf)
    assert found is None if reason is None else reason in found
    assert shares_prefixes(role, strict, hf) == (reason is None)
    assert not shares_prefixes(replace(role, shared_prefix=False), strict, hf)


def test_a_reward_model_is_not_told_to_share(tmp_path):
    config = RewardTrainingConfig(
        model=str(tmp_path), data=PreferenceDataConfig(train="pairs.jsonl"), out=str(tmp_path),
        actor=TrainConfig(shared_prefix=True),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="shared_prefix=True has no effect on a reward model"):
        check_reward_training(config, 1)


def heaviest(parts, table, num_parts):
    """By a loop: of each part every sequence's own work, and each group's prefix once."""
    work, seen = [0.0] * num_parts, set()
    whole, prefix = sequence_work(table[:, 2]).tolist(), sequence_work(table[:, 3]).tolist()
    for part, group, all_of_it, shared in zip(
        parts.tolist(), table[:, 0].tolist(), whole, prefix, strict=True
    ):
        work[part] += all_of_it - shared * ((part, group) in seen)
        seen.add((part, group))
    return max(work)


def test_a_deal_is_never_worse_than_one_by_one():
    draw = torch.Generator().manual_seed(0)

    def up_to(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=draw))

    for seed in range(60):
        num_parts, prompt, longest = up_to(2, 8), up_to(1, 1500), up_to(2, 1500)
        table = table_of(up_to(1, 6), up_to(2, 9), prompt, (1, longest), seed)
        groups, lens = table[:, 0], table[:, 2]
        shared = deal(groups, lens, table[:, 3], num_parts)
        alone = deal(groups, lens, torch.zeros_like(lens), num_parts)
        most = heaviest(alone, table, num_parts)
        assert heaviest(shared, table, num_parts) <= most * (1 + 1e-9), seed
        loads = part_loads(alone, groups, lens, table[:, 3], num_parts)
        assert float(loads.max()) == pytest.approx(most)


def test_ranks_that_do_not_share_are_judged_without_it():
    table = table_of(16, 8, 300, (20, 60))
    alone = assign_to_ranks(table, 1, {(0, 1, 2, 3): False})
    both = assign_to_ranks(table, 1, {(0, 1, 2, 3): False, (4, 5): True})
    assert torch.equal(alone.train_ranks[0, 1, 2, 3], both.train_ranks[0, 1, 2, 3])
    even = alone.imbalance((0, 1, 2, 3), shares=False)
    assert both.imbalance((0, 1, 2, 3), shares=False) == even < 1.01
    assert both.imbalance((4, 5), shares=True) < 1.05


def test_groups_never_take_more_micro_batches_than_sequences():
    """Groups a little over half the budget would each fill one."""
    lens = [130 + answer for group in range(8) for answer in range(1000, 1200, 25)]
    batch = empty_batch(torch.tensor(lens))
    batch.token_ids = torch.arange(batch.num_tokens)
    batch.groups = torch.arange(64) // 8
    with_shared_prompts(batch, [(8, 130)] * 8)
    units = units_by_prefix(batch, 16384)
    assert len(units) == 8
    assert len(micro_batches([u.num_tokens(lens) for u in units], 16384)) == 8
    assert len(micro_batches(lens, 16384)) == 5
    assert units_for(batch, 16384) == single_units(batch)
    assert units_for(batch, 40_000) == units_by_prefix(batch, 40_000)


def test_it_counts_what_is_saved_when_groups_are_divided():
    batch = empty_batch(torch.full((8,), 300))
    batch.token_ids = torch.arange(batch.num_tokens)
    with_shared_prompts(batch, [(8, 28)])
    assert units_by_prefix(batch, 10_000) == [Unit(tuple(range(8)), 28)]  # saves 8 %
    assert units_by_prefix(batch, 580) == single_units(batch)  # two by two: 4.7 %


def test_prompts_of_a_packed_batch():
    batch = whole_batch()
    batch.loss_mask[:] = 1
    for begin, length in zip(batch.cu_seqlens[:-1].tolist(), [2, 5, 6, 1, 0, 2, 3, 4, 8],
                             strict=True):  # fmt: skip
        batch.loss_mask[begin : begin + length] = 0
    batch.loss_mask[batch.cu_seqlens[1] : batch.cu_seqlens[2]] = 0  # an invalid sample
    assert prompt_lens(batch).tolist() == [2, LENS[1] - 1, 6, 1, 0, 2, 3, 4, 8]
