"""Reads the commands of a shell script without running it.

Variables that the script sets are put in, with their defaults (`${N:-8}`), arrays, sums, the
current folder (`$(pwd)`) and the script's (`$(dirname "$0")`). Lines count in their order: an `if`
is not decided, so that the last assignment holds, and the variable is named in `Command.undecided`.
What stands in a heredoc is no command.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any

from spmdrl.config import ConfigError

DECLARED = re.compile(r"^(?:export|local|readonly|declare|typeset)(?:\s+-\w+)*\s+")
ASSIGNMENT = re.compile(r"^(\w+)(\+?)=(.*)$", re.S)
WORD = re.compile(r"(?:\$\(\(.*?\)\)|'[^']*'|\"(?:[^\"\\]|\\.)*\"|\\.|[^\s'\"\\])+", re.S)
REDIRECTION = re.compile(r"\d*(?:>|<|&>|\|)")  # what follows is not the command's
QUOTED = re.compile(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"|(?:\\.|[^'\"\\])+|['\"\\]", re.S)
ARRAY = re.compile(r"[\"']?\$\{(\w+)\[@\]\}[\"']?")
ARRAY_START = re.compile(r"^[ \t]*(?:[a-z]+\s+(?:-\w+\s+)*)?\w+\+?=\((?!\()", re.M)
REPLACED = re.compile(r"\$\{(\w+)//([^/{}]+)/([^{}]*)\}")  # ${NAME//old/new}
BRACED = re.compile(r"\$\{(\w+|@)(?::?[-=]([^{}]*))?\}")
KEPT = re.compile(r"\$\{(\w+):?=([^{}]*)\}")  # ${NAME:=value}, which sets the variable, too
NAMED = re.compile(r"\$(\w+|@)")
SUM = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
# the folder of the script, and the folder that a command of these names
OWN_FILE = r"\"?(?:\$0|\$\{?BASH_SOURCE(?:\[0\])?\}?)\"?"
OWN_FOLDER = re.compile(
    rf"\$\(dirname\s+(?:--\s+)?(?:{OWN_FILE}|\"?\$\((?:readlink\s+-f|realpath)\s+{OWN_FILE}\)\"?)\)"
)
FOLDER = re.compile(
    r"\$\((?:(?:readlink\s+-f|realpath)\s+\"?([^\s\"()]+)\"?|"
    r"cd\s+(?:--\s+)?\"?([^\s\"()]+)\"?[^()]*&&\s*pwd(?:\s+-P)?)\)"
)
PWD = re.compile(r"\$\(pwd(?:\s+-P)?\)|`pwd`")
HEREDOC = re.compile(r"(?<!<)<<(-?)[ \t]*(['\"]?)([A-Za-z_]\w*)\2[^\n]*\n")
COMMENT = re.compile(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"|\\.|(?<![^\s;(&|])#[^\n]*", re.S)
PART = re.compile(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"|\\.|;;|;|&&|\|\|", re.S)
OPENING = re.compile(r"(?:if|case|for|while|until|select)\b")
CLOSING = re.compile(r"(?:fi|esac|done)\b")
KEYWORD = re.compile(r"(?:(?:then|else|do|elif|if|while|until)\s+|[\w*\"'|.-]+\)\s+)")
OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.floordiv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


class Command(list[str]):
    """The words of a command, and the variables in them whose value the script leaves open.

    undecided: name -> the values that are assigned to it, the one that was taken last.
    """

    undecided: Mapping[str, list[str]] = {}


class Settings(dict[str, Any]):
    """The settings that a command gives; undecided: as of the command.

    unknown: words of the command that are variables which nothing sets, and may hold settings.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        undecided: Mapping[str, list[str]],
        unknown: Iterable[str] = (),
    ) -> None:
        super().__init__(settings)
        self.undecided = undecided
        self.unknown = list(unknown)


def commands(text: str, folder: str = ".") -> list[Command]:
    """Returns the words of every command of the script, in the order of its lines.

    folder: where the script lies. A word with a variable that nothing sets keeps its name:
    "$DATA/train.parquet". Raises ConfigError where a quotation mark has no counterpart.
    """
    variables: dict[str, str] = {"@": "", "PWD": ".", "HOME": os.environ.get("HOME", "$HOME")}
    values: dict[str, list[str]] = {}  # of a variable, in their order
    branched: set[str] = set()  # variables that are set below an `if` or behind `&&`
    inside: dict[str, set[str]] = {}  # the variables that a variable's value is made of
    found = []
    for line, below_if in parts(with_folders(text, folder)):
        names = set(re.findall(r"\$\{?(\w+)", line))
        names |= {name for outer in names for name in inside.get(outer, ())}
        try:
            for name, value in KEPT.findall(line):
                variables[name] = variables.get(name) or value_of(value, variables)
            assigned = assignments(line)
            for name, more, value in assigned:
                before = f"{variables.get(name, '')} " if more else ""
                grows = bool(more) or name in names
                variables[name] = before + value_of(value, variables)
                values[name] = [*([] if grows else values.get(name, [])), variables[name]]
                inside[name] = names
                branched |= {name} if below_if else set()
            if assigned:
                continue
            words = Command(shlex.split(expand(line, variables)))
        except ValueError as error:
            raise ConfigError(f"line {line[:60]!r}... of the script: {error}") from error
        if words:
            words.undecided = {
                name: list(dict.fromkeys(values[name]))
                for name in sorted(names & values.keys())
                if name in branched or len({*values[name]}) > 1
            }
            found.append(words)
    return found


