"""Rows of fine-tuning in real files: their keys, cut ones and bad ones."""

from __future__ import annotations

import logging

import pytest
from chat_tokenizers import marked_prompts
from verl_rows import row, write

from spmdrl.config import ConfigError, SftDataConfig
from spmdrl.data.sft import SftDataset


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return marked_prompts(tmp_path_factory.mktemp("tokenizer"))


def load_sft(topology, tokenizer, path, **settings) -> SftDataset:
    return SftDataset.load(path, tokenizer, SftDataConfig(train=path, **settings), topology)


def texts(tokenizer, example) -> tuple[str, ...]:
    """What is given, what is learnt, and so on."""
    assert [learnt for learnt, _ in example.parts()] == [False, True] * (len(example.parts()) // 2)
    return tuple(tokenizer.decode(ids) for _, ids in example.parts())


def test_rows_of_a_small_set_are_encoded_once(topology, tokenizer, tmp_path, monkeypatch):
    rows = [row(prompt=f"{i}+1?", response=f"{i + 1}") for i in range(3)]
    path, read = write(tmp_path / "a.jsonl", rows), []
    encoded = SftDataset.encoded
    monkeypatch.setattr(SftDataset, "encoded", lambda self, i: read.append(i) or encoded(self, i))
    small = load_sft(topology, tokenizer, path)
    monkeypatch.setattr("spmdrl.data.sft.KEPT_TOKENS", 5)
    large = load_sft(topology, tokenizer, path)
    for data, times in ((small, 1), (large, 2)):
        read.clear()
        batches = [data.batch([2, 0]) for _ in range(2)]
        assert sorted(read) == sorted([0, 2] * times)
        assert batches[0].token_ids.tolist() == batches[1].token_ids.tolist()


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_sft_dotted_keys(topology, tokenizer, tmp_path, kind):
    rows = [row(extra_info={"question": f"{i}+1?", "answer": f"#### {i + 1}"}) for i in range(5)]
    keys = {"prompt_key": "extra_info.question", "response_key": "extra_info.answer"}
    data = load_sft(topology, tokenizer, write(tmp_path / f"a.{kind}", rows), **keys)
    assert (len(data), data.measured.num_overlong) == (5, 0)
    assert texts(tokenizer, data.example(3)) == ("<user>3+1?<a>", "#### 4<eos>")


def test_sft_messages(topology, tokenizer, tmp_path):
    turns = [
        ("system", "be"),
        ("user", "hi"),
        ("assistant", "yo"),
        ("user", "2?"),
        ("assistant", "3"),
    ]
    chat = [{"role": role, "content": text} for role, text in turns]
    data = load_sft(topology, tokenizer, write(tmp_path / "a.parquet", [{"messages": chat}]))
    expected = "<system>be<user>hi<assistant>yo<user>2?<a>", "3<eos>"
    assert texts(tokenizer, data.example(0)) == expected


def test_sft_overlong_rows_are_cut_and_counted(topology, tokenizer, tmp_path):
    rows = [
        {"prompt": "q", "response": "r"},  # 10 + 2 tokens
        {"prompt": "q", "response": "r" * 40},  # cut: 10 + 10
        {"prompt": "q" * 11, "response": "r"},  # no room: 20 + 2
        {"prompt": "q", "response": "r" * 9},  # just fits, with EOS
    ]
    data = load_sft(topology, tokenizer, write(tmp_path / "a.jsonl", rows), max_tokens=20)
    assert (len(data), data.measured.num_overlong) == (3, 2)
    assert [data.example(i).id for i in range(3)] == [0, 1, 3]
    assert texts(tokenizer, data.example(1))[1] == "r" * 10
    assert texts(tokenizer, data.example(2))[1] == "r" * 9 + "<eos>"
    with pytest.raises(ConfigError, match=r"all 4 rows the prompt alone .* max_tokens=10"):
        load_sft(topology, tokenizer, str(tmp_path / "a.jsonl"), max_tokens=10)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"prompt": "q"}, "'response': missing; the row has prompt"),
        ({"prompt": "q", "response": ""}, "'response': found str ''"),
        ({"prompt": "q", "response": None}, "'response': found null"),
        ({"prompt": None, "response": "r"}, "'prompt': found null"),
        ({"messages": [{"role": "user", "content": "q"}]}, "'messages': .*the last by the assist"),
        ({"messages": "q"}, "'messages': found str 'q'"),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]},
            r"'messages\[1\].content': found str ''",
        ),
    ],
)
def test_sft_bad_rows(topology, tokenizer, tmp_path, bad, words):
    path = write(tmp_path / "a.jsonl", [{"prompt": "q", "response": "r"}, bad])
    with pytest.raises(ConfigError, match=f"line 2: field {words}"):
        load_sft(topology, tokenizer, path)


def test_sft_bad_rows_can_be_skipped(topology, tokenizer, tmp_path, caplog):
    rows = [
        {"prompt": "q", "response": "r"},
        {"prompt": "q"},
        {"prompt": "q" * 99, "response": "r"},
    ]
    path = write(tmp_path / "a.jsonl", [*rows, {"prompt": "q", "response": "x" * 99}])
    with caplog.at_level(logging.INFO, "spmdrl"):
        data = load_sft(topology, tokenizer, path, on_bad_row="skip", max_tokens=40)
    assert (len(data), data.measured.num_bad, data.measured.num_overlong) == (2, 1, 2)
    assert "1 of 4 rows is bad" in caplog.text and "1 cut, 1 left out" in caplog.text
