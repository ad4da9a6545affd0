r"""Refuses answers whose comparison would take seconds or for ever, before anything is parsed.

math-verify's parser and sympy need time that grows exponentially with how deep brackets are nested,
and try to compute 9^{9^{9}}, which no signal interrupts. What is bounded here are the length of an
answer, its depth, and the number of decimal digits of anything that stands in it.
"""

from __future__ import annotations

import math
import re

MOST_CHARS = 600  # of what stands in a box
MOST_DEPTH = 8  # of brackets; \frac{1}{1+\frac{1}{...}} takes 0.2 s with 8, and twice that with 9
MOST_DIGITS = 10_000  # of all numbers together, powers and factorials computed
MOST_EXPONENT = 200  # of a sum with letters, which sympy may expand
OPENING, CLOSING = "{([", "})]"
TOKEN = re.compile(r"\\[A-Za-z]+|\d[\d,]*(?:\.\d+)?|\.\d+|\*\*|\S")
BINOMIALS = (r"\binom", r"\dbinom", r"\tbinom")
REFUSED = (r"\int", r"\iint", r"\oint")  # sympy may look for an antiderivative for minutes
SUM_WITH_LETTERS = re.compile(r"(?=.*[A-Za-z])(?=.*[+-])")


def too_costly(text: str, most_chars: int) -> bool:
    """Whether `text` is not to be parsed. Takes time in proportion to its length."""
    tokens = TOKEN.findall(text[: most_chars + 1])
    return (
        len(text) > most_chars
        or depth_of(text) > MOST_DEPTH
        or any(token in REFUSED for token in tokens)
        or Digits(tokens).total() > MOST_DIGITS
    )


def depth_of(text: str) -> int:
    depth = most = 0
    for char in text:
        depth = max(0, depth + (char in OPENING) - (char in CLOSING))
        most = max(most, depth)
    return most


class Digits:
    """Bounds log10 of the numbers that LaTeX or plain text stands for, without computing them.

    A sum counts as a product, and a letter as nothing, unless it is raised to a power.
    """

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.at = tokens, 0

    def total(self) -> float:
        digits = 0.0
        while self.at < len(self.tokens):
            digits += self.group()
            self.at += 1  # a bracket that nothing opened
        return digits

    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def group(self) -> float:
        """Up to a closing bracket, or the end."""
        digits = 0.0
        while (token := self.next()) and token not in CLOSING:
            digits += self.power()
        return digits

    def power(self) -> float:
        """One thing with what is raised to it, from the right, and its factorials."""
        begin = self.at
        base = self.one()
        end = self.at
        while (token := self.next()) in ("^", "**", "!"):
            self.at += 1
            if token == "!":
                base *= power_of_10(base)
                continue
            exponent = power_of_10(self.power())
            text = "".join(self.tokens[begin:end])
            if exponent > 1.001 * MOST_EXPONENT and SUM_WITH_LETTERS.match(text):
                return math.inf
            base = max(base, 0.3) * exponent
        return base

    def one(self) -> float:
        """A number, a group in brackets, a binomial coefficient or a sign."""
        token = self.next()
        self.at += 1
        if token and token in OPENING:
            digits = self.group()
            self.at += 1
            return digits
        if token in BINOMIALS:
            chosen_from = self.power()
            return 0.31 * power_of_10(chosen_from) + self.power()
        return digits_of(token)


def digits_of(number: str) -> float:
    """|log10| of a literal; 0 for what is no number, and of 0."""
    if not any(char.isdecimal() for char in number):
        return 0.0
    whole, _, fraction = number.replace(",", "").partition(".")
    if len(whole) + len(fraction) > 15:
        return float(len(whole) + len(fraction))
    value = float(f"{whole or 0}.{fraction or 0}")
    return abs(math.log10(value)) if value else 0.0


def power_of_10(exponent: float) -> float:
    return 10.0**exponent if exponent < 300 else math.inf
