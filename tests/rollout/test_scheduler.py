"""What the coordinators of engines take from the shared list. The engines are stand-ins."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from spmdrl.rollout.base import Completion, Request, SamplingParams
from spmdrl.rollout.coordinator import EngineCoordinator
from spmdrl.rollout.engine_calls import EngineCall, EngineCalls
from spmdrl.rollout.scheduler_messages import Decision, NoReplies, StopCondition, free_positions

STUB = SimpleNamespace(max_num_seqs=4)  # so 4 run and 1 waits


def coordinator_of(number, store, num_requests, num_engines=2, static=False):
    return EngineCoordinator(
        store, STUB, number, num_engines, [Request([1], seed=i) for i in range(num_requests)],
        StopCondition(), NoReplies(), lambda: False, static=static,
    )  # fmt: skip


def serve_all(coordinators, seconds):
    """Serves every request; seconds[i]: what request i takes. Returns (what each engine answered,
    when each engine ended its last).
    """
    inside = [{} for _ in coordinators]  # position: seconds that are left
    answered = [[] for _ in coordinators]
    ends, now = [0.0] * len(coordinators), 0.0
    while coordinators[0].done < len(seconds):
        for e, coordinator in enumerate(coordinators):
            decision = coordinator.decide(len(inside[e]))
            fresh = range(decision.first, decision.first + decision.count)
            inside[e] |= {i: seconds[i] for i in fresh}
        now += 1
        for e, coordinator in enumerate(coordinators):
            for i in list(inside[e])[: STUB.max_num_seqs]:
                inside[e][i] -= 1
            over = [i for i, left in inside[e].items() if left <= 0]
            coordinator.record({i: Completion([1], [0.0], "stop", [0]) for i in over})
            for i in over:
                del inside[e][i]
                ends[e] = now
            answered[e] += over
        if now > 10 * sum(seconds):
            raise TimeoutError
    return answered, ends


@pytest.mark.parametrize("num_requests", [1, 7, 8, 10, 11, 64, 203])
def test_every_request_is_taken_once(num_requests):
    store = dist.HashStore()
    engines = [coordinator_of(e, store, num_requests, num_engines=3) for e in range(3)]
    seconds = [1 + (5 * i) % 7 for i in range(num_requests)]
    answered, _ = serve_all(engines, seconds)
    assert sorted(i for part in answered for i in part) == list(range(num_requests))


@pytest.mark.parametrize(("num_engines", "num_steps"), [(2, 3), (16, 3), (128, 24), (1024, 32)])
def test_bursts_are_longer_where_many_engines_ask_the_store(num_engines, num_steps):
    """A step takes 20 ms: 3 in the 0.06 s of a burst, 8 times as many with 8 times 16 engines."""
    coordinator = coordinator_of(0, dist.HashStore(), 8, num_engines)
    for _ in range(10):
        coordinator.set_burst_length(coordinator.num_steps, 0.0199 * coordinator.num_steps)
    assert coordinator.num_steps == num_steps


def test_engines_end_at_about_the_same_time_where_one_part_of_the_list_takes_longer():
    """The first half of the list takes ten times as long, so a fixed split has one idle engine."""
    seconds = [10] * 32 + [1] * 32
    ends = {}
    for static in (False, True):
        store = dist.HashStore()
        engines = [coordinator_of(e, store, 64, static=static) for e in range(2)]
        ends[static] = serve_all(engines, seconds)[1]
    assert ends[True] == [80, 8]
    assert max(ends[False]) <= 55  # 352 seconds of work on 8 places are 44
    assert abs(ends[False][0] - ends[False][1]) <= 10  # the longest request


def test_a_static_engine_takes_its_part_and_nothing_else():
    store = dist.HashStore()
    engines = [coordinator_of(e, store, 21, static=True) for e in range(2)]
    assert list(engines[0].take(0)) == list(range(11)) and engines[0].all_taken
    assert list(engines[1].take(0)) == list(range(11, 21)) and engines[1].all_taken
    assert not store.check(["next"])


def test_a_full_engine_learns_that_the_list_is_empty():
    store = dist.HashStore()
    full = coordinator_of(0, store, 24)
    assert list(full.take(0)) == [0, 1, 2, 3, 4]
    store.add("next", 14)  # other engines have taken the rest
    assert full.decide(5).count == 0
    assert full.all_taken


def test_what_awaits_a_reply_leaves_its_place_to_others():
    store = dist.HashStore()
    engine = coordinator_of(0, store, 64)
    assert list(engine.take(0)) == [0, 1, 2, 3, 4]
    assert len(engine.take(0, awaiting=4)) == 5  # all its places, and one that waits
    assert len(engine.take(0, awaiting=30)) == 2  # but no more than its share of all


def test_what_no_engine_took_is_unfinished_on_engine_0():
    store = dist.HashStore()
    engines = [coordinator_of(e, store, 24) for e in range(2)]
    assert engines[0].decide(0).count == 5  # engine 1 has not got its first share yet
    begun = Completion([7], [-0.5], "abort", [0])
    partial = [dict.fromkeys(range(5), begun), {}]
    unfinished = [e.end(p).unfinished for e, p in zip(engines, partial, strict=True)]
    assert sorted(unfinished[0]) == [*range(5), *range(10, 24)]
    assert sorted(unfinished[1]) == list(range(5, 10))
    assert unfinished[0][3] == begun
    assert unfinished[0][20] == Completion([], [], "abort", [], [])


def test_a_decision_is_the_same_behind_its_words():
    resumed = {3: Completion([7, 8], [-0.5, -1.0], "abort", [2, -1], ["[]"])}
    call = EngineCall(
        Request([3, 1], 2**62, [4], [-1.0], [7], 9, [], placed_images=[]),
        SamplingParams(stop=("a",)),
    )
    decision = Decision(2, False, resumed, 5, 8, 13, 6, EngineCalls({11: call}, (10,)))
    words = decision.to_words()
    assert words[0] == len(words) and words.dtype == np.int64
    assert Decision.from_words(words) == decision
    assert Decision.from_words(Decision(stop=True).to_words()) == Decision(stop=True)


def test_requests_that_await_a_reply_are_not_added_to_an_engine():
    requests = [Request([1], seed=i) for i in range(4)]
    requests[1] = Request([1], 1, [5], [-1.0], [0], awaits_reply=True)
    replied = Completion([6, 9], [-1.0, 0.0], "abort", [0, -1], ["[]"])
    ready, waiting = Decision(first=1, count=2, resumed={0: replied}).requests_from(
        requests, free_positions(requests)
    )
    assert list(ready) == [2, 0] and ready[2] is requests[2]
    assert ready[0].response_ids == [6, 9] and ready[0].replies == ["[]"]
    assert waiting == {1: Completion([5], [-1.0], "stop", [0], [])}
