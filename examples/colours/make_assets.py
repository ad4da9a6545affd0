"""Makes what the example with images needs: a small Qwen2.5-VL with random weights, and the data.

    python examples/colours/make_assets.py [--out runs/colours] [--seed 0]

A prompt shows one or two images, each of one colour with some noise; the answer has the first
letter of each colour, in order. A character is a token, and so are the marks around an image.
`eval.parquet` has images that `train.parquet` has not. The rows of `look_train.parquet` and
`look_eval.parquet` have no image: an environment shows one of the colour that is the answer.
"""

from __future__ import annotations

import argparse
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from spmdrl.distributed.env import before_torch

before_torch()
from transformers import (  # noqa: E402
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)
from transformers.utils import logging  # noqa: E402

COLOURS = {"r": (210, 40, 40), "g": (40, 190, 60), "b": (50, 60, 220), "y": (220, 210, 50)}
NUM_TRAIN, NUM_EVAL = 1024, 128
PATCH = 4  # pixels a side; four patches are a token
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
MARKS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
WORDS = ["?", ":", *COLOURS]
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)


def make_assets(out: Path, seed: int) -> None:
    """Writes model/, train.parquet and eval.parquet into `out`, and the two for looking."""
    out.mkdir(parents=True, exist_ok=True)
    save_model(out / "model", seed)
    draw = random.Random(seed)
    write(out / "train.parquet", [question(draw) for _ in range(NUM_TRAIN)])
    write(out / "eval.parquet", [question(draw) for _ in range(NUM_EVAL)])
    write(out / "look_train.parquet", [blind_question(draw) for _ in range(NUM_TRAIN)])
    write(out / "look_eval.parquet", [blind_question(draw) for _ in range(NUM_EVAL)])


def question(draw: random.Random) -> dict[str, Any]:
    """verl's schema: <image> in the text, and as many `images`."""
    shown = draw.choices(list(COLOURS), k=draw.choice((1, 2)))
    return {
        "data_source": "colours",
        "prompt": [{"role": "user", "content": f"{'<image>' * len(shown)}?"}],
        "reward_model": {"style": "rule", "ground_truth": "".join(shown)},
        "images": [{"bytes": png(picture(colour, draw))} for colour in shown],
    }


def blind_question(draw: random.Random) -> dict[str, Any]:
    """The answer is the colour of a picture that the environment makes of `extra_info`."""
    size = [draw.randint(12, 24), draw.randint(12, 24)]
    return {
        "data_source": "look",
        "prompt": [{"role": "user", "content": "?"}],
        "reward_model": {"style": "rule", "ground_truth": draw.choice(list(COLOURS))},
        "extra_info": {"seed": draw.getrandbits(32), "size": size},
    }


def picture(colour: str, draw: random.Random) -> Image.Image:
    """12 to 24 pixels a side."""
    shape = (draw.randint(12, 24), draw.randint(12, 24), 3)
    noise = np.random.default_rng(draw.getrandbits(32)).integers(-30, 31, shape)
    return Image.fromarray((COLOURS[colour] + noise).clip(0, 255).astype(np.uint8))


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


def save_model(folder: Path, seed: int) -> None:
    """Random float32 weights, tokenizer and image processor."""
    tokenizer = save_tokenizer(folder)
    token = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6],
        },
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2,
        "out_hidden_size": 128, "patch_size": PATCH, "window_size": 4 * PATCH,
        "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=False,
        image_token_id=token("<|image_pad|>"), video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    size = {"shortest_edge": (4 * PATCH) ** 2, "longest_edge": (16 * PATCH) ** 2}
    Qwen2VLImageProcessorPil(patch_size=PATCH, size=size).save_pretrained(folder)


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    pad, bos, eos, unk = SPECIAL
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk,
        additional_special_tokens=MARKS,
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return fast


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="assets of the example with images")
    parser.add_argument("--out", type=Path, default=Path("runs/colours"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable_progress_bar()
    make_assets(args.out, args.seed)
    print(f"model, train.parquet and eval.parquet are in {args.out}")
