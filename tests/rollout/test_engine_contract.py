"""What every rollout engine must keep, against a plain forward pass, in one process.

Runs for each engine that is installed: vLLM and transformers in the environment for tests, SGLang
in one of its own (docs/sglang.md says how, and what was run). Tensor parallelism is in
test_rollout_ranks.py.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from rollout_checks import (
    ENGINE_PARAMS,
    EOS,
    INSTALLED,
    engine_class,
    flip_every_parameter,
    forward_logprobs,
    load_hf,
    push_in_place,
    rng_states,
    some_requests,
    worst_error,
)
from spmdrl_kernels.device import allows_tf32
from tiny_models import CHARS, save_qwen3

from spmdrl.config import ConfigError, RolloutConfig
from spmdrl.distributed.topology import Topology
from spmdrl.rollout.base import NOT_CHOSEN, Completion, Request, SamplingParams, WeightMismatch
from spmdrl.rollout.process_state import preserved_process
from spmdrl.rollout.sampling import questions_of, sample_questions, training_params
from spmdrl.rollout.scheduler import Scheduler
from spmdrl.rollout.seeds import seed_of
from spmdrl.types import Prompt

pytestmark = pytest.mark.engine

# 80 MiB for each of the two layers. glibc keeps a freed block of up to 32 MiB for the process, so
# with a smaller cache the process would not always shrink when the engine sleeps.
CONFIG = RolloutConfig(dtype="float32", max_num_seqs=64, kv_cache_mib=160)
MAX_MODEL_LEN = 400
ON_GPU = torch.cuda.is_available() and "sglang" in INSTALLED
CLOSE = 1e-3 if ON_GPU else 1e-5  # of float32 logprobs


@pytest.fixture(scope="module")
def topology() -> Iterator[Topology]:
    """Of this process alone, on a GPU where the engine is built for one."""
    device = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if ON_GPU else "gloo", init_method=f"file://{folder}/pg",
            rank=0, world_size=1,
        )  # fmt: skip
        yield Topology.build(device, dp=1, tp=1)
        dist.destroy_process_group()


def process_state() -> dict[str, Any]:
    """What an engine must leave as it was."""
    import llvmlite.binding  # by way of numba, which the scans use: vLLM stumbles over it

    assert sys.modules["llvmlite.binding.ffi"] is llvmlite.binding.ffi
    environment = {n: v for n, v in os.environ.items() if n != "PYTEST_CURRENT_TEST"}
    return {
        "random states": rng_states(), "environment": environment,
        "default group": dist.group.WORLD, "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
    }  # fmt: skip


@pytest.mark.parametrize("older", ["highest", "high", "medium", None])
def test_how_exact_products_of_float32_are_is_put_back(older: str | None) -> None:
    """None: the program has set it by torch's newer options, where the older getter raises. Our
    kernels see what it is.
    """
    matmul, on_cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    try:
        if older is None:
            matmul.fp32_precision = "tf32"
            with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
                torch.get_float32_matmul_precision()
        else:
            torch.set_float32_matmul_precision(older)
        before = matmul.fp32_precision, on_cpu.fp32_precision
        assert allows_tf32() == (older != "highest")
        with preserved_process("vllm"):
            torch.set_float32_matmul_precision("high" if older == "highest" else "highest")
            assert allows_tf32() == (older == "highest")
        assert (matmul.fp32_precision, on_cpu.fp32_precision) == before
        assert older is None or torch.get_float32_matmul_precision() == older
    finally:
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = on_cpu.fp32_precision = "none"  # as torch begins


@pytest.fixture(scope="module", params=ENGINE_PARAMS)
def engine(request: pytest.FixtureRequest, qwen3: Path, topology: Topology) -> Iterator[Any]:
    """Building it, sampling and shutting it down leave the process as it was."""
    torch.manual_seed(3)
    before = process_state()
    built = engine_class(request.param)(str(qwen3), CONFIG, MAX_MODEL_LEN, topology)
    built.generate(some_requests(3), SamplingParams(temperature=1.0, max_tokens=4))
    assert process_state() == before
    yield built
    built.shutdown()
    kept = {"random states": rng_states()}  # the tests themselves draw
    assert process_state() | kept == before | kept
    dist.barrier()


def is_vllm(engine: Any) -> bool:
    return type(engine).__name__ == "VllmEngine"


@pytest.fixture(scope="module")
def model(qwen3: Path) -> Any:
    return load_hf(qwen3)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same shapes as `model` with other weights."""
    return load_hf(save_qwen3(tmp_path_factory.mktemp("other"), seed=1))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, max_tokens=20),
        SamplingParams(temperature=1.0, top_k=5, max_tokens=20),
        SamplingParams(temperature=1.3, top_p=0.6, max_tokens=20),
        SamplingParams(temperature=1.0, top_k=20, top_p=0.8, max_tokens=20),
        SamplingParams(temperature=0.0, max_tokens=20),
        SamplingParams(temperature=1.3, min_p=0.3, max_tokens=20),
        SamplingParams(temperature=0.8, repetition_penalty=1.7, max_tokens=20),
        SamplingParams(
            temperature=0.9, min_p=0.1, repetition_penalty=0.6, top_k=20, top_p=0.9, max_tokens=20
        ),
        SamplingParams(temperature=0.0, repetition_penalty=1.7, max_tokens=20),
    ],
    ids=[
        "temperature",
        "top_k",
        "top_p",
        "top_k and top_p",
        "greedy",
        "min_p",
        "repetition",
        "all",
        "greedy repetition",
    ],
)
def test_logprobs_are_of_the_distribution_sampled_from(
    engine: Any, model: Any, params: SamplingParams
) -> None:
    assert worst_error(engine, model, params) < CLOSE


