"""Draws prompts: how many of each data source, and which. Pure functions of arrays and words.

All is arithmetic that every machine does alike, so that ranks on different hosts draw the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from spmdrl.config import ConfigError, SamplerConfig

SURE = 1 - 1e-9  # a chance above this is taken for 1


def random_words(address: str) -> np.random.PCG64:
    """A stream of 64-bit words of its own for each address; numpy never changes it."""
    digest = hashlib.sha256(f"prompt sampler, {address}".encode()).digest()
    return np.random.PCG64(int.from_bytes(digest[:16], "little"))


def uniform(words: np.random.PCG64) -> float:
    """The next number of the stream in [0, 1), of 53 bits."""
    return (int(words.random_raw()) >> 11) * 2.0**-53


def shares_of(sizes: Mapping[str, int], config: SamplerConfig) -> np.ndarray:
    """(num_sources,) float64 that sum to 1: weight ** (1 / temperature) of each source.

    sizes: rows of each source, the weights where the config has none. The temperature is that of
    mT5 (arXiv 2010.11934, section 3.2, with alpha = 1 / temperature). Raises ConfigError where the
    weights do not name the sources of the data.
    """
    weights = dict(config.weights) or {name: float(size) for name, size in sizes.items()}
    unknown, missing = sorted(weights.keys() - sizes.keys()), sorted(sizes.keys() - weights.keys())
    if unknown:
        raise ConfigError(
            f"data.sampler.weights names {', '.join(map(repr, unknown))}, and the data_source of "
            f"no usable row is that; there are {', '.join(map(repr, sizes))}"
        )
    if missing:
        raise ConfigError(
            f"data.sampler.weights lacks {', '.join(map(repr, missing))}: give each data_source a "
            "weight, 0 to leave it out"
        )
    given = np.array([weights[name] for name in sizes])
    powers = (given / given.max()) ** (1 / config.temperature)
    # rounded: the last bit of a power is a matter of the machine
    return np.round(powers / powers.sum(), 12)


def counts_of(shares: np.ndarray, count: int, start: float) -> np.ndarray:
    """(num_sources,) int64: how many of `count` prompts are of each source. Each number is
    count * share, rounded down or up, and over many draws it is that on average.

    start: uniform in [0, 1). Systematic sampling: W. G. Madow and L. H. Madow, On the theory of
    systematic sampling, 1944.
    """
    edges = np.cumsum(shares) * count
    edges[np.flatnonzero(shares)[-1] :] = count  # not less by a rounding
    return np.diff(np.floor(edges + start).astype(np.int64), prepend=0)


def draw_by_weight(weights: np.ndarray, count: int, words: np.random.PCG64) -> np.ndarray:
    """(count,) int64: different places, each with the chance count * weight / sum(weights), or 1
    where that is above 1.

    weights: (n,) float64 above 0, n >= count. Systematic sampling in a random order, with chances
    proportional to size: W. G. Madow, On the theory of systematic sampling, II, 1949.
    """
    sure = np.zeros(len(weights), dtype=bool)
    while True:
        left = count - int(sure.sum())
        total = np.cumsum(np.where(sure, 0.0, weights))[-1]
        more = ~sure & (weights * left >= SURE * total)
        if left == 0 or not more.any():
            break
        sure |= more
    rest = np.flatnonzero(~sure)
    if left == 0:
        return np.flatnonzero(sure)
    rest = rest[np.argsort(words.random_raw(len(rest)), kind="stable")]
    edges = np.cumsum(weights[rest]) * (left / total)
    edges[-1] = left
    picked = rest[np.searchsorted(edges, uniform(words) + np.arange(left), side="right")]
    return np.concatenate([np.flatnonzero(sure), picked])


def success_weights(rates: np.ndarray, target: float, floor: float) -> np.ndarray:
    """(n,) float64: 1 - ((rate - target) / max(target, 1 - target))^2 + floor; a prompt whose rate
    is unknown (nan) is taken to be at the target.

    With target 0.5 it is 4 p (1 - p) + floor: p (1 - p), the variance of a success, is what
    arXiv 2408.15099 and 2502.12272 call learnability.
    """
    gap = np.where(np.isnan(rates), 0.0, rates - target) / max(target, 1 - target)
    return 1 - gap * gap + floor


def competence(step: int, config: SamplerConfig) -> float:
    """The share of the data, its easiest prompts, that a step may ask: from pace_start in the first
    step to 1 after pace_steps. Linear competence: arXiv 1903.09848, equation 4.
    """
    if not config.pace_steps:
        return 1.0
    done = min((step - 1) / config.pace_steps, 1.0)
    return config.pace_start + (1 - config.pace_start) * done
