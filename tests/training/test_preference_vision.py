"""Preference optimisation of answers about images, on two ranks: transformers computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from programs import metrics_of, train
from tiny_models import png, save_qwen_vl
from transformers import AutoModelForImageTextToText, AutoTokenizer
from vision_checks import vision_of

from spmdrl.data.pictures import open_picture
from spmdrl.types import Picture

pytestmark = pytest.mark.ranks

CONFIG = """
from spmdrl.config import *

config = PreferenceTrainingConfig(
    model="model", out="out", run_dir="run", steps=3, eval_every=0, trackers=(),
    data=AnswerDataConfig(train="pairs.parquet", eval="held_out.parquet", batch_size=8,
                          max_tokens=80),
    actor=TrainConfig(dtype="float32", micro_batch_tokens=128, optim=OptimConfig(lr=3e-3)),
    checkpoint=CheckpointConfig(every_steps=0),
)
"""
SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"


def pair(seed: int) -> dict[str, Any]:
    """One or two images, in the prompt; the right answer says how many."""
    count = 1 + seed % 2
    prompt = [{"role": "user", "content": f"{'<image>' * count}n?"}]
    return {
        "prompt": prompt, "chosen": str(count), "rejected": str(3 - count),
        "images": [{"bytes": png(10 * seed + i, 16, 8 * (1 + i))} for i in range(count)],
    }  # fmt: skip


@torch.no_grad()
def logprob(hf: Any, model: str, row: dict[str, Any], side: str) -> float:
    """Sum over an answer and EOS, by transformers."""
    vision, tokenizer = vision_of(model), AutoTokenizer.from_pretrained(model)
    pictures = [Picture(image["bytes"]) for image in row["images"]]
    asked = tokenizer(f"u:{SHOWN * len(pictures)}n?a:", add_special_tokens=False)["input_ids"]
    asked = vision.placed(asked, pictures)
    said = tokenizer(row[side], add_special_tokens=False)["input_ids"]
    ids = torch.tensor([[*asked, *said, tokenizer.eos_token_id]])
    made = vision.processor(images=[open_picture(p) for p in pictures], return_tensors="pt")
    seen = dict(made) | {"mm_token_type_ids": (ids == vision.token_id).int()}
    logits = hf(input_ids=ids, use_cache=False, **seen).logits[0, len(asked) - 1 : -1]
    found = logits.double().log_softmax(-1).gather(1, ids[0, len(asked) :, None])
    return float(found.sum())


def test_answers_about_images_are_learnt(tmp_path: Path) -> None:
    save_qwen_vl(tmp_path / "model")
    for name, seeds in (("pairs", range(24)), ("held_out", range(50, 56))):
        rows = [pair(seed) for seed in seeds]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    Path(tmp_path, "cfg.py").write_text(CONFIG)
    done = train(tmp_path, 2, "--config", "cfg.py", program="spmdrl.preference")
    assert done.code == 0, done.output[-6000:]
    rows = metrics_of(tmp_path / "run")
    assert rows[-1]["eval/loss"] < rows[0]["eval/loss"]
    for step, name in ((0, "model"), (-1, "out")):
        model = str(tmp_path / name)
        hf = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
        for side in ("chosen", "rejected"):
            sums = [logprob(hf, model, pair(seed), side) for seed in range(50, 56)]
            found = rows[step][f"eval/logps/{side}"]
            assert found == pytest.approx(sum(sums) / len(sums), rel=1e-4, abs=1e-4), (name, side)
