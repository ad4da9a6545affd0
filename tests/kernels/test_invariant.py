"""Batch-invariant operators on CPUs: right, their gradients too, and blind to their company."""

import pytest
import torch
from spmdrl_kernels import invariant, lm_head
from torch.nn.functional import linear, pad, scaled_dot_product_attention, silu

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def in_company(function, rows):
    """function(rows) in batches of random sizes and orders: always the same bits."""
    whole = function(rows)
    for _ in range(3):
        order = torch.randperm(len(rows))
        sizes = torch.randint(1, 50, (len(rows),)).cumsum(0)
        parts = order.tensor_split(sizes[sizes < len(rows)])
        assert torch.equal(torch.cat([function(rows[p]) for p in parts]), whole[order])
    some = torch.randint(0, len(rows), (5,)).tolist()
    assert all(torch.equal(function(rows[i : i + 1])[0], whole[i]) for i in some)
    return whole


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(64, 96), (63, 31), (1024, 700), (5, 1)])
def test_a_row_of_a_product_has_its_bits_in_any_company(sizes, dtype):
    size, columns = sizes
    x = torch.randn(131, size).to(dtype)
    weight, bias = torch.randn(columns, size).to(dtype), torch.randn(columns).to(dtype)
    got = in_company(lambda rows: invariant.product(rows, weight, bias), x)
    rtol = 1e-4 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(got, linear(x, weight, bias), rtol=rtol, atol=40 * rtol)


@pytest.mark.parametrize("size", [1, 2, 31, 64, 99, 1000])
@pytest.mark.parametrize("name", ["tree_sum", "mean", "log_softmax", "silu", "rms_norm"])
def test_a_row_of_a_layer_has_its_bits_in_any_company(name, size):
    weight = torch.randn(size)
    ours, plain = {
        "tree_sum": (invariant.tree_sum, lambda x: x.sum(-1, keepdim=True)),
        "mean": (invariant.mean, lambda x: x.mean(-1, keepdim=True)),
        "log_softmax": (invariant.log_softmax, lambda x: x.log_softmax(-1)),
        "silu": (invariant.silu, silu),
        "rms_norm": (lambda x: invariant.rms_norm(x, weight, 1e-6),
                     lambda x: torch.nn.functional.rms_norm(x, (size,), weight.to(x), 1e-6)),
    }[name]  # fmt: skip
    x = torch.randn(77, size) * 4
    got = in_company(ours, x)
    # a sum's rounding is that of its parts, not of what is left of them
    atol = 2e-7 * float(x.abs().sum(-1).max()) if name == "tree_sum" else 2e-5
    torch.testing.assert_close(got.double(), plain(x.double()), rtol=2e-5, atol=atol)


def test_zeros_at_the_end_change_no_bit_of_a_sum_of_blocks():
    x = torch.randn(13, 7)
    for missing in range(9):
        assert torch.equal(invariant.pair_sum(pad(x, (0, 0, 0, missing))), invariant.pair_sum(x))


@pytest.mark.parametrize("window", [None, 1, 20, 33])
@pytest.mark.parametrize("heads", [(4, 2, 32), (3, 3, 24), (8, 1, 64)])
def test_a_query_has_its_bits_alone_and_among_all(heads, window):
    """As at a decode step, with what a cache may hold beyond it; and with a prefix at hand."""
    heads, kv_heads, size = heads
    length, scale = 101, 0.3
    query = torch.randn(3, length, heads, size)
    key, value = (torch.randn(3, length, kv_heads, size) for _ in range(2))
    places = torch.arange(length).expand(3, -1)
    whole = invariant.attention(query, key, value, places, scale, window)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask &= ~mask.tril(-window) if window else True
    plain = scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (query, key, value)), attn_mask=mask, scale=scale,
        enable_gqa=True,
    ).transpose(1, 2)  # fmt: skip
    torch.testing.assert_close(whole, plain, rtol=1e-5, atol=1e-5)
    for seq, at in ((0, 0), (1, 31), (2, 32), (0, 63), (1, 64), (2, 100)):
        one = slice(seq, seq + 1), slice(at, at + 1)
        k, v = key[one[0]].clone(), value[one[0]].clone()
        k[:, at + 1 :], v[:, at + 1 :] = 1e6, -1e6
        assert torch.equal(invariant.attention(query[one], k, v, places[one], scale, window),
                           whole[one])  # fmt: skip
        rest = slice(seq, seq + 1), slice(at, None)  # a chunk of a prefill
        assert torch.equal(
            invariant.attention(
                query[rest], key[one[0]], value[one[0]], places[rest], scale, window
            ),
            whole[rest],
        )


def test_gradients_are_those_of_the_ordinary_operators():
    x, weight, bias = torch.randn(2, 37, 40), torch.randn(24, 40), torch.randn(24)
    norm = torch.randn(40)
    pairs = [
        (invariant.linear, linear, (x, weight, bias)),
        (lambda x, w: invariant.rms_norm(x, w, 1e-5),
         lambda x, w: torch.nn.functional.rms_norm(x, (40,), w, 1e-5), (x, norm)),
        (invariant.silu, silu, (x,)),
        (invariant.log_softmax, lambda x: x.log_softmax(-1), (x,)),
        (invariant.mean, lambda x: x.mean(-1, keepdim=True), (x,)),
    ]  # fmt: skip
    for ours, plain, inputs in pairs:
        grads = []
        up = None
        for function in (ours, plain):
            leaves = [t.clone().requires_grad_() for t in inputs]
            out = function(*leaves)
            up = torch.randn_like(out) if up is None else up
            grads.append(torch.autograd.grad(out, leaves, up))
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_lm_head(softcap):
    hidden, weight, bias = torch.randn(70, 32) * 2, torch.randn(301, 32), torch.randn(301)
    targets = torch.randint(0, 301, (70,))
    results = []
    for function in (invariant.lm_head_logprobs, lm_head.lm_head_logprobs):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        logprobs, entropy, squares = function(
            leaves[0], leaves[1], targets, 0.7, leaves[2], softcap, pi_squared=True
        )
        grads = torch.autograd.grad((logprobs * 2 - entropy).sum(), leaves)
        results.append((logprobs, entropy, squares, *grads))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)

    def few(rows):  # in chunks of a few rows
        found = invariant.lm_head_logprobs(
            hidden[rows], weight, targets[rows], 0.7, bias, softcap, chunk_bytes=4 * 301 * 9
        )
        return found[0]

    assert torch.equal(in_company(few, torch.arange(70)), results[0][0])


def test_a_machine_where_it_does_not_hold_is_found_out(monkeypatch):
    ask = [(96, 64), (99, 64)], [32, 80], torch.float32, torch.device("cpu")
    assert invariant.faults(*ask) == []
    monkeypatch.setattr(invariant, "fast_linear", by_place)
    assert "depends on its place" in invariant.faults(*ask)[0]


def by_place(x, weight, bias=None):
    return linear(x, weight) * (1 + 1e-6 * torch.arange(len(x)))[:, None]
