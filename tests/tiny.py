"""Small models and tokenizers that tests make for themselves."""

from __future__ import annotations

from pathlib import Path

import torch

CHARS = ["<pad>", "<bos>", "<eos>", "<unk>"] + list(
    "0123456789+-*=() abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ?.,:;!'\"$%/\\{}[]<>&#\n"
)


def save_tokenizer(folder: str | Path) -> None:
    """One character is one token; the chat template concatenates contents."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {char: i for i, char in enumerate(CHARS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(folder)


def save_qwen3(folder: str | Path, seed: int = 0, **overrides: object) -> Path:
    """A two-layer Qwen3 with random float32 weights and its tokenizer; about 100k parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings = {
        "vocab_size": len(CHARS), "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": True,
        "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
    } | overrides  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**settings))
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return Path(folder)
