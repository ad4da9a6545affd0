"""Turns beyond the first: tools and an environment answer the policy, and it goes on.

A sample of several turns is one row of tokens. What the policy chose stays the very tokens that it
chose; a reply stands behind them as the chat template writes it, up to where the model is to answer
again. Nothing is decoded and encoded a second time.

    response_ids   turn 1 ... <end>   reply ... <assistant>   turn 2 ... <end>
    versions         3  3  3    3      -1   -1      -1          4  4  4    4
    loss_mask        1  1  1    1       0    0       0          1  1  1    1
"""

from __future__ import annotations

import json
import logging
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from spmdrl.config import PpoConfig
from spmdrl.config.words import counted
from spmdrl.data.images import ImageProcessor
from spmdrl.data.table_files import BadRow
from spmdrl.rewards.workers.caller import Caller
from spmdrl.rewards.workers.stateful_tools import CALLED_WITH, Made, Objects, calls_of
from spmdrl.rewards.workers.worker import Reply, plain
from spmdrl.rollout.base import NOT_CHOSEN, Completion, SamplingParams
from spmdrl.rollout.multi_turn.environment import (
    ARGUMENTS,
    RECORD,
    STEP,
    Answerer,
    Turn,
    environment_names,
    environment_of,
    is_record,
    noted,
    record_of,
    record_of_unread,
    resolve_environments,
    split_step,
    steps_of,
)
from spmdrl.rollout.multi_turn.images import (
    ImageRules,
    ShownImages,
    is_content,
    is_shown,
    said_with_images,
)
from spmdrl.rollout.multi_turn.reply_encoder import ReplyEncoder, turns_of
from spmdrl.rollout.multi_turn.tools import Call, CallParser, Toolbox, as_text
from spmdrl.rollout.scheduler_messages import NoCalls
from spmdrl.types import Message, Prompt

logger = logging.getLogger(__name__)

ROLES = ("user", "tool", "system")  # that an environment may speak as


class ToolRequest(NamedTuple):
    """A tool, or the environment where `call` is None."""

    call: Call | None
    under_way: Future[Any] | None  # None: it is not called; call.problem may say why
    # of its reply among those to all calls of the same object; None: it is no object's
    place: int | None = None

    def has_happened(self) -> bool:
        """Whether an object has changed, and not got lost with its process."""
        if self.place is None or self.under_way is None:
            return False
        return not self.under_way.result().error


class Pending(NamedTuple):
    """A turn whose replies are being made."""

    turn: Completion
    requests: list[ToolRequest]


class Dialogue:
    """Leads the conversations of one engine, on its leader. Raises ConfigError for tools that
    cannot be used.
    """

    def __init__(
        self, config: PpoConfig, tokenizer: Any, num_engines: int,
        vision: ImageProcessor | None = None,
    ) -> None:  # fmt: skip
        """vision: of a model that sees images, which replies may then show."""
        self.limits = config.multi_turn
        self.toolbox = Toolbox(config.tools, config.sandbox)
        self.parser = (
            CallParser(self.limits.parser, tokenizer, self.toolbox.schemas)
            if config.tools
            else None
        )
        self.replies = ReplyEncoder(config, tokenizer, vision)
        self.environments = resolve_environments(config.environment)
        asked = [found.called for found in self.environments.values() if found is not None]
        self.images = ImageRules(vision, self.limits)
        self.caller = Caller([*self.toolbox.called, *asked], self.limits, num_engines, Reply)

    def calls_in(self, text: str, extra_info: dict[str, Any]) -> list[Call]:
        """Returns what the policy asks of tools in a turn."""
        if self.parser is None:
            return []
        found, problem = self.parser(without_thoughts(text))
        calls = [self.toolbox.call(name, given, extra_info) for name, given in found]
        if problem:
            calls.append(Call("", None, f"the tool call cannot be read: {problem}"))
        most = self.limits.max_calls
        too_many = f"not called: a turn may call {counted(most, 'tool')} at most"
        return calls[:most] + [Call(call.name, None, too_many) for call in calls[most:]]

    def about(self, addressed: list[tuple[Prompt, int]], params: SamplingParams) -> TurnHandler:
        """Returns the handler of one round of the scheduler: (prompt, sample index) of each of its
        requests.
        """
        return TurnHandler(self, addressed, params.max_tokens)

    def lines(self) -> list[str]:
        """Returns lines for --dry-run: who replies, and how a reply looks to the model."""
        limits, who = self.limits, [f"tool {name}" for name in self.toolbox.functions]
        who += environment_names(self.environments)
        role = "tool" if self.toolbox.functions else "user"
        written = self.replies.encoder.spell(self.replies.ids([{"role": role, "content": "1"}]))
        shown = [
            f"  images: at most {limits.max_images} in the replies of a sample, of at most "
            f"{limits.max_image_tokens} tokens each"
        ] * (limits.max_images > 0)
        return [
            f"turns: at most {limits.max_turns} of the policy; between them {', '.join(who)}, in "
            f"{limits.workers} processes an engine, {limits.timeout_s:g} s a call",
            f"  a reply, of at most {limits.max_reply_tokens} tokens a message: {written!r}",
            *shown,
        ]

    def close(self) -> None:
        self.caller.close()


