"""Makes what the search example needs: facts about invented people, a small Qwen3, and the data.

    python examples/search/make_assets.py [--out runs/search] [--seed 0]

`corpus.jsonl` has three facts about each of 1,500 people ("bezo home tavi"). A question asks
for one ("home of bezo"), and no model can know it: names and facts are drawn at random. It may
search for it, in the format of Search-R1 (arXiv:2503.09516):

    ?home of bezo :<search> bezo home </search>
    ?<information> Doc 1: bezo home tavi Doc 2: ... </information> :<answer> tavi </answer>

The solved examples of `sft.parquet` search in two cases of five, half of them for the name alone,
and guess in the others. `train.parquet` asks about other people, from which the model learns to
search, and `eval.parquet` about people that are in neither of the two. A syllable is a token, and
so is each fixed word.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from spmdrl.distributed.env import before_torch

before_torch()
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from transformers.utils import logging  # noqa: E402

RELATIONS = ("home", "work", "colour")
NUM_PEOPLE, NUM_SFT, NUM_HELD_OUT = 1500, 1000, 100
SEARCHED, NAME_ALONE = 0.4, 0.5  # shares of the solved examples, and of those that search
SYLLABLES = [f"{a}{b}" for a in "bdgklmprstvz" for b in "aeiou"]
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
FIXED = ["<search> ", " </search>", "<answer> ", " </answer>", "<information> ", " </information>",
         "Doc ", ": ", " of ", *RELATIONS]  # fmt: skip
WORDS = [*FIXED, *SYLLABLES, *"?: \n0123456789"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}:{{ m.content }}<eos>"
    "{% else %}?{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
)


class Fact(NamedTuple):
    name: str
    relation: str
    value: str

    @property
    def text(self) -> str:
        return f"{self.name} {self.relation} {self.value}"


def make_assets(out: Path, seed: int) -> None:
    """Writes model/, corpus.jsonl, train.parquet, eval.parquet and sft.parquet into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    facts = make_facts(draw)
    rows = [{"id": str(i), "contents": fact.text} for i, fact in enumerate(facts)]
    Path(out, "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    by_person = [facts[i : i + len(RELATIONS)] for i in range(0, len(facts), len(RELATIONS))]
    solved, held_out = by_person[:NUM_SFT], by_person[NUM_SFT : NUM_SFT + NUM_HELD_OUT]
    others = by_person[NUM_SFT + NUM_HELD_OUT :]
    messages = [solution(fact, person, draw) for person in solved for fact in person]
    write(out / "sft.parquet", [{"messages": each} for each in messages])
    write(out / "train.parquet", map(question, chain.from_iterable(others)))
    write(out / "eval.parquet", map(question, chain.from_iterable(held_out)))
    save_model(out / "model", seed)


def make_facts(draw: random.Random) -> list[Fact]:
    """Draws the facts about all people, person by person."""
    pairs = [a + b for a in SYLLABLES for b in SYLLABLES]
    names = draw.sample(pairs, NUM_PEOPLE)
    values = sorted(set(pairs) - set(names))
    return [Fact(name, relation, draw.choice(values)) for name in names for relation in RELATIONS]


def question(fact: Fact) -> dict[str, Any]:
    """verl's schema."""
    return {
        "data_source": "search",
        "prompt": [{"role": "user", "content": f"{fact.relation} of {fact.name}"}],
        "reward_model": {"style": "rule", "ground_truth": fact.value},
    }


def solution(fact: Fact, person: list[Fact], draw: random.Random) -> list[dict[str, str]]:
    asked = {"role": "user", "content": f"{fact.relation} of {fact.name}"}
    if draw.random() >= SEARCHED:
        guess = draw.choice(SYLLABLES) + draw.choice(SYLLABLES)
        return [asked, {"role": "assistant", "content": f"<answer> {guess} </answer>"}]
    query = fact.name if draw.random() < NAME_ALONE else f"{fact.name} {fact.relation}"
    other = draw.choice([each for each in person if each != fact])
    found = [fact, other] if query != fact.name else draw.sample([fact, other], 2)
    return [
        asked,
        {"role": "assistant", "content": f"<search> {query} </search>"},
        {"role": "user", "content": information([each.text for each in found])},
        {"role": "assistant", "content": f"<answer> {fact.value} </answer>"},
    ]


def information(passages: Iterable[str]) -> str:
    """The reply to a search, as the environment of the run writes it."""
    shown = " ".join(f"Doc {i}: {text}" for i, text in enumerate(passages, start=1))
    return f"<information> {shown} </information>"


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)


def save_model(folder: Path, seed: int) -> None:
    """Random float32 weights, 0.7 million, and the tokenizer."""
    config = Qwen3Config(
        vocab_size=len(SPECIAL) + len(WORDS), hidden_size=128, intermediate_size=384,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=256, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
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
    longest_first = sorted([*FIXED, *SYLLABLES], key=len, reverse=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join([*longest_first, r"[\s\S]"])), "isolated"
    )
    tokenizer.decoder = decoders.Fuse()
    pad, bos, eos, unk = SPECIAL
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="assets of the search example")
    parser.add_argument("--out", type=Path, default=Path("runs/search"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable_progress_bar()
    make_assets(args.out, args.seed)
    print(f"model, corpus.jsonl and the data are in {args.out}")
