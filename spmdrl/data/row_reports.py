"""Reports on the rows of a data set: what the chat template leaves out of them, control tokens in
their text, images that are not there.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from spmdrl.config.words import counted, verb
from spmdrl.data.chat import Encoder
from spmdrl.data.pictures import MARK
from spmdrl.distributed.topology import Topology

logger = logging.getLogger(__name__)


def report_escaped(count: int, num_rows: int, topology: Topology) -> None:
    if count and topology.rank == 0:
        logger.warning(
            "%d of %s %s control tokens of the tokenizer in their text; these are encoded "
            "as ordinary text (data.control_tokens='escape')",
            *(count, counted(num_rows, "row"), verb(count, "name")),
        )


def unread_tools(row: dict[str, Any], encoder: Encoder) -> set[str]:
    """A column of tools is not read: those of all rows are given to the template by the config."""
    is_unread = row.get("tools") and "tools" not in encoder.config.chat_template_kwargs
    return {"column tools"} if is_unread else set()


def sum_by_name(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in counts:
        total.update(part)
    return dict(sorted(total.items()))


def report_left_out(counts: Mapping[str, int], num_rows: int, topology: Topology) -> None:
    if counts and topology.rank == 0:
        logger.warning(
            "the chat template leaves out of the text what some of the %d rows hold: %s; give the "
            "tokenizer a template that writes it (data.chat_template_kwargs has tools and settings "
            "of a template)", num_rows, shown_counts(counts),
        )  # fmt: skip


def left_out_lines(counts: Mapping[str, int]) -> list[str]:
    """Returns lines for --dry-run about what the template leaves out."""
    return [f"  left out by the chat template: {shown_counts(counts)}"] if counts else []


def shown_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} in {counted(count, 'row')}" for name, count in counts.items())


def report_blind(count: int, num_rows: int, topology: Topology) -> None:
    if count and topology.rank == 0:
        logger.warning(
            "%d of %s %s %s and %s no images: it stays text",
            *(count, counted(num_rows, "row"), verb(count, "say"), MARK, verb(count, "have")),
        )
