import random
from dataclasses import replace

import pytest
import torch

from spmdrl.config import ConfigError
from spmdrl.data.packing import (
    concatenate,
    empty_batch,
    micro_batches,
    pack_samples,
    partition,
    split_to_count,
)
from spmdrl.engines.micro_batches import stand_in
from spmdrl.segments import segment_expand, segment_sum
from spmdrl.training.batch_exchange import span
from spmdrl.training.collect import add_greedy_rewards, check_reward_keys
from spmdrl.training.logs.metrics import sample_row
from spmdrl.training.replay_buffer import ReplayBuffer
from spmdrl.types import Prompt, Sample, turn_ends


def sample(group, index, prompt_len, response_len, invalid=None):
    prompt = Prompt(group, list(range(prompt_len)), "d", "1", "p")
    return Sample(
        prompt, group, index, list(range(50, 50 + response_len)), [-0.5] * response_len,
        [1] * response_len, [3] * response_len, "stop", reward=None if invalid else 1.5,
        invalid=invalid,
    )  # fmt: skip


def test_pack_masks_prompts_and_invalid_samples():
    batch = pack_samples([sample(0, 0, 2, 3), sample(0, 1, 1, 2, invalid="boom")])
    assert batch.cu_seqlens.tolist() == [0, 5, 8]
    assert batch.token_ids.tolist() == [0, 1, 50, 51, 52, 0, 50, 51]
    assert batch.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 0, 0]
    assert batch.rollout_logprobs.tolist() == [0, 0, -0.5, -0.5, -0.5, 0, 0, 0]
    assert batch.rewards.tolist() == [1.5, 0.0]
    assert batch.valid.tolist() == [1, 0]
    assert segment_sum(batch.loss_mask, batch.seq_lens).tolist() == [3, 0]


def test_tokens_are_trained_on_as_they_were_sampled():
    """Never by way of the text: it may have other tokens than those that were drawn."""
    drifted = sample(0, 0, 2, 3)
    drifted.response = "a text that no tokenizer would cut into 50, 51, 52"
    drifted.loss_mask = [1, 0, 1]  # the second is a tool's
    batch = pack_samples([drifted])
    assert batch.token_ids.tolist() == [0, 1, 50, 51, 52]
    assert batch.loss_mask.tolist() == [0, 0, 1, 0, 1]
    assert batch.rollout_logprobs.tolist() == [0, 0, -0.5, 0, -0.5]


def test_rewards_by_key():
    both, plain, bad = sample(0, 0, 1, 1), sample(0, 1, 1, 1), sample(0, 2, 1, 1, invalid="boom")
    both.reward_info = {"format": 0.25}
    batch = pack_samples([both, plain, bad], ["format", "score"])
    assert batch.reward_components.tolist() == [[0.25, 1.5], [0.0, 1.5], [0.0, 0.0]]
    check_reward_keys([both, plain, bad], ("format", "score"))
    assert (both.invalid, bad.invalid) == (None, "boom")
    assert "asks for ['format'], the reward function gave ['score']" in plain.invalid
    assert plain.reward is None


def test_a_number_that_is_called_as_a_column_of_samples_replaces_none():
    both = sample(0, 0, 1, 1)
    both.reward_info = {"response": 0.25, "invalid": 0.0, "format": 1.0}
    row = sample_row(both, replies=False, of_tokens={})
    assert (row["response"], row["invalid"]) == (both.response, None)
    assert [row[name] for name in ("info_response", "info_invalid", "format")] == [0.25, 0.0, 1.0]


def test_a_sample_without_a_baseline_is_invalid():
    mine, other = sample(0, 0, 1, 1), sample(1, 0, 1, 1)
    add_greedy_rewards([mine, other], {0: (False, 0.0), 1: (True, 1.0)})
    assert mine.reward is None
    assert "the greedy answer to the prompt is invalid" in mine.invalid
    assert (other.invalid, other.reward, other.greedy_reward) == (None, 1.5, 1.0)


