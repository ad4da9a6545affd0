"""Private APIs of other packages are used in the compat modules alone."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {"torch", "vllm", "sglang", "megatron", "transformers", "peft", "liger_kernel"}
# import paths below which nothing is promised; what `from vllm import ...` gives is
INTERNAL = (
    "vllm.", "sglang.srt.", "megatron.core.dist_checkpointing.",
    "torch.distributed.elastic.rendezvous.utils", "liger_kernel.transformers.monkey_patch",
)  # fmt: skip
STANDARD = {"_exit", "_getframe", "_replace"}  # os, sys and named tuples
COMPAT = {
    "spmdrl/distributed/torch_compat.py", "spmdrl/distributed/elastic_compat.py",
    "spmdrl/hub/transformers_compat.py", "spmdrl/engines/fsdp/compat.py",
    "spmdrl/engines/megatron/compat.py", "spmdrl/rollout/vllm/compat.py",
    "spmdrl/rollout/sglang/compat.py",
    "kernels/spmdrl_kernels/torch_compat.py",
}  # fmt: skip
ADAPTATIONS = {  # whole files that are a change to a package, and why they stay in one piece
    "spmdrl/rollout/vllm/cpu.py": "replaces methods of vLLM's CPU kernels while an engine is built",
    "spmdrl/distributed/nccl_rules/recorder.py": "watches torch.distributed in a rehearsal",
    "spmdrl/engines/megatron/cpu_shim.py": "has megatron-core run without CUDA, in a dozen modules",
}
# holds Python's own internals in check, and imports none of the packages
SANDBOX = "spmdrl/rewards/sandbox/"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(tree: ast.Module) -> set[str]:
    """Private names that a file gives to something of its own, and uses."""
    used = {node.attr for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}  # fmt: skip
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for part in ast.walk(node):
                if isinstance(part, ast.FunctionDef) and part.name in used:
                    names.add(part.name)
                elif isinstance(part, ast.AnnAssign | ast.Assign):
                    names.update(
                        target.attr if isinstance(target, ast.Attribute) else target.id
                        for target in getattr(part, "targets", [getattr(part, "target", None)])
                        if isinstance(target, ast.Name)
                        or (isinstance(target, ast.Attribute) and of_self(target))
                    )
    return names


def of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def imported_names(tree: ast.Module) -> set[str]:
    """Names that a file has from the packages."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                package = getattr(node, "module", None) or alias.name
                if package.partition(".")[0] in PACKAGES:
                    names.add(alias.asname or alias.name.partition(".")[0])
    return names


def private_uses(source: str) -> Iterator[tuple[int, str]]:
    """(line, what is used) of each private API of another package."""
    tree = ast.parse(source)
    own, foreign = own_names(tree) | STANDARD, imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if is_private(node.attr) and node.attr not in own:
                yield node.lineno, ast.unparse(node)
            elif isinstance(node.ctx, ast.Store) and root_of(node) in foreign:
                yield node.lineno, f"{ast.unparse(node)} is replaced"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, path) for path in paths_of(node) if is_internal(path))
        elif isinstance(node, ast.Call) and name_of(node.func) in ("getattr", "setattr"):
            given = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            yield from ((node.lineno, str(n)) for n in given if is_private(str(n)) and n not in own)
        elif isinstance(node, ast.ClassDef) and node.bases:
            yield from overrides(node, own)


def name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def overrides(node: ast.ClassDef, own: set[str]) -> Iterator[tuple[int, str]]:
    """Private methods that nobody calls in the file: their class's base does."""
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and is_private(part.name) and part.name not in own:
            yield part.lineno, f"{node.name}.{part.name} overrides"


def root_of(node: ast.expr) -> str:
    """The name before the first dot; "" for settings that torch documents as attributes."""
    if ast.unparse(node).startswith("torch.backends."):
        return ""
    while isinstance(node, ast.Attribute):
        node = node.value
    return name_of(node)


def paths_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names]


def is_internal(path: str) -> bool:
    parts = path.split(".")
    if path.startswith("vllm."):
        return len(parts) > 2 or is_private(parts[-1])
    return parts[0] in PACKAGES and (any(map(is_private, parts)) or path.startswith(INTERNAL))


@cache
def files() -> dict[str, str]:
    found = [*ROOT.glob("spmdrl/**/*.py"), *ROOT.glob("kernels/**/*.py")]
    named = {str(file.relative_to(ROOT)): file.read_text() for file in found}
    return {name: source for name, source in named.items() if not name.startswith(SANDBOX)}


def test_private_apis_of_packages_are_used_in_compat_modules_alone() -> None:
    wrong = [
        f"{file}:{line}: {what}"
        for file, source in files().items()
        if file not in COMPAT | ADAPTATIONS.keys()
        for line, what in private_uses(source)
    ]
    assert not wrong, "give it a function in a compat module:\n" + "\n".join(wrong)


def test_every_file_that_may_use_private_apis_does() -> None:
    found = files()
    for file in COMPAT | ADAPTATIONS.keys():
        assert any(private_uses(found[file])), file


def test_every_function_of_a_compat_module_is_called_and_tested() -> None:
    found = files()
    tests = words(file.read_text() for file in ROOT.glob("tests/**/test_*_compat.py"))
    for compat in COMPAT:
        others = words(source for file, source in found.items() if file != compat)
        for node in ast.parse(found[compat]).body:
            if isinstance(node, ast.FunctionDef):
                assert node.name in others, f"{compat}: nobody calls {node.name}"
                assert node.name in tests, f"{compat}: no test calls {node.name}"
                assert ast.get_docstring(node), f"{compat}: {node.name}"


def words(sources: Iterable[str]) -> set[str]:
    return {word for source in sources for word in words_of(source)}


@cache
def words_of(source: str) -> set[str]:
    return set(re.findall(r"\w+", source))


def test_each_kind_of_private_use_is_found() -> None:
    source = """
import torch
import torch._dynamo
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import SamplingParams
from vllm.v1.engine.core import EngineCore

class Mine(EngineCore):
    def __init__(self):
        self._count = 0
    def _own(self):
        return self._count
    def _distributed_args(self):
        return self._own(), self._of_the_base

torch.compile = None
torch.backends.cudnn.benchmark = True
getattr(torch, "_C")
torch.ones(2)._version
"""
    assert [what for _, what in sorted(private_uses(source))] == [
        "torch._dynamo", "torch.utils._python_dispatch.TorchDispatchMode",
        "vllm.v1.engine.core.EngineCore", "Mine._distributed_args overrides",
        "self._of_the_base", "torch.compile is replaced", "_C", "torch.ones(2)._version",
    ]  # fmt: skip
