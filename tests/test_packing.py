import random

import pytest
import torch

from spmdrl.collect import add_greedy_rewards, check_reward_keys
from spmdrl.packing import micro_batches, pack_samples, partition, split_to_count
from spmdrl.types import Prompt, Sample, segment_expand, segment_sum


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
    assert batch.keys.tolist() == [[0.25, 1.5], [0.0, 1.5], [0.0, 0.0]]
    check_reward_keys([both, plain, bad], ("format", "score"))
    assert (both.invalid, bad.invalid) == (None, "boom")
    assert "asks for ['format'], the reward function gave ['score']" in plain.invalid
    assert plain.reward is None


def test_a_sample_without_a_baseline_is_invalid():
    mine, other = sample(0, 0, 1, 1), sample(1, 0, 1, 1)
    add_greedy_rewards([mine, other], {0: (False, 0.0), 1: (True, 1.0)})
    assert mine.reward is None
    assert "the greedy answer to the prompt is invalid" in mine.invalid
    assert (other.invalid, other.reward, other.greedy_reward) == (None, 1.5, 1.0)


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
