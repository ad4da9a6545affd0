"""OpenAI's responses: requests read, answers written.

Source of the fields: OpenAI's API reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmdrl.rollout.agents.answers import Answers, Choice, Events
from spmdrl.rollout.agents.openai_chat import ROLES, tools_of
from spmdrl.rollout.agents.requests import (
    ApiError,
    ChatRequest,
    arguments_of_call,
    content_of,
    positive,
    refuse,
    refuse_form,
    require,
    take,
    text_of,
)
from spmdrl.types import Message

UNSUPPORTED = {
    "background": "a request is answered where it is made",
    "conversation": "send the items, or previous_response_id",
    "prompt": "there are no stored prompts",
}


def responses_request(
    body: dict[str, Any], earlier: Mapping[str, list[Message]], names: Mapping[str, str]
) -> ChatRequest:
    """Reads the body of /v1/responses. earlier: the conversation behind each response of the same
    trajectory, without the instructions of its request, by its id; names: of the tools that were
    called in them, by the id of a call. Raises ApiError.
    """
    refuse(body, UNSUPPORTED)
    if (take(body, "n", int) or 1) > 1:
        refuse(body, {"n": "a response is one answer; /v1/chat/completions gives several"})
    refuse_form(take(take(body, "text", dict, {}), "format", dict, {}), "text.format")
    previous = take(body, "previous_response_id", str)
    if previous is not None and previous not in earlier:
        raise ApiError(404, f"previous_response_id={previous!r} is not known", "unknown_response")
    messages = [] if previous is None else list(earlier[previous])
    instructions = take(body, "instructions", str, "")
    if instructions:
        messages = [{"role": "system", "content": instructions}, *messages]
    given = require(body, "input", (str, list))
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = with_items(messages, items, dict(names))
    if not messages:
        raise ApiError(400, "input: expected at least one item", "invalid_messages")
    nested = [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in functions_of(take(body, "tools", list, []))
    ]
    return ChatRequest(
        messages=messages,
        tools=tools_of({"tools": nested, "tool_choice": body.get("tool_choice")}),
        max_tokens=positive(body, "max_output_tokens"),
        stream=take(body, "stream", bool, False),
    )


def functions_of(tools: list[Any]) -> list[dict[str, Any]]:
    """Raises ApiError for tools that OpenAI's servers run."""
    for i, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise ApiError(
                400, f"tools[{i}]: there are functions only, got {kind!r}", "invalid_tools"
            )
    return tools


def with_items(messages: list[Message], items: list[Any], names: dict[str, str]) -> list[Message]:
    """Returns the messages with the input's items behind them. names: of tools, by the id of a
    call; the items' own are added. Raises ApiError.
    """
    found = [*messages]
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise ApiError(400, f"{where}: expected an object", "invalid_type")
        kind = item.get("type") or "message"
        if kind == "message":
            role = require(item, "role", str)
            read = text_of if role == "assistant" else content_of
            content = read(item.get("content"), f"{where}.content")
            found.append({"role": ROLES.get(role, role), "content": content})
        elif kind == "function_call":
            name = require(item, "name", str)
            names[str(item.get("call_id"))] = name
            add_call(found, name, arguments_of_call(item.get("arguments")))
        elif kind == "function_call_output":
            id = require(item, "call_id", str)
            content = content_of(item.get("output"), f"{where}.output")
            found.append(
                {"role": "tool", "content": content, "name": names.get(id, ""), "tool_call_id": id}
            )
        elif kind != "reasoning":  # the model writes its thoughts as text
            raise ApiError(
                400, f"{where}: an item of the type {kind!r} is not known", "invalid_type"
            )
    return found


def add_call(messages: list[Message], name: str, arguments: Any) -> None:
    """Adds a call to the assistant's message at the end, or behind a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    last = messages[-1] = {**messages[-1]}
    last["content"] = last["content"] or None
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    last["tool_calls"] = [*last.get("tool_calls", ()), call]


def responses_answer(request: ChatRequest, answers: Answers) -> dict[str, Any]:
    """Writes the body of an answer to /v1/responses."""
    (choice,) = answers.choices
    cut = choice.finish_reason == "length"
    prompt, answer = answers.num_prompt_tokens, answers.num_answer_tokens
    return {
        "id": f"resp_{answers.id}", "object": "response", "created_at": answers.created,
        "model": answers.model, "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None, "instructions": None, "metadata": {}, "parallel_tool_calls": True,
        "temperature": None, "top_p": None, "tool_choice": "auto",
        "tools": [{"type": "function", "strict": None, **tool["function"]}
                  for tool in request.tools],
        "output": items_of(choice, answers.id),
        "usage": {
            "input_tokens": prompt, "output_tokens": answer, "total_tokens": prompt + answer,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }  # fmt: skip


def items_of(choice: Choice, id: str) -> list[dict[str, Any]]:
    """Returns the output's items: the text, then the calls."""
    items: list[dict[str, Any]] = []
    if choice.text or not choice.calls:
        part = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": []}
        items.append({"type": "message", "id": f"msg_{id}", "role": "assistant",
                      "status": "completed", "content": [part]})  # fmt: skip
    for call_id, name, arguments in choice.calls:
        items.append({"type": "function_call", "id": f"fc_{call_id}", "call_id": call_id,
                      "name": name, "arguments": arguments, "status": "completed"})  # fmt: skip
    return items


def responses_events(request: ChatRequest, answers: Answers) -> Events:
    """Writes the events of a streamed answer: a turn is sent once it is whole."""
    whole = responses_answer(request, answers)
    number = 0

    def event(kind: str, /, **fields: Any) -> tuple[str, dict[str, Any]]:
        nonlocal number
        number += 1
        return kind, {"type": kind, "sequence_number": number - 1, **fields}

    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for i, item in enumerate(whole["output"]):
        at = {"output_index": i, "item_id": item["id"]}
        if item["type"] == "message":
            empty = {**item, "status": "in_progress", "content": []}
            yield event("response.output_item.added", output_index=i, item=empty)
            (part,) = item["content"]
            at["content_index"] = 0
            yield event("response.content_part.added", **at, part={**part, "text": ""})
            yield event("response.output_text.delta", **at, delta=part["text"], logprobs=[])
            yield event("response.output_text.done", **at, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **at, part=part)
        else:
            empty = {**item, "status": "in_progress", "arguments": ""}
            yield event("response.output_item.added", output_index=i, item=empty)
            text = item["arguments"]
            yield event("response.function_call_arguments.delta", **at, delta=text)
            yield event(
                "response.function_call_arguments.done", **at, arguments=text, name=item["name"]
            )
        yield event("response.output_item.done", output_index=i, item=item)
    name = "response.completed" if whole["status"] == "completed" else "response.incomplete"
    yield event(name, response=whole)
