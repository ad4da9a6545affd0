"""Positions of multimodal rotary embeddings: in time, height and width."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rope_positions(
    num_tokens: int, spans: Sequence[tuple[int, int]], grids: Tensor,
    intervals: Sequence[float] | None = None,
) -> Tensor:  # fmt: skip
    """(3, num_tokens) int64: in time, height and width.

    Text counts on in all three; the tokens of an image or a video have their step in time, row and
    column, and the text behind them goes on from the largest position so far.

    spans: (first token, tokens) of each; grids: (num_spans, 3) int64, its steps, rows and columns
    in tokens; intervals: the positions from one step in time to the next, a fraction or more; None:
    1. Source: Qwen2-VL, arXiv 2409.12191, section 2.1; Qwen2.5-VL, arXiv 2502.13923, section 2.1.2.
    """
    parts: list[Tensor] = []
    end = position = 0
    steps = intervals if intervals is not None else [1.0] * len(spans)
    for (first, count), (times, rows, columns), step in zip(
        spans, grids.tolist(), steps, strict=True
    ):
        parts.append((torch.arange(first - end) + position).expand(3, -1))
        position += first - end
        axes = [time_positions(times, step), torch.arange(rows), torch.arange(columns)]
        parts.append(torch.stack(torch.meshgrid(*axes, indexing="ij")).reshape(3, -1) + position)
        position += max(int(axes[0][-1]) + 1, rows, columns)
        end = first + count
    parts.append((torch.arange(num_tokens - end) + position).expand(3, -1))
    return torch.cat(parts, 1)


def time_positions(steps: int, interval: float) -> Tensor:
    """(steps,) int64 from 0 on, rounded down. In float64, as vLLM computes them."""
    return (torch.arange(steps, dtype=torch.float64) * interval).long()