def in_turns(group, mask, turns, invalid=None):
    """A prompt of two tokens, and an answer with this loss_mask."""
    found = sample(group, 0, 2, len(mask), invalid)
    found.loss_mask, found.turn_rewards = mask, turns
    return found


def test_turns_end_where_the_policy_stops():
    masks = {"111": [2], "1": [0], "": [], "000": [], "1011001": [0, 3, 6], "110": [1], "01": [1]}
    for mask, ends in masks.items():
        assert turn_ends([int(digit) for digit in mask]) == ends, mask


def test_each_turns_reward_is_on_its_last_token():
    samples = [
        in_turns(0, [1, 1, 0, 0, 1, 0, 1, 1], [0.1, -2.0, 3.0]),
        in_turns(1, [1, 1], [0.5]),  # a single turn
        in_turns(2, [1, 0, 1], [1.0, 0.0]),
        in_turns(3, [], [7.0]),  # no token: there is no place for it
        in_turns(4, [1, 0, 1], [1.0, 2.0], invalid="boom"),  # by its greedy answer, say
        in_turns(5, [1, 0, 1], [], invalid="boom"),
    ]
    batch = pack_samples(samples, per_turn=True)
    assert batch.turn_rewards.dtype == torch.float64
    rows = [row.tolist() for row in batch.turn_rewards.split(batch.seq_lens.tolist())]
    assert rows == [
        [0, 0, 0, 0.1, 0, 0, -2.0, 0, 0, 3.0], [0, 0, 0, 0.5], [0, 0, 1.0, 0, 0.0],
        [0, 0], [0] * 5, [0] * 5,
    ]  # fmt: skip
    assert batch.rewards.tolist() == [1.5] * 4 + [0.0] * 2  # the whole, as it was scored
    assert pack_samples(samples).turn_rewards is None
    with pytest.raises(AssertionError):
        pack_samples([in_turns(0, [1, 0, 1], [1.0])], per_turn=True)
    with pytest.raises(AssertionError):
        pack_samples([in_turns(0, [1, 0, 1], [])], per_turn=True)


def test_rewards_of_turns_go_where_their_tokens_go():
    batch = pack_samples(
        [in_turns(g, [1, 0, 1], [g + 0.25, g + 0.5]) for g in range(3)], per_turn=True
    )
    picked = batch.select([2, 0])
    assert picked.turn_rewards.tolist() == [0, 0, 2.25, 0, 2.5, 0, 0, 0.25, 0, 0.5]
    assert span(batch, 1, 2).turn_rewards.tolist() == [0, 0, 1.25, 0, 1.5]
    nothing = empty_batch(torch.zeros(0, dtype=torch.int64), per_turn=True)
    assert nothing.turn_rewards.shape == (0,) and nothing.turn_rewards.dtype == torch.float64
    both = concatenate([nothing, picked, pack_samples([], per_turn=True)])
    assert torch.equal(both.turn_rewards, picked.turn_rewards)
    assert batch.select([]).turn_rewards.shape == (0,)
    dummy = stand_in(batch)
    assert dummy.turn_rewards.tolist() == [0, 0] and dummy.turn_rewards.dtype == torch.float64
    assert {n for n, _ in dummy.tensors()} == {n for n, _ in batch.tensors()}


