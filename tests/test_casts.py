"""Casts of many tensors in one call against PyTorch's, bit by bit."""

import torch
from spmdrl_kernels.casts import ENOUGH, RowCast, fits


def test_a_row_of_casts_has_pytorchs_bits():
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), dtype=torch.int64).to(torch.int32)
    ties = torch.arange(1 << 12, dtype=torch.int32) << 15
    row = torch.cat([bits, ties]).view(torch.float32)
    sizes = torch.randint(0, 997, (ENOUGH,)).tolist()
    sources = [s.clone() for s in row.split([*sizes, len(row) - sum(sizes)])]
    memory = torch.zeros(len(row) + 1, dtype=torch.bfloat16)
    cast = RowCast(memory[1:], sources)
    for _ in range(2):
        cast.run()
        want = torch.cat(sources).to(torch.bfloat16)
        is_number = ~want.isnan()
        assert torch.equal(memory[1:].isnan(), want.isnan())
        assert torch.equal(
            memory[1:].view(torch.int16)[is_number], want.view(torch.int16)[is_number]
        )
        sources[3].mul_(-0.3)
    assert memory[0] == 0


def test_other_tensors_are_left_to_pytorch():
    row, many = torch.zeros(128, dtype=torch.bfloat16), [torch.zeros(2)] * 64
    assert fits(row, many)
    assert not fits(row, many[1:])
    assert not fits(row.float(), many)
    assert not fits(row, [*many[1:], torch.zeros(4)[::2]])
    assert not fits(row, [*many[1:], torch.zeros(2).half()])
