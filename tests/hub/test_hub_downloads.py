"""Models and data of hubs, by the hubs' real clients from stand-ins of their servers."""

import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_servers import HuggingFace, ModelScope, Repo, files_of, serving, short_id
from huggingface_hub import constants
from ranks import run_calls
from tiny_models import save_qwen3

from spmdrl.cli.hub_names import data_name, model_name, name_of, with_names
from spmdrl.config import ConfigError, DataConfig, LoraConfig, PpoConfig, TrainConfig
from spmdrl.data.table_files import Files
from spmdrl.distributed.once_per_host import once_per_host
from spmdrl.distributed.phases import Phases
from spmdrl.engines.fsdp.lora import peft_config
from spmdrl.hub.download import fetch_data, fetch_model, pending_weights
from spmdrl.training.fetch import fetch

CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test.jsonl}
- config_name: other
  data_files: other/**/*.parquet
---
"""


def parquet(*rows):
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


def sums(numbers):
    """Rows in verl's schema."""
    return [
        {"data_source": "sums", "prompt": [{"role": "user", "content": f"{a}+1="}],
         "reward_model": {"style": "rule", "ground_truth": str(a + 1)}}
        for a in numbers
    ]  # fmt: skip


def data_files():
    """A data set with a card that names its splits, and one of another format without."""
    rows = sums(range(1, 9))
    named = {
        "README.md": CARD, "main/train-00001-of-00002.parquet": parquet(*rows[4:]),
        "main/train-00000-of-00002.parquet": parquet(*rows[:4]), "main/test.jsonl": b'{"a": 1}\n',
        "other/x/y.parquet": parquet({"question": "q", "answer": "a"}), ".gitattributes": b"",
    }  # fmt: skip
    plain = {"data.csv": b"a,b\n1,2\n", ".gitattributes": b""}
    converted = {"default/train/0000.parquet": parquet({"a": 1}), ".gitattributes": b"",
                 "default/partial-test/0000.parquet": parquet({"a": 1})}  # fmt: skip
    return named, plain, converted


