"""The plain form of the fused LM head: gradients, top k, extreme logits, ranks, memory."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from ranks import run_calls
from spmdrl_kernels import linear
from spmdrl_kernels.lm_head import lm_head_gathered, lm_head_logprobs
from torch.nn import functional as F
from triton_tests import no_worse


@pytest.fixture(autouse=True)
def poison():
    """torch.empty is full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.ones(2).new_empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def plain(hidden, weight, targets, temperature=1.0, bias=None, softcap=None, k=1):
    """Logits in the inputs' dtype, the rest in float32 or more; then the top k."""
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, -1)
    values, ids = torch.sort(log_p, dim=1, descending=True, stable=True)
    entropy = torch.special.entr(log_p.exp()).sum(-1)
    chosen = log_p.gather(-1, targets[:, None])[:, 0]
    return chosen, entropy, log_p.exp().square().sum(-1), values[:, :k], ids[:, :k]


def case(rows, size, vocab, dtype, with_bias=False):
    hidden, weight = torch.randn(rows, size), torch.randn(vocab, size)
    bias = torch.randn(vocab).to(dtype) if with_bias else None
    return hidden.to(dtype), weight.to(dtype), bias, torch.randint(0, vocab, (rows,))


def test_gradients_in_float64():
    hidden, weight, bias, targets = case(5, 3, 7, torch.float64, True)
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]

    def run(h, w, b):
        return lm_head_logprobs(h, w, targets, 0.7, b, 2.5)[:2]

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by_onednn", [False, True])
@pytest.mark.parametrize(
    ("shape", "settings"),
    [((37, 33, 1543), {}), ((19, 7, 600), {"temperature": 0.6, "softcap": 5.0}),
     ((70, 129, 515), {"temperature": 1.3})],
)  # fmt: skip
def test_no_worse_than_plain(shape, settings, dtype, by_onednn, monkeypatch):
    monkeypatch.setattr(linear, "is_intel", lambda: not by_onednn)
    hidden, weight, bias, targets = case(*shape, dtype, bool(settings))
    hidden /= shape[1] ** 0.5

    def run(function, dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (hidden, weight, bias)
                  if t is not None]  # fmt: skip
        found = function(*leaves[:2], targets, bias=dict(enumerate(leaves)).get(2), **settings)
        loss = (found[0] * 0.3).sum() + (found[1] * torch.arange(len(targets))).sum()
        return [*(t.detach() for t in found[:3]), *torch.autograd.grad(loss, leaves)]

    truth, theirs = run(plain, torch.float64), run(plain, dtype)
    ours = run(lambda *a, **b: lm_head_logprobs(*a, **b, pi_squared=True), dtype)
    for got, want, other in zip(ours, truth, theirs, strict=True):
        no_worse(got, want, other)


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 28])
@pytest.mark.parametrize(("vocab", "k"), [(64, 64), (1500, 1), (1500, 8), (9001, 64)])
def test_top_k_with_ties(vocab, k, chunk_bytes):
    """Small whole numbers: logits are exact, many are equal, some have no probability."""
    hidden, weight = torch.randint(-2, 3, (6, 9)).float(), torch.randint(-2, 3, (vocab, 9)).float()
    bias = torch.where(torch.rand(vocab) < 0.3, -torch.inf, -0.0)
    targets = torch.randint(0, vocab, (6,))
    rising = torch.zeros(vocab, 9)
    rising[:, 0] = torch.arange(vocab) / 64
    for w in (weight, rising):
        logits = hidden.double() @ w.double().T + bias
        found = lm_head_logprobs(
            hidden, w, targets, bias=bias, top_k=k, chunk_bytes=chunk_bytes, pi_squared=True
        )
        order = torch.sort(logits.float(), dim=1, descending=True, stable=True).indices[:, :k]
        want = plain(hidden.double(), w.double(), targets, bias=bias.double())
        assert torch.equal(found[4], order)
        log_p = logits.log_softmax(1).gather(1, order)
        torch.testing.assert_close(found[3].double(), log_p, rtol=1e-5, atol=1e-5)
        for a, b in zip(found[:3], want[:3], strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


def test_top_k_does_not_change_the_rest_and_has_no_gradient():
    hidden, weight, _, targets = case(11, 16, 700, torch.bfloat16)
    hidden.requires_grad_()
    without, found = (lm_head_logprobs(hidden, weight, targets, top_k=k) for k in (0, 5))
    assert len(without) == 3
    assert all(torch.equal(a, b) for a, b in zip(without, found[:3], strict=True))
    assert not found[3].requires_grad
    assert found[4].dtype == torch.int64
    best = lm_head_logprobs(hidden, weight, found[4][:, 0])[0]
    assert torch.equal(best.detach(), found[3][:, 0])
    none = lm_head_logprobs(hidden[:0], weight, targets[:0], top_k=5)
    assert none[3].shape == none[4].shape == (0, 5)


def test_what_top_k_refuses():
    hidden, weight, _, targets = case(3, 4, 20, torch.float32)
    for k in (-1, 65, 21):
        with pytest.raises(ValueError, match=f"top_k is {k}"):
            lm_head_logprobs(hidden, weight, targets, top_k=k)


@pytest.mark.parametrize("scale", [1e4, 30.0])
def test_extreme_logits(scale):
    """Whole numbers again. A sure model's entropy is right to the last digits."""
    hidden, weight = torch.randint(-4, 5, (40, 16)).float(), torch.randint(-4, 5, (900, 16)).float()
    weight[800] = weight[40]
    targets = (hidden @ weight.T).argmin(-1) if scale > 1e3 else (hidden @ weight.T).argmax(-1)
    bias = torch.zeros(900)
    bias[:600] = -torch.inf  # a whole chunk
    bias[targets] = 0
    hidden = (hidden * (scale / 30)).requires_grad_()
    found = lm_head_logprobs(hidden, weight, targets, bias=bias, pi_squared=True)
    want = plain(hidden.double(), weight.double(), targets, bias=bias.double())
    for a, b in zip(found, want[:3], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-14)
    (grad,) = torch.autograd.grad(found[0].sum() + found[1].sum(), hidden)
    assert grad.isfinite().all()


def test_what_must_not_pass_in_silence():
    hidden, weight, _, targets = case(20, 16, 600, torch.float32)
    targets[3], targets[4] = 600, -1
    hidden[5, 0] = torch.nan
    logprobs, entropy, _ = lm_head_logprobs(hidden, weight, targets)
    assert logprobs.isnan().nonzero().flatten().tolist() == [3, 4, 5]
    assert entropy.isnan().nonzero().flatten().tolist() == [5]


@pytest.mark.ranks
def test_vocabulary_split_over_three_ranks():
    """Shares of 5, 700 and 295 rows, then of 1000, none and none; ties across the cuts."""
    hidden, weight = torch.randint(-2, 3, (9, 8)).float(), torch.randint(-2, 3, (1000, 8)).float()
    bias, targets = torch.randint(-1, 2, (1000,)).float(), torch.randint(0, 1000, (9,))
    up = torch.randn(2, 9)
    inputs = [hidden, weight, bias, targets, up]
    leaves = [t.double().requires_grad_() for t in inputs[:3]]
    truth = plain(*leaves[:2], targets, 0.8, leaves[2], k=20)
    grads = torch.autograd.grad((up[0] * truth[0] + up[1] * truth[1]).sum(), leaves)
    calls = [(_share, (inputs, cuts)) for cuts in ((0, 5, 705, 1000), (0, 1000, 1000, 1000))]
    for ranks in run_calls(3, calls):
        for found, _, refused in ranks:
            torch.testing.assert_close(found.pop(), found[3])  # the top k, asked for by their ids
            assert torch.equal(found[4], truth[4])
            for got, want in zip(found[:4], truth[:4], strict=True):
                torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)
            assert "vocabulary has 60 rows" in refused
        got = [sum(g[0] for _, g, _ in ranks)]
        got += [torch.cat([g[i] for _, g, _ in ranks]) for i in (1, 2)]
        for a, b in zip(got, grads, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)


