# ruff: noqa: E501  programs of one line
"""The reward for model-written code, which runs it in the sandbox."""

from __future__ import annotations

import json
import textwrap
import time

import pytest
from sandbox_attacks import TIGHT, left, there_is_one, wait_until

from spmdrl.config import RewardConfig
from spmdrl.rewards.code import code as code_reward
from spmdrl.rewards.code import last_block
from spmdrl.rewards.runner import RewardRunner
from spmdrl.rewards.sandbox import sandbox
from spmdrl.rewards.sandbox.sandbox import SandboxError
from spmdrl.types import Prompt, Sample

pytestmark = [pytest.mark.sandbox, pytest.mark.clock]


def block(program: str, language: str = "python") -> str:
    return f"So:\n```{language}\n{textwrap.dedent(program)}\n```\nThis is it."


def score(program: str, truth: object) -> tuple[float, float]:
    got = code_reward(block(program), truth, TIGHT)
    assert got["score"] == float(got["passed"] == got["total"])
    return got["passed"], got["total"]


PAIRS = {"inputs": ["1 2\n", "3 4\n", "5 6"], "outputs": ["3\n", " 7 \n\n", "12\n"]}


def test_programs_are_compared_line_by_line(form):
    truth = json.dumps(PAIRS)
    assert score("a, b = map(int, input().split()); print(a + b)", truth) == (2, 3)
    assert score("a, b = map(int, input().split()); print(a + b + (a > 4))", PAIRS) == (3, 3)
    assert score("print(3); raise SystemExit(1)", PAIRS) == (0, 3)
    assert score("import os; print(3, flush=True); os.kill(os.getpid(), 9)", PAIRS) == (0, 3)
    assert score("while True: pass", {"inputs": [""], "outputs": [""]}) == (0, 1)
    assert code_reward("no code", PAIRS) == {
        "score": 0.0, "passed": 0.0, "total": 3.0, "no_code": 1.0, "limit_hit": 0.0
    }  # fmt: skip


def test_tests_share_no_state(strong):
    program = """
        import os, time
        print(len(os.listdir(".")))
        os.makedirs("a/b"); os.chmod("a", 0)
        if os.fork() == 0:
            os.setsid()
            while True:
                open("late", "w").close()
    """
    assert score(program, {"inputs": [""] * 5, "outputs": ["0"] * 5}) == (5, 5)
    one_stops = "import os\nif input() == '1': os.kill(os.getppid(), 9)\nprint(1)"
    assert score(one_stops, {"inputs": ["0", "1", "0"], "outputs": ["1"] * 3})[0] == 1


def test_values_are_compared_as_json(form):
    truth = {
        "fn_name": "f",
        "inputs": [[1, 2], [0.1, 0.2], ["a", "b"]],
        "outputs": [[3], 0.3, "ab"],
    }
    assert score("def f(a, b): return a + b", truth) == (3, 3)
    assert score("class Solution:\n  def f(self, a, b): print('x'); return a + b", truth) == (3, 3)
    by_line = {
        "fn_name": "f",
        "inputs": ['[1]\n"k"', "[]\n3"],
        "outputs": ['{"k": [1]}', '{"3": []}'],
    }
    assert score("def f(a, b): return {b: tuple(a)}", json.dumps(by_line)) == (2, 2)
    assert score("def g(): pass", by_line) == (0, 2)


FORGERIES = [
    "print('ok'); print('passed')",
    "import sys; sys.exit(0)",
    "import os; os._exit(0)",
    "import os; os.write(4, b'\\0\\0\\0\\x09[\"ok\", 5]'); os._exit(0)",
    "import os\nfor fd in range(3, 40):\n  try: os.write(fd, b'\\0\\0\\0\\x09[\"ok\", 5]')\n  except OSError: pass",
    "class Any(int):\n  __eq__ = lambda s, o: True\n  __ne__ = lambda s, o: False\n  __hash__ = int.__hash__\ndef f(x): return Any(7)",
    "class Any:\n  __eq__ = __req__ = lambda s, o: True\n  __lt__ = __gt__ = __eq__\ndef f(x): return Any()",
    "import builtins\nbuiltins.abs = abs = lambda x: 0\ndef f(x): return 7",
    "import atexit, os; atexit.register(os._exit, 0)\ndef f(x): raise SystemExit(0)",
    "AssertionError = ValueError\n__debug__ = 0\ndef f(x): return 7",
    "import sys, gc\nseen = [o for o in gc.get_objects() if 'assert' in str(o)[:0]]\ndef f(x):\n"
    "  t = [v for fr in sys._current_frames().values() for v in fr.f_locals.values()]\n  return 7",
    "math = type('M', (), {'isclose': lambda *a, **k: True})\ndef f(x): return 7",
    "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)\ndef f(x): os.kill(0, 0); return 7",
]  # fmt: skip
SQUARES = ["assert f(3) == 9", "assert abs(f(2) - 4) < 1e-6", "import math\nassert math.isclose(f(1), 1)",
           "assert f(2) in (4, 4.0) and not f(2) != 4"]  # fmt: skip


