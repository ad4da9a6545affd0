"""The search example: its retriever, its format, and what is trained on of a search."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import uvicorn
from programs import metrics_of, train
from ranks import free_port

from spmdrl.cli.arguments import load_config
from spmdrl.config import PpoConfig, SftConfig

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "qwen3_tiny_search_grpo_cpu.py"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / "search" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("search")
    script("make_assets").make_assets(path / "runs" / "search", seed=0)
    return path


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """The example's own server, in a thread of this process."""
    retriever, port = script("retriever"), free_port()
    corpus = retriever.read_corpus(folder / "runs" / "search" / "corpus.jsonl")
    app = retriever.application(retriever.Retriever(corpus))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}/retrieve"
    server.should_exit = True
    thread.join()


def facts_of(folder: Path) -> list[str]:
    lines = Path(folder, "runs/search/corpus.jsonl").read_text().splitlines()
    return [json.loads(line)["contents"] for line in lines]


def test_the_retriever_finds_facts_by_their_words(folder: Path, url: str) -> None:
    facts = facts_of(folder)
    name = facts[3].split()[0]
    asked = {"queries": [name, facts[4], "nobody"], "topk": 2}
    [of_name, of_fact, of_nobody] = httpx.post(url, json=asked).json()["result"]
    assert {hit["document"]["contents"] for hit in of_name} < set(facts[3:6])
    assert of_fact[0]["document"]["contents"] == facts[4]
    assert of_fact[0]["score"] > of_fact[1]["score"] > 0
    assert of_nobody == []
    for wrong in ({"queries": name}, {"queries": [name], "topk": 0}):
        assert httpx.post(url, json=wrong).status_code == 400


def test_turns_have_the_format_of_search_r1(
    folder: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEARCH_URL", url)
    config = load_config(str(CONFIG), PpoConfig, {})
    assert config.environment is not None
    fact = facts_of(folder)[7]

    def reply(text: str) -> str | None:
        return asyncio.run(config.environment([{"role": "assistant", "content": text}]))

    told = reply(f"<search> none </search> <search> {fact} </search>")
    assert told is not None
    assert told.startswith(f"<information> Doc 1: {fact} Doc 2: ")
    assert told.endswith(" </information>")
    assert reply("<answer> zuzu </answer>") is None
    reward: Any = config.reward
    right = "<answer> wrong </answer> so <answer> The Zuzu. </answer>"
    assert reward(right, "zuzu", 2) == {"score": 1.0, "searches": 1}
    assert reward("zuzu", "zuzu", 1) == {"score": 0.0, "searches": 0}
    load_config(str(CONFIG.with_name("qwen3_tiny_search_sft_cpu.py")), SftConfig, {})


@pytest.mark.ranks
def test_what_was_found_is_in_a_sample_and_not_trained_on(
    folder: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of random weights says every token now and then, so some of its turns search."""
    monkeypatch.setenv("SEARCH_URL", url)
    done = train(
        folder, 1, "--config", str(CONFIG), "--model", "runs/search/model", "--steps", "2",
        "--rollout.engine", "hf", "--rollout.max_tokens", "160", "--rollout.n", "16",
        "--data.prompts_per_step", "8", "--eval_every", "0", "--data.max_eval_prompts", "4",
        "--log_samples", "128", "--checkpoint.every_steps", "0",
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    run = folder / "runs/search/grpo"
    rows = [json.loads(line) for line in Path(run, "samples/step_1.jsonl").open()]
    searched = [row for row in rows if len(row["messages"]) > 1]
    assert len(searched) > 3
    for row in searched:
        assert [turn["role"] for turn in row["messages"][:2]] == ["assistant", "user"]
        assert "<search> " in row["messages"][0]["content"]
        written = "".join(
            token for token, logprob in zip(row["tokens"], row["logprobs"], strict=True)
            if logprob is None
        )  # fmt: skip
        assert "<information> " in written and " </information>" in written
        chosen = "".join(
            token for token, logprob in zip(row["tokens"], row["logprobs"], strict=True)
            if logprob is not None
        )  # fmt: skip
        assert row["messages"][0]["content"] in re.sub("<(bos|eos|pad|unk)>", "", chosen)
    first = next(row for row in metrics_of(run) if row["step"] == 1)
    assert first["reward/searches"] == pytest.approx(
        sum(len(row["messages"]) // 2 for row in rows) / len(rows), abs=0.05
    )
    assert first["actor/logprob_diff_max"] < 1e-4
