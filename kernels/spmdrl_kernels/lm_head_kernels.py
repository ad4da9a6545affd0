"""The kernels of lm_head_triton.py, which says what they compute and launches them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile_of(num_rows, num_cols, ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """(tile of rows, tile of columns): GROUP tiles of rows stay in the cache while the columns go
    past."""
    pid = tl.program_id(0)
    row_tiles, col_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(num_cols, COLS)
    first = pid // (GROUP * col_tiles) * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    within = pid % (GROUP * col_tiles)
    return first + within % size, within // size


@triton.jit
def _logits(  # type: ignore[no-untyped-def]
    hidden,  # (num_rows, hidden_size), or its descriptor
    weight,  # (num_cols, hidden_size), or its descriptor
    hidden_stride,
    weight_stride,
    hidden_size,
    bias,  # (num_cols,)
    row0,
    col0,
    num_rows,
    num_cols,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    TMA: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_INNER: tl.constexpr,
):
    """h W^T + b: (ROWS, COLS) float32. Rows and columns past the end hold anything.

    WIDEN: for Triton's interpreter, whose tl.dot multiplies the bits of bfloat16 as integers.
    """
    acc = tl.zeros((ROWS, COLS), tl.float32)
    cols = col0 + tl.arange(0, COLS)
    if TMA:  # past the end it reads zeros
        for k in range(0, hidden_size, INNER):
            a = hidden.load([row0, k])
            b = weight.load([col0, k])
            if WIDEN:
                a, b = a.to(tl.float32), b.to(tl.float32)
            acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
    else:
        rows = (row0 + tl.arange(0, ROWS)) % num_rows
        inner = tl.arange(0, INNER)
        a_at = hidden + rows.to(tl.int64)[:, None] * hidden_stride + inner[None, :]
        b_at = weight + (cols % num_cols).to(tl.int64)[None, :] * weight_stride + inner[:, None]
        for k in range(0, hidden_size, INNER):
            if EVEN_INNER:
                a = tl.load(a_at)
                b = tl.load(b_at)
            else:
                a = tl.load(a_at, mask=inner[None, :] < hidden_size - k, other=0.0)
                b = tl.load(b_at, mask=inner[:, None] < hidden_size - k, other=0.0)
            if WIDEN:
                a, b = a.to(tl.float32), b.to(tl.float32)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
            a_at += INNER
            b_at += INNER
    if HAS_BIAS:
        acc += tl.load(bias + cols, mask=cols < num_cols, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _capped(x, softcap):  # type: ignore[no-untyped-def]
    """softcap * tanh(x / softcap), by e^-2|x / softcap|, which cannot overflow."""
    small = tl.exp((-2.0 / softcap) * tl.abs(x))
    capped = softcap * (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -capped, capped)


@triton.jit
def _slope(x, softcap):  # type: ignore[no-untyped-def]
    """d softcap tanh(x / softcap) / dx, which is 1 - tanh^2, without the difference."""
    small = tl.exp((-2.0 / softcap) * tl.abs(x))
    return 4.0 * small / ((1.0 + small) * (1.0 + small))


@triton.jit
def _keep(  # type: ignore[no-untyped-def]
    z,  # (ROWS, COLS) float32
    rows,
    row_mask,
    first_id,
    num_cols,
    keys,  # (all rows, SLOTS) int64
    counts,  # (all rows,) int32
    floors,  # (all rows,) int32
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Adds the keys (see lm_head_merge.py) of logits over the row's floor, the tile's best K of
    them, to those of the row. One of each row at a time, the largest first: few tiles have many.

    The order of a row's keys is that of a race, the set is not; keys without a slot are counted.
    """
    none: tl.constexpr = -0x80000000
    cols = tl.arange(0, COLS)
    bits = tl.where(z == 0, 0.0, z).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    floor = tl.load(floors + rows, mask=row_mask, other=0x7FFFFFFF)
    over = (order > floor[:, None]) & (cols < num_cols)[None, :]
    left = tl.where(over, order, none)
    best = tl.max(left, 1)
    taken = 0
    while (tl.max(best, 0) > none) & (taken < K):
        col = tl.min(tl.where(left == best[:, None], cols[None, :], COLS), 1)
        found = best > none
        slot = tl.atomic_add(counts + rows, 1, mask=found, sem="relaxed")
        key = (best.to(tl.int64) << 32) | (0xFFFFFFFF - (first_id + col).to(tl.int64))
        tl.store(keys + rows.to(tl.int64) * SLOTS + slot, key, mask=found & (slot < SLOTS))
        left = tl.where(cols[None, :] == col[:, None], none, left)
        best = tl.max(left, 1)
        taken += 1