def test_greedy_takes_the_most_likely_token(engine: Any, model: Any) -> None:
    requests = some_requests(6)
    for request, completion in zip(
        requests,
        engine.generate(requests, SamplingParams(temperature=0, max_tokens=8)),
        strict=True,
    ):
        ids = torch.tensor([request.prompt_ids + completion.token_ids])
        with torch.no_grad():
            best = model(input_ids=ids).logits[0].argmax(-1)[len(request.prompt_ids) - 1 : -1]
        assert best.tolist() == completion.token_ids


def test_a_request_gets_the_same_tokens_alone_and_among_others(engine: Any) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12)
    requests = some_requests(70)  # more than are decoded at once
    together = engine.generate(requests, params)
    assert [c.token_ids for c in engine.generate(requests[::-1], params)][::-1] == [
        c.token_ids for c in together
    ]
    for i in (0, 33, 69):
        alone = engine.generate([requests[i]], params)[0]
        assert alone.token_ids == together[i].token_ids
        if is_vllm(engine):  # so that a run is the same whoever answers what
            assert alone.logprobs == together[i].logprobs
    assert len({tuple(c.token_ids) for c in together}) == 70


def test_long_prompts_prefilled_in_chunks_change_nothing(engine: Any) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=4)
    requests = [Request([4 + (i * k) % 80 for k in range(300)], i) for i in range(1, 13)]
    together = engine.generate(requests, params)
    assert engine.generate([requests[7]], params)[0].token_ids == together[7].token_ids


def test_tokens_are_drawn_with_their_probabilities(engine: Any, model: Any) -> None:
    prompt, n = [5, 6, 7], 3000
    requests = [Request(prompt, seed_of(0, 0, 0, i)) for i in range(n)]
    # small steps between seeds and lengths must not correlate: take the second token's noise
    params = SamplingParams(temperature=0.5, max_tokens=1)
    drawn = torch.tensor([c.token_ids[0] for c in engine.generate(requests, params)])
    with torch.no_grad():
        expected = n * (model(input_ids=torch.tensor([prompt])).logits[0, -1] / 0.5).softmax(-1)
    counts = drawn.bincount(minlength=len(CHARS)).float()
    chi2 = ((counts - expected) ** 2 / expected).sum().item()
    degrees = len(CHARS) - 1
    assert abs(chi2 - degrees) < 5 * (2 * degrees) ** 0.5, chi2


def test_eos_ends_a_sequence_and_is_included(engine: Any) -> None:
    completions = engine.generate(some_requests(64), SamplingParams(temperature=1.0, max_tokens=60))
    assert any(c.finish_reason == "stop" for c in completions)
    for c in completions:
        assert EOS not in c.token_ids[:-1]
        assert (c.token_ids[-1] == EOS) == (c.finish_reason == "stop")
        assert len(c.token_ids) == len(c.logprobs)
        assert c.finish_reason == "stop" or len(c.token_ids) == 60


