"""Makes what the tool example needs: a small Qwen3 with random weights, and the data.

    python examples/multiply/make_assets.py [--out runs/multiply] [--seed 0]

"?17*25" is answered "425", which so small a model cannot work out; but it may call `multiply`:

    ?17*25 :<call 17, 25> >425 :425

The solved examples of `sft.parquet` call it in one case of three and guess in the others, so a
model that was fine-tuned on them is right on about a third. `train.parquet` has the questions from
which it learns to call always, `eval.parquet` 256 that are in neither of the two. A character is a
token, and so is each fixed part of a call.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from spmdrl.distributed.env import before_torch

before_torch()
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from transformers.utils import logging  # noqa: E402

NUMBERS = range(10, 60)
NUM_HELD_OUT = 256
NUM_SFT = 2200
CALLED = 0.4  # share of the solved examples that call the tool
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
CALL = ('<tool_call>{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}</tool_call>")
WORDS = [*"0123456789*?:>", "<tools>", *CALL]
TEMPLATE = (
    "{% if tools %}<tools>{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}?{{ m.content }}{% elif m.role == 'tool' %}>{{ m.content }}"
    "{% else %}:{{ m.content }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)


def make_assets(out: Path, seed: int) -> None:
    """Writes model/, train.parquet, eval.parquet and sft.parquet into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    save_model(out / "model", seed)
    draw = random.Random(seed)
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS]
    draw.shuffle(pairs)
    held_out, others = pairs[:NUM_HELD_OUT], pairs[NUM_HELD_OUT:]
    write(out / "eval.parquet", [question(a, b) for a, b in held_out])
    write(out / "train.parquet", [question(a, b) for a, b in others])
    solved = [{"messages": solution(a, b, draw)} for a, b in others[:NUM_SFT]]
    write(out / "sft.parquet", solved)


def question(a: int, b: int) -> dict[str, Any]:
    """verl's schema."""
    return {
        "data_source": "multiply",
        "prompt": [{"role": "user", "content": f"{a}*{b}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a * b)},
    }


def solution(a: int, b: int, draw: random.Random) -> list[dict[str, str]]:
    asked = {"role": "user", "content": f"{a}*{b}"}
    if draw.random() >= CALLED:
        guess = draw.choice(NUMBERS) * draw.choice(NUMBERS)
        return [asked, {"role": "assistant", "content": str(guess)}]
    head, between, tail = CALL
    return [
        asked,
        {"role": "assistant", "content": f"{head}{a}{between}{b}{tail}"},
        {"role": "tool", "content": str(a * b)},
        {"role": "assistant", "content": str(a * b)},
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


def save_model(folder: Path, seed: int) -> None:
    """Random float32 weights, 0.4 million, and the tokenizer."""
    config = Qwen3Config(
        vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    save_tokenizer(folder)


def save_tokenizer(folder: Path) -> None:
    vocab = {token: i for i, token in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    fixed = "|".join(part.replace("{", r"\{").replace("}", r"\}") for part in ("<tools>", *CALL))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{fixed}|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    pad, bos, eos, unk = SPECIAL
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="assets of the tool example")
    parser.add_argument("--out", type=Path, default=Path("runs/multiply"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable_progress_bar()
    make_assets(args.out, args.seed)
    print(f"model, train.parquet, eval.parquet and sft.parquet are in {args.out}")
