"""Answers behind other prompts: what is found of a token comes back to its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import png, save_qwen_vl
from transformers import AutoTokenizer

from spmdrl.config import ConfigError, DataConfig
from spmdrl.data.images import BatchImages, ImageProcessor
from spmdrl.data.packing import empty_batch, pack_samples
from spmdrl.data.prompts import PromptDataset
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.training.teacher_prompts import HintedPrompts, with_hints
from spmdrl.types import PolicyStats, Prompt, Sample


def prompt(row, ids):
    return Prompt(row, ids, "d", None, "")


PAIRS = {
    3: (prompt(3, [11, 12]), prompt(3, [11, 12, 13, 14, 15])),
    5: (prompt(5, [21, 22, 23]), prompt(5, [29])),  # a hint may make it shorter
}


def sample(row, index, answer, mask):
    number = len(answer)
    return Sample(PAIRS[row][0], row, index, answer, [-1.0] * number, mask, [0] * number, "stop",
                  reward=1.0)  # fmt: skip


SAMPLES = [sample(3, 0, [1, 2, 3], [1, 0, 1]), sample(3, 1, [4], [1]), sample(5, 0, [6, 7], [1, 1])]


def test_answers_keep_their_tokens_and_masks_behind_other_prompts():
    batch = pack_samples(SAMPLES)
    found = with_hints(batch, PAIRS.__getitem__)
    own = found.batch
    assert own.token_ids.tolist() == [
        11, 12, 13, 14, 15, 1, 2, 3, 11, 12, 13, 14, 15, 4, 29, 6, 7,
    ]  # fmt: skip
    assert own.cu_seqlens.tolist() == [0, 8, 14, 17]
    assert own.loss_mask.tolist() == [0] * 5 + [1, 0, 1] + [0] * 5 + [1] + [0, 1, 1]
    assert own.prompts.tolist() == [3, 3, 5] and own.groups.tolist() == [3, 3, 5]
    values = own.token_ids * own.loss_mask
    stats = found.placed(PolicyStats(values, values, top_ids=torch.stack([values, -values], 1)))
    assert stats.logprobs.tolist() == (batch.token_ids * batch.loss_mask).tolist()
    assert stats.top_ids[:, 1].tolist() == (-batch.token_ids * batch.loss_mask).tolist()
    assert stats.pi_squared is None


def test_a_batch_without_sequences_has_the_same_fields():
    """That of a rank which helps others with theirs."""
    none = with_hints(empty_batch(torch.zeros(0, dtype=torch.int64), 2), PAIRS.__getitem__)
    some = with_hints(pack_samples(SAMPLES, ["a", "b"]), PAIRS.__getitem__)
    assert none.batch.num_tokens == 0
    for (name, empty), (same, full) in zip(none.batch.tensors(), some.batch.tensors(), strict=True):
        assert name == same and empty.dtype == full.dtype and empty.shape[1:] == full.shape[1:]


def test_another_prompt_than_the_datas_is_refused():
    batch = pack_samples(SAMPLES)
    with pytest.raises(ConfigError, match="row 5 does not begin with the prompt"):
        with_hints(batch, (PAIRS | {5: PAIRS[3]}).__getitem__)


def test_images_of_a_prompt_stand_where_the_hint_has_moved_them(topology, tmp_path):
    save_qwen_vl(tmp_path / "model")
    Path(tmp_path, "0.png").write_bytes(png(0, 16, 8))
    row = {"prompt": [{"role": "user", "content": "<image>what?"}], "images": ["0.png"],
           "data_source": "d", "tip": "red"}  # fmt: skip
    Path(tmp_path, "rows.jsonl").write_text(json.dumps(row) + "\n")
    model, file = str(tmp_path / "model"), str(tmp_path / "rows.jsonl")
    config = DataConfig(file, hint_key="tip", hint_template="{hint}: {prompt}")
    vision = ImageProcessor.load(model, load_hf_config(model), config)
    data = PromptDataset.load(
        file, AutoTokenizer.from_pretrained(model), config, topology, vision=vision, hinted=True,
        needs_truth=lambda source: False,
    )  # fmt: skip
    images = BatchImages(vision, data.by_id)
    hints = HintedPrompts(data, images)
    answers = [Sample(data.by_id(0), 0, 0, [5, 6], [0.0] * 2, [1, 1], [0] * 2, "stop", reward=0.0)]
    batch = pack_samples(answers)
    images.mark(batch, answers)
    found = hints.put_into(batch).batch
    plain, hinted = images.scene(batch), hints.images.scene(found)
    shift = len("red: ")
    assert int(plain.is_image.sum()) == int(hinted.is_image.sum()) > 0
    assert torch.equal(hinted.is_image[shift:], plain.is_image)
    for name, part in plain.pixels.items():
        assert torch.equal(part, hinted.pixels[name])
    assert hints.images.replies is images.replies
