"""The parts that a MegatronEngine works with: model chunks, optimizer, groups; built here or a
host's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from spmdrl.config import OptimConfig, TrainConfig, checkpointing_of
from spmdrl.data.processor_files import ProcessorFiles
from spmdrl.distributed.topology import Topology
from spmdrl.engines.fsdp.classifier import classifier_config, is_classifier
from spmdrl.engines.fsdp.lora import Adapters
from spmdrl.engines.megatron import compat, lora
from spmdrl.engines.megatron.ema import Average
from spmdrl.engines.megatron.hf_mapping import load_pretrained, pieces
from spmdrl.engines.megatron.inputs import SequenceSplit
from spmdrl.engines.megatron.layout import (
    OPTIONS,
    Degrees,
    check_layout,
    moe_layers,
    softcap,
)
from spmdrl.engines.megatron.model import build_chunks, transformer_config
from spmdrl.engines.megatron.mtp import TokenEmbeddings
from spmdrl.engines.megatron.muon import use_muon
from spmdrl.engines.megatron.optimizer import build_optimizer, move_optimizer
from spmdrl.engines.megatron.overlap import OverlappedChunk
from spmdrl.engines.megatron.parallel_state import RoleState
from spmdrl.engines.megatron.router_replay import ReplayedRouters
from spmdrl.engines.megatron.towers import has_trained_tower, language_part
from spmdrl.engines.megatron.vision import add_tower
from spmdrl.engines.stored_dtype import DTYPES, as_stored, stored_dtype
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.hub.mtp_layers import num_mtp_layers
from spmdrl.weights.boxes import Box
from spmdrl.weights.shards import Shards


@dataclass(frozen=True)
class Groups:
    """This rank's process groups of one role."""

    tensor: dist.ProcessGroup
    context: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    data: dist.ProcessGroup  # without the context-parallel ranks
    is_last: bool  # in the last pipeline stage
    sharing: tuple[tuple[dist.ProcessGroup, int], ...]  # the ways of a batch: (group, its source)

    @classmethod
    def of_parallel_state(cls) -> Groups:
        """Returns the groups that parallel_state has. Collective over each model-parallel group."""
        from megatron.core import parallel_state as ps

        pipeline, context = ps.get_pipeline_model_parallel_group(), ps.get_context_parallel_group()
        tensor, model = ps.get_tensor_model_parallel_group(), ps.get_model_parallel_group()
        is_last = pipeline.rank() == pipeline.size() - 1
        gives = is_last and tensor.rank() == 0
        everyone: list[Any] = [None] * model.size()
        dist.all_gather_object(everyone, gives, group=model)
        sharing = []
        if context.size() > 1 and gives:
            sharing.append((context, 0))
        if model.size() > 1:
            sharing.append((model, everyone.index(True)))
        data = ps.get_data_parallel_group()
        return cls(tensor, context, pipeline, data, is_last, tuple(sharing))


@dataclass(frozen=True)
class Head:
    """The output layer's rows that this rank has, padding left out."""

    weight: Tensor  # (rows, hidden_size), with gradient
    bias: Tensor | None
    group: dist.ProcessGroup | None  # None: the rows are all there are
    first_row: int
    softcap: float | None  # logits are softcap * tanh(logits / softcap); None: they are not


