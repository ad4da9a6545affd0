"""FSDP2: fully sharded weights, gradients and optimizer state around a Hugging Face model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from spmdrl.algo.own_functions import without_faults
from spmdrl.checkpoint.safe_load import ShardReader, load_parts
from spmdrl.config import TrainConfig
from spmdrl.data.images import BatchImages
from spmdrl.data.shared_prefix import Unit
from spmdrl.distributed.progress import PROGRESS
from spmdrl.distributed.topology import Topology
from spmdrl.engines.base import LossFn
from spmdrl.engines.fsdp import ema
from spmdrl.engines.fsdp.inputs import ModelInputs, image_inputs
from spmdrl.engines.fsdp.lora import adapters_off
from spmdrl.engines.fsdp.lora_files import BASE_FILE, check_base, save_adapters
from spmdrl.engines.fsdp.model import TokenPolicy, require_given
from spmdrl.engines.fsdp.optimizers import check_same_optimizer
from spmdrl.engines.fsdp.packed_rows import Packing
from spmdrl.engines.fsdp.prefix_sharing import units_for
from spmdrl.engines.fsdp.recording import record_pass
from spmdrl.engines.fsdp.sharded_loading import require_written_by_fsdp
from spmdrl.engines.fsdp.sharded_model import ShardedModel, build_sharded_model
from spmdrl.engines.fsdp.sharding import (
    all_passes,
    clip_gradients,
    layers_resharded,
    reshard_root,
    set_replica_sync,
)
from spmdrl.engines.fsdp.source_adapters import clip_each, loss_tokens
from spmdrl.engines.fsdp.ulysses import (
    SequenceParallelGroup,
    counted_once,
    share_of,
    shared,
    whole,
)
from spmdrl.engines.host_copies import HostCopies, StagedShards, stage_own, wanted_parts
from spmdrl.engines.lr_schedule import learning_rate
from spmdrl.engines.micro_batches import (
    MicroBatch,
    add_metrics,
    cut,
    pairs_of,
    reduce_metrics,
    token_rows,
)
from spmdrl.engines.policy_head import num_columns, policy_stats, table_of, with_students
from spmdrl.engines.recorded_pass import RecordedPass
from spmdrl.types import Batch, PolicyStats
from spmdrl.weights.buffers import kept_tensors, persistent_buffers
from spmdrl.weights.shards import Shards, fill, shards_by_part
from spmdrl.weights.transfer import gathered

logger = logging.getLogger(__name__)


class FsdpEngine:
    """A policy (`kind` "policy"), critic ("value") or reward model ("reward", whose `values` are of
    what stands before an unmasked token); the TrainEngine Protocol says what it does. A reward
    model that is trained takes its sequences in pairs, which no micro-batch divides.

    The topology has the axes `dp` (replicas) and `fsdp` (ranks that share one copy). With the axis
    `sp` ranks also share the tokens of their micro-batches (ulysses.py): batches of those that are
    given no sequences are empty, and so are their results for tokens. With the axis `ep` ranks also
    share the experts of each layer (experts.py).
    Weights, gradients and what the optimizer keeps are shards, float32 but for 8-bit moments. With
    config.offload_policy these lie on the CPU, where the gradients of micro-batches are summed and
    the optimizer steps; a unit's weights come to the device while it is computed.
    Compute is in config.dtype. A frozen engine has no optimizer and its `update` must not be
    called. strict: the policy's logprobs are bit for bit those of a strict rollout engine with the
    same weights (engines/fsdp/strict.py).
    With config.lora the model's own weights are frozen, in config.dtype; gradients and moments are
    of its adapters, in float32.
    """

    def __init__(
        self, sharded: ShardedModel, config: TrainConfig, topology: Topology, in_pairs: bool = False
    ) -> None:
        """sharded: of build_sharded_model, or a host's. in_pairs: batches have the sequences of a
        pair one after the other, and no micro-batch divides them.
        """
        self.config, self.topology, self.team = config, topology, SequenceParallelGroup.of(topology)
        assert config.ulysses == (1 if self.team is None else self.team.size)
        self.module, self.optimizer = sharded.module, sharded.optimizer
        self.trained, self.average = sharded.trained, sharded.average
        self.adapters, self.routers = sharded.adapters, sharded.routers
        self.aux_loss, self.offloaded = sharded.aux_loss, sharded.offloaded
        self.driven, self.loss_scale = sharded.driven, sharded.loss_scale
        self.gathers_once, self.keeps_gathered = sharded.gathers_once, sharded.keeps_gathered
        self.offloads_gradients = config.offload_policy and topology.copies.size(0) == 1
        self.shares_prefixes = sharded.shares_prefixes
        self.pretrained, self.parts = sharded.pretrained, sharded.parts
        self.params = list(self.trained.values())
        self.tokens = self.adapters.tokens if self.adapters is not None else None
        self.without_adapters = False
        trains_reward = sharded.kind == "reward" and self.optimizer is not None
        self.in_pairs = in_pairs or trains_reward
        self.num_updates = 0
        self.copies: HostCopies | None = None  # of all that is saved, from the first `stage` on

    @classmethod
    def build(
        cls, kind: str, model: str, config: TrainConfig, topology: Topology, frozen: bool = False,
        strict: bool = False, load_weights: bool = True, in_pairs: bool = False,
    ) -> FsdpEngine:  # fmt: skip
        """Returns an engine of a Hugging Face model. in_pairs: as of the constructor; all other
        arguments: as of build_sharded_model.
        """
        sharded = build_sharded_model(kind, model, config, topology, frozen, strict, load_weights)
        return cls(sharded, config, topology, in_pairs)

    # ---- passes without gradient

    @torch.no_grad()
    def logprobs(
        self, batch: Batch, temperature: float, pi_squared: bool = False,
        images: BatchImages | None = None, top_k: int = 0, teacher: bool = False,
    ) -> PolicyStats:  # fmt: skip
        table = self._per_token(
            batch,
            num_columns(pi_squared, top_k, batch, teacher),
            lambda mb: self._policy(mb, images, temperature, pi_squared, top_k, teacher),
        )
        return policy_stats(table, top_k, teacher)

    @torch.no_grad()
    def values(self, batch: Batch, images: BatchImages | None = None) -> Tensor:
        return self._per_token(batch, 1, lambda mb: (self._value(mb, images),))[0]

    def _per_token(
        self, own: Batch, columns: int, forward: Callable[[ModelInputs], tuple[Tensor, ...]]
    ) -> Tensor:
        """(columns, num_tokens) float32 on the CPU."""
        result = torch.zeros(columns, own.num_tokens)
        found: list[tuple[MicroBatch, Tensor]] = []  # on the device until all is computed
        with (
            self.driven(),
            adapters_off(self.module) if self.without_adapters else nullcontext(),
            layers_resharded(self.module) if self.keeps_gathered else nullcontext(),
            all_passes(self.module, self.gathers_once),
        ):
            for mb in PROGRESS.each(self.micro_batches(own), "micro-batches"):
                inputs = self._inputs(mb)
                with self._replaying(inputs):
                    found.append((mb, table_of(forward(inputs), columns)))
        for mb, values in found if own.num_tokens else ():  # on the rank that asked
            rows = token_rows(own, mb.seqs)
            result[:, rows] = values.cpu()[:, : len(rows)]
        reshard_root(self.module)  # it keeps its full weights for a backward pass that never is
        return result

    def record_pass(self, batch: Batch, rows: Tensor, temperature: float) -> RecordedPass:
        return record_pass(self, batch, rows, temperature)

    # ---- training

    def update(
        self, batch: Batch, loss_fn: LossFn, temperature: float, images: BatchImages | None = None
    ) -> dict[str, float]:
        assert self.optimizer is not None, "a frozen engine is not trained"
        group = self.topology.group
        num_tokens = batch.loss_mask.sum(dtype=torch.float64)[None]
        if self.tokens is not None:  # of each adapter
            num_tokens = loss_tokens(batch, self.tokens)
        dist.all_reduce(num_tokens, group=group)
        count = float(num_tokens.sum())
        if count == 0:
            return {}
        parts = self.micro_batches(batch)
        self.optimizer.zero_grad()  # of an update that an exception has ended
        balancing = nullcontext() if self.aux_loss is None else self.aux_loss.over(batch, group)
        with self.driven(), all_passes(self.module, self.gathers_once), balancing:
            sums = self.backward(parts, loss_fn, temperature, images)
        most, norms = self.config.optim.clip_norm, dict[str, float]()
        if self.tokens is None:
            grad_norm = clip_gradients(self.params, most, self.topology)
        else:
            grad_norm, norms = clip_each(self.trained, self.tokens, num_tokens, most, self.topology)
        if self.team is not None:
            sums = counted_once(sums, self.team)
        if self.aux_loss is not None:
            sums |= self.aux_loss.sums()
        totals, faults = without_faults(reduce_metrics(sums, group))
        if not (torch.isfinite(torch.tensor(totals["loss_sum"])) and torch.isfinite(grad_norm)):
            self.optimizer.zero_grad()
            raise FloatingPointError(
                f"update {self.num_updates + 1}: loss {totals['loss_sum']}, gradient norm "
                f"{float(grad_norm)}{faults}; the weights are unchanged"
            )
        lr = self.optimizer.set_lr(learning_rate(self.config.optim, self.num_updates))
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average:
            ema.update(self.average, self.trained, self.config.ema)
        self.num_updates += 1
        if self.tokens is not None:
            self.tokens.count_updates(num_tokens)
        result = norms | {"loss": totals.pop("loss_sum"), "grad_norm": float(grad_norm), "lr": lr}
        if self.aux_loss is not None:
            result |= self.aux_loss.metrics(totals)
        for name, total in totals.items():
            result[name] = total if name.endswith("_max") else total / count
        return result

    def backward(
        self, parts: list[MicroBatch], loss_fn: LossFn, temperature: float,
        images: BatchImages | None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Adds up the gradients of all micro-batches, within `all_passes`. Returns the sums of
        their metrics. Collective."""
        sums: dict[str, Tensor] = {}
        for i, mb in enumerate(PROGRESS.each(parts, "micro-batches")):
            is_last = i == len(parts) - 1
            set_replica_sync(self.module, is_last, self.gathers_once, self.offloads_gradients)
            inputs = self._inputs(mb)
            balancing = nullcontext() if self.aux_loss is None else self.aux_loss.of(mb, inputs)
            with self._replaying(inputs), balancing:
                with self.offloaded:
                    if isinstance(self.module, TokenPolicy):
                        found = self._policy(inputs, images, temperature, teacher=True)
                        logprobs, entropy, _ = found
                        inputs = inputs._replace(batch=with_students(inputs.batch, found))
                    else:
                        logprobs = self._value(inputs, images)
                        entropy = torch.zeros_like(logprobs)
                loss, metrics = loss_fn(logprobs, entropy, inputs.batch)
                loss.backward(torch.full_like(loss, self.loss_scale))
            add_metrics(sums, {"loss_sum": loss.detach(), **metrics})
        return sums

    def _policy(
        self, inputs: ModelInputs, images: BatchImages | None, temperature: float,
        pi_squared: bool = False, top_k: int = 0, teacher: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Returns what TokenPolicy does, of all tokens: (num_tokens,) or (num_tokens, k); 0 masked.

        teacher: with the log-probabilities of the teacher's ids, where the batch has any.
        """
        mb, mine, packing = inputs
        scene = None if images is None else image_inputs(inputs, images, self.team)
        found = self.module(
            mine.token_ids, mine.positions, packing, mine.states, mine.targets,
            temperature, pi_squared, scene, top_k, mine.teacher_ids if teacher else None,
            mine.support_ids,
        )  # fmt: skip
        return tuple(whole(part, mine.rows, mb, self.team) for part in found)

    def _value(self, inputs: ModelInputs, images: BatchImages | None) -> Tensor:
        mb, mine, packing = inputs
        scene = None if images is None else image_inputs(inputs, images, self.team)
        values = self.module(mine.token_ids, mine.positions, packing, mine.states, scene)
        return whole(values, mine.rows, mb, self.team)

    def _replaying(self, inputs: ModelInputs) -> AbstractContextManager[None]:
        """Around a forward pass, and the backward pass that computes parts of it again."""
        if self.tokens is not None and not self.without_adapters:
            return self.tokens.of(inputs.mine.adapters, self.topology.device)
        if self.routers is None or self.without_adapters:
            return nullcontext()
        experts = inputs.mine.routed_experts
        assert experts is not None, "router_replay: a batch without routed_experts"
        return self.routers.replaying(experts)

    def _inputs(self, mb: MicroBatch) -> ModelInputs:
        device = self.topology.device
        mine = share_of(mb.batch, mb.units, self.team, device)
        packing = Packing.build(mine.seq_lens, device, self.team, mine.prefixes)
        return ModelInputs(mb.batch.to(device), mine, packing)

    def micro_batches(self, own: Batch) -> list[MicroBatch]:
        """Cuts this rank's part of a mini-batch. Collective."""
        batch = own if self.team is None else shared(own, self.team, self.topology.device)
        budget = self.config.micro_batch_tokens * self.config.ulysses
        units: list[Unit] | None = None
        if self.in_pairs:
            units = pairs_of(batch, self.shares_prefixes)
        elif self.shares_prefixes:
            units = units_for(batch, budget)
        return cut(batch, budget, self.topology, units=units)

    # ---- weights and memory

    def base(self) -> FsdpEngine:
        assert self.adapters is not None
        view = copy.copy(self)
        view.optimizer, view.without_adapters = None, True
        return view

    def named_shards(self, merged: bool = True) -> dict[str, Shards]:
        return self._shards_of(kept_tensors(self.module), merged)

    def _shards_of(self, parameters: dict[str, Any], merged: bool) -> dict[str, Shards]:
        weights = {n.removeprefix("hf."): p for n, p in parameters.items()}
        if self.adapters is not None:
            found = self.adapters.named_shards(weights, self.parts, merged)
        else:
            found = shards_by_part(weights, self.parts)
        if self.config.dtype == "float32":
            return {name: shards._replace(exact=True) for name, shards in found.items()}
        # of half precision what is computed with: rounded weights, and buffers as they are
        buffers = {n.removeprefix("hf."): b for n, b in persistent_buffers(self.module).items()}
        return found | {
            name: shards._replace(exact=True)
            for name, shards in shards_by_part(buffers, self.parts).items()
        }

    def named_weights(self, dtype: torch.dtype, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        yield from gathered(self.named_shards(), dtype, bucket_bytes, self.topology)

    def named_average(self, dtype: torch.dtype, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        weights = kept_tensors(self.module) | self.average
        shards = self._shards_of(weights, merged=True)
        yield from gathered(shards, dtype, bucket_bytes, self.topology)

    def save_adapter(self, folder: Path) -> None:
        assert self.adapters is not None
        save_adapters(self.adapters, self.module, self.topology, folder)

    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        require_given(self.named_shards(merged=False), fill(self.named_shards(False), weights))
        if self.average:
            ema.restart(self.average, self.trained)

    def offload(self, keep_weights: bool = False) -> None:
        if self.config.offload_params and not keep_weights:
            self.module.to("cpu")
        if self.config.offload_optimizer and self.optimizer is not None:
            self._move_optimizer(torch.device("cpu"))

    def onload(self, weights_only: bool = False) -> None:
        if self.config.offload_params:
            self.module.to(self.topology.device)
        if self.config.offload_optimizer and self.optimizer is not None and not weights_only:
            self._move_optimizer(self.topology.device)

    def _move_optimizer(self, device: torch.device) -> None:
        assert self.optimizer is not None
        self.optimizer.move(device)
        ema.move(self.average, device)

    def stage(self) -> StagedShards:
        if self.copies is None:
            self.copies = HostCopies(pinned=self.topology.device.type == "cuda")
        staged = stage_own(self.state_dict(), self.topology.rank, self.copies)
        staged.notes = self._notes()
        return staged

    def save(self, folder: Path) -> None:
        whole = stage_own(self.state_dict(), self.topology.rank, copies=None)
        whole.notes = self._notes()
        whole.write(folder, self.topology.control)

    def _notes(self) -> dict[str, bytes]:
        """Small files beside the shards: what adapters belong to."""
        if self.adapters is None or self.topology.rank != 0:
            return {}
        return {BASE_FILE: self.adapters.note()}

    def load(self, folder: Path) -> None:
        require_written_by_fsdp(folder)
        check_base(self.adapters, folder, self.topology)
        state = self.state_dict()
        reader = ShardReader(str(folder), wanted_parts(state), self.topology.rank)
        stored = reader.read_metadata().state_dict_metadata
        if self.optimizer is not None:
            check_same_optimizer(folder, stored, self.optimizer)
        difference = ema.without_stored(state, stored)
        if difference and self.topology.rank == 0:
            logger.warning("%s: the moving average %s", folder, difference)
        load_parts(state, reader, self.topology)
        self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Sharded model and optimizer state for torch.distributed.checkpoint.

        Of a model with adapters what is trained, and not the base.
        """
        model: dict[str, Any] = get_model_state_dict(self.module)
        if self.adapters is not None:
            model = {name: tensor for name, tensor in model.items() if name in self.trained}
        state: dict[str, Any] = {"model": model}
        if self.optimizer is not None:
            state["moments"] = self.optimizer.state_dict()
            state["num_updates"] = self.num_updates
            if self.tokens is not None:
                state["adapter_updates"] = dict(self.tokens.num_updates)
        if self.average:
            state["ema"] = dict(self.average)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave, after it was loaded in place."""
        options = StateDictOptions(strict=self.adapters is None)
        set_model_state_dict(self.module, state["model"], options=options)
        if self.optimizer is not None:  # what it keeps was loaded in place, and so was the average
            self.num_updates = state["num_updates"]
            self.optimizer.set_step(self.num_updates)
            if self.tokens is not None:
                self.tokens.resume(state["adapter_updates"], self.trained, self.optimizer)
        if "ema" not in state:
            ema.restart(self.average, self.trained)
