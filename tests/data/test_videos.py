"""Videos of prompts: in the data, in the trainer's pass and in both rollout engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import film, png, save_qwen_vl
from transformers import AutoModelForImageTextToText, AutoTokenizer, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from vision_checks import answer_twice, logprobs_packed, packed, vision_of

from spmdrl.config import (
    AnswerDataConfig,
    ConfigError,
    DataConfig,
    RolloutConfig,
    SftDataConfig,
)
from spmdrl.data.answers import AnswerDataset
from spmdrl.data.images import BatchImages, ImageProcessor
from spmdrl.data.pictures import open_picture
from spmdrl.data.prompts import PromptDataset
from spmdrl.data.rope_positions import rope_positions, time_positions
from spmdrl.data.sft import SftDataset
from spmdrl.data.videos import videos_of
from spmdrl.data.visuals import Video
from spmdrl.distributed.topology import Topology
from spmdrl.engines.fsdp.model import build_model
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.hub.video_processors import load_video_processor
from spmdrl.rollout.hf.engine import HfEngine
from spmdrl.rollout.vllm.engine import VllmEngine
from spmdrl.types import Picture, Prompt

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
ENGINES: dict[str, Any] = {"vllm": VllmEngine, "hf": HfEngine}
ENGINE_NAMES = [pytest.param("vllm", marks=pytest.mark.vllm), "hf"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of Qwen2.5-VL a second is one position, so that short videos are no longer in time than in
    space.
    """
    folder = tmp_path_factory.mktemp("filmed")
    found = {kind: str(save_qwen_vl(folder / kind, kind)) for kind in FAMILIES}
    config = json.loads(Path(found["qwen2_5_vl"], "config.json").read_text())
    config["vision_config"]["tokens_per_second"] = 1
    Path(found["qwen2_5_vl"], "config.json").write_text(json.dumps(config))
    return found


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a.avi has 8 frames, b.mp4 5, a second has 4; c.avi has 24."""
    folder = tmp_path_factory.mktemp("clips")
    for seed, (name, frames) in enumerate({"a.avi": 8, "b.mp4": 5, "c.avi": 24}.items()):
        film(folder / name, seed, frames)
    for seed in range(3):
        Path(folder, f"{seed}.png").write_bytes(png(seed, 24, 16))
    return folder


def load(model: str, path: Path, topology: Topology, **settings: Any) -> PromptDataset:
    config = DataConfig(train=str(path), **settings)
    vision = ImageProcessor.load(model, load_hf_config(model), config)
    tokenizer = AutoTokenizer.from_pretrained(model)
    return PromptDataset.load(str(path), tokenizer, config, topology, vision=vision)


def row(content: Any, videos: Any = None, images: Any = None, **more: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": content}]
    shown = {"videos": videos, "images": images}
    return {"data_source": "d", "prompt": prompt, "ground_truth": "x"} | shown | more


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


ROWS = [
    row("<image>A<video>B?", ["a.avi"], ["0.png"]),
    row("no <video>"),
    row("<video>C<image>D<video>?", ["c.avi", "b.mp4"], ["1.png"]),
    row([{"type": "video"}, {"type": "text", "text": "E"}], [{"video": ["0.png", "1.png", "2.png"],
                                                             "fps": 1}]),
]  # fmt: skip


def prompts_of(model: str, clips: Path, topology: Topology, **settings: Any) -> list[Prompt]:
    data = load(model, write(clips / "rows.jsonl", ROWS), topology, **settings)
    return [data.prompt(i) for i in range(len(ROWS))]


# ---- data


def test_a_video_may_be_given_in_several_ways(clips: Path) -> None:
    file = Path(clips, "a.avi")
    given = [
        "a.avi", {"path": "a.avi", "bytes": None}, {"video": f"file://{file}"},
        {"bytes": file.read_bytes()}, {"type": "video", "video": "a.avi", "fps": None},
    ]  # fmt: skip
    found = videos_of(given, clips)
    assert len({video.digest for video in found}) == 1
    (own,) = videos_of([{"path": "a.avi", "fps": 1}], clips)
    assert own.fps == 1.0 and own.digest != found[0].digest
    frames = videos_of([["0.png", {"path": "1.png"}], {"video": ["1.png", "0.png"]}], clips)
    assert len({video.digest for video in frames}) == 2
    assert videos_of(None, clips) == videos_of([], clips) == ()


def test_prompts_have_the_tokens_of_images_and_videos_in_the_order_of_their_marks(
    models: dict[str, str], clips: Path, topology: Topology
) -> None:
    path = write(clips / "rows.jsonl", ROWS)
    data = load(models["qwen2_5_vl"], path, topology, video_fps=2, max_prompt_tokens=300)
    kinds = [[type(each).__name__ for each in data.prompt(i).images] for i in range(len(ROWS))]
    assert kinds == [["Picture", "Video"], [], ["Video", "Picture", "Video"], ["Video"]]
    spell = data.encoder.tokenizer.decode
    assert spell(data.prompt(1).token_ids) == "u:no <video>a:"
    image, clip = "<|image_pad|>" * 6, "<|video_pad|>" * 16  # 4 of 8 frames, two at a time
    ends = "<|vision_start|>", "<|vision_end|>"
    assert spell(data.prompt(0).token_ids) == f"u:{image.join(ends)}A{clip.join(ends)}B?a:"
    most = data.images
    assert (most.per_prompt, most.videos, most.largest_video) == (1, 2, (48, 6, 4, 8))
    timed = load(models["qwen3_vl"], path, topology, video_fps=2, max_prompt_tokens=300)
    frame = ("<|video_pad|>" * 2).join(ends)  # all frames have as many pixels as an image
    clip = f"<0.2 seconds>{frame}<1.5 seconds>{frame}"  # of frames 0, 2, 5 and 7
    assert clip.join(ends) in spell(timed.prompt(0).token_ids)


def test_frames_are_drawn_by_the_models_processor(models: dict[str, str], clips: Path) -> None:
    """So many a second, or in all; as many as there are; scaled."""
    longest = Video(clips / "c.avi")  # 24 frames, 4 a second, of 32 x 16

    def frames(video: Video = longest, **settings: Any) -> list[int]:
        videos = vision_of(models["qwen2_5_vl"], **settings).videos
        assert videos is not None
        return videos.decoded(video).numbers

    assert frames() == list(range(0, 24, 2))
    assert frames(video_fps=1) == list(range(0, 24, 4))
    assert frames(Video(longest.source, 1.0)) == frames(video_fps=1)
    assert frames(video_frames=2) == [0, 12] and len(frames(video_frames=999)) == 24
    assert len(frames(video_fps=4, video_max_frames=6)) == 6
    small = vision_of(models["qwen2_5_vl"], video_max_pixels=128)
    assert small.clip(longest).grid == (6, 1, 2)
    vision = vision_of(models["qwen2_5_vl"])
    assert vision.clip(longest).grid == (6, 2, 4)
    assert vision.pixels(longest)["pixel_values"].shape == (6 * 4 * 8, 96)


@pytest.mark.parametrize(
    ("content", "videos", "error"),
    [
        ("<video>?", "a.avi", "expected a list of videos"),
        ("<video>?", [{"path": "a.avi", "max_frames": 3}], "expected videos as"),
        ("<video>?", [{"path": "a.avi", "fps": 0}], "expected frames per second, a number above 0"),
        ("<video>?", ["http://a/b.mp4"], "is no file: write it to one before the run"),
        ("<video>?", ["gone.mp4"], "gone.mp4' cannot be read: FileNotFoundError"),
        ("<video>?", ["0.png/"], "cannot be read"),
        ("<video>?", ["rows.txt"], "rows.txt' cannot be read: OpenCV finds no frames in it"),
        ("<video>?", ["cut.avi"], "cut.avi' cannot be read: "),
        ("<video>?", [["0.png", "wide.png"]], "the frames of a video differ in size"),
        ("?", ["a.avi"], "field 'videos': 1 of them, but the prompt has 0 places for one"),
        ([{"type": "video"}], [], "field 'videos': 0 of them, but the prompt has 1 places for one"),
        ([{"type": "video", "video": "a.avi"}], [], "a video with its own 'video'"),
        ("<video>?", ["c.avi"], "c.avi' has 48 tokens, more than data.max_video_tokens=40"),
    ],
)
def test_what_is_wrong_with_a_video_is_said_with_its_row(
    models: dict[str, str], clips: Path, topology: Topology, content: Any, videos: Any, error: str
) -> None:
    Path(clips, "rows.txt").write_text("no video")
    encoded = Path(clips, "a.avi").read_bytes()
    Path(clips, "cut.avi").write_bytes(encoded[: len(encoded) // 2])
    Path(clips, "wide.png").write_bytes(png(0, 32, 16))
    path = write(clips / "wrong.jsonl", [row(content, videos)])
    with pytest.raises(ConfigError, match="line 1") as raised:
        load(models["qwen2_5_vl"], path, topology, max_video_tokens=40)
    assert error in str(raised.value)


def test_other_columns_are_named_and_blind_models_told(
    models: dict[str, str], clips: Path, topology: Topology, tmp_path_factory: Any
) -> None:
    path = write(clips / "other.jsonl", [row("<video>?", clip=["a.avi"])])
    data = load(models["qwen2_vl"], path, topology, video_key="clip")
    assert len(data.prompt(0).images) == 1
    stills = save_qwen_vl(tmp_path_factory.mktemp("stills") / "model")
    config = load_hf_config(str(stills))
    vision = ImageProcessor.load(str(stills), config, DataConfig(""))
    assert vision is not None
    vision.videos = None  # as of a family without
    with pytest.raises(ConfigError, match="videos, which model type 'qwen2_5_vl' is not shown"):
        vision.placed([vision.sizes.config.video_token_id], [Video(clips / "a.avi")])


def test_rows_to_learn_show_what_prompts_show(
    models: dict[str, str], clips: Path, topology: Topology
) -> None:
    """In fine-tuning, and in preference: the prompt's tokens, and behind them what is learnt."""
    prompts = prompts_of(models["qwen3_vl"], clips, topology, max_prompt_tokens=300)
    config = load_hf_config(models["qwen3_vl"])
    tokenizer = AutoTokenizer.from_pretrained(models["qwen3_vl"])
    asked = {"max_tokens": 300}
    said = [{"role": "assistant", "content": "7"}]
    shown = [{name: row[name] for name in ("prompt", "images", "videos")} for row in ROWS]
    chats = [row | {"messages": row.pop("prompt") + said} for row in map(dict, shown)]
    path = str(write(clips / "sft.jsonl", chats))
    learnt = SftDataConfig(path, **asked)
    vision = ImageProcessor.load(models["qwen3_vl"], config, learnt)
    rows = SftDataset.load(path, tokenizer, learnt, topology, vision=vision)
    path = str(
        write(clips / "pairs.jsonl", [row | {"chosen": "7", "rejected": "8"} for row in shown])
    )
    pairs = AnswerDataset.load(
        path, tokenizer, AnswerDataConfig(path, **asked), topology, vision=vision
    )
    for i, prompt in enumerate(prompts):
        answer = [*tokenizer.encode("7", add_special_tokens=False), tokenizer.eos_token_id]
        for found in (rows.example(i), pairs.by_id(2 * i)):
            assert found.token_ids == [*prompt.token_ids, *answer]
            assert [each.digest for each in found.images] == [e.digest for e in prompt.images]
    assert rows.images is not None
    views = rows.images.views(rows.batch(list(range(len(ROWS)))))
    assert [len(view.spans) for view in views] == [2, 0, 3, 1]


