"""Tries every cell of docs/models.md and writes it.

    make models                       all of it, about 20 minutes on two cores
    python tests/models/table.py --families qwen3,llama --columns fsdp,vllm

Each cell is tried on ranks of its own, with a time limit, on a tiny model with random weights.
What was found is kept in runs/models.json; the page is written of all that stands there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(Path(__file__).parent)]

import proofs  # noqa: E402
import transformers  # noqa: E402
from families import BY_KIND, FAMILIES, Family, save_tiny  # noqa: E402
from ranks import run_ranks  # noqa: E402

LIMIT_S = 180
PAGE = TESTS.parent / "docs" / "models.md"
TITLES = {
    "fsdp": "FSDP2", "export": "export", "lora": "LoRA", "megatron": "Megatron", "vllm": "vLLM",
    "vllm_tp2": "vLLM TP 2", "hf": "hf", "strict": "strict",
}  # fmt: skip
SHOWN = {"fsdp": "logprobs", "megatron": "logprobs", "vllm": "median", "vllm_tp2": "median",
         "hf": "median", "lora": "median"}  # fmt: skip
Cell = dict[str, Any]

HEAD = """# Models

A table of families of models, and of what was tried with each. `make models` writes this page
(`tests/models/table.py`); `make test` tries a part of it (`tests/models/test_models.py`).

For each family a tiny model with random weights is made: layers of each kind that the family has,
of a width of 128 (`spmdrl/hub/tiny_config.py`). A cell with a number or a "yes" was tried and is
right:

- **FSDP2**: sequences packed in one row against each sequence by itself in transformers, gradients
  too, and three updates. The number is the largest difference of a log-probability.
- **export**: the weights are written, and transformers reads them back equal in every bit.
- **LoRA**: adapters of the default layers, an update, and pushes of the merged weights to engine
  `hf`. The number is the median difference of a sampled token's log-probability between engine and
  trainer.
- **Megatron**: log-probabilities against transformers', and three updates. The number is the
  largest difference.
- **vLLM**: an engine is built without weights; a push, an update, a second push; after each push
  every weight is compared bit by bit. The number is the median difference, as for LoRA.
- **vLLM TP 2**: the same with two tensor-parallel ranks.
- **hf**: the same with `rollout.engine="hf"`.
- **strict**: with `strict=True`, engine and trainer agree in every bit.

A cell with a letter is refused before anything is loaded, by `--dry-run` too; the sentences stand
below. "fails" is a mistake that is known, of ours or of a library: it is not refused.
Medians are shown, because a router of experts chooses another expert where two scores are almost
equal. In bfloat16 (marked b), and in vLLM's latent attention on CPUs, medians of 0.001 to 0.003 are
the kernels' rounding.

Published checkpoints of some families have a tower for images or sounds. Where it is not understood
here, or not asked for, the language model is loaded alone, trained and sampled without it, and an
export is one of the language model alone. In the last rows, "with images", the tower is kept
(`vision_tower=True`, docs/vision.md), sequences have images, and all of it is trained, pushed and
compared.

Everything here ran on CPUs. A run tries the layers of its own model in the way of the first column
when it starts, on its GPU where it has one; `--dry-run` shows what it found.

"""


def try_cell(family: Family, column: str, folder: Path) -> Cell:
    """Returns {"proven": numbers}, {"refused": what a user is told} or {"fails": the error}."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder) as place:
        model = save_tiny(family, Path(place, "model"))
        given = [family.rollout_dtype] if column.startswith("vllm") else []
        ranks = proofs.RANKS.get(column, 1)
        try:
            found = run_ranks(ranks, proofs.PROOFS[column], str(model), *given, timeout_s=LIMIT_S)
            cell: Cell = {"proven": found[0]}
        except AssertionError as error:
            cell = read_failure(str(error), place)
    return cell | {"seconds": round(time.monotonic() - start, 1)}


def read_failure(log: str, place: str) -> Cell:
    """log: of a rank that ended with an exception."""
    found = re.findall(
        r"^([\w.]*(?:Error|Mismatch|Exception|Refused))\b:? ?(.*)$", log, re.MULTILINE
    )
    if not found:
        return {"fails": log.strip().splitlines()[-1]}
    kind, text = found[-1]
    text = text.replace(place + "/", "")
    if kind.endswith("Refused"):
        return {"refused": text}
    return {"fails": f"{kind.rpartition('.')[2]}: {text}"}


def page(cells: Mapping[str, Mapping[str, Cell]]) -> str:
    """Returns docs/models.md."""
    columns = [column for column in TITLES if column in proofs.PROOFS]
    sentences: dict[str, str] = {}  # by sentence: its letter
    lines = [
        "| family | model type | " + " | ".join(TITLES[column] for column in columns) + " |",
        "|" + "---|" * (len(columns) + 2),
    ]
    for family in FAMILIES:
        mine = cells.get(family.key, {})
        shown = [shown_cell(family, column, mine.get(column), sentences) for column in columns]
        lines.append(f"| {family.title} | `{family.key}` | " + " | ".join(shown) + " |")
    told = [f"- **{letter}** {sentence}" for sentence, letter in sentences.items()]
    return HEAD + "\n".join([*lines, "", "## Refused, or failing", "", *told, ""])


def shown_cell(family: Family, column: str, cell: Cell | None, sentences: dict[str, str]) -> str:
    if cell is None:
        return "unknown"
    if "proven" in cell:
        if column not in SHOWN:
            return "yes"
        wide = " b" if column.startswith("vllm") and family.rollout_dtype == "bfloat16" else ""
        number = cell["proven"][SHOWN[column]]
        return (f"{number:.0e}" if number else "0") + wide
    sentence = general(cell.get("refused") or cell["fails"], family)
    letter = sentences.setdefault(sentence, letters(len(sentences)))
    return letter if "refused" in cell else f"fails ({letter})"


def general(sentence: str, family: Family) -> str:
    """Returns a refusal without what only one family's has, so that like ones stand there once."""
    sentence = sentence.replace(repr(family.kind), "...")
    sentence = re.sub(r"model type '\w+'", "model type ...", sentence)  # of its language model
    for mark in (" has layers without a batch-invariant form:", "'s config.json has",
                 " differ by "):  # fmt: skip
        if mark in sentence:
            sentence = sentence[: sentence.index(mark) + len(mark)].rstrip() + " ..."
    return sentence


def letters(number: int) -> str:
    """Returns A, B, ... Z, AA, AB, ..."""
    if number < 26:
        return chr(ord("A") + number)
    return letters(number // 26 - 1) + letters(number % 26)


def main() -> None:
    transformers.logging.disable_progress_bar()
    parser = argparse.ArgumentParser()
    parser.add_argument("--families", default="", help="names of rows; all, if none is named")
    parser.add_argument("--columns", default=",".join(proofs.PROOFS))
    parser.add_argument("--json", default="runs/models.json")
    chosen = parser.parse_args()
    families = [BY_KIND[kind] for kind in chosen.families.split(",") if kind] or FAMILIES
    file = Path(chosen.json)
    cells = json.loads(file.read_text()) if file.exists() else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for family in families:
            for column in chosen.columns.split(","):
                cell = try_cell(family, column, Path(folder))
                cells.setdefault(family.key, {})[column] = cell
                file.write_text(json.dumps(cells, indent=1))
                print(f"{family.key:25} {column:8} {json.dumps(cell)[:230]}", flush=True)
    if chosen.json == parser.get_default("json"):  # another file has some cells alone
        PAGE.write_text(page(cells))


if __name__ == "__main__":
    main()
