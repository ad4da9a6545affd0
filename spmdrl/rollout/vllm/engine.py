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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spmdrl.config import LoraConfig, RolloutConfig, require
from spmdrl.data.image_limits import ImageLimits
from spmdrl.distributed.collectives import world_of
from spmdrl.distributed.topology import Topology
from spmdrl.engines.fsdp.router_replay import routing_of
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.hub.model_files import eos_token_ids
from spmdrl.rollout.base import (
    WAKE_TAGS,
    Answer,
    Completion,
    Request,
    SamplingParams,
    WeightMismatch,
    check_lengths,
    generate,
    require_tensor_parallel,
)
from spmdrl.rollout.kv_storage import free_kv_cache, move_back, move_to_host, restore_kv_cache
from spmdrl.rollout.process_state import frozen_as_before, preserved_process
from spmdrl.rollout.seeds import seed_of_continuation
from spmdrl.rollout.vllm import compat
from spmdrl.rollout.vllm import cpu as vllm_cpu
from spmdrl.rollout.vllm import derived_weights as vllm_derived
from spmdrl.rollout.vllm import fp8 as vllm_fp8
from spmdrl.rollout.vllm import images as vllm_vision
from spmdrl.rollout.vllm import lora as vllm_lora
from spmdrl.rollout.vllm import speculative as vllm_speculative
from spmdrl.rollout.vllm import strict as vllm_strict
from spmdrl.rollout.vllm.core import LEAST_TEMPERATURE, build_core, import_vllm
from spmdrl.rollout.vllm.plain_tensors import PlainTensors
from spmdrl.rollout.weight_check import compare_weights, given_parameters
from spmdrl.weights.checkpoint_names import as_published, is_adapter
from spmdrl.weights.engine_layout import Layout, record_layout