@pytest.mark.parametrize("program", FORGERIES)
def test_a_pass_cannot_be_forged(strong, program):
    assert score(program, SQUARES)[0] == 0
    assert score(program, {"fn_name": "f", "inputs": [[3], [1]], "outputs": [9, 5.5]})[0] == 0
    assert score(program, {"inputs": ["3"], "outputs": ["9"]})[0] == 0


def test_asserts_judge_plain_data_objects_and_errors(form):
    assert score("def f(x): return x * x", SQUARES) == (4, 4)
    assert score("def f(x): return x * x", "\n".join(SQUARES)) == (1, 1)
    truth = {"assert_case": ["def check(candidate):\n  assert candidate(4) == 16\ncheck(f)"]}
    assert score("f = lambda x: x ** 2", truth) == (1, 1)
    program = """
        import math
        class Stack:
            def __init__(self, items=()): self.items = list(items)
            def push(self, x): self.items.append(x); return self
            def pop(self): return self.items.pop()
            def __len__(self): return len(self.items)
        def kinds(): return (1, {2: {3}}, b"x", 1j, frozenset([4]), None, True)
        def count(n): yield from range(n)
        def order(x): x.sort()
        def fails(): raise KeyError("k")
        def big(n): return math.factorial(n)
    """
    tests = [
        "s = Stack([1]); s.push(2).push(3); assert s.pop() == 3 and len(s) == 2",
        "assert kinds() == (1, {2: {3}}, b'x', 1j, frozenset([4]), None, True)",
        "assert kinds() != [1]",
        "assert list(count(3)) == [0, 1, 2] and next(count(1)) == 0",
        "x = [3, 1, 2]\norder(x)\nassert x == [1, 2, 3]",
        "try: fails()\nexcept KeyError: pass\nelse: assert False",
        "assert big(2000) == math.factorial(2000)",
    ]
    assert score(program, tests) == (7, 7)


def test_the_weak_form_judges_objects_text_and_numpy(monkeypatch):
    monkeypatch.setenv(sandbox.FORM_VARIABLE, "weak")
    if not there_is_one("weak"):
        pytest.skip("no weak sandbox on this machine")
    program = "import numpy\ndef f(x): return f'{x}+1'\nclass A:\n  def g(s): return numpy.ones(2)"
    tests = ["assert eval(f(3)) == 4", "assert A().g().tolist() == [1, 1]"]
    assert code_reward(block(program), tests)["passed"] == 2
    forged = "def f(x): return '__import__(\"os\")._exit(0)'"
    assert code_reward(block(forged), tests[:1])["score"] == 0


def test_what_the_judge_cannot_run_has_no_verdict(strong):
    program = "def f(x): return 'x'\ndef g(x): return 7"
    with pytest.raises(SandboxError, match=r"no verdict.*makes the judge run exec"):
        score(program, ["import timeit\nassert timeit.timeit(f(3), number=1) > 0"])
    with pytest.raises(SandboxError, match="no Python"):
        score(program, ["assert f(3) = 9"])
    with pytest.raises(SandboxError, match="hands a"):
        score(program, ["import threading\nassert f(threading.Lock()) == 'x'"])
    for line in ("import no_such_module", "raise SystemExit(0)"):
        with pytest.raises(SandboxError, match="the test ends with"):
            score(program, [f"assert g(3) == 7\n{line}"])
    assert score("def f(x): import no_such_module", ["assert f(3) is None"]) == (0, 1)
    # one that has failed decides, and what the program answers is never a reason
    assert score(program, ["assert f(3) = 9", "assert g(3) == 9"]) == (0, 2)


