"""The order of the package's rooms: who may import whom."""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from itertools import permutations
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from spmdrl.config import RolloutConfig
from spmdrl.rollout.build import ENGINES

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "spmdrl"
KERNELS = TESTS.parent / "kernels" / "spmdrl_kernels"
# A room imports itself and those before it. The files at the top that are not named here are
# programs: they come last, and no room imports one.
ORDER = (
    "config", "cli", "segments", "types", "hub", "distributed", "checkpoint", "algo", "data",
    "weights", "engines", "rewards", "rollout", "environments", "training", "migration", "programs",
)  # fmt: skip
MOST_FILES_AT_THE_TOP = 14
MOST_LINES_OF_THE_STEP = 40


def modules(package: Path) -> dict[str, Path]:
    """Dotted name under the package -> file; a package stands by its own name."""
    files = {file.relative_to(package).with_suffix(""): file for file in package.rglob("*.py")}
    return {".".join(p for p in name.parts if p != "__init__"): f for name, f in files.items()}


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imported(file: Path, known: set[str], package: str) -> Iterator[str]:
    """Modules of the package that a file imports, in functions and for type checkers too."""
    prefix = f"{package}."
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [n if n.removeprefix(prefix) in known else node.module for n in whole]
        else:
            continue
        yield from (n.removeprefix(prefix) for n in names if n.startswith(prefix))


@cache
def graph(package: Path = PACKAGE) -> dict[str, set[str]]:
    known = modules(package)
    return {
        name: set(imported(file, set(known), package.name)) - {name} for name, file in known.items()
    }


def room(name: str) -> str:
    top = name.partition(".")[0]
    return top if top in ORDER else "programs"


def test_no_import_runs_up() -> None:
    arrows = [(a, b) for a, found in graph().items() for b in found if a]
    assert len(arrows) > 500
    wrong = [f"{a} imports {b}" for a, b in arrows if ORDER.index(room(a)) < ORDER.index(room(b))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", [PACKAGE, KERNELS], ids=["spmdrl", "spmdrl_kernels"])
def test_no_modules_import_each_other_in_a_circle(package: Path) -> None:
    modules = graph(package)
    assert sum(map(len, modules.values())) > len(modules)  # arrows were found
    order = [*TopologicalSorter(modules).static_order()]  # CycleError names the circle
    assert {*modules} <= {*order}


def test_no_two_folders_of_a_room_import_each_other() -> None:
    between = {
        (a.rpartition(".")[0], b.rpartition(".")[0]) for a, found in graph().items() for b in found
    }
    folders = {a for a, _ in between}
    both = [
        (a, b) for a, b in permutations(folders, 2)
        if a < b and {(a, b), (b, a)} <= between and not f"{b}.".startswith(f"{a}.") and a
    ]  # fmt: skip
    assert not both


def test_the_top_has_programs_and_ground_files_only() -> None:
    top = sorted(file.stem for file in PACKAGE.glob("*.py"))
    assert len(top) <= MOST_FILES_AT_THE_TOP, top
    assert {"ppo", "sft", "reward_model", "evaluate", "export", "launch", "timeline"} < {*top}


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports a test file by its name alone: of two with one name it collects the first."""
    names = Counter(file.name for file in TESTS.rglob("test_*.py"))
    assert not {name for name, files in names.items() if files > 1}


def test_every_room_says_what_it_is_in_one_line() -> None:
    for file in PACKAGE.rglob("__init__.py"):
        text = ast.get_docstring(parsed(file))
        assert text and "\n" not in text, file


def test_the_step_is_on_one_screen() -> None:
    tree = ast.parse(Path(PACKAGE, "training", "step.py").read_text())
    step = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "train_step")
    assert step.end_lineno is not None
    assert step.end_lineno - step.lineno < MOST_LINES_OF_THE_STEP


def test_no_phase_stands_for_a_barrier() -> None:
    """A collective that waits is `phases.barrier(...)` and not the end of an empty `with`."""
    found = [
        f"{file}:{node.lineno}"
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.With)
        and isinstance(node.body[0], ast.Pass)
        and "phases" in ast.unparse(node.items[0].context_expr)
    ]
    assert not found


def test_a_step_is_understood_from_700_lines() -> None:
    """The reading path of CONTRIBUTING.md, which says how many lines it has."""
    path = [
        PACKAGE / name for name in ("ppo.py", "training/loop.py", "training/step.py", "types.py")
    ]
    lines = sum(len(file.read_text().splitlines()) for file in path)
    assert lines <= 700
    assert f"# {lines} lines" in (PACKAGE.parent / "CONTRIBUTING.md").read_text()


def test_an_engine_is_known_by_its_protocol_and_its_spec() -> None:
    """No code compares the name of a rollout engine, or asks for the class of an engine."""
    own = [PACKAGE / "rollout" / name for name in ENGINES]
    assert get_args(get_type_hints(RolloutConfig)["engine"]) == tuple(ENGINES)
    for file in PACKAGE.rglob("*.py"):
        if file.parent in own:
            continue
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Compare):
                compared = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
                assert not {*ENGINES} & {*compared}, f"{file}:{node.lineno}"
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                assert not ast.unparse(node.args[1]).endswith("Engine"), f"{file}:{node.lineno}"


def test_every_program_that_trains_has_the_same_loop() -> None:
    loops = {name for name, found in graph().items() if "training.stop" in found}
    assert loops == {"training.loop"}
    assert {name for name, found in graph().items() if "training.loop" in found} == {
        "training.rl", "training.supervised",
    }  # fmt: skip
