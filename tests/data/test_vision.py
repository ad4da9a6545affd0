"""Images of prompts: in the data, in the trainer's pass and in both rollout engines."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from tiny_models import png, save_qwen_vl
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from vision_checks import (
    answer_twice,
    logprobs_alone,
    logprobs_packed,
    packed,
    prompts_of,
    vision_of,
)

from spmdrl.config import ConfigError, DataConfig, RolloutConfig
from spmdrl.data import pictures
from spmdrl.data.image_limits import ImageLimits
from spmdrl.data.images import BatchImages, ImageProcessor, num_bytes
from spmdrl.data.pictures import open_picture, pictures_of, size_of
from spmdrl.data.prompts import PromptDataset
from spmdrl.data.rope_positions import rope_positions
from spmdrl.data.table_files import BadRow
from spmdrl.distributed.topology import Topology
from spmdrl.engines.fsdp.model import build_model
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.hub.vision_families import FAMILIES as VISION_FAMILIES
from spmdrl.hub.vision_families import ImageSizes
from spmdrl.rollout.base import Request, SamplingParams
from spmdrl.rollout.hf.engine import HfEngine
from spmdrl.rollout.vllm import compat
from spmdrl.rollout.vllm.engine import VllmEngine
from spmdrl.rollout.vllm.plain_tensors import plain_tensors
from spmdrl.types import Picture, Prompt

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
ENGINES: dict[str, Any] = {"vllm": VllmEngine, "hf": HfEngine}
ENGINE_NAMES = [pytest.param("vllm", marks=pytest.mark.vllm), "hf"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: str(save_qwen_vl(folder / kind, kind)) for kind in FAMILIES}


def load(model: str, path: Path, topology: Topology, **settings: Any) -> PromptDataset:
    config = DataConfig(train=str(path), **settings)
    vision = ImageProcessor.load(model, load_hf_config(model), config)
    tokenizer = AutoTokenizer.from_pretrained(model)
    return PromptDataset.load(str(path), tokenizer, config, topology, vision=vision)


def row(content: Any, images: Any = None, **more: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": content}]
    return {"data_source": "d", "prompt": prompt, "ground_truth": "x", "images": images} | more


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


# ---- data


def test_an_image_may_be_given_in_several_ways(tmp_path: Path) -> None:
    """To the same digest, by which engines know images."""
    encoded = png(0, 8, 8)
    Path(tmp_path, "a.png").write_bytes(encoded)
    uri = "data:image/png;base64," + base64.b64encode(encoded).decode()
    given = [{"bytes": encoded, "path": None}, {"path": "a.png"}, {"image": "a.png"}, "a.png", uri,
             f"file://{tmp_path}/a.png", encoded]  # fmt: skip
    found = pictures_of(given, tmp_path)
    assert len({picture.digest for picture in found}) == 1
    assert all(open_picture(picture).size == (8, 8) for picture in found)
    assert found[0].digest != Picture(png(1, 8, 8)).digest
    assert pictures_of(None, tmp_path) == pictures_of([], tmp_path) == ()


def test_prompts_have_as_many_image_tokens_as_their_images_want(
    models: dict[str, str], tmp_path: Path, topology: Topology
) -> None:
    """Paths count from the data file; a row without images is as it was."""
    Path(tmp_path, "b.png").write_bytes(png(2, 16, 24))
    parts = [{"type": "text", "text": "A"}, {"type": "image"}, {"type": "text", "text": "B"}]
    path = write(tmp_path / "train.jsonl", [
        row("<image>A<image>B?", ["b.png", {"path": "b.png"}]), row("no <image>"),
        row(parts, ["b.png"]),
    ])  # fmt: skip
    data = load(models["qwen2_5_vl"], path, topology)
    two, none, one = (data.prompt(i) for i in range(3))
    spelled = [data.encoder.tokenizer.decode(prompt.token_ids) for prompt in (two, none, one)]
    image = "<|vision_start|>" + 6 * "<|image_pad|>" + "<|vision_end|>"
    assert spelled == [f"u:{image}A{image}B?a:", "u:no <image>a:", f"u:A{image}Ba:"]
    once = image.replace(6 * "<|image_pad|>", "<|image_pad|>")
    assert two.text == f"u:{once}A{once}B?a:"
    assert [len(prompt.images) for prompt in (two, none, one)] == [2, 0, 1]
    assert (data.images.per_prompt, data.images.largest[0]) == (2, 6)
    few = load(models["qwen2_5_vl"], path, topology, image_max_pixels=192)
    assert few.images.largest[0] == 2
    assert len(few.prompt(0).token_ids) == len(two.token_ids) - 8


def saved(image: Image.Image, kind: str = "TIFF", **settings: Any) -> Picture:
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return Picture(file.getvalue())


@pytest.mark.parametrize("mode", ["RGBA", "L", "LA", "P", "CMYK", "1"])
def test_images_of_any_mode_are_seen_in_rgb(models: dict[str, str], mode: str) -> None:
    made = saved(Image.new("RGB", (16, 8), "white").convert(mode))
    pixels, grid = vision_of(models["qwen2_5_vl"]).pixels(made).values()
    assert pixels.shape == (8, 96)
    assert grid.tolist() == [[1, 2, 4]]
    assert open_picture(made).getpixel((3, 3)) == (255, 255, 255)


@pytest.mark.parametrize("kind", [k for k, family in VISION_FAMILIES.items() if family.mrope])
def test_the_grid_of_an_image_is_known_from_its_size(kind: str) -> None:
    """As the image processor makes it, without decoding it."""
    glm = kind.startswith("glm")
    made = Glm4vImageProcessorPil() if glm else Qwen2VLImageProcessorPil()
    limits = {"shortest_edge": 64 * 28 * 28, "longest_edge": 256 * 28 * 28}
    made.size = dataclasses.replace(made.size, **limits)
    sizes = ImageSizes(made, None, {}, {})
    find = VISION_FAMILIES[kind].grid
    assert find is not None
    for height, width in ((20, 30), (224, 224), (300, 77), (1000, 90), (901, 2003)):
        pixels = made(images=[Image.new("RGB", (width, height))], return_tensors="pt")
        steps, rows, columns = pixels["image_grid_thw"][0].tolist()
        merge = made.merge_size
        assert (steps, *find(sizes, height, width)) == (1, rows // merge, columns // merge)


def test_images_are_seen_as_people_see_them() -> None:
    """Nothing behind a transparent one is white; 16 bits are no glare; cameras may be held upright
    or not."""
    clear = saved(Image.new("RGBA", (8, 8), (0, 0, 0, 0)), "PNG")
    assert open_picture(clear).getpixel((0, 0)) == (255, 255, 255)
    ramp = Image.fromarray(np.arange(0, 65536, 1024, dtype=np.uint16).reshape(8, 8))
    assert ramp.mode == "I;16"
    seen = np.asarray(open_picture(saved(ramp, "PNG")))[..., 0].reshape(-1)
    assert seen.tolist() == [level // 257 for level in range(0, 65536, 1024)]
    turned = Image.Exif()
    turned[0x0112] = 6
    upright = saved(Image.new("RGB", (40, 16)), "JPEG", exif=turned)
    assert size_of(upright) == open_picture(upright).size == (16, 40)
    with pytest.raises(BadRow, match="mode 'F': save it with 8 or 16 bits"):
        open_picture(saved(Image.new("F", (8, 8))))


def test_an_image_is_decoded_once_and_then_known_by_its_size(
    models: dict[str, str], tmp_path: Path, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Image.Image] = []
    read = pictures.in_rgb
    monkeypatch.setattr(pictures, "in_rgb", lambda image: (opened.append(image), read(image))[1])
    path = write(tmp_path / "d.parquet", [row("<image>", [{"bytes": png(0, 16, 24)}])])
    data = load(models["qwen2_5_vl"], path, topology)
    assert len(opened) == 1
    assert len(data.prompt(0).token_ids) == 2 + 8 + 2
    assert len(opened) == 1


def test_rows_with_parts_and_blind_ones(
    models: dict[str, str], tmp_path: Path, topology: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    """A Parquet column has one type: rows without images have parts too."""
    Path(tmp_path, "a.png").write_bytes(png(0, 8, 8))
    parts = [{"type": "text", "text": "hi"}]
    path = write(tmp_path / "d.jsonl", [row(parts), row("<image>"), row("<image>", ["a.png"])])
    data = load(models["qwen2_5_vl"], path, topology)
    spell = data.encoder.tokenizer.decode
    assert [spell(data.prompt(i).token_ids) for i in range(2)] == ["u:hia:", "u:<image>a:"]
    assert data.images.blind == 1
    assert "1 of 3 rows says <image> and has no images" in caplog.text


@pytest.mark.parametrize(
    ("content", "images", "error"),
    [
        ("<image>", ["gone.png"], "'.*gone.png' cannot be read: .*No such file"),
        ("<image>", [{"bytes": "xx"}], "'.*xx' cannot be read"),
        ("<image>", ["data:image/png;base64,\u00e4"], "not base64"),
        ([{"type": "image", "image": "a.png"}], ["a.png"], "an image with its own 'image'"),
        ("<image>", ["https://x/y.png"], "is on the web: fetch it before the run"),
        ("<image>", ["data:image/png;base64,###"], "not base64"),
        ("<image>", ["broken.png"], "broken.png' cannot be read"),
        ("<image>", ["text.png"], "text.png' is of no format that Pillow reads"),
        ("<image>", ["strip.png"], "strip.png', 2500 x 8: absolute aspect ratio"),
        ("<image>", "a.png", "a list of images as"),
        ("<image>", [7], "expected images as"),
        ("<image>", [{"bytes": None}], "expected images as"),
        ("<image><image>", ["a.png"], "1 of them, but the prompt has 2 places for one"),
        ("nothing", ["a.png"], "the prompt has 0 places for one: write <image> where"),
        ([{"type": "audio"}], ["a.png"], "expected {'type': 'image'} or"),
        ([{"type": "image"}], None, "0 of them, but the prompt has 1 places"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_image_is_said_with_its_row(
    models: dict[str, str], tmp_path: Path, topology: Topology, content: Any, images: Any,
    error: str,
) -> None:  # fmt: skip
    encoded = png(0, 24, 24)
    Path(tmp_path, "a.png").write_bytes(encoded)
    Path(tmp_path, "broken.png").write_bytes(encoded[: len(encoded) // 2])
    Path(tmp_path, "text.png").write_text("no image at all")
    Path(tmp_path, "strip.png").write_bytes(png(0, 2500, 8))
    path = write(tmp_path / "d.jsonl", [row("<image>", ["a.png"]), row(content, images)])
    with pytest.raises(ConfigError, match=f"line 2: .*{error}"):
        load(models["qwen2_5_vl"], path, topology)
    assert len(load(models["qwen2_5_vl"], path, topology, on_bad_row="skip")) == 1


def test_other_columns_and_bounds_are_told(
    models: dict[str, str], tmp_path: Path, topology: Topology
) -> None:
    path = write(tmp_path / "d.jsonl", [row("<image>", image="a.png")])
    with pytest.raises(ConfigError, match=r"field 'image': found str 'a.png', expected a column "):
        load(models["qwen2_5_vl"], path, topology)
    with pytest.raises(ConfigError, match="image_min_pixels=64 is above image_max_pixels=60"):
        vision_of(models["qwen2_5_vl"], image_max_pixels=60)


def test_a_prompt_with_images_is_never_cut(
    models: dict[str, str], tmp_path: Path, topology: Topology
) -> None:
    rows = [row("<image>", [{"bytes": png(0, 8, 8)}]), row("<image>", [{"bytes": png(0, 32, 32)}])]
    path = write(tmp_path / "d.parquet", rows)
    limit: dict[str, Any] = {"max_prompt_tokens": 16}
    data = load(models["qwen3_vl"], path, topology, **limit)
    assert (len(data), data.num_overlong, data.images.largest[0]) == (1, 1, 1)
    with pytest.raises(ConfigError, match=r"row 1 .*a prompt of 22 tokens with images cannot be c"):
        load(models["qwen3_vl"], path, topology, overlong_prompts="truncate", **limit)


def test_a_model_that_sees_nothing_is_named(
    qwen3: Path, tmp_path: Path, topology: Topology
) -> None:
    path = write(tmp_path / "d.parquet", [row("<image>", [{"bytes": png(0, 8, 8)}])])
    with pytest.raises(
        ConfigError, match=r"has images, which the model does not see\. Model types"
    ):
        load(str(qwen3), path, topology)


# ---- positions and pixels


@pytest.mark.parametrize("kind", FAMILIES)
def test_positions_are_those_of_transformers(models: dict[str, str], kind: str) -> None:
    """Of random prompts, images at their start, end, and next to each other."""
    model: Any = build_model(models[kind], full=False).base_model
    vision, draw = vision_of(models[kind]), torch.Generator().manual_seed(0)
    for count in (1, 2, 3, 4):
        grids = torch.randint(1, 5, (count, 3), generator=draw) * torch.tensor([0, 2, 2])
        grids[:, 0] = 1
        tokens: list[int] = []
        for grid in grids:
            tokens += [5] * int(torch.randint(0, 4, (1,), generator=draw))
            tokens += [vision.token_id] * int(grid.prod() // 4)
            tokens += [6] * (count % 2 or int(torch.randint(1, 3, (1,), generator=draw)))
        ids = torch.tensor([tokens])
        types = (ids == vision.token_id).int()
        want, _ = model.get_rope_index(ids, types, image_grid_thw=grids)
        spans, first = [], 0
        for size in (grids.prod(1) // 4).tolist():
            first = tokens.index(vision.token_id, first)
            spans.append((first, size))
            first += size
        got = rope_positions(len(tokens), spans, grids // torch.tensor([1, 2, 2]))
        assert torch.equal(got, want[:, 0])


def test_pixels_are_kept_up_to_a_bound(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spmdrl.data.images.CACHE_BYTES", 3 * (16 * 96 * 4 + 24))
    vision = vision_of(models["qwen2_5_vl"])
    pictures = [Picture(png(seed, 16, 16)) for seed in range(6)]
    first = vision.pixels(pictures[0])["pixel_values"]
    for picture in (*pictures, pictures[0]):
        vision.pixels(picture)
    assert len(vision.cache) == 3
    assert vision.cached_bytes == sum(map(num_bytes, vision.cache.values()))
    assert torch.equal(vision.pixels(pictures[0])["pixel_values"], first)


# ---- the trainer


@pytest.mark.parametrize("kind", FAMILIES)
def test_packed_logprobs_and_gradients_are_transformers(models: dict[str, str], kind: str) -> None:
    vision = vision_of(models[kind])
    prompts, answers = prompts_of(vision), [[12, 13], [14, 15, 16], [17, 18]]
    plain: Any = AutoModelForImageTextToText.from_pretrained(
        models[kind], dtype=torch.float32, attn_implementation="eager"
    ).train()
    want = torch.cat([
        logprobs_alone(plain, vision, p, a) for p, a in zip(prompts, answers, strict=True)
    ])  # fmt: skip
    want.sum().backward()
    ours: Any = build_model(models[kind], full=True)
    got = logprobs_packed(ours, BatchImages(vision, prompts.__getitem__), packed(prompts, answers))
    got.sum().backward()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    theirs = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-4, msg=name
        )
        assert "visual" not in name or parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("kind", FAMILIES)
def test_without_an_image_the_tower_is_passed_and_not_seen(
    models: dict[str, str], kind: str
) -> None:
    """Its sharded weights take all ranks; gradients are there, and 0."""
    vision = vision_of(models[kind])
    text, answer = prompts_of(vision)[1], [14, 15, 16]
    model: Any = build_model(models[kind], full=True)
    got = logprobs_packed(model, BatchImages(vision, lambda id: text), packed([text], [answer]))
    got.sum().backward()
    plain = AutoModelForImageTextToText.from_pretrained(models[kind], dtype=torch.float32)
    want = logprobs_alone(plain, vision, text, answer)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    tower = [p.grad for name, p in model.named_parameters() if "visual" in name]
    assert all(grad is not None and not grad.any() for grad in tower)


def test_an_answer_may_have_the_image_token(models: dict[str, str]) -> None:
    """It is a token like any other there: as good as one of the same embedding."""
    vision = vision_of(models["qwen2_5_vl"])
    prompts, twin = prompts_of(vision)[:1], 40
    model: Any = build_model(models["qwen2_5_vl"], full=True)
    with torch.no_grad():
        for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            weight[twin] = weight[vision.token_id]
    batch_images = BatchImages(vision, prompts.__getitem__)
    answers = [[12, token, 13, token, token] for token in (vision.token_id, twin)]
    got, want = (
        logprobs_packed(model, batch_images, packed(prompts, [answer])) for answer in answers
    )
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_data_that_changed_meanwhile_is_told(models: dict[str, str]) -> None:
    vision = vision_of(models["qwen2_5_vl"])
    prompts = prompts_of(vision)
    batch = packed(prompts[:1], [[12]])
    other = Prompt(0, prompts[2].token_ids, "d", "", "", images=prompts[2].images)
    with pytest.raises(ValueError, match="disagree about images"):
        BatchImages(vision, lambda id: other).scene(batch)
    larger = Prompt(0, prompts[0].token_ids, "d", "", "", images=prompts[2].images)
    with pytest.raises(ValueError, match="have changed since"):
        BatchImages(vision, lambda id: larger).scene(batch)


# ---- rollouts


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("name", ENGINE_NAMES)
def test_answers_are_of_the_images_and_go_on_where_they_stopped(
    models: dict[str, str], topology: Topology, monkeypatch: pytest.MonkeyPatch, name: str,
    kind: str,
) -> None:  # fmt: skip
    """Prompts with and without images beside each other; one text with two images of a size, which
    a cache could mistake for each other. The same after the sleep of a GPU."""
    vision = vision_of(models[kind])
    config = RolloutConfig(dtype="float32", max_num_seqs=64, kv_cache_mib=64)
    looks = ImageLimits(vision, per_prompt=2, tokens=16, size=(32, 32))
    engine = ENGINES[name](models[kind], config, 200, topology, looks=looks)
    first, text, last = prompts_of(vision)
    other = Prompt(3, last.token_ids, "d", "", "", images=(Picture(png(9, 32, 16)),))
    asked = [first, text, last, other, last]
    trained = build_model(models[kind], full=True)
    whole, again = answer_twice(engine, trained, vision, asked, 4)
    if name == "hf" or engine.on_cpu:
        assert [a.token_ids for a in again] == [a.token_ids for a in whole]
    if name == "vllm" and kind == "qwen3_vl":  # adds tensors to hidden states that are no weights
        sleep_as_on_a_gpu(engine, engine.model.deepstack_input_embeds, monkeypatch)
        after, _ = answer_twice(engine, trained, vision, asked, 4)
        assert [a.token_ids for a in after] == [a.token_ids for a in whole]
    engine.shutdown()


def sleep_as_on_a_gpu(
    engine: VllmEngine, lost: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sleep of level 2, in which `lost` and all else that is no weight comes to hold anything.
    Engines on CPUs have no such sleep, so that memory is overwritten in its place.
    """
    everywhere, levels = [(0, 1 << 63)], list[int]()

    def drop(level: int) -> None:
        levels.append(level)
        for whole in plain_tensors(engine.runner, everywhere):
            whole.fill_(0x42)  # 48.6 in float32
        assert all((tensor == tensor[0, 0]).all() and tensor[0, 0] > 48 for tensor in lost)

    with monkeypatch.context() as patch:
        patch.setattr(compat, "memory_of_weights", lambda: everywhere)
        patch.setattr(engine, "on_cpu", False)
        patch.setattr(engine.core, "sleep", drop)
        patch.setattr(engine.core, "wake_up", lambda tags: None)
        for tags in (["weights"], ["kv_cache"]):
            engine.sleep()
            engine.wake(tags)
            engine.wake()
    assert levels == [2, 2] and not any(tensor.any() for tensor in lost)


