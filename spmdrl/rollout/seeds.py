"""Seeds from addresses: the same noise on any rank, and never the same noise twice."""

from __future__ import annotations

import hashlib


def seed_of(
    run_seed: int, step: int, prompt_id: int, sample_index: int, purpose: str = "train"
) -> int:
    """The seed of one sample, from its address alone: 0 .. 2**63 - 1.

    `purpose` separates address spaces: evaluation after step 10 ("eval") must not draw the noise
    that training in step 10 drew.
    """
    address = f"{purpose}/{run_seed}/{step}/{prompt_id}/{sample_index}"
    digest = hashlib.blake2b(address.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_of_continuation(seed: int, num_tokens: int) -> int:
    """Returns the seed of a continued answer, for an engine that draws from a generator per
    request: no noise is drawn a second time.
    """
    return seed if num_tokens == 0 else seed_of(seed, num_tokens, 0, 0, "continuation")
