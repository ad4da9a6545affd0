"""What `python kernels/bench/run.py` measures: kernels, the forms they are compared in, shapes.

A form is one way to compute the same result: `ours`, `eager` (plain PyTorch), `compile` (that, by
torch.compile), `foreach` (torch._foreach_copy_), `liger` where it can be imported, `chunked` (the
LM head's plain form), `tiles i` (the LM head with the i-th of lm_head_triton.HOPPER, whatever the
device would choose) and `top k` (the LM head with its top k as well; `eager top k` and `compile top
k`: that in plain PyTorch).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import copies_cases
import policy_loss_cases
import torch
import torch.nn.functional as F
from spmdrl_kernels import invariant, lm_head, norm, scan, switch
from torch import Tensor

TOKENS = 8192
LM_HEADS = ((896, 151936), (1024, 151936), (3584, 151936), (4096, 131072), (4096, 262144))
ALL_LM_HEADS = tuple((h, v) for h in (896, 1024, 3584, 4096) for v in (131072, 151936, 262144))
TILED = ((896, 151936), (4096, 131072))  # where all tiles are tried


@dataclass(frozen=True)
class Case:
    kernel: str
    form: str
    shape: tuple[int, ...]
    backward: bool = False
    limit_s: float = 45.0  # of the measurement, compilation included

    def __str__(self) -> str:
        passes = " + backward" if self.backward else ""
        return f"{self.kernel} {'x'.join(map(str, self.shape))}{passes}, {self.form}"


@dataclass(frozen=True)
class Work:
    """flops, num_bytes: the least that any implementation needs, not what this one does.

    check: its errors against the truth, to be reported beside its time.
    """

    run: Callable[[], object]
    flops: float
    num_bytes: float
    check: Callable[[], dict[str, float]] | None = None


def gpu_cases(full: bool, num_tiles: int) -> list[Case]:
    """The most important first."""
    heads = ALL_LM_HEADS if full else LM_HEADS
    head_shapes = [(TOKENS, *head) for head in heads]
    cases = [Case("copy", "ceiling", (1 << 29,)), Case("matmul", "ceiling", (8192, 8192, 8192))]

    def lm_heads(form: str, shapes: Sequence[tuple[int, ...]]) -> list[Case]:
        return [Case("lm_head", form, s, b) for s in shapes for b in (False, True)]

    def layers(form: str) -> list[Case]:
        shapes = {"rms_norm": (TOKENS, 4096), "swiglu": (TOKENS, 14336), "rope": (TOKENS, 32, 128)}
        return [Case(name, form, s, b) for name, s in shapes.items() for b in (False, True)]

    def strict(form: str) -> list[Case]:
        """What strict=True costs."""
        found = [Case("product", form, s) for s in ((64, 4096, 4096), (TOKENS, 4096, 4096))]
        return found + [Case("attention", form, s) for s in ((64, 1, 4096), (4, 2048, 2048))]

    def others(form: str) -> list[Case]:
        cases = policy_loss_cases.shapes(gpu=True, form=form, full=full)
        cases += [(k, form, s) for k, s in copies_cases.shapes_and_forms(True, form, full)]
        return [Case(*case) for case in cases]

    tiled = [(TOKENS, *head) for head in TILED]
    some = head_shapes if full else tiled  # for forms that are slow to measure
    gae = (256, 16384)
    for form in ("ours", "eager"):
        cases += lm_heads(form, head_shapes) + layers(form) + [Case("gae", form, gae)]
        cases += others(form) + strict(form)
    cases += [Case("lm_head", form, s) for form in ("top 8", "top 64") for s in tiled]
    cases += [Case("lm_head", f"{form} top 64", s) for form in ("eager", "compile")
              for s in (tiled if full else tiled[:1])]  # fmt: skip
    cases += lm_heads("compile", some) + layers("compile") + others("compile") + others("foreach")
    if find_spec("liger_kernel"):
        cases += [Case("lm_head", "liger", s, True) for s in some] + others("liger")
        cases += [c for c in layers("liger") if c.kernel != "rope"]
    for i in range(num_tiles):
        found = lm_heads(f"tiles {i}", tiled)
        cases += [c for c in found if full or not c.backward]
    return cases + lm_heads("chunked", tiled if full else tiled[:1])


def cpu_cases() -> list[Case]:
    """Tiny shapes of what has a form for CPUs."""
    cases = [Case("copy", "ceiling", (1 << 22,)), Case("matmul", "ceiling", (256, 256, 256))]
    for form in ("ours", "eager"):
        cases += [Case("lm_head", form, (64, 32, 1000), b) for b in (False, True)]
        cases.append(Case("lm_head", f"{form} top 8".removeprefix("ours "), (64, 32, 1000)))
        cases += [Case("rms_norm", form, (256, 128), b) for b in (False, True)]
        cases.append(Case("gae", form, (8, 256)))
        cases.append(Case("product", form, (64, 128, 128)))
        cases.append(Case("attention", form, (4, 1, 64)))
        cases += [Case(*case) for case in policy_loss_cases.shapes(gpu=False, form=form)]
    return cases + [
        Case(kernel, form, shape)
        for form in ("ours", "eager", "foreach")
        for kernel, shape in copies_cases.shapes_and_forms(False, form)
    ]


def build(case: Case, device: torch.device) -> Work:
    """The case's inputs, bfloat16 on GPUs and float32 on CPUs, and a function that runs it once."""
    torch.manual_seed(0)
    if case.kernel in policy_loss_cases.BUILDERS:
        return Work(*policy_loss_cases.BUILDERS[case.kernel](case.form, case.shape, device))
    return BUILDERS[case.kernel](case, device)


