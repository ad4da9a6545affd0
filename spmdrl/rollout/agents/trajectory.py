"""A trajectory's training rows, made of the requests that its agent sent.

An agent sends its whole conversation with every request. What the engine has sampled must not be
encoded again, since a text may have other tokens than those that it was sampled as. So each request
is joined to a row whose tokens are known, by the messages that it begins with, or by its tokens:

    request 1   system, user                          -> row 0: prompt, answer 1
    request 2   system, user, answer 1, tool          -> row 0: prompt, answer 1, tool, answer 2
    request 3   another system, user (a sub-agent)    -> row 1: prompt, answer 3
    request 4   system, user, answer 1, tool          -> row 2: prompt, answer 1, tool, answer 4

Row 0 had gone on behind the tool's message, so that request 4 is a fork: it has a row of its own,
whose first tokens are copied. Every token that the engine sampled is trained on once, in the row
that it was sampled for; where another row repeats it, its loss mask is 0.

All of this is called from one thread, that of the endpoint's event loop.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spmdrl.rollout.agents.requests import arguments_of_call
from spmdrl.rollout.base import NOT_CHOSEN, Completion
from spmdrl.types import Message, PlacedImage


@dataclass
class Row:
    """A sequence that is trained on; the per-token lists have an entry for each of its tokens."""

    token_ids: list[int]
    logprobs: list[float]  # 0 where the token is not trained on
    loss_mask: list[int]  # 1 on the tokens that the engine sampled for this row
    versions: list[int]  # of the weights that chose the token, NOT_CHOSEN where the mask is 0
    conversation: list[Message]  # all that has been said in it
    images: list[PlacedImage] = field(default_factory=list)  # in order of their tokens
    turns: list[int] = field(default_factory=list)  # sampled for it: numbers in the trajectory
    finish_reason: str = "stop"  # of its last turn: "stop" or "length"

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens before the first that is trained on."""
        return self.loss_mask.index(1)

    @property
    def num_turns(self) -> int:
        """The number of turns that were sampled for it."""
        return len(self.turns)

    def start(self, num_tokens: int) -> EncodedMessages:
        """Returns its first tokens."""
        images = [image for image in self.images if image.first < num_tokens]
        return EncodedMessages(self.token_ids[:num_tokens], images)


@dataclass(frozen=True)
class KnownTokens:
    """The first `num_tokens` tokens of a row: those of a history that ends with a sampled turn."""

    row: int
    num_tokens: int


class EncodedMessages(NamedTuple):
    """Messages as the model is given them."""

    ids: list[int]
    images: Sequence[PlacedImage] = ()  # where each begins among these tokens


@dataclass(frozen=True)
class Draft:
    """A request whose tokens are known, and which has no answer yet."""

    tokens: EncodedMessages
    behind: KnownTokens | None  # its first tokens; None: it begins a row
    conversation: list[Message]
    digest: str  # of the conversation