def test_a_test_that_does_not_use_the_program_has_no_verdict(strong):
    define = "def check(candidate):\n  assert candidate(1) == 2\n"
    idle = (f"{define}if __name__ == 'other': check(f)", f"import random\nrandom.seed(1)\n{define}")
    for test in (*idle, "assert __name__ == '__main__'"):
        with pytest.raises(SandboxError, match="without having used the program"):
            score("def f(x): return 0", [test])
    case = "import unittest\nclass T(unittest.TestCase):\n  def test_a(self): assert f(1) == 2\n"
    for test in (define, case, f"METADATA = {{}}\n{define}", "def test_a(): assert f(1) == 2"):
        with pytest.raises(ValueError, match=r"calls none of them.*add the call"):
            score("def f(x): return 0", [test])
    assert score("def f(x): pass\nN = 4", ["assert callable(f)", "assert N == 4"]) == (2, 2)


HOSTILE = [
    "```" + " " * (1 << 20) + "`", " " * (1 << 20), "```\n" * (1 << 18), "`" * (1 << 20),
    ("```" + " " * 1000 + "`\n") * 1000, "```python" + "\t" * (1 << 20) + "x`", "\n" * (1 << 20),
    "```" + "a" * (1 << 20) + "`", "```python\n\ud800\n```", "```python\n\0\n```", "\u2028```" * 300_000,
    "```python\n" + "(" * (1 << 20) + "\n```", "```python\nx=" + "-" * (1 << 20) + "1\n```",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_text_of_any_kind_is_wrong_and_costs_little(strong, text):
    began = time.process_time()
    assert code_reward(text, ["assert f(3) == 9"], TIGHT)["score"] == 0
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    "truth", ["", {}, [], 5, None, {"inputs": ["1"], "outputs": []}, ["x = 1"], {"fn_name": "f"}, "{"]
)  # fmt: skip
def test_a_truth_without_tests_is_an_error(truth):
    with pytest.raises(ValueError, match=r"ground_truth|Expecting"):
        code_reward(block("1"), truth)


def test_the_last_python_block_counts():
    assert last_block("```python\na\n```\nthen\n```py\nb\n```\n```text\nc\n```") == "b\n"
    assert last_block("x ``` y") is None and last_block("```cpp\na\n```") is None
    assert last_block("```\nplain\n```") == "plain\n"
    assert last_block("```Python\ncut off") == "cut off"
    assert last_block("```python\n```") == ""
    assert last_block("```py\na\n```\nOutput:\n```\n[1]\n```\nor\n```\n2") == "a\n"


def test_a_truth_may_say_what_stands_before_the_program(strong):
    truth = {
        "before": "import math\ndef g(x):\n    return math.ceil(x)",
        "assert_case": "assert f(3.5) == 4",
    }
    for program in (
        "def f(x): return g(x)",
        "from __future__ import annotations\ndef f(x): return g(x)",
    ):
        assert score(program, json.dumps(truth)) == (1, 1)
        assert score(program, truth["assert_case"]) == (0, 1)
    with pytest.raises(ValueError, match="'before': expected the text"):
        score(program, truth | {"before": 3})


def test_the_budget_of_a_response_is_kept(form):
    began = time.monotonic()
    slow = {"inputs": [""] * 9, "outputs": ["1"] * 9}
    got = code_reward(block("import time; time.sleep(0.7); print(1)"), slow, TIGHT, total_s=1.6)
    assert time.monotonic() - began < 5 and 1 <= got["passed"] < 3 and got["limit_hit"] == 1


def test_it_runs_in_reward_workers_by_its_name(strong):
    def sample(program: str, truth: object) -> Sample:
        prompt = Prompt(3, [1], "a", truth, "?", {})
        return Sample(prompt, 0, 1, [4], [0.0], [1], [0], "stop", block(program))

    samples = [
        sample("print(int(input()) * 2)", {"inputs": ["4"], "outputs": ["8"]}),
        sample("import os\nos.kill(-1, 9)", {"inputs": ["4"], "outputs": ["8"]}),
        sample("1", "nothing to test"),
        sample("import time; time.sleep(99)", {"inputs": ["4"], "outputs": ["8"]}),
    ]
    runner = RewardRunner("code", RewardConfig(workers=2, timeout_s=3.0))
    try:
        runner.score(samples)
    finally:
        runner.close()
    assert [s.reward for s in samples] == [1.0, 0.0, None, None]
    assert samples[2].invalid and "no tests" in samples[2].invalid
    assert samples[3].invalid == "timed out after 3 s"  # and nothing of it is left
    assert samples[0].reward_info["total"] == 1
    assert wait_until(lambda: not left())