@pytest.mark.vllm
def test_new_weights_of_the_tower_are_looked_through(
    models: dict[str, str], topology: Topology
) -> None:
    """vLLM keeps what a tower made of an image."""
    kind = "qwen2_5_vl"
    vision = vision_of(models[kind])
    config = RolloutConfig(dtype="float32", max_num_seqs=64, kv_cache_mib=64)
    engine = VllmEngine(
        models[kind], config, 200, topology, looks=ImageLimits(vision, 2, 16, (32, 32))
    )
    model: Any = build_model(models[kind], full=True)
    prompt, params = prompts_of(vision)[0], SamplingParams(max_tokens=4, ignore_eos=True)
    request = Request(prompt.token_ids, seed=1, images=prompt.images)
    engine.generate([request], params)
    with torch.no_grad():
        for parameter in model.model.visual.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        engine.load_weights((name, p.data) for name, p in model.named_parameters())
        engine.check_weights((name, p.data) for name, p in model.named_parameters())
        answer = engine.generate([request], params)[0]
        batch_images = BatchImages(vision, lambda id: prompt)
        right = logprobs_packed(model, batch_images, packed([prompt], [answer.token_ids]))
    torch.testing.assert_close(torch.tensor(answer.logprobs), right[-4:], rtol=1e-4, atol=1e-5)
    engine.shutdown()


def test_the_largest_image_is_what_memory_is_measured_with(models: dict[str, str]) -> None:
    from spmdrl.rollout.vllm import images as vllm_vision

    looks = ImageLimits(vision_of(models["qwen2_5_vl"]), 3, 16, (32, 32))
    with vllm_vision.sizes_of(looks, 200):
        from vllm.multimodal.registry import MultiModalRegistry

        processor: Any = MultiModalRegistry().create_processor(SimpleNamespace())
    item = processor.get_dummy_mm_inputs({"image": 1}, cache=None)["mm_kwargs"]["image"][0]
    assert item["pixel_values"].data.shape == (64, 96)
    assert processor.info.get_mm_max_tokens_per_item(200, {"image": 1}) == {"image": 16}
