"""An engine's desk in the shared queue, one message at a time. The engine is a stand-in."""

from types import SimpleNamespace

import torch.distributed as dist

from spmdrl.rollout.base import Completion, Request
from spmdrl.rollout.scheduler import EngineCoordinator
from spmdrl.rollout.scheduler_messages import NoReplies, StopCondition

STUB = SimpleNamespace(max_num_seqs=4, num_waiting=0)


def desk_of(number, store, num_engines=2):
    scheduler = SimpleNamespace(engine=STUB, number=number, num_engines=num_engines, static=False)
    return EngineCoordinator(scheduler, store, 8, StopCondition(), lambda: False, NoReplies())


def test_half_of_the_difference_is_given_away_and_arrives():
    store = dist.HashStore()
    victim, thief = desk_of(0, store), desk_of(1, store)
    victim.publish(6)
    thief.ask()
    assert store.get("ask/0") == b"1:1:0"
    given = victim.serve([10, 11, 12, 13, 14, 15])
    assert len(given) == 3
    gift = {5: Completion([7, 8], [-0.5, -1.0], "abort", [3, 3])}
    victim.hand_over(gift)
    assert thief.collect() == gift
    assert store.get("ask/0") == b""


def test_an_engine_that_has_left_is_given_nothing():
    store = dist.HashStore()
    victim, thief = desk_of(0, store), desk_of(1, store)
    victim.publish(6)
    thief.ask()
    assert thief.leave({}, [Request([1], seed=0)] * 8).finished == {}
    assert store.get("ask/0") == b"withdrawn"
    assert victim.serve([10, 11, 12]) == []


def test_a_full_engine_hears_that_the_list_is_empty_and_gives():
    store = dist.HashStore()
    full, idle = desk_of(0, store), desk_of(1, store)
    full.num_requests = idle.num_requests = 24
    assert list(full.take(0)) == [0, 1, 2, 3]  # the shares were made for a list of 8
    store.add("next", 16)  # others have taken the rest
    full.decide(list(range(8)))
    assert full.all_taken
    assert store.add("load/0", 0) == 8


def test_an_idle_engine_comes_to_look_at_every_other():
    store = dist.HashStore()
    busy, idle = desk_of(11, store, 16), desk_of(3, store, 16)
    busy.publish(6)
    for _ in range(50):
        if not idle.asked:
            idle.ask()
    assert idle.asked_of == 11


def test_what_awaits_a_reply_leaves_its_place_to_others():
    store = dist.HashStore()
    engine, other = desk_of(0, store), desk_of(1, store)
    engine.num_requests = other.num_requests = 64
    assert list(engine.take(0)) == [0, 1, 2, 3]
    assert len(engine.take(0, awaiting=4)) == 8  # all its places and as many that wait
    assert len(engine.take(0, awaiting=30)) == 2  # but no more than its share of all
