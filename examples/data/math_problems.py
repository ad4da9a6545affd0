"""MATH: 12,500 problems of competitions, with levels 1 to 5; the answer stands in a box.

    python examples/data/math_problems.py --out runs/math

Reward: "math". Source: DigitalLearningGmbH/MATH-lighteval, or any copy with the published columns
`problem` and `solution` (MIT licence; Hendrycks et al. 2021, arXiv 2103.03874). The ground truth is
the last \\boxed{} of the solution. The problems of MATH-500 are among those of the split `test`.
"""

from preparation import Row, main, verl_row

from spmdrl.data.benchmarks import BOXED
from spmdrl.rewards.builtin import answer_text


def convert(row: Row) -> Row:
    truth = answer_text(row["solution"])
    if not truth.startswith("\\boxed"):
        raise ValueError("the solution has no \\boxed{} with its result")
    extra = {"level": str(row.get("level")), "type": str(row.get("type"))}
    return verl_row("math", f"{row['problem'].strip()} {BOXED}", truth, **extra)


if __name__ == "__main__":
    source = "DigitalLearningGmbH/MATH-lighteval"
    main(__doc__, source, "default", ("train", "test"), ("problem", "solution"), convert,
         also=("level", "type"))  # fmt: skip
