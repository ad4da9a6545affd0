"""vLLM's engine on a GPU in bfloat16: CUDA graphs, asynchronous scheduling, sleep, new weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_models import CHARS, save_qwen3

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not torch.cuda.is_available() or find_spec("vllm") is None,
        reason="needs an NVIDIA GPU and vLLM",
    ),
    pytest.mark.timeout(300),
]

LIMIT = 400
CACHE_MIB = 4096
SHAPE = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def topology() -> Iterator[Any]:
    from spmdrl.distributed.topology import Topology

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # fmt: skip
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")  # as process.py
    yield Topology.build(device, dp=1, tp=1)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Of two models of one shape."""
    return tuple(
        str(save_qwen3(tmp_path_factory.mktemp("m"), seed=seed, **SHAPE)) for seed in (0, 1)
    )


def engine_of(folder: str, topology: Any) -> Any:
    from spmdrl.config import RolloutConfig
    from spmdrl.rollout.vllm.engine import VllmEngine

    config = RolloutConfig(max_num_seqs=64, gpu_memory_utilization=0.1, kv_cache_mib=CACHE_MIB)
    return VllmEngine(folder, config, LIMIT, topology)


@pytest.fixture(scope="module")
def engine(folders: tuple[str, str], topology: Any) -> Iterator[Any]:
    built = engine_of(folders[0], topology)
    yield built
    built.shutdown()


def load(folder: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda().eval()


def some_requests(n: int) -> list[Any]:
    from spmdrl.rollout.base import Request

    draw = torch.Generator().manual_seed(n)
    rows = [torch.randint(4, len(CHARS), (2 + i % 40,), generator=draw).tolist() for i in range(n)]
    return [Request(row, 7**i % 2**63) for i, row in enumerate(rows)]


@torch.no_grad()
def forward(model: Any, request: Any, answer: Any, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of the answer's tokens."""
    ids = torch.tensor([[*request.prompt_ids, *answer.token_ids]], device="cuda")
    logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, len(request.prompt_ids) :, None])[:, 0].cpu()


def errors(folder: str, requests: list[Any], answers: list[Any], temperature: float) -> Any:
    """Absolute errors against float32 of the engine's logprobs and of transformers' in bfloat16."""
    exact, rounded = load(folder, torch.float32), load(folder)
    pairs = list(zip(requests, answers, strict=True))
    truth = torch.cat([forward(exact, *pair, temperature) for pair in pairs])
    theirs = torch.cat([forward(rounded, *pair, temperature) for pair in pairs])
    ours = torch.tensor([logprob for answer in answers for logprob in answer.logprobs])
    return (ours - truth).abs(), (theirs - truth).abs()


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_are_those_of_the_distribution_sampled_from(
    engine: Any, folders: tuple[str, str], temperature: float
) -> None:
    from spmdrl.rollout.base import SamplingParams

    assert engine.core.vllm_config.model_config.head_dtype == torch.float32
    requests = some_requests(90)
    params = SamplingParams(temperature=temperature, max_tokens=60, ignore_eos=True)
    answers = engine.generate(requests, params)
    assert [len(answer.token_ids) for answer in answers] == [60] * 90
    ours, theirs = errors(folders[0], requests, answers, temperature)
    assert ours.mean() <= 1.5 * theirs.mean()
    assert ours.max() <= 2 * theirs.max()
    assert len({tuple(answer.token_ids) for answer in answers}) == 90


def test_equal_seeds_give_equal_answers_and_others_do_not(engine: Any) -> None:
    from spmdrl.rollout.base import SamplingParams

    params = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = some_requests(50)
    first = engine.generate(requests, params)
    assert engine.generate(requests, params) == first
    others = engine.generate([replace(r, seed=r.seed + 1) for r in requests], params)
    assert all(a.token_ids != b.token_ids for a, b in zip(first, others, strict=True))


def test_stops_and_limits(engine: Any) -> None:
    from spmdrl.rollout.base import SamplingParams

    requests = some_requests(40)
    params = SamplingParams(max_tokens=100, stop_token_ids=(7,), stop=("a", "bc"), min_tokens=3)
    reasons = set()
    for answer in engine.generate(requests, params):
        text = "".join(CHARS[i] if i > 3 else "" for i in answer.token_ids)
        reasons.add(answer.finish_reason)
        assert len(answer.token_ids) >= 3
        assert 7 not in answer.token_ids[3:-1] and 2 not in answer.token_ids[3:-1]
        if answer.finish_reason == "length":
            assert len(answer.token_ids) == 100
        else:
            assert answer.token_ids[-1] in (2, 7) or text.endswith(("a", "bc"))
    assert "stop" in reasons