@dataclass
class Parts:
    """A model and its optimizer on this rank. Megatron is only called while `state` is active."""

    kind: str  # "policy" | "value" | "reward"
    chunks: list[Any]  # as they are driven: in Megatron's DistributedDataParallel if trained
    optimizer: Any  # a MegatronOptimizer; None if frozen
    state: RoleState
    groups: Groups
    cut: SequenceSplit
    hf_config: PreTrainedConfig
    pretrained: list[Any]
    dp_size: int  # with the context-parallel ranks
    owned: bool = True  # built here, so that learning rates are ours to set
    adapters: Adapters | None = None
    average: Average | None = None  # of what is trained, where config.ema is set
    away: set[str] = field(default_factory=set)  # what is offloaded: weights, gradients, optimizer
    optim: OptimConfig | None = None  # what the optimizer was built with, if it was built here
    dropout: list[tuple[Any, str, float]] = field(default_factory=list)  # module, attribute, value
    routers: ReplayedRouters | None = None  # whose experts are replayed
    mtp_embeddings: TokenEmbeddings | None = None  # where layers for multi-token prediction learn
    num_mtp_layers: int = 0  # of these
    overlapped: Sequence[OverlappedChunk] = ()  # the chunks, where communication is overlapped

    @property
    def raw(self) -> list[Any]:
        """The GPTModels inside."""
        from megatron.core.utils import unwrap_model

        return unwrap_model(self.chunks)

    @property
    def config(self) -> Any:
        return self.raw[0].config

    @property
    def head(self) -> Head:
        model, tensor = self.raw[-1], self.groups.tensor
        weight = model.output_layer.weight
        if model.share_embeddings_and_output_weights:
            weight = model.shared_embedding_or_output_weight()
        first = tensor.rank() * len(weight)
        real = min(max(self.hf_config.get_text_config().vocab_size - first, 0), len(weight))
        bias = getattr(model.output_layer, "bias", None)
        return Head(
            cut_to(weight, real), None if bias is None else cut_to(bias, real),
            tensor if tensor.size() > 1 else None, first,
            softcap(self.hf_config.get_text_config(), "final_logit_softcapping"),
        )  # fmt: skip

    def loss_scale(self, num_micro_batches: int) -> float | None:
        """Returns what a loss is multiplied by so that gradients are its sum over all ranks.

        Without calculate_per_token_loss Megatron's schedule divides by the micro-batches and
        multiplies by the context-parallel ranks, and its DistributedDataParallel divides by the
        data- and context-parallel ones. With it neither does, and None is returned.
        """
        if self.config.calculate_per_token_loss:
            return None
        return num_micro_batches * self.dp_size / self.groups.context.size()

    @contextmanager
    def configured(self) -> Iterator[None]:
        """A config as our passes need it: what a host has not set, and lengths that vary."""
        from megatron.core.distributed import finalize_model_grads

        config = self.config
        wanted: dict[str, Any] = {
            "variable_seq_lengths": self.groups.pipeline.size() > 1,
            "param_sync_func": None,  # weights are gathered at once, see gather_weights
        }
        if config.num_moe_experts:  # balance is pretraining's aim; only the reward's counts here
            aux = config.moe_aux_loss_coeff
            wanted |= {
                "moe_aux_loss_coeff": [0.0] * len(aux) if isinstance(aux, list) else 0.0,
                "moe_z_loss_coeff": None, "moe_router_bias_update_rate": 0.0,
                "moe_input_jitter_eps": None,
            }  # fmt: skip
        if config.finalize_model_grads_func is None:
            wanted["finalize_model_grads_func"] = finalize_model_grads
        if self.overlapped:
            wanted["finalize_model_grads_func"] = self.finalize_overlapped
            starts = [chunk.start_rest for chunk in self.overlapped]
            wanted["grad_sync_func"] = starts if len(starts) > 1 else starts[0]
        if config.no_sync_func is None and hasattr(self.chunks[0], "no_sync"):
            no_sync = [chunk.no_sync for chunk in self.chunks]
            wanted["no_sync_func"] = no_sync if len(no_sync) > 1 else no_sync[0]
        before = {name: getattr(config, name) for name in wanted}
        vars(config).update(wanted)
        for module, name, _ in self.dropout:
            setattr(module, name, 0.0)
        # a rank that raised amid the schedule would leave the others waiting; _step checks for all
        checks = [
            (chunk.ddp_config, name, getattr(chunk.ddp_config, name))
            for chunk in self.chunks
            if hasattr(chunk, "ddp_config")
            for name in ("check_for_nan_in_grad", "check_for_large_grads")
        ]
        for settings, name, _ in checks:
            setattr(settings, name, False)
        try:
            yield
        finally:
            for settings, name, value in checks:
                setattr(settings, name, value)
            vars(config).update(before)
            for module, name, value in self.dropout:
                setattr(module, name, value)

    def finalize_overlapped(self, *args: Any, **kwargs: Any) -> None:
        """megatron-core's finalize_model_grads, behind sums that are under way."""
        from megatron.core.distributed import finalize_model_grads

        for chunk in self.overlapped:
            chunk.start_rest()
        finalize_model_grads(*args, **kwargs)

    @contextmanager
    def driven_by_us(self) -> Iterator[None]:
        """A host that gathers updated weights when it next needs them has them gathered at once."""
        lazy = [c for c in self.chunks if c.ddp_config.overlap_param_gather]
        hooked = [c for c in lazy if c.remove_forward_pre_hook_handles]
        for chunk in hooked:
            chunk.disable_forward_pre_hook(param_sync=True)
        try:
            yield
        finally:
            for chunk in hooked:
                chunk.enable_forward_pre_hook()

    def gather_weights(self) -> None:
        """After an optimizer step that leaves it to the next forward pass. Of a model that was
        built here the gathers start, and go on beside that pass.
        """
        for overlapped in self.overlapped:
            if overlapped.gathers:
                overlapped.start_gathers()
        for chunk in [] if self.owned else self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def finish_gathers(self) -> None:
        """Before weights are read or written outside of a forward pass. Local."""
        for chunk in self.overlapped:
            chunk.finish_gathers()

    def optimizer_shards(self) -> tuple[list[Any], list[Any]]:
        """Returns the float32 shards that the optimizer has on this rank: of the layers for
        multi-token prediction, and of all others.
        """
        blocks = [chunk.mtp for chunk in self.raw if getattr(chunk, "mtp", None) is not None]
        ahead = {id(parameter) for block in blocks for parameter in block.parameters()}
        mtp: list[Any] = []
        others: list[Any] = []
        for part in compat.optimizer_parts(self.optimizer):
            for parameter, shard, _ in compat.own_shards(part):
                (mtp if id(parameter) in ahead else others).append(shard)
        return mtp, others

    def start_update(self) -> None:
        """Before an update's passes. Collective over the first and the last stage where there are
        layers for multi-token prediction.
        """
        self.zero_grad()
        if self.mtp_embeddings is not None:
            self.finish_gathers()
            self.mtp_embeddings.refresh()

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        for overlapped in self.overlapped:
            overlapped.restart()
        self.optimizer.zero_grad()

    # ---- weights and memory

    def named_shards(self, merged: bool = True) -> dict[str, Shards]:
        """Returns the shards as TrainEngine says."""
        with self.state.active():
            base = self.base_shards()
            return base if self.adapters is None else lora.with_adapters(base, self.raw, merged)

    def base_shards(self) -> dict[str, Shards]:
        """Returns the shards of the weights without adapters."""
        shapes: dict[str, tuple[int, ...]] = {}
        boxes: dict[str, list[Box]] = {}
        views: dict[str, list[Callable[[], Tensor]]] = {}
        exact: set[str] = set()
        for chunk in self.raw:
            for _, parameter, held in pieces(chunk, self.hf_config):
                for piece in (p for p in held if not p.tied):
                    shapes[piece.name] = piece.shape
                    if parameter.dtype == torch.float32:  # computed with as it is
                        exact.add(piece.name)
                    boxes.setdefault(piece.name, []).append(piece.box)
                    views.setdefault(piece.name, []).append(
                        lambda p=parameter, view=piece.view: view(p)  # type: ignore[misc]
                    )
        return {
            name: Shards(
                shape,
                tuple(boxes[name]),
                lambda look=views[name]: [view() for view in look],  # type: ignore[misc]
                exact=name in exact,
            )
            for name, shape in shapes.items()
        }

    def offload(self, config: TrainConfig, keep_weights: bool = False) -> None:
        """Idle roles keep no gradients, and what config says leaves for the CPU."""
        self.finish_gathers()
        leaving = {"weights"} if config.offload_params and not keep_weights else set()
        if self.optimizer is not None and (config.offload_params or config.offload_optimizer):
            leaving |= {"gradients"}
        if self.optimizer is not None and config.offload_optimizer:
            leaving |= {"optimizer"}
        leaving -= self.away
        self.move_buffers(leaving, "offload_to_cpu", torch.device("cpu"))
        if "optimizer" in leaving:
            self.move_optimizer(torch.device("cpu"))
        self.away |= leaving

    def onload(self, weights_only: bool = False) -> None:
        self.finish_gathers()
        back = self.away & {"weights"} if weights_only else set(self.away)
        self.move_buffers(back, "reload_from_cpu", _device())
        if "optimizer" in back:
            self.move_optimizer(_device())
        self.away -= back

    def move_optimizer(self, device: torch.device) -> None:
        move_optimizer(self.optimizer, device)
        if self.average is not None:
            self.average.move(device)

    def move_buffers(self, what: set[str], how: str, to: torch.device) -> None:
        """Weights and gradients; of a frozen model, which has no buffers, the module itself, and
        beside adapters what is frozen."""
        weights, gradients = "weights" in what, "gradients" in what
        for chunk in self.chunks:
            if self.optimizer is None and weights:
                chunk.to(to)
            elif weights:
                for frozen in (p for p in chunk.parameters() if not p.requires_grad):
                    frozen.data = frozen.data.to(to)
            if self.optimizer is None or not (weights or gradients):
                continue
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                getattr(buffer, how)(move_params=weights, move_grads=gradients)


