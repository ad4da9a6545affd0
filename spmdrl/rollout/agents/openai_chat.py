"""OpenAI's chat and text completions: requests read, answers written.

Source of the fields: OpenAI's API reference; `return_token_ids`, `prompt_token_ids` and `token_ids`
are vLLM's.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from spmdrl.rollout.agents.answers import Answers, Choice, Events
from spmdrl.rollout.agents.requests import (
    ApiError,
    ChatRequest,
    TextRequest,
    arguments_of_call,
    choices,
    content_of,
    offers_tools,
    positive,
    refuse,
    refuse_form,
    require,
    stops,
    take,
    text_of,
)
from spmdrl.types import Message

ROLES = {"developer": "system", "function": "tool"}  # by other names
UNSUPPORTED = {
    "top_logprobs": "only the log-probability of the sampled token is known",
    "logit_bias": "the policy is trained as it is sampled, without a bias",
    "audio": "the model makes text",
    "functions": "use tools",
}


def chat_request(body: dict[str, Any]) -> ChatRequest:
    """Reads the body of /v1/chat/completions. Raises ApiError."""
    refuse(body, UNSUPPORTED)
    refuse_form(take(body, "response_format", dict, {}), "response_format")
    options = take(body, "stream_options", dict, {})
    template = take(body, "chat_template_kwargs", dict, {})
    refuse(template, {"chat_template": "the template is the model's"})
    return ChatRequest(
        messages=messages_of(require(body, "messages", list)),
        tools=tools_of(body),
        n=choices(body),
        max_tokens=positive(body, "max_completion_tokens", "max_tokens"),
        stop=stops(body, "stop"),
        seed=take(body, "seed", int),
        stream=take(body, "stream", bool, False),
        logprobs=take(body, "logprobs", bool, False),
        return_token_ids=take(body, "return_token_ids", bool, False),
        template_kwargs=template,
        stream_usage=take(options, "include_usage", bool, False),
    )


def tools_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the tools that a request offers. Raises ApiError."""
    if not offers_tools(body.get("tool_choice") or "auto"):
        return []
    tools = take(body, "tools", list, [])
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, f"tools[{i}]: expected a function with a name", "invalid_tools")
    return [{"type": "function", "function": tool["function"]} for tool in tools]


def messages_of(given: list[Any]) -> list[Message]:
    """Returns messages as chat templates take them. Raises ApiError."""
    if not given:
        raise ApiError(400, "messages: expected at least one", "invalid_messages")
    names: dict[str, str] = {}  # of tools, by the id of a call
    return [message_of(message, f"messages[{i}]", names) for i, message in enumerate(given)]


def message_of(given: Any, where: str, names: dict[str, str]) -> Message:
    """names: of the tools that were called before, by the id of the call; the message's own are
    added. Raises ApiError.
    """
    role = given.get("role") if isinstance(given, dict) else None
    if not isinstance(role, str):
        raise ApiError(400, f"{where}: expected an object with a role", "invalid_messages")
    role = ROLES.get(role, role)
    read = text_of if role == "assistant" else content_of
    message: Message = {"role": role, "content": read(given.get("content"), f"{where}.content")}
    if role == "tool":
        id = take(given, "tool_call_id", str, "")
        message["name"] = take(given, "name", str) or names.get(id, "")
        return message | ({"tool_call_id": id} if id else {})
    calls = take(given, "tool_calls", list, [])
    if role == "assistant" and calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [call_of(call, f"{where}.tool_calls", names) for call in calls]
    return message


def call_of(given: Any, where: str, names: dict[str, str]) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{where}: expected functions with a name", "invalid_messages")
    names[str(given.get("id"))] = function["name"]
    arguments = arguments_of_call(function.get("arguments"))
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def chat_answer(request: ChatRequest, answers: Answers) -> dict[str, Any]:
    """Writes the body of an answer to /v1/chat/completions."""
    return {
        "id": f"chatcmpl-{answers.id}", "object": "chat.completion", "created": answers.created,
        "model": answers.model,
        "choices": [
            {"index": i, "message": wire_message(choice), "finish_reason": choice.finish_reason,
             "logprobs": logprobs_of(choice) if request.logprobs else None,
             **token_ids(request, choice)}
            for i, choice in enumerate(answers.choices)
        ],
        "usage": usage_of(answers),
        **({"prompt_token_ids": answers.prompt_ids} if request.return_token_ids else {}),
    }  # fmt: skip


