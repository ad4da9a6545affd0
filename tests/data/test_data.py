"""Prompts in real files of every kind, good and bad."""

from __future__ import annotations

import gzip
import json
import logging
import os
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_tokenizers import marked_prompts
from tiny_models import save_tokenizer
from transformers import AutoTokenizer
from verl_rows import row, write

from spmdrl.config import ConfigError, DataConfig, PpoConfig
from spmdrl.data.prompts import PromptDataset
from spmdrl.data.table_files import Files
from spmdrl.rewards.builtin import graded_gsm8k
from spmdrl.rewards.truths import truth_checker


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return marked_prompts(tmp_path_factory.mktemp("tokenizer"))


def without(data: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in data.items() if k != key}


def load(topology, tokenizer, paths, **settings) -> PromptDataset:
    return PromptDataset.load(paths, tokenizer, DataConfig(train=paths, **settings), topology)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_verl_rows(topology, tokenizer, tmp_path, kind):
    path = write(tmp_path / f"data.{kind}", [row(f"{i}+1?", str(i + 1)) for i in range(10)])
    data = load(topology, tokenizer, path)
    assert (len(data), data.num_overlong, data.data_sources) == (10, 0, ("openai/gsm8k",))
    prompt = data.prompt(4)
    assert (prompt.id, prompt.text) == (4, "<user>4+1?<a>")
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert prompt.data_source == "openai/gsm8k"
    assert prompt.ground_truth == "5"
    assert prompt.extra_info == {"split": "train", "index": 7}


def test_ids_run_on_over_several_files(topology, tokenizer, tmp_path):
    first = write(tmp_path / "a.parquet", [row("1?"), row("2?", data_source="b")])
    second = write(tmp_path / "b.jsonl", [row("3?", data_source="c"), row("4?")])
    data = load(topology, tokenizer, (first, second))
    assert [data.prompt(i).id for i in range(4)] == [0, 1, 2, 3]
    assert [data.prompt(i).text for i in range(4)] == [f"<user>{n}?<a>" for n in "1234"]
    assert data.data_sources == ("b", "c", "openai/gsm8k")


def test_more_rows_than_a_chunk(topology, tokenizer, tmp_path):
    path = write(tmp_path / "many.jsonl", [row(str(i)) for i in range(2500)])
    data = load(topology, tokenizer, path)
    assert [data.prompt(i).text for i in (0, 1023, 1024, 2499)] == [
        f"<user>{i}<a>" for i in (0, 1023, 1024, 2499)
    ]


def test_chat_of_several_turns_keeps_no_nulls(topology, tokenizer, tmp_path, monkeypatch):
    """Arrow gives all turns one struct type, so that keys of one appear as null in others."""
    chat = [{"role": "system", "content": "be", "name": "x"}, {"role": "user", "content": "hi"}]
    data = load(topology, tokenizer, write(tmp_path / "a.parquet", [row(prompt=chat)]))
    raw = data.files.row(0)["prompt"]
    assert raw[1]["name"] is None
    template = "{% for m in messages %}{{ m.keys() | join('+') }};{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert data.prompt(0).text == "role+content+name;role+content;"


def test_template_kwargs_reach_the_template(topology, tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [row("q")])
    data = load(topology, tokenizer, path, chat_template_kwargs={"hint": "short"})
    assert data.prompt(0).text == "<user>q<a>short"


def test_a_plain_string_is_the_whole_prompt(topology, tokenizer, tmp_path):
    rows = [{"data_source": "mine", "prompt": "Q: 2+3\nA:", "ground_truth": 5}]
    for kind in ("parquet", "jsonl"):
        prompt = load(topology, tokenizer, write(tmp_path / f"a.{kind}", rows)).prompt(0)
        assert prompt.text == tokenizer.decode(prompt.token_ids) == "Q: 2+3\nA:"
        assert prompt.ground_truth == 5
        assert prompt.extra_info == {}


