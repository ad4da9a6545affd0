"""What samples/ says of single tokens, by hand: texts, log-probabilities, advantages."""

from __future__ import annotations

import torch
from tiny_models import save_tokenizer
from transformers import AutoTokenizer

from spmdrl.data.packing import pack_samples
from spmdrl.training.logs.sample_tokens import SampleRecorder, token_fields, trained_rows
from spmdrl.types import Prompt, Sample


def sample(group: int, index: int, mask: list[int], prompt_tokens: int) -> Sample:
    prompt = Prompt(70 + group, [4] * prompt_tokens, "sums", "1", "text")
    count = len(mask)
    logprobs = [-0.5 - i if chosen else 0.0 for i, chosen in enumerate(mask)]
    return Sample(prompt, group, index, [5] * count, logprobs, mask, [0] * count, "stop")


def test_texts_of_tokens_and_where_they_end(tmp_path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    one = sample(0, 0, [1, 0, 1, 1], 2)
    one.response_ids = [tokenizer.convert_tokens_to_ids(c) for c in ("7", "+", "a", "<eos>")]
    one.rollout_logprobs[2] = float("-inf")
    assert token_fields(one, tokenizer, 10) == {
        "tokens": ["7", "+", "a", "<eos>"], "logprobs": [-0.5, None, None, -3.5],
    }  # fmt: skip
    assert token_fields(one, tokenizer, 2) == {"tokens": ["7", "+"], "logprobs": [-0.5, None]}
    assert token_fields(one, tokenizer, 0) == {}


def test_what_the_trainer_computed_is_told_by_sample() -> None:
    """Two updates of a batch that is cut into micro-batches; the second update counts."""
    samples = [sample(0, 0, [1, 1], 3), sample(2, 1, [1, 0, 1], 1), sample(4, 0, [1], 2)]
    batch = pack_samples(samples)
    mask = batch.loss_mask
    batch.advantages = mask * torch.tensor([0, 0, 0, 2, 2, 0, 1, 0, 3, 0, 0, 9.0])
    recorder = SampleRecorder(frozenset({(0, 0), (2, 1), (8, 8)}))
    seen = []
    loss_fn = recorder.watch(lambda logprobs, entropy, mb: seen.append(mb.num_seqs))
    for update in (1.0, 2.0):
        for seqs in ([0], [2, 1]):
            mb = batch.select(seqs)
            loss_fn(-update * mb.loss_mask, mb.loss_mask, mb)
    assert seen == [1, 2, 1, 2]
    rows = trained_rows([batch], recorder, most=2, age_stride=2)
    assert rows == {
        (0, 0): {"prompt_id": 70, "group": 0, "sample": 0, "advantage": 2.0,
                 "trainer_logprobs": [-2.0, -2.0]},
        (2, 1): {"prompt_id": 72, "group": 1, "sample": 1, "advantage": 2.0,
                 "advantages": [1.0, None], "trainer_logprobs": [-2.0, None]},
    }  # fmt: skip
    batch.old_logprobs = -7 * mask
    row = trained_rows([batch], recorder, most=9, age_stride=2)[2, 1]
    assert row["trainer_logprobs"] == [-7.0, None, -7.0]
    assert row["update_logprobs"] == [-2.0, None, -2.0]
