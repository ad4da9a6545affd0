"""vLLM inside the ranks: every rank holds its part of an engine and drives it itself.

There is no server and no second process. We build vLLM's EngineCore (scheduler, KV cache, model
runner) and step it; its front end, which makes several objects per token, is left out.

The program sets these variables before vLLM is imported:
    VLLM_ENABLE_V1_MULTIPROCESSING=0   the engine lives in this process
    VLLM_LOGGING_LEVEL=ERROR  VLLM_NO_USAGE_STATS=1
    VLLM_CPU_OMP_THREADS_BIND=nobind   on a CPU: vLLM must not pin our threads
"""

from __future__ import annotations

import copy
import gc
import logging
import os
import secrets
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.collectives import world_of
from spmdrl.config import ConfigError, LoraConfig, RolloutConfig
from spmdrl.engines.models import load_hf_config
from spmdrl.remote_code import has_foreign_code
from spmdrl.rollout import vllm_cpu, vllm_fp8, vllm_lora, vllm_strict
from spmdrl.rollout.engine import (
    Answer,
    Completion,
    Request,
    SamplingParams,
    WeightMismatch,
    check_lengths,
    generate,
)
from spmdrl.rollout.noise import preserved_rng
from spmdrl.rollout.sampling import eos_token_ids, seed_of_continuation
from spmdrl.rollout.weight_check import compare_weights
from spmdrl.topology import Topology
from spmdrl.weights.layout import Layout, record_layout
from spmdrl.weights.names import is_adapter