def test_ignore_eos_and_min_tokens(engine: Any) -> None:
    requests = some_requests(64)
    ignoring = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True)
    completions = engine.generate(requests, ignoring)
    assert {len(c.token_ids) for c in completions} == {60}
    assert any(EOS in c.token_ids for c in completions)
    late = SamplingParams(temperature=1.0, max_tokens=60, min_tokens=20)
    completions = engine.generate(requests, late)
    assert all(EOS not in c.token_ids[:20] for c in completions)
    assert any(EOS in c.token_ids for c in completions)


def test_stop_token_ids_and_stop_strings(engine: Any) -> None:
    requests = some_requests(8)
    free = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True)
    unstopped = [c.token_ids for c in engine.generate(requests, free)]
    stop_id = unstopped[0][10]
    stopped = engine.generate(
        requests, SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=(stop_id,))
    )
    for ids, c in zip(unstopped, stopped, strict=True):
        end = ids.index(stop_id) + 1 if stop_id in ids else 30
        assert c.token_ids == ids[:end]
        assert c.finish_reason == ("stop" if stop_id in ids else "length")

    texts = ["".join(CHARS[i] if i > 3 else "" for i in ids) for ids in unstopped]
    stop = texts[0][12:14]
    for min_tokens in (0, 20):
        stopped = engine.generate(
            requests,
            SamplingParams(max_tokens=30, min_tokens=min_tokens, ignore_eos=True, stop=(stop,)),
        )
        for ids, c in zip(unstopped, stopped, strict=True):
            assert c.token_ids == ids[: first_stop(ids, stop, min_tokens)]
    assert len(stopped[0].token_ids) > 20
    assert first_stop(unstopped[0], stop, 0) < 20


def first_stop(ids: list[int], stop: str, min_tokens: int) -> int:
    """Number of tokens after which the text newly ends in `stop`."""
    for n in range(min_tokens + 1, len(ids) + 1):
        if "".join(CHARS[i] if i > 3 else "" for i in ids[:n]).endswith(stop) and ids[n - 1] > 3:
            return n
    return len(ids)


def step_until_ended(engine: Any, ids: list[int], num_steps: int = 10**6) -> dict[int, Completion]:
    ended: dict[int, Completion] = {}
    while len(ended) < len(ids) and num_steps:
        ended.update(engine.step())
        num_steps -= 1
    return ended


