"""What samples/ says of single tokens, by hand: texts, log-probabilities, advantages."""

from __future__ import annotations

import base64
import io

import pytest
import torch
from PIL import Image
from tiny_models import save_tokenizer
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from spmdrl.data.packing import pack_samples
from spmdrl.engines.micro_batches import stand_in
from spmdrl.training.logs.metrics import sample_row, saved_images
from spmdrl.training.logs.sample_tokens import (
    SampleRecorder,
    token_fields,
    token_texts,
    trained_rows,
)
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


@pytest.mark.parametrize("broken", [["<0x0A>", "<0xE3>"], ["<0xE3>"] * 40, ["<0xFF>", "<0x0A>"]])
def test_bytes_that_are_no_character_do_not_end_a_run(broken: list[str]) -> None:
    """Tokenizers with a token for each byte (Llama 2, Mistral, Gemma) decode what a model says."""
    names = ["a", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    fast = Tokenizer(BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast)
    euro = ["<0xE2>", "<0x82>", "<0xAC>"]
    said = ["a", *broken, "b", *euro, "a"]
    texts = token_texts(tokenizer, [names.index(name) for name in said])
    assert len(texts) == len(said) and texts[0] == "a"
    assert texts[-1] == "a" and texts[-4:-1] == ["", "", "\u20ac"]


def test_a_reported_number_never_takes_a_column_of_ours() -> None:
    one = sample(0, 0, [1], 1)
    one.reward_info = {"images": 1.0, "tokens": 2.0, "step": 3.0, "correct": 1.0}
    row = sample_row(one, False, {})
    assert {name: row[name] for name in ("info_images", "info_tokens", "info_step", "correct")} == {
        "info_images": 1.0, "info_tokens": 2.0, "info_step": 3.0, "correct": 1.0,
    }  # fmt: skip
    assert not row.keys() & {"images", "tokens", "step"}


@pytest.mark.parametrize(
    "head", ["data:image/../../x;base64,", "data:image/png,", "data:image/a/b;"]
)
def test_an_image_of_a_reply_is_a_file_under_its_digest(head: str, tmp_path) -> None:
    """Whatever a tool has written before the image itself."""
    png = io.BytesIO()
    Image.new("RGB", (2, 2), "red").save(png, "PNG")
    uri = head.rstrip(",") + "," + base64.b64encode(png.getvalue()).decode()
    message = {"role": "tool", "content": [{"type": "image", "image": uri}]}
    (part,) = saved_images(message, tmp_path)["content"]
    (file,) = (tmp_path / "images").iterdir()
    assert part["image"] == f"images/{file.name}" and file.read_bytes() == png.getvalue()


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
    stood_in = stand_in(batch)  # computed where another rank has more micro-batches
    loss_fn(torch.zeros(2), torch.zeros(2), stood_in)
    assert trained_rows([batch], recorder, most=2, age_stride=2) == rows
    batch.old_logprobs = -7 * mask
    row = trained_rows([batch], recorder, most=9, age_stride=2)[2, 1]
    assert row["trainer_logprobs"] == [-7.0, None, -7.0]
    assert row["update_logprobs"] == [-2.0, None, -2.0]