def cut_to(rows: Tensor, count: int) -> Tensor:
    """The first rows; no slice where these are all, whose gradient would be a second copy."""
    return rows if count == len(rows) else rows[:count]


def _device() -> torch.device:
    on_gpu = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def degrees_of(config: TrainConfig) -> Degrees:
    return Degrees(**{name: getattr(config, option) for name, option in OPTIONS.items()})


def parallel_sizes(degrees: Degrees) -> dict[str, int | None]:
    """Returns the arguments of parallel_state.initialize_model_parallel."""
    return {
        "tensor_model_parallel_size": degrees.tensor,
        "pipeline_model_parallel_size": degrees.pipeline,
        "virtual_pipeline_model_parallel_size": degrees.virtual if degrees.virtual > 1 else None,
        "context_parallel_size": degrees.context,
        "expert_model_parallel_size": degrees.expert,
        "expert_tensor_parallel_size": degrees.expert_tensor,
    }


def build_parts(
    kind: str, model: str, config: TrainConfig, topology: Topology, frozen: bool,
    load_weights: bool = True,
) -> Parts:  # fmt: skip
    """Loads a Hugging Face model into the shards of this rank. Collective over the topology.

    load_weights: without it they are 0, to be loaded from a checkpoint.

    Raises ConfigError where the model or the layout cannot be had.
    """
    hf_config = classifier_config(model) if kind == "reward" else load_hf_config(model)
    seeing, hf_config = hf_config, language_part(hf_config)
    degrees = degrees_of(config)
    check_layout(hf_config, degrees, topology.world)
    state = RoleState.build(topology, **parallel_sizes(degrees))
    recompute = not frozen and checkpointing_of(config, topology.device.type == "cuda")
    replays = kind == "policy" and not frozen and config.router_replay is not None
    trains_mtp = kind == "policy" and not frozen and config.mtp_loss_scaling_factor > 0
    num_mtp = num_mtp_layers(hf_config) if trains_mtp else 0
    with state.active():
        mega = transformer_config(
            hf_config, degrees, DTYPES[config.dtype],
            recompute=recompute, moe_grouped_gemm=config.moe_grouped_gemm,
            **({"moe_enable_routing_replay": True} if replays else {}),
        )  # fmt: skip
        chunks = build_chunks(hf_config, mega, kind, num_mtp)  # type: ignore[arg-type]
        add_tower(chunks[0], seeing, recompute, config.freeze_vision)
        ahead = TokenEmbeddings(chunks, hf_config) if num_mtp else None
        if chunks[0].pre_process:
            freeze_padding(chunks[0].embedding.word_embeddings, hf_config)
        if load_weights:
            new_head = kind == "value" or not is_classifier(load_hf_config(model))
            load_pretrained(chunks, Path(model), hf_config, new_head)
        optimizer, adapters, average = None, None, None
        overlapped: list[OverlappedChunk] = []
        dp_size = topology.world // (degrees.tensor * degrees.pipeline)
        if config.lora is not None and not frozen:
            adapters = lora.add_adapters(
                chunks, model, seeing, config, topology, load_weights, kind
            )
        if frozen:
            for chunk in chunks:
                chunk.requires_grad_(False)
        else:
            reduces = config.overlap_grad_reduce and dp_size > 1  # else there is nothing to do
            gathers = config.overlap_param_gather and dp_size > 1
            chunks = [
                trained(chunk, mega, i == 0, reduces, gathers, config.ddp_bucket_size)
                for i, chunk in enumerate(chunks)
            ]
            overlapped = [OverlappedChunk(chunk) for chunk in chunks] if reduces else []
            optimizer = build_optimizer(chunks, mega, config.optim, clips=not num_mtp)
            if config.optim.name == "muon":
                use_muon(optimizer, chunks, hf_config, config.optim, DTYPES[config.dtype])
            average = Average.start(optimizer, chunks, config.ema) if config.ema else None
        groups = Groups.of_parallel_state()
    cut = SequenceSplit(
        "packed", degrees.context, groups.context.rank(),
        degrees.tensor if degrees.sequence else 1,
        groups.tensor.rank() if degrees.sequence else 0,
    )  # fmt: skip
    routers = ReplayedRouters(chunks, moe_layers(hf_config), recompute is True) if replays else None
    saved = as_stored(seeing, stored_dtype(load_hf_config(model), model))
    beside: list[Any] = [*generation_config(model)] if kind != "reward" else []
    beside += [ProcessorFiles(model)] if has_trained_tower(seeing) else []
    return Parts(
        kind, chunks, optimizer, state, groups, cut, hf_config,
        [saved, *beside], dp_size, adapters=adapters, average=average,
        optim=None if frozen else config.optim, routers=routers, mtp_embeddings=ahead,
        num_mtp_layers=num_mtp, overlapped=overlapped,
    )  # fmt: skip


