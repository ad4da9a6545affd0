"""What is vLLM's own of its engine: other architectures, its options, what is refused."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_checks import flip_every_parameter, load_hf, save_family, some_requests, worst_error
from transformers import DeepseekV3Config, Qwen3Config, Qwen3MoeConfig

from spmdrl.config import ConfigError, RolloutConfig
from spmdrl.distributed.topology import Topology
from spmdrl.rollout.base import SamplingParams
from spmdrl.rollout.build import check_engine
from spmdrl.rollout.vllm import core
from spmdrl.rollout.vllm.core import check_engine_args, check_expert_parallel, engine_args
from spmdrl.rollout.vllm.engine import VllmEngine
from spmdrl.rollout.vllm.model_types import check_model_type
from spmdrl.rollout.vllm.spec import check

pytestmark = pytest.mark.vllm

CONFIG = RolloutConfig(dtype="float32", max_num_seqs=64, kv_cache_mib=64)
MAX_MODEL_LEN = 400


@pytest.fixture(scope="module")
def model(qwen3: Path) -> Any:
    return load_hf(qwen3)


@pytest.mark.parametrize("family", ["qwen3 untied", "qwen2", "llama"])
def test_other_architectures(family: str, tmp_path: Path, topology: Topology) -> None:
    """Untied heads, biases on q, k and v, an odd vocabulary, one KV head."""
    model = save_family(family, tmp_path)
    engine = VllmEngine(str(tmp_path), CONFIG, MAX_MODEL_LEN, topology)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    engine.load_weights(model.named_parameters())
    assert worst_error(engine, model, SamplingParams(temperature=1.0, max_tokens=16)) < 1e-5
    flip_every_parameter(engine, dict(model.named_parameters()))
    engine.shutdown()


def test_what_else_vllm_is_told_changes_no_answer(
    qwen3: Path, model: Any, topology: Topology
) -> None:
    """Prefills of at most 64 tokens at a time, no prefixes shared. What was imported before stays
    out of garbage collection, and the engine does not.
    """
    frozen = gc.get_freeze_count()  # see pytest_collection_finish
    given = {"max_num_batched_tokens": 64, "enable_prefix_caching": False, "block_size": 64}
    config = replace(CONFIG, max_num_seqs=32, engine_args=given)
    told = VllmEngine(str(qwen3), config, MAX_MODEL_LEN, topology)
    built = weakref.ref(told.model)
    try:
        found = told.core.vllm_config
        assert found.scheduler_config.max_num_batched_tokens == 64
        assert found.cache_config.enable_prefix_caching is False
        assert found.cache_config.block_size == 64
        assert worst_error(told, model, SamplingParams(max_tokens=20), n=40) < 1e-5
    finally:
        told.shutdown()
    assert built() is None
    assert 0.9 * frozen < gc.get_freeze_count() and frozen > 0


@pytest.mark.parametrize("as_on_gpus", [True, False])
def test_logits_of_an_engine_in_half_precision_are_not_rounded_on_a_gpu(
    qwen3: Path, topology: Topology, monkeypatch: pytest.MonkeyPatch, as_on_gpus: bool
) -> None:
    """A CPU's engine is told what a GPU's is. Its logits are the products of what the head is
    given, to float32's rounding, and so are the log-probabilities of what it says.
    """
    if as_on_gpus:
        monkeypatch.setattr(core, "has_float32_logits", lambda *_: True)
    engine = VllmEngine(str(qwen3), replace(CONFIG, dtype="bfloat16"), MAX_MODEL_LEN, topology)
    own, exact, errors = engine.model.compute_logits, [], []

    def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
        logits = own(hidden)
        exact.append(hidden.double() @ engine.model.lm_head.weight[: logits.shape[1]].double().T)
        errors.append(float((logits - exact[-1]).abs().max() / exact[-1].abs().max()))
        return logits

    monkeypatch.setattr(engine.model, "compute_logits", compute_logits)
    try:
        with torch.no_grad():
            engine.model.model.norm.weight.fill_(64.0)
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        (said,) = engine.generate(some_requests(1), params)
    finally:
        engine.shutdown()
    wanted = [float(z.log_softmax(-1)[0, t]) for z, t in zip(exact, said.token_ids, strict=True)]
    apart = max(abs(w - p) for w, p in zip(wanted, said.logprobs, strict=True))
    assert max(float(z.abs().max()) for z in exact) > 16
    assert (max(errors) < 1e-6) == as_on_gpus and (apart < 1e-4) == as_on_gpus, (errors, apart)


def test_which_engines_are_asked_for_unrounded_logits(qwen3: Path) -> None:
    hf = load_hf(qwen3).config

    def overrides(given: dict[str, Any], on_cpu: bool = False, strict: bool = False) -> Any:
        config = replace(CONFIG, **{"dtype": "bfloat16"} | given)
        args = engine_args(
            str(qwen3), hf, config, MAX_MODEL_LEN, on_cpu, True, False, False, None, None, False,
            False, strict,
        )  # fmt: skip
        return args.hf_overrides

    asked = {"head_dtype": "float32"}
    assert overrides({}) == overrides({"dtype": "float16"}) == asked
    assert set(overrides({"quantization": "fp8"})) == {"head_dtype", "quantization_config"}
    assert overrides({"dtype": "float32"}) == {}
    assert overrides({}, on_cpu=True) == overrides({}, strict=True) == {}
    hf.quantization_config = {"quant_method": "awq"}  # whose head may be quantised, too
    assert overrides({}) == {}


def test_a_frozen_engine_sleeps_and_wakes_with_its_weights(
    qwen3: Path, model: Any, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a judge does on a GPU, where a CPU's engine would keep its weights."""
    engine = VllmEngine(str(qwen3), CONFIG, MAX_MODEL_LEN, topology, frozen=True)
    params = SamplingParams(max_tokens=16)
    try:
        assert worst_error(engine, model, params, n=10) < 1e-5
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(engine, "on_cpu", False)
                engine.sleep()
                engine.sleep()
                held = [*engine.model.parameters(), *engine.runner.kv_caches]
                assert all(tensor.untyped_storage().nbytes() == 0 for tensor in held)
                engine.wake()
            assert worst_error(engine, model, params, n=10) < 1e-5
    finally:
        engine.shutdown()


