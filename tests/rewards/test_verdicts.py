"""The table of right and wrong verdicts of the reward for code, on a sample of it."""

from __future__ import annotations

import gzip
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from spmdrl.rewards.sandbox.sandbox import Limits

pytestmark = [pytest.mark.sandbox]
EXAMPLES = Path(__file__).parents[2] / "examples" / "code_sandbox"


@pytest.fixture
def verdicts(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("verdicts")


def mbpp_row(number: int, name: str, code: str, *tests: str) -> dict[str, Any]:
    return {"task_id": number, "text": "", "code": f"def {name}(x):\r\n    {code}",
            "test_list": list(tests), "test_setup_code": "", "challenge_test_list": []}  # fmt: skip


ROWS = [
    mbpp_row(1, "more", "return x + 1", "assert more(3) == 4", "assert more(-1) == 0"),
    mbpp_row(2, "nothing", "return None", "assert nothing(1) is None"),
    mbpp_row(3, "text", "return f'{x}!'", "assert text('a') == 'a!'"),
]
HUMANEVAL = {
    "task_id": "Own/0", "entry_point": "half",
    "prompt": 'def half(x):\n    """Half of it."""\n',
    "canonical_solution": "    return x / 2\n",
    "test": "def check(candidate):\n    assert candidate(3) == 1.5 and candidate(-4) == -2\n",
}  # fmt: skip


def test_no_verdict_of_a_sample_is_wrong(strong, verdicts, tmp_path, capsys):
    """All forgeries, all right programs, and some of their mutants."""
    mbpp, humaneval = tmp_path / "mbpp.jsonl", tmp_path / "HumanEval.jsonl.gz"
    mbpp.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    humaneval.write_bytes(gzip.compress(json.dumps(HUMANEVAL).encode()))
    files = ["--mbpp", str(mbpp), "--humaneval", str(humaneval)]
    assert verdicts.main([*files, "--sample", "130", "--workers", "2"]) == 0
    rows = {line[:24].strip(): line[24:].split() for line in capsys.readouterr().out.splitlines()}
    assert rows["MBPP"][:5] == ["3", "3", "0", "0", "0"]
    # of the mutants, the stub, `return None` and a change of the one that returns None are right
    right, judged_right, wrong, judged_wrong, _, _ = map(int, rows["MBPP, mutants"])
    assert right == judged_right >= 1 and wrong == judged_wrong >= 7
    assert rows["HumanEval, mutants"][2:4] == ["3", "3"]
    for name, column, least in (
        ("hard.txt", 0, 100), ("programs.txt", 0, 60), ("forgeries.txt", 2, 120),
        ("hard.txt, mutants", 2, 50), ("programs.txt, mutants", 2, 50),
    ):  # fmt: skip
        assert int(rows[name][column]) == int(rows[name][column + 1]) >= least


def test_a_wrong_verdict_is_named(strong, verdicts, tmp_path, capsys):
    mbpp = tmp_path / "mbpp.jsonl"
    bad = mbpp_row(9, "more", "return x", "assert more(3) == 4")
    mbpp.write_text(json.dumps(bad) + "\n")
    assert verdicts.main(["--mbpp", str(mbpp), "--sample", "1"]) == 1
    said = capsys.readouterr().out
    assert "    MBPP 9: must get 1, got 0.0\n" in said and "HumanEval: left out" in said
    mbpp.write_text(json.dumps({"task_id": 9}) + "\n")
    with pytest.raises(ValueError, match=r"line 1: no \['code', 'test_list', 'test_setup_code'\]"):
        verdicts.mbpp(mbpp)


def test_plain_python_says_which_mutants_are_right(strong, verdicts):
    mutants = importlib.import_module("mutants")
    (case, other, _) = (
        mutants.Case(f"c{row['task_id']}", row["code"], row["test_list"], name, "pass")
        for row, name in zip(ROWS, ("more", "nothing", "text"), strict=True)
    )
    made = {m.name.partition(", ")[2]: m for m in mutants.mutants(case, other, seed=0)}
    assert {*made} == {"stub", "returns None", "solution of c2", "off by one"}
    limits = Limits(cpu_s=3.0)
    assert mutants.passes_in_plain_python(case, limits) is True
    assert not any(mutants.passes_in_plain_python(m, limits) for m in made.values())
    nothing = mutants.mutant(other, "the same", "def nothing(x): return print(x)")
    assert mutants.passes_in_plain_python(nothing, limits) is True
    pairs = {"inputs": ["2"], "outputs": ["4 \n"]}
    prints = mutants.Case("p", "print(2 * int(input()))", pairs)
    assert mutants.passes_in_plain_python(prints, limits) is True
    assert mutants.passes_in_plain_python(prints._replace(program="print(5)"), limits) is False
