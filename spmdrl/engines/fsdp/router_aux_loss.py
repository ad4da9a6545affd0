"""The load-balancing loss of routers, of each sequence by itself (router_aux_loss_coef).

Of a sequence of T tokens, in a layer of E experts with k of them for each token, it is

    sum_i f_i P_i,  f_i = E / (k T) * number of the sequence's tokens that are sent to expert i,
                    P_i = 1 / T * sum over the sequence's tokens of p_i

p are the router's scores of a token divided by their sum; the scores are softmax(logits) or
sigmoid(logits), as the model has it. f has no gradient. All tokens of a sequence count, those of
its prompt too. The losses of layers are added up, and those of sequences are averaged over all
sequences of the mini-batch that have a token to be trained on. So no gradient depends on how
sequences are dealt to ranks and micro-batches.
Source: DeepSeek-V3, arXiv 2412.19437, eq. 17 to 20; the sum over layers is Megatron-core's too.

The loss is linear in p. Its slope with respect to p_i is C_i E / (k T^2) for each token of the
sequence, where C_i of its tokens are sent to expert i. A forward hook on each router counts these
and hands the gradient to the backward pass: the weights of the chosen experts pass an autograd
function that leaves them as they are, as in Megatron-core's MoEAuxLossAutoScaler.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmdrl.config import ConfigError
from spmdrl.engines.fsdp.inputs import ModelInputs
from spmdrl.engines.fsdp.prefix_sharing import PrefixCopies
from spmdrl.engines.fsdp.router_replay import others_of
from spmdrl.engines.fsdp.ulysses import SequenceParallelGroup
from spmdrl.engines.micro_batches import MicroBatch
from spmdrl.hub.tiny_config import FAILURES
from spmdrl.hub.transformers_compat import declared_routers
from spmdrl.segments import segment_sum, to_device
from spmdrl.types import Batch

# what a router makes of the logits that it returns, before it divides by the sum of its scores
SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "none": lambda scores: scores,  # it returns the scores themselves
}


class RouterOutput(NamedTuple):
    """Says where in the tuple that a router returns its results are."""

    logits: int  # (num_tokens, num_experts)
    weights: int  # (num_tokens, top_k), of the chosen experts
    experts: int  # (num_tokens, top_k) integers
    scores: str  # a key of SCORES


# ---- what is known of a model's routers


def routers_of(hf: Any) -> list[tuple[nn.Module, RouterOutput]]:
    """Returns the routers of a model in the order of its layers, and how their output is read.

    hf: a model of transformers, which may be without data. Raises ConfigError where it has no
    routers, or some whose scores are not known.
    """
    refused = f"router_aux_loss_coef does not go with model type {hf.config.model_type!r}"
    width = hf.config.get_text_config().hidden_size
    found: list[tuple[nn.Module, RouterOutput]] = []
    known: dict[type, RouterOutput | None] = {}
    for router, logits in declared_routers(hf):
        kind = type(router)
        if kind not in known:
            known[kind] = output_of(router, logits, width)
        output = known[kind]
        if output is None:
            raise ConfigError(
                f"{refused}: its {kind.__name__} does not return logits, weights and numbers of a "
                "token's experts, two or more, with weights in proportion to the softmax or the "
                "sigmoid of these logits. Leave router_aux_loss_coef 0"
            )
        found.append((router, output))
    if not found:
        raise ConfigError(
            f"{refused}: transformers declares no router_logits for it, or its layers have no "
            "experts. Leave router_aux_loss_coef 0"
        )
    return found


@torch.no_grad()
def output_of(router: nn.Module, logits: int, width: int) -> RouterOutput | None:
    """Tries a copy of a router with random weights on random tokens. Returns None where its output
    cannot be read. logits: where in its output they are; width: the size of a hidden state.
    """
    probe = copy.deepcopy(router).to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(0)
    for tensor in (*probe.parameters(), *probe.buffers()):
        if tensor.ndim > 1 and tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / tensor.shape[-1] ** 0.5)
        else:  # a bias or a scale that is the same for all experts
            tensor.fill_(1)
    tokens = torch.randn(16, width, generator=generator)
    others = [torch.zeros(()) for _ in others_of(probe)]
    for given in (tokens, tokens[None]):  # some routers are given rows of tokens
        try:
            output = read(probe(given, *others), logits)
        except FAILURES:
            continue
        if output is not None:
            return output
    return None


def read(found: Any, logits: int) -> RouterOutput | None:
    """found: what a router has returned. Returns None where it is not what the loss needs."""
    if not isinstance(found, tuple) or not all(isinstance(part, Tensor) for part in found):
        return None
    experts = [i for i, part in enumerate(found) if not part.is_floating_point()]
    if len(experts) != 1:
        return None
    chosen = found[experts[0]]
    weights = [
        i for i, part in enumerate(found)
        if part.shape == chosen.shape and i not in (logits, experts[0])
    ]  # fmt: skip
    if len(weights) != 1 or chosen.shape[-1] >= found[logits].shape[-1]:
        return None
    own = shares(found[weights[0]])
    scores = [
        name for name, score in SCORES.items()
        if torch.allclose(shares(score(found[logits]).gather(-1, chosen)), own, rtol=1e-3)
    ]  # fmt: skip
    # with one expert a token its share is 1, whatever the scores are
    return RouterOutput(logits, weights[0], experts[0], scores[0]) if len(scores) == 1 else None


def shares(scores: Tensor) -> Tensor:
    return scores / scores.sum(-1, keepdim=True)


def probabilities(logits: Tensor, scores: str) -> Tensor:
    """(num_tokens, num_experts) -> the same shape, float32: p of the module's docstring."""
    return shares(SCORES[scores](logits.float()))