def _randn(device: torch.device, *shape: int) -> Tensor:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.randn(*shape, device=device, dtype=dtype)


def _passes(case: Case, function: Callable[..., Tensor], *leaves: Tensor) -> Callable[[], object]:
    """Forward, or forward and backward; the function returns one tensor."""
    if not case.backward:

        @torch.no_grad()
        def forward() -> Tensor:
            return function(*leaves)

        return forward
    for leaf in leaves:
        leaf.requires_grad_()
    up: list[Tensor] = []

    def both() -> object:
        out = function(*leaves)
        if not up:
            up.append(torch.ones_like(out))
        return torch.autograd.grad(out, leaves, up[0])

    return both


def _form(case: Case, forms: dict[str, Callable[..., Tensor]]) -> Callable[..., Tensor]:
    if case.form == "compile":
        return torch.compile(forms["eager"], dynamic=False)
    return forms[case.form]


def _copy(case: Case, device: torch.device) -> Work:
    source = torch.zeros(case.shape, device=device, dtype=torch.bfloat16)
    to = torch.empty_like(source)
    return Work(lambda: to.copy_(source), 0, 4 * source.numel())


def _matmul(case: Case, device: torch.device) -> Work:
    m, n, k = case.shape
    a, b = _randn(device, m, k), _randn(device, n, k)
    num_bytes = a.element_size() * (m * k + n * k + m * n)
    return Work(lambda: a @ b.T, 2 * m * n * k, num_bytes)


def _product(case: Case, device: torch.device) -> Work:
    """Batch-invariant, beside the library's."""
    m, n, k = case.shape
    a, b = _randn(device, m, k), _randn(device, n, k)
    forms = {"ours": invariant.product, "eager": F.linear}
    num_bytes = a.element_size() * (m * k + n * k + m * n)
    return Work(_passes(case, forms[case.form], a, b), 2 * m * n * k, num_bytes)


def _attention(case: Case, device: torch.device) -> Work:
    """The last queries of sequences; 32 heads of 128 share 8 key heads."""
    num_seqs, num_queries, num_keys = case.shape
    q = _randn(device, num_seqs, num_queries, 32, 128)
    k, v = (_randn(device, num_seqs, num_keys, 8, 128) for _ in range(2))
    places = torch.arange(num_keys - num_queries, num_keys, device=device).expand(num_seqs, -1)

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        causal = num_queries > 1
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return invariant.attention(q, k, v, places, 128**-0.5)

    forms = {"ours": ours, "eager": eager}
    pairs = num_seqs * num_queries * (2 * num_keys - num_queries + 1) // 2
    num_bytes = 2 * q.nbytes + k.nbytes + v.nbytes
    return Work(_passes(case, forms[case.form], q, k, v), 4 * 32 * 128 * pairs, num_bytes)