@triton.jit(do_not_specialize=["partial_step", "num_rows", "first_col"])
def stats_kernel(  # type: ignore[no-untyped-def]
    hidden,
    weight,
    hidden_stride,
    weight_stride,
    hidden_size,
    bias,
    targets,  # (num_rows,) int64
    partial,  # (3 or 4, column tiles, num_rows) float32, the first of these columns' tiles
    partial_step,  # between its three or four
    target_logits,  # (num_rows,) float32
    keys,  # (num_rows, SLOTS) int64, as are counts and floors: of _keep
    counts,
    floors,
    num_rows,
    num_cols,
    first_col,  # the target that column 0 stands for
    inv_temperature,
    softcap,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    EVEN_COLS: tl.constexpr,
    EVEN_INNER: tl.constexpr,
    SQUARES: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
):
    row_tile, col_tile = _tile_of(num_rows, num_cols, ROWS, COLS, GROUP)
    row0, col0 = row_tile * ROWS, col_tile * COLS
    z = _logits(
        hidden, weight, hidden_stride, weight_stride, hidden_size, bias, row0, col0, num_rows,
        num_cols, ROWS, COLS, INNER, TMA, WIDEN, PRECISION, HAS_BIAS, EVEN_INNER,
    )  # fmt: skip
    if SOFTCAP:
        z = _capped(z, softcap)
    z *= inv_temperature
    cols = tl.arange(0, COLS)
    if not EVEN_COLS:  # finite: its probability, 0, is multiplied by its distance from the top
        z = tl.where((cols < num_cols - col0)[None, :], z, -1e30)
    rows = row0 + tl.arange(0, ROWS)
    here = rows < num_rows

    top = tl.max(z, 1)
    if HAS_BIAS:  # where all are -inf
        top = tl.where(top < -1e30, -1e30, top)
    below = z - top[:, None]
    if HAS_BIAS:  # of a bias of -inf: e^below * below is 0, not NaN
        below = tl.where(below < -1e30, -1e30, below)
    exps = tl.exp(below)
    is_top = below == 0
    rest = tl.sum(tl.where(is_top, 0.0, exps), 1) + (tl.sum(is_top.to(tl.float32), 1) - 1.0)
    to = partial + col_tile.to(tl.int64) * num_rows + rows
    step = partial_step * tl.full((), 1, tl.int64)
    tl.store(to, top, mask=here)
    tl.store(to + step, rest, mask=here)
    tl.store(to + 2 * step, tl.sum(exps * below, 1), mask=here)
    if SQUARES:
        tl.store(to + 3 * step, tl.sum(exps * exps, 1), mask=here)

    wanted = tl.load(targets + rows, mask=here, other=-1) - first_col - col0
    mine = here & (wanted >= 0) & (wanted < tl.minimum(COLS, num_cols - col0))
    if tl.max(mine.to(tl.int32), 0) > 0:  # most tiles have no row's target
        found = tl.sum(tl.where(cols[None, :] == wanted[:, None], z, 0.0), 1)
        tl.store(target_logits + rows, found, mask=mine)

    if SLOTS:  # at the end, as it needs the registers of z
        _keep(z, rows, here, first_col + col0, num_cols - col0, keys, counts, floors, K, SLOTS,
              COLS)  # fmt: skip