# ---- the sequences of a micro-batch


def is_trained(batch: Batch) -> Tensor:
    """(num_seqs,) bool: whether a sequence has a token to be trained on. batch: on the CPU."""
    if batch.num_seqs == 0:
        return torch.zeros(0, dtype=torch.bool)
    return segment_sum(batch.loss_mask, batch.seq_lens) > 0


@dataclass(frozen=True)
class MicroBatchSequences:
    """Says which sequences the tokens of this rank's part of a micro-batch are of. On the device.

    The row of tokens is a sequence of runs: whole sequences, or prefixes and what sequences have
    behind them (data/shared_prefix.py). A further run has no tokens: it stands before sequences
    that have no prefix.
    """

    runs: Tensor  # (num_local,) int64: the run of each token
    own: Tensor  # (num_seqs,) int64: the run of each sequence
    before: Tensor  # (num_seqs,) int64: the run that stands before it
    factors: Tensor  # (num_seqs,) float32: 1 / (T^2 * number of sequences), 0 if it does not count
    copies: PrefixCopies  # of the rows of runs: those of `own`, then those of `before`
    num_runs: int  # with the one that has no tokens

    @classmethod
    def of(
        cls, mb: MicroBatch, inputs: ModelInputs, team: SequenceParallelGroup | None,
        num_seqs: float,
    ) -> MicroBatchSequences:  # fmt: skip
        """num_seqs: of the mini-batch."""
        lens, prefixes = inputs.mine.seq_lens, inputs.mine.prefixes
        empty, device = len(lens), inputs.mine.token_ids.device
        is_prefix = torch.zeros(empty, dtype=torch.bool)
        is_prefix[prefixes[prefixes >= 0]] = True
        own = (~is_prefix).nonzero()[: mb.batch.num_seqs, 0]  # what is left out is padding
        before = torch.where(prefixes[own] >= 0, prefixes[own], empty)
        num_tokens = torch.cat([lens, lens.new_zeros(1)])
        num_tokens = num_tokens[own] + num_tokens[before]
        factors = is_trained(mb.batch) / (num_tokens.double() ** 2 * num_seqs)
        runs = torch.repeat_interleave(torch.arange(empty), lens)
        if team is not None:
            runs = runs.chunk(team.size)[team.rank]
        copies = PrefixCopies.of(torch.cat([own, before]), torch.arange(2 * len(own)), device)
        runs, own, before, factors = to_device([runs, own, before, factors.float()], device)
        return cls(runs, own, before, factors, copies, empty + 1)

    def slopes(
        self, chosen: Tensor, num_experts: int, team: SequenceParallelGroup | None
    ) -> Tensor:
        """(num_runs, num_experts) float32: of the loss with respect to p of a token of each run.

        chosen: (num_local, top_k) experts of this rank's tokens. Collective over the team.
        """
        places = (self.runs[:, None] * num_experts + chosen).flatten()
        counts = torch.zeros(self.num_runs * num_experts, device=chosen.device)
        counts.scatter_add_(0, places, torch.ones_like(places, dtype=counts.dtype))
        if team is not None:
            dist.all_reduce(counts, group=team.group)
        counts = counts.view(self.num_runs, num_experts)
        of_seqs = counts[self.own] + counts[self.before]
        of_seqs *= (self.factors * (num_experts / chosen.shape[-1]))[:, None]
        return self.copies.summed(torch.cat([of_seqs, of_seqs]), self.num_runs)


