"""The fused LM head against the float64 truth and against plain PyTorch in the same dtype."""

from dataclasses import replace

import pytest
import torch
from ranks import run_calls
from torch.nn import functional as F
from triton_tests import DEVICE, READY, no_worse, run_interpreted

pytestmark = pytest.mark.compiles

if READY:
    from spmdrl_kernels import lm_head
    from spmdrl_kernels.device import has_tensor_memory_accelerator
    from spmdrl_kernels.lm_head_triton import (
        HOPPER,
        Tiles,
        lm_head_all,
        tiles_for,
    )

    SMALL = Tiles(16, 32, 16, group=2, warps=1, stages=1)


def lm_head_logprobs(*args, **kwargs):
    """Without the top k."""
    return lm_head_all(*args, **kwargs)[:3]


@pytest.fixture(autouse=True)
def poison():
    """torch.empty is full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.ones(2).new_empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def plain(hidden, weight, targets, temperature=1.0, bias=None, softcap=None):
    """Logits in the inputs' dtype, the rest in float32 or more."""
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, -1)
    p = log_p.exp()
    return log_p.gather(-1, targets[:, None])[:, 0], -(p * log_p).sum(-1), (p * p).sum(-1)


def case(seed, rows, size, vocab, dtype, with_bias):
    g = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, size, generator=g).to(dtype) for n in (rows, vocab))
    bias = torch.randn(vocab, generator=g).to(dtype) if with_bias else None
    targets = torch.randint(0, vocab, (rows,), generator=g)
    up = torch.randn(2, rows, generator=g, dtype=torch.float64)
    return [None if t is None else t.to(DEVICE) for t in (hidden, weight, bias, targets, up)]


def run(function, dtype, hidden, weight, bias, targets, up, *args, **kwargs):
    """Three results and the gradients of hidden, weight and, if there, bias."""
    leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight, bias) if t is not None]
    out = function(*leaves[:2], targets, *args, bias=leaves[2] if bias is not None else None,
                   **kwargs)  # fmt: skip
    loss = (up[0] * out[0]).sum() + (up[1] * out[1]).sum()
    return [*(t.detach() for t in out), *torch.autograd.grad(loss, leaves)]


def compare(shape, dtype, with_bias, temperature, softcap, tiles, chunk_bytes=1 << 20, seed=0):
    inputs = case(seed, *shape, dtype, with_bias)
    settings = {"temperature": temperature, "softcap": softcap}
    truth = run(plain, torch.float64, *inputs, **settings)
    theirs = run(plain, dtype, *inputs, **settings)
    ours = run(lm_head_logprobs, dtype, *inputs, **settings, pi_squared=True, tiles=tiles,
               chunk_bytes=chunk_bytes)  # fmt: skip
    terms = float(inputs[-1].abs().max())  # of the gradients: a column's probability less one
    for i, (got, want, other) in enumerate(zip(ours, truth, theirs, strict=True)):
        no_worse(got, want, other, terms=0.0 if i < 3 else terms)


SHAPES = [(1, 16, 1), (5, 24, 7), (33, 40, 130), (16, 16, 32), (70, 48, 33)]  # rows, size, vocab

if not READY:

    def test_interpreted():
        run_interpreted(__file__)

