"""Products and attention on a GPU whose order of summation is fixed, whatever the batch.

Every tile has one size, is made by one program, and sums over its inner dimension from the first
block to the last: no split of that dimension, no choice by the number of rows. A row of tl.dot does
not see the other rows of its tile. Sums and products of float32 are float32 (no TF32).

A product is persistent, as in He et al. (2025): as many programs as there are processors, each of
which makes every so many-th tile, in groups that share the weight's columns in the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmdrl_kernels.switch import dtype_to_store

ROWS, COLUMNS, GROUP = 64, 128, 8  # of a tile of a product; tiles of rows that go together
QUERIES = 32  # of a tile of scores: positions x heads that share a key head
KEY_BYTES = 16384  # of a tile of keys, which is as large whatever the batch


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T. x: (num_rows, in), weight: (out, in), of one dtype -> (num_rows, out)."""
    num_rows, size = x.shape
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty(num_rows, len(weight), dtype=dtype_to_store(x), device=x.device)
    tiles = triton.cdiv(num_rows, ROWS) * triton.cdiv(len(weight), COLUMNS)
    if out.numel():
        _product_kernel[(min(tiles, _processors(x)),)](
            x, weight, out, num_rows, len(weight), size, tiles,
            ROWS, COLUMNS, 32 if x.dtype == torch.float32 else 64, GROUP, widens(x),
            num_warps=8, num_stages=3,
        )  # fmt: skip
    return out.to(x.dtype)


def attention(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float, window: int | None
) -> Tensor:
    """What invariant.attention is. Softmax is online: one pass over the keys, in blocks."""
    num_seqs, num_queries, heads, size = query.shape
    kv_heads, num_keys = key.shape[2], key.shape[1]
    rows = query.unflatten(2, (kv_heads, -1)).transpose(1, 2).flatten(2, 3).contiguous()
    out = torch.empty_like(rows, dtype=dtype_to_store(rows))
    key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (key, value))
    num_rows = rows.shape[2]  # (num_seqs, kv_heads, num_rows, size)
    width = triton.next_power_of_2(max(size, 16))
    keys = max(16, KEY_BYTES // (width * rows.element_size()))
    if out.numel():
        _attention_kernel[(triton.cdiv(num_rows, QUERIES), kv_heads, num_seqs)](
            rows, key, value, positions.contiguous(), out, num_rows, num_queries, num_keys, scale,
            *key.stride()[:3], *value.stride()[:3], heads // kv_heads, size,
            width, 0 if window is None else window, QUERIES, keys, widens(rows),
            num_warps=4, num_stages=2,
        )  # fmt: skip
    out = out.unflatten(2, (num_queries, -1)).transpose(1, 2)
    return out.reshape(query.shape).to(query.dtype)


def widens(x: Tensor) -> bool:
    """Triton's interpreter, on CPUs, cannot multiply matrices of bfloat16."""
    return not x.is_cuda


def _processors(x: Tensor) -> int:
    if not x.is_cuda:
        return 3  # of the interpreter: so that a program makes several tiles
    return torch.cuda.get_device_properties(x.device).multi_processor_count


@triton.jit
def _product_kernel(  # type: ignore[no-untyped-def]
    x, weight, out, num_rows, num_columns, size, tiles,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(num_rows, ROWS)
    column_tiles = tl.cdiv(num_columns, COLUMNS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        group = tile // (GROUP * column_tiles)
        in_group = tl.minimum(row_tiles - group * GROUP, GROUP)
        within = tile % (GROUP * column_tiles)
        first_row = (group * GROUP + within % in_group) * ROWS
        rows = (first_row + tl.arange(0, ROWS)).to(tl.int64)
        columns = (within // in_group * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, size, INNER):
            inner = start + tl.arange(0, INNER)
            a = tl.load(
                x + rows[:, None] * size + inner[None, :],
                (rows < num_rows)[:, None] & (inner < size)[None, :], 0.0,
            )  # fmt: skip
            b = tl.load(
                weight + columns[:, None] * size + inner[None, :],
                (columns < num_columns)[:, None] & (inner < size)[None, :], 0.0,
            )  # fmt: skip
            if WIDEN:
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
        tl.store(
            out + rows[:, None] * num_columns + columns[None, :],
            total.to(out.dtype.element_ty),
            (rows < num_rows)[:, None] & (columns < num_columns)[None, :],
        )


@triton.jit
def _attention_kernel(  # type: ignore[no-untyped-def]
    query, key, value, positions, out, num_rows, num_queries, num_keys, scale,
    key_seq, key_place, key_head, value_seq, value_place, value_head,
    HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Rows of a tile: positions x HEADS. A block of keys that counts nothing for a row leaves the
    bits of its sums as they are, so it does not matter which others the row is with."""
    head, seq = tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    inside = rows < num_rows
    inner = tl.arange(0, WIDTH)
    base = (seq * tl.num_programs(1) + head) * num_rows
    at = (base + rows)[:, None] * SIZE + inner[None, :]
    whole = inside[:, None] & (inner < SIZE)[None, :]
    q = tl.load(query + at, whole, 0.0)
    if WIDEN:
        q = q.to(tl.float32)
    where = tl.load(positions + seq * num_queries + rows // HEADS, inside, 0).to(tl.int32)
    last = tl.minimum(tl.max(where, 0) + 1, num_keys)
    first = 0
    if WINDOW > 0:
        earliest = tl.min(tl.where(inside, where, num_keys), 0) - WINDOW + 1
        first = tl.maximum(earliest, 0) // KEYS * KEYS
    largest = tl.full((QUERIES,), float("-inf"), tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    total = tl.zeros((QUERIES, WIDTH), tl.float32)
    for start in range(first, last, KEYS):
        places = start + tl.arange(0, KEYS)
        # what no query of the tile sees is not read: 0 times NaN would be NaN
        there = (places < last)[:, None] & (inner < SIZE)[None, :]
        k = tl.load(
            key + seq * key_seq + places.to(tl.int64)[:, None] * key_place + head * key_head
            + inner[None, :], there, 0.0,
        )  # fmt: skip
        if WIDEN:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = places[None, :] <= where[:, None]
        if WINDOW > 0:
            seen = seen & (places[None, :] > where[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        most = tl.maximum(largest, tl.max(scores, 1))
        safe = tl.where(most == float("-inf"), 0.0, most)  # rows that have seen no key yet
        shrunk = tl.exp(largest - safe)
        probs = tl.exp(scores - safe[:, None])
        weight = weight * shrunk + tl.sum(probs, 1)
        v = tl.load(
            value + seq * value_seq + places.to(tl.int64)[:, None] * value_place
            + head * value_head + inner[None, :], there, 0.0,
        )  # fmt: skip
        if WIDEN:
            v = v.to(tl.float32)
        total = total * shrunk[:, None]
        total = tl.dot(probs.to(v.dtype), v, total, input_precision="ieee")
        largest = most
    tl.store(out + at, (total / weight[:, None]).to(out.dtype.element_ty), whole)
