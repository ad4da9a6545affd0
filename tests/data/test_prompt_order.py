"""The order that prompts are asked in: epochs, seeds and resuming."""

from __future__ import annotations

import json

import pytest

from spmdrl.config import ConfigError
from spmdrl.data.prompt_order import PromptOrder


def test_an_epoch_visits_each_prompt_once_and_drops_the_tail():
    order = PromptOrder(10, 3, seed=1)
    epochs = [[order.next_step() for _ in range(3)] for _ in range(20)]
    for steps in epochs:
        visited = [i for step in steps for i in step]
        assert len(set(visited)) == 9
        assert set(visited) <= set(range(10))
    assert epochs[0] != epochs[1]
    assert {i for steps in epochs for step in steps for i in step} == set(range(10))


def test_order_depends_on_the_seed_alone():
    steps = [PromptOrder(1000, 100, seed=seed).next_step() for seed in (0, 0, 1)]
    assert steps[0] == steps[1] != steps[2]
    # Pinned: a run that is resumed under a newer numpy must go on with the same permutation.
    assert PromptOrder(8, 8, seed=0).next_step() == [7, 6, 5, 1, 3, 2, 4, 0]
    assert PromptOrder(7, 3, seed=0, shuffle=False).next_step() == [0, 1, 2]


@pytest.mark.parametrize("taken", range(12))
def test_resume_is_exact(taken):
    order = PromptOrder(10, 3, seed=5)
    for _ in range(taken):
        order.next_step()
    state = json.loads(json.dumps(order.state_dict()))
    resumed = PromptOrder(10, 3, seed=5)
    resumed.load_state_dict(state)
    assert [resumed.next_step() for _ in range(20)] == [order.next_step() for _ in range(20)]


def test_resume_with_another_step_size_goes_on_where_it_was():
    order = PromptOrder(12, 4, seed=5)
    asked = order.next_step()
    resumed = PromptOrder(12, 2, seed=5)
    resumed.load_state_dict(order.state_dict())
    rest = [i for _ in range(4) for i in resumed.next_step()]
    assert sorted(asked + rest) == list(range(12))


def test_resume_refuses_another_order():
    state = PromptOrder(10, 3, seed=5).state_dict()
    for other, word in [
        (PromptOrder(11, 3, seed=5), "usable rows: 10, this run has 11"),
        (PromptOrder(10, 3, seed=6), "with seed 5, this run has 6"),
        (PromptOrder(10, 3, seed=5, shuffle=False), "shuffle True, this run has False"),
    ]:
        with pytest.raises(ConfigError, match=word) as error:
            other.load_state_dict(state)
        assert "--checkpoint.accept_changes data" in str(error.value)
        assert not other.load_state_dict(state | {"epoch": 3, "offset": 6}, may_differ=True)
        assert (other.epoch, other.offset) == (4, 0)


def test_step_larger_than_the_data():
    with pytest.raises(ConfigError, match=r"prompts_per_step=64 .* 10 usable prompts"):
        PromptOrder(10, 64, seed=0)
    with pytest.raises(ConfigError, match="prompts_per_step=0"):
        PromptOrder(10, 0, seed=0)
