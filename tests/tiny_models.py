"""Small models and tokenizers that tests make for themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


TINY = {  # of a config of Qwen3, with or without experts
    "vocab_size": len(CHARS), "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "tie_word_embeddings": True, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
QWEN3 = TINY | {"intermediate_size": 128}


def save_qwen3(folder: str | Path, seed: int = 0, **overrides: object) -> Path:
    """A two-layer Qwen3 with random float32 weights and its tokenizer; about 100k parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**QWEN3 | overrides)
    return save_random(Qwen3ForCausalLM, config, folder, seed)


def save_qwen3_moe(folder: str | Path, seed: int = 0, **overrides: object) -> Path:
    """A two-layer Qwen3-MoE of eight experts with random float32 weights, and its tokenizer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
               "norm_topk_prob": True}  # fmt: skip
    config = Qwen3MoeConfig(**TINY | experts | overrides)
    return save_random(Qwen3MoeForCausalLM, config, folder, seed)


def save_random(kind: Any, config: Any, folder: str | Path, seed: int) -> Path:
    import torch  # not at the top: processes of agents and tools import this module

    torch.manual_seed(seed)
    model = kind(config)
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return Path(folder)


MARKS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
SHOWING_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}{% if p['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif p['type'] == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def save_qwen_vl(
    folder: str | Path, kind: str = "qwen2_5_vl", tied: bool = False, most_pixels: int = 1024,
    **sizes: Any,
) -> Path:  # fmt: skip
    """A Qwen2-VL, Qwen2.5-VL or Qwen3-VL of two layers and two of its tower; weights, tokenizer
    and image processor. An image of 8 x 8 pixels is a token; the largest is 16. sizes: of the
    tower, where they are others."""
    import torch
    import transformers as hf
    from transformers import AutoTokenizer

    save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = SHOWING_TEMPLATE
    tokenizer.save_pretrained(folder)
    start, image, end, video = (tokenizer.convert_tokens_to_ids(mark) for mark in MARKS)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 512, "rope_parameters": rope, "tie_word_embeddings": tied,
        "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    tower = {"depth": 2, "hidden_size": 64, "num_heads": 2, "patch_size": 4}
    if kind == "qwen2_vl":
        tower |= {"embed_dim": 64, "mlp_ratio": 2}
        config, model = hf.Qwen2VLConfig, hf.Qwen2VLForConditionalGeneration
    elif kind == "qwen2_5_vl":
        tower |= {"intermediate_size": 96, "out_hidden_size": 64, "window_size": 16,
                  "fullatt_block_indexes": [1]}  # fmt: skip
        config, model = hf.Qwen2_5_VLConfig, hf.Qwen2_5_VLForConditionalGeneration
    else:
        tower |= {"intermediate_size": 96, "out_hidden_size": 64, "num_position_embeddings": 64,
                  "deepstack_visual_indexes": [0]}  # fmt: skip
        text |= {"head_dim": 32, "rope_parameters": rope | {"mrope_interleaved": True}}
        config, model = hf.Qwen3VLConfig, hf.Qwen3VLForConditionalGeneration
    torch.manual_seed(0)
    made = model(config(
        text_config=text, vision_config=tower | sizes, image_token_id=image, video_token_id=video,
        vision_start_token_id=start, vision_end_token_id=end, tie_word_embeddings=tied,
    ))  # fmt: skip
    made.generation_config.eos_token_id = 2
    made.generation_config.pad_token_id = 0
    made.save_pretrained(folder)
    size = {"shortest_edge": 64, "longest_edge": most_pixels}
    hf.Qwen2VLImageProcessorPil(patch_size=4, size=size).save_pretrained(folder)
    return Path(folder)


def film(path: Path, seed: int = 0, frames: int = 8, fps: int = 4) -> Path:
    """A video of 32 x 16 pixels whose frames differ; .avi (Motion JPEG) or .mp4 (MPEG-4)."""
    import cv2
    import numpy as np

    code = cv2.VideoWriter.fourcc(*("MJPG" if path.suffix == ".avi" else "mp4v"))
    writer = cv2.VideoWriter(str(path), code, fps, (32, 16))
    draw = np.random.default_rng(seed)
    for _ in range(frames):
        writer.write(draw.integers(0, 256, (16, 32, 3), dtype=np.uint8))
    writer.release()
    return path


def png(seed: int, width: int, height: int) -> bytes:
    """An image of random pixels."""
    import io

    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
