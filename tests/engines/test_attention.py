"""Packed attention inside real models against transformers' own, one sequence at a time."""

from itertools import pairwise

import pytest
import torch
from spmdrl_kernels.linear import use_fast_linear
from spmdrl_kernels.norm import FastRmsNorm, use_fast_rms_norm
from tiny_models import CHARS
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from spmdrl.data.shared_prefix import SharedRow, Unit
from spmdrl.engines.fsdp import attention, packed_rows
from spmdrl.engines.fsdp.model import TokenPolicy, chosen_states
from spmdrl.engines.fsdp.packed_rows import Packing

SIZES = {
    "vocab_size": len(CHARS), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, head_dim=32, **WINDOW, attn_logit_softcapping=0.5)
    ),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=32, **WINDOW)),
}


def logprobs_of(model, sequences):
    """Per sequence, from the model's own attention."""
    out = []
    for ids in sequences:
        logits = model(ids[None]).logits[0].float()
        out.append(logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0])
    return torch.cat(out)


@pytest.mark.parametrize("name", MODELS)
def test_packed_logprobs_and_gradients_match_transformers(name):
    torch.manual_seed(0)
    model = MODELS[name]().train()
    lens = [5, 40, 1, 13, 38, 2, 21]
    sequences = [torch.randint(3, len(CHARS), (n,)) for n in lens]

    model.set_attn_implementation("eager")
    want = logprobs_of(model, [s for s in sequences if len(s) > 1])
    want.sum().backward()
    want_grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()

    model.set_attn_implementation(attention.NAME)
    seq_lens = torch.tensor(lens)
    rows = torch.cat([torch.arange(1, n) + sum(lens[:i]) for i, n in enumerate(lens)])
    positions = torch.cat([torch.arange(n) for n in lens])
    packing = Packing.build(seq_lens, torch.device("cpu"))
    use_fast_linear(model)
    use_fast_rms_norm(model)
    assert any(isinstance(m, FastRmsNorm) for m in model.modules()) == (
        not name.startswith("gemma")
    )
    tokens = torch.cat(sequences)
    got, *_ = TokenPolicy(model)(tokens, positions, packing, rows - 1, tokens[rows], 1.0)
    got.sum().backward()

    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want_grads[n], rtol=1e-4, atol=1e-4, msg=n)


@pytest.mark.parametrize("most", [packed_rows.MAX_MASK, 0], ids=["masks", "no mask"])
@pytest.mark.parametrize("name", MODELS)
def test_a_prefix_that_is_computed_once_changes_no_logprob_and_no_gradient(name, most, monkeypatch):
    monkeypatch.setattr(packed_rows, "MAX_MASK", most)
    torch.manual_seed(1)
    model = MODELS[name]().train()
    drawn = [torch.randint(3, len(CHARS), (n,)) for n in (14, 6, 3)]
    units, sequences = [Unit((0, 1, 2), 14), Unit((3,)), Unit((4, 5), 6), Unit((6, 7, 8), 3)], []
    answers = {0: (1, 30, 9), 1: (20,), 2: (5, 17), 3: (1, 2, 70)}
    for number, lens in answers.items():
        prefix = {0: drawn[0], 2: drawn[1], 3: drawn[2]}.get(number, drawn[0][:0])
        sequences += [torch.cat([prefix, torch.randint(3, len(CHARS), (n,))]) for n in lens]
    lens = torch.tensor([len(s) for s in sequences])
    tokens = torch.cat(sequences)
    firsts = lens.cumsum(0) - lens
    rows = torch.tensor([i for i in range(len(tokens)) if i not in firsts.tolist()])
    positions = torch.arange(len(tokens)) - torch.repeat_interleave(firsts, lens)

    model.set_attn_implementation("eager")
    want = logprobs_of(model, sequences)
    (want * torch.arange(len(want))).sum().backward()
    want_grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()

    model.set_attn_implementation(attention.NAME)
    row = SharedRow.build(lens, units)
    assert len(row.tokens) == len(tokens) - 2 * 14 - 6 - 2 * 3
    packing = Packing.build(
        row.run_lens, torch.device("cpu"), prefixes=row.prefixes
    )  # fmt: skip
    behind = [group.keys.masked for group in packing.groups if group.keys is not None]
    assert set(behind) == ({True, False} if most else {False})
    got, *_ = TokenPolicy(model)(
        tokens[row.tokens], positions[row.tokens], packing, row.places[rows - 1], tokens[rows], 1.0
    )
    (got * torch.arange(len(got))).sum().backward()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for n, p in model.named_parameters():
        error = (p.grad - want_grads[n]).norm() / want_grads[n].norm().clamp(min=1e-6)
        assert error < 1e-5, (n, error)


