"""The LM head's row numbers, put together from parts of the vocabulary: chunks, tiles, ranks.

Of a part's logits z (after softcap and temperature), with m the largest and d = z - m <= 0:

    m      rest = sum over the others of e^d      weighted = sum e^d d      squares = sum e^2d

Parts are merged by raising all to one m. Then

    log p(t) = (z_t - m) - log1p(rest)     H = log1p(rest) - weighted / (1 + rest)

Both terms of H are >= 0: nothing cancels, however sure the model is.

The top k of a row are kept as int64 keys: the high half is the bits of the logit, in float32 and
turned so that integers sort as the floats do; the low half is 2^32 - 1 - id. So the largest keys
are the largest logits, of equal ones those with the lowest ids, and no two of a row are the same.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

MAX_TOP_K = 64
LOWEST = -1e30  # as a difference of logits: its exponential is 0, and 0 times it is 0
NO_KEY = -(1 << 63)
LAST_ID = (1 << 32) - 1


def merged_parts(parts: Tensor) -> Tensor:
    """parts: (4, num_parts, rows), the numbers above of each part -> (4, rows), of the whole."""
    tops, rests, weighted, squares = parts
    top = tops.amax(0)
    below = (tops - top).clamp_(min=LOWEST)
    scale, is_top = below.exp(), tops == top
    rest = (rests * scale + torch.where(is_top, 0.0, scale)).sum(0)
    rest += is_top.sum(0) - 1
    weighted = (scale * (weighted + below * (1 + rests))).sum(0)
    return torch.stack([top, rest, weighted, (squares * scale.square()).sum(0)])


def results(
    stats: Tensor, target_logits: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """top, log of the sum of exp(z - top), log-probabilities, entropy, squares; (rows,) each, but
    (rows, n) log-probabilities.

    stats: (4, rows) of this rank's part; target_logits: (rows, n), NaN where another rank has the
    target, or none has it. Of the vocabularies of all ranks of the group. Collective over it.
    """
    top, rest, weighted, squares = stats
    found = ~target_logits.isnan()
    if group is not None:
        mine, top = top, top.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        # a share without columns has -inf: it gives 0, and -inf * 0 is not to be seen
        below = (mine - top).clamp(min=LOWEST)
        scale, is_top = below.exp(), (mine == top).to(mine.dtype)
        weighted = scale * (weighted + below * (1 + rest))
        rest = rest * scale + torch.where(mine == top, 0.0, scale)
        of_rows = torch.stack([rest, is_top, weighted, squares * scale.square()])
        of_targets = target_logits.where(found, 0.0).T, found.T.to(mine.dtype)
        sums = torch.cat([of_rows, *of_targets])
        dist.all_reduce(sums, group=group)
        rest, weighted, squares = sums[0] + (sums[1] - 1), sums[2], sums[3]
        target_logits, found = sums[4:].chunk(2)
        target_logits = target_logits.where(found > 0, torch.nan).T
    log_sum = rest.log1p()
    total = 1 + rest
    logprobs = (target_logits - top[:, None]) - log_sum[:, None]
    return top, log_sum, logprobs, log_sum - weighted / total, squares / total.square()


def top_results(
    keys: Tensor, top: Tensor, log_sum: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities, largest first, and int64 ids; (rows, k) each.

    keys: (rows, k) of this rank's part, NO_KEY where it has fewer columns; top, log_sum: (rows,) as
    `results` gives them. Of the vocabularies of all ranks of the group. Collective over it.
    """
    k = keys.shape[1]
    if group is not None and k:
        every = [torch.empty_like(keys) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, keys.contiguous(), group=group)
        keys = torch.cat(every, 1).topk(k, 1).values
    logits, ids = unpacked(keys)
    return (logits - top[:, None]) - log_sum[:, None], ids


def packed(logits: Tensor, ids: Tensor) -> Tensor:
    """int64 keys of logits, any shape, and of ids that broadcast to it."""
    bits = (logits.float() + 0.0).view(torch.int32)  # + 0.0: -0.0 becomes 0.0, its equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(torch.int64) << 32) | (LAST_ID - ids)


def unpacked(keys: Tensor) -> tuple[Tensor, Tensor]:
    """float32 logits and int64 ids of keys."""
    ordered = (keys >> 32).to(torch.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.view(torch.float32), LAST_ID - (keys & LAST_ID)


def best_keys(keys: Tensor, logits: Tensor, first_id: int) -> Tensor:
    """The largest k keys of keys and of logits, largest first.

    keys: (rows, k), largest first, NO_KEY at the end where there are fewer; logits: (rows, columns)
    of the ids from first_id on, which are higher than those in keys.
    """
    ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)
    if bool((keys == NO_KEY).any()):
        new = packed(logits, ids)
    else:  # few are larger than the k-th so far; equal ones have higher ids and come after it
        rows, columns = (logits > unpacked(keys[:, -1:])[0]).nonzero(as_tuple=True)
        new = _side_by_side(packed(logits[rows, columns], ids[columns]), rows, len(keys))
    return torch.cat([keys, new], 1).topk(keys.shape[1], 1).values


def _side_by_side(keys: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """keys: (n,) of the rows, in their order -> (num_rows, most in a row), NO_KEY in the rest."""
    counts = torch.bincount(rows, minlength=num_rows)
    place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    table = keys.new_full((num_rows, int(counts.max())), NO_KEY)
    table[rows, place] = keys
    return table
