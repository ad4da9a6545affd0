"""Every launch of a kernel, as an H100 would get it, goes through Triton's compiler and NVIDIA's
assembler. Neither needs a GPU; what they make does not run."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.compiles

MOST_SHARED = 227 << 10  # bytes a program may have on an H100


def test_every_launch_compiles_for_hopper():
    pytest.importorskip("triton")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__], env=env, capture_output=True, text=True, timeout=230
    )
    assert done.returncode == 0, done.stderr[-6000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == 5 * 3 + (5 + 3) + 3 * 2 + 4 + 2 + 4 + 6 + 2 + (1 + 1 + 2) + 2 * 4
    for kernel in kernels:
        assert kernel["shared"] <= MOST_SHARED, kernel
    copied = [k for k in kernels if k["name"] in ("copy_kernel", "block_kernel")]
    assert len(copied) == 6 and all(kernel["wide"] for kernel in copied)
    fast = [k for k in kernels if k["tma"]]
    assert len(fast) == 3 * 2 + 2
    for kernel in fast:  # matrix instructions of a warp group, from what the accelerator loaded
        assert kernel["wgmma"] and kernel["bulk_load"], kernel


def main() -> None:
    import triton
    from spmdrl_kernels import (
        copies_triton,
        invariant_triton,
        lm_head_triton,
        norm_triton,
        rope_triton,
        scan_triton,
        swiglu_triton,
    )
    from spmdrl_kernels.policy_loss_triton import loss_and_totals
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class Hopper:
        """What Triton asks of a driver before a launch."""

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

    def compile_only(self, grid):
        def launch(*args, **kwargs):
            kernel = self.run(*args, grid=grid, warmup=True, **kwargs)
            ptx = kernel.asm["ptx"]
            print(json.dumps({"name": self.__name__, "shared": kernel.metadata.shared,
                              "tma": bool(kwargs.get("TMA")), "wgmma": "wgmma.mma_async" in ptx,
                              "bulk_load": "cp.async.bulk.tensor" in ptx,
                              "wide": bool(re.search(r"ld\.global\.v[24]", ptx))}))  # fmt: skip

        return launch

    triton.runtime.driver.set_active(Hopper())
    JITFunction.__getitem__ = compile_only
    for module in (lm_head_triton, norm_triton, swiglu_triton, rope_triton, invariant_triton):
        module.dtype_to_store = lambda like: like.dtype  # as on a GPU
    invariant_triton.widens = lambda like: False
    options = lm_head_triton._options
    lm_head_triton._options = lambda *args: options(*args) | {"WIDEN": False}

    compile_lm_heads(lm_head_triton)
    compile_top_k(lm_head_triton)
    compile_layers(norm_triton, swiglu_triton, rope_triton)
    compile_copies(copies_triton)
    compile_invariant(invariant_triton)
    for num_seqs in (1, 3):
        zeros, cu_seqlens = torch.zeros(4 * num_seqs), torch.arange(num_seqs + 1) * 4
        lam = torch.ones(num_seqs)
        scan_triton.gae(zeros, zeros, zeros, cu_seqlens, 0.9, lam)
        scan_triton.returns_to_go(zeros, zeros, cu_seqlens, 0.9)
    for dtype, exclusive in ((torch.float32, False), (torch.float64, True)):
        scan_triton.running_sum(zeros.to(dtype), zeros, cu_seqlens, exclusive, not exclusive)
    compile_policy_losses(loss_and_totals, zeros, cu_seqlens)


def compile_lm_heads(module) -> None:
    fast, plain = module.HOPPER[0], module.HOPPER[-1]
    half, single = torch.bfloat16, torch.float32
    for shape, dtype, tiles, softcap in [
        ((300, 64, 1030), half, fast, None),
        ((256, 128, 512), half, fast, 30.0),
        ((1, 64, 1), half, fast, None),
        ((33, 41, 77), half, plain, None),
        ((33, 40, 77), single, module.Tiles(64, 64, 32), 30.0),
    ]:
        rows, size, vocab = shape
        leaves = [torch.zeros(n, size, dtype=dtype, requires_grad=True) for n in (rows, vocab)]
        targets = torch.zeros(rows, dtype=torch.int64)
        logprobs, entropy, *_ = module.lm_head_all(
            *leaves, targets, 0.7, None, softcap, pi_squared=True, tiles=tiles
        )
        torch.autograd.grad((logprobs + entropy).sum(), leaves)


def compile_top_k(module) -> None:
    """Of the default tiles, in two parts of columns; and of those for float32, in one."""
    for rows, vocab, top_k, dtype, tiles in [
        (300, 1600, 64, torch.bfloat16, module.HOPPER[0]),
        (33, 77, 5, torch.float32, module.Tiles(64, 64, 32)),
    ]:
        hidden, weight = (torch.zeros(n, 64, dtype=dtype) for n in (rows, vocab))
        targets = torch.zeros(rows, dtype=torch.int64)
        module.lm_head_all(hidden, weight, targets, 0.7, top_k=top_k, tiles=tiles)


def compile_layers(norm, swiglu, rope) -> None:
    half = torch.bfloat16
    for shape in ((5, 4096), (1, 1), (7, 896)):
        x, y = (torch.zeros(shape, dtype=half, requires_grad=True) for _ in range(2))
        weight = torch.zeros(shape[1], dtype=half, requires_grad=True)
        torch.autograd.grad(norm.rms_norm(x, weight, 1e-6).sum(), [x, weight])
        if shape[1] != 4096:  # its block does not depend on the width
            torch.autograd.grad(swiglu.swiglu(x, y).sum(), [x, y])
    x, angles = torch.zeros(5, 3, 128, dtype=half, requires_grad=True), torch.zeros(5, 64)
    torch.autograd.grad(rope.rope(x, angles, angles).sum(), x)


def compile_copies(module) -> None:
    single, half = torch.zeros(300, 200), torch.zeros(300, 200, dtype=torch.bfloat16)
    module.CopyTable(None).run([half, half[:3, 1:]], [single, single[:3, 1:]])
    module.CopyTable(half.dtype).run([single, half], [single, half])  # two launches
    q, scale_inv = torch.zeros(300, 200, dtype=torch.float8_e4m3fn), torch.zeros(3, 2)
    module.quantize_blocks(half, q, scale_inv)
    module.quantize_part(single.T, (0, 0), scale_inv.T, q.T)
    module.block_maxima(single, (0, 0), scale_inv)


def compile_policy_losses(loss_and_totals, zeros, cu_seqlens) -> None:
    """With everything there is, with as little as possible, of sequences."""
    from spmdrl_kernels.policy_loss_terms import Inputs, Terms

    least, most = Inputs(*[zeros] * 4, cu_seqlens), Inputs(*[zeros] * 4, cu_seqlens, *[zeros] * 6)
    for inputs, terms in [
        (most, Terms("dppo_kl", (0.2, 0.2, 20.0), "k3+", 0.1, 0.1, 0.1, True)),
        (least, Terms("ppo", (0.2, 0.2, 3.0), "k3")),
        (most, Terms("geo_mean", (0.2, 0.2), "abs", 0.1)),
    ]:
        leaves = [zeros.clone().requires_grad_() for _ in range(2)]
        loss_and_totals(*leaves, inputs, terms)[0].backward()


def compile_invariant(module) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for rows, size, columns in ((1, 896, 1152), (300, 41, 77)):
            module.product(
                torch.zeros(rows, size, dtype=dtype), torch.zeros(columns, size).to(dtype)
            )
        for size, window in ((128, None), (80, 7)):
            query = torch.zeros(2, 3, 4, size, dtype=dtype)
            key = torch.zeros(2, 70, 2, size, dtype=dtype)
            places = torch.zeros(2, 3, dtype=torch.int64)
            module.attention(query, key, key, places, 0.1, window)


if __name__ == "__main__":
    main()
