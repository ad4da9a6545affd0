"""Demonstrations of rows: every form they come in, and what is said of others."""

from __future__ import annotations

import logging

import pytest
from chat_tokenizers import marked_prompts
from verl_rows import row, write

from spmdrl.config import ConfigError, DataConfig
from spmdrl.data.demonstrations import demonstration_lines
from spmdrl.data.prompts import PromptDataset

TURN = {"role": "assistant", "content": "5"}
FORMS = {
    "a string": ("5", ["5"]),
    "several": (["5", "2 + 3 is 5"], ["5", "2 + 3 is 5"]),
    "a chat": ([TURN], ["5"]),
    "several chats": ([[TURN], [{**TURN, "content": "6"}]], ["5", "6"]),
    "parts": ([{**TURN, "content": [{"type": "text", "text": "5"}]}], ["5"]),
    "null": (None, []),
    "nothing": ("", []),
    "an empty list": ([], []),
    "too long": (["5", "1 + 1 " * 9], ["5"]),
    "a thought that the prompt has begun": ("<think>\nhm</think>5", ["hm</think>5"]),
}
WRONG = {
    "a number": 5,
    "two turns": [{"role": "user", "content": "2+3?"}, TURN],
    "another's turn": [{"role": "user", "content": "5"}],
    "a call": [{**TURN, "tool_calls": [{"name": "f"}]}],
    "an empty one": ["5", ""],
    "a list of numbers": [5],
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return marked_prompts(tmp_path_factory.mktemp("tokenizer"))


def load(topology, tokenizer, path, tokens=24, **settings):
    config = DataConfig(path, demonstration_key="extra_info.solved", **settings)
    return PromptDataset.load(path, tokenizer, config, topology, demonstration_tokens=tokens)


def rows_of(values):
    return [row(f"{i}+1?", extra_info={"solved": value}) for i, value in enumerate(values)]


def test_every_form_becomes_tokens_and_eos(topology, tokenizer, tmp_path, caplog):
    rows = rows_of([value for value, _ in FORMS.values()])
    rows[-1]["prompt"] = "so: <think>\n"
    path = write(tmp_path / "data.jsonl", [*rows, row("no column?")])
    with caplog.at_level(logging.WARNING):
        data = load(topology, tokenizer, path)
    for i, (name, (_, texts)) in enumerate(FORMS.items()):
        found = data.prompt(i).demonstrations
        assert all(ids[-1] == tokenizer.eos_token_id for ids in found), name
        assert [tokenizer.decode(ids[:-1]) for ids in found] == texts, name
    assert data.prompt(len(FORMS)).demonstrations == ()
    assert data.demonstrated == {"given": 10, "overlong": 1, "rows": 7}
    assert "1 of 10 demonstrations is longer than rollout.max_tokens=24" in caplog.text
    (line,) = demonstration_lines(data.demonstrated)
    assert "10, 1 of them too long; 7 rows" in line
    # held-out prompts have none, whatever their rows hold
    held_out = load(topology, tokenizer, path, tokens=0)
    assert held_out.prompt(0).demonstrations == () and not demonstration_lines(
        held_out.demonstrated
    )


@pytest.mark.parametrize("name", WRONG)
def test_another_form_is_a_bad_row(topology, tokenizer, tmp_path, name):
    path = write(tmp_path / "data.jsonl", rows_of(["5", WRONG[name]]))
    with pytest.raises(ConfigError, match=r"line 2.*extra_info\.solved.*expected a string"):
        load(topology, tokenizer, path)
    assert load(topology, tokenizer, path, on_bad_row="skip").num_bad == 1


def test_a_column_that_no_row_has_is_refused(topology, tokenizer, tmp_path):
    path = write(tmp_path / "data.jsonl", rows_of([None, ""]))
    with pytest.raises(ConfigError, match="none of 2 rows has a demonstration"):
        load(topology, tokenizer, path)


def test_control_tokens_in_a_demonstration_are_text(topology, tokenizer, tmp_path):
    eos = str(tokenizer.eos_token)
    path = write(tmp_path / "data.jsonl", rows_of([f"5{eos}6"]))
    (ids,) = load(topology, tokenizer, path).prompt(0).demonstrations
    assert ids.count(tokenizer.eos_token_id) == 1
