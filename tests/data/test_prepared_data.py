"""examples/data/ and the benchmarks, on files of the published schemas."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tiny_models import save_tokenizer
from transformers import AutoTokenizer

from spmdrl.config import (
    AgentConfig,
    ConfigError,
    DataConfig,
    MultiTurnConfig,
    PreferenceDataConfig,
    RolloutConfig,
    ServeConfig,
    SftDataConfig,
)
from spmdrl.data.benchmark_config import benchmark_config
from spmdrl.data.benchmarks import BENCHMARKS
from spmdrl.data.preferences import PreferenceDataset
from spmdrl.data.prompts import PromptDataset
from spmdrl.data.sft import SftDataset
from spmdrl.rewards.builtin import gsm8k, math
from spmdrl.rewards.code import code
from spmdrl.rewards.instructions import ifeval
from spmdrl.rewards.truths import truth_checker
from spmdrl.training.logs.items import interval

ROOT = Path(__file__).parents[2]
REAL_GSM8K = ROOT.parent / "shared/data/gsm8k"
ANSWER = "He has 2*600 = <<2*600=1200>>1,200.\n#### 1,200"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("prepared") / "out"


@pytest.fixture
def prepare(monkeypatch, out):
    """Runs a script of examples/data/ in this process; returns the rows of each split."""
    monkeypatch.syspath_prepend(str(ROOT / "examples/data"))

    def run(script: str, source: Path | str, *args: str) -> dict[str, list[dict[str, Any]]]:
        monkeypatch.setattr(
            sys, "argv", [script, "--source", str(source), "--out", str(out), *args]
        )
        path = ROOT / "examples/data" / script
        exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__"})
        return {file.stem: pq.read_table(file).to_pylist() for file in out.glob("*.parquet")}

    return run


def asked(row: dict[str, Any]) -> str:
    return row["prompt"][-1]["content"]


def truth(row: dict[str, Any]) -> Any:
    return row["reward_model"]["ground_truth"]


def test_gsm8k(prepare, topology, tokenizer, tmp_path, out):
    for split in ("train", "test"):
        write(tmp_path / f"{split}.jsonl", [{"question": f"In {split}?", "answer": ANSWER}])
    splits = prepare("gsm8k.py", tmp_path)
    assert truth(splits["test"][0]) == "1200" and asked(splits["test"][0]).startswith("In test?")
    assert gsm8k(splits["test"][0]["extra_info"]["answer"], "1200") == 1.0
    path = str(out / "train.parquet")
    data = PromptDataset.load(path, tokenizer, DataConfig(path), topology)
    assert (data.prompt(0).ground_truth, data.data_sources) == ("1200", ("openai/gsm8k",))
    keys = {"prompt_key": "extra_info.question", "response_key": "extra_info.answer"}
    assert len(SftDataset.load(path, tokenizer, SftDataConfig(path, **keys), topology)) == 1


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "q"}, ["line 2: expected the columns question, answer; answer is missing"]),
        ({"question": "q", "answer": "1"}, ["line 2: the answer has no '####'"]),
        (None, ["has no .parquet or .jsonl files of the splits train, test"]),
    ],
    ids=["column", "answer", "files"],
)
def test_what_is_wrong_with_a_source_is_told(prepare, tmp_path, out, row, words):
    if row is not None:
        write(tmp_path / "train.jsonl", [{"question": "q", "answer": "#### 1"}, row])
    with pytest.raises(SystemExit) as error:
        prepare("gsm8k.py", tmp_path)
    with pytest.raises(SystemExit, match="lies in --source"):
        prepare("gsm8k.py", out.parent)
    assert all(word in str(error.value) for word in words), error.value
    assert not out.exists()


def test_a_data_set_that_cannot_be_had_offline_is_told_in_a_sentence(prepare, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit, match=r"error: openai/gsm8k:main:train: .*HF_HUB_OFFLINE"):
        prepare("gsm8k.py", "openai/gsm8k")


def test_math(prepare, tmp_path):
    row = {"problem": "What is $1/2 + 0$?", "level": "Level 1", "type": "Algebra",
           "solution": r"First $\boxed{3}$ is wrong, so $\boxed{\frac{1}{2}}$."}  # fmt: skip
    write(tmp_path / "train.jsonl", [row])
    (row,) = prepare("math_problems.py", tmp_path)["train"]
    assert truth(row) == r"\boxed{\frac{1}{2}}" and row["extra_info"]["level"] == "Level 1"
    assert math(r"It is $\boxed{0.5}$", truth(row)) == 1.0


def test_dapo_math_is_written_once_and_can_ask_for_a_box(prepare, tmp_path):
    text = (
        "Solve the following math problem step by step. The last line of your response should be of"
        " the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
        'What is 1+1?\n\nRemember to put your answer on its own line after "Answer:".'
    )
    row = {
        "data_source": "math_dapo", "ability": "MATH",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b"},
    }  # fmt: skip
    write(tmp_path / "dapo-math-17k.jsonl", [row] * 3)
    (as_is,) = prepare("dapo_math.py", tmp_path / "dapo-math-17k.jsonl")["train"]
    assert (asked(as_is), truth(as_is)) == (text, "2")
    (boxed,) = prepare("dapo_math.py", tmp_path / "dapo-math-17k.jsonl", "--boxed")["train"]
    assert asked(boxed).startswith("What is 1+1? ") and "boxed" in asked(boxed)


@pytest.mark.parametrize(
    "row",
    [
        {"ID": "2024-I-4", "Problem": "How many?", "Solution": "...", "Answer": 33},
        {"id": 60, "problem": "How many?", "solution": "...", "answer": "033", "year": "2024"},
    ],
    ids=["Maxwell-Jia", "HuggingFaceH4"],
)
def test_aime(prepare, tmp_path, row):
    (got,) = prepare("aime.py", write(tmp_path / "train.jsonl", [row]))["train"]
    assert truth(got) == "33" and asked(got).startswith("How many?")


MBPP = {"task_id": 601, "text": "Write a function to add.", "code": "def add(a, b): return a + b",
        "test_list": ["assert add(1, 2) == 3"], "test_setup_code": "import math",
        "challenge_test_list": []}  # fmt: skip
HUMANEVAL = {"task_id": "HumanEval/0",
             "prompt": "def g(x):\n    return x + 1\n\ndef f(x):\n    '''One more.'''\n",
             "entry_point": "f", "canonical_solution": "    return x + 1\n",
             "test": "def check(candidate):\n    assert candidate(1) == 2\n"}  # fmt: skip


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("row", "program"),
    [
        (MBPP, MBPP["code"]),
        (HUMANEVAL, "def f(x):\n    return g(x)"),
        ({"source_file": "x", "task_id": 2, "prompt": "Write add.", "code": "", "test_imports": [],
          "test_list": ["assert add(1, 2) == 3"]}, MBPP["code"]),
    ],
    ids=["mbpp", "humaneval", "sanitized"],
)  # fmt: skip
def test_programs_pass_their_published_tests(prepare, tmp_path, row, program):
    (got,) = prepare("code_tests.py", write(tmp_path / "train.jsonl", [row]))["train"]
    assert code(f"```python\n{program}\n```", truth(got))["score"] == 1.0
    assert (
        code("```python\ndef add(a, b): return 0\ndef f(x): return 0\n```", truth(got))["score"]
        == 0.0
    )


def test_programs_without_their_tests_are_told(prepare, tmp_path):
    for row, missing in ((MBPP, "test_list"), (HUMANEVAL, "test")):
        path = write(tmp_path / "train.jsonl", [{k: v for k, v in row.items() if k != missing}])
        with pytest.raises(SystemExit, match=f"line 1: no row of .*KeyError: '{missing}'"):
            prepare("code_tests.py", path)


def test_hh_rlhf(prepare, topology, tokenizer, tmp_path, out):
    asks = "\n\nHuman: Hello\n\nAssistant: Hi.\n\nHuman: 2+3?\n\nAssistant:"
    rows = [{"chosen": f"{asks} 5", "rejected": f"{asks} 6"},
            {"chosen": f"{asks} 5", "rejected": f"{asks} 5"},
            {"chosen": f"{asks} 5", "rejected": f"{asks}"}]  # fmt: skip
    write(tmp_path / "train.jsonl", rows)
    (row,) = prepare("hh_rlhf.py", tmp_path)["train"]
    assert [turn["role"] for turn in row["prompt"]] == ["user", "assistant", "user"]
    assert row["rejected"] == [{"role": "assistant", "content": "6"}]
    path = str(out / "train.parquet")
    data = PreferenceDataset.load(path, tokenizer, PreferenceDataConfig(path), topology)
    assert "2+3?" in data.pair(0).chosen.text and "Human" not in data.pair(0).chosen.text


def test_geometry3k(prepare, tmp_path):
    picture = io.BytesIO()
    Image.new("RGB", (4, 4), "red").save(picture, "PNG")
    row = {"images": [{"bytes": picture.getvalue(), "path": None}], "answer": "48",
           "problem": "<image>Find x."}  # fmt: skip
    (tmp_path / "data").mkdir()
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "data/train-00000-of-00001.parquet")
    (got,) = prepare("geometry3k.py", tmp_path)["train"]
    assert got["images"][0]["bytes"] == picture.getvalue() and asked(got).startswith("<image>Find")
    pq.write_table(
        pa.Table.from_pylist([row | {"problem": "Find x."}]), tmp_path / "data/test.parquet"
    )
    with pytest.raises(SystemExit, match=r"test\.parquet, row 0 .*1 images, and 0 times <image>"):
        prepare("geometry3k.py", tmp_path)


def test_hotpotqa(prepare, tmp_path, out):
    row = {"id": "5a", "question": "Who?", "answer": "Ada", "type": "bridge", "level": "hard",
           "supporting_facts": {"title": ["B", "A", "B"], "sent_id": [0, 1, 1]},
           "context": {"title": ["A", "B"],
                       "sentences": [["One. ", "Two."], ["Three."]]}}  # fmt: skip
    write(tmp_path / "validation.jsonl", [row])
    (got,) = prepare("hotpotqa.py", tmp_path)["validation"]
    assert truth(got) == "Ada" and got["extra_info"]["articles"] == ["A", "B"]
    passages = [json.loads(line) for line in (out / "passages.jsonl").open()]
    assert passages == [{"title": "A", "text": "One. Two."}, {"title": "B", "text": "Three."}]


@pytest.mark.skipif(not REAL_GSM8K.is_dir(), reason="the published GSM8K is not on this machine")
def test_the_published_gsm8k_is_read_whole(prepare):
    splits = prepare("gsm8k.py", REAL_GSM8K)
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 7473, "test": 1319}
    for row in splits["test"]:
        assert gsm8k(row["extra_info"]["answer"], truth(row)) == 1.0


# --- benchmarks ---

PUBLISHED = {
    "aime24": {"ID": "2024-I-4", "Problem": "How many?", "Solution": "...", "Answer": 33},
    "math500": {"problem": "1/2?", "solution": "", "answer": r"\frac{1}{2}", "subject": "Algebra",
                "level": 1, "unique_id": "test/a.json"},
    "gsm8k": {"question": "How many?", "answer": ANSWER},
    "mbpp": MBPP,
    "humaneval": HUMANEVAL,
    "ifeval": {"key": 1000, "prompt": "Write a line without commas.",
               "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"num_words": None}]},
}  # fmt: skip


def test_every_benchmark_reads_its_published_rows_from_a_folder(topology, tokenizer, tmp_path):
    assert PUBLISHED.keys() == BENCHMARKS.keys()
    for name, row in PUBLISHED.items():
        split = BENCHMARKS[name].data.rpartition(":")[2]
        file = write(tmp_path / name / "data" / f"{split}.jsonl", [row])
        write(tmp_path / name / "data" / f"{split}_new.jsonl", [row])
        config = benchmark_config(
            name, "", {"model": "m", "data.eval": str(tmp_path / name), "eval_samples": 3}
        )
        assert config.data.eval == (file,) and config.eval_samples == 3
        data = PromptDataset.load(
            config.data.eval, tokenizer, config.data, topology, benchmark=name,
            wrong_truth=truth_checker(config.reward),
        )  # fmt: skip
        assert data.data_sources == (name,) and data.prompt(0).ground_truth is not None
    wrong = str(tmp_path / "aime24/data/train.jsonl")
    with pytest.raises(ConfigError, match=r"no row of gsm8k, whose columns .* it has ID, Problem"):
        PromptDataset.load(wrong, tokenizer, DataConfig(wrong), topology, benchmark="gsm8k")


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("gsm8", {"model": "m"}, "--benchmark gsm8: there are .*did you mean gsm8k"),
        ("gsm8k", {}, "--benchmark gsm8k: name the model as well"),
        (
            "gsm8k",
            {"model": "m", "data.eval": "."},
            r"'test' of openai/gsm8k:main:test, .* no test",
        ),
    ],
    ids=["name", "model", "folder"],
)
def test_a_benchmark_that_cannot_be_asked_is_refused(name, overrides, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        benchmark_config(name, "", overrides)


OWN = """
from spmdrl.config import *

