"""Rows of TRL, OpenRLHF, verl and slime as their users write them, read as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_models import save_tokenizer
from transformers import AutoTokenizer

from spmdrl.config import ConfigError, DataConfig, PreferenceDataConfig, SftDataConfig
from spmdrl.data.preferences import PreferenceDataset
from spmdrl.data.prompts import PromptDataset
from spmdrl.data.sft import SftDataset
from spmdrl.rewards.runner import needs_truth, takes_truth

USER = [{"role": "user", "content": "2+3?"}]
FIVE = [{"role": "assistant", "content": "5"}]
SIX = [{"role": "assistant", "content": "6"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One character is one token; turns are marked."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return tokenizer


@pytest.fixture(params=["jsonl", "parquet"])
def write(request, tmp_path):
    def written(*rows: dict[str, Any]) -> str:
        path = tmp_path / f"rows.{request.param}"
        if request.param == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return written


ASKED = "<user>2+3?<assistant>"
# row, settings of DataConfig -> text, ground truth, data_source, extra_info
PROMPTS = {
    "verl": ({"data_source": "s", "prompt": USER, "ability": "math", "extra_info": {"index": 1},
              "reward_model": {"style": "rule", "ground_truth": "5"}}, {},
             (ASKED, "5", "s", {"index": 1})),
    "trl prompt-only": ({"prompt": "2+3?"}, {}, ("2+3?", None, "rows", {})),
    "trl conversational": ({"prompt": USER, "solution": "5"}, {}, (ASKED, "5", "rows", {})),
    "openrlhf string": ({"input": "2+3?", "label": "5", "datasource": "s"}, {},
                        ("2+3?", "5", "s", {})),
    "openrlhf template": ({"input": "2+3?", "label": "5"}, {"apply_chat_template": True},
                          (ASKED, "5", "rows", {})),
    "openrlhf messages": ({"context_messages": USER}, {}, (ASKED, None, "rows", {})),
    "openrlhf keys": ({"question": "2+3?", "final": "5"},
                      {"prompt_key": "question", "ground_truth_key": "final"},
                      ("2+3?", "5", "rows", {})),
    "a bool label and metadata of any kind": (
        {"prompt": USER, "answer": "5", "label": True, "metadata": "{}"}, {},
        (ASKED, "5", "rows", {}),
    ),
    "slime": ({"prompt": USER, "label": "5", "metadata": {"rm_type": "math"}}, {},
              (ASKED, "5", "rows", {"rm_type": "math"})),
}  # fmt: skip


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_are_read_as_they_are(topology, tokenizer, write, name):
    row, settings, (text, truth, source, extra) = PROMPTS[name]
    path = write(row)
    data = PromptDataset.load(
        path, tokenizer, DataConfig(path, **settings), topology,
        needs_truth=lambda source: truth is not None,
    )  # fmt: skip
    got = data.prompt(0)
    assert (got.text, got.ground_truth, got.data_source, got.extra_info) == (
        text, truth, source, extra,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": USER, "label": "5", "answer": "so 5"},
         "label and answer may be it: name one by data.ground_truth_key"),
        ({"input": "a", "context_messages": USER}, "field 'prompt': missing; the row has input"),
        ({"instruction": "Add.", "input": "2+3"}, "field 'prompt': missing; .* instruction"),
        ({"prompt": USER, "label": "5", "extra_info": "x"}, "field 'extra_info': .*a mapping"),
        ({"prompt": USER, "reward_model": {"ground_truth": "5"}}, "field 'data_source': missing"),
        ({"prompt": USER, "label": "5", "image": "a.png"}, "'image': found .*a column 'images'"),
    ],
    ids=["truths", "prompts", "alpaca", "extra_info", "verl without a source", "image"],
)  # fmt: skip
def test_what_is_in_doubt_is_refused_with_the_columns(topology, tokenizer, write, row, words):
    path = write(row)
    with pytest.raises(ConfigError, match=words):
        PromptDataset.load(path, tokenizer, DataConfig(path), topology)


def test_an_optional_truth_in_doubt_is_refused_too(topology, tokenizer, tmp_path):
    path = str(tmp_path / "train-00000-of-00002.jsonl")
    row = {"prompt": USER, "label": "5", "answer": "so 5"}
    Path(path).write_text(json.dumps(row) + "\n")
    for reward, refused in (
        (lambda response, ground_truth=None: 1.0, True),
        (lambda response: 1.0, False),
    ):
        asked = {"needs_truth": needs_truth(reward), "takes_truth": takes_truth(reward)}
        assert not asked["needs_truth"]("train")
        if refused:
            with pytest.raises(ConfigError, match="label and answer may be it: name one by"):
                PromptDataset.load(path, tokenizer, DataConfig(path), topology, **asked)
            continue
        data = PromptDataset.load(path, tokenizer, DataConfig(path), topology, **asked)
        assert data.data_sources == ("train",)


# row -> what is given, and what is learnt
LEARNT = {
    "trl conversational": ({"messages": USER + FIVE}, ("<user>2+3?<assistant>", "5<eos>")),
    "trl prompt-completion": ({"prompt": "2+3=", "completion": "5"}, ("2+3=", "5<eos>")),
    "trl prompt-completion chats": ({"prompt": USER, "completion": FIVE}, (ASKED, "5<eos>")),
    "openrlhf": ({"input": "2+3?", "output": "5"}, (ASKED, "5<eos>")),
    "verl": ({"prompt": "2+3?", "response": "5"}, (ASKED, "5<eos>")),
}  # fmt: skip


@pytest.mark.parametrize("name", LEARNT)
def test_rows_to_learn_are_read_as_they_are(topology, tokenizer, write, name):
    row, (given, learnt) = LEARNT[name]
    path = write(row)
    data = SftDataset.load(path, tokenizer, SftDataConfig(path), topology)
    texts = [tokenizer.decode(ids) for _, ids in data.example(0).parts()]
    assert texts == [given, learnt]
    assert len(data.batch([0]).token_ids) == len(data.example(0).token_ids)


def test_rows_of_one_file_may_be_written_in_several_ways(topology, tokenizer, write):
    """A row of Parquet has the columns of all others, with null; a line of JSON may have them."""
    names = ["trl conversational", "verl", "openrlhf", "trl prompt-completion"]
    rows = [LEARNT[name][0] for name in names]
    columns = {column for row in rows for column in row}
    path = write(*({column: row.get(column) for column in columns} for row in rows))
    data = SftDataset.load(path, tokenizer, SftDataConfig(path), topology)
    parts = [data.example(i).parts() for i in range(len(rows))]
    texts = [tuple(tokenizer.decode(ids) for _, ids in each) for each in parts]
    given = [LEARNT[name][1] for name in names[:3]]
    assert texts == [*given, ("2+3=", "5<eos>")] and not data.measured.left_out
    path = write({"prompt": "2+3?", "input": None}, {"prompt": None, "input": "2+4?"})
    asked = PromptDataset.load(
        path, tokenizer, DataConfig(path), topology, needs_truth=lambda source: False
    )
    assert [asked.prompt(i).text for i in range(2)] == ["2+3?", "2+4?"]
    path = write({"prompt": "2+3?", "response": "5", "messages": None}, {"prompt": "2+4?"})
    with pytest.raises(ConfigError, match=r"(line 2|row 1 .*): field 'response': .*'messages'"):
        SftDataset.load(path, tokenizer, SftDataConfig(path), topology)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": USER, "completion": "5"}, "'prompt' and 'completion': expected two strings"),
        ({"prompt": USER, "completion": FIVE + USER + SIX}, "one turn of the assistant's"),
        ({"instruction": "Add.", "input": "2+3", "output": "5"}, "field 'prompt'"),
        ({"text": "2+3=5"}, "field 'prompt': missing; the row has text|it has text"),
        ({"messages": USER + FIVE, "image": "a.png"}, "'image': found str 'a.png'"),
    ],
    ids=["mixed", "turns", "alpaca", "language modelling", "image"],
)
def test_rows_to_learn_that_are_in_doubt_are_refused(topology, tokenizer, write, row, words):
    path = write(row)
    with pytest.raises(ConfigError, match=words):
        SftDataset.load(path, tokenizer, SftDataConfig(path), topology)


PAIRS = {
    "trl explicit": ({"prompt": USER, "chosen": FIVE, "rejected": SIX},
                     ("<user>2+3?<assistant>5", "<user>2+3?<assistant>6")),
    "trl implicit": ({"chosen": USER + FIVE, "rejected": USER + SIX},
                     ("<user>2+3?<assistant>5", "<user>2+3?<assistant>6")),
    "trl standard": ({"prompt": "2+3=", "chosen": "5", "rejected": "6"}, ("2+3=5", "2+3=6")),
    "openrlhf": ({"chosen": "2+3=5", "rejected": "2+3=6"}, ("2+3=5", "2+3=6")),
    "openrlhf chat": ({"prompt": USER, "chosen": "5", "rejected": "6"},
                      ("<user>2+3?<assistant>5", "<user>2+3?<assistant>6")),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_read_as_they_are(topology, tokenizer, write, name):
    row, texts = PAIRS[name]
    path = write(row)
    data = PreferenceDataset.load(path, tokenizer, PreferenceDataConfig(path), topology)
    assert (data.pair(0).chosen.text, data.pair(0).rejected.text) == texts
