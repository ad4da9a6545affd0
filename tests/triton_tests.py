"""Tests of Triton kernels: on a GPU where there is one, else under Triton's interpreter.

Triton must be told of the interpreter before it is imported, so without a GPU a module's tests run
in a process of their own, which `test_interpreted` starts:

    if READY:                       # here the kernels can run
        def test_...
    else:
        def test_interpreted():
            run_interpreted(__file__)
"""

import os
import subprocess
import sys

import torch

READY = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run_interpreted(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-x", "--durations=3", file]
    # The interpreter multiplies by numpy. OpenBLAS's kernels for AVX2 add up a row in another order
    # at a block's edge, which no GPU does; its kernels for SSE3 treat all rows of a block alike.
    env = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_CORETYPE": "Prescott",
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def no_worse(
    got: torch.Tensor, truth: torch.Tensor, plain: torch.Tensor, terms: float = 0.0
) -> None:
    """Error at most 1.5 times that of plain PyTorch in the same dtype: its root mean square; its
    maximum too, but for one rounding of the result. terms: size of the numbers whose difference the
    result is, where they may cancel to nothing, as all gradients do with a single column."""
    assert got.shape == truth.shape
    if got.numel() == 0:
        return
    error, allowed = (t.double() - truth for t in (got, plain))
    scale = truth.abs().max().clamp_min(terms)
    rms, most = (error.square().mean().sqrt(), error.abs().max())
    assert rms <= 1.5 * allowed.square().mean().sqrt() + 1e-6 * scale, (rms, scale)
    rounding = max(torch.finfo(got.dtype).eps / 2, 1e-6)
    assert most <= 1.5 * allowed.abs().max() + rounding * scale, (most, scale)
