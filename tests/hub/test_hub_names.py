"""Names of models and data sets on hubs: how they are read, refused and written again."""

from pathlib import Path

import pytest
from hub_servers import short_id

from spmdrl.cli import hub_names
from spmdrl.cli.arguments import as_source
from spmdrl.cli.hub_names import HubName, data_name, hub_model, model_name, name_of
from spmdrl.cli.paths import check_paths, model_fields
from spmdrl.config import (
    ConfigError,
    DataConfig,
    LoraConfig,
    PpoConfig,
    RewardModelConfig,
    TrainConfig,
)

MODELS = {
    "Qwen/Qwen3-0.6B": HubName("model", "Qwen/Qwen3-0.6B"),
    "Qwen/Qwen3-0.6B@v1.0": HubName("model", "Qwen/Qwen3-0.6B", "v1.0"),
    "Qwen/Qwen3-0.6B@refs%2Fpr%2F1": HubName("model", "Qwen/Qwen3-0.6B", "refs/pr/1"),
    "modelscope:Qwen/Qwen3-0.6B": HubName("model", "Qwen/Qwen3-0.6B", on_modelscope=True),
    "gone": None, "./gone/x": None, "/gone/x": None, "a/b/c": None,
}  # fmt: skip
DATA = {
    "openai/gsm8k": HubName("dataset", "openai/gsm8k"),
    "openai/gsm8k:main:train": HubName("dataset", "openai/gsm8k", config="main", split="train"),
    "openai/gsm8k@1a2b:main": HubName("dataset", "openai/gsm8k", "1a2b", config="main"),
    "openai/gsm8k::test": HubName("dataset", "openai/gsm8k", split="test"),
    "hf://datasets/openai/gsm8k/main/train-*.parquet":
        HubName("dataset", "openai/gsm8k", files="main/train-*.parquet"),
    "hf://datasets/openai/gsm8k@refs%2Fconvert%2Fparquet/main/train/0000.parquet":
        HubName("dataset", "openai/gsm8k", "refs/convert/parquet", "main/train/0000.parquet"),
    "modelscope:a/b:main:train":
        HubName("dataset", "a/b", config="main", split="train", on_modelscope=True),
    "modelscope:a/b@v1/x/train.jsonl":
        HubName("dataset", "a/b", "v1", "x/train.jsonl", on_modelscope=True),
    "data/train.parquet": None, "data/train.csv": None, "train.jsonl": None, "/data/x": None,
}  # fmt: skip


@pytest.fixture
def _with_modelscope(monkeypatch):
    monkeypatch.setattr(hub_names, "find_spec", lambda name: name)


@pytest.mark.usefixtures("_with_modelscope")
def test_names_are_read_and_written_again():
    for text, name in MODELS.items():
        assert model_name("model", text) == name, text
        assert name is None or hub_model("model", str(name)) == name
    for text, name in DATA.items():
        assert data_name("data.train", text) == name, text
        assert name is None or data_name("data.train", str(name)) == name


def test_a_path_that_is_here_wins_over_a_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("Qwen/Qwen3-0.6B").mkdir(parents=True)
    assert model_name("model", "Qwen/Qwen3-0.6B") is None
    assert data_name("data.train", "Qwen/Qwen3-0.6B") is None
    assert model_name("model", "Qwen/Qwen3-1.7B") is not None


WRONG = [
    (model_name, "hf://models/Qwen/Qwen3-0.6B", "named without it: 'Qwen/Qwen3-0.6B'"),
    (model_name, "modelscope:Qwen", "expected modelscope:owner/name"),
    (model_name, "modelscope:Qwen/Qwen3 0.6B", "expected modelscope:owner/name"),
    (model_name, "modelscope:Qwen/Qwen3-0.6B", "pip install 'spmdrl[modelscope]'"),
    (model_name, "Qwen/Qwen3--0.6B", "no hub id"),
    (data_name, "hf://models/Qwen/Qwen3-0.6B", "expected a file of a data set"),
    (data_name, "hf://datasets/openai/gsm8k", "a whole split is named owner/name:config:split"),
    (data_name, "hf://datasets/openai/gsm8k/train.csv", "expected a .parquet or .jsonl file"),
    (data_name, "openai/gsm8k:main:train[:100]", "a part of a split cannot be named"),
    (data_name, "modelscope:gsm8k", "expected modelscope:owner/name:config:split"),
    (data_name, "modelscope:a/b:main:train", "whose package is not installed"),
]  # fmt: skip


@pytest.mark.parametrize(("read", "text", "words"), WRONG, ids=short_id)
def test_what_is_no_name_is_refused_with_the_right_one(monkeypatch, read, text, words):
    monkeypatch.setattr(hub_names, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        read("the.field", text)
    assert words in str(error.value) and "the.field" in str(error.value)


def test_every_field_that_names_a_model_is_known_and_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text("{}\n")
    config = PpoConfig(
        "a/policy", DataConfig("train.jsonl", eval="a/set:main:test"), "model",
        reward_model=RewardModelConfig("a/judge"), critic=TrainConfig(model="a/critic"),
        ref=TrainConfig(model="a/teacher"), prm=TrainConfig(model="a/prm"),
        actor=TrainConfig(lora=LoraConfig(adapter="a/adapter")),
    )  # fmt: skip
    assert model_fields(config) == {
        "model": "a/policy", "reward_model.model": "a/judge", "critic.model": "a/critic",
        "ref.model": "a/teacher", "prm.model": "a/prm", "actor.lora.adapter": "a/adapter",
    }  # fmt: skip
    check_paths(config)  # names are not asked for yet
    twice = PpoConfig("a/policy", DataConfig(("a/set:x:y", "a/set:x:y")), "gsm8k")
    with pytest.raises(ConfigError, match="'a/set:x:y' twice"):
        check_paths(twice)


def test_what_a_run_writes_of_its_config_has_names_with_their_commits():
    commit = "c1899de289a04d12100db370d81485cdf75e47ca"
    hf = f"/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/{commit}"
    data = f"/x/hub/datasets--openai--gsm8k/snapshots/{commit}/main/train-0.parquet"
    scope = "/x/modelscope/models/Qwen--Qwen3-0.6B/snapshots/master"
    assert name_of(hf) == f"Qwen/Qwen3-0.6B@{commit}"
    assert name_of(scope) == "modelscope:Qwen/Qwen3-0.6B"
    assert name_of(scope.replace("master", "v2")) == "modelscope:Qwen/Qwen3-0.6B@v2"
    assert name_of(f"{hf}/config.json") is None and name_of("/data/train.parquet") is None
    text = as_source(PpoConfig(hf, DataConfig((data, "mine.jsonl")), "gsm8k"))
    assert f"model='Qwen/Qwen3-0.6B@{commit}'," in text and "/home/me" not in text
    assert f"'hf://datasets/openai/gsm8k@{commit}/main/train-0.parquet', 'mine.jsonl'" in text
