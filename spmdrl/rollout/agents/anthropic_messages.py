"""Anthropic's messages: requests read, answers written.

Source of the fields: Anthropic's API reference.
"""

from __future__ import annotations

from typing import Any

from spmdrl.rollout.agents.answers import Answers, Choice, Events
from spmdrl.rollout.agents.requests import (
    ApiError,
    ChatRequest,
    arguments_of_call,
    content_of,
    offers_tools,
    positive,
    require,
    stops,
    take,
    text_of,
)
from spmdrl.types import Message

FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def messages_request(body: dict[str, Any]) -> ChatRequest:
    """Reads the body of /v1/messages. Raises ApiError."""
    max_tokens = positive(body, "max_tokens")
    if max_tokens is None:
        raise ApiError(400, "max_tokens is required", "missing_field")
    system = text_of(body.get("system"), "system")
    names: dict[str, str] = {}  # of tools, by the id of a call
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for i, given in enumerate(require(body, "messages", list)):
        messages += messages_of(given, f"messages[{i}]", names)
    if not messages:
        raise ApiError(400, "messages: expected at least one", "invalid_messages")
    return ChatRequest(
        messages=messages,
        tools=tools_of(body),
        max_tokens=max_tokens,
        stop=stops(body, "stop_sequences"),
        stream=take(body, "stream", bool, False),
    )


def tools_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the tools as OpenAI's chat API has them. Raises ApiError."""
    if not offers_tools(take(body, "tool_choice", dict, {}).get("type", "auto")):
        return []
    found = []
    for i, tool in enumerate(take(body, "tools", list, [])):
        schema = tool.get("input_schema") if isinstance(tool, dict) else None
        if not isinstance(schema, dict) or not isinstance(tool.get("name"), str):
            raise ApiError(400, f"tools[{i}]: expected a name and an input_schema", "invalid_tools")
        function = {"name": tool["name"], "description": tool.get("description") or "",
                    "parameters": schema}  # fmt: skip
        found.append({"type": "function", "function": function})
    return found


def messages_of(given: Any, where: str, names: dict[str, str]) -> list[Message]:
    """Returns a message as chat templates take it: results of tools are messages of their own.
    Raises ApiError.
    """
    role = given.get("role") if isinstance(given, dict) else None
    if role not in ("user", "assistant", "system"):
        raise ApiError(400, f"{where}: expected the role user or assistant", "invalid_messages")
    content = given.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ApiError(400, f"{where}.content: expected a text or blocks", "invalid_type")
    said: list[Any] = []  # parts
    calls: list[dict[str, Any]] = []
    found: list[Message] = []
    for block in content:
        kind = block.get("type")
        if kind == "tool_use":
            names[str(block.get("id"))] = str(block.get("name"))
            function = {"name": str(block.get("name")),
                        "arguments": arguments_of_call(block.get("input") or {})}  # fmt: skip
            calls.append({"type": "function", "function": function})
        elif kind == "tool_result":
            id = str(block.get("tool_use_id"))
            result = content_of(block.get("content"), f"{where}.content")
            found.append(
                {"role": "tool", "content": result, "name": names.get(id, ""), "tool_call_id": id}
            )
        elif kind not in ("thinking", "redacted_thinking"):  # the model writes its thoughts as text
            said.append(block)
    read = text_of if role == "assistant" else content_of
    spoken = read(said, f"{where}.content")
    if calls:
        found.append({"role": role, "content": spoken or None, "tool_calls": calls})
    elif spoken or not found:
        found.append({"role": role, "content": spoken})
    return found


def messages_answer(answers: Answers) -> dict[str, Any]:
    """Writes the body of an answer to /v1/messages."""
    (choice,) = answers.choices
    return {
        "id": f"msg_{answers.id}", "type": "message", "role": "assistant",
        "model": answers.model, "content": blocks_of(choice),
        "stop_reason": "stop_sequence" if choice.stop else FINISH[choice.finish_reason],
        "stop_sequence": choice.stop,
        "usage": usage_of(answers),
    }  # fmt: skip


def messages_events(answers: Answers) -> Events:
    """Writes the events of a streamed answer: a turn is sent once it is whole."""
    whole = messages_answer(answers)
    usage = {**usage_of(answers), "output_tokens": 0}
    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield "message_start", {"type": "message_start", "message": begun}
    for i, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty: dict[str, Any] = {"type": "text", "text": ""}
            delta: dict[str, Any] = {"type": "text_delta", "text": block["text"]}
        else:
            (text,) = [text for id, _, text in answers.choices[0].calls if id == block["id"]]
            empty, delta = {**block, "input": {}}, {"type": "input_json_delta"}
            delta["partial_json"] = text
        start = {"type": "content_block_start", "index": i, "content_block": empty}
        yield "content_block_start", start
        yield "content_block_delta", {"type": "content_block_delta", "index": i, "delta": delta}
        yield "content_block_stop", {"type": "content_block_stop", "index": i}
    ended = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    used = {"output_tokens": answers.num_answer_tokens}
    yield "message_delta", {"type": "message_delta", "delta": ended, "usage": used}
    yield "message_stop", {"type": "message_stop"}


def blocks_of(choice: Choice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = [{"type": "text", "text": choice.text}] if choice.text else []
    for id, name, arguments in choice.calls:
        value = arguments_of_call(arguments)
        given = value if isinstance(value, dict) else {"arguments": value}
        blocks.append({"type": "tool_use", "id": id, "name": name, "input": given})
    return blocks or [{"type": "text", "text": ""}]


def usage_of(answers: Answers) -> dict[str, int]:
    return {"input_tokens": answers.num_prompt_tokens, "output_tokens": answers.num_answer_tokens}
