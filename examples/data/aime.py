"""AIME 2024: the 30 problems of the American Invitational Mathematics Examination of that year.

    python examples/data/aime.py --out runs/aime

Reward: "math". Source: Maxwell-Jia/AIME_2024 (ID, Problem, Solution, Answer) or
HuggingFaceH4/aime_2024 (problem, answer). It is for data.eval; answers are whole numbers up to 999.
`python -m spmdrl.evaluate --benchmark aime24` needs no preparation (docs/benchmarks.md).
"""

from preparation import Row, main, verl_row

from spmdrl.data.benchmarks import AIME, boxed


def convert(row: Row) -> Row:
    try:
        prompt, answer = boxed(row)
    except KeyError as error:
        raise ValueError(f"column {error} is missing, in either case") from error
    return verl_row("aime24", prompt, str(int(answer)))


if __name__ == "__main__":
    main(__doc__, "Maxwell-Jia/AIME_2024", "default", ("train",), (), convert, AIME)
