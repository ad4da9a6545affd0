"""Whole runs on prompts with videos: the same on any ranks, by all engines, and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from programs import CONFIG, train
from tiny_models import film, png, save_qwen_vl, save_tokenizer
from transformers import Qwen3Config, Qwen3ForSequenceClassification
from vision_task import CLOSE, SAVE_EACH_STEP, run_task

from spmdrl.config import ConfigError, DataConfig, PpoConfig
from spmdrl.data.prompt_checks import MostImages
from spmdrl.training.checks.shown import check_shown

pytestmark = pytest.mark.ranks

REWARD = """
def reward(response, images, videos, extra_info):
    kinds = [type(video).__name__ for video in videos]
    assert (len(images), kinds) == (extra_info["images"], extra_info["videos"]), (images, videos)
    return 0.01 * len(response)
"""


def question(seed: int) -> dict[str, Any]:
    """Text alone, an image and a video in either order, or a video that is a list of frames."""
    asked = (f"{seed}", f"<image>{seed}<video>", f"<video>{seed}<image>", f"<video>{seed}")[
        seed % 4
    ]
    images, videos = [f"{seed % 5}.png"] * (seed % 4 in (1, 2)), [f"{seed % 5}.avi"]
    clips: list[Any] = [[], videos, videos, [{"video": ["0.png", "1.png", "2.png"], "fps": 1}]]
    shown: Any = clips[seed % 4]
    return {
        "data_source": "films", "prompt": [{"role": "user", "content": asked}],
        "ground_truth": str(seed % 10), "images": images, "videos": shown,
        "extra_info": {"images": len(images), "videos": [
            "list" if isinstance(each, dict) else "str" for each in shown]},
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("films")
    save_qwen_vl(path / "model")
    for seed in range(5):
        film(path / f"{seed}.avi", seed, 4 + 2 * seed)
        Path(path, f"{seed}.png").write_bytes(png(seed, 24, 16))
    rows = [question(seed) for seed in range(24)]
    Path(path, "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = CONFIG.replace("max_prompt_tokens=16", "max_prompt_tokens=120")
    start, end = config.index("def reward"), config.index("config = ")
    Path(path, "cfg.py").write_text(config[:start] + REWARD + config[end:])
    return path


def same(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    assert len(rows) == len(others) == 2
    for one, other in zip(rows, others, strict=True):
        one["balance/imbalance"] = other["balance/imbalance"]  # of as many ranks
        assert one == pytest.approx(other, **CLOSE)
        assert one["actor/logprob_diff_max"] < 1e-5
        assert one["actor/grad_norm"] > 0


def test_a_run_does_not_depend_on_ranks_and_goes_on_where_it_stopped(folder: Path) -> None:
    """On one rank, then on two that share the tokens of a row, the second step from a checkpoint.
    Samples have the files of their videos.
    """
    alone = run_task(folder, "alone", 1, *SAVE_EACH_STEP)
    run_task(folder, "shared", 1, *SAVE_EACH_STEP, "--steps", "1")
    same(run_task(folder, "shared", 2, *SAVE_EACH_STEP, "--actor.ulysses", "2"), alone)
    assert all(row["reward/invalid"] == 0 for row in alone)
    samples = folder / "alone/samples"
    rows = [json.loads(line) for line in Path(samples, "step_1.jsonl").open()]
    names = {name for row in rows for name in row.get("images", ())}
    heads = {Path(samples, "images", name).read_bytes()[:4] for name in names}
    assert heads == {b"\x89PNG", b"RIFF"}


@pytest.mark.vllm
@pytest.mark.megatron
def test_vllm_and_megatron_see_the_same(folder: Path) -> None:
    """In two pipeline stages, of which the first has the tower; weights are proven bit by bit after
    each sync.
    """
    rows = run_task(folder, "stages", 2, "--rollout.engine", "vllm", "--data.eval", "None",
                    "--actor.engine", "megatron", "--actor.pipeline_parallel", "2",
                    "--weights.check", "True")  # fmt: skip
    assert len(rows) == 2
    for row in rows:
        assert row["actor/logprob_diff_max"] < 1e-5 and row["actor/grad_norm"] > 0


def test_what_does_not_go_with_videos_is_refused_at_a_dry_run(folder: Path, qwen3: Path) -> None:
    hf = Qwen3Config.from_pretrained(qwen3, num_labels=1)
    Qwen3ForSequenceClassification(hf).save_pretrained(folder / "judge")
    save_tokenizer(folder / "judge")
    refused = {
        ("--reward", "model", "--reward_model.model", "judge"):
            "data: prompts have videos, which reward models are not shown",
        ("--keep_samples.every", "1", "--checkpoint.every_steps", "1"):
            "keep_samples: samples of this data show images or videos",
        ("--model", str(qwen3), "--data.video_fps", "1.0"):
            "data.video_fps: the model is shown no videos here",
    }  # fmt: skip
    for args, error in refused.items():
        done = train(folder, 1, "--config", "cfg.py", "--run_dir", "refused", "--dry-run",
                     "--data.eval", "None", *args)  # fmt: skip
        assert done.code == 2 and error in done.output, done.output


def test_agents_are_refused_once_the_data_is_known() -> None:
    def play() -> None:
        """Does nothing."""

    config = PpoConfig(model="m", data=DataConfig("rows.jsonl"), reward="agent", agent=play)
    films: Any = SimpleNamespace(images=MostImages(videos=1), data_sources=["films"])
    with pytest.raises(ConfigError, match="data: prompts have videos, which agents are not told"):
        check_shown(config, films)
    films.images = MostImages()
    check_shown(config, films)
