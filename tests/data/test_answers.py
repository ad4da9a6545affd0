"""Preference optimisation before it is trained: rows, pairs in micro-batches, the checks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_tokenizers import marked_turns

from spmdrl.config import (
    AnswerDataConfig,
    CheckpointConfig,
    ConfigError,
    PreferenceConfig,
    PreferenceTrainingConfig,
    TrainConfig,
)
from spmdrl.data.answers import AnswerDataset
from spmdrl.data.shared_prefix import Unit
from spmdrl.distributed.topology import Topology
from spmdrl.engines.micro_batches import cut, pairs_of
from spmdrl.training.checks.preference import check_preference


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return marked_turns(tmp_path_factory.mktemp("tokenizer"))


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED, GOOD, BAD = turn("user", "2?"), turn("assistant", "4"), turn("assistant", "15")
ROW = {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}
CALLS = turn("assistant", "") | {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}


def load(
    tokenizer: Any, topology: Topology, path: Path, rows: list, labelled: bool = False,
    **options: Any,
) -> AnswerDataset:  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = AnswerDataConfig(str(path), **options)
    return AnswerDataset.load(
        str(path), tokenizer, config, topology, len(tokenizer), labelled=labelled
    )


def texts(tokenizer: Any, rows: AnswerDataset, index: int) -> list[tuple[str, str]]:
    """(what is given, what is learnt) of each answer of a row."""
    return [
        (tokenizer.decode(a.token_ids[: a.num_asked]), tokenizer.decode(a.token_ids[a.num_asked :]))
        for a in rows.answers(index)
    ]


@pytest.mark.parametrize(
    ("row", "given"),
    [
        (ROW, "<user>2?<a>"),
        ({"prompt": [ASKED], "chosen": "4", "rejected": "15"}, "<user>2?<a>"),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, "<user>2?<a>"),
        ({"chosen": [ASKED, BAD, ASKED, GOOD], "rejected": [ASKED, BAD, ASKED, BAD]},
         "<user>2?<assistant>15<user>2?<a>"),
        ({"prompt": "2?", "chosen": "4", "rejected": "15"}, "2?"),
    ],
    ids=["three chats", "answers are strings", "whole chats", "several turns", "strings"],
)  # fmt: skip
def test_an_answer_is_the_last_turn_and_eos(tokenizer, topology, tmp_path, row, given):
    rows = load(tokenizer, topology, tmp_path / "t.jsonl", [row])
    end = tokenizer.eos_token
    assert texts(tokenizer, rows, 0) == [(given, f"4{end}"), (given, f"15{end}")]
    assert [answer.desirable for answer in rows.answers(0)] == [True, False]
    batch = rows.batch([0])
    assert batch.num_seqs == 2 and batch.ref_sums is None
    learnt = [
        tokenizer.decode(batch.token_ids[a:b][batch.loss_mask[a:b] > 0])
        for a, b in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
    ]
    assert learnt == [f"4{end}", f"15{end}"]
    shown = "\n".join(rows.shown())
    assert "chosen" in shown and "rejected" in shown and given in shown


def test_pairs_for_labelled_answers_are_split_and_labelled_rows_taken(
    tokenizer, topology, tmp_path
):
    pairs = [{"prompt": f"{n}?", "chosen": f"{n}", "rejected": f"{n}!"} for n in range(5)]
    split = load(tokenizer, topology, tmp_path / "p.jsonl", pairs, labelled=True)
    single = [
        {"prompt": row["prompt"], "completion": row[key], "label": key == "chosen"}
        for row in pairs for key in ("chosen", "rejected")
    ]  # fmt: skip
    alone = load(tokenizer, topology, tmp_path / "s.jsonl", single, labelled=True)
    assert len(split) == len(alone) == 10
    assert split.measured.num_tokens.sum() == alone.measured.num_tokens.sum()
    broken = tmp_path / "b.jsonl"
    broken.write_text("{no row}\n" + (tmp_path / "p.jsonl").read_text())
    config = AnswerDataConfig(str(broken), on_bad_row="skip")
    rest = AnswerDataset.load(str(broken), tokenizer, config, topology, labelled=True)
    assert len(rest) == 10 and rest.measured.num_bad == 1 and rest.answers(9) == split.answers(9)
    config = AnswerDataConfig(str(broken))
    with pytest.raises(ConfigError, match="line 1: not valid JSON"):
        AnswerDataset.load(str(broken), tokenizer, config, topology, labelled=True)
    both = [row | {"chosen": None, "rejected": None} for row in single]  # as Parquet writes them
    assert load(tokenizer, topology, tmp_path / "n.jsonl", both, labelled=True).per_row == 1
    for i in range(10):
        assert split.answers(i) == alone.answers(i)
    batch = split.batch([2, 3, 9])
    assert batch.rewards.tolist() == [1, 0, 0] and batch.num_seqs == 3
    for rows in (split, alone):
        found = [rows.mismatched_answer(i) for i in range(10)]
        for i, answer in enumerate(found):
            asked = tokenizer.decode(answer.token_ids[: answer.num_asked])
            said = tokenizer.decode(answer.token_ids[answer.num_asked :])
            assert asked == f"{i // 2}?"
            assert said[0] != f"{i // 2}" or rows is alone  # never of its own pair
        assert sorted(rows.others) == list(range(10)) and (rows.others != np.arange(10)).all()


def test_the_reference_of_a_batch_is_that_of_its_rows(tokenizer, topology, tmp_path):
    pairs = [{"prompt": f"{n}?", "chosen": f"{n}", "rejected": f"{n}!"} for n in range(3)]
    rows = load(tokenizer, topology, tmp_path / "p.jsonl", pairs)
    rows.reference = np.arange(6.0).reshape(3, 2)
    assert rows.batch([2, 0]).ref_sums.tolist() == [4, 5, 0, 1]
    assert rows.batch([]).ref_sums.tolist() == []
    single = load(tokenizer, topology, tmp_path / "p.jsonl", pairs, labelled=True)
    single.reference = np.arange(12.0).reshape(6, 2)
    assert single.batch([3, 0]).ref_sums.tolist() == [6, 0]
    assert single.mismatched([3, 0]).ref_sums.tolist() == [7, 1]


def test_a_pair_stays_together_and_its_prompt_is_computed_once(tokenizer, topology, tmp_path):
    asked = "2" * 20
    pairs = [{"prompt": asked, "chosen": f"{n}", "rejected": "9" * (n + 2)} for n in range(4)]
    batch = load(tokenizer, topology, tmp_path / "p.jsonl", pairs).batch([0, 1, 2, 3])
    assert pairs_of(batch) == [Unit((0, 1)), Unit((2, 3)), Unit((4, 5)), Unit((6, 7))]
    assert pairs_of(batch, shares_prefixes=True)[1] == Unit((2, 3), 20)
    for part in cut(batch, 30, topology, units=pairs_of(batch, shares_prefixes=True)):
        assert part.seqs in ([0, 1], [2, 3], [4, 5], [6, 7])
    assert not pairs_of(batch.select([]))


@pytest.mark.parametrize(
    ("row", "labelled", "said"),
    [
        (ROW | {"rejected": [GOOD]}, False, "are the same: nothing is preferred"),
        ({"chosen": "4", "rejected": "5"}, False, "a string without a prompt"),
        ({"chosen": [GOOD], "rejected": [BAD]}, False, "there is no prompt"),
        ({"chosen": [ASKED, GOOD], "rejected": [turn("user", "3?"), BAD]}, False,
         "differ before their last turn"),
        (ROW | {"chosen": [turn("user", "3?")]}, False, "'assistant'"),
        (ROW | {"chosen": [CALLS]}, False, "tool_calls"),
        (ROW | {"prompt": [ASKED, GOOD], "chosen": [ASKED, GOOD]}, False, "set data.prompt_key"),
        ({"prompt": "2?", "completion": "4", "label": "yes"}, True, "expected true or false"),
        ({"prompt": "2?", "completion": "4"}, True, "label"),
        ({"prompt": "2?", "completion": "4", "label": True}, False, "field 'chosen': missing"),
        (ROW | {"images": ["a.png"]}, False, "image"),
    ],
)  # fmt: skip
def test_what_is_no_answer_is_refused(tokenizer, topology, tmp_path, row, labelled, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(tokenizer, topology, tmp_path / "t.jsonl", [row, row], labelled)


def test_rows_that_are_too_long_are_left_out(tokenizer, topology, tmp_path):
    rows = [{"prompt": "2?", "chosen": "4" * n, "rejected": "5"} for n in (1, 20, 2)]
    found = load(tokenizer, topology, tmp_path / "t.jsonl", rows, max_tokens=8)
    assert found.measured.rows.tolist() == [0, 2]
    with pytest.raises(ConfigError, match="Raise max_tokens"):
        load(tokenizer, topology, tmp_path / "t.jsonl", rows[1:2], max_tokens=8)
    with pytest.raises(ConfigError, match="at least two rows"):
        load(tokenizer, topology, tmp_path / "t.jsonl", rows[:1], labelled=True)
    cut_at = load(tokenizer, topology, tmp_path / "t.jsonl", rows, labelled=True, max_tokens=24)
    lens = [len(cut_at.mismatched_answer(i).token_ids) for i in range(6)]
    assert max(lens) <= 24 and torch.equal(cut_at.mismatched([0]).seq_lens, torch.tensor(lens[:1]))


def config(qwen3: Path, **changes: Any) -> PreferenceTrainingConfig:
    given = {"model": str(qwen3), "data": AnswerDataConfig("t", max_tokens=64), "out": "o"}
    return PreferenceTrainingConfig(**given | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"preference": PreferenceConfig("kto"), "actor": TrainConfig(shared_prefix=True)},
         "shared_prefix=True has no effect on labelled answers"),
        ({"actor": TrainConfig(engine="megatron", mtp_loss_scaling_factor=0.1)},
         "mtp_loss_scaling_factor=0.1"),
        ({"actor": TrainConfig(offload_params=True)},
         "offload_params has no effect on preference optimisation"),
        ({"actor": TrainConfig(router_replay="R3")}, "has no effect on preference optimisation"),
        ({"data": AnswerDataConfig("t", max_tokens=4096)}, "max_position_embeddings"),
        ({"data": AnswerDataConfig("t", batch_size=0, max_tokens=64)}, "batch_size=0"),
        ({"checkpoint": CheckpointConfig(keep_best=1)}, "which preference optimisation has not"),
        ({"preference": PreferenceConfig("dpo", {"gamma": 1})}, "has no option 'gamma'"),
        ({"preference": PreferenceConfig(ld_alpha=-0.5)}, "ld_alpha"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_work_is_refused(qwen3, changes, said):
    check_preference(config(qwen3), 2)
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_preference(config(qwen3, **changes), 2)
