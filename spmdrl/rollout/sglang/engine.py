"""SGLang inside the ranks: every rank holds its part of an engine and drives it itself.

There is no server and no second process. We build SGLang's Scheduler, which has the KV cache, the
cache of prefixes and the model runner, and make its steps (compat.py). SGLang decides what is
computed together. What a token is, how likely it was and when an answer ends is decided here, on
every rank of the tensor-parallel group alike: SGLang returns logprobs before top-k and top-p, and
looks for stops in what it wrote itself, not in an answer that was begun elsewhere.

Each pass is waited for before the next is scheduled (disable_overlap_schedule), which costs speed:
the next pass's batch depends on which answers have ended.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spmdrl.config import CPU_KV_CACHE_MIB, ConfigError, RolloutConfig, is_eager
from spmdrl.distributed.collectives import world_of
from spmdrl.distributed.topology import Topology
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.hub.remote_code import has_foreign_code
from spmdrl.rollout.base import (
    WAKE_TAGS,
    Answer,
    Completion,
    Request,
    SamplingParams,
    check_lengths,
    generate,
    require_tensor_parallel,
)
from spmdrl.rollout.draw import draw, penalise
from spmdrl.rollout.kv_storage import free_kv_cache, restore_kv_cache
from spmdrl.rollout.process_state import preserved_process
from spmdrl.rollout.rng import mix
from spmdrl.rollout.sglang import compat
from spmdrl.rollout.stops import StopRule
from spmdrl.rollout.weight_check import compare_weights
from spmdrl.weights.engine_layout import Layout, record_layout

# SGLang keeps room for one more token, and for the one that a pass draws
SPARE_TOKENS = 8
NO_ROW = SamplingParams(temperature=0.0)  # of a request that was aborted meanwhile


class SglangEngine:
    """One engine per tensor-parallel group; what each method promises stands in RolloutEngine."""

    live = False  # whether this process has an engine: SGLang has one configuration per process

    def __init__(
        self, model: str, config: RolloutConfig, max_model_len: int, topology: Topology,
        load_weights: bool = True,
    ) -> None:  # fmt: skip
        """Collective over `topology`, whose axes are dp and tp.

        Raises ConfigError where tp is not config.tensor_parallel, where the KV cache is too small
        for one sequence, and where SGLang is of another version or cannot be imported;
        RuntimeError where the process has such an engine already.
        """
        require_tensor_parallel(config, topology)
        if SglangEngine.live:
            raise RuntimeError("SGLang has one engine per process: shut the other down first")
        self.topology, self.max_model_len = topology, max_model_len
        self.has_weights = load_weights
        self.device = topology.device
        self.on_cpu, self.may_sleep = self.device.type == "cpu", config.sleep
        self.dtype = getattr(torch, config.dtype)
        self.freed_kv_cache: list[tuple[torch.UntypedStorage, int]] = []
        self.stops = StopRule(model)
        self.max_num_seqs, self.policy_version = config.max_num_seqs, 0
        self.num_requests = 0  # so far
        self.answers: dict[int, Answer] = {}  # by id, those that go on
        self.queued: dict[int, Any] = {}  # SGLang's objects for them
        self.rows: list[Answer | None] = []  # of the batch that is computed
        self.drawn: tuple[Tensor, Tensor] | None = None  # its tokens and logprobs
        SglangEngine.live = True
        with ExitStack() as undo:
            undo.callback(self.leave)  # should SGLang or a check of ours refuse
            with preserved_process("sglang"), world_of(topology.mesh.get_group("tp")):
                import_sglang()
                self.scheduler = self.build(model, config, load_weights)
            compat.replace_draws(self.scheduler, self.draw)
            self.check_capacity()
            undo.pop_all()

    def build(self, model: str, config: RolloutConfig, load_weights: bool) -> Any:
        if config.sleep and not self.on_cpu:
            compat.use_memory_saver_in_process()
        # the room of SPARE_TOKENS is never used, but may go beyond the model's positions
        os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
        args = engine_args(model, config, self.max_model_len, self.on_cpu, load_weights)
        try:
            resolved = compat.server_args(**args)
        except ValueError as error:
            raise ConfigError(f"rollout.engine='sglang' does not start: {error}") from error
        rank = self.topology.axis_rank("tp")
        return compat.build_scheduler(resolved, rank, self.device.index or 0)

    def check_capacity(self) -> None:
        room, needed = compat.most_tokens(self.scheduler), self.max_model_len + SPARE_TOKENS
        if room < needed:
            raise ConfigError(
                f"SGLang's KV cache has room for {room} tokens, and one sequence may have {needed}:"
                " raise rollout.kv_cache_mib or rollout.gpu_memory_utilization, or allow shorter "
                "answers"
            )

    @property
    def model(self) -> Any:
        return compat.model_of(self.scheduler)

    # sampling

    @property
    def num_running(self) -> int:
        return len(self.answers) - self.num_waiting

    @property
    def num_waiting(self) -> int:
        return compat.num_waiting(self.scheduler)

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """Answers the requests; at temperature 0 the logprobs are of the model's own distribution
        (temperature 1).
        """
        return generate(self, requests, params)

    def add(self, requests: Sequence[Request], params: SamplingParams) -> list[int]:
        check_lengths(requests, params, self.max_model_len)
        ids = [self.num_requests + i for i in range(len(requests))]
        self.num_requests += len(requests)
        for id, request in zip(ids, requests, strict=True):
            begun = list(request.response_ids)
            self.queued[id] = compat.add_request(
                self.scheduler, name_of(id), [*request.prompt_ids, *begun],
                request.limit(params) - len(begun),
            )  # fmt: skip
            self.answers[id] = Answer.begin(request, params)
        return ids

    def step(self) -> list[tuple[int, Completion]]:
        ended = self.forward() if self.answers else []
        self.drain()
        return ended

    @torch.no_grad()
    def forward(self) -> list[tuple[int, Completion]]:
        """One pass. Raises RuntimeError where nothing can be computed and answers are missing."""
        batch = compat.next_batch(self.scheduler)
        if batch is None:
            compat.finish_batch(self.scheduler, None, None)
            batch = compat.next_batch(self.scheduler)  # the last one's requests are put in order
        if batch is None:
            raise RuntimeError(
                f"SGLang computes none of {self.num_waiting} waiting requests: its KV cache of "
                f"{compat.most_tokens(self.scheduler)} tokens may be too small"
            )
        ids = [int(name) for name in compat.row_names(batch)]
        self.rows = [self.answers.get(id) for id in ids]
        result = compat.forward(self.scheduler, batch)
        ended = self.note(ids)
        compat.finish_batch(self.scheduler, batch, result)
        return ended

    def note(self, ids: list[int]) -> list[tuple[int, Completion]]:
        """Gives answers the tokens just drawn; returns those that ended with them."""
        assert self.drawn is not None, "SGLang drew no tokens in this pass"
        tokens, logprobs = (values.tolist() for values in self.drawn)
        self.drawn, ended = None, []
        for id, answer, token, logprob in zip(ids, self.rows, tokens, logprobs, strict=True):
            if answer is None or not compat.takes_token(self.queued[id]):
                continue
            self.stops.note(answer, token, logprob, self.policy_version)
            if answer.finish_reason is not None:
                compat.end_request(self.queued[id])
                ended.append((id, self.forget(id).completion()))
        return ended

    def draw(self, logits: Tensor) -> Tensor:
        """(num_rows, vocab) logits of self.rows -> (num_rows,) int64 tokens, which are noted."""
        logits = logits.float()
        tokens = torch.empty(len(self.rows), dtype=torch.int64, device=logits.device)
        logprobs = torch.empty(len(self.rows), device=logits.device)
        by_params: dict[SamplingParams, list[int]] = {}
        for row, answer in enumerate(self.rows):
            by_params.setdefault(answer.params if answer else NO_ROW, []).append(row)
        for params, rows in by_params.items():
            answers = [self.rows[row] for row in rows]
            own = logits if len(rows) == len(self.rows) else logits[rows]
            tokens[rows], logprobs[rows] = self.draw_alike(own, answers, params)
        self.drawn = tokens, logprobs
        return tokens

    def draw_alike(
        self, logits: Tensor, answers: list[Answer | None], params: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        """Draws for rows of the same params: tokens, logprobs (num_rows,)."""
        self.stops.forbid(logits, answers, params)
        had = [[*a.request.prompt_ids, *a.token_ids] if a else () for a in answers]
        penalise(logits, had, params.repetition_penalty)
        seeds = torch.tensor([a.request.seed if a else 0 for a in answers], device=self.device)
        lengths = torch.tensor([length_of(a) for a in answers], device=self.device)
        return draw(logits, params, mix(seeds), lengths, partial(torch.log_softmax, dim=-1))[:2]

    def abort(self, ids: Sequence[int]) -> list[Completion]:
        for id in ids:
            compat.abort_request(self.scheduler, name_of(id))
        partial = [self.forget(id).completion() for id in ids]
        self.drain()
        return partial

    def forget(self, id: int) -> Answer:
        del self.queued[id]
        return self.answers.pop(id)

    @torch.no_grad()
    def drain(self) -> None:
        """Once there are no answers: rows of aborted requests take one more pass."""
        while not self.answers and not compat.is_idle(self.scheduler):
            batch = compat.next_batch(self.scheduler)
            self.rows = [] if batch is None else [None] * len(compat.row_names(batch))
            result = None if batch is None else compat.forward(self.scheduler, batch)
            compat.finish_batch(self.scheduler, batch, result)

    def forget_prefixes(self) -> None:
        """Empties SGLang's cache of prefixes, which has keys and values of the weights before.

        Requests that run are queued again, and computed anew with their tokens so far. Raises
        RuntimeError where SGLang did not empty its cache.
        """
        if not compat.forget_prefixes(self.scheduler):
            raise RuntimeError(
                "SGLang did not empty its cache of prefixes after new weights were loaded; "
                "sampling on would mix keys and values of old and new weights"
            )

    # weights

    def layout(self, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
        """Raises ValueError where a parameter would not be given."""
        model = self.model
        layout = record_layout(model, model.load_weights, shapes, self.dtype)
        if not layout.opaque:
            self.require_all(layout)
        return layout

    def require_all(self, layout: Layout) -> None:
        """SGLang's loaders do not say what they loaded."""
        given = {
            getattr(place.module, place.name).untyped_storage().data_ptr()
            for place in layout.places
        }
        missing = [
            name for name, parameter in self.model.named_parameters()
            if parameter.untyped_storage().data_ptr() not in given
        ]  # fmt: skip
        if missing:
            raise ValueError(f"weights were not given: {sorted(missing)}")

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads weights in place: each tensor is copied before the next is asked for, so buffers
        may be reused. Raises ValueError where a parameter was not given.
        """
        shapes: dict[str, tuple[int, ...]] = {}

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                shapes[name] = tuple(tensor.shape)
                yield name, tensor

        self.model.load_weights(noted())
        self.layout(shapes)
        self.finish_load()

    @torch.no_grad()
    def load_opaque(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.model.load_weights(iter(weights))

    def finish_load(self) -> None:
        self.forget_prefixes()

    def check_weights(self, weights: Iterator[tuple[str, Tensor]]) -> int:
        """Compares bit by bit."""
        rank, size = self.topology.axis_rank("tp"), self.topology.axis_size("tp")
        return compare_weights(self.model, weights, rank, size)

    # memory

    def sleep(self) -> None:
        """Gives the engine's memory to training.

        On a GPU, weights and KV cache are dropped, because a push of weights follows `wake`
        anyway. On a CPU, the KV cache is freed and the weights stay.
        """
        if not self.may_sleep or self.freed_kv_cache:
            return
        self.forget_prefixes()
        if self.on_cpu:
            self.freed_kv_cache = free_kv_cache(compat.kv_caches(self.scheduler))
        else:
            compat.release_memory(self.scheduler)

    def wake(self, tags: Sequence[str] = WAKE_TAGS) -> None:
        if not self.may_sleep:
            return
        if not self.on_cpu:
            compat.resume_memory(self.scheduler, list(tags))
        elif "kv_cache" in tags:
            restore_kv_cache(compat.kv_caches(self.scheduler), self.freed_kv_cache)
            self.freed_kv_cache = []

    def shutdown(self) -> None:
        """Ends the engine, without SGLang's own end, which would abort the caller's groups."""
        scheduler = self.scheduler
        del self.scheduler
        self.queued.clear()
        self.leave()
        compat.shutdown(scheduler)
        gc.collect()

    def leave(self) -> None:
        SglangEngine.live = False
        compat.destroy_groups()


def import_sglang() -> None:
    """Raises ConfigError where SGLang is of another version, or cannot be imported."""
    found = importlib.metadata.version("sglang")
    if found != compat.VERSION:
        raise ConfigError(
            f"rollout.engine='sglang' is written for SGLang {compat.VERSION}, of which it uses "
            f"internals, and {found} is installed: {compat.INSTALL}"
        )
    try:
        compat.import_engine()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # of a library it loads
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"rollout.engine='sglang', but SGLang cannot be imported: {type(error).__name__}: "
            f"{error} ({where.filename}:{where.lineno}). {compat.INSTALL}"
        ) from error


def engine_args(
    model: str, config: RolloutConfig, max_model_len: int, on_cpu: bool, load_weights: bool
) -> dict[str, Any]:
    """Returns SGLang's ServerArgs by name. Raises ConfigError where it would pad heads."""
    mib = config.kv_cache_mib or (CPU_KV_CACHE_MIB if on_cpu else None)
    hf = load_hf_config(model)
    heads, tp = kv_heads_of(hf), config.tensor_parallel
    if on_cpu and heads % tp:
        raise ConfigError(
            f"rollout.engine='sglang' on a CPU would add heads to the {heads} of keys and values "
            f"for rollout.tensor_parallel={tp}, which no weights of the trainer are for: set it to "
            f"a divisor of {heads}"
        )
    return {
        "model_path": model,
        "skip_tokenizer_init": True,
        # whoever was not to run code of the model's folder has been refused it before
        "trust_remote_code": has_foreign_code(hf),
        "dtype": config.dtype,
        "device": "cpu" if on_cpu else "cuda",
        "random_seed": 0,
        "tp_size": config.tensor_parallel,
        "context_length": max_model_len + SPARE_TOKENS,
        "max_running_requests": config.max_num_seqs,
        "mem_fraction_static": config.gpu_memory_utilization,
        "max_total_tokens": None if mib is None else (mib << 20) // bytes_per_token(hf, config),
        "disable_cuda_graph": on_cpu or is_eager(config, on_gpu=True),
        "disable_overlap_schedule": True,
        "enable_memory_saver": config.sleep and not on_cpu,
        "load_format": "auto" if load_weights else "dummy",
        "sampling_backend": "pytorch",  # is replaced: one that compiles nothing
        # the others may keep experts' weights in an order of their own
        "moe_runner_backend": "auto" if on_cpu else "triton",
        "attention_backend": "torch_native" if on_cpu else None,
        "watchdog_timeout": compat.NO_WATCHDOG_S,
        "log_level": "error",
    }


def bytes_per_token(hf: Any, config: RolloutConfig) -> int:
    """Counts the bytes of a token's keys and values in one rank's part of the KV cache."""
    text = hf.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    local = -(-kv_heads_of(hf) // config.tensor_parallel)
    return 2 * text.num_hidden_layers * local * width * getattr(torch, config.dtype).itemsize


def kv_heads_of(hf: Any) -> int:
    text = hf.get_text_config()
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


def name_of(id: int) -> str:
    """SGLang takes a name for the beginning of names when it aborts: none begins another."""
    return f"{id:020}"


def length_of(answer: Answer | None) -> int:
    """The number of tokens that stand before the next one."""
    return 0 if answer is None else len(answer.request.prompt_ids) + len(answer.token_ids)