else:

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        ("with_bias", "temperature", "softcap"), [(False, 1.0, None), (True, 0.7, 3.0)]
    )
    @pytest.mark.parametrize("tma", [False, True])
    def test_values_and_gradients(shape, dtype, with_bias, temperature, softcap, tma):
        if DEVICE == "cuda" and tma:
            pytest.skip("tiny tiles do not fit the tensor memory accelerator")
        compare(shape, dtype, with_bias, temperature, softcap, replace(SMALL, tma=tma))

    @pytest.mark.parametrize("chunk_bytes", [1, 33 * 4 * 64])
    def test_the_vocabulary_in_chunks(chunk_bytes):
        """And the rows: of 70, groups of 32 at a time."""
        compare((70, 40, 200), torch.float32, True, 1.3, None, SMALL, chunk_bytes)

    @pytest.mark.parametrize("seed", range(6))
    def test_random_shapes(seed):
        g = torch.Generator().manual_seed(seed)
        rows, size, vocab = (int(torch.randint(1, n, (), generator=g)) for n in (50, 70, 150))
        dtype = [torch.float32, torch.bfloat16, torch.float16][seed % 3]
        compare((rows, size, vocab), dtype, bool(seed % 2), 1.0, None, SMALL, seed=seed)

    @pytest.mark.parametrize("tiles", range(len(HOPPER)))
    @pytest.mark.parametrize("softcap", [None, 5.0])
    def test_every_candidate(tiles, softcap):
        if DEVICE == "cpu" or not has_tensor_memory_accelerator(torch.device(DEVICE)):
            pytest.skip("needs a GPU with a tensor memory accelerator")
        compare((300, 264, 1030), torch.bfloat16, True, 0.7, softcap, HOPPER[tiles], 300 * 2 * 512)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_the_tiles_this_device_gets(dtype):
        shape = (140, 64, 530) if DEVICE == "cuda" else (33, 20, 70)
        compare(shape, dtype, False, 1.0, None, None)

    def test_entropy_and_logprobs_of_a_sure_model_are_exact_to_float32():
        """Small whole numbers: logits are exact, so the truth is known to the last digit."""
        g = torch.Generator().manual_seed(1)
        hidden = torch.randint(-4, 5, (40, 16), generator=g).float()
        weight = torch.randint(-4, 5, (90, 16), generator=g).float()
        weight[7] = weight[3]  # two tokens of one probability, in one tile; and in two
        weight[80] = weight[40]
        targets = (hidden @ weight.T).argmax(-1)
        inputs = [t.to(DEVICE) for t in (hidden, weight, targets)]
        truth = plain(inputs[0].double(), inputs[1].double(), inputs[2])
        got = lm_head_logprobs(*inputs, pi_squared=True, tiles=SMALL)
        # float64's own log-probability of a sure token is only as good as 1e-16 absolute
        for a, b in zip(got, truth, strict=True):
            rtol = (
                1e-5 if DEVICE == "cuda" else 3e-6
            )  # its exponential is good to a few digits less
            torch.testing.assert_close(a.double(), b, rtol=rtol, atol=1e-14)
        assert truth[1].min() < 1e-6

    @pytest.mark.parametrize(
        ("rows", "vocab", "k"), [(3, 70, 1), (9, 130, 8), (3, 64, 64), (2, 430, 33)]
    )
    @pytest.mark.parametrize("rising", [False, True])
    def test_top_k_with_ties(rows, vocab, k, rising):
        """Small whole numbers: logits are exact, many are equal, some have no probability. Rising
        with the column, they run out of slots."""
        hidden, weight = (torch.randint(-3, 4, (n, 17)).float() for n in (rows, vocab))
        if rising:
            hidden[:, 0], weight[:, 0] = 1, torch.arange(vocab)
        bias = torch.where(torch.rand(vocab) < 0.3, -torch.inf, -0.0)
        targets = torch.randint(0, vocab, (rows,))
        inputs = [t.to(DEVICE) for t in (hidden, weight, targets)]
        bias = bias.to(DEVICE)
        logits = inputs[0].double() @ inputs[1].double().T + bias
        found = lm_head_all(*inputs, bias=bias, top_k=k, tiles=SMALL, chunk_bytes=1 << 14)
        order = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :k]
        assert torch.equal(found[4], order)
        log_p = logits.log_softmax(1)
        torch.testing.assert_close(found[3].double(), log_p.gather(1, order), rtol=1e-5, atol=1e-5)
        entropy = torch.special.entr(log_p.exp()).sum(1)
        torch.testing.assert_close(found[1].double(), entropy, rtol=1e-5, atol=1e-6)
        without = lm_head_logprobs(*inputs, bias=bias, tiles=SMALL)
        assert all(torch.equal(a, b) for a, b in zip(without, found[:3], strict=True))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_gathered_columns(dtype):
        """In two chunks of columns; targets are among the columns of some rows. Columns that add
        and rows that take off much leave little, where the teacher's tail is the student's. Rows
        have places of -1, through which nothing flows."""
        hidden, weight, bias, targets, up = case(0, 33, 40, 130, dtype, True)
        ids = torch.rand(33, 130, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :9]
        ids[::3, -2:] = -1
        ids, scale = ids.to(DEVICE), torch.linspace(-3, 9, 9, device=DEVICE, dtype=torch.float64)

        def gathered(function, dtype):
            leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight, bias)]
            *found, columns = function(*leaves)
            found.append(columns.masked_fill(ids < 0, 0.0))
            loss = (up[0] * found[0] + up[1] * found[1]).sum() + (found[2] * scale).sum()
            return [*(t.detach() for t in found), *torch.autograd.grad(loss, leaves)]

        def ours(h, w, b):
            found = lm_head_all(h, w, targets, 0.7, b, 3.0, 33 * 64 * 2, tiles=SMALL, ids=ids)
            assert torch.equal(found[5].isnan(), ids < 0)
            return found[0], found[1], found[5]

        def theirs(h, w, b):
            logits = F.linear(h, w, b)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            log_p = torch.log_softmax(3.0 * torch.tanh(logits / 3.0) / 0.7, -1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            columns = log_p.gather(1, ids.clamp(min=0))
            return log_p.gather(1, targets[:, None])[:, 0], entropy, columns

        results = gathered(ours, dtype), gathered(theirs, torch.float64), gathered(theirs, dtype)
        for i, (got, want, other) in enumerate(zip(*results, strict=True)):
            no_worse(got, want, other, terms=0.0 if i < 3 else 9.0)

    def test_gradients_beside_a_bias_of_minus_infinity():
        hidden, weight, bias, targets, up = case(0, 9, 16, 90, torch.float32, True)
        bias[:70] = -torch.inf  # two whole tiles
        targets %= 20
        targets += 70
        got = run(lm_head_logprobs, torch.float32, hidden, weight, bias, targets, up, tiles=SMALL)
        kept = run(lm_head_logprobs, torch.float32, hidden, weight[70:], bias[70:], targets - 70,
                   up, tiles=SMALL)  # fmt: skip
        for a, b in zip(got[:4], kept[:4], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[4][70:], kept[4], rtol=1e-5, atol=1e-5)
        assert (got[4][:70] == 0).all()

    def test_no_rows_and_no_gradient():
        hidden, weight, *_ = case(0, 5, 16, 40, torch.float32, False)
        hidden.requires_grad_()
        weight.requires_grad_()
        none = torch.arange(0, device=DEVICE)
        empty = lm_head_logprobs(hidden[:0], weight, none)
        assert [len(t) for t in empty] == [0, 0, 0]
        (grad,) = torch.autograd.grad(empty[0].sum(), weight)
        assert (grad == 0).all()
        targets = torch.arange(5, device=DEVICE)
        logprobs, entropy, squares = lm_head_logprobs(hidden, weight, targets, tiles=SMALL)
        assert (squares == 0).all()  # not asked for
        (only,) = torch.autograd.grad(entropy.sum(), hidden, retain_graph=True)
        want = torch.autograd.grad(plain(hidden, weight, targets)[1].sum(), hidden)[0]
        torch.testing.assert_close(only, want, rtol=1e-4, atol=1e-5)
        # a loss that counts no token: gradients are 0, not what the memory held
        for grad in torch.autograd.grad((logprobs * 0).sum(), [hidden, weight]):
            assert (grad == 0).all()

    def test_rows_do_not_depend_on_those_beside_them():
        hidden, weight, _, targets, _ = case(0, 40, 32, 100, torch.bfloat16, False)
        whole = lm_head_logprobs(hidden, weight, targets)
        for part in (slice(0, 7), slice(7, 40), slice(39, 40)):
            alone = lm_head_logprobs(hidden[part], weight, targets[part])
            for a, b in zip(alone, whole, strict=True):
                assert torch.equal(a, b[part])

    def test_what_must_not_pass_in_silence():
        hidden, weight, _, targets, _ = case(0, 20, 16, 100, torch.float32, False)
        targets[3] = 100
        hidden[5, 0] = torch.nan
        logprobs, entropy, _ = lm_head_logprobs(hidden, weight, targets, tiles=SMALL)
        assert logprobs.isnan().nonzero().flatten().tolist() == [3, 5]
        assert entropy.isnan().nonzero().flatten().tolist() == [5]

    def test_strided_inputs():
        hidden, weight, bias, targets, up = case(0, 9, 32, 40, torch.float32, True)
        wide = torch.full((9, 50), torch.nan, device=DEVICE)
        wide[:, 8:40] = hidden
        got = run(lm_head_logprobs, torch.float32, wide[:, 8:40], weight.T.contiguous().T, bias,
                  targets, up, tiles=SMALL)  # fmt: skip
        want = run(lm_head_logprobs, torch.float32, hidden, weight, bias, targets, up, tiles=SMALL)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    def test_the_switch_hands_everything_over(monkeypatch):
        hidden, weight, bias, targets, up = case(0, 9, 32, 40, torch.float32, True)
        settings = {"temperature": 0.7, "softcap": 4.0, "pi_squared": True, "chunk_bytes": 1 << 14}
        want = run(lm_head_logprobs, torch.float32, hidden, weight, bias, targets, up, **settings)
        asked = []
        monkeypatch.setattr(lm_head, "on_triton", lambda *t: asked.append(t) or True)
        got = run(lm_head.lm_head_logprobs, torch.float32, hidden, weight, bias, targets, up,
                  **settings)  # fmt: skip
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert len(asked) == 1
        monkeypatch.undo()
        assert lm_head.on_triton(hidden, weight) == (DEVICE == "cuda")
        assert not lm_head.on_triton(hidden.cpu(), weight)

    @pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
    def test_memory_stays_under_a_gibibyte():
        rows, size, vocab = 8192, 1024, 151936
        hidden = torch.randn(rows, size, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(vocab, size, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(0, vocab, (rows,), device=DEVICE)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        logprobs, entropy, _ = lm_head.lm_head_logprobs(hidden, weight, targets)
        grads = torch.autograd.grad((logprobs + entropy).sum(), [hidden, weight])
        taken = torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in grads)
        assert taken < 1 << 30

    def test_tiles_are_those_of_the_device():
        hidden, weight, *_ = case(0, 5, 16, 40, torch.bfloat16, False)
        assert tiles_for(hidden, weight) == tiles_for(hidden[:1], weight)

    @pytest.mark.ranks
    def test_vocabulary_split_over_two_ranks():
        inputs = case(3, 20, 24, 100, torch.float32, True)
        truth = run(plain, torch.float64, *inputs, temperature=0.8, softcap=4.0)
        cuts = (37, 100)  # the second rank's share: 63 columns, none
        calls = [(_parallel, ([t.cpu() for t in inputs], cut)) for cut in cuts]
        top = torch.sort(_logits(*inputs), dim=1, descending=True, stable=True).indices[:, :40]
        for ranks in run_calls(2, calls):
            for found in ranks:
                assert torch.equal(found.pop(), top.cpu())
                for got, want in zip(found[:3], truth[:3], strict=True):
                    torch.testing.assert_close(got.double(), want.cpu(), rtol=2e-5, atol=2e-5)
            grads = [ranks[0][3] + ranks[1][3]]
            grads += [torch.cat([a, b]) for a, b in zip(ranks[0][4:], ranks[1][4:], strict=True)]
            for got, want in zip(grads, truth[3:], strict=True):
                torch.testing.assert_close(got.double(), want.cpu(), rtol=2e-5, atol=2e-5)


def _logits(hidden, weight, bias, *_):
    return hidden.double() @ weight.double().T + bias.double()


def _parallel(topology, inputs, cut):
    import torch.distributed as dist

    hidden, weight, bias, targets, up = (t.to(DEVICE) for t in inputs)
    part = slice(0, cut) if dist.get_rank() == 0 else slice(cut, len(weight))
    found = run(lm_head_logprobs, torch.float32, hidden, weight[part], bias[part], targets, up,
                temperature=0.8, softcap=4.0, pi_squared=True, group=dist.group.WORLD,
                first_row=part.start, tiles=SMALL)  # fmt: skip
    top = lm_head_all(hidden, weight[part], targets, bias=bias[part], group=dist.group.WORLD,
                      first_row=part.start, top_k=40, tiles=SMALL)  # fmt: skip
    return [t.cpu() for t in (*found, top[4])]