def same_answers(engine: Any, got: list[Completion], expected: list[Completion]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        assert a.logprobs == pytest.approx(b.logprobs, abs=CLOSE)
        assert not is_vllm(engine) or a.logprobs == b.logprobs
        assert len(a.versions) == len(a.token_ids)


def begun(request: Request, answer: Completion, num_tokens: int) -> Request:
    return replace(
        request,
        response_ids=answer.token_ids[:num_tokens],
        logprobs=answer.logprobs[:num_tokens],
        versions=answer.versions[:num_tokens],
    )


def test_an_answer_begun_elsewhere_goes_on_as_if_never_interrupted(engine: Any) -> None:
    requests = [replace(r, max_tokens=30 + i) for i, r in enumerate(some_requests(12))]
    free = engine.generate(requests, SamplingParams(max_tokens=60, ignore_eos=True))
    texts = ["".join(CHARS[i] if i > 3 else "" for i in c.token_ids) for c in free]
    stop = texts[0][11:14]
    assert first_stop(free[0].token_ids, stop, 0) in (14, 15)  # so that a seam cuts it
    for params in (
        SamplingParams(max_tokens=60, stop=(stop,), ignore_eos=True),
        SamplingParams(max_tokens=60, min_tokens=20, stop=(stop,)),
        SamplingParams(max_tokens=60, top_k=12, top_p=0.9, ignore_eos=True),
        SamplingParams(max_tokens=60, min_p=0.1, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=60),
    ):
        whole = engine.generate(requests, params)
        assert not params.stop or any(c.finish_reason == "stop" for c in whole)
        for seam in (1, 12, 13, 14, 20):
            left = [i for i, c in enumerate(whole) if len(c.token_ids) > seam]
            again = [begun(requests[i], whole[i], seam) for i in left]
            assert left
            same_answers(engine, engine.generate(again, params), [whole[i] for i in left])
    with pytest.raises(ValueError, match="answer of 30 tokens leaves nothing"):
        engine.add([begun(requests[0], free[0], 30)], SamplingParams(max_tokens=60))
    with pytest.raises(ValueError, match="3 tokens, 0 logprobs"):
        engine.add([replace(requests[0], response_ids=(7, 8, 9))], SamplingParams(max_tokens=60))


def test_a_stop_string_is_one_of_the_turn_that_is_said(engine: Any) -> None:
    """Not of what it makes with the end of the reply before it."""
    begun, reply = [10, 11, EOS], [20, 21]  # one character a token
    talk = replace(
        some_requests(1)[0], response_ids=[*begun, *reply], logprobs=[-1.0] * 5,
        versions=[0] * 3 + [NOT_CHOSEN] * 2, replies=["[]"],
    )  # fmt: skip
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    [whole] = engine.generate([talk], params)
    assert whole.replies == ["[]"] and whole.token_ids[:5] == talk.response_ids
    said = [CHARS[token] for token in whole.token_ids[5:]]
    across, within = CHARS[21] + said[0], said[3] + said[4]
    [stopped] = engine.generate([talk], replace(params, stop=(across,)))
    assert len(stopped.token_ids) > 6
    [stopped] = engine.generate([talk], replace(params, stop=(within,)))
    assert stopped.finish_reason == "stop" and len(stopped.token_ids) <= 10


def test_requests_come_and_go_while_others_run(engine: Any) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    requests = some_requests(90)  # more than are decoded at once
    expected = engine.generate(requests, params)
    ids = engine.add(requests[:80], params)
    assert step_until_ended(engine, ids, 5) == {}
    assert (engine.num_running, engine.num_waiting) == (64, 16)
    given = ids[10:30] + ids[70:]
    partial = engine.abort(given)
    assert {len(c.token_ids) for c in partial} == {0, 5}
    assert {c.finish_reason for c in partial} == {"abort"}
    for c, whole in zip(partial, expected[10:30] + expected[70:80], strict=True):
        assert c.token_ids == whole.token_ids[: len(c.token_ids)]
    resumed = [
        begun(requests[ids.index(id)], c, len(c.token_ids))
        for id, c in zip(given, partial, strict=True)
    ]
    ids += engine.add(resumed, params)
    ids += engine.add(requests[80:], replace(params, max_tokens=3))
    ended = step_until_ended(engine, [id for id in ids if id not in given])
    assert engine.num_running == engine.num_waiting == 0 and engine.step() == []
    same_answers(
        engine, [ended[id] for id in ids[:80] if id in ended], expected[:10] + expected[30:70]
    )
    same_answers(engine, [ended[id] for id in ids[80:110]], expected[10:30] + expected[70:80])
    for id, whole in zip(ids[110:], expected[80:], strict=True):
        assert ended[id].token_ids == whole.token_ids[:3]


def test_every_token_is_of_the_weights_of_its_version(engine: Any, model: Any, other: Any) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = some_requests(70)
    engine.policy_version = 3
    ids = engine.add(requests, params)
    step_until_ended(engine, ids, 8)
    engine.load_weights(other.named_parameters())
    engine.policy_version = 4
    ended = step_until_ended(engine, ids)
    engine.load_weights(model.named_parameters())
    for id, request in zip(ids, requests, strict=True):
        answer = ended[id]
        old = answer.versions.count(3)  # none, where there was no place for it before
        assert old in (0, 8) and answer.versions == [3] * old + [4] * (20 - old)
        before, after = (forward_logprobs(m, request, answer, params) for m in (model, other))
        expected = torch.cat([before[:old], after[old:]])
        assert (expected - torch.tensor(answer.logprobs)).abs().max() < CLOSE
        assert (before[8:] - after[8:]).abs().max() > 1e-3
    assert sum(3 in c.versions for c in ended.values()) == 64


def test_impossible_lengths_are_refused_with_their_numbers(engine: Any) -> None:
    with pytest.raises(ValueError, match=r"4 tokens and max_tokens=397 make 401.*=400"):
        engine.generate([Request([5, 6, 7, 8], 0)], SamplingParams(max_tokens=397))
    with pytest.raises(ValueError, match="no tokens"):
        engine.generate([Request([], 0)], SamplingParams(max_tokens=3))
    with pytest.raises(ValueError, match="min_tokens=9"):
        engine.generate([Request([5], 0)], SamplingParams(max_tokens=3, min_tokens=9))
    assert engine.generate([], SamplingParams(max_tokens=3)) == []


def test_new_weights_are_used_and_proven(engine: Any, model: Any, other: Any) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16)
    assert engine.check_weights(model.named_parameters()) == 24
    with pytest.raises(WeightMismatch, match=r"embed_tokens\.weight differs"):
        engine.check_weights(other.named_parameters())
    engine.generate(some_requests(12), params)  # leaves prefixes in the cache
    engine.load_weights(other.state_dict().items())  # with the tied lm_head named too
    assert worst_error(engine, other, params) < CLOSE
    assert engine.check_weights(other.named_parameters()) == 24
    push_in_place(engine, dict(model.named_parameters()))
    assert engine.check_weights(model.named_parameters()) == 24
    assert worst_error(engine, model, params) < CLOSE
    with pytest.raises(ValueError, match=r"not given.*model\.norm\.weight"):
        engine.load_weights((n, p) for n, p in model.named_parameters() if n != "model.norm.weight")