def test_requests_come_and_go_while_others_run(engine: Any) -> None:
    """More than are decoded at once; some are taken away, and go on later from where they were."""
    from spmdrl.rollout.base import SamplingParams

    params = SamplingParams(max_tokens=48, ignore_eos=True)
    requests = some_requests(90)
    ids = engine.add(requests[:80], params)
    ended: dict[int, Any] = {}
    for _ in range(12):
        ended.update(engine.step())
    assert not ended
    given = ids[10:30] + ids[70:]
    partial = engine.abort(given)
    assert {answer.finish_reason for answer in partial} == {"abort"}
    begun = [len(answer.token_ids) for answer in partial]
    assert min(begun) == 0 and 0 < max(begun) <= 12
    resumed = [
        replace(requests[ids.index(id)], response_ids=a.token_ids, logprobs=a.logprobs,
                versions=a.versions)
        for id, a in zip(given, partial, strict=True)
    ]  # fmt: skip
    again = engine.add(resumed, params)
    while len(ended) < 80:
        ended.update(engine.step())
    assert engine.num_running == engine.num_waiting == 0 and engine.step() == []
    for id, before in zip(again, partial, strict=True):
        assert ended[id].token_ids[: len(before.token_ids)] == before.token_ids
        assert len(ended[id].token_ids) == len(ended[id].logprobs) == 48


def test_new_weights_are_used_proven_and_versioned(engine: Any, folders: tuple[str, str]) -> None:
    """Also by answers that are under way: their prefixes are computed anew."""
    from spmdrl.rollout.base import SamplingParams, WeightMismatch

    models = [load(folder) for folder in folders]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = some_requests(30)
    assert engine.check_weights(iter(models[0].state_dict().items())) > 20
    with pytest.raises(WeightMismatch):
        engine.check_weights(iter(models[1].named_parameters()))
    engine.policy_version = 5
    ids = engine.add(requests, params)
    for _ in range(10):
        engine.step()
    engine.load_weights(models[1].named_parameters())
    engine.policy_version = 6
    ended: dict[int, Any] = {}
    while len(ended) < len(ids):
        ended.update(engine.step())
    engine.check_weights(iter(models[1].named_parameters()))
    engine.load_weights(models[0].named_parameters())
    for id, request in zip(ids, requests, strict=True):
        answer = ended[id]
        old = answer.versions.count(5)
        assert 0 < old <= 11 and answer.versions == [5] * old + [6] * (40 - old)
        ours = torch.tensor(answer.logprobs)
        before, after = (forward(model, request, answer) for model in models)
        # of asynchronous scheduling, one pass may have begun before the weights came
        assert (ours[: old - 1] - before[: old - 1]).abs().max() < 0.05
        assert (ours[old + 1 :] - after[old + 1 :]).abs().max() < 0.05
        assert (before[old:] - after[old:]).abs().max() > 0.1


def test_sleep_gives_memory_back_and_waking_brings_all_of_it(
    engine: Any, folders: tuple[str, str]
) -> None:
    from vllm.device_allocator.cumem import CuMemAllocator

    from spmdrl.rollout.base import SamplingParams

    params = SamplingParams(max_tokens=40, ignore_eos=True)
    before = engine.generate(some_requests(30), params)
    # neither a parameter nor a buffer, in memory that a sleep drops
    with CuMemAllocator.get_instance().use_memory_pool(tag="weights"):
        numbers = torch.arange(1 << 20, device="cuda")
    engine.model.of_a_layer = [numbers]
    for _ in range(2):
        awake = torch.cuda.mem_get_info()[0]
        engine.sleep()
        freed = torch.cuda.mem_get_info()[0] - awake
        assert freed > CACHE_MIB << 20  # and the weights
        engine.wake()
        assert torch.equal(numbers, torch.arange(1 << 20, device="cuda"))
        engine.load_weights(load(folders[0]).named_parameters())
        assert engine.generate(some_requests(30), params) == before
    del engine.model.of_a_layer


def test_an_engine_works_beside_whatever_stream_calls_it(engine: Any) -> None:
    from spmdrl.rollout.base import SamplingParams

    params = SamplingParams(max_tokens=40, ignore_eos=True)
    before, now = engine.generate(some_requests(30), params), torch.cuda.current_stream()
    assert now == torch.cuda.default_stream()
    with torch.cuda.stream(torch.cuda.Stream()):
        callers = torch.cuda.current_stream()
        assert engine.generate(some_requests(30), params) == before
        assert torch.cuda.current_stream() == callers
    assert torch.cuda.current_stream() == now


def test_weights_that_the_trainer_sends_arrive(
    engine: Any, folders: tuple[str, str], topology: Any
) -> None:
    """By the resharding that a run does, through sleep, each time compared bit by bit."""
    from spmdrl.config import TrainConfig, WeightsConfig
    from spmdrl.distributed.topology import Topology
    from spmdrl.engines.fsdp.engine import FsdpEngine
    from spmdrl.rollout.base import SamplingParams
    from spmdrl.training.weight_sync import WeightSync

    ranks = Topology.build(topology.device, dp=1, fsdp=-1)
    actor = FsdpEngine.build("policy", folders[1], TrainConfig(), ranks)
    sync = WeightSync(actor, ranks, engine, topology, "bfloat16", WeightsConfig(check=True))
    for _ in range(2):
        engine.sleep()
        engine.wake()
        sync.push()  # and compares
    assert sync.check() > 20
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = some_requests(30)
    answers = engine.generate(requests, params)
    ours, theirs = errors(folders[1], requests, answers, 1.0)
    assert ours.mean() <= 1.5 * theirs.mean()