@pytest.mark.compiles
def test_a_compiled_engine_samples_by_the_weights_that_are_pushed(
    qwen3: Path, model: Any, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    from copy import deepcopy

    compiled = replace(CONFIG, enforce_eager=False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"enforce_eager=False: torch.compile wants a C\+\+"):
        VllmEngine(str(qwen3), compiled, MAX_MODEL_LEN, topology)
    monkeypatch.undo()
    engine = VllmEngine(str(qwen3), compiled, MAX_MODEL_LEN, topology)
    try:
        assert engine.core.vllm_config.compilation_config.mode != 0
        changed = deepcopy(model)
        with torch.no_grad():
            for parameter in changed.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        for weights in (model, changed):
            engine.load_weights(weights.named_parameters())
            assert worst_error(engine, weights, SamplingParams(max_tokens=16), n=20) < 1e-5
        flip_every_parameter(engine, dict(changed.named_parameters()))
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens .8. must be greater"),
        ({"block_size": 16}, "engine_args={'block_size': 16}: No common block size"),
        ({"block_size": "many"}, "block_size"),
    ],
)
def test_what_vllm_refuses_is_a_mistake_in_the_config(
    qwen3: Path, topology: Topology, given: dict[str, Any], said: str
) -> None:
    from vllm.distributed import parallel_state

    live = VllmEngine.live
    with pytest.raises(ConfigError, match=said):
        VllmEngine(str(qwen3), replace(CONFIG, engine_args=given), MAX_MODEL_LEN, topology)
    assert VllmEngine.live == live
    assert (parallel_state._WORLD is None) == (live == 0)  # the next engine starts from none


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"engine_args": {"max_num_batched_token": 64}}, "did you mean 'max_num_batched_tokens'"),
        ({"engine_args": {"quantization": "fp8"}}, "may be set: async_scheduling, "),
    ],
)
def test_what_vllm_is_not_to_be_told(config: dict[str, Any], said: str) -> None:
    check_engine_args(replace(CONFIG, engine_args={"block_size": 16}), strict=False)
    check_engine_args(CONFIG, strict=True)
    with pytest.raises(ConfigError, match=said):
        check_engine_args(replace(CONFIG, **config), strict=False)
    with pytest.raises(ConfigError, match="leave them out"):
        check_engine_args(replace(CONFIG, engine_args={"block_size": 16}), strict=True)


EIGHT = Qwen3MoeConfig(num_experts=8)


@pytest.mark.parametrize(
    ("hf", "config", "said"),
    [
        (Qwen3Config(), {"tensor_parallel": 2}, "model type 'qwen3' has no routed experts"),
        (EIGHT, {"tensor_parallel": 1}, "tensor_parallel=1 has no effect"),
        (EIGHT, {"tensor_parallel": 3}, "does not divide the 8 experts"),
        (EIGHT, {"tensor_parallel": 2, "quantization": "fp8"}, "quantised weights"),
        (EIGHT, {"tensor_parallel": 2, "engine": "hf"}, "is vLLM's: set rollout.engine='vllm'"),
    ],
)
def test_experts_that_cannot_be_spread(hf: Any, config: dict[str, Any], said: str) -> None:
    given = replace(CONFIG, expert_parallel=True, **config)
    check = check_expert_parallel if given.engine == "vllm" else check_any
    with pytest.raises(ConfigError, match=said):
        check(hf, given)
    check_expert_parallel(EIGHT, replace(CONFIG, expert_parallel=True, tensor_parallel=4))


def check_any(hf: Any, config: RolloutConfig) -> None:
    check_engine("folder", hf, config, False)


def test_vllm_is_not_to_replace_torchs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """What replaces aten::linear has no gradient."""
    for value in ("", "0"):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
        check(CONFIG)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ConfigError, match="Unset it, and for log-probabilities that are alike"):
        check(CONFIG)


def test_no_other_backend_has_latent_attention_on_a_cpu() -> None:
    """AMX's would free the weight that pushes write to."""
    latent = DeepseekV3Config()
    config = replace(CONFIG, engine_args={"attention_backend": "AMX_MLA"})
    with pytest.raises(ConfigError, match="which a push would miss; leave it out"):
        check_model_type(latent, config)
    check_model_type(latent, replace(CONFIG, engine_args={"attention_backend": "CPU_MLA"}))
