"""Chooses the prompts of each step: epoch by epoch, or as a mixture, a curriculum or a function of
the user's says (data.sampler).

Every rank that samples draws the same, from the seed, the number of the step and what the answers
of earlier steps say, which all of them know. What a step drew and heard is an event of a few
numbers, by which ranks that only train follow, so that each rank can save the state.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from spmdrl.config import ConfigError, DataConfig, require
from spmdrl.config.words import counted
from spmdrl.data.prompt_draw import (
    competence,
    counts_of,
    draw_by_weight,
    random_words,
    shares_of,
    success_weights,
    uniform,
)
from spmdrl.data.prompt_order import PromptOrder
from spmdrl.data.prompt_stats import (
    PromptAnswers,
    PromptRows,
    PromptStats,
    checked_state,
    walks_in_order,
)

Event = dict[str, Any]  # JSON-able: what a step drew, and the answers that it heard
# why a prompt is not to be asked; where too few are left, the lower ones come back first
FREE, SOLVED, TOO_HARD, WAITING = range(4)


class PromptSampler:
    """The prompts of a run and what is known of them; the same on every rank.

    lag: of the steps before a draw, so many of the last are not known to it: 1 where a step is
    asked while the one before is scored.
    """

    def __init__(self, length: int, rows: PromptRows | None, data: DataConfig, seed: int) -> None:
        """rows: of the `length` prompts; None: nothing is kept of them, and they are asked epoch by
        epoch.
        """
        self.order = PromptOrder(length, data.prompts_per_step, seed, data.shuffle)
        self.config, self.seed, self.shuffle, self.lag = data.sampler, seed, data.shuffle, 0
        self.events: dict[int, Event] = {}  # of steps that are under way
        self.queue: list[tuple[int, list[PromptAnswers]]] = []  # (step, answers) not counted yet
        self.stats = None if rows is None else PromptStats(rows, data.sampler)
        function: Any = data.sampler.function
        self.function: Any = function() if isinstance(function, type) else function
        if rows is not None:
            self.strata, self.shares = strata_of(rows, data)
            self.hardness = hardness_of(rows, self.strata)

    def check_enough(self, most: int) -> None:
        """Raises ConfigError where a source has fewer prompts than a step may ask of it. most:
        prompts that are drawn at a time.
        """
        if self.stats is None or walks_in_order(self.config):
            return
        for members, share in zip(self.strata, self.shares, strict=True):
            needed = min(math.ceil(share * most), most)
            name = self.stats.rows.names[self.stats.rows.source[members[0]]]
            require(
                needed <= len(members),
                f"data.sampler gives {name!r} {share:.3g} of a step, which is up to {needed} of "
                f"{counted(most, 'prompt')}, and it has {len(members)}; a step asks no prompt "
                "twice. Lower "
                "its weight, or data.prompts_per_step",
            )

    def lines(self) -> list[str]:
        """Returns what a dry run says of a mixture."""
        if self.stats is None or walks_in_order(self.config) or len(self.shares) == 1:
            return []
        rows = self.stats.rows
        parts = [
            f"{share:.3g} of {rows.names[rows.source[members[0]]]!r}, "
            f"{counted(len(members), 'prompt')}"
            for members, share in zip(self.strata, self.shares, strict=True)
        ]
        return [f"  a step is {'; '.join(parts)}"]

    # ---- of a step, on the ranks that sample

    def take(self, count: int, step: int) -> list[int]:
        """Returns `count` different places of the data set. A step may ask several times."""
        event = self.events.setdefault(step, {"drawn": [], "answers": []})
        if self.stats is not None:
            self.settle(step)
        if walks_in_order(self.config):
            picked = self.order.take(count)
        else:
            picked = self.draw(count, step, len(event["drawn"]))
        if self.stats is not None:
            self.mark(picked)
        event["drawn"].append(picked)
        event["order"] = self.order.state_dict()
        return picked

    def hear(self, step: int, rewards: Iterable[tuple[int, Sequence[float]]]) -> None:
        """Takes the rewards of a step's answers: (Prompt.id, those that are valid) by prompt."""
        if self.stats is None:
            return
        least = 1.0 if self.config.success_reward is None else self.config.success_reward
        ids = self.stats.rows.ids
        answers = [
            PromptAnswers(int(np.searchsorted(ids, id)), sum(r >= least for r in found), len(found))
            for id, found in rewards
        ]
        self.events.setdefault(step, {"drawn": [], "answers": []})["answers"] += answers
        self.enqueue(step, answers)

    def event(self, step: int) -> Event:
        """Returns what the step drew and heard, for `follow`."""
        event = self.events.pop(step, {"drawn": [], "answers": []})
        event.setdefault("order", self.order.state_dict())
        if self.stats is None:
            return {"order": event["order"]}
        return event | {"function": self.function_state()}

    def follow(self, step: int, event: Event) -> None:
        """Does what the ranks that sample did in this step, on one that does not."""
        self.order.load_state_dict(event["order"])
        if self.stats is None:
            return
        for picked in event["drawn"]:
            self.settle(step)
            self.mark(picked)
        self.enqueue(step, [PromptAnswers(*answers) for answers in event["answers"]])
        self.load_function(event["function"])

    def metrics(self, step: int) -> dict[str, float]:
        """Numbers of the step's answers by data source, and of all prompts as they are known after
        it; before `event` takes the step away.
        """
        if self.stats is None:
            return {}
        after = self.stats.copy()
        for number, answers in self.queue:
            after.count(answers, number)
        heard = self.events.get(step, {"answers": []})["answers"]
        return source_metrics(heard, self.stats.rows) | after.metrics(step + 1)

    # ---- between steps

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        if self.stats is None:
            return self.order.state_dict()
        known = {
            **self.stats.state_dict(),
            "queue": [[step, [list(one) for one in answers]] for step, answers in self.queue],
            "function": self.function_state(),
        }
        return self.order.state_dict() | {"sampler": known}

    def load_state_dict(self, state: dict[str, Any], may_differ: bool = False) -> bool:
        """Does what PromptOrder.load_state_dict does. What is known of the prompts is dropped where
        their number is another one.
        """
        goes_on = self.order.load_state_dict(state, may_differ)
        self.forget()
        known = state.get("sampler")
        if self.stats is not None and known and state["length"] == len(self.stats):
            self.stats.load_state_dict(known)
            self.queue = [
                (step, [PromptAnswers(*one) for one in answers]) for step, answers in known["queue"]
            ]
            self.load_function(known["function"])
        return goes_on

    def forget(self) -> None:
        """Drops what is known of the prompts, which are other ones."""
        self.events, self.queue = {}, []
        if self.stats is not None:
            self.stats = PromptStats(self.stats.rows, self.config)

    def forget_begun(self) -> None:
        """Lets prompts be asked again whose answers were begun and will not be ended."""
        if self.stats is not None:
            self.stats.waiting[:] = False
            for _, answers in self.queue:
                self.stats.waiting[[one.place for one in answers]] = True

    def function_state(self) -> Any:
        found = getattr(self.function, "state_dict", None)
        return None if found is None else checked_state(found())

    def load_function(self, state: Any) -> None:
        if state is not None and hasattr(self.function, "load_state_dict"):
            self.function.load_state_dict(state)

    # ---- parts of a draw

    def enqueue(self, step: int, answers: list[PromptAnswers]) -> None:
        """Keeps the answers of a step, in one entry however many rounds it has."""
        if self.queue and self.queue[-1][0] == step:
            self.queue[-1][1].extend(answers)
        elif answers:
            self.queue.append((step, list(answers)))

    def settle(self, step: int) -> None:
        """Counts the answers that a draw of this step knows."""
        assert self.stats is not None
        for number, answers in self.queue:
            if number < step - self.lag:
                self.stats.count(answers, number)
        self.queue = [entry for entry in self.queue if entry[0] >= step - self.lag]

    def mark(self, picked: list[int]) -> None:
        assert self.stats is not None
        self.stats.asked[picked] += 1
        self.stats.waiting[picked] = True

    def draw(self, count: int, step: int, sampling_round: int) -> list[int]:
        """Draws the prompts of a round of a step."""
        words = random_words(f"seed {self.seed}, step {step}, round {sampling_round}")
        if self.function is not None:
            assert self.stats is not None
            picked = self.function(self.stats, step, count, np.random.Generator(words))
            return checked_picks(picked, count, len(self.stats))
        counts = counts_of(self.shares, count, uniform(words))
        parts = [
            self.choose(members, int(number), step, words)
            for members, number in zip(self.strata, counts, strict=True)
        ]
        return self.interleaved(parts, words).tolist()

    def choose(
        self, members: np.ndarray, count: int, step: int, words: np.random.PCG64
    ) -> np.ndarray:
        """(count,) int64: different ones of `members`. Where too few of them are free, the others
        fill up: those that were solved, the longest ago first, then those that are too hard yet.
        """
        assert self.stats is not None
        tiers = self.tiers(members, step)
        free, others = members[tiers == FREE], members[tiers != FREE]
        if len(free) >= count:
            return self.pick(free, count, words)
        late = np.where(tiers == TOO_HARD, self.hardness[members], self.stats.answered_in[members])
        rest = np.lexsort((late[tiers != FREE], tiers[tiers != FREE]))
        return np.concatenate([free, others[rest][: count - len(free)]])

    def tiers(self, members: np.ndarray, step: int) -> np.ndarray:
        """(num_members,) int64: FREE, or why a prompt is not to be asked in this step."""
        assert self.stats is not None
        tiers = np.full(len(members), FREE)
        if self.config.curriculum == "difficulty":
            open_share = math.ceil(competence(step, self.config) * len(members))
            tiers[self.hardness[members] >= open_share] = TOO_HARD
        tiers[self.stats.dropped(step)[members]] = SOLVED
        tiers[self.stats.waiting[members]] = WAITING
        return tiers

    def pick(self, free: np.ndarray, count: int, words: np.random.PCG64) -> np.ndarray:
        """(count,) int64: of these by their success rates, or those that were asked least."""
        assert self.stats is not None
        if self.config.curriculum == "success_rate":
            weights = success_weights(
                self.stats.rates[free], self.config.target_rate, self.config.floor
            )
            return free[draw_by_weight(weights, count, words)]
        ties: np.ndarray = words.random_raw(len(free)) if self.shuffle else self.hardness[free]
        return free[np.lexsort((ties, self.stats.asked[free]))[:count]]

    def interleaved(self, parts: list[np.ndarray], words: np.random.PCG64) -> np.ndarray:
        """All in one row: in random order, or evenly spread where the data is not shuffled, so that
        what takes the first groups of a step takes of all sources.
        """
        picked = np.concatenate(parts)
        if self.shuffle:
            return picked[np.argsort(words.random_raw(len(picked)), kind="stable")]
        places = [(np.arange(len(part)) + 0.5) / max(len(part), 1) for part in parts]
        return picked[np.argsort(np.concatenate(places), kind="stable")]


