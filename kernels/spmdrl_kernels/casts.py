"""Many small float32 tensors on a CPU, cast into a row of bfloat16 in one call and one pass.

PyTorch takes some 2 us for each tensor, and casts what does not lie in a row at half the speed.
Compiled at first use (numba, half a second), like spmdrl_kernels.scan.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

ENOUGH = 64  # tensors that are worth compiling for


def fits(row: Tensor, sources: list[Tensor]) -> bool:
    return (
        len(sources) >= ENOUGH
        and row.dtype == torch.bfloat16
        and all(s.dtype == torch.float32 and s.is_contiguous() for s in sources)
        and all(tensor.device.type == "cpu" for tensor in (row, *sources))
    )


class RowCast:
    """row.copy_(torch.cat(sources)), as often as wanted; rounded to nearest, ties to even.

    row: one dimension, contiguous. It is given addresses: memory of the tensors, which are kept
    here too, must not be resized meanwhile. NaN becomes 0xffff, as in PyTorch's vector loops.
    """

    def __init__(self, row: Tensor, sources: list[Tensor]) -> None:
        assert fits(row, sources) and row.is_contiguous()
        self.row, self.sources = row, sources
        self.addresses = np.array([s.data_ptr() for s in sources], np.uint64)
        self.counts = np.array([s.numel() for s in sources], np.int64)
        assert self.counts.sum() == row.numel()

    def run(self) -> None:
        _cast()(self.row.view(torch.int16).numpy().view(np.uint16), self.addresses, self.counts)


@cache
def _cast() -> Any:
    import numba
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    @intrinsic
    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], cgutils.voidptr_t)

        return types.voidptr(address), generate

    # numba adds 32-bit numbers in 64 bits; cast back after each step, the loop is vectorised
    half, low, one = np.uint32(0x7FFF), np.uint32(16), np.uint32(1)
    sign, infinity, nan = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.uint16(0xFFFF)
    u32, u16 = np.uint32, np.uint16

    @numba.njit(nogil=True)
    def cast(row, addresses, counts):  # type: ignore[no-untyped-def]
        first = 0
        for i in range(len(counts)):
            source = numba.carray(pointer(addresses[i]), counts[i], u32)
            to = row[first : first + counts[i]]
            for k in range(counts[i]):
                bits = source[k]
                even = u32(u32(bits >> low) & one)
                rounded = u32(u32(u32(bits + half) + even) >> low)
                to[k] = nan if u32(bits & sign) > infinity else u16(rounded)
            first += counts[i]

    return cast