def chat_events(request: ChatRequest, answers: Answers) -> Events:
    """Writes the events of a streamed answer: a turn is sent once it is whole."""
    head = {
        "id": f"chatcmpl-{answers.id}", "object": "chat.completion.chunk",
        "created": answers.created, "model": answers.model,
    }  # fmt: skip
    for i, choice in enumerate(answers.choices):
        calls = [{"index": k, **call} for k, call in enumerate(wire_calls(choice))]
        delta: dict[str, Any] = {"role": "assistant", "content": choice.message["content"]}
        delta |= {"tool_calls": calls} if calls else {}
        logprobs = logprobs_of(choice) if request.logprobs else None
        begun = {"index": i, "delta": delta, "finish_reason": None, "logprobs": logprobs}
        yield "", {**head, "choices": [begun | token_ids(request, choice)]}
        ended = {"index": i, "delta": {}, "finish_reason": choice.finish_reason}
        yield "", {**head, "choices": [ended]}
    if request.stream_usage:
        yield "", {**head, "choices": [], "usage": usage_of(answers)}


def wire_message(choice: Choice) -> dict[str, Any]:
    calls = wire_calls(choice)
    return {
        "role": "assistant", "content": choice.message["content"], "refusal": None,
        **({"tool_calls": calls} if calls else {}),
    }  # fmt: skip


def wire_calls(choice: Choice) -> list[dict[str, Any]]:
    return [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name, arguments in choice.calls
    ]


def logprobs_of(choice: Choice) -> dict[str, Any]:
    """Returns the sampled tokens with the log-probabilities of the distribution sampled from."""
    pairs = zip(choice.token_texts, choice.completion.logprobs, strict=True)
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace")),
             "top_logprobs": []}
            for text, logprob in pairs
        ],
        "refusal": None,
    }  # fmt: skip


def token_ids(request: ChatRequest | TextRequest, choice: Choice) -> dict[str, Any]:
    return {"token_ids": choice.completion.token_ids} if request.return_token_ids else {}


def usage_of(answers: Answers) -> dict[str, int]:
    prompt, answer = answers.num_prompt_tokens, answers.num_answer_tokens
    return {
        "prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer
    }  # fmt: skip


def text_request(body: dict[str, Any]) -> TextRequest:
    """Reads the body of /v1/completions: one text, or the tokens of one. Raises ApiError."""
    refuse(body, {"logit_bias": UNSUPPORTED["logit_bias"], "suffix": "the model only continues"})
    if (take(body, "best_of", int) or 1) > choices(body):
        refuse(body, {"best_of": "every answer is trained on, so none is left out"})
    if body.get("logprobs") is not None:
        refuse(body, {"echo": "a prompt has no log-probabilities here; leave logprobs or echo out"})
    options = take(body, "stream_options", dict, {})
    prompt = require(body, "prompt", (str, list))
    if isinstance(prompt, list):
        if len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if not isinstance(prompt, str) and not all(type(each) is int for each in prompt):
            raise ApiError(400, "prompt: expected one text, or token ids", "invalid_type")
    if not prompt:
        raise ApiError(400, "prompt: it is empty", "invalid_value")
    return TextRequest(
        prompt=prompt,
        n=choices(body),
        max_tokens=positive(body, "max_tokens"),
        stop=stops(body, "stop"),
        seed=take(body, "seed", int),
        stream=take(body, "stream", bool, False),
        logprobs=take(body, "logprobs", (int, bool)) is not None,
        echo=take(body, "echo", bool, False),
        return_token_ids=take(body, "return_token_ids", bool, False),
        stream_usage=take(options, "include_usage", bool, False),
    )


def text_answer(request: TextRequest, answers: Answers) -> dict[str, Any]:
    """Writes the body of an answer to /v1/completions."""
    return text_head(answers) | {
        "choices": [
            text_choice(request, i, c, answers.echoed) for i, c in enumerate(answers.choices)
        ],
        "usage": usage_of(answers),
        **({"prompt_token_ids": answers.prompt_ids} if request.return_token_ids else {}),
    }


def text_events(request: TextRequest, answers: Answers) -> Events:
    """Writes the events of a streamed answer: a choice is sent once it is whole."""
    for i, choice in enumerate(answers.choices):
        whole = text_choice(request, i, choice, answers.echoed)
        yield "", text_head(answers) | {"choices": [whole]}
    if request.stream_usage:
        yield "", text_head(answers) | {"choices": [], "usage": usage_of(answers)}


def text_head(answers: Answers) -> dict[str, Any]:
    return {
        "id": f"cmpl-{answers.id}", "object": "text_completion", "created": answers.created,
        "model": answers.model,
    }  # fmt: skip


def text_choice(
    request: TextRequest, index: int, choice: Choice, echoed: str
) -> dict[str, Any]:  # fmt: skip
    logprobs = None
    if request.logprobs:
        starts = list(accumulate(map(len, choice.token_texts), initial=0))
        logprobs = {
            "tokens": choice.token_texts, "token_logprobs": choice.completion.logprobs,
            "top_logprobs": None, "text_offset": starts[:-1],
        }  # fmt: skip
    return {
        "index": index, "text": echoed + choice.text, "finish_reason": choice.finish_reason,
        "logprobs": logprobs, **token_ids(request, choice),
    }  # fmt: skip
