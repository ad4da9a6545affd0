"""Backward scans over token sequences: y_t = x_t + decay * y_{t+1}."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128


def discounted_suffix_sums(x: Tensor, decay: float) -> Tensor:
    """y_t = sum_{s >= t} decay^(s - t) x_s along the last axis.

    x: (num_seqs, length) float; the same shape and dtype is returned.
    Blocks of 128 positions are one product with a triangular matrix of powers of `decay`; only the
    carry between blocks is a loop, so Python runs length / 128 times.
    """
    num_seqs, length = x.shape
    padded = torch.nn.functional.pad(x, (0, -length % BLOCK))
    blocks = padded.view(num_seqs, padded.shape[1] // BLOCK, BLOCK)
    steps = torch.arange(BLOCK, device=x.device, dtype=torch.float64)
    distance = steps[:, None] - steps[None, :]  # source minus destination position
    powers = torch.where(distance >= 0, decay ** distance.clamp(min=0), 0.0).to(x.dtype)
    y = blocks @ powers  # (num_seqs, num_blocks, BLOCK), still without what follows the block
    to_block_end = (decay ** (BLOCK - steps)).to(x.dtype)
    for block in range(y.shape[1] - 2, -1, -1):
        y[:, block] += y[:, block + 1, :1] * to_block_end
    return y.reshape(padded.shape)[:, :length]