def test_no_truth_where_the_reward_asks_for_none(tmp_path, tokenizer, topology):
    """As verl's data for judges has it; other data sources must still have theirs."""
    from spmdrl.rewards.runner import needs_truth

    needs = needs_truth({"judged": lambda response, ground_truth=None: 1.0, "sums": "gsm8k"})
    rows = [row(), row(answer=None) | {"data_source": "judged"}]
    rows[0]["data_source"] = "sums"
    path = write(tmp_path / "data.jsonl", rows)
    config = DataConfig(train=path)
    data = PromptDataset.load(path, tokenizer, config, topology, needs_truth=needs)
    assert [data.prompt(i).ground_truth for i in range(2)] == ["5", None]
    path = write(tmp_path / "data.jsonl", [row(answer=None) | {"data_source": "sums"}])
    with pytest.raises(ConfigError, match="which the reward asks for"):
        PromptDataset.load(path, tokenizer, config, topology, needs_truth=needs)
    assert needs_truth(lambda response, **rest: 1.0)("any") is False
    assert needs_truth("gsm8k")("any") is True


def test_mixed_types_in_jsonl(topology, tokenizer, tmp_path):
    """Every line is its own: Arrow's JSON reader would refuse a number after a string."""
    path = write(tmp_path / "a.jsonl", [row(answer="5"), row(answer=5), row(answer=["5", "five"])])
    data = load(topology, tokenizer, path)
    assert [data.prompt(i).ground_truth for i in range(3)] == ["5", 5, ["5", "five"]]


# What is wrong with a row, and what the message must say besides file and row.
BAD_ROWS = [
    (without(row(), "data_source"), ["'data_source'", "missing", "ability", "a name such as"]),
    (row(data_source=None), ["'data_source'", "found null"]),
    (row(data_source=3), ["'data_source'", "found int 3"]),
    (row(data_source=""), ["'data_source'", "found str ''"]),
    (without(row(), "prompt"), ["'prompt'", "missing", "chat list"]),
    (row(prompt=None), ["'prompt'", "found null"]),
    (row(prompt=[]), ["'prompt'", "found list []", "non-empty"]),
    (row(prompt=""), ["'prompt'", "found str ''"]),
    (row(prompt=12), ["'prompt'", "found int 12"]),
    (row(prompt=["hi"]), ["'prompt[0]'", "found str 'hi'", "'role'"]),
    (row(prompt=[{"content": "hi"}]), ["'prompt[0].role'", "missing"]),
    (row(prompt=[{"role": "user"}]), ["'prompt[0].content'", "missing", "a string"]),
    (row(prompt=[{"role": "user", "content": None}]), ["'prompt[0].content'", "found null"]),
    (row(prompt=[{"role": "user", "content": " "}]), ["'prompt'", "every turn is empty"]),
    (without(row(), "reward_model"), ["'reward_model.ground_truth'", "missing"]),
    (row(reward_model={"style": "rule"}), ["'reward_model.ground_truth'", "missing"]),
    (row(answer=None), ["'reward_model.ground_truth'", "found null", "reference answer"]),
    (row(extra_info="x"), ["'extra_info'", "found str 'x'", "a mapping"]),
]


@pytest.mark.parametrize(("bad", "words"), BAD_ROWS)
def test_bad_row_in_jsonl(topology, tokenizer, tmp_path, bad, words):
    path = write(tmp_path / "data.jsonl", [row(), row(), bad, row(), bad])
    with pytest.raises(ConfigError) as caught:
        load(topology, tokenizer, path)
    message = str(caught.value)
    for word in [f"{path}, line 3: ", "(2 of 5 rows are bad)", *words]:
        assert word in message, message


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (row(data_source=None), ["'data_source'", "found null"]),
        (row(prompt=None), ["'prompt'", "found null"]),
        (row(prompt=[]), ["'prompt'", "found list []"]),
        (row(answer=None), ["'reward_model.ground_truth'", "found null"]),
        (row(prompt=[{"role": "user", "content": None}]), ["'prompt[0].content'", "found null"]),
    ],
)
def test_bad_row_in_parquet(topology, tokenizer, tmp_path, bad, words):
    good = write(tmp_path / "good.parquet", [row()] * 3)
    path = write(tmp_path / "data.parquet", [row()] * 5 + [bad])
    with pytest.raises(ConfigError) as caught:
        load(topology, tokenizer, (good, path))
    for word in [f"{path}, row 5 (counted from 0): ", *words]:
        assert word in str(caught.value)