@dataclass
class Trajectory:
    """Holds what an agent has asked and what was sampled for it."""

    id: str  # in the URLs that its agent calls
    seed: int  # of the sample; the seeds of its requests are made from it
    rows: list[Row] = field(default_factory=list)
    last_row: int = 0  # in which the last turn was said
    known: dict[str, KnownTokens] = field(default_factory=dict)  # by the digest of a history
    turns_of: dict[str, list[int]] = field(default_factory=dict)  # by the id of an answer
    times: dict[str, int] = field(default_factory=dict)  # how often the same tokens were asked

    def draft(
        self, messages: list[Message], context: str,
        encode_all: Callable[[list[Message]], EncodedMessages],
        encode_behind: Callable[[list[Message], int], EncodedMessages | None],
    ) -> Draft:  # fmt: skip
        """Finds the tokens of a chat request.

        context: what else the prompt depends on, as text (tools, options of the template).
        encode_all: tokens of a whole conversation. encode_behind: tokens of the messages that
        follow on a turn which ended with the given token; None: the template cannot write them.
        """
        digests = digests_of(messages, context)
        for count in range(len(messages), 0, -1):
            known = self.known.get(digests[count - 1])
            if known is None:
                continue
            before = self.rows[known.row].start(known.num_tokens)
            rest = encode_behind(messages[count:], before.ids[-1])
            if rest is not None:
                return Draft(joined(before, rest), known, messages, digests[-1])
            break
        whole = encode_all(messages)
        return Draft(whole, self.known_by_tokens(whole), messages, digests[-1])

    def draft_tokens(self, token_ids: list[int], spell: Callable[[list[int]], str]) -> Draft:
        """Finds the row that a request continues whose prompt is given as tokens.

        spell: the text of tokens; what the row does not have counts as said by the user.
        """
        behind = self.known_by_tokens(EncodedMessages(token_ids), any_images=True)
        images = self.rows[behind.row].images if behind is not None else []
        before = self.rows[behind.row].conversation if behind is not None else []
        rest = token_ids[behind.num_tokens if behind is not None else 0 :]
        asked: list[Message] = [{"role": "user", "content": spell(rest)}] if rest else []
        whole = EncodedMessages(token_ids, images)
        return Draft(whole, behind, [*before, *asked], digest_of(whole))

    def known_tokens(self) -> Iterator[list[int]]:
        """Yields the tokens of each history that ends with a sampled turn, the longest first."""
        for known in sorted(self.known.values(), key=lambda known: -known.num_tokens):
            yield self.rows[known.row].token_ids[: known.num_tokens]

    def known_by_tokens(
        self, asked: EncodedMessages, any_images: bool = False
    ) -> KnownTokens | None:
        """Returns the longest row that these tokens begin with, if there is one. It shows the same
        images, unless any_images: images of equal size have the same tokens.
        """
        longest = None
        for number, row in enumerate(self.rows):
            size = len(row.token_ids)
            if longest is not None and size <= longest.num_tokens:
                continue
            same = any_images or [one for one in asked.images if one.first < size] == row.images
            if same and asked.ids[:size] == row.token_ids:
                longest = KnownTokens(number, size)
        return longest

    def commit(self, draft: Draft, answer: Completion, said: Message, id: str = "") -> None:
        """Adds what was sampled: to the row that the request continues if that has not gone on
        meanwhile, else to a new one. said: the answer as the agent is told it; id: of the answer,
        of which several choices have the same.
        """
        number = self.row_for(draft)
        row = self.rows[number]
        known = len(row.token_ids)
        between = draft.tokens.ids[known:]
        add_context(row, between)
        row.images += [image for image in draft.tokens.images if image.first >= known]
        row.token_ids += answer.token_ids
        row.logprobs += answer.logprobs
        row.versions += answer.versions
        row.loss_mask += [1] * len(answer.token_ids)
        if between:
            row.conversation = [*draft.conversation, said]
            row.turns.append(self.num_turns)
        else:  # a text that goes on where the last turn has ended is one turn with it
            *before, last = draft.conversation
            longer = {**last, "content": (last["content"] or "") + said["content"]}
            row.conversation = [*before, longer]
        self.turns_of.setdefault(id, []).append(row.turns[-1])
        row.finish_reason = answer.finish_reason
        self.last_row = number
        digest = next_digest(draft.digest, said)
        self.known[digest] = KnownTokens(number, len(row.token_ids))

    def row_for(self, draft: Draft) -> int:
        behind = draft.behind
        if behind is not None and len(self.rows[behind.row].token_ids) == behind.num_tokens:
            return behind.row
        self.rows.append(Row([], [], [], [], []))
        return len(self.rows) - 1

    def address_of(self, tokens: EncodedMessages) -> str:
        """Returns an address of a continuation of these tokens, a part of its seed: their digest
        and how often the trajectory has asked for one before. Agents that ask at the same time get
        the same answers whoever comes first.
        """
        key = digest_of(tokens)
        self.times[key] = self.times.get(key, -1) + 1
        return f"{key}/{self.times[key]}"

    @property
    def num_turns(self) -> int:
        """The number of turns that were sampled, in all rows."""
        return sum(row.num_turns for row in self.rows)

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights that chose one of its tokens; None: it has none yet."""
        chosen = [v for row in self.rows for v in row.versions if v != NOT_CHOSEN]
        return min(chosen, default=None)


def add_context(row: Row, token_ids: Sequence[int]) -> None:
    """Adds tokens that are not trained on."""
    row.token_ids += token_ids
    row.logprobs += [0.0] * len(token_ids)
    row.loss_mask += [0] * len(token_ids)
    row.versions += [NOT_CHOSEN] * len(token_ids)


def joined(before: EncodedMessages, rest: EncodedMessages) -> EncodedMessages:
    """Returns tokens with others behind them."""
    size = len(before.ids)
    images = [PlacedImage(size + first, picture) for first, picture in rest.images]
    return EncodedMessages(before.ids + rest.ids, [*before.images, *images])


def digest_of(tokens: EncodedMessages) -> str:
    """Returns the digest of tokens and of the images that they show."""
    shown = [[first, picture.digest] for first, picture in tokens.images]
    text = json.dumps([tokens.ids, shown] if shown else tokens.ids)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def digests_of(messages: list[Message], context: str) -> list[str]:
    """Returns a digest of each beginning of a conversation, the shortest first."""
    digest, found = hashlib.blake2b(context.encode(), digest_size=16).hexdigest(), []
    for message in messages:
        digest = next_digest(digest, message)
        found.append(digest)
    return found


def next_digest(digest: str, message: Message) -> str:
    """Returns the digest of a conversation and one more message."""
    text = digest + json.dumps(essence_of(message), sort_keys=True)
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()


def essence_of(message: Message) -> dict[str, Any]:
    """Returns what tells messages apart. Clients send an answer back with fields left out or added,
    or with other ids of its tool calls.
    """
    calls = [
        [call["function"]["name"], arguments_of_call(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    return {"role": message["role"], "content": message.get("content") or "", "calls": calls}
