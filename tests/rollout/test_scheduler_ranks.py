"""Rounds over engines on any ranks: the same answers, each once, wherever they were made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import run_calls, run_ranks
from tiny_models import save_qwen3

pytestmark = [pytest.mark.ranks, pytest.mark.strict_nccl]

SUBSETS = {  # name: (ranks of the job, engine, tp)
    "alone": ((0,), "vllm", 1),
    "one and three": ((1, 3), "vllm", 1),
    "tp in the middle": ((1, 2), "vllm", 2),
    "two by two": ((0, 1, 2, 3), "vllm", 2),
    "hf": ((0, 2, 3), "hf", 1),
}
NUM, SEQS = 64, 24


def long_first(num: int = NUM) -> list[Any]:
    """The first quarter takes ten times as long as the rest, so engine 0 begins with more."""
    from spmdrl.rollout.base import Request

    return [
        Request([5 + i % 60, 6, 7], seed=i, max_tokens=60 if i < num // 4 else 6)
        for i in range(num)
    ]


def _subsets(topology: Any, folder: str, other: str) -> dict[str, Any]:
    """By subset: what this rank's scheduler gave, in three rounds."""
    import torch
    import torch.distributed as dist
    from rollout_checks import load_hf
    from torch.distributed.distributed_c10d import _get_default_store

    from spmdrl.config import RolloutConfig
    from spmdrl.distributed.topology import Topology
    from spmdrl.rollout.base import SamplingParams
    from spmdrl.rollout.build import build_engine
    from spmdrl.rollout.scheduler import Scheduler

    store, results, prefixes = _get_default_store(), {}, []
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    for name, (ranks, engine_name, tp) in SUBSETS.items():
        place = Topology.build(torch.device("cpu"), ranks, dp=-1, tp=tp)
        config = RolloutConfig(
            engine=engine_name, dtype="float32", max_num_seqs=SEQS, kv_cache_mib=16,
            tensor_parallel=tp,
        )  # fmt: skip
        engine = build_engine(folder, config, 100, place)
        count = torch.tensor([torch.distributed.distributed_c10d._world.group_count])
        everyone = [torch.empty_like(count) for _ in range(topology.world)]
        dist.all_gather(everyone, count)
        assert len({int(c) for c in everyone}) == 1
        across = dist.new_group()  # a group of the caller's, made after the engine's own
        dist.all_reduce(count, group=across)
        assert (engine is not None) == place.here
        if engine is not None:
            scheduler = Scheduler(engine, place)
            prefixes.append(scheduler.prefix)
            results[name] = three_rounds(scheduler, params, load_hf(Path(other)))
            engine.shutdown()
        dist.all_reduce(count, group=across)
        dist.barrier()
        names = ("next", "done", "log", "complete", "until")
        keys = [f"{number}/{name}" for number in (1, 2, 3) for name in names]
        left = [key for key in keys if prefixes and store.check([f"{prefixes[-1]}/{key}"])]
        assert not left, left
    assert len(set(prefixes)) == len(prefixes)
    return results


