"""Hints of rows: where they stand in a teacher's prompt, and what is too long with them."""

from __future__ import annotations

import logging

import pytest
from chat_tokenizers import marked_prompts
from verl_rows import row, write

from spmdrl.config import ConfigError, DataConfig
from spmdrl.data.hints import with_hint
from spmdrl.data.prompts import PromptDataset
from spmdrl.data.table_files import BadRow

TEMPLATE = "{prompt} [{hint}] {prompt}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return marked_prompts(tmp_path_factory.mktemp("tokenizer"))


def load(topology, tokenizer, path, hinted=True, **settings):
    config = DataConfig(path, hint_key="extra_info.tip", hint_template=TEMPLATE, **settings)
    return PromptDataset.load(path, tokenizer, config, topology, hinted=hinted)


def rows_of(hints):
    return [
        row("", prompt=f"{i}+1?", extra_info={"tip": hint}) for i, hint in enumerate(hints)
    ]  # fmt: skip


def test_a_hint_stands_in_the_users_last_turn(topology, tokenizer, tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
             {"role": "user", "content": "c{hint}"}]  # fmt: skip
    rows = [
        row("", prompt="1+1?", extra_info={"tip": 7}),
        row("", prompt=turns, extra_info={"tip": "{prompt}?"}),
    ]
    data = load(topology, tokenizer, write(tmp_path / "data.jsonl", rows))
    texts = [data.hinted(i).text for i in (0, 1)]
    assert texts[0] == "1+1? [7] 1+1?"
    # braces of a row are text
    assert texts[1] == "<user>a<assistant>b<user>c{hint} [{prompt}?] c{hint}<a>"
    for i, text in enumerate(texts):
        assert tokenizer.decode(data.hinted(i).token_ids) == text
        assert data.prompt(i).token_ids != data.hinted(i).token_ids
        assert data.hinted(i).chat == data.prompt(i).chat
    assert data.prompt(0).text == "1+1?"


def test_parts_of_a_turn_and_turns_of_others():
    image, text = {"type": "image"}, {"type": "text", "text": "what?"}
    chat = [{"role": "user", "content": [image, text]}, {"role": "assistant", "content": "so"}]
    found = with_hint(chat, TEMPLATE, "x")
    assert found[0]["content"] == [image, {"type": "text", "text": "what? [x] what?"}]
    assert found[1] is chat[1] and chat[0]["content"][1] is text
    with pytest.raises(BadRow, match="a turn of the user's is missing"):
        with_hint(chat[1:], TEMPLATE, "x")
    with pytest.raises(BadRow, match="a text in the user's last turn is missing"):
        with_hint([{"role": "user", "content": [image]}], TEMPLATE, "x")


@pytest.mark.parametrize("wrong", [None, "", " ", True, float("nan"), ["a"]], ids=repr)
def test_a_row_without_a_hint_is_bad(topology, tokenizer, tmp_path, wrong):
    path = write(tmp_path / "data.jsonl", rows_of(["5", wrong]))
    with pytest.raises(ConfigError, match=r"line 2.*extra_info\.tip.*expected a hint"):
        load(topology, tokenizer, path)
    assert load(topology, tokenizer, path, on_bad_row="skip").num_bad == 1
    held_out = load(topology, tokenizer, path, hinted=False)  # which no teacher sees
    assert len(held_out) == 2 and held_out.hints is None


def test_too_long_with_its_hint(topology, tokenizer, tmp_path, caplog):
    path = write(tmp_path / "data.jsonl", rows_of(["5", "6" * 9, "7"]))
    limits = {"max_prompt_tokens": 8, "max_hint_prompt_tokens": 16}
    with caplog.at_level(logging.INFO):
        data = load(topology, tokenizer, path, **limits)
    assert [data.prompt(i).id for i in range(len(data))] == [0, 2] and data.num_overlong == 1
    assert "1 of 3 prompts is longer" in caplog.text
    assert "with their hint than max_hint_prompt_tokens=16" in caplog.text
    cut = load(topology, tokenizer, path, overlong_prompts="truncate", **limits)
    assert cut.prompt(1).text == "1+1?"
    assert tokenizer.decode(cut.hinted(1).token_ids) == "1+1? [666666666] 1+1?"[-16:]
    with pytest.raises(ConfigError, match=r"line 2.*21 tokens.*max_hint_prompt_tokens is 16"):
        load(topology, tokenizer, path, overlong_prompts="error", **limits)
    with pytest.raises(ConfigError, match=r"all 3 prompts.*max_hint_prompt_tokens=9, too"):
        load(topology, tokenizer, path, max_prompt_tokens=8, max_hint_prompt_tokens=9)


def test_control_tokens_in_a_hint_are_text(topology, tokenizer, tmp_path):
    eos = str(tokenizer.eos_token)
    rows = [row("1", extra_info={"tip": f"5{eos}6"})]
    data = load(topology, tokenizer, write(tmp_path / "data.jsonl", rows))
    assert tokenizer.eos_token_id not in data.hinted(0).token_ids