def strata_of(rows: PromptRows, data: DataConfig) -> tuple[list[np.ndarray], np.ndarray]:
    """The prompts that are drawn from together, and the share of each such part: by data source
    where the config mixes them, else all prompts in one part. Raises ConfigError.
    """
    if not data.sampler.weights and data.sampler.temperature == 1:
        return [np.arange(len(rows.source))], np.ones(1)
    places = [np.flatnonzero(rows.source == number) for number in range(len(rows.names))]
    sizes = {name: len(found) for name, found in zip(rows.names, places, strict=True) if len(found)}
    return [found for found in places if len(found)], shares_of(sizes, data.sampler)


def hardness_of(rows: PromptRows, strata: list[np.ndarray]) -> np.ndarray:
    """(num_prompts,) int64: the place of each prompt in its part, from the easiest; where no
    difficulty is known, in the order of the rows.
    """
    hardness = np.arange(len(rows.source))
    for members in strata:
        if rows.difficulty is not None:
            ranked = members[np.argsort(rows.difficulty[members], kind="stable")]
            hardness[ranked] = np.arange(len(members))
    return hardness


def checked_picks(picked: Any, count: int, length: int) -> list[int]:
    """Reads what a function of the user's returned. Raises ConfigError where it is no such list."""
    try:
        found = [operator.index(place) for place in picked]
    except TypeError as error:
        raise ConfigError(
            f"data.sampler.function returned {picked!r:.80}, expected {count} integers: {error}"
        ) from error
    wrong = [place for place in found if not 0 <= place < length]
    if len(set(found)) != len(found) or len(found) != count or wrong:
        raise ConfigError(
            f"data.sampler.function returned {counted(len(found), 'place')}, {len(set(found))} "
            "different ones "
            f"and {len(wrong)} outside of 0 to {length - 1}; expected {count} different ones"
        )
    return found


def source_metrics(heard: Sequence[PromptAnswers], rows: PromptRows) -> dict[str, float]:
    """The success rate of a step's answers; where the data has several sources that of each, and
    the share of the prompts that are of it.
    """
    found: dict[str, float] = {}
    of_all = success_rate(heard)
    if of_all is not None:
        found["prompts/success_rate"] = of_all
    for number, source in enumerate(rows.names if len(rows.names) > 1 else ()):
        own = [one for one in heard if rows.source[one.place] == number]
        if heard:
            found[f"{source}/share"] = len(own) / len(heard)
        rate = success_rate(own)
        if rate is not None:
            found[f"{source}/success_rate"] = rate
    return found


def success_rate(heard: Sequence[PromptAnswers]) -> float | None:
    total = sum(one.total for one in heard)
    return sum(one.successes for one in heard) / total if total else None
