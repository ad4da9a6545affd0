"""LM head and scans against the obvious float64 form."""

from itertools import pairwise

import pytest
import torch
from spmdrl_kernels import scan
from spmdrl_kernels.linear import FastLinear, linear, use_fast_linear
from spmdrl_kernels.lm_head import lm_head_gathered, lm_head_logprobs
from spmdrl_kernels.norm import rms_norm


def reference(hidden, weight, targets, temperature, bias=None, softcap=None):
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, -1)
    p = log_p.exp()
    return log_p.gather(-1, targets[:, None])[:, 0], -(p * log_p).sum(-1), (p * p).sum(-1)


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 37 * 5, 1 << 20])
@pytest.mark.parametrize(("with_bias", "softcap"), [(False, None), (True, None), (False, 3.0)])
def test_lm_head_matches_float64_in_value_and_gradient(chunk_bytes, with_bias, softcap):
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(23, 16, generator=g, dtype=torch.float64).requires_grad_()
    weight = torch.randn(37, 16, generator=g, dtype=torch.float64).requires_grad_()
    bias = torch.randn(37, generator=g, dtype=torch.float64).requires_grad_() if with_bias else None
    targets = torch.randint(0, 37, (23,), generator=g)
    up = torch.randn(2, 23, generator=g, dtype=torch.float64)
    inputs = [t for t in (hidden, weight, bias) if t is not None]

    want = reference(hidden, weight, targets, 0.7, bias, softcap)
    want_grads = torch.autograd.grad((up[0] * want[0] + up[1] * want[1]).sum(), inputs)
    got = lm_head_logprobs(hidden, weight, targets, 0.7, bias, softcap, chunk_bytes, True)
    got_grads = torch.autograd.grad((up[0] * got[0] + up[1] * got[1]).sum(), inputs)

    for a, b in zip((*got, *got_grads), (*want, *want_grads), strict=True):
        # logits are float32 inside, whatever the inputs
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 37 * 5, 1 << 20])
@pytest.mark.parametrize(("with_bias", "softcap"), [(False, None), (True, 3.0)])
def test_gathered_columns_match_float64_in_value_and_gradient(chunk_bytes, with_bias, softcap):
    """The targets are among the columns of some rows."""
    g = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(n, 16, generator=g, dtype=torch.float64) for n in (23, 37))
    bias = torch.randn(37, generator=g, dtype=torch.float64) if with_bias else None
    inputs = [t.requires_grad_() for t in (hidden, weight, bias) if t is not None]
    targets = torch.randint(0, 37, (23,), generator=g)
    ids = torch.rand(23, 37, generator=g).argsort(1)[:, :9]
    up = torch.randn(11, 23, generator=g, dtype=torch.float64)

    def gradients(logprobs, entropy, gathered):
        weighted = (up[0] * logprobs + up[1] * entropy).sum() + (up[2:].T * gathered).sum()
        return torch.autograd.grad(weighted, inputs)

    columns = [reference(hidden, weight, c, 0.7, bias, softcap) for c in ids.T]
    want = (
        *reference(hidden, weight, targets, 0.7, bias, softcap)[:2],
        torch.stack([logprobs for logprobs, *_ in columns], 1),
    )
    got = lm_head_gathered(hidden, weight, targets, ids, 0.7, bias, softcap, chunk_bytes)
    for a, b in zip((*got, *gradients(*got)), (*want, *gradients(*want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)
    none = lm_head_gathered(hidden[:0], weight, targets[:0], ids[:0])
    assert none[2].shape == (0, 9)
    assert (torch.autograd.grad(none[2].sum(), weight)[0] == 0).all()


def test_lm_head_entropy_without_gradient_and_without_rows():
    weight = torch.randn(11, 8, requires_grad=True)
    hidden = torch.randn(5, 8, requires_grad=True)
    logprobs, entropy, squares = lm_head_logprobs(hidden, weight, torch.arange(5))
    (grad,) = torch.autograd.grad(logprobs.sum(), hidden)  # entropy unused
    assert torch.isfinite(grad).all()
    assert (entropy > 0).all()
    assert (squares == 0).all()  # not asked for
    empty = lm_head_logprobs(hidden[:0], weight, torch.arange(0))
    assert [len(t) for t in empty] == [0, 0, 0]
    (grad,) = torch.autograd.grad(empty[0].sum(), weight)
    assert (grad == 0).all()


def ragged(seed, num_seqs=23, longest=60):
    """Lengths (some 0) and a mask with holes, a fully masked sequence among them."""
    g = torch.Generator().manual_seed(seed)
    lens = torch.randint(0, longest, (num_seqs,), generator=g)
    mask = (torch.rand(int(lens.sum()), generator=g) > 0.3).float()
    cu_seqlens = torch.cat([lens.new_zeros(1), lens.cumsum(0)])
    mask[cu_seqlens[3] : cu_seqlens[4]] = 0
    return cu_seqlens, mask, g


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("gamma", [0.0, 0.97, 1.0])
def test_scans_match_the_loop(seed, gamma):
    cu_seqlens, mask, g = ragged(seed)
    rewards, values = (torch.randn(len(mask), generator=g) * mask for _ in range(2))
    lam = torch.rand(len(cu_seqlens) - 1, generator=g, dtype=torch.float64)
    got, got_plus_values = scan.gae(rewards, values, mask, cu_seqlens, gamma, lam)
    got_returns = scan.returns_to_go(rewards, mask, cu_seqlens, gamma)
    want = torch.zeros(len(mask), dtype=torch.float64)
    want_returns = torch.zeros_like(want)
    for seq in range(len(lam)):
        next_value = running = total = 0.0
        for t in reversed(range(int(cu_seqlens[seq]), int(cu_seqlens[seq + 1]))):
            if mask[t]:
                delta = float(rewards[t]) + gamma * next_value - float(values[t])
                running = delta + gamma * float(lam[seq]) * running
                total = float(rewards[t]) + gamma * total
                next_value = float(values[t])
                want[t], want_returns[t] = running, total
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    plus_values = want + values.double() * mask
    torch.testing.assert_close(got_plus_values.double(), plus_values, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got_returns.double(), want_returns, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_running_sums_match_the_loop(exclusive, reverse, dtype):
    cu_seqlens, mask, g = ragged(1)
    values = torch.randn(len(mask), generator=g).to(dtype)
    want = torch.zeros(len(mask), dtype=torch.float64)
    for first, end in pairwise(cu_seqlens.tolist()):
        for t in range(first, end):
            others = range(t + exclusive, end) if reverse else range(first, t + 1 - exclusive)
            if mask[t]:
                want[t] = sum(float(values[s]) for s in others if mask[s])
    values[mask == 0] = torch.nan  # what a masked place holds is not looked at
    got = scan.running_sum(values, mask, cu_seqlens, exclusive, reverse)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_gradient_of_a_running_sum(exclusive, reverse):
    cu_seqlens, mask, g = ragged(0, num_seqs=5, longest=9)
    values = torch.randn(len(mask), generator=g, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: scan.running_sum(x, mask, cu_seqlens, exclusive, reverse), values
    )
    parted = torch.stack([values, values], 1)[:, 0]
    got, want = (
        scan.running_sum(x, mask, cu_seqlens, exclusive, reverse) for x in (parted, values)
    )
    assert torch.equal(got, want)


def test_long_sequences_are_summed_by_several_threads(monkeypatch):
    monkeypatch.setattr(scan, "TOKENS_PER_THREAD", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    cu_seqlens, mask, g = ragged(2)
    values = torch.randn(len(mask), generator=g).double()
    got = scan.running_sum(values, mask, cu_seqlens)
    for first, end in pairwise(cu_seqlens.tolist()):
        want = (values * mask)[first:end].cumsum(0) * mask[first:end]
        torch.testing.assert_close(got[first:end], want)


def test_scans_of_nothing():
    none, cu = torch.zeros(0), torch.zeros(1, dtype=torch.int64)
    assert len(scan.running_sum(none, none, cu)) == 0
    assert [len(x) for x in scan.gae(none, none, none, cu, 1.0, none.double())] == [0, 0]
    assert len(scan.returns_to_go(none, none, cu, 1.0)) == 0


@pytest.mark.parametrize("shape", [(7, 5), (1, 3, 5), (0, 5), (2, 130, 5)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_is_as_near_to_the_truth_as_torchs(shape, with_bias):
    x = torch.randn(shape)
    weight, bias = torch.randn(11, 5), torch.randn(11) if with_bias else None
    up = torch.randn(*shape[:-1], 11)
    inputs = [t for t in (x, weight, bias) if t is not None]

    def run(function, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        out = function(*leaves)
        return (out, *torch.autograd.grad((out * up.to(dtype)).sum(), leaves))

    truth = run(torch.nn.functional.linear, torch.float64)
    theirs = run(torch.nn.functional.linear, torch.float32)
    for got, want, other in zip(run(linear, torch.float32), truth, theirs, strict=True):
        assert got.shape == want.shape
        error = (got.double() - want).abs().max() if got.numel() else torch.tensor(0.0)
        allowed = (other.double() - want).abs().max() if got.numel() else torch.tensor(0.0)
        assert error <= 1.5 * allowed + 1e-6


def test_only_plain_linears_are_replaced():
    class Own(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), Own(4, 2))
    before = model(torch.ones(1, 3))
    use_fast_linear(model)
    assert [type(m) for m in model] == [FastLinear, Own]
    torch.testing.assert_close(model(torch.ones(1, 3)), before)


@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 64), (0, 8)])
def test_rms_norm_is_as_near_to_the_truth_as_torchs(shape):
    x, weight, up = torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape)

    def run(function, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (x, weight)]
        out = function(*leaves)
        return (out, *torch.autograd.grad((out * up.to(dtype)).sum(), leaves))

    def plain(x, weight):
        return torch.nn.functional.rms_norm(x, shape[-1:], weight, 1e-6)

    truth, theirs = run(plain, torch.float64), run(plain, torch.float32)
    ours = run(lambda x, weight: rms_norm(x, weight, 1e-6), torch.float32)
    for got, want, other in zip(ours, truth, theirs, strict=True):
        assert got.shape == want.shape
        if got.numel():
            allowed = (other.double() - want).abs().max()
            assert (got.double() - want).abs().max() <= 1.5 * allowed + 1e-6