# ---- by transformers


def seen_by_transformers(
    model: str, vision: ImageProcessor, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """What transformers' own processor makes of a prompt: token ids, their types, pixels."""
    family, videos = vision.family.video, vision.videos
    assert family is not None and videos is not None
    # it looks for the video processor's class where torchvision alone puts it
    monkeypatch.setattr(
        ProcessorMixin, "check_argument_for_proper_class", lambda self, name, value: None
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    processor = PROCESSOR_MAPPING[type(vision.sizes.config)](
        vision.processor, tokenizer, load_video_processor(model, family.kind, family.processor)
    )
    arrays, metadata = [], []
    for video in (each for each in prompt.images if isinstance(each, Video)):
        found = videos.decoded(video)
        arrays.append(torch.from_numpy(found.frames))
        shown = {"fps": found.shown_fps, "frames_indices": list(range(len(found.frames)))}
        if family.timestamps:  # it asks for the numbers of the frames in the whole
            shown = {"fps": found.fps, "frames_indices": found.numbers}
        metadata.append(shown | {"total_num_frames": len(found.frames)})
    images = [open_picture(each) for each in prompt.images if isinstance(each, Picture)]
    more = {"videos": arrays, "video_metadata": metadata, "do_sample_frames": False}
    return dict(processor(
        text=[prompt.text], images=images or None, return_tensors="pt", **(more if arrays else {}),
    ))  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
def test_tokens_logprobs_and_gradients_are_transformers(
    models: dict[str, str], clips: Path, topology: Topology, kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Images and videos in one packed row, beside text alone. Frames are drawn so seldom that no
    video is longer in time than in space, where transformers counts on as the paper does.
    """
    settings: dict[str, Any] = {"video_fps": 1, "video_max_frames": 4}
    prompts = prompts_of(models[kind], clips, topology, **settings)
    vision = vision_of(models[kind], **settings)
    answers = [[12, 13], [14, 15, 16], [17, 18], [19]]
    plain: Any = AutoModelForImageTextToText.from_pretrained(
        models[kind], dtype=torch.float32, attn_implementation="eager"
    ).train()
    want = []
    for prompt, answer in zip(prompts, answers, strict=True):
        seen = seen_by_transformers(models[kind], vision, prompt, monkeypatch)
        assert seen["input_ids"][0].tolist() == prompt.token_ids
        behind = torch.tensor([answer])
        ids = torch.cat([seen.pop("input_ids"), behind], 1)
        types = torch.cat([seen.pop("mm_token_type_ids"), torch.zeros_like(behind)], 1)
        del seen["attention_mask"]
        logits = plain(input_ids=ids, mm_token_type_ids=types, use_cache=False, **seen).logits[0]
        logprobs = logits.float().log_softmax(-1)[:-1]
        want.append(logprobs.gather(-1, ids[0, 1:, None])[:, 0])
    torch.cat(want).sum().backward()
    ours: Any = build_model(models[kind], full=True)
    got = logprobs_packed(ours, BatchImages(vision, prompts.__getitem__), packed(prompts, answers))
    got.sum().backward()
    torch.testing.assert_close(got, torch.cat(want), rtol=1e-5, atol=1e-5)
    theirs = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-4, msg=name
        )
        assert "visual" not in name or parameter.grad.abs().max() > 0, name


# ---- positions


def test_positions_are_those_of_the_paper() -> None:
    """A loop over tokens: text counts on behind the largest position, in time as well."""
    grids, intervals = [(1, 2, 3), (5, 2, 2), (3, 1, 4)], [1.0, 1.5, 0.4]
    spans, want, end = [], [], 0
    for text, (times, rows, columns), interval in zip((2, 0, 3), grids, intervals, strict=True):
        want += [[end + i] * 3 for i in range(text)]
        spans.append((len(want), times * rows * columns))
        first = end + text
        for time in range(times):
            for r in range(rows):
                want += [
                    [first + int(time * interval), first + r, first + c] for c in range(columns)
                ]
        end = max(map(max, want)) + 1
    want += [[end + i] * 3 for i in range(2)]
    got = rope_positions(len(want), spans, torch.tensor(grids), intervals)
    assert got.T.tolist() == want


def test_positions_in_time_are_those_of_vllm() -> None:
    """Those of transformers, which multiplies in float32, at the usual rates of frames."""
    steps = np.arange(384)
    for fps in (0.5, 1, 2, 4, 8, 29.97 / 15):
        interval = 2 / fps * 4.0
        got = time_positions(384, interval)
        assert got.tolist() == (steps * interval).astype(np.int64).tolist()
        in_float32 = torch.arange(384) * torch.tensor(interval, dtype=torch.float32)
        assert got.tolist() == in_float32.long().tolist()


# ---- rollouts


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("name", ENGINE_NAMES)
def test_answers_are_of_the_videos_and_go_on_where_they_stopped(
    models: dict[str, str], clips: Path, topology: Topology, name: str, kind: str
) -> None:
    """At four frames a second, so that videos are longer in time than in space. One text has two
    videos of a size, which a cache could mistake for each other.
    """
    settings: dict[str, Any] = {"video_fps": 4, "max_prompt_tokens": 300}
    data = load(models[kind], write(clips / "rows.jsonl", ROWS), topology, **settings)
    prompts, vision, looks = [data.prompt(i) for i in range(len(ROWS))], data.vision, data.looks()
    assert vision is not None and looks is not None and looks.videos == 2
    config = RolloutConfig(dtype="float32", max_num_seqs=64, kv_cache_mib=64)
    engine = ENGINES[name](models[kind], config, 400, topology, looks=looks)
    frames = tuple(Picture(png(9 + i, 24, 16)) for i in range(3))
    last = prompts[3]
    other = Prompt(4, last.token_ids, "d", "", "", images=(Video(frames, 1.0),))
    asked = [*prompts, other, last]
    whole, again = answer_twice(engine, build_model(models[kind], full=True), vision, asked, 5)
    assert [a.token_ids for a in again] == [a.token_ids for a in whole]
    engine.shutdown()
