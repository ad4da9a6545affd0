"""DAPO-Math-17k: problems of competitions whose answer is a whole number (Yu et al. 2025).

    python examples/data/dapo_math.py --out runs/dapo_math

Reward: "math". Source: BytedTsinghua-SIA/DAPO-Math-17k (Apache-2.0; arXiv 2503.14476), which is in
verl's schema and repeats each prompt about a hundred times: 1.8 million rows. Each is written once.
Its prompt asks for a last line "Answer: ..."; --boxed puts the answer in a box, as other data does.
"""

import sys

from preparation import Row, main, verl_row

from spmdrl.data.benchmarks import BOXED

FIRST, LAST = "(without quotes) where $Answer is the answer to the problem.", "Remember to put your"
seen: set[str] = set()
boxed = "--boxed" in sys.argv


def convert(row: Row) -> Row | None:
    asked, truth = row["prompt"][-1]["content"], row["reward_model"]["ground_truth"]
    if asked in seen:
        return None
    seen.add(asked)
    if boxed:
        problem = asked.partition(FIRST)[2].rpartition(LAST)[0].strip() or asked
        asked = f"{problem} {BOXED}"
    index = (row.get("extra_info") or {}).get("index")
    return verl_row("math_dapo", asked, truth, index=str(index))


if __name__ == "__main__":
    source = "BytedTsinghua-SIA/DAPO-Math-17k"
    arguments = [word for word in sys.argv[1:] if word != "--boxed"]
    main(__doc__, source, "default", ("train",), ("prompt", "reward_model"), convert,
         ("extra_info",), arguments)  # fmt: skip