class VllmEngine:
    """One engine per tensor-parallel group; what each method promises stands in RolloutEngine."""

    live = 0  # engines in this process: they share vLLM's process groups

    def __init__(
        self, model: str, config: RolloutConfig, max_model_len: int, topology: Topology,
        strict: bool = False, lora: LoraConfig | None = None, looks: ImageLimits | None = None,
        load_weights: bool = True, return_routed_experts: bool = False, frozen: bool = False,
    ) -> None:  # fmt: skip
        """Collective over `topology`, whose axes are dp and tp. strict: see strict.py.

        lora: the adapter is kept beside the weights; None: it is in them, or there is none. looks:
        which images prompts have, where the model sees any. return_routed_experts: answers have
        them. frozen: no push follows a sleep, so that the weights go to the host and come back.
        Raises ConfigError where tp is not config.tensor_parallel, or the model cannot be strict.
        """
        require_tensor_parallel(config, topology)
        self.topology, self.looks, self.has_weights = topology, looks, load_weights
        self.model_path, self.max_model_len = model, max_model_len
        self.kind: str = load_hf_config(model).model_type
        self.on_cpu = topology.device.type == "cpu"
        self.may_sleep = config.sleep
        self.freed_kv_cache: list[tuple[torch.UntypedStorage, int]] = []
        self.is_frozen = frozen
        self.returns_supports = config.keep_sampling_mask and not self.on_cpu
        self.on_host: list[tuple[torch.UntypedStorage, Tensor]] = []  # weights, while it sleeps
        self.plain = PlainTensors()  # of the model, while it sleeps
        self.eos_token_ids = eos_token_ids(model)
        self.max_num_seqs, self.policy_version = config.max_num_seqs, 0
        self.num_requests = 0  # so far
        self.answers: dict[int, Answer] = {}  # by id, those that go on
        self.detokenizers: dict[int, Any] = {}  # where stop strings are looked for
        self.tokenizer: Any = None  # loaded when a stop string is first asked for
        self.in_fp8 = config.quantization == "fp8"
        self.fp8: set[str] = set()  # Hugging Face names of the weights that are kept in FP8
        group = topology.mesh.get_group("tp")
        patches = vllm_cpu.patched_construction() if self.on_cpu else nullcontext()
        VllmEngine.live += 1
        with ExitStack() as undo:
            undo.callback(self.leave_groups)  # should vLLM or a check of ours refuse
            with preserved_process("vllm"):
                import_vllm()
                vllm_speculative.keep_off_openmp(config)  # numba is imported before the patches
                with patches, world_of(group):
                    self.core = build_core(
                        model, config, max_model_len, group, topology.device, strict, lora, looks,
                        load_weights, return_routed_experts, frozen,
                    )  # fmt: skip
            self.expert_layers = self.find_expert_layers() if return_routed_experts else []
            self.has_derived = vllm_derived.mark_derived(self.model)
            if self.on_cpu:
                vllm_cpu.gather_only_sampled(self.runner)
                self.noise = vllm_cpu.AddressedNoise(self.runner)
                if config.speculative:
                    vllm_speculative.accept_what_is_drawn(self.runner, self.noise)
            if "model" in config.speculative and not load_weights:
                compat.read_draft_model(self.core)
            self.slots = vllm_lora.AdapterSlots(self.runner, lora) if lora is not None else None
            if self.in_fp8 and load_weights:
                self.load_quantized()
            if strict:
                vllm_strict.make_strict(self)
            undo.pop_all()

    @property
    def runner(self) -> Any:
        return compat.model_runner(self.core)

    @property
    def model(self) -> Any:
        return self.runner.get_model()

    @property
    def dtype(self) -> torch.dtype:
        return self.core.vllm_config.model_config.dtype

    def find_expert_layers(self) -> list[int]:
        """Raises ConfigError where the trainer's model has experts in other layers."""
        routing = routing_of(load_hf_config(self.model_path))
        layers = compat.expert_layers(self.model)
        require(
            len(layers) == routing.num_layers,
            f"actor.router_replay: vLLM has experts in {len(layers)} layers of {self.model_path}, "
            f"transformers in {routing.num_layers}",
        )
        return layers

    # sampling

    @property
    def num_running(self) -> int:
        return compat.num_running(self.core)

    @property
    def num_waiting(self) -> int:
        return len(self.answers) - self.num_running

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """Answers the requests; at temperature 0 the logprobs are of the model's own distribution
        (temperature 1).
        """
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
            own.routed_experts_prompt_start = request.num_routed
            if self.on_cpu:
                self.noise.seeds[str(id)] = request.seed
                if params.support_width:
                    self.noise.supports[str(id)] = np.full(params.support_width, -1, np.int32)
            else:
                own.seed = seed_of_continuation(request.seed, num_begun)
            tokens = [*request.prompt_ids, *request.response_ids]
            asked = self.engine_request(id, tokens, own, request.adapter)
            if self.looks is not None:
                asked.mm_features = vllm_vision.features(self.looks, request)
            compat.add_request(self.core, asked)
            self.answers[id] = Answer.begin(request, params)
            if params.stop:
                earlier, turn = request.num_earlier, list(request.response_ids)
                before = [*request.prompt_ids, *turn[:earlier]]
                self.detokenizers[id] = self.detokenizer(self.engine_request(id, before, shared))
                self.detokenizers[id].update(turn[earlier:], stop_terminated=False)
        return ids

    def engine_request(self, id: int, prompt_ids: list[int], params: Any, adapter: int = 0) -> Any:
        """adapter: as of a Request."""
        used = self.slots.requests[adapter] if self.slots is not None else None
        return compat.engine_request(id, prompt_ids, params, used)

    def step(self) -> list[tuple[int, Completion]]:
        """Runs one engine step; with asynchronous scheduling (GPU) the tokens are those of an
        earlier pass.
        """
        ended = self.forward() if self.answers else []
        self.drain()
        return ended

    def forward(self) -> list[tuple[int, Completion]]:
        ended = []
        if self.returns_supports:
            wanted = any(answer.params.support_width for answer in self.answers.values())
            compat.return_supports(self.core, wanted)
        for output in compat.step(self.core):
            id = int(output.request_id)
            answer = self.answers.get(id)
            if answer is None:  # scheduled once more before it was aborted
                continue
            new = output.new_token_ids
            if output.finish_reason is not None:
                answer.finish_reason = str(output.finish_reason)
            kept = None
            if id in self.detokenizers:
                kept = self.tokens_to_stop(id, new, answer.finish_reason == "stop")
            if kept is not None:
                new, answer.finish_reason = new[:kept], "stop"
                if not output.finished:
                    self.core.abort_requests([output.request_id])
            answer.token_ids += new
            answer.logprobs += output.new_logprobs.logprobs[: len(new), 0].tolist()
            answer.versions += [self.policy_version] * len(new)
            if answer.params.support_width and new:
                answer.supports += self.supports_of(output)[: len(new)]
            if self.expert_layers:
                self.note_routed(answer, output.routed_experts)
            if answer.finish_reason is not None:
                self.forget(id)
                ended.append((id, answer.completion()))
        return ended

    def tokens_to_stop(self, id: int, new: Sequence[int], by_token: bool) -> int | None:
        """Returns how many of a request's new tokens there are up to the end of a stop string; None
        where none is complete. by_token: the last of them is a stop token.
        """
        for i, token in enumerate(new, start=1):
            last = by_token and i == len(new)
            if self.detokenizers[id].update([token], stop_terminated=last):
                return i
        return None

    def supports_of(self, output: Any) -> list[np.ndarray]:
        """The ids among which each of a request's new tokens was drawn."""
        if self.on_cpu:
            return [self.noise.supports[output.request_id]]
        return compat.returned_supports(output)

    def note_routed(self, answer: Answer, rows: np.ndarray | None) -> None:
        """rows: (num_new, num_layers, top_k) uint8 or uint16, of all layers, up to the last token
        that was computed; None: vLLM says it with a later token."""
        if rows is None:
            return
        end = len(answer.request.prompt_ids) + len(answer.token_ids) - 1
        chosen = rows[:, self.expert_layers]
        answer.add_routed(chosen.view(np.int16) if chosen.itemsize == 2 else chosen, end)

    def abort(self, ids: Sequence[int]) -> list[Completion]:
        self.core.abort_requests([str(id) for id in ids])
        partial = [self.forget(id).completion() for id in ids]
        self.drain()
        return partial

    def forget(self, id: int) -> Answer:
        self.detokenizers.pop(id, None)
        if self.on_cpu:
            del self.noise.seeds[str(id)]
            self.noise.supports.pop(str(id), None)
        return self.answers.pop(id)

    def drain(self) -> None:
        """Once there are no requests: a batch may be under way still, and rows to be cleared."""
        while not self.answers and compat.has_work(self.core):
            compat.step_without_outputs(self.core)

    def vllm_params(self, params: SamplingParams) -> Any:
        """Raises ValueError for a temperature that vLLM would replace by another."""
        from vllm import SamplingParams as VllmSamplingParams

        if 0 < params.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature={params.temperature} is below {LEAST_TEMPERATURE}, where vLLM clamps "
                f"it: use 0 (greedy) or at least {LEAST_TEMPERATURE}"
            )
        eos = () if params.ignore_eos else self.eos_token_ids
        return VllmSamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
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
        if self.tokenizer is None:
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(self.model_path, trust_remote_code=False)
        return compat.detokenizer(self.tokenizer, request)

    def forget_prefixes(self) -> None:
        """Empties vLLM's prefix cache, which holds keys and values of the weights before.

        Requests that run are preempted and prefilled anew with their tokens so far. Raises
        RuntimeError where vLLM did not empty its cache.
        """
        if not self.core.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError(
                "vLLM did not empty its prefix cache after new weights were loaded; sampling on "
                "would mix keys and values of old and new weights"
            )

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
            loaded.update(self.model.load_weights(as_published(self.kind, weights)))

        def record(shapes: Mapping[str, tuple[int, ...]]) -> Layout:
            return record_layout(self.model, load, shapes, config.dtype)

        if self.in_fp8:
            with vllm_fp8.loadable(self.model):
                layout = vllm_fp8.fp8_layout(record, shapes)
        else:
            layout = record(shapes)
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
        config = self.core.vllm_config.model_config
        on_disk = compat.weights_on_disk(config, self.model)
        self.layout({name: tuple(tensor.shape) for name, tensor in on_disk})
        weights = compat.weights_on_disk(config, self.model)
        self.load_weights((name, tensor.to(self.topology.device)) for name, tensor in weights)

    def require_all(self, loaded: set[str]) -> None:
        every = dict(given_parameters(self.model, remove_duplicate=False))
        there = {id(every[name]) for name in loaded if name in every}
        missing = {name for name, parameter in every.items() if id(parameter) not in there}
        if missing:
            raise ValueError(f"weights were not given: {sorted(missing)}")

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads weights in place: each tensor is copied before the next is asked for, so buffers
        may be reused.

        Quantised engines keep references until a layer is complete: there a tensor must stay valid
        until the call returns. Raises ValueError where a parameter was not given.
        """
        if self.is_reloaded:
            self.load_opaque(weights)
        elif self.slots is not None:
            adapter: dict[str, Tensor] = {}
            with vllm_lora.unwrapped(self.model):
                base = vllm_lora.split_off(iter(weights), adapter)
                self.require_all(self.model.load_weights(as_published(self.kind, base)))
            self.slots.load(adapter)
        else:
            with vllm_fp8.loadable(self.model):
                weights = vllm_fp8.quantized(weights, self.fp8)
                self.require_all(self.model.load_weights(as_published(self.kind, weights)))
        self.finish_load()

    @torch.no_grad()
    def load_opaque(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if self.is_reloaded:
            self.core.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        else:
            with vllm_lora.unwrapped(self.model) if self.slots is not None else nullcontext():
                self.model.load_weights(as_published(self.kind, weights))

    @torch.no_grad()
    def finish_load(self) -> None:
        if self.on_cpu:
            vllm_cpu.repack_experts(self.model)
        if self.has_derived:
            vllm_derived.renew_derived(self.model, self.dtype)
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
        vllm_derived.check_derived(self.model, self.dtype)
        rank, size = self.topology.axis_rank("tp"), self.topology.axis_size("tp")
        weights = as_published(self.kind, weights)
        if self.slots is not None:
            adapter: dict[str, Tensor] = {}
            base = vllm_lora.split_off(weights, adapter)
            with vllm_lora.unwrapped(self.model):
                count = compare_weights(self.model, base, rank, size)
            return count + self.slots.check(adapter)
        return compare_weights(self.model, vllm_fp8.quantized(weights, self.fp8), rank, size)

    # memory

    def sleep(self) -> None:
        """Gives the engine's memory to training.

        On a GPU, vLLM drops weights and KV cache (level 2), because a push of weights follows
        `wake` anyway; plain_tensors.py keeps what no push brings. A push of adapters alone does not
        bring the weights, so then they move to the host's memory (level 1). On a CPU, the KV cache
        is freed and the weights stay. Those of a frozen engine move to the host without vLLM's
        allocator, which is one for all engines of the process.
        """
        if not self.may_sleep or self.freed_kv_cache:
            return
        self.forget_prefixes()
        if self.on_cpu or self.is_frozen:
            self.freed_kv_cache = free_kv_cache(self.runner.kv_caches)
        elif self.slots is None:
            self.plain.save(self.runner)
            self.core.sleep(level=2)
        else:
            self.core.sleep(level=1)
        if self.is_frozen and not self.on_cpu:
            self.on_host = move_to_host(self.model)

    def wake(self, tags: Sequence[str] = WAKE_TAGS) -> None:
        if not self.may_sleep:
            return
        if self.is_frozen and "weights" in tags:
            move_back(self.on_host)
            self.on_host = []
        if not self.on_cpu and not self.is_frozen:
            self.core.wake_up(list(tags))
            if "weights" in tags:
                self.plain.restore()
        elif "kv_cache" in tags:
            restore_kv_cache(self.runner.kv_caches, self.freed_kv_cache)
            self.freed_kv_cache = []

    def shutdown(self) -> None:
        """Ends the engine. EngineCore.shutdown would destroy the caller's process groups too."""
        with frozen_as_before():
            compat.shutdown(self.core)
        del self.core
        if not self.on_cpu:
            gc.unfreeze()  # the engine may be among what the run has frozen: its memory is needed
        gc.collect()
        self.leave_groups()

    def leave_groups(self) -> None:
        VllmEngine.live -= 1
        if VllmEngine.live == 0:
            compat.destroy_groups()
