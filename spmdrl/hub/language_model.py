"""The language model in the files of a model that has a tower for images or sounds as well.

Checkpoints of Qwen3.5, Gemma 3 and 4, Mistral Small 3 and Llama 4 are such. Where the tower is not
understood here, transformers' class of the language model alone is loaded from them: the names of
its tensors have a part more in the files.

    language_model.model.layers.0...    Gemma 3, Mistral 3, Llama 4
    model.language_model.layers.0...    Qwen3.5, Gemma 4
"""

from __future__ import annotations

# by what a name begins with: by what it begins in the language model alone
PREFIXES = {
    "language_model.model.": "model.", "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}  # fmt: skip
KEY_MAPPING = {f"^{prefix}": name for prefix, name in PREFIXES.items()}  # as from_pretrained's


def language_key(key: str) -> str | None:
    """Returns a tensor's name in the language model alone; None where it is no part of it."""
    for prefix, name in PREFIXES.items():
        if key.startswith(prefix):
            return name + key.removeprefix(prefix)
    return key if key.startswith("lm_head.") else None