@dataclass
class TurnHandler(NoCalls):
    """Handles the turns of one round (scheduler_messages.ReplyHandler)."""

    by: Dialogue
    addressed: list[tuple[Prompt, int]]
    max_tokens: int  # of an answer, its replies included
    pending: dict[int, Pending] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.pending)

    def ask(self, position: int, turn: Completion) -> bool:
        requests = self.requests_of(position, turn) if turn.finish_reason == "stop" else []
        if requests:
            self.pending[position] = Pending(turn, requests)
        else:
            self.by.caller.give_up(self.home(position))
        return bool(requests)

    def home(self, position: int) -> str:
        """Returns the name of the worker where the sample's objects live."""
        prompt, sample_index = self.addressed[position]
        return f"{prompt.id}/{sample_index}"

    def requests_of(self, position: int, turn: Completion) -> list[ToolRequest]:
        """Each call of a tool; without one the environment, if there is one. In the last turn that
        there may be nothing is called, since nobody would read the reply."""
        by, (prompt, _) = self.by, self.addressed[position]
        turns = turns_of(turn)
        calls = by.calls_in(by.replies.spoken(turns[-1]), prompt.extra_info)
        environment = environment_of(by.environments, prompt.data_source)
        if calls or environment is None:
            is_last = len(turns) >= by.limits.max_turns
            if is_last:
                return [ToolRequest(call, None) for call in calls]
            return self.submitted(calls, position, turn)
        return [self.submitted_to(environment, position, turn)]

    def submitted_to(self, environment: Answerer, position: int, turn: Completion) -> ToolRequest:
        prompt, sample_index = self.addressed[position]
        said = messages_of(turn, self.by.replies.texts(turn))
        told = Turn(prompt, sample_index, [*prompt.messages, *said], len(turns_of(turn)))
        given = environment.given(told)
        if not isinstance(environment.called, Objects):
            return ToolRequest(None, self.by.caller.submit(environment.called, given))
        calls: list[Made] = [(STEP, {"action": said[-1]["content"]})]
        asked = self.call_object(environment.called, given, steps_of(said), calls, position, turn)
        return ToolRequest(None, asked, 0)

    def submitted(self, calls: list[Call], position: int, turn: Completion) -> list[ToolRequest]:
        """All at once, but those of one object one after the other."""
        by, of_objects = self.by, {}
        for objects in dict.fromkeys(call.objects for call in calls if call.objects):
            made = [(c.name, plain(c.arguments)) for c in calls if c.objects is objects]
            of_objects[objects] = self.call_tool(objects, made, position, turn)
        requests, places = [], dict.fromkeys(of_objects, 0)
        for call in calls:
            if call.arguments is None:
                requests.append(ToolRequest(call, None))
            elif call.objects is None:
                function = by.toolbox.functions[call.name]
                requests.append(ToolRequest(call, by.caller.submit(function, call.arguments)))
            else:
                requests.append(ToolRequest(call, of_objects[call.objects], places[call.objects]))
                places[call.objects] += 1
        return requests

    def call_tool(
        self, objects: Objects, calls: list[Made], position: int, turn: Completion
    ) -> Future[Any]:
        prompt, sample_index = self.addressed[position]
        told = Turn(prompt, sample_index, [], 0)
        given = {name: ARGUMENTS[name](told) for name in objects.takes}
        messages = [message for reply in turn.replies for message in json.loads(reply)]
        before = calls_of(objects.cls, messages)
        return self.call_object(objects, given, before, calls, position, turn)

    def call_object(
        self, objects: Objects, given: dict[str, Any], before: list[Made], calls: list[Made],
        position: int, turn: Completion,
    ) -> Future[Any]:  # fmt: skip
        home = self.home(position)
        arguments = {"key": home, "given": given, "before": before, "calls": calls}
        times = 1 + len(turn.replies)  # each turn's calls were made within the limit
        return self.by.caller.submit(objects, arguments, home, times)

    def came(self) -> dict[int, Completion]:
        ready = [i for i, pending in self.pending.items() if self.is_ready(pending)]
        answers = {i: self.answered(self.pending.pop(i)) for i in ready}
        for i, answer in answers.items():
            if answer.finish_reason != "abort":
                self.by.caller.give_up(self.home(i))
        return answers

    def is_ready(self, pending: Pending) -> bool:
        under_way = [request.under_way for request in pending.requests]
        return all(call is None or call.done() for call in under_way)

    def result(self, request: ToolRequest) -> Reply:
        if request.under_way is None:
            assert request.call is not None
            return Reply(None, request.call.problem)
        reply: Reply = request.under_way.result()
        if request.place is None or reply.error is not None:
            return reply
        return Reply(*reply.value[request.place])

    def answered(self, pending: Pending) -> Completion:
        """The turn with its reply behind it, to go on; or over, with the reason."""
        turn, messages, record = pending.turn, [], None
        images = ShownImages(self.by.images, turn)
        for request in pending.requests:
            result = self.result(request)
            if request.call is not None:
                message = tool_message(request.call, images.of_tool(result))
                if request.has_happened():
                    message[CALLED_WITH] = plain(request.call.arguments)
                messages.append(message)
                continue
            messages, record, problem = said_by_environment(result, self.by.images)
            wrong = images.problem_of(messages)
            problem = problem or (f"the environment returned {wrong}" if wrong else "")
            if problem:
                return failed(turn, problem)
            if record is None and request.place is not None:
                record = record_of(0.0)  # it tells later turns that this one was answered
        records = [] if record is None else [record]
        over = replace(turn, replies=[*turn.replies, json.dumps(records)]) if records else turn
        if not messages:
            return over
        if len(turns_of(turn)) >= self.by.limits.max_turns:
            return replace(over, finish_reason="turns")
        try:
            messages, ids = self.by.replies.encode(messages, turn.token_ids[-1])
        except BadRow as error:
            return failed(turn, f"the reply cannot be said: {error}")
        if len(turn.token_ids) + len(ids) >= self.max_tokens:
            unread = record_of_unread(messages)
            replies = [*turn.replies, json.dumps(unread)] if unread else over.replies
            return replace(over, finish_reason="length", replies=replies)
        return Completion(
            turn.token_ids + ids, turn.logprobs + [0.0] * len(ids), "abort",
            turn.versions + [NOT_CHOSEN] * len(ids),
            [*turn.replies, json.dumps([*records, *messages])], turn.routed_experts,
            with_reply(turn.support_ids, len(ids)),
        )  # fmt: skip

    def give_up(self) -> dict[int, Completion]:
        for pending in self.pending.values():
            for request in pending.requests:
                if request.under_way is not None:
                    request.under_way.cancel()
        left = {i: pending.turn for i, pending in self.pending.items()}
        self.pending.clear()
        return left


