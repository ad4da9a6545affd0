"""The tokenizer of Kimi-VL, Kimi K2 and Moonlight, without the Python file that their folders bring
along.

The folders have the ranks of byte pairs in tiktoken's format and no tokenizer.json. How a text is
cut into words before its pairs are merged, and which tokens behind the ranks are special, stands in
the Python file alone; it is the same in all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TokenizersBackend
from transformers.convert_slow_tokenizer import TikTokenConverter

FILES = {"vocab_file": "tiktoken.model", "tokenizer_file": "tokenizer.json"}
NUM_SPECIAL = 256  # tokens behind the ranks
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
BEFORE, BEHIND = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
WORDS = "|".join((
    r"[\p{Han}]+", f"{BEFORE}{UPPER}*{LOWER}+{BEHIND}", f"{BEFORE}{UPPER}+{LOWER}*{BEHIND}",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
))  # fmt: skip


class TikTokenTokenizer(TokenizersBackend):
    """Bears the name that tokenizer_config.json of the folders has for its class, by which
    transformers finds it. What it saves has a tokenizer.json, which needs no such class.
    """

    vocab_files_names = FILES

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs: Any) -> Any:
        saved = kwargs.get("tokenizer_file")
        if saved is not None and Path(saved).is_file():
            return super().convert_to_native_format(trust_remote_code, **kwargs)
        ranks = kwargs.get("vocab_file")
        if ranks is None:
            raise ValueError("there is neither a tiktoken.model nor a tokenizer.json")
        first = len(TikTokenConverter.load_tiktoken_bpe(ranks))
        named = kwargs.get("added_tokens_decoder") or {}
        special = [
            str(named.get(id, f"<|reserved_token_{id}|>"))
            for id in range(first, first + NUM_SPECIAL)
        ]  # fmt: skip
        converter = TikTokenConverter(ranks, WORDS, extra_special_tokens=special)
        return kwargs | {"tokenizer_object": converter.converted()}