def test_replayed_samples_keep_the_rewards_of_their_turns(tmp_path):
    def step(first, per_turn):
        made = [in_turns(g, [1, 0, 1], [g + 0.25, g + 0.5]) for g in (first, first + 1)]
        return pack_samples(made, per_turn=per_turn)

    buffer = ReplayBuffer(2)
    buffer.mix(step(0, True))
    mixed = buffer.mix(step(2, True))
    assert mixed.turn_rewards.tolist() == [
        x for g in (2, 3, 0, 1) for x in (0, 0, g + 0.25, 0, g + 0.5)
    ]
    with (tmp_path / "replay").open("wb") as file:
        buffer.save(file)
    again = ReplayBuffer(2)
    again.load([tmp_path / "replay"], 0, 1, num_keys=0, per_turn=True)
    newest = step(4, True)
    assert torch.equal(again.mix(newest).turn_rewards, buffer.mix(newest).turn_rewards)
    again.load([tmp_path / "replay"], 1, 2, num_keys=0, per_turn=True)  # a rank without a share
    assert again.mix(step(4, True)).num_seqs == 2
    with pytest.raises(ConfigError, match=r"rewards\.per_turn=True, this run has False"):
        again.load([tmp_path / "replay"], 0, 1, num_keys=0, per_turn=False)
    without = ReplayBuffer(1)
    without.mix(step(0, False))
    with (tmp_path / "without").open("wb") as file:
        without.save(file)
    with pytest.raises(ConfigError, match=r"rewards\.per_turn=False, this run has True"):
        again.load([tmp_path / "without"], 0, 1, num_keys=0, per_turn=True)


def test_replayed_samples_of_an_earlier_version_are_read_by_the_names_of_their_time(tmp_path):
    scored = pack_samples(
        [replace(sample(0, i, 2, 3), greedy_reward=0.5) for i in range(2)], ["score"]
    )
    fields = dict(scored.tensors()) | {"cu_seqlens": scored.cu_seqlens}
    fields["greedy"], fields["keys"] = fields.pop("greedy_rewards"), fields.pop("reward_components")
    del fields["prompts"]
    torch.save([fields], tmp_path / "replay")
    buffer = ReplayBuffer(1)
    buffer.load([tmp_path / "replay"], 0, 1, num_keys=1, per_turn=False)
    (read,) = buffer.past
    assert read.greedy_rewards.tolist() == [0.5, 0.5] and read.prompts.tolist() == [-1, -1]
    assert torch.equal(read.reward_components, scored.reward_components)
    assert torch.equal(read.token_ids, scored.token_ids)


def test_select_picks_whole_sequences_in_the_order_asked():
    batch = pack_samples([sample(g, 0, g + 1, 2) for g in range(4)])
    picked = batch.select([3, 1])
    assert picked.groups.tolist() == [3, 1]
    assert picked.token_ids.tolist() == [0, 1, 2, 3, 50, 51, 0, 1, 50, 51]
    assert picked.cu_seqlens.tolist() == [0, 6, 10]
    assert batch.select([]).num_tokens == 0


def test_segments_with_empty_ones():
    lens = torch.tensor([2, 0, 3])
    assert segment_sum(torch.arange(5.0), lens).tolist() == [1, 0, 9]
    assert segment_expand(torch.tensor([7.0, 8.0, 9.0]), lens).tolist() == [7, 7, 9, 9, 9]
    assert segment_sum(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


@pytest.mark.parametrize("seed", range(5))
def test_micro_batches_hold_everything_once_within_the_budget(seed):
    rng = random.Random(seed)
    lens = [rng.randint(1, 60) for _ in range(rng.randint(1, 80))]
    bins = micro_batches(lens, 64)
    assert sorted(i for b in bins for i in b) == list(range(len(lens)))
    assert all(sum(lens[i] for i in b) <= 64 for b in bins)
    more = split_to_count(bins, len(bins) + 3)
    assert len(more) == len(bins) + 3
    assert sorted(i for b in more for i in b) == list(range(len(lens)))


def test_a_sequence_over_the_budget_is_alone():
    assert micro_batches([100, 3, 4], 10) == [[0], [1, 2]]
    assert split_to_count([[0]], 3) == [[0], [], []]
    assert split_to_count([], 1) == [[]]


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_partition_is_even(parts):
    rng = random.Random(parts)
    work = [rng.lognormvariate(0, 1) for _ in range(200)]
    dealt = partition(work, parts)
    assert sorted(i for p in dealt for i in p) == list(range(200))
    loads = [sum(work[i] for i in p) for p in dealt]
    assert max(loads) / (sum(work) / parts) < 1.02
    assert partition([], parts) == [[] for _ in range(parts)]
