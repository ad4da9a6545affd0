"""Triton's RMSNorm, SwiGLU, RoPE and scans against the float64 truth and plain PyTorch."""

import pytest
import torch
from spmdrl_kernels import norm, scan
from triton_tests import DEVICE, READY, no_worse, run_interpreted

pytestmark = pytest.mark.compiles

if READY:
    from spmdrl_kernels import norm_triton, scan_triton
    from spmdrl_kernels.norm_triton import plain_rms_norm, rms_norm
    from spmdrl_kernels.rope_triton import plain_rope, rope
    from spmdrl_kernels.scan_triton import gae, returns_to_go, running_sum
    from spmdrl_kernels.swiglu_triton import plain_swiglu, swiglu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def poison():
    """torch.empty is full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def randn(*shape, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).to(dtype).to(DEVICE)


def compare(ours, plain, inputs, *args):
    """Value and gradients; inputs need gradients, args do not."""
    up = randn(*plain(*inputs, *args).shape, dtype=torch.float32, seed=9)

    def run(function, dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
        out = function(*leaves, *args)
        return [out.detach(), *torch.autograd.grad((out * up.to(out.dtype)).sum(), leaves)]

    dtype = inputs[0].dtype
    results = [run(ours, dtype), run(plain, torch.float64), run(plain, dtype)]
    for i, (got, want, other) in enumerate(zip(*results, strict=True)):
        assert got.dtype == dtype
        no_worse(got, want, other, terms=float(up.abs().max()) if i and up.numel() else 0.0)


def ragged(seed, longest):
    """Lengths (some 0) and a mask with holes, a fully masked sequence among them."""
    g = torch.Generator().manual_seed(seed)
    lens = torch.randint(0, longest, (12,), generator=g)
    mask = (torch.rand(int(lens.sum()), generator=g) > [0.3, 0.9][seed % 2]).float()
    cu_seqlens = torch.cat([lens.new_zeros(1), lens.cumsum(0)])
    mask[cu_seqlens[3] : cu_seqlens[4]] = 0
    return cu_seqlens, mask, g


if not READY:

    def test_interpreted():
        run_interpreted(__file__)

else:

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(5, 16), (300, 50), (2, 3, 50), (3, 5000), (1, 1), (0, 8)])
    @pytest.mark.parametrize("offset", [0.0, 1.0])
    def test_rms_norm(dtype, shape, offset):
        x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
        compare(lambda x, w: rms_norm(x, w, 1e-6, offset),
                lambda x, w: plain_rms_norm(x, w, 1e-6, offset), [x, weight])  # fmt: skip

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(5, 16), (2, 3, 1030), (1, 1), (0, 8)])
    def test_swiglu(dtype, shape):
        compare(swiglu, plain_swiglu, [randn(*shape, dtype=dtype, seed=s) * 3 for s in range(2)])

    def test_swiglu_of_the_halves_of_one_tensor():
        both = randn(6, 80, dtype=torch.float32)
        compare(lambda x: swiglu(*x.chunk(2, -1)), lambda x: plain_swiglu(*x.chunk(2, -1)), [both])
        with pytest.raises(ValueError, match="gate is"):
            swiglu(both, both[:, :3])

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(5, 3, 16), (7, 9, 12), (1, 1, 2), (0, 2, 8)])
    def test_rope(dtype, shape):
        angles = randn(shape[0], shape[2], dtype=torch.float32, seed=3)
        cos, sin = (t[:, : shape[2] // 2] for t in (angles.cos(), angles.sin()))  # rows are wider
        compare(rope, plain_rope, [randn(*shape, dtype=dtype)], cos, sin)

    def test_rope_of_a_strided_part():
        """Queries within one tensor of queries, keys and values, heads before tokens."""
        whole, angles = randn(4, 7, 48, dtype=torch.float32), randn(7, 8, dtype=torch.float32)

        def part(function):
            return lambda x, *a: function(x.transpose(0, 1)[..., 16:32], *a)

        compare(part(rope), part(plain_rope), [whole], angles.cos(), angles.sin())
        with pytest.raises(ValueError, match="cos is"):
            rope(whole, angles, angles)

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("gamma", [0.0, 0.97, 1.0])
    def test_scans_are_those_of_the_cpu(seed, gamma):
        cu_seqlens, mask, g = ragged(seed, 3000 if DEVICE == "cuda" else 70)
        rewards, values = (torch.randn(len(mask), generator=g) * mask for _ in range(2))
        rewards[mask == 0] = torch.nan  # what a masked place holds is not looked at
        values[mask == 0] = torch.nan
        lam = torch.rand(len(cu_seqlens) - 1, generator=g, dtype=torch.float64)
        want = [*scan.gae(rewards, values, mask, cu_seqlens, gamma, lam),
                scan.returns_to_go(rewards, mask, cu_seqlens, gamma)]  # fmt: skip
        rewards, values, mask, cu_seqlens, lam = (
            t.to(DEVICE) for t in (rewards, values, mask, cu_seqlens, lam)
        )
        got = [*gae(rewards, values, mask, cu_seqlens, gamma, lam),
               returns_to_go(rewards, mask, cu_seqlens, gamma)]  # fmt: skip
        for a, b in zip(got, want, strict=True):
            # both sum in float64; the roundings to float32 may differ by one
            torch.testing.assert_close(a.cpu(), b, rtol=2e-7, atol=1e-9)

    @pytest.mark.parametrize("exclusive", [False, True])
    @pytest.mark.parametrize("reverse", [False, True])
    def test_running_sums_are_those_of_the_cpu(exclusive, reverse):
        dtype = torch.float64 if exclusive == reverse else torch.float32
        cu_seqlens, mask, g = ragged(int(exclusive), 3000 if DEVICE == "cuda" else 70)
        values = torch.randn(len(mask), generator=g).to(dtype)
        values[mask == 0] = torch.nan
        want = scan.running_sum(values, mask, cu_seqlens, exclusive, reverse)
        inputs = [t.to(DEVICE) for t in (values, mask, cu_seqlens)]
        got = running_sum(*inputs, exclusive, reverse)
        assert got.dtype == dtype
        rtol = 2e-7 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(got.cpu(), want, rtol=rtol, atol=1e-9)

    def test_the_switch_hands_everything_over(monkeypatch):
        cu_seqlens, mask, g = ragged(0, 40)
        rewards, values = (torch.randn(len(mask), generator=g) for _ in range(2))
        lam = torch.rand(len(cu_seqlens) - 1, generator=g, dtype=torch.float64)
        x, weight = randn(3, 16, dtype=torch.float32), randn(16, dtype=torch.float32)
        scan_inputs = [t.to(DEVICE) for t in (rewards, values, mask, cu_seqlens, lam)]
        rewards, values, mask, cu_seqlens, lam = scan_inputs

        def run(scans, norms):
            return [*scans.gae(rewards, values, mask, cu_seqlens, 0.9, lam),
                    scans.returns_to_go(rewards, mask, cu_seqlens, 0.9),
                    norms.rms_norm(x, weight, 1e-3)]  # fmt: skip

        want = run(scan_triton, norm_triton)
        monkeypatch.setattr(scan, "on_triton", lambda *t: True)
        monkeypatch.setattr(norm, "on_triton", lambda *t: True)
        assert all(torch.equal(a, b) for a, b in zip(run(scan, norm), want, strict=True))

    def test_scans_of_nothing():
        none, cu = torch.zeros(0, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
        assert [len(x) for x in gae(none, none, none, cu, 1.0, none.double())] == [0, 0]
        assert len(returns_to_go(none, none, cu, 1.0)) == 0
        assert len(running_sum(none, none, cu, True, True)) == 0
