"""Geometry3K: 3,002 problems of geometry, each with a figure; the answer is a number or a term.

    python examples/data/geometry3k.py --out runs/geometry3k

Reward: "math". Source: hiyouga/geometry3k (images, problem, answer; MIT licence; Lu et al. 2021,
arXiv 2105.04165). The problem says <image> where its figure stands (docs/vision.md).
"""

from preparation import Row, main, verl_row

from spmdrl.data.benchmarks import BOXED
from spmdrl.data.pictures import MARK


def convert(row: Row) -> Row:
    problem, images = row["problem"].strip(), row["images"]
    if problem.count(MARK) != len(images):
        raise ValueError(f"{len(images)} images, and {problem.count(MARK)} times {MARK} in it")
    return verl_row("geometry3k", f"{problem} {BOXED}", row["answer"]) | {"images": images}


if __name__ == "__main__":
    columns = ("images", "problem", "answer")
    main(
        __doc__, "hiyouga/geometry3k", "default", ("train", "validation", "test"), columns, convert
    )
