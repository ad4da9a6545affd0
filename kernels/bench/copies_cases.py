"""The copies' cases of `python kernels/bench/run.py`: each gives (a run, its least bytes)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from spmdrl_kernels import copies, fp8, switch
from spmdrl_kernels.torch_compat import copy_tensors_
from torch import Tensor

Run = tuple[Callable[[], object], float]
Shapes = dict[str, list[tuple[int, ...]]]
GPU_SHAPES: Shapes = {
    "cast_pack": [(2, 16384, 8192), (6000, 64, 64)],
    "fp8_pack": [(16384, 8192)],
}
CPU_SHAPES: Shapes = {
    "cast_pack": [(20, 8, 8)],
    "fp8_pack": [(256, 256)],
}


def shapes_and_forms(
    gpu: bool, form: str, full: bool = False
) -> list[tuple[str, tuple[int, ...]]]:  # fmt: skip
    """(kernel, shape) that are measured in this form."""
    if form not in ("ours", "eager", "foreach", "compile"):
        return []
    chosen = GPU_SHAPES if gpu else CPU_SHAPES
    found = [(kernel, shape) for kernel, shapes in chosen.items() for shape in shapes]
    if form == "compile":  # of thousands of tensors it takes minutes
        found = [(kernel, shape) for kernel, shape in found if shape[0] != 6000]
    some = form == "foreach" or (form == "compile" and not full)
    return [(kernel, shape) for kernel, shape in found if kernel == "cast_pack" or not some]


def cast_pack(form: str, shape: tuple[int, ...], device: torch.device) -> Run:
    """`count` float32 matrices, every second one a slice of a wider one, into one bfloat16 row."""
    count, rows, columns = shape
    source = [torch.randn(rows, columns + 16 * (i % 2), device=device) for i in range(count)]
    source = [s[:, :columns] for s in source]
    flat = torch.empty(count * rows * columns, dtype=torch.bfloat16, device=device)
    to = [part.view(rows, columns) for part in flat.split(rows * columns)]
    job = copies.Copies()

    def loop() -> None:
        for t, s in zip(to, source, strict=True):
            t.copy_(s)

    forms: dict[str, Callable[[], object]] = {
        "ours": lambda: job.run(to, source), "eager": loop,
        "foreach": lambda: copy_tensors_(to, source),
    }  # fmt: skip
    run = torch.compile(loop, dynamic=False) if form == "compile" else forms[form]
    return run, 6 * flat.numel()


def fp8_pack(form: str, shape: tuple[int, ...], device: torch.device) -> Run:
    """A float32 matrix to e4m3 with its scales."""
    w = torch.randn(shape, device=device)

    def whole_blocks(w: Tensor) -> tuple[Tensor, Tensor]:
        blocks = w.view(shape[0] // 128, 128, shape[1] // 128, 128)
        scale_inv = fp8.scales_of(blocks.abs().amax((1, 3)))
        return (blocks / scale_inv[:, None, :, None]).to(fp8.DTYPE).view(shape), scale_inv

    switch.enabled = form != "eager"
    run = fp8.quantize_blocks
    if form == "compile":
        run = torch.compile(whole_blocks, dynamic=False)
    return lambda: run(w), 5 * w.numel()


BUILDERS: dict[str, Callable[[str, tuple[int, ...], torch.device], Run]] = {
    "cast_pack": cast_pack, "fp8_pack": fp8_pack,
}  # fmt: skip
