"""A few answers of a run for people to read: on the terminal, in tensorboard and in wandb.

They are taken from the files in samples/, which are read on the rank that logs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from spmdrl.config.words import counted
from spmdrl.rewards.workers.worker import cause_of

FEW = 3
LINE_WIDTH = 150  # characters of a prompt or an answer on the terminal
TEXT_WIDTH = 4000  # in a tracker
CUT = " ... "

SampleRow = dict[str, Any]  # a line of samples/*.jsonl: see metrics.sample_row


def few_answers(path: Path) -> list[SampleRow]:
    """The answer with the lowest reward, one in the middle, and that with the highest.

    Invalid ones only where there are no others; [] where the file is not there.
    """
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", errors="replace") as lines:
        rows: list[SampleRow] = [json.loads(line) for line in lines]
    valid = sorted((r for r in rows if r["reward"] is not None), key=lambda row: row["reward"])
    if len(valid) <= FEW:
        return valid or rows[:FEW]
    return [valid[0], valid[len(valid) // 2], valid[-1]]


def reward_text(row: SampleRow) -> str:
    if row["reward"] is not None:
        return f"reward {row['reward']:.4g}"
    cause = cause_of(str(row["invalid"])) or "no reason given"
    return f"no reward ({one_line(cause, 80)})"


def one_line(text: str, width: int = LINE_WIDTH) -> str:
    """The text with every character escaped that cannot be printed, line breaks too; of a long one
    the start and the end."""
    return shortened(escaped(text, keep=""), width)


def shortened(text: str, width: int) -> str:
    """Returns start and end of a text of more than `width` characters, the same number of each."""
    if len(text) <= width:
        return text
    half = (width - len(CUT)) // 2
    return text[:half] + CUT + text[-half:]


def escaped(text: str, keep: str) -> str:
    """Control characters, and others that are not printed as they are, as Python escapes them."""
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def as_markdown(rows: list[SampleRow]) -> str:
    """Returns rows of samples as markdown for tensorboard. Prompts and answers stand in fenced
    blocks, where nothing of them is taken for markdown or HTML.
    """
    return "\n\n".join(
        f"**{reward_text(row)}**, {counted(row['response_tokens'], 'token')}, ended by "
        f"{row['finish_reason']}\n\nprompt\n\n{fenced(row['prompt'])}\n\nanswer\n\n"
        f"{fenced(row['response'])}"
        for row in rows
    )


def fenced(text: str) -> str:
    """A code block: its fence is longer than any run of backticks in the text."""
    text = shortened(escaped(text, keep="\n\t"), TEXT_WIDTH)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"