def test_column_missing_from_parquet(topology, tokenizer, tmp_path):
    path = write(tmp_path / "data.parquet", [without(row(), "data_source")] * 2)
    with pytest.raises(ConfigError, match=r"row 0 .*'data_source': missing; the row has prompt"):
        load(topology, tokenizer, path)
    path = write(tmp_path / "other.parquet", [{"question": "q", "answer": "a"}])
    with pytest.raises(ConfigError, match=r"none of the columns .*it has question, answer"):
        load(topology, tokenizer, path)


def test_broken_json_names_the_line(topology, tokenizer, tmp_path):
    path = tmp_path / "data.jsonl"
    good = json.dumps(row())
    path.write_text(f'{good}\n\n{good}\n{{"prompt": [}}\n')  # the empty line counts
    with pytest.raises(ConfigError, match=r"line 4: not valid JSON: .* column 13"):
        load(topology, tokenizer, str(path))
    path.write_text(f"{good}\n[1, 2]\n")
    with pytest.raises(ConfigError, match=r"line 2: a JSON list \[1, 2\], expected an object"):
        load(topology, tokenizer, str(path))
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match="line 1: not valid UTF-8"):
        load(topology, tokenizer, str(path))


def test_files_that_cannot_be_read(topology, tokenizer, tmp_path):
    good = write(tmp_path / "good.jsonl", [row()])
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "corrupt.parquet").write_bytes(b"PAR1" + b"x" * 100)
    cut = Path(write(tmp_path / "cut.parquet", [row()] * 50))
    cut.write_bytes(cut.read_bytes()[:-20])
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "none.parquet")
    for name, words in {
        "missing.jsonl": "does not exist",
        "folder": "is a folder: expected a .parquet or .jsonl",
        "data.csv": "unknown extension '.csv'",
        "empty.jsonl": "has no rows",
        "none.parquet": "has no rows",
        "corrupt.parquet": "cannot be read as Parquet",
        "cut.parquet": "cannot be read as Parquet",
    }.items():
        with pytest.raises(ConfigError, match=words) as caught:
            load(topology, tokenizer, (good, str(tmp_path / name)))
        assert str(tmp_path / name) in str(caught.value)


