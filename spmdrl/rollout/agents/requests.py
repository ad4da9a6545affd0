"""The requests of agents, and how they are refused, whatever API they come by."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from spmdrl.data.reply_images import IMAGE_TYPES, is_uri, part_of
from spmdrl.data.table_files import BadRow
from spmdrl.types import Message

MOST_CHOICES = 64  # of a request
MOST_STOPS, MOST_STOP_CHARS = 16, 256


class ApiError(Exception):
    """A request that is refused: the HTTP status, and a text for the agent's author."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass(frozen=True)
class ChatRequest:
    """A request for turns of a chat. Temperature and the like are the run's, whatever is asked."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)  # as OpenAI's chat API has them
    n: int = 1
    max_tokens: int | None = None  # None: as many as fit
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stream: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    stream_usage: bool = False  # whether a stream ends with the number of tokens

    @cached_property
    def context(self) -> str:
        """Returns what else than the messages the prompt depends on, as text."""
        return json.dumps([self.tools, self.template_kwargs], sort_keys=True)


@dataclass(frozen=True)
class TextRequest:
    """A request for continuations of a text or of tokens."""

    prompt: str | list[int]
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stream: bool = False
    logprobs: bool = False
    echo: bool = False
    return_token_ids: bool = False
    stream_usage: bool = False  # whether a stream ends with the number of tokens


def take(
    body: dict[str, Any], name: str, kind: type | tuple[type, ...], default: Any = None
) -> Any:
    """Returns body[name], or the default where it is null or left out. Raises ApiError for another
    type.
    """
    value = body.get(name)
    if value is None:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    wrong = not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)
    if wrong:
        names = " or ".join(each.__name__ for each in kinds)
        raise ApiError(
            400, f"{name}: expected {names}, got {json.dumps(value)[:80]}", "invalid_type"
        )
    return value


def require(body: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    """Returns body[name]. Raises ApiError where it is missing or of another type."""
    value = take(body, name, kind)
    if value is None:
        raise ApiError(400, f"{name} is required", "missing_field")
    return value


def positive(body: dict[str, Any], *names: str) -> int | None:
    """Returns the first of these numbers that is given. Raises ApiError for one below 1."""
    for name in names:
        value = take(body, name, int)
        if value is not None:
            if value < 1:
                raise ApiError(400, f"{name}={value}: expected at least 1", "invalid_value")
            return value
    return None


def choices(body: dict[str, Any]) -> int:
    """Returns how many answers are asked for. Raises ApiError for too many."""
    n = positive(body, "n") or 1
    if n > MOST_CHOICES:
        raise ApiError(400, f"n={n}: expected at most {MOST_CHOICES}", "invalid_value")
    return n


def stops(body: dict[str, Any], name: str) -> tuple[str, ...]:
    """Returns the strings that end an answer. Raises ApiError."""
    value = take(body, name, (str, list), [])
    found = [value] if isinstance(value, str) else value
    if not all(isinstance(each, str) and each for each in found):
        raise ApiError(400, f"{name}: expected strings that are not empty", "invalid_type")
    if len(found) > MOST_STOPS or any(len(each) > MOST_STOP_CHARS for each in found):
        raise ApiError(
            400, f"{name}: expected at most {MOST_STOPS} strings of {MOST_STOP_CHARS} characters",
            "invalid_value",
        )  # fmt: skip
    return tuple(found)


def refuse(body: dict[str, Any], reasons: dict[str, str]) -> None:
    """Raises ApiError for a field that would change the distribution that is trained on, or asks
    for what there is not. reasons: by the field's name.
    """
    for name, reason in reasons.items():
        if body.get(name):
            raise ApiError(400, f"{name} cannot be honoured: {reason}", "unsupported_field")


def offers_tools(chosen: Any) -> bool:
    """Returns False where a request wants no tool to be called. Raises ApiError for a choice that
    would have to be forced.
    """
    if chosen not in ("auto", "none"):
        raise ApiError(
            400, f"tool_choice={chosen!r}: a call that is forced would be sampled from another "
            "distribution than the one that is trained; use 'auto' or 'none'", "unsupported_field",
        )  # fmt: skip
    return chosen == "auto"


def refuse_form(form: dict[str, Any], name: str) -> None:
    """Raises ApiError for a form of answers other than text. name: of the field."""
    if form.get("type", "text") != "text":
        raise ApiError(
            400, f"{name}: constrained decoding would sample from another distribution than the "
            "one that is trained. Ask for the format in the prompt, or by a tool",
            "unsupported_field",
        )  # fmt: skip


def text_of(content: Any, where: str) -> str:
    """Returns the text of a message's content: a text, or parts of text. Raises ApiError."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part_text(part, where) for part in content]
        return "".join(texts)
    raise ApiError(400, f"{where}: expected a text or a list of parts", "invalid_type")


def content_of(content: Any, where: str) -> Any:
    """Returns a message's content: a text, or parts where it shows images, each as a data: URI
    (data/reply_images.py). Raises ApiError.
    """
    if not isinstance(content, list) or not any(map(is_image_part, content)):
        return text_of(content, where)
    return [
        image_part(part, where) if is_image_part(part)
        else {"type": "text", "text": part_text(part, where)}
        for part in content
    ]  # fmt: skip


def is_image_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in IMAGE_TYPES


def image_part(part: dict[str, Any], where: str) -> dict[str, str]:
    """Returns an image as replies show them. part: as OpenAI's or Anthropic's APIs have them.
    Raises ApiError.
    """
    source, url = part.get("source"), part.get("image_url")
    if isinstance(source, dict) and source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    elif isinstance(source, dict):
        url = source.get("url")
    url = url.get("url") if isinstance(url, dict) else url
    if not is_uri(url):
        raise ApiError(
            400, f"{where}: an image is not fetched from elsewhere: send its file in base64, "
            f"'data:image/png;base64,...', got {json.dumps(url)[:60]}", "unsupported_content",
        )  # fmt: skip
    try:
        return part_of(url)
    except BadRow as error:
        raise ApiError(400, f"{where}: {error}", "unsupported_content") from error


def part_text(part: Any, where: str) -> str:
    """Returns the text of a part. Raises ApiError for anything else."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
        return part["text"]
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return part["refusal"]
    raise ApiError(
        400, f"{where}: a part of the type {kind!r} cannot be read; expected text",
        "unsupported_content",
    )  # fmt: skip


def arguments_of_call(arguments: Any) -> Any:
    """Returns a call's arguments as chat templates take them: a value, where they are JSON."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments or "{}", parse_constant=no_number)
        json.dumps(value, ensure_ascii=False).encode()  # halves of characters have no encoding
    except (ValueError, RecursionError):
        return arguments
    return value


def no_number(name: str) -> None:
    """Raises ValueError for NaN and the like, which are no JSON."""
    raise ValueError(name)


def without_surrogates(value: Any) -> Any:
    """Returns JSON with U+FFFD in place of halves of characters, which no tokenizer takes. What
    programs write comes with them where it is no UTF-8.
    """
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [without_surrogates(each) for each in value]
    if isinstance(value, dict):
        return {without_surrogates(k): without_surrogates(each) for k, each in value.items()}
    return value


def over(id: str) -> ApiError:
    """Returns the refusal of a request whose trajectory is over."""
    return ApiError(410, f"the trajectory {id!r} is over: its agent has ended", "trajectory_over")
