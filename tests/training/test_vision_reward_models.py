"""Reward models of pairs with images, trained on two ranks: their scores are transformers' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from programs import metrics_of, train
from tiny_models import png, save_qwen_vl
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from vision_checks import vision_of
from vision_task import IMAGE_CONFIG, image_question

from spmdrl.data.pictures import open_picture
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.hub.vision_classifiers import register_classifier
from spmdrl.types import Picture

pytestmark = pytest.mark.ranks

CONFIG = """
from spmdrl.config import *

config = RewardTrainingConfig(
    model="model", out="judge", run_dir="run", steps=6, eval_every=0, trackers=(),
    data=PreferenceDataConfig(train="pairs.parquet", eval="held_out.parquet", batch_size=8,
                              max_tokens=80),
    actor=TrainConfig(dtype="float32", micro_batch_tokens=128, optim=OptimConfig(lr=3e-3)),
    checkpoint=CheckpointConfig(every_steps=0),
)
"""


def pair(seed: int) -> dict[str, Any]:
    """One or two images, in the prompt; the right answer says how many."""
    count = 1 + seed % 2
    prompt = [{"role": "user", "content": f"{'<image>' * count}n?"}]
    return {
        "prompt": prompt, "chosen": str(count), "rejected": str(3 - count),
        "images": [{"bytes": png(10 * seed + i, 16, 8 * (1 + i))} for i in range(count)],
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the reward model that two ranks have trained, in judge/."""
    path = tmp_path_factory.mktemp("judge")
    save_qwen_vl(path / "model")
    for name, seeds in (("pairs", range(40)), ("held_out", range(50, 60))):
        pq.write_table(
            pa.Table.from_pylist([pair(seed) for seed in seeds]), path / f"{name}.parquet"
        )
    Path(path, "rm.py").write_text(CONFIG)
    done = train(path, 2, "--config", "rm.py", program="spmdrl.reward_model")
    assert done.code == 0, done.output[-6000:]
    return path


def scores_alone(model: str, text: str, images: list[bytes]) -> float:
    """By transformers, of one conversation; text: with a single token in the place of an image."""
    register_classifier(load_hf_config(model))
    hf = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    vision, tokenizer = vision_of(model), AutoTokenizer.from_pretrained(model)
    pictures = [Picture(each) for each in images]
    ids = torch.tensor(
        [vision.placed(tokenizer(text, add_special_tokens=False)["input_ids"], pictures)]
    )
    seen: dict[str, Any] = {}
    if pictures:
        made = vision.processor(images=[open_picture(p) for p in pictures], return_tensors="pt")
        seen = dict(made) | {"mm_token_type_ids": (ids == vision.token_id).int()}
    with torch.no_grad():
        hidden = hf.base_model(input_ids=ids, use_cache=False, **seen).last_hidden_state
        return float(hf.score(hidden)[0, -1, 0])


SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"


def test_a_reward_model_learns_of_images_and_is_what_transformers_loads(folder: Path) -> None:
    rows = metrics_of(folder / "run")
    assert rows[-1]["eval/loss"] < 0.692 < rows[0]["eval/loss"]
    named = json.loads(Path(folder, "judge/config.json").read_text())["architectures"]
    assert named == ["Qwen2_5_VLForSequenceClassification"]
    assert Path(folder, "judge/preprocessor_config.json").is_file()
    chosen = []
    for seed in range(50, 60):
        row = pair(seed)
        images = [image["bytes"] for image in row["images"]]
        text = f"u:{SHOWN * len(images)}n?a:{row['chosen']}"
        chosen.append(scores_alone(str(folder / "judge"), text, images))
    mean = sum(chosen) / len(chosen)
    assert rows[-1]["eval/chosen_reward"] == pytest.approx(mean, rel=1e-4, abs=1e-5)


def test_answers_about_images_are_scored_by_what_the_reward_model_sees(folder: Path) -> None:
    """And a reward function is given the images of the prompt, as a judge takes them."""
    questions = [image_question(seed) for seed in range(16)]
    pq.write_table(pa.Table.from_pylist(questions), folder / "train.parquet")
    scored = IMAGE_CONFIG.replace("reward=reward", "reward=judged")
    Path(folder, "ppo.py").write_text(scored.replace("config = PpoConfig(", '''
def judged(model_score, messages, images):
    from spmdrl.rewards.openai_chat import openai_messages

    asked = openai_messages(messages, images)[0]["content"]
    shown = [part for part in asked if part["type"] == "image_url"] if images else []
    assert [part["image_url"]["url"] for part in shown] == images
    return {"score": model_score, "shown": len(images)}

config = PpoConfig(
    reward_model=RewardModelConfig("judge", dtype="float32"), log_samples=6,
'''))  # fmt: skip
    done = train(folder, 2, "--config", "ppo.py", "--run_dir", "scored", "--data.eval", "None",
                 "--steps", "1")  # fmt: skip
    assert done.code == 0, done.output[-6000:]
    lines = Path(folder, "scored/samples/step_1.jsonl").read_text().splitlines()
    seen = 0
    for row in map(json.loads, lines):
        assert row["invalid"] is None, row
        images = [image["bytes"] for image in questions[row["prompt_id"]]["images"]]
        assert row["shown"] == len(images)
        want = scores_alone(str(folder / "judge"), row["prompt"] + row["response"], images)
        assert row["reward"] == pytest.approx(want, rel=1e-4, abs=1e-5)
        seen += bool(images)
    assert seen
