"""EngineSpec describes a rollout engine to the rest of the program, without its library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from spmdrl.config import LoraConfig, RolloutConfig
from spmdrl.data.image_limits import ImageLimits
from spmdrl.distributed.topology import Topology
from spmdrl.engines.recorded_pass import RecordedPass
from spmdrl.rollout.base import RolloutEngine


class EngineBuilder(Protocol):
    """Imports the engine's library and builds this rank's engine; see build.build_engine."""

    def __call__(
        self, model: str, config: RolloutConfig, max_model_len: int, topology: Topology,
        strict: bool, lora: LoraConfig | None, looks: ImageLimits | None, load_weights: bool,
        return_routed_experts: bool, frozen: bool,
    ) -> RolloutEngine: ...  # fmt: skip


class PassReader(Protocol):
    """Runs a sequence through the model of this rank's engine, as a prompt, and says what its
    modules computed. Collective over the engine's ranks. The last token is not computed.

    rows: (num_rows,) int64, ascending, below len(token_ids) - 1: places whose results are kept.
    temperature: of the log-probabilities.
    """

    def __call__(
        self, engine: Any, token_ids: list[int], rows: Tensor, temperature: float
    ) -> RecordedPass: ...  # fmt: skip


def accept(*_: Any) -> None:
    """A check that refuses nothing."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One engine. Each check raises ConfigError for what the engine cannot do."""

    name: str  # as in rollout.engine
    title: str  # of its library, for people
    library: str  # the module that must be importable
    build: EngineBuilder
    runs_on_cpus: bool = True
    library_bytes: int = 0  # that a process takes more once the library is imported
    shared_bytes: int = 0  # of /dev/shm on CPUs: of each thread of each tensor-parallel rank
    has_kv_cache: bool = False  # as large as rollout.kv_cache_mib says
    least_temperature: float = 0.0  # that it samples with as it stands; 0 is greedy
    quantizes: bool = False  # takes rollout.quantization
    takes_engine_args: bool = False  # takes rollout.engine_args
    speculates: bool = False  # takes rollout.speculative
    records_supports: bool = False  # takes rollout.keep_sampling_mask
    spreads_experts: bool = False  # takes rollout.expert_parallel
    starts_blank: bool = False  # can be built without weights, its buffers right all the same
    share_has_passes: bool = True  # gpu_memory_utilization is of its passes and graphs too
    leaves_towers: bool = False  # samples the language model of files with a tower by itself
    keeps_floats: bool = False  # has floating-point weights also where a checkpoint is quantised
    mixes_dtypes: bool = False  # keeps weights in float32 where transformers does
    holds_frozen: bool = False  # can be built as the engine of a model that no push follows
    # of such a model, by its text model's config, where its engine gives its memory back
    check_frozen_sleep: Callable[[Any], None] = accept
    check_installed: Callable[[], None] = accept  # whether its library is there
    # what it says of rollout by itself
    check: Callable[[RolloutConfig], None] = accept
    # of the model: its folder, its whole config; rollout; strict
    check_model: Callable[[str, Any, RolloutConfig, bool], None] = accept
    # of an adapter that is kept beside the weights, and the text model's config; None: it has none
    check_adapter: Callable[[LoraConfig, RolloutConfig, Any], None] | None = None
    # of a model's experts, whose choice it is to return, by the text model's config; rollout; None:
    # it does not say which experts it sent a token to
    check_routed_experts: Callable[[Any, RolloutConfig], None] | None = None
    # None: what its modules compute cannot be read
    read_pass: PassReader | None = None
    reads_eager: bool = False  # it can be read with rollout.enforce_eager alone
    # of a model whose logprobs are to be equal in every bit, by its config
    check_strict: Callable[[Any], None] = accept