class VllmEngine:
    """One engine per tensor-parallel group; what each method promises stands in RolloutEngine."""

    live = 0  # engines in this process: they share vLLM's process groups

    def __init__(
        self, model: str, config: RolloutConfig, max_model_len: int, topology: Topology,
        strict: bool = False, lora: LoraConfig | None = None,
    ) -> None:  # fmt: skip
        """Collective over `topology`, whose axes are dp and tp. strict: see vllm_strict.py.

        lora: the adapter is kept beside the weights; None: it is in them, or there is none.
        Raises ConfigError where tp is not config.tensor_parallel, or the model cannot be strict.
        """
        if topology.axis_size("tp") != config.tensor_parallel:
            raise ConfigError(
                f"rollout.tensor_parallel={config.tensor_parallel}, but the topology has "
                f"tp={topology.axis_size('tp')}"
            )
        self.topology = topology
        self.model_path, self.max_model_len = model, max_model_len
        self.on_cpu = topology.device.type == "cpu"
        self.may_sleep = config.sleep
        self.freed_kv_cache: list[tuple[torch.UntypedStorage, int]] = []
        self.eos_token_ids = eos_token_ids(model)
        self.max_num_seqs, self.policy_version = config.max_num_seqs, 0
        self.num_requests = 0  # so far
        self.answers: dict[int, Answer] = {}  # by id, those that go on
        self.detokenizers: dict[int, Any] = {}  # where stop strings are looked for
        self.tokenizer: Any = None  # loaded when a stop string is first asked for
        group = topology.mesh.get_group("tp")
        patches = vllm_cpu.patched_construction() if self.on_cpu else nullcontext()
        with preserved_process(), patches, world_of(group):
            self.core = build_core(
                model, config, max_model_len, group, topology.device, strict, lora
            )
        if self.on_cpu:
            vllm_cpu.gather_only_sampled(self.runner)
            self.noise = vllm_cpu.AddressedNoise(self.runner)
        self.slots = vllm_lora.AdapterSlots(self.runner, lora) if lora is not None else None
        self.in_fp8 = config.quantization == "fp8"
        self.fp8: set[str] = set()  # Hugging Face names of the weights that are kept in FP8
        if self.in_fp8:
            self.load_quantized()
        if strict:
            vllm_strict.make_strict(self)
        VllmEngine.live += 1

    @property
    def runner(self) -> Any:
        return self.core.model_executor.driver_worker.model_runner

    @property
    def model(self) -> Any:
        return self.runner.get_model()

    # sampling

    @property
    def num_running(self) -> int:
        return len(self.core.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self.answers) - self.num_running

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """At temperature 0 the logprobs are of the model's own distribution (temperature 1)."""
        return generate(self, requests, params)

    def add(self, requests: Sequence[Request], params: SamplingParams) -> list[int]:
        check_lengths(requests, params, self.max_model_len)
        shared = self.vllm_params(params)
        ids = [self.num_requests + i for i in range(len(requests))]
        self.num_requests += len(requests)
        for id, request in zip(ids, requests, strict=True):
            num_begun = len(request.response_ids)
            own = copy.copy(shared)
            own.max_tokens = request.limit(params) - num_begun
            own.min_tokens = max(params.min_tokens - num_begun, 0)
            if self.on_cpu:
                self.noise.seeds[str(id)] = request.seed
            else:
                own.seed = seed_of_continuation(request.seed, num_begun)
            asked = self.engine_request(id, [*request.prompt_ids, *request.response_ids], own)
            self.core.add_request(*self.core.preprocess_add_request(asked))
            self.answers[id] = Answer.begin(request, params)
            if params.stop:
                begun = self.engine_request(id, request.prompt_ids, shared)
                self.detokenizers[id] = self.detokenizer(begun)
                self.detokenizers[id].update(list(request.response_ids), stop_terminated=False)
        return ids

    def engine_request(self, id: int, prompt_ids: list[int], params: Any) -> Any:
        from vllm.v1.engine import EngineCoreRequest

        return EngineCoreRequest(
            request_id=str(id),
            prompt_token_ids=prompt_ids,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,  # read by statistics, which are off
            lora_request=self.slots.request if self.slots is not None else None,
            cache_salt=None,
            data_parallel_rank=None,
        )

    def step(self) -> list[tuple[int, Completion]]:
        """With asynchronous scheduling (GPU) the tokens are those of an earlier pass."""
        ended = self.forward() if self.answers else []
        self.drain()
        return ended

    def forward(self) -> list[tuple[int, Completion]]:
        outputs, model_executed = self.core.step_fn()
        self.core.post_step(model_executed)
        ended = []
        for output in outputs[0].outputs if outputs else ():
            id = int(output.request_id)
            answer = self.answers.get(id)
            if answer is None:  # scheduled once more before it was aborted
                continue
            new = output.new_token_ids
            answer.token_ids += new
            answer.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            answer.versions += [self.policy_version] * len(new)
            if output.finish_reason is not None:
                answer.finish_reason = str(output.finish_reason)
            if id in self.detokenizers and self.detokenizers[id].update(
                new, stop_terminated=answer.finish_reason == "stop"
            ):
                answer.finish_reason = "stop"
                if not output.finished:
                    self.core.abort_requests([output.request_id])
            if answer.finish_reason is not None:
                self.forget(id)
                ended.append((id, answer.completion()))
        return ended

    def abort(self, ids: Sequence[int]) -> list[Completion]:
        self.core.abort_requests([str(id) for id in ids])
        partial = [self.forget(id).completion() for id in ids]
        self.drain()
        return partial

    def forget(self, id: int) -> Answer:
        self.detokenizers.pop(id, None)
        if self.on_cpu:
            del self.noise.seeds[str(id)]
        return self.answers.pop(id)

    def drain(self) -> None:
        """Once there are no requests: a batch may be under way still, and rows to be cleared."""
        while not self.answers and (self.core.scheduler.has_requests() or self.core.batch_queue):
            self.core.step_fn()

    def vllm_params(self, params: SamplingParams) -> Any:
        """Raises ValueError for a temperature that vLLM would replace by another."""
        from vllm import SamplingParams as VllmSamplingParams

        if 0 < params.temperature < 0.01:
            raise ValueError(
                f"temperature={params.temperature} is below 0.01, where vLLM clamps it: use 0 "
                "(greedy) or at least 0.01"
            )
        eos = () if params.ignore_eos else self.eos_token_ids
        return VllmSamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_tokens=params.min_tokens,
            max_tokens=params.max_tokens,
            stop=list(params.stop),
            stop_token_ids=[*params.stop_token_ids, *eos],
            ignore_eos=params.ignore_eos,
            detokenize=bool(params.stop),
            logprobs=0,  # of the sampled token alone
        )

    def detokenizer(self, request: Any) -> Any:
        """vLLM's incremental detokenizer, or None where no stop string is looked for."""
        if not request.sampling_params.stop:
            return None
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        if self.tokenizer is None:
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(self.model_path, trust_remote_code=False)
        return IncrementalDetokenizer.from_new_request(self.tokenizer, request)

    def forget_prefixes(self) -> None:
        """Requests that run are preempted, and prefilled anew with their tokens so far."""
        assert self.core.reset_prefix_cache(reset_running_requests=True)

    # weights

    def layout(self, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
        """Raises ValueError where a parameter would not be given."""
        if self.slots is not None:
            base = {name: shape for name, shape in shapes.items() if not is_adapter(name)}
            adapter = {name: shape for name, shape in shapes.items() if is_adapter(name)}
            with vllm_lora.unwrapped(self.model):
                layout, beside = self.base_layout(base), self.slots.layout(adapter)
            layout.regions += beside.regions
            layout.places += beside.places
            return layout
        return self.base_layout(shapes)

    def base_layout(self, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
        config = self.core.vllm_config.model_config
        if self.is_reloaded:  # quantised anew from full tensors
            return Layout(opaque=list(shapes))
        loaded: set[str] = set()

        def load(weights: Iterable[tuple[str, Tensor]]) -> None:
            loaded.update(self.model.load_weights(iter(weights)))

        def record(shapes: Mapping[str, tuple[int, ...]]) -> Layout:
            return record_layout(self.model, load, shapes, config.dtype)

        layout = vllm_fp8.fp8_layout(record, shapes) if self.in_fp8 else record(shapes)
        self.fp8.update(layout.quantized)
        if not layout.opaque:
            self.require_all(loaded)
        return layout

    @property
    def is_reloaded(self) -> bool:
        """Whether the model is quantised in a way that only vLLM's own reloading understands."""
        return self.core.vllm_config.model_config.quantization is not None and not self.in_fp8

    @torch.no_grad()
    def load_quantized(self) -> None:
        """The model's weights from disk, which are not quantised there."""
        from vllm.config.load import LoadConfig
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

        loader = DefaultModelLoader(LoadConfig(use_tqdm_on_load=False))
        config = self.core.vllm_config.model_config
        on_disk = loader.get_all_weights(config, self.model)
        self.layout({name: tuple(tensor.shape) for name, tensor in on_disk})
        weights = loader.get_all_weights(config, self.model)
        self.load_weights((name, tensor.to(self.topology.device)) for name, tensor in weights)

    def require_all(self, loaded: set[str]) -> None:
        missing = {name for name, _ in self.model.named_parameters()} - loaded
        if missing:
            raise ValueError(f"weights were not given: {sorted(missing)}")

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """In place: each tensor is copied before the next is asked for, so buffers may be reused.

        Quantised engines keep references until a layer is complete: there a tensor must stay valid
        until the call returns. Raises ValueError where a parameter was not given.
        """
        if self.is_reloaded:
            self.load_opaque(weights)
        elif self.slots is not None:
            adapter: dict[str, Tensor] = {}
            with vllm_lora.unwrapped(self.model):
                base = vllm_lora.split_off(iter(weights), adapter)
                self.require_all(self.model.load_weights(base))
            self.slots.load(adapter)
        else:
            weights = vllm_fp8.quantized(weights, self.fp8)
            self.require_all(self.model.load_weights(weights))
        self.finish_load()

    @torch.no_grad()
    def load_opaque(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if self.is_reloaded:
            self.core.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        else:
            with vllm_lora.unwrapped(self.model) if self.slots is not None else nullcontext():
                self.model.load_weights(iter(weights))

    @torch.no_grad()
    def finish_load(self) -> None:
        if self.on_cpu:
            vllm_cpu.repack_experts(self.model)
        self.forget_prefixes()
        self.core.reset_encoder_cache()

    def check_weights(self, weights: Iterator[tuple[str, Tensor]]) -> int:
        """Compares bit by bit, which proves more than checksums would: both sides are here.

        An FP8 engine is compared with what its weights give when they are quantised whole.
        """
        if self.is_reloaded:
            raise WeightMismatch(
                "a quantised engine's weights cannot be compared with the trainer's"
            )
        if self.on_cpu:
            vllm_cpu.check_experts(self.model)
        rank, size = self.topology.axis_rank("tp"), self.topology.axis_size("tp")
        if self.slots is not None:
            adapter: dict[str, Tensor] = {}
            base = vllm_lora.split_off(weights, adapter)
            with vllm_lora.unwrapped(self.model):
                count = compare_weights(self.model, base, rank, size)
            return count + self.slots.check(adapter)
        return compare_weights(self.model, vllm_fp8.quantized(weights, self.fp8), rank, size)

    # memory

    def sleep(self) -> None:
        """On a GPU: weights and KV cache are dropped (level 2), since a sync of weights follows
        `wake` anyway; of adapters alone it does not bring the weights, so these go to the host's
        memory (level 1). On a CPU: the KV cache is freed, weights stay."""
        if not self.may_sleep or self.freed_kv_cache:
            return
        self.forget_prefixes()
        if self.on_cpu:
            self.freed_kv_cache = vllm_cpu.free_kv_cache(self.runner.kv_caches)
        else:
            self.core.sleep(level=2 if self.slots is None else 1)

    def wake(self) -> None:
        if not self.may_sleep:
            return
        if self.on_cpu:
            vllm_cpu.restore_kv_cache(self.runner.kv_caches, self.freed_kv_cache)
            self.freed_kv_cache = []
        else:
            self.core.wake_up()

    def shutdown(self) -> None:
        """Ends the engine. EngineCore.shutdown would destroy the caller's process groups too."""
        self.core.structured_output_manager.clear_backend()
        self.core.model_executor.shutdown()
        self.core.scheduler.shutdown()
        del self.core
        gc.collect()
        VllmEngine.live -= 1
        if VllmEngine.live == 0:
            destroy_vllm_groups()


def build_core(
    model: str,
    config: RolloutConfig,
    max_model_len: int,
    group: dist.ProcessGroup,
    device: torch.device,
    strict: bool = False,
    lora: LoraConfig | None = None,
) -> Any:
    """vLLM's engine for this rank of its tensor-parallel group. Collective over it."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore

    on_cpu = device.type == "cpu"
    args = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        # whoever was not to run code of the model's folder has been refused it before
        trust_remote_code=has_foreign_code(load_hf_config(model)),
        dtype=config.dtype,
        seed=0,
        tensor_parallel_size=config.tensor_parallel,
        distributed_executor_backend="external_launcher",
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        # vLLM's 128 on a CPU is more than many a prompt, and only whole blocks are shared
        block_size=32 if on_cpu else None,
        enforce_eager=on_cpu or config.enforce_eager or strict,
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_memory_bytes=config.kv_cache_mib << 20 if on_cpu else None,
        enable_sleep_mode=config.sleep and not on_cpu,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        use_tqdm_on_load=False,
        moe_backend=moe_backend(model, on_cpu),
        **(vllm_fp8.ENGINE_ARGS if config.quantization == "fp8" else {}),
        **(vllm_lora.engine_args(lora, model) if lora is not None else {}),
    )
    if config.quantization == "fp8" and not on_cpu:
        disabled = os.environ.get("VLLM_DISABLED_KERNELS", "").split(",")
        os.environ["VLLM_DISABLED_KERNELS"] = ",".join([*disabled, *vllm_fp8.REARRANGING])
    if strict and not on_cpu:  # the other runner's sampler is no object of ours to change
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    register_architecture(model)
    vllm_config = args.create_engine_config()
    if vllm_config.model_config.use_mla:
        raise ConfigError(
            f"rollout.engine='vllm': {model} has multi-head latent attention, for which vLLM "
            "computes from products of weights that an update does not renew; use "
            "rollout.engine='hf'"
        )
    gc.freeze()  # vLLM collects garbage five times: not in the half million objects imported so far
    return EngineCore(vllm_config, executor_of(group, device), log_stats=False)


def moe_backend(model: str, on_cpu: bool) -> Any:
    """On a GPU, Triton's kernel for experts that are not quantised: the others keep the weights in
    an order of their own (FlashInfer swaps gate and up), which an update in place would miss."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(model, trust_remote_code=False)
    text = config.get_text_config()
    has_experts = any(
        getattr(text, name, None) for name in ("num_experts", "num_local_experts",
                                               "n_routed_experts")
    )  # fmt: skip
    quantized = getattr(config, "quantization_config", None) is not None
    return "triton" if has_experts and not quantized and not on_cpu else "auto"


def executor_of(group: dist.ProcessGroup, device: torch.device) -> type:
    """vLLM's executor for ranks that a launcher started, told its rank instead of reading RANK.

    The name of the rendezvous, which vLLM never opens since torch.distributed is up, also names
    shared memory on a CPU: random, so that two engines on one host, be they of one job or of two,
    do not write into each other's.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    name = [secrets.token_hex(8)]
    dist.broadcast_object_list(name, group=group, group_src=0)

    class RankExecutor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            return f"spmdrl:{name[0]}", dist.get_rank(group), device.index or 0

    return RankExecutor


def register_architecture(model: str) -> None:
    """Imports the model's class here; vLLM would inspect it in a process of its own (7-18 s)."""
    from transformers import AutoConfig
    from vllm.model_executor.models import ModelRegistry

    for name in AutoConfig.from_pretrained(model, trust_remote_code=False).architectures or []:
        entry = ModelRegistry.models.get(name)
        if entry is not None:
            ModelRegistry.register_model(name, entry.load_model_cls())


def destroy_vllm_groups() -> None:
    """vLLM's own process groups, made beside the caller's."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
    parallel_state._NODE_COUNT = None


@contextmanager
def preserved_process() -> Iterator[None]:
    """What importing vLLM and building an engine changes for the whole process is taken back.

    Meanwhile no garbage is collected, which is a third of the time otherwise. vLLM's logger stays
    off: an error reaches us as an exception, which it would precede with a dump of every request.
    """
    environment = dict(os.environ)
    precision = torch.get_float32_matmul_precision()
    num_threads = torch.get_num_threads()
    collecting = gc.isenabled()
    gc.disable()
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    try:
        with preserved_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.getLogger("vllm").setLevel(logging.CRITICAL)  # vLLM has configured it meanwhile
        gc.unfreeze()
        if collecting:
            gc.enable()
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(num_threads)
        os.environ.clear()
        os.environ.update(environment)