def freeze_padding(embedding: Any, hf_config: PreTrainedConfig) -> None:
    """Makes looking up the padding token move nothing, as in Hugging Face's models.

    Its row is often 0, where the gradient of the first norm is a thousand times any other.
    """
    padding = getattr(hf_config.get_text_config(), "pad_token_id", None)
    if padding is None:
        return

    def keep(layer: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        is_padding = args[0] == padding  # (rows, tokens)
        if layer.reduce_scatter_embeddings:  # (tokens / ranks, rows, hidden_size)
            group = layer.tp_group
            is_padding = is_padding.T.chunk(group.size())[group.rank()]
        return torch.where(is_padding[..., None], out.detach(), out)

    embedding.register_forward_hook(keep)


def trained(
    chunk: Any, mega: Any, first: bool, reduces: bool = False, gathers: bool = False,
    bucket_size: int | None = None,
) -> Any:  # fmt: skip
    """A chunk in Megatron's DistributedDataParallel. first: of this rank, whose buckets alone can
    be overlapped with its backward pass. reduces, gathers: beside computation.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=reduces,
        overlap_param_gather=gathers, bucket_size=bucket_size,
    )  # fmt: skip
    return DistributedDataParallel(mega, settings, chunk, disable_bucketing=not first)


def generation_config(model: str) -> list[GenerationConfig]:
    try:
        return [GenerationConfig.from_pretrained(model)]
    except OSError:  # a model need not have one
        return []
