"""Requests of an agent become rows: what is joined, what begins anew, what is trained on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from spmdrl.config import DataConfig
from spmdrl.data.chat import Encoder
from spmdrl.rollout.agents.call_queue import CallQueue
from spmdrl.rollout.agents.requests import ApiError, ChatRequest
from spmdrl.rollout.agents.session import Session, SessionLimits
from spmdrl.rollout.agents.trajectory import EncodedMessages, Trajectory
from spmdrl.rollout.base import NOT_CHOSEN, Completion, SamplingParams
from spmdrl.types import Message, Picture, PlacedImage


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def encode(messages: list[Message]) -> list[int]:
    """A character is a token; each message ends with a 0, and the policy is asked with a 1."""
    return [ord(c) for m in messages for c in [*(m["content"] or ""), "\0"]] + [1]


def behind(messages: list[Message], last: int) -> EncodedMessages | None:
    return EncodedMessages(encode(messages)) if last == 0 else None


def encode_all(messages: list[Message]) -> EncodedMessages:
    return EncodedMessages(encode(messages))


def said_by(trajectory: Trajectory, messages: list[Message], text: str, context: str = "") -> dict:
    """Asks and answers with a text that the encoder would never write: its tokens plus 1000."""
    draft = trajectory.draft(messages, context, encode_all, behind)
    ids = [1000 + ord(c) for c in text] + [0]
    answer = Completion(ids, [-0.5] * len(ids), "stop", [3] * len(ids))
    said = {"role": "assistant", "content": text}
    trajectory.commit(draft, answer, said)
    return said


def test_a_conversation_that_goes_on_is_one_row_with_the_tokens_that_were_sampled():
    trajectory = Trajectory("t", 7)
    talk = [user("a")]
    for turn in range(3):
        talk += [said_by(trajectory, talk, f"x{turn}"), user(f"b{turn}")]
    (row,) = trajectory.rows
    x = [[1000 + ord("x"), 1000 + ord(str(turn)), 0] for turn in range(3)]
    assert row.token_ids == [
        *encode([user("a")]), *x[0], *encode([user("b0")]), *x[1], *encode([user("b1")]), *x[2],
    ]  # fmt: skip
    own = [i for i, mask in enumerate(row.loss_mask) if mask]
    assert [row.token_ids[i] for i in own] == [*x[0], *x[1], *x[2]]
    assert [row.logprobs[i] for i in own] == [-0.5] * 9 and sum(row.logprobs) == -4.5
    assert {row.versions[i] for i in own} == {3}
    assert {v for v, m in zip(row.versions, row.loss_mask, strict=True) if not m} == {NOT_CHOSEN}
    assert row.num_turns == 3 and row.num_prompt_tokens == 3
    assert row.conversation == talk[:-1]


def test_a_history_that_was_changed_begins_a_row():
    trajectory = Trajectory("t", 7)
    first = said_by(trajectory, [user("a")], "long thoughts")
    said_by(trajectory, [user("a"), first, user("b")], "x")
    shorter = {"role": "assistant", "content": "thoughts"}
    said_by(trajectory, [user("a"), shorter, user("b")], "y")
    assert [row.num_turns for row in trajectory.rows] == [2, 1]
    assert sum(trajectory.rows[1].loss_mask) == 2  # what it was told that it had said is no row's
    assert trajectory.rows[1].token_ids[:-2] == encode([user("a"), shorter, user("b")])


def test_a_fork_copies_tokens_and_trains_each_sampled_token_once():
    trajectory = Trajectory("t", 7)
    talk = [user("a")]
    talk += [said_by(trajectory, talk, "x"), user("b")]
    said_by(trajectory, talk, "first")
    said_by(trajectory, talk, "second")
    said_by(trajectory, [user("a")], "again")
    rows = trajectory.rows
    assert [row.num_turns for row in rows] == [2, 1, 1]
    shared = len(encode([user("a")])) + 2 + len(encode([user("b")]))
    assert rows[1].token_ids[:shared] == rows[0].token_ids[:shared]
    assert sum(rows[1].loss_mask[:shared]) == 0 and rows[1].num_prompt_tokens == shared
    sampled = sum(len(text) + 1 for text in ("x", "first", "second", "again"))
    assert sum(sum(row.loss_mask) for row in rows) == sampled
    # the fork goes on in its own row
    said = {"role": "assistant", "content": "second"}
    said_by(trajectory, [*talk, said, user("c")], "z")
    assert [row.num_turns for row in rows] == [2, 2, 1] and trajectory.last_row == 1


def test_two_requests_under_way_at_once_do_not_end_up_in_one_row():
    trajectory = Trajectory("t", 7)
    talk = [user("a"), said_by(trajectory, [user("a")], "x")]
    drafts = [
        trajectory.draft([*talk, user(text)], "", encode_all, behind) for text in ("left", "right")
    ]
    for draft in reversed(drafts):
        answer = Completion([5, 0], [-1.0, -1.0], "stop", [3, 3])
        trajectory.commit(draft, answer, {"role": "assistant", "content": "y"})
    left, right = (draft.tokens.ids for draft in drafts)
    assert [row.token_ids for row in trajectory.rows] == [right + [5, 0], left + [5, 0]]
    assert [sum(row.loss_mask) for row in trajectory.rows] == [4, 2]


def test_other_tools_begin_a_row_and_other_ids_of_calls_do_not():
    trajectory = Trajectory("t", 7)
    first = said_by(trajectory, [user("a")], "x", context="tools 1")
    said_by(trajectory, [user("a"), first, user("b")], "y", context="tools 2")
    assert [row.num_turns for row in trajectory.rows] == [1, 1]
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1,  "b": 2}'}}
    other = {"id": "call_9", "type": "function", "index": 0,
             "function": {"name": "f", "arguments": {"b": 2, "a": 1}}}  # fmt: skip
    draft = trajectory.draft([user("c")], "", encode_all, behind)
    answer = Completion([5, 0], [-1.0, -1.0], "stop", [3, 3])
    trajectory.commit(draft, answer, {"role": "assistant", "content": None, "tool_calls": [call]})
    told = {"role": "assistant", "content": "", "tool_calls": [other], "refusal": None}
    result = {"role": "tool", "content": "3", "tool_call_id": "call_9"}
    draft = trajectory.draft([user("c"), told, result], "", encode_all, behind)
    assert draft.behind is not None and draft.tokens.ids[:5] == [*encode([user("c")]), 5, 0]


def test_where_the_template_cannot_go_on_the_tokens_are_compared():
    """The turn was cut, so that the template cannot write its end: encoded anew, it is joined if
    its tokens begin as the row's."""
    trajectory = Trajectory("t", 7)
    draft = trajectory.draft([user("a")], "", encode_all, behind)
    cut = Completion([ord("x")], [-1.0], "length", [3])
    said = {"role": "assistant", "content": "x"}
    trajectory.commit(draft, cut, said)
    asked = [user("a"), said, user("b")]

    def encode_on(messages: list[Message]) -> EncodedMessages:
        return EncodedMessages(encode([user("a")]) + [ord("x"), 0] + encode([user("b")]))

    draft = trajectory.draft(asked, "", encode_on, behind)
    assert draft.behind is not None and draft.behind.num_tokens == 4
    draft = trajectory.draft(asked, "", encode_all, behind)  # its tokens are others
    assert draft.behind is None