def with_folders(text: str, folder: str) -> str:
    """Puts in the script's own folder, and `.` for the current one."""
    text = PWD.sub(".", OWN_FOLDER.sub(lambda found: folder, text))
    return FOLDER.sub(lambda found: found[1] or found[2], text)


def parts(text: str) -> Iterator[tuple[str, bool]]:
    """Gives each command or assignment, and whether it is below an `if`, `case` or loop, or behind
    `&&` or `||`.
    """
    depth = 0
    for line in logical_lines(text):
        pieces, behind = PART.sub(cut, line).split("\0"), False
        for piece in pieces:
            mark, piece = piece[:1], piece.strip("&;").strip()
            behind = mark == "&"
            depth -= CLOSING.match(piece) is not None
            depth += OPENING.match(piece) is not None
            while keyword := KEYWORD.match(piece):
                piece = piece[keyword.end() :]
            if piece:
                yield piece, depth > 0 or behind


def cut(found: re.Match[str]) -> str:
    """Puts a mark in the place of what ends a command; what stands in quotation marks has none."""
    if found[0] in ("&&", "||"):
        return "\0&"
    return "\0;" if found[0] in (";", ";;") else found[0]


def logical_lines(text: str) -> list[str]:
    """Returns the lines without heredocs and comments. What ends in a backslash, and what stands
    in quotation marks or is an array, is one line with those that follow.
    """
    text = without_heredocs(text)
    text = COMMENT.sub(lambda found: "" if found[0][0] == "#" else found[0], text)
    text = re.sub(r"[ \t]*\\[ \t]*\n(?:[ \t]*\n)*", " ", text)
    text = "".join(p.replace("\n", " ") if p[0] in "'\"" else p for p in QUOTED.findall(text))
    for found in ARRAY_START.finditer(text):
        end = closed_at(text, found.end())
        text = text[: found.end()] + text[found.end() : end].replace("\n", " ") + text[end:]
    return [line.strip() for line in text.splitlines() if line.strip()]


def closed_at(text: str, start: int) -> int:
    """Returns where the bracket is closed that is open at `start`; `start` where none closes it."""
    depth = 1
    for part in QUOTED.finditer(text, start):
        for place, letter in enumerate(part[0] if part[0][0] not in "'\"" else ""):
            depth += {"(": 1, ")": -1}.get(letter, 0)
            if depth == 0:
                return part.start() + place
    return start


def without_heredocs(text: str) -> str:
    """Leaves out the lines of each heredoc, with the one that ends it."""
    start = 0
    while found := HEREDOC.search(text, start):
        indent = r"\t*" if found[1] else ""
        line = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
        end = re.compile(rf"^{indent}{found[3]}$\n?", re.MULTILINE).search(text, found.end())
        if end is not None and not re.search(r"(?:^|\s)#", line):  # a comment may name one
            text = text[: found.end()] + text[end.end() :]
        start = found.end()
    return text


def assignments(line: str) -> list[tuple[str, str, str]]:
    """Returns (name, "+" or "", value) of each variable that the line sets; none of a command."""
    bare = DECLARED.sub("", line)
    whole = ASSIGNMENT.match(bare)
    if whole and is_assignment(whole[3]):
        return [(whole[1], whole[2], whole[3])]
    words = WORD.findall(bare)
    found = [m for word in words if (m := ASSIGNMENT.match(word))]
    names = [word for word in words if bare != line and re.fullmatch(r"\w+", word)]  # export NAME
    closed = all(word.count("(") == word.count(")") for word in words)
    if not closed or len(found) + len(names) < len(words):
        return []
    return [(m[1], m[2], m[3]) for m in found]


def is_assignment(value: str) -> bool:
    """Says whether `NAME=value` stands alone; else it is a variable in front of a command."""
    if value.startswith("(") or SUM.match(value):
        return True
    bare = QUOTED.sub(lambda part: "x" if part[0][0] in "'\"" else part[0], value)
    return len(bare.split()) <= 1


def before_redirection(words: list[str]) -> list[str]:
    """Returns the words up to a redirection or a pipe."""
    return list(takewhile(lambda word: not REDIRECTION.match(word), words))


def value_of(value: str, variables: Mapping[str, str]) -> str:
    """Returns what a variable is set to; the words of an array as they stand."""
    if value.startswith("("):
        return expand(value[1:].rstrip().removesuffix(")"), variables)
    words = shlex.split(expand(value, variables))
    return words[0] if words else ""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Puts the variables in, but for what stands in single quotation marks."""
    text = ARRAY.sub(lambda found: variables.get(found[1], ""), text)
    parts = QUOTED.findall(text)
    text = "".join(part if part[0] == "'" else put_in(part, variables) for part in parts)
    return put_in(text, variables) if "${" in text else text  # "${A:-"${B}/c"}" has both


def put_in(text: str, variables: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        name = found[1]
        default = found[2] if found.re is BRACED else None
        if name in variables and (variables[name] or default is None):
            return variables[name]
        return found[0] if default is None else default

    text = REPLACED.sub(lambda f: variables.get(f[1], "").replace(f[2], f[3]), text)
    for _ in range(4):  # a default may be a variable
        text = NAMED.sub(value, BRACED.sub(value, text))
    return SUM.sub(lambda found: str(sum_of(found[1], variables)), text)


def sum_of(text: str, variables: Mapping[str, str]) -> int | str:
    """Returns what shell arithmetic gives; the text itself where a variable is not known."""
    names = re.sub(r"[A-Za-z_]\w*", lambda found: variables.get(found[0], found[0]), text)
    try:
        return calculated(ast.parse(names.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return f"$(({text}))"


def calculated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](calculated(node.left), calculated(node.right))
    raise ValueError("no arithmetic of whole numbers")