def with_reply(support_ids: np.ndarray | None, num_tokens: int) -> np.ndarray | None:
    """Completion.support_ids with the tokens of a reply behind the others: nobody drew them."""
    if support_ids is None:
        return None
    return np.pad(support_ids, ((0, num_tokens), (0, 0)), constant_values=-1)


def failed(turn: Completion, problem: str) -> Completion:
    """The environment's failure makes the sample invalid."""
    last = [{"role": RECORD, "content": problem, "is_error": True}]
    return replace(turn, finish_reason="error", replies=[*turn.replies, json.dumps(last)])


def tool_message(call: Call, result: Reply) -> Message:
    """Returns what the policy reads of a call. An error's last line alone: the rest is about our
    code.
    """
    content = result.value if is_shown(result.value) else as_text(result.value)
    if result.error is not None:
        lines = result.error.strip().splitlines()
        content = f"Error: {lines[-1] if lines else 'no reason given'}"
    message: Message = {"role": "tool", "name": call.name, "content": content}
    if result.error is not None:
        message["is_error"] = True
    return plain(message)  # the name and the problem may quote what the policy wrote


def said_by_environment(
    result: Reply, rules: ImageRules
) -> tuple[list[Message], Message | None, str]:
    """(messages, record of what the turn was worth, what is wrong): of what split_step takes."""
    if result.error is not None:
        return [], None, result.error
    value, record, problem = split_step(result.value)
    if problem:
        return [], None, f"the environment returned {problem}"
    messages, problem = messages_in(value, rules)
    return messages, record, problem