def test_addresses_of_requests_depend_on_tokens_images_and_repetitions_alone():
    first, second = EncodedMessages([1, 2]), EncodedMessages([3])
    shown = EncodedMessages([1, 2], [PlacedImage(0, Picture(b"x"))])
    one, other = Trajectory("a", 7), Trajectory("b", 7)
    found = [one.address_of(each) for each in (first, second, first, shown)]
    again = [other.address_of(each) for each in (shown, second, first, first)]
    assert sorted(found) == sorted(again) and len({*found}) == 4


class Letters:
    """A tokenizer whose tokens are letters, in two ways, and a 0 that ends a text."""

    all_special_ids = (0,)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(map(ord, text))}

    def decode(self, ids: list[int]) -> str:
        return "".join("<eos>" if id == 0 else chr(id % 1000) for id in ids)


def test_a_text_has_the_tokens_of_the_longest_answer_that_it_goes_on_behind():
    trajectory = Trajectory("t", 7)
    letters: Any = Letters()
    texts = Encoder(letters, DataConfig(train="-"), 99)
    encoders: Any = SimpleNamespace(tokenizer=letters, texts=texts)
    limits = SessionLimits(99, 9, 0, 2000)
    session = Session(trajectory, SamplingParams(), encoders, CallQueue(), limits, "m")

    def answered(prompt: list[int], ids: list[int]) -> None:
        draft = trajectory.draft_tokens(prompt, letters.decode)
        answer = Completion(ids, [-0.5] * len(ids), "stop", [3] * len(ids))
        trajectory.commit(draft, answer, {"role": "assistant", "content": letters.decode(ids)})

    a, b, c, d, e, f, g = map(ord, "abcdefg")
    answered([a], [1000 + b, 1000 + c])
    answered([a, 1000 + b, 1000 + c, d], [1000 + e, 0])
    answered([a], [1000 + b])  # newer, and shorter
    assert len(trajectory.rows) == 2
    # it forks, where the row has gone on
    assert session.text_behind("abcf") == [a, 1000 + b, 1000 + c, f]
    # the text of an answer lacks the token that ended it
    assert session.text_behind("abcdeg") == [a, 1000 + b, 1000 + c, d, 1000 + e, g]
    assert session.text_behind("abcde<eos>g") == [a, 1000 + b, 1000 + c, d, 1000 + e, 0, g]
    assert session.text_behind("abg") == [a, 1000 + b, g]
    assert session.text_behind("ag") is None


def test_messages_that_the_template_makes_nothing_of_are_refused():
    trajectory, encoders = Trajectory("t", 7), SimpleNamespace(tokenizer=Letters())
    limits = SessionLimits(99, 9, 0, 2000)
    session = Session(trajectory, SamplingParams(), encoders, CallQueue(), limits, "m")
    empty = trajectory.draft([user("")], "", lambda _: EncodedMessages([]), behind)
    with pytest.raises(ApiError, match="the prompt has no tokens"):
        asyncio.run(session.sample(empty, ChatRequest([user("")])))
