"""Block FP8 against a loop over blocks and elements in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from spmdrl_kernels.fp8 import block_maxima, num_blocks, quantize_blocks, quantize_part, scales_of
from torch import Tensor

# e4m3: sign, 4 bits of exponent with bias 7, 3 bits of mantissa; 448 is the largest
POSITIVE = sorted(
    {m * 2.0**-9 for m in range(8)}
    | {(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)} - {480.0}
)


def nearest(value: float) -> float:
    """Of all e4m3 numbers the nearest, the one with an even mantissa of two."""
    gaps = [abs(abs(value) - p) for p in POSITIVE]
    i = min(range(len(gaps)), key=lambda i: (gaps[i], i % 2))
    return POSITIVE[i] if value > 0 else -POSITIVE[i]


def reference(w: Tensor) -> tuple[Tensor, Tensor]:
    """(values of e4m3 in float64, scales); quotients are rounded to float32, as specified."""
    q = torch.zeros(w.shape, dtype=torch.float64)
    scales = torch.zeros(num_blocks(tuple(w.shape)), dtype=torch.float64)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = w.double()[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
            largest = block.abs().max().item()
            scales[i, j] = float(torch.tensor(largest / 448).float()) if largest else 1.0
            quotients = (block / scales[i, j]).float().double()
            values = [[nearest(v) for v in row] for row in quotients.tolist()]
            q[128 * i : 128 * i + len(block), 128 * j : 128 * j + block.shape[1]] = torch.tensor(
                values, dtype=torch.float64
            )
    return q, scales


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (3, 200), (130, 129), (257, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_match_a_loop_in_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(shape[0])
    w = torch.randn(shape) * torch.logspace(-4, 2, shape[0])[:, None]
    w[0, 0] = 0.0
    w = w.to(dtype)
    q, scale_inv = quantize_blocks(w)
    want, scales = reference(w)
    assert q.dtype == torch.float8_e4m3fn and scale_inv.dtype == torch.float32
    assert torch.equal(scale_inv.double(), scales)
    assert torch.equal(q.double(), want)


def test_ties_go_to_even_and_the_largest_stays() -> None:
    w = torch.tensor([[448.0, 17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10, -448.0]])
    q, scale_inv = quantize_blocks(w)
    assert scale_inv.item() == 1.0
    assert q.tolist() == [[448.0, 16.0, 20.0, -16.0, 0.0, 2.0**-8, -448.0]]


def test_zeros_and_numbers_next_to_zero() -> None:
    w = torch.zeros(130, 256)
    w[:128, 128:] = 448.9 * 2.0**-149  # its scale has one bit
    w[128, 0] = 1e-30
    q, scale_inv = quantize_blocks(w)
    assert (scale_inv[0] == 1).all() and scale_inv[1, 1] == 1
    assert not q[:128].double().any() and q[128, 0].double() == 448
    assert q.double().isfinite().all()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_refused(value: float) -> None:
    w = torch.ones(200, 200)
    w[150, 7] = value
    with pytest.raises(ValueError, match=r"\(200, 200\) is not finite"):
        quantize_blocks(w)


@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_parts_have_the_bits_of_the_whole(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a matrix is cut: inside blocks, by rows and columns, strided."""
    monkeypatch.setattr("spmdrl_kernels.fp8.CPU_CHUNK", chunk)
    torch.manual_seed(0)
    w = torch.randn(389, 300)
    want, scale_inv = quantize_blocks(w)
    rows, columns = [0, 5, 130, 131, 389], [0, 127, 200, 300]
    boxes = [(slice(a, b), slice(c, d)) for a, b in pairwise(rows) for c, d in pairwise(columns)]
    largest = torch.zeros_like(scale_inv)
    for box in boxes:
        block_maxima(w[box], (box[0].start, box[1].start), largest)
    assert torch.equal(scales_of(largest), scale_inv)
    q = torch.empty_like(want)
    for box in boxes:
        quantize_part(w[box], (box[0].start, box[1].start), scale_inv, q[box])
    assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
