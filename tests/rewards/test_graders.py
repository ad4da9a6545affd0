"""The built-in graders of GSM8K and of mathematics, and what they cost."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from reward_processes import run, sample

from spmdrl.config import RewardConfig
from spmdrl.rewards import builtin as functions
from spmdrl.rewards.runner import RewardRunner

pytestmark = pytest.mark.clock

GSM8K = Path(__file__).parents[3] / "shared/data/gsm8k"
GSM8K_CASES = [
    ("so #### 5", "5", 1),
    ("####5.", "5", 1),
    ("#### $1,080.00", "1080", 1),
    ("#### 1,000,000", "1000000", 1),
    ("#### 1000", "1,000", 1),
    ("####   -3", "-3", 1),
    ("#### 3", "-3", 0),
    ("#### -$20", "-20", 1),
    ("#### $-20", "-20", 1),
    ("#### .5", "0.5", 1),
    ("#### 12.50", "12.5", 1),
    ("#### 5 apples", "5", 1),
    ("#### 50%", "50", 1),
    ("#### 4, no: #### 5", "5", 1),
    ("#### 5\n#### 4", "5", 0),
    ("the answer is 5", "5", 0),
    ("#### abc", "5", 0),
    ("#### **18**", "18", 0),
    ("#### 7/8", "7", 0),
    ("#### 12/8", "1", 0),
    ("#### 5-3", "5", 0),
    ("#### 1e3", "1", 0),
    ("#### 15", "5", 0),
    ("", "5", 0),
    ("#### 18", "9 * 2 = 18\n#### 18", 1),
]
FLEXIBLE_CASES = [
    ("so 5-3=2", "2", 1),
    ("x=-7", "-7", 1),
    ("7-2", "2", 1),
    ("it is $3.50.", "3.5", 1),
    ("a total of 1,234 eggs.", "1234", 1),
    ("-$4", "-4", 1),
    ("3 dozen, so 36.", "36", 1),
    ("36, which is not 35", "36", 0),
    ("none", "1", 0),
]


def test_gsm8k_table():
    for response, truth, expected in GSM8K_CASES:
        assert functions.gsm8k(response, truth) == expected, (response, truth)
    for response, truth, expected in FLEXIBLE_CASES:
        assert functions.gsm8k(response, truth, method="flexible") == expected, (response, truth)
    for truth in ("many", "", "nan", None):
        with pytest.raises(ValueError, match="is not a number"):
            functions.gsm8k("#### 5", truth)


def test_the_answer_that_was_read_is_told():
    preds = [1, 0.5, True, "", "x" * 5000, "lone \ud800", None, [1], {"a": 1}]

    def reward(extra_info):
        return {"score": 1, "pred": preds[extra_info["i"]]}

    got = run(reward, [sample("", extra={"i": i}) for i in range(len(preds))])
    read = ["1.0", "0.5", "1.0", "", "x" * 1000, "lone ?", None, None, None]
    assert [s.pred for s in got] == read
    assert [s.reward for s in got] == [1.0] * len(preds)
    answers = ["#### $1,080", "#### 1080.00", "1080", "#### -5"]
    assert [s.pred for s in run("gsm8k", [sample(a) for a in answers])] == [
        "1080",
        "1080",
        "",
        "-5",
    ]
    read = [s.pred for s in run("math", [sample(r"\boxed{\frac12}"), sample("nothing")])]
    assert read == [r"\frac{1}{2}", ""]


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not here")
def test_gsm8k_grades_its_own_references():
    for name in ("train.jsonl", "test.jsonl"):
        answers = [json.loads(line)["answer"] for line in (GSM8K / name).open()]
        truths = [answer.rpartition("####")[2].strip() for answer in answers]
        wrong = truths[1:] + truths[:1]
        for method in ("strict", "flexible"):
            scores = [
                functions.gsm8k(a, t, method=method) for a, t in zip(answers, truths, strict=True)
            ]
            assert scores == [1.0] * len(answers)
        for answer, truth, other in zip(answers, truths, wrong, strict=True):
            expected = float(truth.replace(",", "")) == float(other.replace(",", ""))
            assert functions.gsm8k(answer, other) == expected


MATH_CASES = [
    (r"\boxed{\frac12}", r"\frac{1}{2}", 1),
    (r"\boxed{0.5}", "1/2", 1),
    (r"The answer is $\frac{1}{2}$.", "0.5", 1),
    ("answer: 42", "42", 1),
    ("It is 1,234 in all.", "1234", 1),
    (r"\boxed{3}, no, \boxed{4}", "4", 1),
    (r"\boxed{3}, no, \boxed{4}", "3", 0),
    (r"\boxed{5}$. Check: $2+3=6$", "5", 1),
    (r"it was \boxed{3} and then \boxed{", "3", 0),
    ("we get 7, so \\boxed{8}.", "7", 0),
    (r"\boxed{(1,2)}", "(1,2)", 1),
    (r"\boxed{(2,1)}", "(1,2)", 0),
    (r"\boxed{\{2,1\}}", r"\{1,2\}", 1),
    (r"\boxed{[0,1)}", "[0,1)", 1),
    (r"\boxed{[0,1]}", "[0,1)", 0),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
    (r"\boxed{x=5}", "5", 1),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1),
    (r"\boxed{\pi/4}", r"\frac{\pi}{4}", 1),
    (r"\boxed{1{,}000}", "1000", 1),
    (r"\boxed{10\%}", "10", 1),
    (r"\boxed{90^\circ}", "90", 1),
    (r"\boxed{5 \text{ cm}}", "5", 1),
    (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1),
    (r"\boxed{\text{Bob}}", r"\text{Evelyn}", 0),
    (r"$\boxed{5}$", "$5$", 1),
    (r"\boxed{-3}", "3", 0),
    ("no idea", "42", 0),
    ("", "42", 0),
    ("1 2 3 " * 20_000, "42", 0),
]


def test_math_in_a_worker():
    samples = [sample(response, truth) for response, truth, _ in MATH_CASES]
    unknown = sample(r"\boxed{5}", truth="$ $")
    run("math", [*samples, unknown])
    for s, (response, truth, expected) in zip(samples, MATH_CASES, strict=True):
        assert s.reward == expected, (response[:80], truth, s.invalid)
    assert "has no answer that can be parsed" in unknown.invalid


COSTLY = [
    r"\boxed{9^{9^{9^9}}}",
    r"\boxed{(9^{9999})^{9999}}",
    r"\boxed{9!!!}",
    r"\boxed{99999999!}",
    r"\boxed{\binom{100000000}{50000000}}",
    r"\boxed{10^{-1000000}}",
    r"\boxed{\prod_{i=1}^{10000000} i}",
    r"\boxed{(x+1)^{100000}}",
    r"\boxed{\int_0^1 e^{x^2} \sin x\,dx}",
    "\\boxed{" + r"\frac{1}{" * 50 + "2" + "}" * 50 + "}",
    "\\boxed{" + "(" * 50 + "5" + ")" * 50 + "}",
    "\\boxed{" + "x+" * 2000 + "5}",
    "the answer is 9^9^9^9",
    "it is 9**9**9**9",
]


def spin(cpu_s):
    end = time.process_time() + cpu_s
    while time.process_time() < end:
        pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_time_limit_holds_where_the_end_of_an_object_swallows_it():
    class Slow:
        def __del__(self):
            spin(0.3)

    def compare():
        Slow()
        spin(5)

    begin = time.process_time()
    with pytest.raises(TimeoutError, match=r"0\.1 s"), functions.time_limit(0.1):
        compare()
    assert time.process_time() - begin < 2


def test_an_answer_that_would_take_for_ever_is_wrong_at_once(monkeypatch):
    functions.math(r"\boxed{\frac{1}{2}}", "5")  # imports sympy
    start = time.process_time()
    for answer in COSTLY:
        graded = functions.graded_math(answer, "5")
        assert (graded["score"], graded["not_compared"]) == (0.0, 1.0), answer
    assert time.process_time() - start < 0.1
    # the same to the letter is right; others that are long, deep or large are compared
    assert functions.math(COSTLY[0], "9^{9^{9^9}}") == 1.0
    assert functions.math(r"\boxed{\dfrac{9^{9^9}}{2}}", r"\frac{9^{9^9}}{2}") == 1.0
    for answer in (
        r"2^{2005}",
        r"1+\frac{1}{1+\frac{1}{1+\frac{1}{2}}}",
        r"100!",
        r"6.02\cdot10^{23}",
    ):
        assert functions.graded_math(rf"\boxed{{{answer}}}", answer)["not_compared"] == 0.0
        assert functions.math(rf"\boxed{{{answer}}}", answer) == 1.0
    assert functions.math("9^9^9^9 is too large\nso it is 5", "5") == 1.0
    # what only shows while it is compared: the limit is the CPU's time
    monkeypatch.setattr(functions, "MATH_LIMIT_S", 0.3)
    slow = r"\boxed{" + r"\frac{1}{1+" * 7 + "x" + "}" * 7 + "^{200}+" + r"x_" * 100 + "x}"
    assert functions.graded_math(slow, "5") == {"score": 0.0, "pred": slow[7:-1], "not_compared": 1}


def test_marks_of_prose_are_no_factorials_and_powers():
    table = [
        ("So the answer is 65536!", "65536", 1),
        ("The answer is **65536!**", "65536", 1),
        ("The answer is **65536**.", "65536", 1),
        ("**It is** 65536 (**$65536$**)", "65536", 1),
        ("It is 2**10", "1024", 1),
        ("It is **2**10**", "1024", 1),
        ("(It is 65536!)", "65536", 1),
        ("65536!!! Done", "65536", 1),
        ("It is 99999999! she said.", "99999999", 1),
        ("It is 65536!\nI am sure!", "65536", 1),
        ("With $2^{16}$ it is 65536!", "65536", 1),
        ("It is 65536! That is $2^{16}$.", "65536", 1),
        ("So the answer is 65537!", "65536", 0),
        ("So $x = 5!$", "120", 1),
        ("So $5! + 3$ it is!", "123", 1),
        (r"so \[ x = 5! \] and no more!", "120", 1),
    ]
    start = time.process_time()
    for response, truth, expected in table:
        graded = functions.graded_math(response, truth)
        assert (graded["score"], graded["not_compared"]) == (expected, 0.0), response
    assert time.process_time() - start < 10
    for costly in ("it is $99999999!$", "it is $99999999! $", r"\( 99999999! \) it is!"):
        assert functions.graded_math(costly, "5")["not_compared"] == 1.0, costly


def test_the_end_of_a_response_that_is_costly_before():
    costly = r"$$\int_0^1 x\,dx$$" + "\n"
    table = [
        (costly + "$$\n42\n$$", "42", 1),
        (costly + "\\[\n\\sqrt{2}\n\\]\n", r"\sqrt{2}", 1),
        (costly + "The answer is $42$.\n\nI hope that this helps.\n", "42", 1),
        ("$$\n\\int_0^1 x\\,dx\n= 42\n$$", "42", 1),
        (costly + "$$\n42\n$$", "43", 0),
        ("9^9^9^9\n" + "\n" * 50 + "42\n\n", "42", 1),
    ]
    for response, truth, expected in table:
        graded = functions.graded_math(response, truth)
        assert (graded["score"], graded["not_compared"]) == (expected, 0.0), response


SOLUTION = r"We compute $1+2=3$ and $\frac{1}{2}+\frac{3}{4}=\frac{5}{4}$ with $2^{10}=1024$. "


def test_a_worked_solution_is_compared_by_its_result():
    eggs = "She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs for 9 * 2 = $<<9*2=18>>18.\n#### 18"
    table = [
        (SOLUTION * 25 + r"Thus it is $\boxed{12}$.", "12", "1024"),
        (r"First $\boxed{a=3}$. Then the total is $\boxed{12}$.", "12", "3"),
        (r"We have $\int_0^3 x^2\,dx = 9$, so it is $\boxed{9}$.", "9", "3"),
        (eggs, "18", "9"),
        ("x" * 2000 + "\n#### 1,080", "1080", "1"),
        (r"#### $\frac{1}{2}$", "0.5", "2"),
    ]
    for truth, right, wrong in table:
        assert functions.math(rf"So \boxed{{{right}}}", truth) == 1.0, truth[:80]
        graded = functions.graded_math(rf"So \boxed{{{wrong}}}", truth)
        assert (graded["score"], graded["not_compared"]) == (0.0, 0.0), truth[:80]
        functions.check_math_truth(truth)
    with pytest.raises(ValueError, match=r"\.\.\.' would take too long .*Give the result alone"):
        functions.check_math_truth(SOLUTION * 25)


def test_an_equation_of_different_numbers_is_not_its_right_side():
    table = [
        (r"\boxed{1=3}", "3", 0),
        (r"\boxed{x=1=3}", "3", 0),
        (r"\boxed{\frac{1}{2} = 3}", "3", 0),
        ("so $1=3$", "3", 0),
        (r"\boxed{x=3}", "3", 1),
        (r"\boxed{x = 3}", "3", 1),
        (r"\boxed{1+2=3}", "3", 1),
        (r"\boxed{x=1+2=3}", "3", 1),
        (r"\boxed{f(2)=3}", "3", 1),
        (r"\boxed{180^\circ=\pi}", r"\pi", 1),
        (r"\boxed{\frac{1}{3}=0.3333}", "0.3333", 1),
    ]
    for response, truth, expected in table:
        assert functions.math(response, truth) == expected, response


def test_a_maths_answer_that_holds_its_worker_is_wrong_too():
    """Whatever the limits overlook is killed with the worker, and does not dodge the 0."""
    import math_verify

    def endless(*_args, **_kwargs):
        time.sleep(1000)

    class Patched:
        def __reduce__(self):
            return patched, ()

    def patched():
        math_verify.parse = endless
        return functions.graded_math

    runner = RewardRunner("math", RewardConfig(workers=1, timeout_s=0.5))
    (graded,) = (reward.function for reward in runner.rewards.values())
    assert graded is functions.graded_math
    runner.caller.pool.close()
    runner.caller.pool.__init__([Patched()], RewardConfig(workers=1, timeout_s=0.5))
    runner.caller.pool.index = {id(graded): 0}
    late = sample(r"\boxed{7}")
    runner.score([late])
    runner.close()
    assert (late.reward, late.reward_info) == (0.0, {"not_compared": 1.0})