def three_rounds(scheduler: Any, params: Any, other: Any) -> dict[str, Any]:
    """A whole round; one that ends after half of the groups and is gone on with; one in which the
    weights change."""
    from spmdrl.rollout.answer_codec import resume, share
    from spmdrl.rollout.scheduler_messages import StopCondition

    requests, engine = long_first(), scheduler.engine
    whole = scheduler.run(requests, params)
    assert not whole.unfinished

    stop_condition = StopCondition([i // 4 for i in range(NUM)], enough=4)
    early = scheduler.run(requests, params, stop_condition)
    finished, left = (
        share(early.finished, scheduler.topology),
        share(early.unfinished, scheduler.topology),
    )
    assert sorted([*finished, *left]) == list(range(NUM))
    complete = [g for g in range(NUM // 4) if all(4 * g + k in finished for k in range(4))]
    assert len(complete) >= 4 and left
    positions = list(left)
    rest = scheduler.run([resume(requests[i], left[i]) for i in positions], params)
    continued = {positions[i]: c for i, c in rest.finished.items()}
    continued |= early.finished

    boundaries = [0]

    def arrived() -> bool:  # on the first rank alone
        boundaries[0] += 1
        return boundaries[0] == 4

    def load() -> None:
        engine.load_weights(other.named_parameters())
        engine.policy_version += 1

    mixed = scheduler.run(requests, params, new_weights=arrived, load_weights=load)
    assert engine.policy_version == 1
    return {
        "whole": whole.finished, "continued": continued, "begun": left,
        "mixed": mixed.finished,
    }  # fmt: skip


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("other"), seed=1)


@pytest.mark.vllm
def test_engines_on_any_ranks_give_the_answers_of_one(qwen3: Path, other: Path) -> None:
    import torch
    from rollout_checks import forward_logprobs, load_hf

    from spmdrl.rollout.base import SamplingParams

    by_rank = run_ranks(4, _subsets, str(qwen3), str(other), timeout_s=200)
    requests, params = long_first(), SamplingParams(max_tokens=60, ignore_eos=True)
    models = [load_hf(qwen3), load_hf(other)]
    alone = by_rank[0]["alone"]["whole"]
    assert [len(alone[i].token_ids) for i in range(NUM)] == [r.max_tokens for r in requests]
    for name, (ranks, engine, tp) in SUBSETS.items():
        assert [rank for rank in range(4) if name in by_rank[rank]] == list(ranks)
        leaders = [by_rank[rank][name] for rank in ranks[::tp]]
        followers = [by_rank[rank][name] for rank in ranks if rank not in ranks[::tp]]
        assert not any(f["whole"] or f["continued"] or f["mixed"] for f in followers)
        if engine == "hf":  # its noise is another: it is compared with itself
            alone = {i: c for leader in leaders for i, c in leader["whole"].items()}
        for case in ("whole", "continued"):
            together = [i for leader in leaders for i in leader[case]]
            assert sorted(together) == list(range(NUM)), (name, case)  # each once
            for leader in leaders:
                for i, answer in leader[case].items():
                    assert answer.token_ids == alone[i].token_ids, (name, case, i)
                    assert answer.logprobs == pytest.approx(alone[i].logprobs, abs=1e-5)
                    if engine == "vllm" and tp == 1:  # bit for bit, over every seam
                        assert answer.logprobs == alone[i].logprobs
        for i, answer in leaders[0]["begun"].items():
            assert answer.token_ids == alone[i].token_ids[: len(answer.token_ids)]
        seen = set()
        for leader in leaders:
            for i, answer in leader["mixed"].items():
                old = answer.versions.count(0)
                seen.add((old > 0, old < len(answer.versions)))
                assert answer.versions == [0] * old + [1] * (len(answer.versions) - old)
                before, after = (forward_logprobs(m, requests[i], answer, params) for m in models)
                expected = torch.cat([before[:old], after[old:]])
                assert (expected - torch.tensor(answer.logprobs)).abs().max() < 1e-5, (name, i)
        assert (True, True) in seen, (name, seen)  # an answer begun by one and ended by the other


def _carried(topology: Any, folder: str) -> dict[str, Any]:
    """An early stop when most of what was begun before has not been taken by any engine yet."""
    from spmdrl.config import RolloutConfig
    from spmdrl.distributed.topology import Topology
    from spmdrl.rollout.answer_codec import resume, share
    from spmdrl.rollout.base import Completion, Request, SamplingParams
    from spmdrl.rollout.hf.engine import HfEngine
    from spmdrl.rollout.scheduler import Scheduler
    from spmdrl.rollout.scheduler_messages import StopCondition

    place = Topology.build(topology.device, dp=-1, tp=1)
    config = RolloutConfig(engine="hf", dtype="float32", max_num_seqs=4)
    engine = HfEngine(folder, config, 100, place)
    scheduler, params = Scheduler(engine, place), SamplingParams(max_tokens=60, ignore_eos=True)
    requests = [Request([5 + i, 6, 7], seed=i) for i in range(40)]
    whole = share(scheduler.run(requests, params).finished, place)
    begun = {
        i: Completion(c.token_ids[:3], c.logprobs[:3], "abort", c.versions[:3])
        for i, c in whole.items()
    }
    engine.policy_version = 1
    asked = [resume(request, begun[i]) for i, request in enumerate(requests)]
    early = scheduler.run(asked, params, StopCondition([i // 4 for i in range(40)], enough=1))
    left = share(early.unfinished, place)
    rest = scheduler.run([resume(requests[i], c) for i, c in left.items()], params)
    return {"whole": whole, "begun": begun, "left": left, "early": early.finished,
            "rest": {list(left)[k]: c for k, c in rest.finished.items()}}  # fmt: skip


def _failing(topology: Any, folder: str) -> list[str]:
    """A crash in one round, what it says elsewhere, and what it leaves to a second scheduler."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    from spmdrl.config import RolloutConfig
    from spmdrl.distributed.topology import Topology
    from spmdrl.rollout.base import SamplingParams
    from spmdrl.rollout.hf.engine import HfEngine
    from spmdrl.rollout.scheduler import Scheduler

    place = Topology.build(topology.device, dp=-1, tp=1)
    config = RolloutConfig(engine="hf", dtype="float32", max_num_seqs=SEQS)
    engine = HfEngine(folder, config, 100, place)
    requests, params = long_first(), SamplingParams(max_tokens=60, ignore_eos=True)
    calls = [0]

    def fail_later() -> None:
        calls[0] += 1
        if place.rank == 1 and calls[0] == 3:
            raise KeyError("broken")

    first, said = Scheduler(engine, place), ""
    try:
        first.run(requests, params, between_bursts=fail_later)
    except (KeyError, RuntimeError) as error:
        said = str(error)
    dist.barrier()
    assert _get_default_store().check([f"{first.prefix}/1/log"])  # nobody cleared it
    engine.abort(list(engine.answers))
    second = Scheduler(engine, place)
    finished = second.run(requests, params).finished
    answers = torch_sum(len(finished))
    assert answers == NUM and second.prefix != first.prefix

    kept = Scheduler(engine, place, static=True)
    static = kept.run(requests, params).finished
    assert list(static) and set(static) == set(range(32 * place.rank, 32 * place.rank + 32))
    return [said]


def torch_sum(number: int) -> int:
    import torch
    import torch.distributed as dist

    total = torch.tensor([number])
    dist.all_reduce(total)
    return int(total)


@pytest.fixture(scope="module")
def on_two(qwen3: Path) -> list[list[Any]]:
    return run_calls(2, [(_carried, (str(qwen3),)), (_failing, (str(qwen3),))])


def test_what_was_begun_and_is_not_taken_is_left_as_it_was(on_two: list) -> None:
    first, second = on_two[0]
    whole, begun, left = first["whole"], first["begun"], first["left"]
    untaken = [i for i, answer in left.items() if answer == begun[i]]
    assert len(untaken) >= 16  # each engine has room for four, and one waits
    for i, answer in left.items():
        num_tokens = len(answer.token_ids)
        assert 3 <= num_tokens < 60
        assert answer.token_ids == whole[i].token_ids[:num_tokens]
        assert answer.versions == [0] * 3 + [1] * (num_tokens - 3)
    ended = [first["early"], first["rest"], second["early"], second["rest"]]
    assert sorted(i for part in ended for i in part) == list(range(40))
    for i, answer in (item for part in ended for item in part.items()):
        assert answer.token_ids == whole[i].token_ids
        assert answer.versions == [0] * 3 + [1] * 57


def test_a_failed_engine_ends_the_round_and_leaves_nothing_to_the_next(on_two: list) -> None:
    (first,), (second,) = on_two[1]
    assert "another rollout engine failed" in first
    assert "broken" in second
