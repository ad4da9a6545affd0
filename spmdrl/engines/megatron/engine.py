"""Megatron-core: tensor, pipeline, context and expert parallel training behind the same Protocol.

The ranks of a model-parallel group (tensor x context x pipeline) work on the same sequences. One of
them, the first of the last stage, is given them (Topology.data_ranks) and hands them to the others.
The loss function of the step runs on the last stage, inside Megatron's pipeline schedule.

The model is cut short before its output layer: it returns hidden states, of which those before
chosen tokens go through the vocabulary-parallel head of spmdrl_kernels.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.algo.own_functions import without_faults
from spmdrl.checkpoint.format import Staged
from spmdrl.config import ConfigError, TrainConfig
from spmdrl.data.images import BatchImages
from spmdrl.distributed.collectives import broadcast_object
from spmdrl.distributed.progress import PROGRESS
from spmdrl.distributed.topology import Topology
from spmdrl.engines.base import LossFn
from spmdrl.engines.fsdp.lora_files import save_adapter
from spmdrl.engines.fsdp.model import require_given
from spmdrl.engines.host_copies import HostCopies
from spmdrl.engines.lr_schedule import learning_rate
from spmdrl.engines.megatron import compat, lora
from spmdrl.engines.megatron.inputs import Inputs, inputs_of
from spmdrl.engines.megatron.mtp import mtp_logprobs
from spmdrl.engines.megatron.parts import Parts
from spmdrl.engines.megatron.vision import embedded, looking_ahead, passing, rotary_positions
from spmdrl.engines.micro_batches import (
    MicroBatch,
    add_metrics,
    cut,
    pairs_of,
    reduce_metrics,
    scatter_rows,
    token_rows,
)
from spmdrl.engines.policy_head import (
    asked_ids,
    head_results,
    num_columns,
    policy_stats,
    table_of,
    with_students,
)
from spmdrl.engines.recorded_pass import RecordedPass
from spmdrl.engines.sequence_sharing import SumForward, broadcast_batch
from spmdrl.types import Batch, PolicyStats
from spmdrl.weights.shards import Shards, fill
from spmdrl.weights.transfer import gathered


class MegatronEngine:
    """A policy (`kind` "policy"), critic ("value") or reward model ("reward"), which is trained on
    pairs; the TrainEngine Protocol says what it does.

    The topology has the axes pp, dp, cp and tp. Weights are in config.dtype; the optimizer, which
    is distributed over the data-parallel ranks, keeps float32 ones, and gradients are summed in
    float32. On ranks that are given no sequences, batches are empty and so are results for tokens.
    """

    def __init__(
        self, parts: Parts, config: TrainConfig, topology: Topology, in_pairs: bool = False
    ) -> None:
        """parts: of megatron_parts.build_parts, or around a host's model and optimizer. in_pairs:
        as of FsdpEngine.
        """
        self.parts, self.config, self.topology = parts, config, topology
        self.pretrained = parts.pretrained
        self.num_updates = 0
        self.copies: HostCopies | None = None  # of all that is saved, from the first `stage` on
        self.without_adapters = False
        trains_reward = parts.kind == "reward" and parts.optimizer is not None
        self.in_pairs = in_pairs or trains_reward

    # ---- passes without gradient

    def logprobs(
        self, batch: Batch, temperature: float, pi_squared: bool = False,
        images: BatchImages | None = None, top_k: int = 0, teacher: bool = False,
    ) -> PolicyStats:  # fmt: skip
        look = partial(
            self.policy, temperature=temperature, pi_squared=pi_squared, top_k=top_k,
            teacher=teacher,
        )  # fmt: skip
        columns = num_columns(pi_squared, top_k, batch, teacher)
        return policy_stats(self._per_token(batch, columns, look, images), top_k, teacher)

    def values(self, batch: Batch, images: BatchImages | None = None) -> Tensor:
        return self._per_token(batch, 1, self.value, images)[0]

    def record_pass(self, batch: Batch, rows: Tensor, temperature: float) -> RecordedPass:
        raise ConfigError("modules of engine megatron have other names than a rollout engine's")

    @torch.no_grad()
    def _per_token(
        self, own: Batch, columns: int, look: Callable[[Inputs, Tensor], tuple[Tensor, ...]],
        images: BatchImages | None,
    ) -> Tensor:  # fmt: skip
        """(columns, num_tokens) float32 on the CPU."""
        result = torch.zeros(columns, own.num_tokens)
        off = lora.adapters_off(self.parts.raw) if self.without_adapters else nullcontext()
        with self.parts.state.active(), off:
            batch = self.shared(own, images)
            parts = self._micro_batches(batch)

            def stats(inputs: Inputs, hidden: Tensor) -> Tensor:
                return table_of(look(inputs, hidden), columns).cpu()

            found = self.run(self._on_device(parts), stats, forward_only=True, images=images)
        if own.num_tokens:  # this is the rank that asked
            for mb, values in zip(parts, found, strict=True):
                rows = token_rows(own, mb.seqs)
                result[:, rows] = values[:, : len(rows)]
        return result

    # ---- training

    def update(
        self, batch: Batch, loss_fn: LossFn, temperature: float, images: BatchImages | None = None
    ) -> dict[str, float]:
        assert self.parts.optimizer is not None, "a frozen engine is not trained"
        num_tokens = batch.loss_mask.sum(dtype=torch.float64)
        dist.all_reduce(num_tokens, group=self.topology.group)
        if float(num_tokens) == 0:
            return {}
        sums: dict[str, Tensor] = {}

        def loss(inputs: Inputs, hidden: Tensor) -> Tensor:
            mb = inputs.batch
            if self.parts.kind == "policy":
                found = self.policy(inputs, hidden, temperature, teacher=True)
                logprobs, entropy, _ = found
                mb = with_students(mb, found)
            else:
                (logprobs,) = self.value(inputs, hidden)
                entropy = torch.zeros_like(logprobs)
            value, metrics = loss_fn(logprobs, entropy, mb)
            add_metrics(sums, {"loss_sum": value.detach(), **metrics})
            if self.parts.mtp_embeddings is None:
                return value
            ahead = self._mtp_loss(inputs, hidden)
            add_metrics(sums, {"mtp_loss": ahead.detach()})
            return value + self.config.mtp_loss_scaling_factor * ahead / float(num_tokens)

        with self.parts.state.active():
            parts = self._micro_batches(self.shared(batch, images))
            self.parts.start_update()
            self.run(self._on_device(parts), loss, forward_only=False, images=images)
            totals, faults = without_faults(self._totals(sums))
            lr = self._learning_rate()
            losses = {"loss": totals.pop("loss_sum")}
            if "mtp_loss" in totals:
                losses["mtp_loss"] = totals.pop("mtp_loss") / float(num_tokens)
            norms = self._step(losses, faults)
        self.num_updates += 1
        result = {**losses, **norms, "lr": lr}
        for name, total in totals.items():
            result[name] = total if name.endswith("_max") else total / float(num_tokens)
        return result

    def _mtp_loss(self, inputs: Inputs, hidden: Tensor) -> Tensor:
        """Returns the sum over the unmasked tokens of their negative log-probability, the mean of
        the layers for multi-token prediction.
        """
        embeddings = self.parts.mtp_embeddings
        assert embeddings is not None
        predict = partial(self.policy, temperature=1.0, frozen_head=True)
        found = mtp_logprobs(
            self.parts.raw[-1], embeddings, inputs, hidden,
            lambda now, states: predict(now, states)[0],
        )  # fmt: skip
        return -torch.stack(found).sum() / len(found)

    def _learning_rate(self) -> float:
        """The learning rate of the update to come; set here, but where the host has a schedule of
        its own.
        """
        if not self.parts.owned:
            return max((g["lr"] for g in self.parts.optimizer.param_groups), default=0.0)
        lr = learning_rate(self.config.optim, self.num_updates)
        for param_group in self.parts.optimizer.param_groups:
            param_group["lr"] = lr
        return lr

    def _step(self, losses: dict[str, float], faults: str) -> dict[str, float]:
        """Clips and steps; returns the gradient norms before. FloatingPointError changes nothing.

        losses: by name. faults: of functions, said where a loss or a norm is not finite.
        """
        optimizer, parts = self.parts.optimizer, self.parts
        assert optimizer is not None
        overflow = optimizer.prepare_grads()
        norms = self._clipped_apart() if parts.num_mtp_layers else {"grad_norm": self._grad_norm()}
        measured = losses | norms
        values = ", ".join(f"{name} {value}" for name, value in measured.items())
        said = f"update {self.num_updates + 1}: {values}{faults}"
        if overflow or not all(map(math.isfinite, measured.values())):
            parts.zero_grad()
            raise FloatingPointError(f"{said}; the weights are unchanged")
        parts.finish_gathers()  # of what no pass has asked for: a tower without images
        # its own step: optimizers such as LayerWiseDistributedOptimizer do more in it than the
        # parts that MegatronOptimizer names (it gathers what each rank has updated)
        stepped, *_ = optimizer.step()
        if not stepped:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() says that it changed nothing, at {said}"
            )
        parts.gather_weights()
        parts.zero_grad()
        if parts.average is not None:
            parts.average.update()
        return norms

    def _grad_norm(self) -> float:
        return float(self.parts.optimizer.get_grad_norm() or 0.0)

    def _clipped_apart(self) -> dict[str, float]:
        """Clips the policy, and the layers for multi-token prediction, each by its own norm.

        Returns these norms. So the policy is clipped as without the layers. The optimizer's own
        step does not clip. Collective.
        """
        norms, clip_norm = {}, self.config.optim.clip_norm
        mtp, others = self.parts.optimizer_shards()
        for name, own, rest in (("grad_norm", others, mtp), ("mtp_grad_norm", mtp, others)):
            with compat.without_gradients(rest):
                norms[name] = self._grad_norm()
            compat.clip_gradients(own, clip_norm, norms[name])
        return norms

    def _totals(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Returns the totals of all micro-batches, on every rank: the last stage sums, the others
        are told.
        """
        groups, device = self.parts.groups, self.topology.device
        totals = reduce_metrics(sums, groups.data, device) if groups.is_last else {}
        last = groups.pipeline.size() - 1
        return broadcast_object(totals, groups.pipeline, last, device) if last > 0 else totals

    # ---- one pass through the pipeline

    def run(
        self, micro_batches: list[Batch], finish: Callable[[Inputs, Tensor], Tensor],
        forward_only: bool, images: BatchImages | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Drives Megatron's schedule; finish(inputs, hidden states) is called on the last stage.

        It returns the loss, or with forward_only what is to be collected. Returns that of every
        micro-batch on the last stage, else [].
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        parts, num = self.parts, len(micro_batches)
        inputs = [looking_ahead(inputs_of(mb, parts.cut), images) for mb in micro_batches]
        scale = parts.loss_scale(num)

        def close(now: Inputs, hidden: Tensor, non_loss_data: bool = False) -> Any:
            if non_loss_data:
                return finish(now, hidden)
            loss = finish(now, hidden)
            if scale is None:  # Megatron neither averages nor divides
                return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}
            return loss * scale, {}

        def forward(batches: Iterator[Inputs], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
            now = next(batches)
            mask = causal_mask(now.token_ids) if now.packed is None else None
            with passing(inputs, now, forward_only), self._replaying(chunk, now, forward_only):
                out = chunk(
                    now.token_ids, self._positions(now, images), mask,
                    decoder_input=embedded(chunk, now, images, parts.cut),
                    packed_seq_params=now.packed,
                )  # fmt: skip
            return out, partial(close, now)

        every = [iter(inputs) for _ in parts.chunks]
        every[0] = PROGRESS.each(inputs, "micro-batches")
        single = len(parts.chunks) == 1
        replayed = nullcontext() if parts.routers is None else parts.routers.running()
        last = parts.raw[-1] if parts.kind == "policy" else None
        with parts.configured(), cut_short(last), replayed:
            return get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=every[0] if single else every,
                model=parts.chunks[0] if single else parts.chunks,
                num_microbatches=num,
                seq_length=inputs[0].token_ids.shape[1],
                micro_batch_size=inputs[0].token_ids.shape[0],
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )

    def _positions(self, inputs: Inputs, images: BatchImages | None) -> Tensor:
        multimodal = self.parts.config.mrope_section
        return rotary_positions(inputs, images) if multimodal else inputs.positions

    def _replaying(
        self, chunk: Any, inputs: Inputs, forward_only: bool
    ) -> AbstractContextManager[None]:
        """Around a forward pass."""
        if self.parts.routers is None or self.without_adapters:
            return nullcontext()
        experts = inputs.routed_experts
        assert experts is not None, "router_replay: a batch without routed_experts"
        return self.parts.routers.forward(chunk, experts, forward_only)

    def policy(
        self, inputs: Inputs, hidden: Tensor, temperature: float, pi_squared: bool = False,
        frozen_head: bool = False, top_k: int = 0, teacher: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """(num_tokens,) logprobs, entropy and sums of squares (0 unless wanted); 0 if masked.

        hidden: (rows, local tokens, hidden_size), as the model returns it. frozen_head: no gradient
        flows into the head. top_k, and teacher, which asks for the batch's teacher_ids where it has
        any: what there is in place of the squares, policy_head.head_results says.
        """
        head, mb = self.parts.head, inputs.batch
        if frozen_head:
            bias = None if head.bias is None else head.bias.detach()
            head = replace(head, weight=head.weight.detach(), bias=bias)
        states = self.chosen_states(inputs, hidden)
        rows = inputs.chosen[inputs.local]
        stats = head_results(
            states.to(head.weight.dtype), head.weight, mb.token_ids[rows], temperature, pi_squared,
            top_k, *asked_ids(mb, rows, teacher), bias=head.bias, softcap=head.softcap,
            group=head.group, first_row=head.first_row,
        )  # fmt: skip
        return tuple(self.everywhere(inputs, found) for found in stats)

    def value(self, inputs: Inputs, values: Tensor) -> tuple[Tensor]:
        """values: (rows, local tokens, 1), as the model with its ValueHead returns them."""
        chosen = values.flatten()[inputs.states].float()
        return (self.everywhere(inputs, chosen),)

    def chosen_states(self, inputs: Inputs, hidden: Tensor) -> Tensor:
        """(m, hidden_size) of inputs.local; each tensor-parallel rank has a use of its own for it,
        so what flows back is summed over them."""
        from megatron.core import tensor_parallel

        groups = self.parts.groups
        if self.parts.cut.tensor > 1:  # over the tokens: Megatron's (tokens, rows, hidden_size)
            whole = tensor_parallel.gather_from_sequence_parallel_region(
                hidden.transpose(0, 1), tensor_parallel_output_grad=True, group=groups.tensor
            )
            return whole.transpose(0, 1).flatten(0, 1)[inputs.states]
        # not transposed: what flows back must be contiguous, or Megatron sums a copy of it
        shared = tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=groups.tensor)
        return shared.flatten(0, 1)[inputs.states]

    def everywhere(self, inputs: Inputs, values: Tensor) -> Tensor:
        """(m,) or (m, k) of inputs.local -> (num_tokens,) or (num_tokens, k) on every
        context-parallel rank.
        """
        rows = inputs.chosen[inputs.local]
        whole = scatter_rows(values, rows, inputs.batch)
        if self.parts.groups.context.size() > 1:
            whole = SumForward.apply(whole, self.parts.groups.context)
        return whole

    def _on_device(self, parts: list[MicroBatch]) -> list[Batch]:
        return [mb.batch.to(self.topology.device) for mb in parts]

    def _micro_batches(self, batch: Batch) -> list[MicroBatch]:
        parts = self.parts
        multiple = 1
        if len(parts.chunks) > 1:
            stages = parts.groups.pipeline.size()
            multiple = parts.config.microbatch_group_size_per_vp_stage or stages
        budget = self.config.micro_batch_tokens * parts.cut.context
        units = pairs_of(batch) if self.in_pairs else None
        padded = parts.cut.form == "padded"
        return cut(batch, budget, self.topology, multiple, padded, units)

    def shared(self, batch: Batch, images: BatchImages | None = None) -> Batch:
        """Returns, on all ranks of this model-parallel group, what its data rank was given, with
        the images of replies; and what the first stage knows of its videos."""
        for group, source in self.parts.groups.sharing:
            batch = broadcast_batch(batch, group, source, self.topology.device)
            if images is not None:
                images.share_replies(batch, group, self.topology.device, source)
        if images is not None:
            images.share_clips(batch, self.parts.groups.pipeline, self.topology.device)
        return batch

    # ---- weights and memory

    def named_shards(self, merged: bool = True) -> dict[str, Shards]:
        return self.parts.named_shards(merged)

    def named_weights(self, dtype: torch.dtype, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        with self.at_hand():
            yield from gathered(self.named_shards(), dtype, bucket_bytes, self.topology)

    def named_average(self, dtype: torch.dtype, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        assert self.parts.average is not None
        with self.at_hand(), self.parts.state.active(), self.parts.average.in_model():
            yield from gathered(self.named_shards(), dtype, bucket_bytes, self.topology)

    def save_adapter(self, folder: Path) -> None:
        assert self.parts.adapters is not None
        named = lora.unscaled_shards(self.parts.raw)
        with self.at_hand():
            save_adapter(self.parts.adapters, named, self.topology, folder)

    def base(self) -> MegatronEngine:
        assert self.parts.adapters is not None
        view = copy.copy(self)
        view.without_adapters = True
        return view

    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        named = self.named_shards(merged=False)
        with self.at_hand():
            require_given(named, fill(named, weights))
            if self.parts.optimizer is not None:  # its float32 weights
                with self.parts.state.active():
                    self.parts.optimizer.reload_model_params()
            if self.parts.average is not None:
                self.parts.average.restart()

    def offload(self, keep_weights: bool = False) -> None:
        with self.parts.state.active():
            self.parts.offload(self.config, keep_weights)

    def onload(self, weights_only: bool = False) -> None:
        with self.parts.state.active():
            self.parts.onload(weights_only)

    @contextmanager
    def at_hand(self, to_save: bool = False) -> Iterator[None]:
        """Meanwhile nothing is offloaded. to_save: but gradients, and what the optimizer keeps."""
        idle = bool(self.parts.away)
        # megatron-core reads the optimizer's state where it is
        is_plain = self.parts.adapters is None and self.parts.average is None
        self.onload(weights_only=to_save and is_plain)
        try:
            yield
        finally:
            if idle:
                self.offload()

    def stage(self) -> Staged:
        from spmdrl.engines.megatron import checkpoint as megatron_checkpoint

        if self.copies is None:  # not pinned: megatron-core's loader takes no note of pinned memory
            self.copies = HostCopies(pinned=False)
        with self.at_hand(to_save=True), self.parts.state.active():
            return megatron_checkpoint.stage(
                self.parts, self.num_updates, self.topology, self.copies
            )

    def save(self, folder: Path) -> None:
        from spmdrl.engines.megatron import checkpoint as megatron_checkpoint

        with self.at_hand(to_save=True), self.parts.state.active():
            whole = megatron_checkpoint.stage(self.parts, self.num_updates, self.topology, None)
            whole.write(folder, self.topology.control)

    def load(self, folder: Path) -> None:
        from spmdrl.engines.megatron import checkpoint as megatron_checkpoint

        with self.at_hand(), self.parts.state.active():
            self.num_updates = megatron_checkpoint.load(self.parts, folder, self.topology)


def causal_mask(token_ids: Tensor) -> Tensor:
    """(1, 1, tokens, tokens) bool, True is hidden."""
    width = token_ids.shape[1]
    return torch.ones(1, 1, width, width, dtype=torch.bool, device=token_ids.device).triu(1)


@contextmanager
def cut_short(last_chunk: Any) -> Iterator[None]:
    """Meanwhile the last stage's model returns hidden states in place of logits."""
    if last_chunk is None or not last_chunk.post_process:
        yield
        return
    layer = last_chunk.output_layer
    before = vars(layer).copy()
    layer.forward = lambda hidden, *args, **kwargs: (hidden, None)
    try:
        yield
    finally:
        del layer.forward
        vars(layer).update(before)
