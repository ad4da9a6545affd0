"""Tells what came of a rehearsal, as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from spmdrl.config.words import counted
from spmdrl.rehearse.probes import Probes
from spmdrl.rehearse.runs import Outcome, rows_of, samples_of
from spmdrl.rehearse.scale import Change
from spmdrl.rewards.workers.worker import cause_of

SHOWN_SAMPLES, SHOWN_CHARS = 3, 160


def report_lines(
    title: str, changes: Sequence[Change], outcomes: Sequence[Outcome], run_dir: Path,
    tokens: Sequence[str], probes: Probes, memory: Sequence[str], collectives: Sequence[str],
    wrong: Sequence[str],
) -> list[str]:  # fmt: skip
    """tokens, memory, collectives: lines of these sections. wrong: a sentence for each thing."""
    ran = [line for outcome in outcomes for line in outcome.lines()]
    samples = samples_of(run_dir)
    sections = {
        "replaced": [change.line() for change in changes],
        "what ran": [*ran, *ran_lines(run_dir)],
        "samples, as the reward saw them": sample_lines(samples),
        "the reward, tried on answers that are known": probe_lines(probes),
        "tokens": [*tokens, *answer_lines(samples)],
        "collectives, compared between ranks by the rules of NCCL": collectives,
        "memory of the real run": memory,
        "what looks wrong": [f"{i}. {text}" for i, text in enumerate(wrong, 1)] or ["nothing"],
    }
    lines = [title]
    for name, text in sections.items():
        if text:
            lines += ["", name, *(f"  {line}" for line in text)]
    return lines


def ran_lines(run_dir: Path) -> list[str]:
    """Says what the metrics show of both runs."""
    rows = rows_of(run_dir / "metrics.jsonl")
    steps = sorted({row["step"] for row in rows if "actor/loss" in row})
    evaluated = sorted({row["step"] for row in rows if any(key.startswith("eval/") for key in row)})
    saved = sorted(path.name for path in run_dir.glob("checkpoints/step_*"))
    return [
        f"steps trained: {numbers(steps)}; held-out prompts asked behind: {numbers(evaluated)}; "
        f"checkpoints: {', '.join(saved) or 'none'}"
    ]


def numbers(found: Sequence[int]) -> str:
    return ", ".join(map(str, found)) or "none"


def sample_lines(samples: Sequence[dict[str, Any]]) -> list[str]:
    if not samples:
        return []
    lines = []
    for row in samples[:: max(1, len(samples) // SHOWN_SAMPLES)][:SHOWN_SAMPLES]:
        reward = row["reward"] if row["invalid"] is None else "none"
        lines += [
            f"prompt {row['prompt_id']} ({row['data_source']}): "
            f"...{row['prompt'][-SHOWN_CHARS:]!r}",
            f"  ground truth {str(row['ground_truth'])[:SHOWN_CHARS]!r}",
            f"  answer {row['response'][:SHOWN_CHARS]!r}",
            f"  reward {reward}, {counted(row['response_tokens'], 'token')}, ended by "
            f"{row['finish_reason']}",
        ]
    invalid = [row for row in samples if row["invalid"] is not None]
    lines.append(f"invalid: {len(invalid)} of {len(samples)}")
    if invalid:
        lines.append(f"  the first: {cause_of(invalid[0]['invalid'])}")
    return lines


def probe_lines(probes: Probes) -> list[str]:
    if probes.skipped:
        return [f"not tried: {probes.skipped}"]
    lines = [
        f"right, as {name}: {spread(given)}"
        + (f"; another prompt's so: {spread(probes.wrong[name])}" if name in probes.wrong else "")
        for name, given in probes.right.items()
    ]
    return [*lines, *([f"nothing at all: {spread(probes.empty)}"] if probes.empty else [])]


def spread(given: Sequence[float]) -> str:
    low, high, mean = min(given), max(given), sum(given) / len(given)
    return f"{mean:g}" if low == high else f"{mean:.3g} ({low:g} to {high:g})"


def answer_lines(samples: Sequence[dict[str, Any]]) -> list[str]:
    if not samples:
        return []
    counts = [row["response_tokens"] for row in samples]
    cut = sum(row["finish_reason"] == "length" for row in samples)
    return [
        f"answers: median {median(counts):g}, longest {max(counts)}; {cut} of {len(counts)} cut, "
        "which says nothing of a trained model"
    ]
