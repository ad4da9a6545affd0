"""What `python kernels/bench/run.py` measures of the policy loss and of running sums.

policy_loss (num_tokens): loss, all metrics, both gradients, from log-probabilities; the plain form
is that of spmdrl.algo. grpo (num_seqs, length, hidden, vocab): log-probabilities from hidden
states, then the loss, then the gradients of hidden states and weight; peer: Liger's fused GRPO.
running_sum (num_seqs, length).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from spmdrl_kernels import lm_head, scan, switch
from torch import Tensor

Run = Callable[[], object]
Found = tuple[Run, float, float]  # the run, the least operations and the least bytes it needs


def shapes(gpu: bool, form: str, full: bool = False) -> list[tuple[str, str, tuple[int, ...]]]:
    """(kernel, form, shape) of every case that is measured in this form."""
    grpo: list[tuple[str, str, tuple[int, ...]]]
    grpo = [("grpo", form, (8, 1024, 896, 151936))] if gpu and form in ("ours", "liger") else []
    if form not in ("ours", "eager", "compile"):
        return grpo
    sizes = ((1 << 16,), (1 << 24,)) if gpu else ((300,),)
    if form == "compile" and not full:
        sizes = sizes[:1]
    rows = (256, 16384) if gpu else (8, 256)
    return [*[("policy_loss", form, size) for size in sizes], ("running_sum", form, rows), *grpo]


def policy_loss(form: str, shape: tuple[int, ...], device: torch.device) -> Found:
    """PPO with k3 in the loss and an entropy bonus; one token in ten is masked."""
    objective, batch = objective_and_batch(shape[0], device)
    if form != "ours":
        switch.enabled = False
    if form == "compile":
        objective = torch.compile(objective, dynamic=False)
    logprobs, entropy = (torch.rand(shape, device=device) * batch.loss_mask for _ in range(2))
    leaves = [(-logprobs).requires_grad_(), entropy.requires_grad_()]

    def run() -> object:
        loss, sums = objective(*leaves, batch)
        return sums, torch.autograd.grad(loss, leaves)

    return run, 0, 40 * shape[0]  # eight inputs, two gradients


def objective_and_batch(num_tokens: int, device: torch.device):  # type: ignore[no-untyped-def]
    """The step's own loss function, and tokens for it; 16 sequences and what is left over."""
    from dataclasses import replace

    from spmdrl.algo.objectives import policy_objective
    from spmdrl.config import AlgoConfig
    from spmdrl.data.packing import empty_batch

    each = num_tokens // 16
    lens = torch.tensor([each] * 16 + [num_tokens - 16 * each])
    mask = (torch.rand(num_tokens) > 0.1).float()
    old, ref, rollout = (-torch.rand(num_tokens) * mask for _ in range(3))
    batch = replace(
        empty_batch(lens, num_keys=0), loss_mask=mask, old_logprobs=old, ref_logprobs=ref,
        rollout_logprobs=rollout, advantages=torch.randn(num_tokens) * mask,
        loss_weights=mask / mask.sum(),
    )  # fmt: skip
    return policy_objective(AlgoConfig(kl_coef=0.01, entropy_coef=0.01)), batch.to(device)


def grpo(form: str, shape: tuple[int, ...], device: torch.device) -> Found:
    """The clipped surrogate alone, its mean over all tokens; an advantage for each sequence."""
    num_seqs, length, size, vocab = shape
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.randn(num_seqs, length, size, device=device, dtype=dtype).requires_grad_()
    weight = (0.02 * torch.randn(vocab, size, device=device, dtype=dtype)).requires_grad_()
    targets = torch.randint(0, vocab, (num_seqs, length), device=device)
    advantages = torch.randn(num_seqs, device=device)
    loss = (liger_grpo if form == "liger" else our_grpo)(targets, advantages)

    def run() -> object:
        found = loss(hidden, weight)
        return found, *torch.autograd.grad(found, [hidden, weight])

    flops = 6 * num_seqs * length * size * vocab
    return run, flops, 2 * (hidden.nbytes + weight.nbytes)


Loss = Callable[[Tensor, Tensor], Tensor]


def our_grpo(targets: Tensor, advantages: Tensor) -> Loss:
    """f(hidden (num_seqs, length, size), weight); targets (num_seqs, length)."""
    from spmdrl.algo.objectives import policy_objective
    from spmdrl.config import AlgoConfig
    from spmdrl.data.packing import empty_batch

    num_seqs, length = targets.shape
    batch = empty_batch(torch.full((num_seqs,), length), num_keys=0).to(targets.device)
    batch.loss_mask = torch.ones(targets.numel(), device=targets.device)
    batch.rollout_logprobs = torch.zeros_like(batch.loss_mask)
    batch.loss_weights = batch.loss_mask / targets.numel()
    batch.advantages = advantages.repeat_interleave(length)
    objective = policy_objective(AlgoConfig())

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        flat = hidden.flatten(0, 1)
        logprobs, entropy, _ = lm_head.lm_head_logprobs(flat, weight, targets.flatten())
        return objective(logprobs, entropy, batch)[0]

    return loss


def liger_grpo(targets: Tensor, advantages: Tensor) -> Loss:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    fused = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="bnpo",
                                     compiled=targets.is_cuda)  # fmt: skip
    ones = torch.ones_like(targets)
    return lambda hidden, weight: fused(hidden, weight, targets, ones, advantages)[0]


def running_sum(form: str, shape: tuple[int, ...], device: torch.device) -> Found:
    """Of 64 tokens' turns one in ten is a tool's, which are masked."""
    rows, length = shape
    mask = (torch.rand(rows, length // 64, device=device) > 0.1).float().repeat_interleave(64, 1)
    values = torch.randn(rows, length, device=device)
    cu_seqlens = torch.arange(rows + 1, device=device) * length

    def ours() -> Tensor:
        return scan.running_sum(values.view(-1), mask.view(-1), cu_seqlens)

    def eager() -> Tensor:
        return ((values * mask).double().cumsum(1) * mask).float()

    forms = {"ours": ours, "eager": eager}
    run = torch.compile(eager, dynamic=False) if form == "compile" else forms[form]
    return run, 0, 3 * values.nbytes


BUILDERS = {"policy_loss": policy_loss, "grpo": grpo, "running_sum": running_sum}