def test_chat_without_a_template(topology, tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = None
    path = write(tmp_path / "data.jsonl", [row()])
    with pytest.raises(ConfigError, match=r"no chat template.*instruction-tuned model"):
        load(topology, tokenizer, path)
    path = write(tmp_path / "text.jsonl", [row(prompt="2+3")])
    assert load(topology, tokenizer, path).prompt(0).text == "2+3"


def test_template_that_refuses_a_chat(topology, tokenizer, tmp_path, monkeypatch):
    template = "{{ raise_exception('roles must alternate') }}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    path = write(tmp_path / "data.jsonl", [row()])
    with pytest.raises(ConfigError, match=r"line 1: .*refuses the chat: roles must alternate"):
        load(topology, tokenizer, path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe{\x00", "is text in UTF-16"),
        (gzip.compress(b'{"prompt": "q"}\n', mtime=0), "is compressed by gzip"),
        (b"PAR1\x15\x04", r"is Parquet \(name it"),
        (b"\n\r\n  \n", "has no rows"),
        (b"", "has no rows"),
        (b'{"a": 1}\0\n', "line 1: not valid JSON"),
        (b'{"prompt": "\\ud83d"}\n', "line 1: not valid Unicode"),
        (b'{"prompt": "q", "prompt": "r"}\n', "the key 'prompt' stands in one object twice"),
        (b'{"prompt": ' + b"[" * 100_000 + b"\n", "nested too deeply"),
        (b'{"prompt": ' + b"9" * 5000 + b"}\n", "line 1: not valid JSON"),
        (
            b'{"prompt": "q", "data_source": "d", "ground_truth": NaN}',
            "'ground_truth': found float",
        ),
        (json.dumps(row()).encode() + b'\n{"prompt": "cut', "line 2: not valid JSON"),
    ],
)
def test_lines_that_are_no_json(topology, tokenizer, tmp_path, content, words):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        load(topology, tokenizer, str(path))
    assert str(path) in str(caught.value)


def test_lines_of_other_systems(topology, tokenizer, tmp_path):
    """A byte order mark, CRLF, a line separator in the text, no newline at the end."""
    rows = [row("a"), row("b\u2028c\x85\0"), row("d")]
    text = "\r\n".join(json.dumps(r, ensure_ascii=False) for r in rows)
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    data = load(topology, tokenizer, str(tmp_path / "a.jsonl"))
    assert [data.prompt(i).text[6:-3] for i in range(3)] == ["a", "b\u2028c\x85\0", "d"]


def test_paths_that_are_no_files(topology, tokenizer, tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.parquet").mkdir()
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    for name, words in {
        "pipe.jsonl": "is a folder, pipe or device", "folder.parquet": "is a folder, pipe",
        "loop.jsonl": "does not exist|cannot be read", "x" * 300 + ".jsonl": "cannot be read",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            load(topology, tokenizer, str(tmp_path / name))


def test_forms_of_a_parquet_column(topology, tokenizer, tmp_path):
    """Dictionaries, large strings and lists are read as strings and lists; binary is not text."""
    n = 4
    good = {
        "prompt": pa.array([f"q{i}" for i in range(n)], pa.large_string()),
        "data_source": pa.array(["a", "b"] * 2).dictionary_encode(),
        "ground_truth": pa.array([["5", "five"]] * n, pa.large_list(pa.string())),
        "extra_info": pa.array([{"at": 1}] * n, pa.struct([("at", pa.timestamp("ns"))])),
    }
    small = good | {"extra_info": pa.array([{"a": 1}] * n)}
    pq.write_table(pa.table(small), tmp_path / "a.parquet")
    data = load(topology, tokenizer, str(tmp_path / "a.parquet"))
    assert (data.prompt(1).text, data.prompt(1).data_source) == ("q1", "b")
    assert data.prompt(3).ground_truth == ["5", "five"]
    bad_text = pa.array([b"fine", b"\xff\xfe", b"fine", b"fine"]).view(pa.string())
    for name, column, words in (
        ("prompt", pa.array([b"q"] * n), r"row 0 .*'prompt': found bytes"),
        ("prompt", bad_text, r"row 1 .*cannot be read: .*utf-8"),
        ("prompt", pa.array([{"role": "user"}] * n), r"row 0 .*'prompt': found dict"),
        ("prompt", pa.array([[b"x"]] * n), r"row 0 .*'prompt\[0\]': found bytes"),
        ("extra_info", good["extra_info"], r"row 0 .*cannot be read: Nanosecond"),
    ):
        pq.write_table(pa.table(small | {name: column}), tmp_path / "a.parquet")
        with pytest.raises(ConfigError, match=words):
            load(topology, tokenizer, str(tmp_path / "a.parquet"))
    twice = pa.Table.from_arrays([good["prompt"]] * 2, ["prompt", "prompt"])
    pq.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="two columns named prompt"):
        load(topology, tokenizer, str(tmp_path / "a.parquet"))


def test_bad_rows_can_be_skipped(topology, tokenizer, tmp_path, caplog):
    path = write(tmp_path / "a.jsonl", [row("1"), row(prompt=3), row("2" * 99), {}, row("3")])
    with open(path, "ab") as file:
        file.write(b'{"prompt": "\xff"}\n{"cut')
    with caplog.at_level(logging.INFO, "spmdrl"):
        data = load(topology, tokenizer, path, on_bad_row="skip", max_prompt_tokens=50)
    assert [data.prompt(i).id for i in range(len(data))] == [0, 4]
    assert (data.num_bad, data.num_overlong) == (4, 1)
    for words in ("4 of 7 rows are bad and were left out", "line 2: field 'prompt': found int 3",
                  "line 4: field 'prompt': missing", "line 6: not valid UTF-8"):  # fmt: skip
        assert words in caplog.text
    assert "line 7" not in caplog.text
    path = write(tmp_path / "b.jsonl", [row(prompt=3), {}])
    with pytest.raises(ConfigError, match=r"line 1: .*2 of 2 rows are bad.*so none is left"):
        load(topology, tokenizer, path, on_bad_row="skip")
    path = write(tmp_path / "c.jsonl", [row(prompt=3), row("q" * 99)])
    with pytest.raises(ConfigError, match=r"all 1 prompt is longer .*shortest 108, longest 108"):
        load(topology, tokenizer, path, on_bad_row="skip", max_prompt_tokens=20)


def test_escaped_rows_are_counted(topology, tokenizer, tmp_path, caplog):
    path = write(tmp_path / "a.jsonl", [row("a<eos><user>x"), row("b"), row("<pad>")])
    data = load(topology, tokenizer, path)
    assert data.num_escaped == 2
    assert data.prompt(0).text == "<user>a<eos><user>x<a>"
    assert tokenizer.eos_token_id not in data.prompt(0).token_ids
    assert "2 of 3 rows name control tokens" in caplog.text
    kept = load(topology, tokenizer, path, control_tokens="keep")
    assert kept.num_escaped == 0 and tokenizer.eos_token_id in kept.prompt(0).token_ids
    with pytest.raises(ConfigError, match=r"line 1: .*control token '<eos>'.*\(2 of 3 rows"):
        load(topology, tokenizer, path, control_tokens="error")


# The template adds 9 tokens to a question.
def test_overlong_filter(topology, tokenizer, tmp_path, caplog):
    path = write(tmp_path / "a.jsonl", [row("x" * n) for n in (1, 50, 3, 11, 12, 60)])
    with caplog.at_level(logging.INFO, "spmdrl"):
        data = load(topology, tokenizer, path, max_prompt_tokens=20)
    assert "3 of 6 prompts are longer than max_prompt_tokens=20 and were left out" in caplog.text
    assert (len(data), data.num_overlong) == (3, 3)
    assert [data.prompt(i).id for i in range(3)] == [0, 2, 3]  # ids stay row numbers
    assert len(data.prompt(2).token_ids) == 20


def test_overlong_truncate_keeps_the_end(topology, tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [row("short"), row("a" * 30 + "the end")])
    data = load(topology, tokenizer, path, max_prompt_tokens=15, overlong_prompts="truncate")
    assert (len(data), data.num_overlong) == (2, 1)
    assert data.prompt(1).text == "aaaaathe end<a>"
    assert tokenizer.decode(data.prompt(1).token_ids) == "aaaaathe end<a>"


def test_overlong_error(topology, tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [row("short"), row("a" * 30), row("a" * 91)])
    with pytest.raises(ConfigError) as caught:
        load(topology, tokenizer, path, max_prompt_tokens=20, overlong_prompts="error")
    for word in ("line 2", "39 tokens", "is 20", "2 of 3", "longest has 100", "'truncate'"):
        assert word in str(caught.value)


def test_all_prompts_filtered(topology, tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [row("a" * 30), row("a" * 91)])
    with pytest.raises(ConfigError, match=r"all 2 prompts .*=20 .*longest 100 .*Raise"):
        load(topology, tokenizer, path, max_prompt_tokens=20)


ROOT = Path(__file__).parents[2]


def test_the_config_for_8_gpus_adds_up():
    config = runpy.run_path(str(ROOT / "configs/qwen3_0.6b_gsm8k_grpo_8gpu.py"))["config"]
    assert isinstance(config, PpoConfig)
    assert config.steps == 2 * (7473 // config.data.prompts_per_step)  # two epochs
    assert config.data.prompts_per_step * config.rollout.n == 8 * config.rollout.max_num_seqs


def raw(**changes):
    return {"question": "2+3?", "answer": "so 5 #### 5", "extra_info": {"q": "1+1?"}} | changes


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_other_columns_are_read_by_their_keys(topology, tokenizer, tmp_path, kind):
    path = write(tmp_path / f"raw.{kind}", [raw(), raw(question="3+4?", answer="7")])
    settings = {"prompt_key": "question", "ground_truth_key": "answer"}
    data = load(topology, tokenizer, path, **settings)
    first, second = data.prompt(0), data.prompt(1)
    assert (first.text, first.ground_truth, first.data_source) == ("2+3?", "so 5 #### 5", "raw")
    assert (second.text, second.ground_truth) == ("3+4?", "7")
    nested = load(topology, tokenizer, path, **settings | {"prompt_key": "extra_info.q"})
    assert nested.prompt(0).text == "1+1?"
    dotted = write(tmp_path / f"dotted.{kind}", [{"a.b": "2+3?", "c.d": "5", "data_source": "x"}])
    data = load(topology, tokenizer, dotted, prompt_key="a.b", ground_truth_key="c.d")
    assert (data.prompt(0).text, data.prompt(0).ground_truth) == ("2+3?", "5")
    assert data.data_sources == ("x",)
    with pytest.raises(ConfigError, match=r"data\.prompt_key.*examples/data/gsm8k\.py"):
        load(topology, tokenizer, path)
    with pytest.raises(ConfigError, match="field 'final': missing; the row has question"):
        load(topology, tokenizer, path, **settings | {"ground_truth_key": "final"})


def test_a_chat_that_is_the_text_of_a_list_is_refused(topology, tokenizer, tmp_path):
    chat = [{"role": "user", "content": "2+3?"}]
    for text in (json.dumps(chat), " " + json.dumps(chat, indent=1), str(chat)):
        path = write(tmp_path / "text.jsonl", [row(prompt=text)])
        with pytest.raises(ConfigError, match=r"field 'prompt': .*the text of a list"):
            load(topology, tokenizer, path)
    path = write(tmp_path / "text.jsonl", [row(prompt='[{"x": 1}] is a list of')])
    assert load(topology, tokenizer, path).prompt(0).text.startswith('[{"x"')


def test_truths_that_the_reward_cannot_read_are_found_when_the_data_is_loaded(
    topology, tokenizer, tmp_path
):
    tests = json.dumps({"inputs": ["1"], "outputs": ["2"]})
    for reward, good, bad, words in (
        ("code", tests, "5", "the reward 'code': .*has no tests"),
        ("code", "assert f(1) == 2", '{"inputs": [], "outputs": []}', "'inputs' and 'outputs'"),
        ("gsm8k", "so #### 1,000", "many", "the reward 'gsm8k': 'many' is not a number"),
        ({"openai/gsm8k": "gsm8k"}, "5", "x", "'x' is not a number"),
        (partial(graded_gsm8k, method="flexible"), "5", "x", "'x' is not a number"),
        ("math", "so " * 999 + "#### 5", "so " * 999 + "5", "the reward 'math': .*too long"),
    ):
        wrong = {"wrong_truth": truth_checker(reward)}
        path = write(tmp_path / "t.jsonl", [row(reward_model={"ground_truth": good})])
        config = DataConfig(str(path))
        assert len(PromptDataset.load(str(path), tokenizer, config, topology, **wrong)) == 1
        path = write(tmp_path / "t.jsonl", [row(reward_model={"ground_truth": bad})])
        with pytest.raises(ConfigError, match=f"field 'reward_model.ground_truth': .*{words}"):
            PromptDataset.load(str(path), tokenizer, config, topology, **wrong)
    assert truth_checker(lambda response: 1.0)("x", "anything") is None


def test_parquet_columns_of_arrows_view_types(topology, tokenizer, tmp_path):
    """Of which Arrow takes no rows by number."""
    view = pa.string_view()
    truth = pa.StructArray.from_arrays([pa.array(["1", "2", "3"], view)], ["ground_truth"])
    table = pa.table({
        "prompt": [row()["prompt"]] * 3, "data_source": pa.array(["a", "b", "a"], view),
        "reward_model": truth, "extra_info": pa.array([{"n": n} for n in range(3)]),
    })  # fmt: skip
    path = tmp_path / "views.parquet"
    pq.write_table(table, path)
    assert pq.read_schema(path).field("data_source").type == view
    data = load(topology, tokenizer, str(path))
    assert [data.prompt(i).ground_truth for i in range(3)] == ["1", "2", "3"]
    assert data.prompt(1).extra_info == {"n": 1} and data.data_sources == ("a", "b")
    plain = write(tmp_path / "plain.parquet", [row()])
    files = Files.open((str(path), plain), ("prompt", "data_source"))
    shares = [list(files.share(rank, 2)) for rank in range(2)]
    assert [found["data_source"] for _, found in shares[0]] == ["a", "a"]
    assert [found["data_source"] for _, found in shares[1]] == ["b", "openai/gsm8k"]
