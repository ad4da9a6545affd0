"""Rotary angles of tokens that have positions in time, height and width (Qwen2-VL, arXiv
2409.12191, section 2.1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class MultimodalRotary(nn.Module):
    """Takes the place of megatron-core's, which knows frequencies of one axis in runs alone."""

    def __init__(self, inv_freq: Tensor, axes: list[int], interleaved: bool) -> None:
        """inv_freq: (rotated dims / 2,) float32. axes: of each frequency. interleaved: neighbours
        are rotated, not halves.
        """
        super().__init__()
        self.inv_freq = inv_freq
        self.axes = torch.tensor(axes, device=inv_freq.device)
        self.interleaved = interleaved

    def forward(self, positions: Tensor, section: Any = None, cp_group: Any = None) -> Tensor:
        """positions: (3, 1, tokens) int64, of the row of all tokens. Returns (tokens, 1, 1, rotated
        dims) float32: the angles of all of them, of which attention takes its rank's.
        """
        of_axis = positions[:, 0].to(self.inv_freq.device).float()[self.axes]
        angles = (of_axis * self.inv_freq[:, None]).T  # (tokens, rotated dims / 2)
        if self.interleaved:
            angles = angles.repeat_interleave(2, -1)
        else:
            angles = torch.cat([angles, angles], -1)
        return angles[:, None, None].contiguous()
