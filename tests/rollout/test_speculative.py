"""Speculative decoding changes how many passes an answer takes, and no answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numba
import pytest
import torch
from programs import metrics_of, set_up, train
from rollout_checks import forward_logprobs, load_hf, push_in_place, some_requests, worst_error
from tiny_models import CHARS, save_qwen3
from transformers import Qwen3NextConfig

from spmdrl.config import ConfigError, LoraConfig, RolloutConfig
from spmdrl.distributed.topology import Topology
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.rollout.base import Completion, Request, SamplingParams
from spmdrl.rollout.build import check_adapter, check_engine
from spmdrl.rollout.vllm import speculative
from spmdrl.rollout.vllm.engine import VllmEngine
from spmdrl.rollout.vllm.model_types import check_routed_experts

CONFIG = RolloutConfig(dtype="float32", max_num_seqs=32, kv_cache_mib=64)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2,
         "prompt_lookup_min": 1}  # fmt: skip
PARAMS = {
    "plain": SamplingParams(max_tokens=40),
    "greedy": SamplingParams(temperature=0.0, max_tokens=60),
    "cut": SamplingParams(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1,
                          min_tokens=20, max_tokens=40),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(qwen3: Path) -> Any:
    return load_hf(qwen3)


@pytest.fixture(scope="module")
def expected(qwen3: Path, model: Any, topology: Topology) -> Iterator[Any]:
    """An engine without speculation, with the weights of `model`."""
    engine = VllmEngine(str(qwen3), CONFIG, 400, topology, load_weights=False)
    push_in_place(engine, dict(model.named_parameters()))
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module", params=["ngram", "draft model"])
def engine(
    request: pytest.FixtureRequest, qwen3: Path, model: Any, topology: Topology
) -> Iterator[Any]:
    """The draft model is the policy as it was before it was trained."""
    draft = {"model": str(qwen3), "num_speculative_tokens": 4}
    config = replace(CONFIG, speculative=NGRAM if request.param == "ngram" else draft)
    engine = VllmEngine(str(qwen3), config, 400, topology, load_weights=False)
    push_in_place(engine, dict(model.named_parameters()))
    yield engine
    engine.shutdown()


def answers(
    engine: Any, requests: list[Request], params: SamplingParams
) -> tuple[list[Completion], int]:
    """Returns the answers, and how many passes the engine took."""
    ids, ended, passes = engine.add(requests, params), {}, 0
    while len(ended) < len(ids):
        ended |= dict(engine.step())
        passes += 1
    return [ended[id] for id in ids], passes


def equal(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert torch.tensor(one.logprobs).sub(torch.tensor(other.logprobs)).abs().max() < 1e-5


@pytest.mark.vllm
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_answers_are_those_without_speculation(
    request: pytest.FixtureRequest, engine: Any, expected: Any, params: SamplingParams
) -> None:
    requests = some_requests(24)
    found, passes = answers(engine, requests, params)
    without, one_by_one = answers(expected, requests, params)
    equal(found, without)
    if params.temperature == 0:
        assert passes < one_by_one / 2 == 30
    if request.node.callspec.params["engine"] == "ngram":  # and not OpenMP, beside torch
        assert numba.threading_layer() == "workqueue"


@pytest.mark.vllm
def test_stop_strings_and_begun_answers(engine: Any, expected: Any) -> None:
    """A stop string is found within the tokens of one pass, and none behind it is kept."""
    requests = some_requests(8)
    (whole,), _ = answers(expected, requests[:1], PARAMS["greedy"])
    text = "".join(CHARS[token] for token in whole.token_ids)
    stop = replace(PARAMS["greedy"], stop=(text[9:12],))
    found, _ = answers(engine, requests, stop)
    equal(found, answers(expected, requests, stop)[0])
    assert found[0].finish_reason == "stop" and len(found[0].token_ids) <= 12
    begun = [
        replace(request, response_ids=answer.token_ids[:7], logprobs=answer.logprobs[:7],
                versions=[0] * 7)
        for request, answer in zip(requests, answers(expected, requests, PARAMS["plain"])[0],
                                   strict=True)
        if len(answer.token_ids) > 7
    ]  # fmt: skip
    assert begun
    equal(*(answers(each, begun, PARAMS["plain"])[0] for each in (engine, expected)))


@pytest.mark.vllm
def test_new_weights_reach_answers_that_are_under_way(engine: Any, model: Any, qwen3: Path) -> None:
    """Their later tokens are of the new weights, whose log-probabilities are those of a pass."""
    changed = load_hf(qwen3)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    requests, params = some_requests(12), SamplingParams(max_tokens=30, ignore_eos=True)
    ids, ended = engine.add(requests, params), {}
    for _ in range(3):
        engine.step()
    push_in_place(engine, dict(changed.named_parameters()))
    engine.policy_version = 1
    while len(ended) < len(ids):
        ended |= dict(engine.step())
    for id, request in zip(ids, requests, strict=True):
        answer = ended[id]
        assert answer.versions == sorted(answer.versions) and set(answer.versions) == {0, 1}
        away = torch.tensor(answer.logprobs) - forward_logprobs(changed, request, answer, params)
        assert away[answer.versions.index(1) :].abs().max() < 1e-5
    assert worst_error(engine, changed, params) < 1e-5
    push_in_place(engine, dict(model.named_parameters()))
    engine.policy_version = 0


@pytest.mark.ranks
@pytest.mark.vllm
def test_a_run_has_the_numbers_of_one_without(tmp_path: Path, qwen3: Path) -> None:
    set_up(tmp_path, qwen3)
    asked = ["--config", "cfg.py", "--rollout.engine", "vllm", "--rollout.tensor_parallel", "2"]
    draft, found = {"model": str(qwen3), "num_speculative_tokens": 2}, []
    for more in ([], ["--rollout.speculative", str(draft)]):
        run = f"runs/{len(found)}"
        done = train(tmp_path, 2, *asked, "--steps", "2", "--run_dir", run, *more)
        assert done.code == 0, done.output[-4000:]
        found.append(metrics_of(tmp_path / run)[-1])
    for name in ("reward/mean", "response/mean_tokens", "actor/loss", "actor/grad_norm"):
        assert found[0][name] == pytest.approx(found[1][name], abs=1e-5), name


def refused(model: Path, given: Mapping[str, Any], strict: bool = False, **fields: Any) -> str:
    config = RolloutConfig(speculative=given, **fields)
    with pytest.raises(ConfigError) as raised:
        check_engine(str(model), load_hf_config(str(model)), config, strict)
    return str(raised.value)


def test_what_would_not_be_right_is_refused(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "set rollout.engine='vllm'" in refused(qwen3, NGRAM, engine="hf")
    assert "strict=True" in refused(qwen3, NGRAM, strict=True)
    assert "min_p" in refused(qwen3, NGRAM, min_p=0.1)
    assert "weight pushes do not reach" in refused(qwen3, NGRAM | {"method": "eagle"})
    assert "is missing" in refused(qwen3, {"method": "ngram"})
    assert "['model_name'] are not known" in refused(qwen3, NGRAM | {"model_name": "x"})
    assert "whole number above 0" in refused(qwen3, NGRAM | {"num_speculative_tokens": 0})
    other = save_qwen3(tmp_path / "other", vocab_size=len(CHARS) + 7)
    draft = {"num_speculative_tokens": 2, "model": str(other)}
    assert f"has {len(CHARS) + 7} tokens" in refused(qwen3, draft)
    with monkeypatch.context() as patch:
        patch.setattr(speculative, "runs_on_cpu", lambda: False)
        assert "set rollout.sleep=False" in refused(qwen3, draft)
    assert "there is no model" in refused(qwen3, draft | {"model": str(tmp_path)})
    Qwen3NextConfig().save_pretrained(tmp_path / "state")
    assert "carry a state" in refused(tmp_path / "state", NGRAM)
    config, hf = RolloutConfig(speculative=NGRAM), load_hf_config(str(qwen3))
    with pytest.raises(ConfigError, match=r"weights\.lora='adapter' was not tried"):
        check_adapter(LoraConfig(), config, hf)
    with pytest.raises(ConfigError, match="router_replay was not tried"):
        check_routed_experts(hf, config)
