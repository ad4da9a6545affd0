"""The rollout engines by name, and the one that a config names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spmdrl.config import ConfigError, LoraConfig, RolloutConfig, require
from spmdrl.data.image_limits import ImageLimits
from spmdrl.distributed.collectives import level_group_count
from spmdrl.distributed.placement import place
from spmdrl.distributed.progress import model_text
from spmdrl.distributed.topology import Topology
from spmdrl.hub.hf_folder import load_hf_config, meta_model
from spmdrl.hub.quantized_weights import is_mxfp4, is_readable
from spmdrl.hub.transformers_compat import keeps_float32
from spmdrl.rollout.base import RolloutEngine
from spmdrl.rollout.hf.spec import SPEC as HF
from spmdrl.rollout.sglang.spec import SPEC as SGLANG
from spmdrl.rollout.spec import EngineSpec
from spmdrl.rollout.vllm.spec import SPEC as VLLM

ENGINES: dict[str, EngineSpec] = {spec.name: spec for spec in (VLLM, HF, SGLANG)}


def build_engine(
    model: str, config: RolloutConfig, max_model_len: int, topology: Topology,
    job: Topology | None = None, strict: bool = False, lora: LoraConfig | None = None,
    looks: ImageLimits | None = None, load_weights: bool = True,
    return_routed_experts: bool = False, frozen: bool = False,
) -> RolloutEngine | None:  # fmt: skip
    """The engine that config.engine names; only its library is imported.

    lora: the engine keeps an adapter beside its weights, which are then the base's. looks: which
    images prompts have, where the model sees any.

    Collective over the job: ranks outside of `topology`, whose axes are dp and tp, get None. job:
    all ranks, where torch.distributed's own group cannot take CPU tensors. strict: logprobs are bit
    for bit those of a strict training engine with the same weights. load_weights: without it only
    the model's config is read, and weights must be given before anything is sampled.
    return_routed_experts: completions have them, of every token that was computed. frozen: no push
    follows: what sleeps wakes with its weights, whatever other engines of the process do.
    """
    engine: RolloutEngine | None = None
    if topology.here:
        engine = ENGINES[config.engine].build(
            model, config, max_model_len, topology, strict, lora, looks, load_weights,
            return_routed_experts, frozen,
        )  # fmt: skip
    level_group_count(job.control if job is not None else None)
    return engine


def is_filled_by_push(model: str, config: RolloutConfig) -> bool:
    """Whether the trainer's first push writes all that an engine keeps, so that it reads no weights
    from disk. Three kinds of engines read them: those that cannot be built without weights, those
    that quantise or keep a checkpoint's quantised weights, and those that learn from the files
    which weights they keep in float32 (EngineSpec.mixes_dtypes, for models that have such weights).
    """
    spec = ENGINES[config.engine]
    if not spec.starts_blank:
        return False
    hf = load_hf_config(model)
    in_floats = getattr(hf, "quantization_config", None) is None or is_mxfp4(hf)
    plain = config.quantization is None and (in_floats or (spec.keeps_floats and is_readable(hf)))
    plain = plain and not Path(model, "hf_quant_config.json").is_file()  # which vLLM reads too
    return plain and not (spec.mixes_dtypes and keeps_float32(meta_model(hf)))


def check_engine(model: str, hf: Any, config: RolloutConfig, strict: bool) -> None:
    """hf: the model's config. Raises ConfigError for options of another engine, and for what the
    engine cannot do with the model.
    """
    spec = ENGINES[config.engine]
    other = next(s for s in ENGINES.values() if s.quantizes)
    require(
        config.quantization is None or spec.quantizes,
        f"rollout.quantization={config.quantization!r} is {other.title}'s: set "
        f"rollout.engine={other.name!r} or leave it out",
    )
    other = next(s for s in ENGINES.values() if s.takes_engine_args)
    require(
        not config.engine_args or spec.takes_engine_args,
        f"rollout.engine_args={dict(config.engine_args)} are {other.title}'s: set "
        f"rollout.engine={other.name!r} or leave them out",
    )
    other = next(s for s in ENGINES.values() if s.speculates)
    require(
        not config.speculative or spec.speculates,
        f"rollout.speculative={dict(config.speculative)} is {other.title}'s: set "
        f"rollout.engine={other.name!r} or leave it out",
    )
    other = next(s for s in ENGINES.values() if s.spreads_experts)
    require(
        not config.expert_parallel or spec.spreads_experts,
        f"rollout.expert_parallel=True is {other.title}'s: set rollout.engine={other.name!r} or "
        "leave it out",
    )
    spec.check_model(model, hf, config, strict)


def check_adapter(lora: LoraConfig | None, config: RolloutConfig, hf: Any) -> None:
    """hf: the text model's config. Raises ConfigError where an adapter cannot be sent by itself."""
    asked = "weights.lora='adapter'"
    if lora is None:
        raise ConfigError(f"{asked} has no effect without actor.lora: leave it out")
    check = ENGINES[config.engine].check_adapter
    if check is None:
        other = next(spec for spec in ENGINES.values() if spec.check_adapter is not None)
        raise ConfigError(
            f"{asked} is of rollout.engine={other.name!r}; weights.lora='merge' sends weights with "
            "the adapter in them"
        )
    check(lora, config, hf)


def engine_text(config: RolloutConfig, model: str) -> str:
    """Returns a text for people that says what is built, such as "vLLM, Qwen3-8B"."""
    return f"{ENGINES[config.engine].title}, {model_text(model)}"


def shared_bytes(config: Any, ranks: list[int], world: int, threads: int) -> int:
    """Returns the bytes of /dev/shm that the engines on these ranks, of one host, need on CPUs.
    config: of any program.
    """
    rollout, judge = getattr(config, "rollout", None), getattr(config, "judge", None)
    if rollout is None:
        return 0
    placed, found = place(config, world).roles, 0
    for role, name, degree in (
        ("rollout", rollout.engine, rollout.tensor_parallel),
        *([("reward", judge.engine or rollout.engine, judge.tensor_parallel)] if judge else []),
    ):
        if degree > 1:
            here = len(set(placed[role]) & set(ranks))
            found += here * threads * ENGINES[name].shared_bytes
    return found
