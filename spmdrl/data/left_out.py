"""Finds what a chat holds that its template leaves out of the text, so that a model is not told.

A template is asked once more with a part of the chat changed or taken away. Where its text stays
the same, the part has no place in it: the calls of

    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", ...}}]}

under a template that writes contents alone. Parts are named by their role and their key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from spmdrl.data.table_files import CALLS, BadRow

Chat = list[dict[str, Any]]
# what tells turns and calls from each other, which few templates write
IDS = frozenset({"id", "index", "tool_call_id", "type"})
ANYTHING = "q"  # put into a text to see whether the template's changes


def left_out(chat: Chat, render: Callable[[Chat], str]) -> set[str]:
    """Names of what the template leaves out: "system.content", "assistant.tool_calls", ...

    "..., in part": some of a content is there. render: the template; raises BadRow for a chat that
    it refuses, as it may refuse one that has been changed.
    """
    text = render(chat)
    said = without_space(text)
    found = set()
    for i, turn in enumerate(chat):
        for name, parts in contents(turn):
            if all(without_space(part) in said for part in parts if part):
                continue
            changed = [same(chat, i, "content", new, render, text) for new in marked(turn)]
            if any(changed):
                found.add(name if all(changed) else f"{name}, in part")
        found |= keys_left_out(chat, i, render, text)
    return found


def calls_left_out(chat: Chat, render: Callable[[Chat], str]) -> set[str]:
    """Finds, as left_out does, the calls that the assistant makes and the template leaves out."""
    said = enumerate(chat)
    calling = [i for i, turn in said if turn["role"] == "assistant" and calls_of(turn)]
    if not calling:
        return set()
    text = render(chat)
    found: set[str] = set().union(*(keys_left_out(chat, i, render, text) for i in calling))
    return {name for name in found if name.split(".")[1] in CALLS}


def calls_of(turn: dict[str, Any]) -> list[str]:
    """Returns the keys of a turn that hold calls."""
    return [key for key in CALLS if turn.get(key)]


def keys_left_out(chat: Chat, i: int, render: Callable[[Chat], str], text: str) -> set[str]:
    """Finds the keys of turn i, besides its content, that the template leaves out."""
    turn, found = chat[i], set()
    for key, value in turn.items():
        if key in ("role", "content") or key in IDS or value in (None, "", [], {}):
            continue
        name = f"{turn['role']}.{key}"
        if same(chat, i, key, None, render, text):
            found.add(name)
        elif key in CALLS:
            for part in ("name", "arguments"):
                if same(chat, i, key, with_other(value, part), render, text):
                    found.add(f"{name}.{part}")
    return found


def same(
    chat: Chat, i: int, key: str, value: Any, render: Callable[[Chat], str], text: str
) -> bool:  # fmt: skip
    """Whether the text stays as it is with another value in turn i; None: without the key."""
    turn = {name: old for name, old in chat[i].items() if name != key}
    if value is not None:
        turn[key] = value
    if turn == chat[i]:
        return False
    try:
        return render([*chat[:i], turn, *chat[i + 1 :]]) == text
    except BadRow:
        return False


def contents(turn: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """The name of a turn's content, and its texts; nothing where it has none."""
    content = turn.get("content")
    texts = [content] if isinstance(content, str) else [
        part["text"] for part in content or () if isinstance(part, dict)
        and isinstance(part.get("text"), str)
    ]  # fmt: skip
    if any(text.strip() for text in texts):
        yield f"{turn['role']}.content", texts


def marked(turn: dict[str, Any]) -> list[Any]:
    """The turn's content with something before it, and with something behind it."""
    content = turn["content"]
    if isinstance(content, str):
        return [ANYTHING + content, content + ANYTHING]
    return [[_with_text(part, ANYTHING, "") for part in content],
            [_with_text(part, "", ANYTHING) for part in content]]  # fmt: skip


def _with_text(part: Any, before: str, behind: str) -> Any:
    has_text = isinstance(part, dict) and isinstance(part.get("text"), str)
    return {**part, "text": before + part["text"] + behind} if has_text else part


def with_other(calls: Any, part: str) -> Any:
    """Calls of another name, or with other arguments, in which nothing else is changed."""
    if isinstance(calls, list):
        return [with_other(call, part) for call in calls]
    if not isinstance(calls, dict):
        return calls
    if part not in calls:
        return {key: with_other(value, part) for key, value in calls.items()}
    value = calls[part]
    if isinstance(value, str):
        return {**calls, part: value + ANYTHING}
    return {**calls, part: {**value, ANYTHING: ANYTHING}} if isinstance(value, dict) else calls


def without_space(text: str) -> str:
    return "".join(text.split())
