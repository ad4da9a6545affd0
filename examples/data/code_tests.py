"""MBPP and HumanEval: small Python functions, judged by their tests in the sandbox.

    python examples/data/code_tests.py --out runs/mbpp
    python examples/data/code_tests.py --out runs/humaneval \\
        --source openai/openai_humaneval:openai_humaneval:test

Reward: "code" (docs/sandbox.md). Sources: google-research-datasets/mbpp (CC-BY-4.0; Austin et al.
2021, arXiv 2108.07732) with 374 tasks to train on, and openai/openai_humaneval (MIT; Chen et al.
2021, arXiv 2107.03374), which is for data.eval. Which one it is, the columns say.
"""

from preparation import Row, main, verl_row

from spmdrl.data.benchmarks import BENCHMARKS

COLUMNS = ("text", "prompt", "test_list", "test_setup_code", "test_imports", "test", "entry_point")


def convert(row: Row) -> Row:
    """Raises ValueError where columns are missing."""
    name = "humaneval" if row.get("entry_point") else "mbpp"
    asked = BENCHMARKS[name].row(name, row)
    prompt = asked["prompt"][0]["content"]
    return verl_row(name, prompt, asked["ground_truth"], task_id=str(row["task_id"]))


if __name__ == "__main__":
    splits = ("train", "validation", "test")
    main(__doc__, "google-research-datasets/mbpp", "full", splits, ("task_id",), convert, COLUMNS)
