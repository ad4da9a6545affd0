"""Every call that spmdrl makes into SGLang fits the published package.

SGLang cannot be installed beside vLLM. What its functions take was read from its wheel, by
sglang_signatures.py, into sglang_signatures.json. Where it is installed the table is read anew.
"""

from __future__ import annotations

import ast
import json
from importlib.util import find_spec
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import pytest
import sglang_signatures
from sglang_signatures import TABLE

from spmdrl.rollout.sglang.compat import VERSION

ROOT = Path(__file__).parents[2]
COMPAT = ast.parse((ROOT / "spmdrl/rollout/sglang/compat.py").read_text())
WRITTEN = json.loads(TABLE.read_text())
IN_PYTHON = {"init_ipc_channels": "def", "forward": "def"}  # overridden or replaced, not called


def signature(line: str) -> Signature:
    """The reverse of sglang_signatures.parameters: "a, b=, *c, **"."""
    parameters = []
    for part in filter(None, line.split(", ")):
        name, has_default = part.strip("*="), part.endswith("=")
        kind = Parameter.KEYWORD_ONLY if part.startswith("*") else Parameter.POSITIONAL_OR_KEYWORD
        if part == "**":
            name, kind = "rest", Parameter.VAR_KEYWORD
        default = None if has_default else Parameter.empty
        parameters.append(Parameter(name, kind, default=default))
    return Signature(sorted(parameters, key=lambda p: (p.kind, p.default is None)))


def names_of(entry: str) -> str:
    """The name by which an entry of the table is called: of a method, or of a class."""
    path = entry.partition(":")[2].split(".")
    return path[-2] if path[-1] == "__init__" else path[-1]


def calls() -> dict[str, list[ast.Call]]:
    """Of compat.py, by the last part of what is called."""
    found: dict[str, list[ast.Call]] = {}
    for node in ast.walk(COMPAT):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            found.setdefault(name.replace("RankScheduler", "Scheduler"), []).append(node)
    return found


@pytest.mark.parametrize("entry", WRITTEN["called"])
def test_a_call_fits_what_the_package_takes(entry: str) -> None:
    name, takes = names_of(entry), signature(WRITTEN["called"][entry])
    if name in IN_PYTHON:
        return
    made = calls().get(name, [])
    assert made, f"compat.py does not call {name}"
    for call in made:
        named = {k.arg: None for k in call.keywords if k.arg is not None}
        takes.bind(*[None] * len(call.args), **named)  # raises TypeError


def test_what_is_overridden_takes_what_the_package_gives() -> None:
    made = {n.name: n for n in ast.walk(COMPAT) if isinstance(n, ast.FunctionDef)}
    of = WRITTEN["called"]["srt.managers.scheduler:Scheduler.init_ipc_channels"]
    assert [arg.arg for arg in made["init_ipc_channels"].args.args] == ["self", of]
    sampler = signature(WRITTEN["called"]["srt.layers.sampler:Sampler.forward"])
    assert next(iter(sampler.parameters)) == "logits_output"  # the others are left out


def test_everything_that_is_imported_is_in_the_table() -> None:
    known = {entry.partition(".__init__")[0] for entry in WRITTEN["called"]}
    known |= {entry.rpartition(".")[0] for entry in known if "." in entry.partition(":")[2]}
    for node in ast.walk(COMPAT):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("sglang."):
            for alias in node.names:
                assert f"{str(node.module).partition('.')[2]}:{alias.name}" in known


def test_attributes_that_are_read_are_in_the_table() -> None:
    known = {name for line in WRITTEN["attributes"].values() for name in line.split(", ")}
    known |= {names_of(entry) for entry in WRITTEN["called"]}
    of_sglang = {"scheduler", "queued", "batch", "runner", "pool"}  # compat's names for objects
    for node in ast.walk(COMPAT):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in of_sglang:
            assert node.attr in known | {"reqs"}, ast.unparse(node)


def test_the_table_is_of_the_version_and_the_options_that_are_used() -> None:
    assert WRITTEN["version"] == VERSION
    assert WRITTEN["server_args"].split(", ") == sglang_signatures.given_server_args()


@pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang, to read its source")
def test_the_table_is_what_the_installed_package_has() -> None:
    import importlib.metadata

    spec: Any = find_spec("sglang")
    folder = Path(spec.origin).parent
    sources = {
        str(file.relative_to(folder.parent)): file.read_text()
        for file in folder.glob("srt/**/*.py")
    }
    installed = importlib.metadata.version("sglang")
    assert sglang_signatures.table(sources, installed) == WRITTEN
