"""A small task with images for whole runs: its questions, its config file and how it is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from programs import CONFIG, metrics_of, train
from tiny_models import png, save_qwen_vl

IMAGE_CONFIG = CONFIG.replace(".jsonl", ".parquet").replace(
    "max_prompt_tokens=16", "max_prompt_tokens=60"
)
SAVE_EACH_STEP = ("--checkpoint.every_steps", "1", "--data.eval", "None")
CLOSE: dict[str, Any] = {"rel": 1e-4, "abs": 1e-5}


def image_question(seed: int) -> dict:
    """None, one or two images, of several sizes."""
    count = seed % 3
    sizes = [(8 * (1 + seed % 4), 8 * (1 + i + seed % 2)) for i in range(count)]
    images = [png(10 * seed + i, *size) for i, size in enumerate(sizes)]
    asked = f"{'<image>' * count}{seed}"
    return {
        "data_source": "seen", "prompt": [{"role": "user", "content": asked}],
        "reward_model": {"style": "rule", "ground_truth": str(seed % 10)},
        "images": [{"bytes": each} for each in images],
    }  # fmt: skip


def run_task(folder: Path, name: str, ranks: int, *args: str) -> list[dict]:
    """Rows of metrics of a run in folder/name; `save_task` made the folder."""
    config = [] if "--config" in args else ["--config", "cfg.py"]
    done = train(folder, ranks, *config, "--run_dir", name, *args)
    assert done.code == 0, done.output[-6000:]
    return metrics_of(folder / name)


def save_task(path: Path) -> Path:
    """Two models that see images, train.parquet (40 rows), eval.parquet (10) and cfg.py."""
    save_qwen_vl(path / "model")
    save_qwen_vl(path / "qwen3", "qwen3_vl", tied=True)
    rows = [image_question(seed) for seed in range(50)]
    pq.write_table(pa.Table.from_pylist(rows[:40]), path / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[40:]), path / "eval.parquet")
    Path(path, "cfg.py").write_text(IMAGE_CONFIG)
    return path
