"""Benchmarks by name: where their rows are published, and what a row asks.

A published row becomes one of verl's schema when it is read (`Benchmark.row`), so that no file is
written. `python -m spmdrl.evaluate --benchmark NAME` uses them; docs/benchmarks.md.
Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.cli.hub_names import DATA_SUFFIXES

Row = dict[str, Any]
Task = tuple[str, Any]  # the prompt, and the ground truth

# what Qwen and DeepSeek publish their results in mathematics with
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
# the prompt of Austin et al. 2021 (arXiv 2108.07732), without its three examples
EXPERT = "You are an expert Python programmer, and here is your task:"
FENCED = "Write the whole program in one ```python block."


@dataclass(frozen=True)
class Benchmark:
    """One benchmark. The sampling settings are defaults, which the command line replaces."""

    data: str  # name on the Hugging Face Hub: owner/name:config:split
    columns: tuple[str, ...]  # of the published rows, that are read
    task: Callable[[Row], Task]
    reward: str  # the built-in that grades
    samples: int = 1  # answers to a prompt
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 2048  # of an answer

    def row(self, name: str, given: Row) -> Row:
        """Returns a row of verl's schema. Raises ValueError where published columns are missing."""
        try:
            prompt, truth = self.task(given)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            there = ", ".join(key for key in given if given[key] is not None)
            raise ValueError(
                f"no row of {name}, whose columns are those of {self.data}: it has {there} "
                f"({type(error).__name__}: {error})"
            ) from error
        return {
            "data_source": name,
            "prompt": [{"role": "user", "content": prompt}],
            "ground_truth": truth,
        }


def gsm8k(row: Row) -> Task:
    _, mark, final = row["answer"].rpartition("####")
    if not mark:
        raise ValueError("the answer has no '####' before its result")
    return f"{row['question'].strip()}\n\n{BOXED}", final.strip().replace(",", "")


def boxed(row: Row) -> Task:
    """A problem of mathematics with its answer; of AIME_2024 the columns begin with capitals."""
    given = {name.lower(): value for name, value in row.items() if value is not None}
    return f"{given['problem'].strip()}\n\n{BOXED}", str(given["answer"])


def mbpp(row: Row) -> Task:
    """Reads the configs `full` (text, test_setup_code) and `sanitized` (prompt, test_imports)."""
    asked = row.get("text") or row["prompt"]
    setup = "\n".join([*(row.get("test_imports") or ()), row.get("test_setup_code") or ""]).strip()
    tests = "\n".join(row["test_list"])
    prompt = f"{EXPERT} {asked.strip()} Your code should pass these tests:\n\n{tests}\n\n{FENCED}"
    return prompt, [f"{setup}\n{test}".strip() for test in row["test_list"]]


def humaneval(row: Row) -> Task:
    """Puts what stands before the function, imports and helpers, before every answer, as OpenAI's
    evaluation does, in which an answer goes on where the prompt ends.
    """
    prompt = f"Complete this function. {FENCED}\n\n```python\n{row['prompt'].rstrip()}\n```"
    begin = re.search(rf"^def {re.escape(row['entry_point'])}\(", row["prompt"], re.MULTILINE)
    if begin is None:
        raise ValueError(f"the prompt defines no function {row['entry_point']!r}")
    head = row["prompt"][: begin.start()]
    return prompt, {"before": head, "assert_case": f"{row['test']}\ncheck({row['entry_point']})"}


def ifeval(row: Row) -> Task:
    names = ("prompt", "instruction_id_list", "kwargs")
    return row["prompt"], {name: row[name] for name in names}


SPLITS = ("train", "validation", "test")
AIME = ("Problem", "Answer", "problem", "answer")

BENCHMARKS = {
    "aime24": Benchmark(
        "Maxwell-Jia/AIME_2024:default:train", AIME, boxed, "math",
        samples=32, temperature=0.6, top_p=0.95, max_tokens=16384,
    ),
    "math500": Benchmark(
        "HuggingFaceH4/MATH-500:default:test", ("problem", "answer"), boxed, "math", max_tokens=4096
    ),
    "gsm8k": Benchmark("openai/gsm8k:main:test", ("question", "answer"), gsm8k, "math"),
    "mbpp": Benchmark(
        "google-research-datasets/mbpp:full:test",
        ("text", "prompt", "test_list", "test_setup_code", "test_imports"), mbpp, "code",
    ),
    "humaneval": Benchmark(
        "openai/openai_humaneval:openai_humaneval:test", ("prompt", "test", "entry_point"),
        humaneval, "code",
    ),
    "ifeval": Benchmark(
        "google/IFEval:default:train", ("prompt", "instruction_id_list", "kwargs"), ifeval, "ifeval"
    ),
}  # fmt: skip


def files_of_split(folder: Path, config: str, split: str) -> Iterator[Path]:
    """Yields a split's data files in a folder, in order: train.jsonl, train-00000-of-00001.parquet,
    or files in a folder `train`; of a subfolder that has the config's name, where there is one.
    """
    named = re.compile(rf"{re.escape(split)}[-.]")  # not train_sft, and no test of testbed.jsonl
    for path in data_files(folder, config):
        if named.match(path.name) or path.parent.name == split:
            yield path


def data_files(folder: Path, config: str) -> list[Path]:
    """Returns all of them, in order; of a subfolder that has the config's name, if there is one."""
    within = folder / config if config and (folder / config).is_dir() else folder
    return sorted(path for path in within.rglob("*") if path.suffix in DATA_SUFFIXES)


def only_file(folder: Path, config: str) -> Path | None:
    """Returns a folder's only data file, which is a data set's only split unless its name or its
    folder is that of a split: aime_2024_problems.parquet, but not train.jsonl.
    """
    files = data_files(folder, config)
    if len(files) != 1 or files[0].parent.name in SPLITS:
        return None
    return None if re.match(rf"({'|'.join(SPLITS)})[-.]", files[0].name) else files[0]
