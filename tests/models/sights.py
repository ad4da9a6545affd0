"""Tiny towers for images: what a tiny model of each family that sees any has beside its language
model, with its image processor and the tokens that its chat template writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import transformers as hf
from tiny_models import CHARS, save_tokenizer

from spmdrl.hub.kimi_vl_images import KimiVLImageProcessor

SIDE = 8  # of the square of pixels that is a token


@dataclass(frozen=True)
class Sight:
    """tokens: added to the tokenizer, by the config's field where it has one for them; shown: what
    the chat template writes for an image; tower, top: fields of the tower's config, and of the
    whole one; processor: of images.
    """

    tokens: Mapping[str, str]
    shown: str
    processor: Any
    tower: Mapping[str, Any]
    top: Mapping[str, Any] = field(default_factory=dict)


GRID_TOKENS = {
    "vision_start_token_id": "<|vision_start|>", "image_token_id": "<|image_pad|>",
    "vision_end_token_id": "<|vision_end|>", "video_token_id": "<|video_pad|>",
}  # fmt: skip
GLM_TOKENS = {
    "image_start_token_id": "<|begin_of_image|>", "image_token_id": "<|image|>",
    "image_end_token_id": "<|end_of_image|>", "video_token_id": "<|video|>",
    "video_start_token_id": "<|begin_of_video|>", "video_end_token_id": "<|end_of_video|>",
}  # fmt: skip
GEMMA3_TOKENS = {
    "boi_token_index": "<start_of_image>", "image_token_index": "<image_soft_token>",
    "eoi_token_index": "<end_of_image>",
}  # fmt: skip
GEMMA4_TOKENS = {
    "boi_token_id": "<|image>", "image_token_id": "<|image|>", "eoi_token_id": "<image|>",
    "video_token_id": "<|video|>", "audio_token_id": "<|audio|>", "boa_token_id": "<|audio>",
    "eoa_token_index": "<audio|>",
}  # fmt: skip
INTERNVL_TOKENS = {"start": "<img>", "image_token_id": "<IMG_CONTEXT>", "end": "</img>"}
PIXTRAL_TOKENS = {"image_token_index": "[IMG]", "break": "[IMG_BREAK]", "end": "[IMG_END]"}
KIMI_TOKENS = {
    "start": "<|media_start|>", "content": "<|media_content|>",
    "media_placeholder_token_id": "<|media_pad|>", "end": "<|media_end|>",
}  # fmt: skip

PIXELS = {"shortest_edge": 64, "longest_edge": 1024}
QWEN_PIXELS = hf.Qwen2VLImageProcessorPil(patch_size=4, size=PIXELS)
VIT = {"depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96, "patch_size": 4,
       "out_hidden_size": 128}  # fmt: skip
SIGLIP = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2,
          "intermediate_size": 96, "patch_size": 4}  # fmt: skip
QWEN_SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN3 = Sight(
    GRID_TOKENS, QWEN_SHOWN, QWEN_PIXELS,
    VIT | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
)  # fmt: skip
QWEN35 = Sight(GRID_TOKENS, QWEN_SHOWN, QWEN_PIXELS, VIT | {"num_position_embeddings": 64})
GLM = Sight(
    GLM_TOKENS, "<|begin_of_image|><|image|><|end_of_image|>",
    hf.Glm4vImageProcessorPil(patch_size=4, size=PIXELS), VIT | {"image_size": 32},
)  # fmt: skip
SIGHTS: dict[str, Sight] = {
    "qwen2_vl": Sight(
        GRID_TOKENS, QWEN_SHOWN, QWEN_PIXELS,
        {"depth": 2, "embed_dim": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
         "hidden_size": 128},
    ),
    "qwen2_5_vl": Sight(
        GRID_TOKENS, QWEN_SHOWN, QWEN_PIXELS,
        VIT | {"window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": QWEN3,
    "qwen3_vl_moe": QWEN3,
    "qwen3_5": QWEN35,
    "qwen3_5_moe": QWEN35,
    "glm4v": GLM,
    "glm4v_moe": GLM,
    "glm46v": replace(GLM, processor=hf.Glm46VImageProcessorPil(patch_size=4, size=PIXELS)),
    "kimi_vl": Sight(
        KIMI_TOKENS, "<|media_start|>image<|media_content|><|media_pad|><|media_end|>",
        KimiVLImageProcessor(patch_size=4, in_token_limit=64),
        SIGLIP | {"init_pos_emb_height": 8, "init_pos_emb_width": 8},
    ),
    "gemma3": Sight(
        GEMMA3_TOKENS, "<start_of_image>",
        hf.Gemma3ImageProcessorPil(size={"height": 24, "width": 24}),
        SIGLIP | {"image_size": 24, "vision_use_head": False}, {"mm_tokens_per_image": 9},
    ),
    "gemma4": Sight(
        GEMMA4_TOKENS, "<|image|>",
        hf.Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=2),
        SIGLIP | {"head_dim": 32, "global_head_dim": 32, "num_key_value_heads": 2,
                  "pooling_kernel_size": 2, "position_embedding_size": 300},
    ),
    "internvl": Sight(
        INTERNVL_TOKENS, "<IMG_CONTEXT>",
        hf.GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, max_patches=3),
        SIGLIP | {"image_size": [16, 16], "patch_size": [4, 4]}, {"image_seq_length": 4},
    ),
    "mistral3": Sight(
        PIXTRAL_TOKENS, "[IMG]",
        hf.PixtralImageProcessorPil(patch_size=4, size={"longest_edge": 32}),
        SIGLIP | {"image_size": 32, "head_dim": 32}, {"spatial_merge_size": 2},
    ),
}  # fmt: skip


def template(shown: str) -> str:
    """Images stand where parts of the content say so; roles are their first letters."""
    return (
        "{% for m in messages %}{{ m['role'][0] }}:{% if m['content'] is string %}"
        "{{ m['content'] }}{% else %}{% for p in m['content'] %}{% if p['type'] == 'image' %}"
        + shown
        + "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )


def num_tokens(sight: Sight) -> int:
    return len(CHARS) + len(sight.tokens)


def add_tower(config: Any, sight: Sight) -> None:
    """Makes a config's tower tiny, in place, and gives its special tokens the tokenizer's ids."""
    for name, value in sight.tower.items():
        setattr(config.vision_config, name, value)
    for name, value in sight.top.items():
        setattr(config, name, value)
    for place, name in enumerate(sight.tokens):
        if hasattr(config, name):
            setattr(config, name, len(CHARS) + place)


def save_processor(sight: Sight, folder: Path) -> None:
    """Saves tokenizer, chat template and image processor."""
    save_tokenizer(folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [*sight.tokens.values()]})
    tokenizer.chat_template = template(sight.shown)
    tokenizer.save_pretrained(folder)
    sight.processor.save_pretrained(folder)