def messages_in(value: Any, rules: ImageRules) -> tuple[list[Message], str]:
    """(messages, what is wrong): of None, of a text, which is the user's, or of messages."""
    try:
        value = said_with_images(value, rules)
    except BadRow as error:
        return [], f"the environment returned {error}"
    if value is None:
        return [], ""
    if isinstance(value, str):
        return [{"role": "user", "content": value}], ""
    if isinstance(value, list) and all(
        isinstance(m, dict) and m.get("role") in ROLES and is_content(m.get("content"))
        for m in value
    ):
        return value, ""
    expected = (
        f"None, a text, an image, or messages with a role ({', '.join(ROLES)}) and a text or parts "
        "with images as content"
    )
    return [], f"the environment returned {json.dumps(value)[:200]}; expected {expected}"


def has_dialogue(config: PpoConfig) -> bool:
    """Whether tools or an environment answer the policy's turns."""
    return bool(config.tools) or config.environment is not None


def has_replies(config: PpoConfig) -> bool:
    """Whether a sample may have several turns."""
    return has_dialogue(config) or config.agent is not None


def without_thoughts(text: str) -> str:
    """A call is what stands behind them; thoughts that were cut short are all there is."""
    return text.rpartition("</think>")[2] if "</think>" in text else text.partition("<think>")[0]


def messages_of(answer: Completion, texts: list[str]) -> list[Message]:
    """Returns what was said behind the prompt. texts: of the turns."""
    said: list[Message] = []
    for i, text in enumerate(texts):
        reply = json.loads(answer.replies[i]) if i < len(answer.replies) else []
        said.append({"role": "assistant", "content": text, **noted(reply)})
        said += [message for message in reply if not is_record(message)]
    return said


def replies_of(messages: list[Message]) -> list[str]:
    """Completion.replies, from what messages_of made of them."""
    replies: list[list[Message]] = []
    for message in messages:
        if message["role"] == "assistant":
            found = noted([{**message, "role": RECORD}])
            replies.append([{"role": RECORD, "content": "", **found}] if found else [])
        else:
            replies[-1].append(message)
    return [json.dumps(reply) for reply in replies if reply]
