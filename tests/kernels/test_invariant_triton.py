"""Triton's batch-invariant product and attention: right, and blind to what else is computed."""

import pytest
import torch
from triton_tests import DEVICE, READY, no_worse, run_interpreted

pytestmark = pytest.mark.compiles

if READY:
    from spmdrl_kernels.invariant_triton import attention, product

DTYPES = [torch.float32, torch.bfloat16]


def randn(*shape, dtype, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def plain_attention(query, key, value, places, scale, window):
    """Every score at once."""
    shared = query.shape[2] // key.shape[2]
    key, value = (t.repeat_interleave(shared, 2) for t in (key, value))
    scores = torch.einsum("sqhd,skhd->shqk", query, key) * scale
    at, keys = places[:, None, :, None], torch.arange(key.shape[1], device=key.device)
    hidden = (keys > at) | (keys <= at - (window or key.shape[1]))
    return torch.einsum(
        "shqk,skhd->sqhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value
    )


if not READY:

    def test_interpreted():
        run_interpreted(__file__)

else:

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(1, 5, 3), (600, 41, 300), (0, 8, 8)])
    def test_product(dtype, shape):
        rows, size, columns = shape
        x, weight = (
            randn(rows, size, dtype=dtype, seed=0),
            randn(columns, size, dtype=dtype, seed=1),
        )
        whole = product(x, weight)
        assert whole.dtype == dtype
        no_worse(whole, x.double() @ weight.double().T, x @ weight.T)
        for part in (slice(0, 1), slice(rows // 2, rows // 2 + 1), slice(rows // 3, rows)):
            assert torch.equal(product(x[part], weight), whole[part])
        assert torch.equal(product(x.flip(0), weight).flip(0), whole)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("window", [None, 40])
    @pytest.mark.parametrize("heads", [(4, 2, 20), (3, 3, 32)])
    def test_attention(dtype, window, heads):
        heads, kv_heads, size = heads
        length = 131
        query = randn(2, length, heads, size, dtype=dtype, seed=0)
        key, value = (randn(2, length, kv_heads, size, dtype=dtype, seed=s) for s in (1, 2))
        places = torch.arange(length, device=DEVICE).expand(2, -1)
        rest = places, 0.4, window
        whole = attention(query, key, value, *rest)
        truth = plain_attention(query.double(), key.double(), value.double(), *rest)
        if dtype == torch.float32:  # probabilities are rounded before the product: as in flash
            no_worse(whole, truth, plain_attention(query, key, value, *rest))
        torch.testing.assert_close(whole.double(), truth, rtol=0.03, atol=0.03)
        poisoned = key.clone(), value.clone()
        for seq, at in ((0, 0), (1, 63), (0, 64), (1, 130)):
            for tensor in poisoned:  # as memory may read that was not cleared
                tensor[:, at + 1 :] = torch.nan if at == 64 else 1e4
            one = slice(seq, seq + 1), slice(at, at + 1)
            for k, v in (poisoned, (key[:, : at + 1], value[:, : at + 1])):
                alone = attention(query[one], k[one[0]], v[one[0]], places[one], 0.4, window)
                assert torch.equal(alone, whole[one]), (seq, at)
            poisoned = key.clone(), value.clone()