class AddAuxGradient(torch.autograd.Function):
    """Returns the weights of the chosen experts; adds the gradient of the loss to the logits."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, logits: Tensor, slopes: Tensor, runs: Tensor, scores: str
    ) -> Tensor:
        """slopes: (num_runs, num_experts), with the coefficient; runs: (num_tokens,)."""
        ctx.save_for_backward(logits, slopes)
        ctx.runs, ctx.scores = runs, scores
        return weights.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        logits, slopes = ctx.saved_tensors
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            probs = probabilities(leaf.flatten(0, -2), ctx.scores)
        (own,) = torch.autograd.grad(probs, leaf, slopes[ctx.runs])
        return grads[0], own, None, None, None


# ---- in an engine


class RouterAuxLoss:
    """The loss of the routers of one model.

    It counts in the updates of an engine alone: within `over`, around each micro-batch's forward
    and backward pass within `of`.
    """

    def __init__(self, hf: Any, coef: float, team: SequenceParallelGroup | None) -> None:
        """team: ranks that share the tokens of a sequence. Raises ConfigError where the routers
        of the model are not known.
        """
        self.coef, self.team = coef, team
        self.num_layers = 0
        self.num_seqs = 0.0  # of the mini-batch; 0 outside of an update
        self.seqs: MicroBatchSequences | None = None  # None outside of a micro-batch
        self.values: dict[int, Tensor] = {}  # by layer, of this rank's tokens of the micro-batch
        self.totals: list[Tensor] = []  # of the micro-batches, the layers' mean
        for layer, (router, output) in enumerate(routers_of(hf)):
            router.register_forward_hook(partial(self.after_router, layer, output))
            self.num_layers += 1

    @contextmanager
    def over(self, batch: Batch, group: dist.ProcessGroup) -> Iterator[None]:
        """Around the passes of an update. batch: this rank's part of the mini-batch, on the CPU.
        Collective.
        """
        count = is_trained(batch).sum(dtype=torch.float64)
        dist.all_reduce(count, group=group)
        self.num_seqs, self.totals = float(count), []
        try:
            yield
        finally:
            self.num_seqs = 0.0

    @contextmanager
    def of(self, mb: MicroBatch, inputs: ModelInputs) -> Iterator[None]:
        """Around the forward pass of a micro-batch and its backward pass, which may compute parts
        of it again.
        """
        if not self.num_seqs:
            yield
            return
        self.seqs = MicroBatchSequences.of(mb, inputs, self.team, self.num_seqs)
        self.values = {}
        try:
            yield
        finally:
            self.seqs = None
        assert len(self.values) == self.num_layers, "a layer has passed its router by"
        self.totals.append(torch.stack([*self.values.values()]).double().mean())

    def after_router(
        self, layer: int, output: RouterOutput, router: nn.Module, args: Any, found: Any
    ) -> Any:
        """Is a forward hook of a router. A layer that is computed again has the same value."""
        if self.seqs is None:
            return None
        logits, chosen = found[output.logits], found[output.experts].flatten(0, -2)
        with torch.no_grad():
            slopes = self.seqs.slopes(chosen, logits.shape[-1], self.team)
            probs = probabilities(logits.flatten(0, -2), output.scores)
            self.values[layer] = (probs * slopes[self.seqs.runs]).sum()
        weights = AddAuxGradient.apply(
            found[output.weights], logits, self.coef * slopes, self.seqs.runs, output.scores
        )
        return (*found[: output.weights], weights, *found[output.weights + 1 :])

    def sums(self) -> dict[str, Tensor]:
        """Returns what this rank adds to the metric of the update that has ended, by its name."""
        return {"router_aux_loss": torch.stack(self.totals).sum()}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Takes the metric out of the sums over all ranks."""
        return {"router_aux_loss": totals.pop("router_aux_loss")}
