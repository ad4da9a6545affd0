"""Rows as verl's scripts write them, and files of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def row(question: str = "2+3?", answer: Any = "5", **other: Any) -> dict[str, Any]:
    """A row as verl's GSM8K script writes it."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train", "index": 7},
    } | other


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    else:
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)