def test_long_answers_behind_a_prefix_have_no_mask():
    lens, prefixes = (
        torch.tensor([500, 4000, 3800, 200, 60, 50]),
        torch.tensor([-1, 0, 0, -1, 3, 3]),
    )
    packing = Packing.build(lens, torch.device("cpu"), prefixes=prefixes)
    behind = [group for group in packing.groups if group.keys is not None]
    assert [(g.keys.masked, g.num_seqs, g.length) for g in behind] == [
        (False, 2, 4500), (True, 2, 60),
    ]  # fmt: skip
    assert all(len(g.slots) + len(g.holes) == g.num_seqs * g.length for g in packing.groups)


@pytest.mark.parametrize("n", [1, 8, 64])
def test_states_that_several_answers_ask_for_have_their_gradients_added_in_float32(n):
    torch.manual_seed(0)
    hidden = torch.randn(3, 256).bfloat16().requires_grad_()
    states = torch.tensor([0, *[1] * n])
    up = torch.randn(n + 1, 256).bfloat16()
    chosen = chosen_states(hidden, states)
    assert torch.equal(chosen, hidden[states])
    chosen.backward(up)
    want = up[1:].double().sum(0)
    assert (hidden.grad[1].double() - want).norm() / want.norm() < 0.002  # a rounding
    assert torch.equal(hidden.grad[0], up[0]) and not hidden.grad[2].any()


def test_the_varlen_row_has_each_prefix_before_every_answer():
    """What flash attention is told on GPUs: here by torch's attention, sequence by sequence."""
    torch.manual_seed(2)
    lens, prefixes = torch.tensor([4, 3, 1, 5, 2]), torch.tensor([-1, 0, 0, -1, 3])
    packing = Packing.build(lens, torch.device("cpu"), prefixes=prefixes)
    tensors = [torch.randn(1, h, 15, 8, requires_grad=True) for h in (4, 2, 2)]
    want = attention.packed_attention(torch.nn.Module(), *tensors, None, packing)[0]
    want.square().sum().backward()
    want_grads = [t.grad.clone() for t in tensors]
    for t in tensors:
        t.grad = None
    q, k, v, row = attention.varlen_inputs(*tensors, packing)
    assert row.cu_queries.tolist() == [0, 4, 7, 8, 13, 15] and row.max_queries == 5
    assert row.cu_keys.tolist() == [0, 4, 11, 16, 21, 28] and row.max_keys == 7
    outs = []
    for i in range(5):
        queries = slice(row.cu_queries[i], row.cu_queries[i + 1])
        keys = slice(row.cu_keys[i], row.cu_keys[i + 1])
        one = [t.transpose(0, 1)[None] for t in (q[queries], k[keys], v[keys])]
        mask = torch.ones(one[0].shape[2], one[1].shape[2], dtype=torch.bool)
        mask = mask.tril(one[1].shape[2] - one[0].shape[2])  # the last query sees the last key
        out = torch.nn.functional.scaled_dot_product_attention(*one, mask, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    got = torch.cat(outs)[None]
    torch.testing.assert_close(got, want)
    got.square().sum().backward()
    for t, grad in zip(tensors, want_grads, strict=True):
        torch.testing.assert_close(t.grad, grad)


def test_groups_waste_little_padding():
    lens = torch.randint(1, 500, (64,), generator=torch.Generator().manual_seed(0))
    groups = Packing.build(lens, torch.device("cpu")).groups
    padded = sum(g.num_seqs * g.length for g in groups)
    assert padded < 1.25 * int(lens.sum())
    assert all(len(g.slots) + len(g.holes) == g.num_seqs * g.length for g in groups)
    tokens = torch.cat([g.tokens for g in groups]).sort().values
    assert torch.equal(tokens, torch.arange(int(lens.sum())))


def test_what_it_cannot_do_is_refused():
    q = torch.zeros(1, 2, 3, 8)
    packing = Packing.build(torch.tensor([3]), torch.device("cpu"))
    with pytest.raises(ValueError, match="do not hand on where the sequences"):
        attention.packed_attention(torch.nn.Module(), q, q, q, None)
    with pytest.raises(ValueError, match=r"softcap=5\.0; flash-attn has it"):
        attention._flash(q, q, q, packing, None, None, 5.0, None)
    with pytest.raises(ValueError, match=r"dropout=0\.1"):
        attention.packed_attention(torch.nn.Module(), q, q, q, None, packing, dropout=0.1)


def plain_varlen(q, k, v, row, scale, window):
    """Stands in for the kernel that CPUs lack: output and log-sum-exp of each sequence."""
    outs, sums = [], []
    for first, last in pairwise(row.cu_queries.tolist()):
        scores = torch.einsum("qhd,khd->hqk", q[first:last], k[first:last]) * scale
        ones = torch.ones(scores.shape[1:], dtype=torch.bool)
        seen = ones.tril() if window[0] < 0 else ones.tril() & ~ones.tril(-window[0] - 1)
        scores = scores.masked_fill(~seen, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[first:last]))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, dim=1), torch.zeros(2)