def test_a_flipped_element_is_named(engine: Any, model: Any) -> None:
    flip_every_parameter(engine, dict(model.state_dict()))


def test_a_parameter_that_was_not_given_is_named(engine: Any, model: Any) -> None:
    given = ((n, p) for n, p in model.named_parameters() if "layers.1.self_attn.v_proj" not in n)
    with pytest.raises(WeightMismatch, match=r"accounts for .*layers\.1\.self_attn\.(qkv|v)_proj"):
        engine.check_weights(given)
    with pytest.raises(WeightMismatch, match="no place"):
        engine.check_weights(iter([("model.layers.9.mlp.up_proj.weight", torch.zeros(2, 2))]))
    short = ((n, p[:-1] if "embed" in n else p) for n, p in model.named_parameters())
    with pytest.raises(WeightMismatch):
        engine.check_weights(short)


def resident_mib() -> int:
    """Memory of the process, without holes in malloc's heap: where earlier tests have left a large
    one, the KV cache is made in it, and stays resident when it is freed.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)
    return psutil.Process().memory_info().rss >> 20


def test_sleep_gives_memory_back_and_changes_no_answer(engine: Any, model: Any) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16)
    before = engine.generate(some_requests(12), params)
    engine.sleep()
    engine.wake()
    awake_mib = resident_mib()
    engine.sleep()
    asleep_mib = resident_mib()
    if type(engine).__name__ != "HfEngine" and not ON_GPU:
        assert awake_mib - asleep_mib > 0.8 * CONFIG.kv_cache_mib
    engine.wake()
    if ON_GPU and type(engine).__name__ != "HfEngine":
        push_in_place(engine, dict(model.named_parameters()))
    assert engine.generate(some_requests(12), params) == before


def test_samples_carry_their_address(engine: Any, topology: Topology, qwen3: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(qwen3)
    prompts = [
        (group, Prompt(id=100 + group, token_ids=[5, 6 + group], data_source="t",
                       ground_truth=None, text=""))
        for group in range(3)
    ]  # fmt: skip
    params, scheduler = training_params(RolloutConfig(max_tokens=30)), Scheduler(engine, topology)

    def sample(purpose: str, step: int = 4) -> list[Any]:
        questions = questions_of(prompts, 2, run_seed=1, step=step, purpose=purpose)
        return sample_questions(scheduler, questions, params, tokenizer=tokenizer)[0]

    engine.policy_version = 9
    samples = sample("train")
    assert [(s.group, s.index, s.prompt.id) for s in samples] == [
        (g, i, 100 + g) for g in range(3) for i in range(2)
    ]
    for s in samples:
        assert s.policy_version == [9] * len(s.response_ids)
        assert s.loss_mask == [1] * len(s.response_ids) and s.reward is None
        assert s.response == "".join(CHARS[i] for i in s.response_ids if i > 3)
    alone = engine.generate([Request([5, 8], seed_of(1, 4, 102, 1))], params)[0]
    assert alone.token_ids == samples[-1].response_ids
    assert alone.logprobs == pytest.approx(samples[-1].rollout_logprobs)
    assert [s.response for s in sample("eval")] != [s.response for s in samples]
    assert [s.response for s in sample("train", step=5)] != [s.response for s in samples]


def test_tensor_parallel_must_be_what_the_topology_has(qwen3: Path, topology: Topology) -> None:
    config = RolloutConfig(tensor_parallel=2)
    for name in INSTALLED:
        with pytest.raises(ConfigError, match="tensor_parallel=2"):
            engine_class(name)(str(qwen3), config, 64, topology)


def test_a_part_of_padding_alone_is_no_difference():
    """Of a small vocabulary, on the last of several tensor-parallel ranks."""
    from spmdrl.rollout.weight_check import ExpectedSlice, compare

    compare(
        "lm_head.weight", ExpectedSlice("lm_head.weight", torch.empty(0, 64), torch.empty(0, 64))
    )
