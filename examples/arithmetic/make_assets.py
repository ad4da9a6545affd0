"""Makes everything the arithmetic example needs: a small Qwen3 with random weights, and the data.

    python examples/arithmetic/make_assets.py [--out runs/arithmetic] [--seed 0] [--large]

The task is addition of two numbers below 50, one character a token, with the units first, which is
how one adds on paper: "17+25=" is answered "24". Two questions in three need a carry. The solved
examples of `sft.parquet` forget it more often than not, so a model that was fine-tuned on them gets
the other third right; what it takes to learn the carry is a reward. `train.parquet` has the
questions for that, `eval.parquet` 256 that are in neither of the two. `preferences.parquet` has
a right and a wrong answer to every question but these 256, twice; these are in
`preferences_eval.parquet`. `mixture.parquet` has the questions of `train.parquet` as two data
sources, "carry" and "plain", with the sum of the digits of both numbers as their difficulty.

--large: a model of 109 million weights instead, to watch memory, and sums of 2 to 40 numbers.
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

NUMBERS = 50  # operands are 0 .. 49
NUM_HELD_OUT = 256
NUM_SFT = 1000
WRONG_ANSWERS = 2  # to each question, of the preferences
FORGOTTEN = 0.7  # share of the solved examples with a carry in which it is forgotten
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHARACTERS = "0123456789+="
LARGE_VOCAB = 16384


def make_assets(out: Path, seed: int) -> None:
    """Writes model/ and the data into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    save_model(out / "model", seed)
    draw = random.Random(seed)
    pairs = questions(draw)
    held_out, others = pairs[:NUM_HELD_OUT], pairs[NUM_HELD_OUT:]
    write_rows(out / "eval.parquet", held_out)
    write_rows(out / "train.parquet", others)
    write_mixture(out / "mixture.parquet", others)
    solved = others[:NUM_SFT]
    responses = [answer(a, b, carry=draw.random() >= FORGOTTEN) for a, b in solved]
    write_rows(out / "sft.parquet", solved, responses)
    asked = sorted(set(all_pairs()) - set(held_out))
    write_preferences(out / "preferences.parquet", asked * WRONG_ANSWERS, draw)
    write_preferences(out / "preferences_eval.parquet", held_out, draw)


def make_large(out: Path, seed: int) -> None:
    """Writes model/ and train.parquet: 500 sums, so that no two steps have the same lengths."""
    out.mkdir(parents=True, exist_ok=True)
    save_large_model(out / "model", seed)
    draw = random.Random(seed)
    sums = [[draw.randrange(NUMBERS) for _ in range(draw.randint(2, 40))] for _ in range(500)]
    rows = [row_of(i, "+".join(map(str, terms)) + "=", str(sum(terms)))
            for i, terms in enumerate(sums)]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), out / "train.parquet")


def all_pairs() -> list[tuple[int, int]]:
    return [(a, b) for a in range(NUMBERS) for b in range(NUMBERS)]


def questions(draw: random.Random) -> list[tuple[int, int]]:
    """Every pair of operands that needs a carry and half as many that do not, in random order."""
    pairs = all_pairs()
    hard = [(a, b) for a, b in pairs if a % 10 + b % 10 >= 10]
    easy = [(a, b) for a, b in pairs if a % 10 + b % 10 < 10]
    chosen = hard + draw.sample(easy, len(hard) // 2)
    draw.shuffle(chosen)
    return chosen


def answer(a: int, b: int, carry: bool = True) -> str:
    """Two digits, units first: (17, 25) -> "24"; without the carry "23"."""
    units, tens = a % 10 + b % 10, a // 10 + b // 10
    if carry:
        tens += units // 10
    return f"{units % 10}{tens}"


def wrong_answer(a: int, b: int, draw: random.Random) -> str:
    """The carry forgotten, or one digit another."""
    right = answer(a, b)
    choices = [digit + right[1] for digit in "0123456789"]
    choices += [right[0] + digit for digit in "0123456789"]
    choices += [answer(a, b, carry=False)] * len(choices)
    return draw.choice([choice for choice in choices if choice != right])


def write_preferences(path: Path, pairs: list[tuple[int, int]], draw: random.Random) -> None:
    """Both answers as the last turn of a chat."""
    rows = []
    for a, b in pairs:
        asked = {"role": "user", "content": f"{a:02d}+{b:02d}="}
        answers = {"chosen": answer(a, b), "rejected": wrong_answer(a, b, draw)}
        rows.append({name: [asked, {"role": "assistant", "content": text}]
                     for name, text in answers.items()})  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_rows(
    path: Path, pairs: list[tuple[int, int]], responses: list[str] | None = None
) -> None:
    """verl's schema; with `responses` a column that only fine-tuning reads."""
    rows = []
    for index, (a, b) in enumerate(pairs):
        row = row_of(index, f"{a:02d}+{b:02d}=", answer(a, b))
        if responses is not None:
            row["response"] = responses[index]
        rows.append(row)
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_mixture(path: Path, pairs: list[tuple[int, int]]) -> None:
    """As write_rows, with the kind of each question and a number that says how hard it is."""
    rows = []
    for index, (a, b) in enumerate(pairs):
        row = row_of(index, f"{a:02d}+{b:02d}=", answer(a, b))
        row["data_source"] = "carry" if a % 10 + b % 10 >= 10 else "plain"
        row["extra_info"]["difficulty"] = sum(map(int, f"{a}{b}"))
        rows.append(row)
    pq.write_table(pa.Table.from_pylist(rows), path)


def row_of(index: int, question: str, truth: str) -> dict[str, Any]:
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": index},
    }


def save_model(folder: Path, seed: int) -> None:
    """Random float32 weights, 0.4 million, and a tokenizer: one character, one token."""
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


def save_large_model(folder: Path, seed: int) -> None:
    """Random float32 weights, 109 million, in the proportions of models of that size."""
    config = Qwen3Config(
        vocab_size=LARGE_VOCAB, hidden_size=768, intermediate_size=2304, num_hidden_layers=14,
        num_attention_heads=12, num_key_value_heads=4, head_dim=64, max_position_embeddings=256,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    save_tokenizer(folder, LARGE_VOCAB)


def save_tokenizer(folder: Path, size: int = 0) -> None:
    """The chat template concatenates the contents of the turns and adds nothing.

    size: of the vocabulary at least; words that no text has fill it up.
    """
    vocab = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    vocab |= {f"<{i}>": i for i in range(len(vocab), size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    pad, bos, eos, unk = SPECIAL
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="assets of the arithmetic example")
    parser.add_argument("--out", type=Path, default=Path("runs/arithmetic"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--large", action="store_true", help="109 million weights, longer sums")
    args = parser.parse_args()
    logging.disable_progress_bar()
    (make_large if args.large else make_assets)(args.out, args.seed)
    print(f"the model and its data are in {args.out}")