def plain_varlen_backward(grad, q, k, v, out, lse, state, row, scale, window):
    """The backward pass of flash attention: probabilities from lse, the correction from out."""
    grads = [torch.zeros_like(t) for t in (q, k, v)]
    for first, last in pairwise(row.cu_queries.tolist()):
        mine = slice(first, last)
        scores = torch.einsum("qhd,khd->hqk", q[mine], k[mine]) * scale
        ones = torch.ones(scores.shape[1:], dtype=torch.bool)
        seen = ones.tril() if window[0] < 0 else ones.tril() & ~ones.tril(-window[0] - 1)
        p = (scores - lse[:, mine, None]).exp().masked_fill(~seen, 0.0)
        dp = torch.einsum("qhd,khd->hqk", grad[mine], v[mine])
        d = (grad[mine] * out[mine]).sum(-1).T[..., None]
        ds = p * (dp - d) * scale
        for total, part in zip(grads, (
            torch.einsum("hqk,khd->qhd", ds, k[mine]), torch.einsum("hqk,qhd->khd", ds, q[mine]),
            torch.einsum("hqk,qhd->khd", p, grad[mine]),
        ), strict=True):  # fmt: skip
            total[mine] = part
    return tuple(grads)


@pytest.mark.parametrize("window", [None, 5])
def test_sinks_on_a_flash_kernel_are_those_of_the_plain_form(window, monkeypatch):
    """On GPUs the kernel knows no sinks: they are put into what it returns and is given back."""
    monkeypatch.setattr(attention, "varlen_forward", plain_varlen)
    monkeypatch.setattr(attention, "varlen_backward", plain_varlen_backward)
    torch.manual_seed(0)
    packing = Packing.build(torch.tensor([9, 1, 14]), torch.device("cpu"))
    tensors = [torch.randn(1, 4, 24, 8, requires_grad=True) for _ in range(3)]
    sinks = torch.randn(4, requires_grad=True)
    up = torch.randn(1, 24, 4, 8)
    results = []
    for compute in (attention._padded, attention._flash):
        out = compute(*tensors, packing, 0.3, window, None, sinks)
        results.append([out, *torch.autograd.grad((out * up).sum(), [*tensors, sinks])])
    for plain, flash in zip(*results, strict=True):
        torch.testing.assert_close(flash, plain, rtol=1e-5, atol=1e-5)