@contextmanager
def client_of(url, cache, offline=False) -> Iterator[None]:
    """Sets huggingface_hub as HF_ENDPOINT, HF_HUB_CACHE and HF_HUB_OFFLINE would at its import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", url)
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", offline)
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture
def hub(tiny, tmp_path) -> Iterator[HuggingFace]:
    model = files_of(tiny) | {"onnx/model.safetensors": b"another library's"}
    named, plain, converted = data_files()
    repos = {
        "models/tiny/qwen": Repo({"main": model, "v1": model | {"extra.json": b"{}"}}),
        "models/tiny/gated": Repo({"main": model}, gated=True),
        "models/tiny/both": Repo({"main": model | {"pytorch_model.bin": b"old"}}),
        "models/tiny/old": Repo({"main": {"config.json": b"{}", "pytorch_model.bin": b"old"}}),
        "models/tiny/bare": Repo({"main": {"config.json": b"{}", ".gitattributes": b""}}),
        "datasets/tiny/sums": Repo({"main": named}),
        "datasets/tiny/csv": Repo({"main": plain, "refs/convert/parquet": converted}),
        "datasets/tiny/lone": Repo({"main": plain | {"x/a.parquet": b""}}),
    }
    with serving(HuggingFace(repos)) as hub, client_of(hub.url, tmp_path / "cache"):
        yield hub


def model_of(text, **settings):
    return fetch_model(model_name("model", text), **settings)


def data_of(text, split=""):
    return fetch_data(data_name("data.train", text), split)


def test_a_model_is_downloaded_once_and_read_from_the_cache_offline(hub, tiny, tmp_path):
    name = model_name("model", "tiny/qwen")
    folder = fetch_model(name, weights=False)
    assert not list(Path(folder).rglob("*.safetensors"))
    size = (tiny / "model.safetensors").stat().st_size
    assert pending_weights(name) == (1, size)
    seen = []
    assert fetch_model(name, report=lambda done, total: seen.append((done, total))) == folder
    assert seen[-1] == (size, size)
    got = {path: data for path, data in files_of(Path(folder)).items() if path != "trees"}
    assert got == files_of(tiny)  # and not the copy in onnx/
    commit = Path(folder).name
    assert name_of(folder) == f"tiny/qwen@{commit}" and pending_weights(name) == (0, 0)
    adapter = peft_config(LoraConfig(), ["q_proj"], folder)  # of an export: peft's own names
    assert (adapter.base_model_name_or_path, adapter.revision) == ("tiny/qwen", commit)
    assert peft_config(LoraConfig(), ["q_proj"], str(tiny)).base_model_name_or_path == str(tiny)
    assert "pytorch_model.bin" not in os.listdir(model_of("tiny/both"))
    assert pending_weights(model_name("model", "tiny/both")) == (0, 0)
    assert pending_weights(model_name("model", "tiny/old")) == (1, 3)
    assert "pytorch_model.bin" in os.listdir(model_of("tiny/old"))
    assert "extra.json" in os.listdir(model_of("tiny/qwen@v1"))
    before = len(hub.asked)
    shutil.rmtree(tmp_path / "cache/models--tiny--old/trees")  # as older clients leave a cache
    with client_of(hub.url, tmp_path / "cache", offline=True):
        assert "pytorch_model.bin" in os.listdir(model_of("tiny/old"))
        assert fetch_model(name) == model_of(f"tiny/qwen@{commit}") == folder
        with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids"):
            model_of("tiny/bare")
    assert len(hub.asked) == before
    hub.broken = True
    assert fetch_model(name) == folder  # as the client does where the hub is down
    with pytest.raises(ConfigError, match=r"tiny/bare: http://\S+ answers 503"):
        model_of("tiny/bare")


def test_data_is_found_by_config_and_split_or_by_file(hub, tmp_path):
    files = data_of("tiny/sums:main", "train")
    assert [Path(file).name[6:11] for file in files] == ["00000", "00001"]
    commit = with_names(files)[0].partition("@")[2].partition("/")[0]
    assert with_names(files)[0] == (
        f"hf://datasets/tiny/sums@{commit}/main/train-00000-of-00002.parquet"
    )
    assert data_of(with_names(files)[1]) == files[1:]
    assert data_of("hf://datasets/tiny/sums/main/*.parquet") == files
    other = data_of("tiny/sums:other:train")
    assert other[0].endswith("other/x/y.parquet")
    with pytest.raises(ConfigError, match="none of the columns prompt; it has question, answer"):
        Files.open(other, ("prompt",))
    assert data_of("tiny/csv", "train")[0].endswith("default/train/0000.parquet")
    with client_of(hub.url, tmp_path / "cache", offline=True):
        assert data_of("tiny/sums:main:train") == files
        assert data_of("tiny/csv", "train")[0].endswith("default/train/0000.parquet")
        with pytest.raises(ConfigError, match="not wholly in the cache"):
            data_of("tiny/sums:main:test")


REFUSED = [
    (model_of, "tiny/gone", "has no such model, or it is private"),
    (model_of, "tiny/gated", "this model is gated: ask for access at"),
    (model_of, "tiny/qwen@v2", "has no revision 'v2'"),
    (model_of, "tiny/bare", "has no weights: no *.safetensors and no *.bin"),
    (data_of, "tiny/gone:main:train", "has no such data set"),
    (data_of, "tiny/sums", "has several configs: name one, as in tiny/sums:main:train; it has "
                           "main, other"),
    (data_of, "tiny/sums:x:train", "has no config 'x'"),
    (data_of, "tiny/sums:main", "has several splits: name one"),
    (data_of, "tiny/sums:main:val", "has no split 'val', as in tiny/sums:main:train; it has train, "
                                    "test"),
    (data_of, "tiny/csv::test", "has no split 'test' (the Hub's copy has only its first part)"),
    (data_of, "hf://datasets/tiny/sums/train.parquet", "no such file; the data set has main/test"),
    (data_of, "tiny/lone::train", "Name its files: hf://datasets/tiny/lone/path/file.parquet"),
    (data_of, "tiny/lone@main::train", "as in hf://datasets/tiny/lone@main/x/a.parquet"),
]  # fmt: skip


@pytest.mark.parametrize(("fetch", "text", "words"), REFUSED, ids=short_id)
def test_what_cannot_be_had_is_refused_with_the_remedy(hub, fetch, text, words):
    with pytest.raises(ConfigError) as error:
        fetch(text)
    assert words in str(error.value), str(error.value)
    assert str(error.value).startswith(text)


def test_no_room_and_no_network_are_told_with_what_to_set(hub, tmp_path, monkeypatch):
    def full(*args, **settings):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:  # a full disk cannot be had here: open() is a mock
        patch.setattr("huggingface_hub.file_download.Path.open", full)
        with pytest.raises(ConfigError, match=r"no room is left in \S+cache; HF_HOME names"):
            model_of("tiny/qwen")
    with client_of("http://127.0.0.1:9", tmp_path / "other"), pytest.raises(ConfigError) as error:
        model_of("tiny/qwen")
    assert "http://127.0.0.1:9 cannot be reached" in str(error.value)


# ---- on several ranks and hosts


def _fetch(topology, urls, cache, config):
    """Fetches a config on two hosts, of two ranks each; what each rank has got, or its error."""
    host = topology.rank // 2
    there = replace(topology, host="host", machine=f"host{host}")  # hosts may have one name
    with client_of(urls[host], f"{cache}/host{host}"):
        try:
            got = fetch(config, Phases(there))
        except ConfigError as error:
            return str(error)
        return got.model, got.critic.model, got.data.train, once_per_host(lambda: host, there)


@pytest.mark.ranks
def test_one_rank_of_each_host_downloads_and_all_fail_alike(hub, tiny, tmp_path):
    config = PpoConfig(
        "tiny/qwen", DataConfig("tiny/sums:main"), "gsm8k", critic=TrainConfig(model="tiny/qwen@v1")
    )
    moved = Repo({"main": files_of(tiny) | {"new.json": b"{}"}})
    with serving(HuggingFace(hub.repos | {"models/tiny/qwen": moved})) as other:
        cases = [
            ((hub.url, hub.url), tmp_path / "cache", config),
            ((hub.url, hub.url), tmp_path / "cache", replace(config, model="tiny/gated")),
            ((hub.url, other.url), tmp_path / "other", replace(config, critic=TrainConfig())),
        ]
        found, gated, differ = run_calls(4, [(_fetch, case) for case in cases])
    for rank, (model, critic, data, hosts) in enumerate(found):
        host = rank // 2
        assert hosts == [host, 1 - host]
        assert all(f"/host{host}/" in path for path in (model, critic, *data)) and len(data) == 2
        assert Path(critic, "extra.json").is_file() and not Path(model, "extra.json").exists()
    asked = [line for line in hub.asked if line.startswith("GET /tiny/qwen/resolve/")]
    weights = [line for line in asked if line.endswith("/model.safetensors")]
    assert len(weights) == 3  # of both revisions once: two hosts, and one of the last case
    assert len(set(gated)) == 1 and gated[0].startswith("model: tiny/gated: this model is gated")
    assert "There is no such path here either" in gated[0]
    assert len(set(differ)) == 1 and "on one host and tiny/qwen@" in differ[0]


# ---- ModelScope


def test_modelscope_is_read_by_its_own_package(tiny, tmp_path, monkeypatch):
    modelscope_hub = pytest.importorskip("modelscope_hub")
    pytest.importorskip("modelscope")
    named, plain, _ = data_files()
    repos = {
        "models/tiny/qwen": Repo({"master": files_of(tiny), "v1": files_of(tiny)}),
        "models/tiny/gated": Repo({"master": files_of(tiny)}, gated=True),
        "datasets/tiny/sums": Repo({"master": named}),
        "datasets/tiny/csv": Repo({"master": plain}),
    }
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "home"))
    with serving(ModelScope(repos)) as hub:
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", hub.url)
        modelscope_hub.set_default_config(None)  # read once for each process
        name, seen = model_name("model", "modelscope:tiny/qwen"), []
        size = (tiny / "model.safetensors").stat().st_size
        assert pending_weights(name) == (1, size)
        folder = fetch_model(name, report=lambda done, total: seen.append((done, total)))
        assert seen[-1] == (size, size) and files_of(Path(folder)) == files_of(tiny)
        assert name_of(folder) == "modelscope:tiny/qwen" and pending_weights(name) == (0, 0)
        assert name_of(model_of("modelscope:tiny/qwen@v1")) == "modelscope:tiny/qwen@v1"
        files = data_of("modelscope:tiny/sums:main:train")
        assert len(files) == 2 and data_of("modelscope:tiny/sums/main/train-*.parquet") == files
        for text, words in {
            "modelscope:tiny/gone": "has no such model",
            "modelscope:tiny/qwen@v2": "has no such model with a revision 'v2'",
            "modelscope:tiny/gated": "denies access (403)",
        }.items():
            with pytest.raises(ConfigError) as error:
                model_of(text)
            assert words in str(error.value) and str(error.value).startswith(text)
        with pytest.raises(ConfigError, match="has no split 'val'"):
            data_of("modelscope:tiny/sums:main:val")
        with pytest.raises(ConfigError, match="its card names no Parquet or JSONL files"):
            data_of("modelscope:tiny/csv", "train")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # and the server is gone
    assert fetch_model(name) == folder and data_of("modelscope:tiny/sums:main:train") == files
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids"):
        model_of("modelscope:tiny/other")
    Path(folder, "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        fetch_model(name)
