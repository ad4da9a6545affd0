"""Kimi-VL without the code of its folders: the tower against its formulas, pixels, tokenizer, and
what a checkpoint has.
"""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
import torch
from families import BY_KIND, save_tiny
from PIL import Image
from safetensors.torch import load_file
from tiny_models import png
from torch import Tensor, nn
from torch.nn.functional import gelu, interpolate, layer_norm
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from vision_checks import vision_of

from spmdrl.data.pictures import open_picture
from spmdrl.data.processor_files import ProcessorFiles
from spmdrl.engines.fsdp.model import build_model
from spmdrl.hub.hf_folder import keep_tower, load_hf_config, load_tokenizer
from spmdrl.hub.kimi_vl import KimiVLForConditionalGeneration
from spmdrl.hub.kimi_vl_images import KimiVLImageProcessor
from spmdrl.hub.moonshot_tokenizer import NUM_SPECIAL, WORDS, TikTokenTokenizer
from spmdrl.hub.remote_code import allow_code, has_foreign_code
from spmdrl.hub.vision_classifiers import register_classifier
from spmdrl.types import Picture

PUBLISHED = {
    "language_model.lm_head.weight", "language_model.model.embed_tokens.weight",
    "language_model.model.layers.1.mlp.experts.7.up_proj.weight",
    "language_model.model.layers.1.mlp.gate.e_score_correction_bias",
    "multi_modal_projector.linear_1.bias", "multi_modal_projector.pre_norm.weight",
    "vision_tower.encoder.blocks.1.mlp.fc0.weight", "vision_tower.encoder.blocks.0.norm0.bias",
    "vision_tower.encoder.blocks.1.wqkv.weight", "vision_tower.encoder.blocks.1.wo.bias",
    "vision_tower.encoder.final_layernorm.weight", "vision_tower.patch_embed.pos_emb.weight",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("kimi") / "model"
    save_tiny(BY_KIND["kimi_vl with images"], found)
    keep_tower(str(found))
    return found


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return build_model(str(folder), full=True)


class Published:
    """The tower and the projector in float64, image by image, by the names of a checkpoint."""

    def __init__(self, weights: dict[str, Tensor], heads: int) -> None:
        self.weights, self.heads = weights, heads

    def layer(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return layer_norm(
            x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        )

    def turned(self, x: Tensor, columns: int) -> Tensor:
        """Rotates neighbours, by turns by their column and by their row; x: of one head."""
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        for patch in range(len(x)):
            row, column = divmod(patch, columns)
            for pair in range(pairs.shape[1]):
                angle = (row if pair % 2 else column) * 10000 ** (-(pair // 2) * 4 / x.shape[1])
                pairs[patch, pair] *= complex(np.cos(angle), np.sin(angle))
        return torch.view_as_real(pairs).flatten(1)

    def attention(self, name: str, x: Tensor, columns: int) -> Tensor:
        query, key, value = self.layer(f"{name}.wqkv", x).chunk(3, -1)
        seen = []
        parts = (part.chunk(self.heads, -1) for part in (query, key, value))
        for q, k, v in zip(*parts, strict=True):
            scores = self.turned(q, columns) @ self.turned(k, columns).T
            seen.append((scores / q.shape[1] ** 0.5).softmax(-1) @ v)
        return self.layer(f"{name}.wo", torch.cat(seen, -1))

    def vectors(self, pixels: Tensor, rows: int, columns: int) -> Tensor:
        """pixels: (rows * columns, 3, side, side) of one image. Returns (tokens, hidden_size)."""
        kernel = self.weights["vision_tower.patch_embed.proj.weight"]
        x = pixels.flatten(1) @ kernel.flatten(1).T
        x = x + self.weights["vision_tower.patch_embed.proj.bias"]
        table = self.weights["vision_tower.patch_embed.pos_emb.weight"].permute(2, 0, 1)[None]
        x = x + interpolate(table, (rows, columns), mode="bicubic")[0].flatten(1).T
        for block in ("vision_tower.encoder.blocks.0", "vision_tower.encoder.blocks.1"):
            x = x + self.attention(block, self.norm(f"{block}.norm0", x), columns)
            inside = self.layer(f"{block}.mlp.fc0", self.norm(f"{block}.norm1", x))
            x = x + self.layer(f"{block}.mlp.fc1", gelu(inside, approximate="tanh"))
        x = self.norm("vision_tower.encoder.final_layernorm", x)
        x = self.norm("multi_modal_projector.pre_norm", x)
        squares = [
            torch.cat([x[(r + i) * columns + c + j] for i in (0, 1) for j in (0, 1)])
            for r in range(0, rows, 2)
            for c in range(0, columns, 2)
        ]
        inside = gelu(self.layer("multi_modal_projector.linear_1", torch.stack(squares)))
        return self.layer("multi_modal_projector.linear_2", inside)


def test_the_tower_computes_its_formulas(folder: Path, model: Any) -> None:
    """Of two images at once; one is larger than the table of positions, one smaller."""
    weights = {n: t.double() for n, t in load_file(folder / "model.safetensors").items()}
    assert weights.keys() >= PUBLISHED
    heads = model.config.vision_config.num_attention_heads
    grids = torch.tensor([[1, 10, 4], [1, 2, 6]])
    pixels = torch.randn(52, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    found = model.model.get_image_features(pixels, grids).pooler_output
    wanted = [
        Published(weights, heads).vectors(part.double(), rows, columns)
        for part, (_, rows, columns) in zip(pixels.split([40, 12]), grids.tolist(), strict=True)
    ]
    assert [len(each) for each in wanted] == [10, 3]
    assert [tuple(each.shape) for each in found] == [tuple(each.shape) for each in wanted]
    for mine, right in zip(found, wanted, strict=True):
        assert (mine - right).abs().max() < 2e-6 < right.abs().max()


def test_the_token_of_images_is_a_token_like_any_other_in_an_answer(folder: Path) -> None:
    model: Any = KimiVLForConditionalGeneration.from_pretrained(folder).eval()
    ids = torch.tensor([[5, model.config.image_token_id, 7]])
    embedded = nn.functional.embedding(ids, model.get_input_embeddings().weight)
    plain = model.model.language_model(inputs_embeds=embedded, use_cache=False)
    assert torch.equal(model.model(input_ids=ids, use_cache=False)[0], plain[0])


def test_a_reward_model_of_it_is_saved_by_the_published_names(folder: Path, tmp_path: Path) -> None:
    config = load_hf_config(str(folder))
    register_classifier(config)
    config.num_labels = 1
    made = AutoModelForSequenceClassification.from_pretrained(folder, config=config)
    made.save_pretrained(tmp_path)
    wanted = {name for name in PUBLISHED if "lm_head" not in name} | {"score.weight"}
    assert load_file(tmp_path / "model.safetensors").keys() >= wanted
    again, found = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, config=config, output_loading_info=True
    )
    assert not found["missing_keys"] and not found["unexpected_keys"]
    assert torch.equal(again.score.weight, made.score.weight)


@pytest.mark.parametrize("size", [(16, 8), (13, 9), (100, 60)])
def test_images_keep_their_size_up_to_a_limit_and_are_filled_up_with_black(
    folder: Path, size: tuple[int, int]
) -> None:
    """The last one has 375 patches, and the limit of the tiny model is 64."""
    vision, picture = vision_of(str(folder)), Picture(png(3, *size))
    pixels, grid = vision.pixels(picture).values()
    image = open_picture(picture)
    if size == (100, 60):
        scale = (64 / 375) ** 0.5
        image = image.resize((int(100 * scale), int(60 * scale)), Image.Resampling.BICUBIC)
    (_, rows, columns), side = grid[0].tolist(), 4
    assert len(pixels) == rows * columns == 4 * len(vision.layout(picture))
    for patch, (row, column) in zip(pixels, np.ndindex(rows, columns), strict=True):
        for y, x in np.ndindex(side, side):
            place = (column * side + x, row * side + y)
            inside = place[0] < image.width and place[1] < image.height
            colour = image.getpixel(place) if inside else (0, 0, 0)
            wanted = torch.tensor([value / 255 / 0.5 - 1 for value in colour])
            assert (patch[:, y, x] - wanted).abs().max() < 1e-6


def test_images_that_the_tower_does_not_take_are_refused() -> None:
    with pytest.raises(ValueError, match=r"4 x 1200 patches.*fewer than 512"):
        KimiVLImageProcessor(in_token_limit=10000).grid_of(50, 1200 * 14)
    with pytest.raises(ValueError, match="pad_input=False"):
        KimiVLImageProcessor(pad_input=False).grid_of(28, 28)


# ---- a folder as it is published, with Python files


def save_ranks(file: Path) -> dict[bytes, int]:
    """Saves byte pairs as tiktoken does, and returns them."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for text in ("th", "the", " the", "in", "ing", "Wo", "World", "'s", "11", "\n\n", "中", "中国"):
        ranks[text.encode()] = len(ranks)
    lines = [base64.b64encode(pair) + f" {rank}\n".encode() for pair, rank in ranks.items()]
    file.write_bytes(b"".join(lines))
    return ranks


@pytest.fixture
def with_code(folder: Path, tmp_path: Path) -> Path:
    """The same model as its makers publish one; each Python file leaves a mark when it is run."""
    code = f"open({str(tmp_path / 'ran')!r}, 'a').write(__name__)\nraise RuntimeError\n"
    published = tmp_path / "published"
    published.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config["text_config"].pop("model_type")
    config["auto_map"] = {
        "AutoConfig": "configuration_kimi_vl.KimiVLConfig",
        "AutoModelForCausalLM": "modeling_kimi_vl.KimiVLForConditionalGeneration",
    }
    processor = {
        "auto_map": {"AutoImageProcessor": "image_processing_kimi_vl.KimiVLImageProcessor"},
        "in_token_limit": 4096, "patch_size": 4, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "pad_input": True,
    }  # fmt: skip
    first = len(save_ranks(published / "tiktoken.model"))
    special = {first: "[BOS]", first + 1: "[EOS]", first + 21: "<|media_pad|>"}
    tokenizer = {
        "auto_map": {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]},
        "tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]",
        "added_tokens_decoder": {
            str(id): {"content": text, "special": True} for id, text in special.items()
        },
    }  # fmt: skip
    for name, content in (
        ("config", config), ("preprocessor_config", processor), ("tokenizer_config", tokenizer),
    ):  # fmt: skip
        (published / f"{name}.json").write_text(json.dumps(content))
    for name in ("configuration_kimi_vl", "modeling_kimi_vl", "image_processing_kimi_vl",
                 "tokenization_moonshot"):  # fmt: skip
        (published / f"{name}.py").write_text(code)
    (published / "model.safetensors").symlink_to(folder / "model.safetensors")
    return published


def test_no_code_of_a_folder_is_run_and_a_checkpoint_has_it_again(
    with_code: Path, tmp_path: Path
) -> None:
    name = str(with_code)
    keep_tower(name)
    for trusted in (False, True):
        if trusted:
            allow_code(name)
        assert isinstance(build_model(name, full=True), KimiVLForConditionalGeneration)
        assert type(load_tokenizer(name)) is TikTokenTokenizer
        assert type(vision_of(name).processor) is KimiVLImageProcessor
    assert load_hf_config(name).get_text_config().model_type == "deepseek_v3"
    assert not has_foreign_code(load_hf_config(name))
    out = tmp_path / "out"
    out.mkdir()
    ProcessorFiles(name).save_pretrained(out)
    assert {"modeling_kimi_vl.py", "tokenization_moonshot.py", "tiktoken.model"} <= {
        path.name for path in out.iterdir()
    }
    assert not (tmp_path / "ran").exists()


def test_the_tokenizer_cuts_texts_as_tiktoken_does(with_code: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(with_code, trust_remote_code=False)
    ranks = save_ranks(tmp_path / "ranks")
    first, names = len(ranks), tokenizer.get_vocab()
    named = {first: "[BOS]", first + 1: "[EOS]", first + 21: "<|media_pad|>"}
    special = {
        named.get(id, f"<|reserved_token_{id}|>"): id for id in range(first, first + NUM_SPECIAL)
    }
    assert special.items() <= names.items()
    assert len(tokenizer) == first + NUM_SPECIAL
    wanted = tiktoken.Encoding("kimi", pat_str=WORDS, mergeable_ranks=ranks, special_tokens=special)
    parts = [*"aBc Xyz123'é.,!\n\t\r中国한글\u0301ǅ", "the", " the", "World", "'LL", "ing", "111",
             " 中国", "\n\n", "<|media_pad|>", "[EOS]"]  # fmt: skip
    draw = random.Random(0)
    for _ in range(500):
        text = "".join(draw.choices(parts, k=draw.randint(0, 30)))
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert found == wanted.encode(text, allowed_special="all")
        assert tokenizer.decode(found) == text
    tokenizer.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text((with_code / "config.json").read_text())
    again = load_tokenizer(str(tmp_path / "saved"))
    assert again("the [EOS] 中国").input_ids == tokenizer("the [EOS] 中国").input_ids