def search(query: str) -> str:
    return query

rollout = RolloutConfig(
    n=4, stop=("\\n",), stop_token_ids=(1,), min_tokens=2, ignore_eos=True, kv_cache_mib=64
)
config = PpoConfig(
    "m", DataConfig("a.parquet"), "math", run_dir="runs/a", tools=(search,), environment=search,
    agent=search, agents=AgentConfig(retries=2), serve=ServeConfig(port=9),
    multi_turn=MultiTurnConfig(max_turns=3), eval_top_k=20, rollout=rollout,
)
"""


def test_the_only_file_of_a_folder_may_have_any_name_but_another_splits(prepare, tmp_path):
    row = PUBLISHED["aime24"]
    file = write(tmp_path / "one" / "aime_2024_problems.jsonl", [row])
    overrides = {"model": "m", "data.eval": str(tmp_path / "one")}
    assert benchmark_config("aime24", "", overrides).data.eval == (file,)
    assert len(prepare("aime.py", tmp_path / "one")["train"]) == 1
    write(tmp_path / "two" / "test.jsonl", [row])
    with pytest.raises(ConfigError, match=r"no train-\*\.parquet.*; it has test\.jsonl"):
        benchmark_config("aime24", "", overrides | {"data.eval": str(tmp_path / "two")})


def test_a_benchmark_takes_no_tools_and_no_ends_from_a_config(tmp_path):
    file = tmp_path / "cfg.py"
    file.write_text(OWN)
    config = benchmark_config("gsm8k", str(file), {"rollout.min_tokens": 1})
    assert (config.tools, config.environment, config.eval_top_k) == ((), None, 0)
    assert config.multi_turn == MultiTurnConfig()
    assert (config.agent, config.agents, config.serve) == (None, AgentConfig(), ServeConfig())
    assert config.rollout == RolloutConfig(n=4, kv_cache_mib=64, max_tokens=2048, min_tokens=1)


def test_instructions_are_followed_strictly_loosely_or_not():
    pytest.importorskip("langdetect")  # the extra `benchmarks`
    truth = {"prompt": "p", "kwargs": [{}, {"keywords": ["sun"], "num_words": None}],
             "instruction_id_list": ["punctuation:no_comma", "keywords:existence"]}  # fmt: skip
    assert ifeval("The sun shines.", truth)["score"] == 1.0
    half = ifeval("The sun, it shines.", truth)
    assert (half["score"], half["instructions"]) == (0.0, 0.5)
    loose = ifeval("Sure, here it is:\nThe sun shines.", truth)
    assert (loose["score"], loose["loose"]) == (0.0, 1.0)
    with pytest.raises(ValueError, match=r"not known: .'no:such'"):
        ifeval("x", truth | {"instruction_id_list": ["no:such", "punctuation:no_comma"]})
    wrong = truth_checker("ifeval")
    assert wrong("ifeval", truth) is None
    assert "1 instructions and 2 kwargs" in str(
        wrong("ifeval", truth | {"instruction_id_list": ["punctuation:no_comma"]})
    )


def test_the_interval_counts_prompts_and_not_answers():
    means = [0.0, 1.0, 1.0, 0.5]
    got = interval([{"mean": mean} for mean in [*means, None]])
    error = (sum((m - 0.625) ** 2 for m in means) / 3 / 4) ** 0.5
    assert got["ci95/high"] - 0.625 == pytest.approx(1.96 * error)
    assert got["ci95/low"] == pytest.approx(0.625 - 1.96 * error)
    assert interval([{"mean": 1.0}]) == {}