def _share(topology, inputs, cuts):
    hidden, weight, bias, targets, up = inputs
    part = slice(cuts[dist.get_rank()], cuts[dist.get_rank() + 1])
    leaves = [t.requires_grad_() for t in (hidden, weight[part].clone(), bias[part].clone())]
    group = dist.group.WORLD
    found = lm_head_logprobs(
        *leaves[:2], targets, 0.8, leaves[2], pi_squared=True, group=group, first_row=part.start,
        top_k=20,
    )  # fmt: skip
    grads = torch.autograd.grad((up[0] * found[0] + up[1] * found[1]).sum(), leaves)
    gathered = lm_head_gathered(
        *leaves[:2], targets, found[4], 0.8, leaves[2], group=group, first_row=part.start
    )
    with pytest.raises(ValueError, match="ask for fewer") as refused:
        lm_head_logprobs(hidden, weight[:20], targets, group=group, top_k=61)
    return [t.detach() for t in (*found, gathered[2])], grads, str(refused.value)


MEMORY = """
import sys, torch
from pathlib import Path
from spmdrl_kernels.lm_head import lm_head_gathered, lm_head_logprobs

def peak_kib():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

rows, size, vocab = 512, 128, 32003

def run(dtype, passes):
    backward = "backward" in passes
    hidden, weight = (torch.ones(n, size, dtype=dtype, requires_grad=backward)
                      for n in (rows, vocab))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is there
    before = peak_kib()
    targets = torch.zeros(rows, dtype=torch.int64)
    if "gathered" in passes:
        ids = torch.arange(64).expand(rows, 64)
        found = lm_head_gathered(hidden, weight, targets, ids)
    else:
        found = lm_head_logprobs(hidden, weight, targets)
    loss = found[0].sum() + found[1].sum() + found[2].sum()
    grads = torch.autograd.grad(loss, [hidden, weight]) if backward else ()
    return 1024 * (peak_kib() - before) - sum(t.nbytes for t in (*found, *grads))

for case in sys.argv[1:]:
    dtype, *passes = case.split()
    run(getattr(torch, dtype), passes)  # libraries compile their products and make their pools
    print(run(getattr(torch, dtype), passes) / (4 * rows * vocab))
"""


@pytest.mark.programs
def test_a_tenth_of_the_memory_of_all_logits():
    """Of a process, as the kernel counts it, beyond inputs, results and gradients.

    What malloc frees goes back to the system at once, so that no run leaves pages that a later one
    could use unseen.
    """
    cases = [
        f"{dtype}{passes}" for passes in ("", " backward") for dtype in ("float32", "bfloat16")
    ]
    cases.append("float32 backward gathered")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *cases],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    used = dict(zip(cases, map(float, done.stdout.split()), strict=True))
    assert max(used.values()) <= 0.1, used