@triton.jit(do_not_specialize=["stats_stride", "num_rows", "num_tiles"])
def merge_kernel(  # type: ignore[no-untyped-def]
    partial,  # (3 or 4, num_tiles, num_rows) float32
    stats,  # (4, num_rows) float32
    stats_stride,
    num_rows,
    num_tiles,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    SQUARES: tl.constexpr,
):
    """The four numbers of whole rows, from those of their tiles."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = rows < num_rows
    step = num_tiles * tl.full((), 1, tl.int64) * num_rows
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    for first in range(0, num_tiles, TILES):
        tiles = first + tl.arange(0, TILES)
        mask = (tiles < num_tiles)[:, None] & here[None, :]
        at = partial + tiles.to(tl.int64)[:, None] * num_rows + rows[None, :]
        top = tl.maximum(top, tl.max(tl.load(at, mask=mask, other=-float("inf")), 0))
    top = tl.where(here, top, 0.0)
    rest = tl.zeros((ROWS,), tl.float32)
    ties = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS,), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for first in range(0, num_tiles, TILES):
        tiles = first + tl.arange(0, TILES)
        mask = (tiles < num_tiles)[:, None] & here[None, :]
        at = partial + tiles.to(tl.int64)[:, None] * num_rows + rows[None, :]
        below = tl.load(at, mask=mask, other=-1e30) - top[None, :]
        scale = tl.exp(below)
        is_top = (below == 0) & mask
        others = tl.load(at + step, mask=mask, other=0.0)
        rest += tl.sum(others * scale + tl.where(is_top, 0.0, scale), 0)
        ties += tl.sum(is_top.to(tl.float32), 0)
        theirs = tl.load(at + 2 * step, mask=mask, other=0.0)
        weighted += tl.sum(scale * (theirs + below * (1.0 + others)), 0)
        if SQUARES:
            squares += tl.sum(scale * scale * tl.load(at + 3 * step, mask=mask, other=0.0), 0)
    tl.store(stats + rows, top, mask=here)
    tl.store(stats + stats_stride + rows, rest + (ties - 1.0), mask=here)
    tl.store(stats + 2 * stats_stride + rows, weighted, mask=here)
    tl.store(stats + 3 * stats_stride + rows, squares, mask=here)


@triton.jit
def best_kernel(  # type: ignore[no-untyped-def]
    keys,  # (rows, SLOTS) int64
    counts,  # (rows,) int32
    floors,  # (rows,) int32
    missed,  # (rows,) int32
    K: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """A row's best K keys to its first slots, largest first, and what _keep is to know of them; 1
    in missed, if there had not been slots for all."""
    row = tl.program_id(0)
    count = tl.load(counts + row)
    slots = tl.arange(0, SLOTS)
    place = keys + row.to(tl.int64) * SLOTS
    # an empty slot's is below all keys, and as they are, not the same as another
    found = tl.load(place + slots, mask=slots < count, other=0)
    found = tl.where(slots < count, found, -0x8000000000000000 + slots.to(tl.int64))
    rank = tl.sum((found[None, :] > found[:, None]).to(tl.int32), 1)
    last = tl.min(tl.where(rank < K, found, 0x7FFFFFFFFFFFFFFF), 0)
    tl.debug_barrier()  # all are read before one is written over
    tl.store(place + rank, found, mask=rank < K)
    tl.store(floors + row, (last >> 32).to(tl.int32))
    tl.store(counts + row, K)
    if count > SLOTS:
        tl.store(missed + row, 1)


@triton.jit(do_not_specialize=["num_rows", "first_col"])
def grad_kernel(  # type: ignore[no-untyped-def]
    hidden,
    weight,
    hidden_stride,
    weight_stride,
    hidden_size,
    bias,
    targets,  # (num_rows,) int64
    of_rows,  # (5, num_rows) float32: see lm_head_triton._grad_rows
    out,  # (num_rows, num_cols) of the operands' dtype
    num_rows,
    num_cols,
    first_col,  # the target that column 0 stands for
    inv_temperature,
    softcap,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    EVEN_COLS: tl.constexpr,
    EVEN_INNER: tl.constexpr,
):
    row_tile, col_tile = _tile_of(num_rows, num_cols, ROWS, COLS, GROUP)
    row0, col0 = row_tile * ROWS, col_tile * COLS
    raw = _logits(
        hidden, weight, hidden_stride, weight_stride, hidden_size, bias, row0, col0, num_rows,
        num_cols, ROWS, COLS, INNER, TMA, WIDEN, PRECISION, HAS_BIAS, EVEN_INNER,
    )  # fmt: skip
    rows = row0 + tl.arange(0, ROWS)
    here = rows < num_rows
    cols = col0 + tl.arange(0, COLS)
    at = of_rows + rows
    top = tl.load(at, mask=here, other=0.0)
    log_sum = tl.load(at + num_rows, mask=here, other=0.0)
    to_logprob = tl.load(at + 2 * num_rows, mask=here, other=0.0)
    to_entropy = tl.load(at + 3 * num_rows, mask=here, other=0.0)
    both = tl.load(at + 4 * num_rows, mask=here, other=0.0)
    wanted = tl.load(targets + rows, mask=here, other=-1) - first_col

    z = raw
    if SOFTCAP:
        z = _capped(raw, softcap)
    log_p = (inv_temperature * z - top[:, None]) - log_sum[:, None]
    if HAS_BIAS:  # of a bias of -inf: 0 times it is to be 0
        log_p = tl.where(log_p < -1e30, -1e30, log_p)
    grad = -tl.exp(log_p) * (both[:, None] + to_entropy[:, None] * log_p)
    grad += tl.where(cols[None, :] == wanted[:, None], to_logprob[:, None], 0.0)
    grad *= inv_temperature
    if SOFTCAP:
        grad *= _slope(raw, softcap)
    place = out + rows.to(tl.int64)[:, None] * num_cols + cols[None, :]
    mask = here[:, None] & (cols < num_cols)[None, :]
    tl.store(place, grad.to(out.dtype.element_ty), mask=mask)
