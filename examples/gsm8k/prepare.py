"""GSM8K as it is published (train.jsonl, test.jsonl) -> train.parquet, test.parquet for spmdrl.

python examples/gsm8k/prepare.py --source DIR --out DIR

The columns are verl's, so the files serve both. `extra_info` keeps the question and the worked
answer, for supervised fine-tuning with prompt_key="extra_info.question",
response_key="extra_info.answer".
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

INSTRUCTION = 'Think step by step, then write the final answer as a number after "####".'
SPLITS = ("train", "test")


def prepare(source: Path, out: Path) -> dict[str, int]:
    """Writes both files and returns their numbers of rows. Raises ValueError for a bad source."""
    missing = [str(source / f"{s}.jsonl") for s in SPLITS if not (source / f"{s}.jsonl").is_file()]
    if missing:
        raise ValueError(
            f"not found: {', '.join(missing)}. --source must hold train.jsonl and test.jsonl as in "
            "https://github.com/openai/grade-school-math/tree/master/grade_school_math/data"
        )
    tables = {split: pa.Table.from_pylist(read(source, split)) for split in SPLITS}
    out.mkdir(parents=True, exist_ok=True)
    for split, table in tables.items():
        pq.write_table(table, out / f"{split}.parquet")
    return {split: table.num_rows for split, table in tables.items()}


def read(source: Path, split: str) -> list[dict[str, Any]]:
    path = source / f"{split}.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would cut at U+2028 too
    return [make_row(path, split, i, line) for i, line in enumerate(lines) if line.strip()]


def make_row(path: Path, split: str, index: int, line: str) -> dict[str, Any]:
    try:
        given = json.loads(line)
        question, answer = given["question"], given["answer"]
        _, mark, final = answer.rpartition("####")
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}, line {index + 1}: expected a JSON object with 'question' and 'answer' "
            f"({type(error).__name__}: {error})"
        ) from error
    if not mark:
        raise ValueError(f"{path}, line {index + 1}: the answer has no '####' before its result")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question.strip()} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final.strip().replace(",", "")},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="folder with the .jsonl files")
    parser.add_argument("--out", type=Path, required=True, help="folder for the .parquet files")
    args = parser.parse_args()
    try:
        counts = prepare(args.source, args.out)
    except ValueError as error:
        sys.exit(f"error: {error}")
    for split, count in counts.items():
        print(f"{args.out / f'{split}.parquet'}: {count} rows")


if __name__ == "__main__":
    main()
