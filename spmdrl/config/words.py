"""Words of messages that depend on a number."""

from __future__ import annotations

VERBS = {"are": "is", "have": "has", "were": "was"}  # of several things -> of one


def counted(number: int, noun: str) -> str:
    """Returns the number with its noun, which is given as of one thing: "1 row", "2 rows"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith(('ch', 's', 'x')) else 's'}"


def verb(number: int, word: str) -> str:
    """Returns the verb of so many things; it is given as of several: "are", "have", "name"."""
    return word if number != 1 else VERBS.get(word, f"{word}s")
