"""The multiply task as an environment of the package verifiers (0.1.14 to 0.3), for the Python that
has it: the policy may call a tool, and its last message should be the product.

Its API: docs.primeintellect.ai/verifiers. docs/verifiers.md says how a run uses it.
"""

import random

import verifiers as vf
from datasets import Dataset

NUMBERS = range(10, 60)
NUM_HELD_OUT = 256


def multiply(a: int, b: int) -> str:
    """Multiplies two whole numbers.

    Args:
        a: one number
        b: the other
    """
    return str(a * b)


def right(completion, answer) -> float:
    """1 where the last message is the product."""
    return float((completion[-1].get("content") or "") == answer)


def load_environment(seed: int = 0) -> vf.Environment:
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS]
    random.Random(seed).shuffle(pairs)
    rows = [{"question": f"{a}*{b}", "answer": str(a * b)} for a, b in pairs]
    return vf.ToolEnv(
        dataset=Dataset.from_list(rows[NUM_HELD_OUT:]),
        eval_dataset=Dataset.from_list(rows[:NUM_HELD_OUT]),
        tools=[multiply],
        max_turns=4,
        rubric=vf.Rubric(funcs=[right]),
    )
