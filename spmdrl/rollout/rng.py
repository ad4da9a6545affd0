"""Randomness of sampling: made from addresses, and kept apart from the global generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def mix(x: Tensor) -> Tensor:
    """int64 -> int64, each output bit a coin toss: the finaliser of SplitMix64 (Steele, Lea and
    Flood, 2014). int64 arithmetic wraps, on every device."""
    x = x + -0x61C8864680B583EB
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & (2**33 - 1))


def gumbel(seeds: Tensor, num_tokens: int) -> Tensor:
    """(num_seqs,) int64 seeds -> (num_seqs, num_tokens) float32 of standard Gumbel noise.

    argmax(logprobs + noise) is a draw from the distribution (Gumbel, 1954).
    """
    tokens = torch.arange(num_tokens, device=seeds.device)
    bits = mix(seeds[:, None] ^ mix(tokens)) >> 11 & (2**52 - 1)
    uniform = (bits.double() + 0.5) * 2.0**-52  # inside (0, 1), never 0 or 1
    return -(-uniform.log()).log().float()


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Global generators come back as they were: libraries seed them, and draw from them."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