def plain_lm_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Log-probability + 0.01 entropy: (rows,) float32, float64 where that is given."""
    logits = F.linear(hidden, weight)
    log_p = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1) + 0.01 * entropy


def _lm_head(case: Case, device: torch.device) -> Work:
    rows, size, vocab = case.shape
    hidden, weight = _randn(device, rows, size), _randn(device, vocab, size) * 0.02
    targets = torch.randint(0, vocab, (rows,), device=device)
    function = _lm_head_form(case)
    if case.form == "chunked":
        switch.enabled = False
    num_bytes = (1 + case.backward) * (hidden.nbytes + weight.nbytes) + 12 * rows
    run = _passes(case, lambda h, w: function(h, w, targets), hidden, weight)

    def check() -> dict[str, float]:
        return errors(function, hidden[:256], weight, targets[:256])

    flops = 2 * (1 + 2 * case.backward) * rows * size * vocab
    checked = case.backward and case.form.startswith(("ours", "tiles"))
    return Work(run, flops, num_bytes, check if checked else None)


def errors(
    function: Callable[..., Tensor], hidden: Tensor, weight: Tensor, targets: Tensor
) -> dict[str, float]:
    """Root mean square error, against float64, of result and gradients, over that of plain
    PyTorch in the same dtype."""

    def run(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (hidden, weight)]
        out = function(*leaves, targets)
        return [out.detach(), *torch.autograd.grad(out.sum(), leaves)]

    truth = run(plain_lm_head, torch.float64)
    theirs = [_rms(a, b) for a, b in zip(run(plain_lm_head, hidden.dtype), truth, strict=True)]
    ours = [_rms(a, b) for a, b in zip(run(function, hidden.dtype), truth, strict=True)]
    names = ("error_over_plain", "d_hidden_error_over_plain", "d_weight_error_over_plain")
    return {n: a / b for n, a, b in zip(names, ours, theirs, strict=True)}


def _rms(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).square().mean().sqrt())


def _lm_head_form(case: Case) -> Callable[..., Tensor]:
    def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logprobs, entropy, _ = lm_head.lm_head_logprobs(hidden, weight, targets)
        return logprobs + 0.01 * entropy

    if case.form.startswith("tiles"):
        return _tiled(int(case.form.split()[1]))
    if "top " in case.form:
        return _with_top_k(case.form)
    forms: dict[str, Callable[..., Any]] = {
        "eager": plain_lm_head, "ours": ours, "chunked": ours
    }  # fmt: skip
    if case.form == "liger":  # it has no entropy, and its forward makes the gradients
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        forms["liger"] = lambda h, w, t: loss(w, h, t)[None]
    return _form(case, forms)


def _with_top_k(form: str) -> Callable[..., Tensor]:
    """form: `top k`, `eager top k` or `compile top k`."""
    k = int(form.split()[-1])

    def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logprobs, entropy, _, top, _ = lm_head.lm_head_logprobs(hidden, weight, targets, top_k=k)
        return logprobs + 0.01 * entropy + top[:, -1]

    def eager(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        log_p = F.linear(hidden, weight).float().log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        chosen = log_p.gather(-1, targets[:, None]).squeeze(-1)
        return chosen + 0.01 * entropy + log_p.topk(k, -1).values[:, -1]

    if form.startswith("compile"):
        return torch.compile(eager, dynamic=False)
    return eager if form.startswith("eager") else ours


def _tiled(number: int) -> Callable[..., Tensor]:
    from spmdrl_kernels import lm_head_triton

    tiles = lm_head_triton.HOPPER[number]

    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        found = lm_head_triton.lm_head_all(hidden, weight, targets, tiles=tiles)[:3]
        return found[0] + 0.01 * found[1]

    return run


def _rms_norm(case: Case, device: torch.device) -> Work:
    x, weight = _randn(device, *case.shape), _randn(device, case.shape[1])

    def eager(x: Tensor, w: Tensor) -> Tensor:  # what transformers computes
        wide = x.float()
        return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    forms: dict[str, Callable[..., Any]] = {
        "eager": eager, "ours": lambda x, w: norm.rms_norm(x, w, 1e-6)
    }  # fmt: skip
    if case.form == "liger":
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        forms["liger"] = lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6)
    run = _passes(case, _form(case, forms), x, weight)
    return Work(run, 0, (2 + 3 * case.backward) * x.nbytes)


def _swiglu(case: Case, device: torch.device) -> Work:
    from spmdrl_kernels.swiglu_triton import swiglu

    gate, up = _randn(device, *case.shape), _randn(device, *case.shape)
    forms: dict[str, Callable[..., Any]] = {"eager": lambda g, u: F.silu(g) * u, "ours": swiglu}
    if case.form == "liger":
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        forms["liger"] = LigerSiLUMulFunction.apply
    run = _passes(case, _form(case, forms), gate, up)
    return Work(run, 0, (3 + 5 * case.backward) * gate.nbytes)


def _rope(case: Case, device: torch.device) -> Work:
    from spmdrl_kernels.rope_triton import rope

    x = _randn(device, *case.shape)
    angles = torch.rand(case.shape[0], case.shape[2] // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    c, s = (t.repeat(1, 2)[:, None].to(x.dtype) for t in (cos, sin))

    def eager(x: Tensor) -> Tensor:  # what transformers computes
        a, b = x.chunk(2, -1)
        return x * c + torch.cat([-b, a], -1) * s

    forms = {"eager": eager, "ours": lambda x: rope(x, cos, sin)}
    run = _passes(case, _form(case, forms), x)
    return Work(run, 0, 2 * (1 + case.backward) * x.nbytes)


def _gae(case: Case, device: torch.device) -> Work:
    """Of 64 tokens' turns one in ten is a tool's, which are masked."""
    rows, length = case.shape
    mask = (torch.rand(rows, length // 64, device=device) > 0.1).float().repeat_interleave(64, 1)
    rewards, values = (torch.randn(rows, length, device=device) * mask for _ in range(2))
    cu_seqlens = torch.arange(rows + 1, device=device) * length
    lam = torch.full((rows,), 0.95, device=device, dtype=torch.float64)
    flat = (rewards.reshape(-1), values.reshape(-1), mask.reshape(-1))
    forms: dict[str, Callable[[], Any]] = {
        "ours": lambda: scan.gae(*flat, cu_seqlens, 1.0, lam),
        "eager": lambda: loop_gae(rewards, values, mask),
    }
    return Work(forms[case.form], 0, 5 * rewards.nbytes)


def loop_gae(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """One token at a time over the padded batch, as the field's trainers do it; gamma 1, lam 0.95.

    rewards, values, mask: (num_seqs, length). Returns advantages and returns.
    """
    carry, next_values, out = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0]), []
    for t in range(rewards.shape[1] - 1, -1, -1):
        m = mask[:, t]
        carry = torch.where(m > 0, rewards[:, t] + next_values - values[:, t] + 0.95 * carry, carry)
        next_values = torch.where(m > 0, values[:, t], next_values)
        out.append(carry)
    advantages = torch.stack(out[::-1], dim=1)
    return advantages * mask, (advantages + values) * mask


def _copies(function: Callable[..., copies_cases.Run], case: Case, device: torch.device) -> Work:
    run, num_bytes = function(case.form, case.shape, device)
    return Work(run, 0, num_bytes)


BUILDERS: dict[str, Callable[[Case, torch.device], Work]] = {
    "copy": _copy,
    "matmul": _matmul,
    "lm_head": _lm_head,
    "product": _product,
    "attention": _attention,
    "rms_norm": _rms_norm,
    "swiglu": _swiglu,
    "rope": _rope,
    "gae": _gae,
    **{name: partial(_copies, function) for name, function in copies_cases.BUILDERS.items()},
}
