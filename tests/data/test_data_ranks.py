"""Loading on several ranks: the same data set, the same error, and each row looked at once.

All cases share one start of three ranks, which takes longer than all of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from tiny_models import save_tokenizer

from spmdrl.config import ConfigError, DataConfig, RewardConfig

pytestmark = pytest.mark.ranks

WORLD = 3


def _rows(lengths: list[int]) -> list[dict]:
    return [
        {"data_source": f"source {i % 3}", "prompt": "x" * n, "ground_truth": "5"}
        for i, n in enumerate(lengths)
    ]


def _write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, list[Any]]:
    """By case: what each rank got."""
    folder = tmp_path_factory.mktemp("data")
    save_tokenizer(folder)
    lengths = [5 + 10 * (i % 5 == 2) for i in range(23)]
    two_files = (
        _write(folder / "a.jsonl", _rows(lengths[:7])),
        _write(folder / "b.jsonl", _rows(lengths[7:])),
    )
    short = _write(folder / "short.jsonl", _rows([3, 3]))
    bad_rows = _rows([3] * 12)
    bad_rows[10]["data_source"] = None
    bad_rows[7]["prompt"] = ""
    bad = _write(folder / "bad.jsonl", bad_rows)
    loads = {
        "two files": ([two_files] * WORLD, 9),
        "more ranks than rows": ([short] * WORLD, 2),
        "bad rows": ([bad] * WORLD, 9),
        "bad rows skipped": ([bad] * WORLD, 9, "skip"),
        "one rank lacks the file": ([short, str(folder / "none.jsonl"), short], 9),
    }
    checks = {
        # one rank alone would be over the limit, all together are not
        "few invalid": ([[], [0, 1, 2], []], [4, 3, 1], 0.5),
        "many invalid": ([[], [1, 2], [0]], [2, 3, 2], 0.39),
        "no samples": ([[], [], []], [0, 0, 0], 0.0),
    }
    by_rank = run_ranks(WORLD, _run, str(folder), loads, checks)
    return {case: [got[case] for got in by_rank] for case in by_rank[0]}


def _run(topology, folder, loads, checks):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    got = {case: _load(topology, tokenizer, *args) for case, args in loads.items()}
    return got | {case: _check(topology, *args) for case, args in checks.items()}


def _load(topology, tokenizer, paths_by_rank, max_prompt_tokens, on_bad_row="error"):
    from spmdrl.data.prompt_order import PromptOrder
    from spmdrl.data.prompts import PromptDataset

    tokenised = []

    def counting(text, **kwargs):
        tokenised.append(text)
        return tokenizer(text, **kwargs)

    counting.chat_template = None
    paths = paths_by_rank[topology.rank]
    config = DataConfig(paths, max_prompt_tokens=max_prompt_tokens, on_bad_row=on_bad_row)
    try:
        data = PromptDataset.load(paths, counting, config, topology)
    except ConfigError as error:
        return str(error)
    looked_at = len(tokenised)
    if on_bad_row == "skip":
        return len(data), data.num_bad, [data.prompt(i).id for i in range(len(data))]
    ids = [data.prompt(i).id for i in PromptOrder(len(data), 18, seed=3).next_step()]
    return len(data), data.num_overlong, data.data_sources, ids, looked_at


def _check(topology, invalid, total, limit):
    from spmdrl.rewards.runner import TooManyInvalid, check_invalid
    from spmdrl.types import Prompt, Sample

    samples = []
    for i in range(total[topology.rank]):
        prompt = Prompt(100 * topology.rank + i, [1], "source", "5", "x")
        sample = Sample(prompt, 0, 0, [], [], [], [], "stop", reward=1.0)
        if i in invalid[topology.rank]:
            sample.reward = None
            sample.invalid = f"Traceback:\n  frame\nValueError: no {i}\n"
        samples.append(sample)
    try:
        check_invalid(samples, RewardConfig(max_invalid_fraction=limit), topology)
    except TooManyInvalid as error:
        return str(error)
    return None


def test_ranks_agree_and_share_the_work(results):
    got = results["two files"]
    assert [r[:3] for r in got] == [(18, 5, ("source 0", "source 1", "source 2"))] * WORLD
    assert got[0][3] == got[1][3] == got[2][3]
    assert sorted(got[0][3]) == [i for i in range(23) if i % 5 != 2]
    assert [r[4] for r in got] == [8, 8, 7]  # rows that each rank tokenised


def test_more_ranks_than_rows(results):
    got = results["more ranks than rows"]
    assert got[0] == got[1] == got[2]
    assert "all 2 prompts are longer" in got[0]


def test_the_lowest_bad_row_is_named_on_every_rank(results):
    got = results["bad rows"]
    assert got[0] == got[1] == got[2]
    assert "line 8: field 'prompt': found str ''" in got[0]


def test_skipped_rows_are_the_same_on_every_rank(results):
    left = [i for i in range(12) if i not in (7, 10)]
    assert results["bad rows skipped"] == [(10, 2, left)] * WORLD


def test_a_file_that_one_rank_lacks(results):
    got = results["one rank lacks the file"]
    assert got[0] == got[1] == got[2]
    assert "none.jsonl' does not exist" in got[0]
    assert "(on ranks [1] of 3)" in got[0]


def test_invalid_fraction_is_of_all_ranks(results):
    assert results["few invalid"] == [None] * WORLD
    assert results["no samples"] == [None] * WORLD
    got = results["many invalid"]
    assert got[0] == got[1] == got[2]
    assert "3 of 7 samples have no reward" in got[0]
    assert "max_invalid_fraction=0.39" in got[0]
    assert got[0].endswith("First: prompt 101 on rank 1: ValueError: no 1")
