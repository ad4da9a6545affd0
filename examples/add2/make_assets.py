"""Model and data of the add2 workload, which the benchmark runs: python make_assets.py OUT

A Qwen3 of 3.2 million random weights (seed 0), one character a token, 512 prompts "{a}+{b}=",
and as many of 60 characters, in which worked additions stand before the question.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from spmdrl.distributed.env import before_torch

before_torch()
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHARACTERS = "0123456789+-*=() abcdefghijklmnopqrstuvwxyz?.,:\n#"


def save_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=512,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)


def save_tokenizer(folder: Path) -> None:
    vocab = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    pad, bos, eos, unk = SPECIAL
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(folder)


def write_prompts(path: Path, length: int = 0) -> None:
    """length: of every prompt, in characters, filled up with worked additions before the question;
    0: the question alone.
    """
    draw = random.Random(0)
    rows = []
    for _ in range(512):
        a, b = draw.randint(1, 99), draw.randint(1, 99)
        question = f"{a}+{b}="
        while len(question) < length:
            c, d = draw.randint(1, 99), draw.randint(1, 99)
            question = f"{c}+{d}={c + d}, {question}"
        question = question[-length:]
        rows.append(
            {
                "data_source": "add2",
                "prompt": [{"role": "user", "content": question}],
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), path)


if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    save_model(out / "model")
    save_tokenizer(out / "model")
    write_prompts(out / "train.parquet")
    write_prompts(out / "long_prompts.parquet", length=60)
