"""Pushes to hubs, by the hubs' real clients to stand-ins of their servers."""

import json

import pytest
from hub_servers import HuggingFace, ModelScope, Repo, files_of, serving
from huggingface_hub import constants, metadata_load

from spmdrl.config import ConfigError
from spmdrl.export import check_empty, target_of
from spmdrl.hub.upload import model_card, open_repository, push_export

SAVED = {"step": 1200, "identity": {"config": {
    "model": "'Qwen/Qwen3-0.6B@c1899de'", "algo.advantage": "'gae'", "algo.policy_loss": "mine",
}}}  # fmt: skip


def saved_of(**settings):
    return {"step": 3, "identity": {"config": {name: repr(v) for name, v in settings.items()}}}


@pytest.fixture
def folders(tmp_path):
    """(checkpoint, exported folder)."""
    for name in ("checkpoint", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint/run.json").write_text(json.dumps(SAVED))
    (tmp_path / "out/config.json").write_text("{}")
    (tmp_path / "out/model.safetensors").write_bytes(b"weights" * 1000)
    return tmp_path / "checkpoint", tmp_path / "out"


@pytest.fixture
def hub(monkeypatch):
    repos = {"models/tiny/open": Repo({"main": {}}), "models/tiny/theirs": Repo({"main": {}})}
    with serving(HuggingFace(repos)) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/none")
        monkeypatch.setenv("HF_TOKEN", "good")
        yield hub


def test_a_folder_is_pushed_in_one_commit_to_a_private_repository(hub, folders):
    target = target_of("tiny/new", True, "")
    open_repository(target, private=True)
    repo = hub.repos["models/tiny/new"]
    assert repo.private and repo.branches["main"] == {}
    address = push_export(target, *folders, "All of it")
    assert address.startswith(f"{hub.url}/tiny/new/commit/") and repo.messages == ["All of it"]
    assert repo.branches["main"] == files_of(folders[1]) and len(repo.branches["main"]) == 3
    assert b"library_name: peft" not in repo.branches["main"]["README.md"]
    (folders[1] / "math").mkdir()  # one of several adapters
    (folders[1] / "math/adapter_config.json").write_text("{}")
    push_export(target, *folders, "Adapters")
    assert b"library_name: peft" in repo.branches["main"]["README.md"]
    open_repository(target, private=True)  # again, to what is there
    open_repository(target_of("tiny/open", False, ""), private=False)
    push_export(target_of("tiny/open", False, ""), *folders)
    assert hub.repos["models/tiny/open"].messages == ["Upload of step 1200 by spmdrl"]
    assert not hub.repos["models/tiny/open"].private


WRONG = {
    "tiny/open": ("good", r"is public on http://\S+: --private False says"),
    "tiny/new": ("", "a push needs a token that may write: set HF_TOKEN"),
    "tiny/bad": ("bad", "denies access \\(401\\)"),
    "them/new": ("good", "denies access \\(403\\)"),
    "tiny/theirs": ("reader", "denies access \\(403\\)"),
}


@pytest.mark.parametrize(("target", "token", "words"), [(k, *v) for k, v in WRONG.items()])
def test_what_cannot_be_pushed_to_is_told_with_the_remedy(hub, monkeypatch, target, token, words):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ConfigError, match=f"{target}.*{words}"):
        open_repository(target_of(target, True, ""), private=True)
    assert hub.repos["models/tiny/theirs"].branches["main"] == {} and len(hub.repos) == 2


def test_no_network_is_told(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        open_repository(target_of("tiny/new", True, ""), private=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids to ask"):
        open_repository(target_of("tiny/new", True, ""), private=True)


SENSELESS = [
    ("no name", True, ""), ("alone", True, ""), ("tiny/new@v1", True, ""), ("", True, "a message"),
    ("modelscope:x", True, ""), ("", False, ""), ("hf://tiny/new", True, ""),
]  # fmt: skip


@pytest.mark.parametrize("given", SENSELESS)
def test_flags_that_make_no_sense_are_refused(given):
    with pytest.raises(ConfigError, match=r"owner/name|named without it: .tiny/new"):
        target_of(*given)


def test_a_push_takes_an_empty_folder_alone(tmp_path):
    """What else lies there would be uploaded, and a README.md overwritten."""
    check_empty(str(tmp_path))
    check_empty(str(tmp_path / "none"))
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(ConfigError, match=r"is not empty, and --push_to_hub uploads all .* name a"):
        check_empty(str(tmp_path))


CARDS = [
    (saved_of(**{"model": "Qwen/Qwen3-0.6B@c1", "algo.advantage": "gae", "algo.policy_loss": "x"}),
     "Qwen/Qwen3-0.6B", "reinforcement-learning", "advantages of `gae`, policy loss of `x`"),
    (saved_of(**{"model": "Qwen/Qwen3-0.6B@c1", "algo.advantage": "-", "algo.policy_loss": "dpo"}),
     "Qwen/Qwen3-0.6B", "reinforcement-learning", "`dpo` of pairs of its own answers"),
    (saved_of(model="modelscope:Qwen/Qwen3-0.6B"), "Qwen/Qwen3-0.6B", "sft",
     "https://modelscope.cn/models/Qwen/Qwen3-0.6B"),
    (saved_of(**{"model": "/home/me/secret/base", "data.chosen_key": "chosen"}), None,
     "reward-model", "| base model | `base` |"),
    (saved_of(model="runs/model"), None, "sft", "| steps | 3 |"),
]  # fmt: skip


@pytest.mark.parametrize(("saved", "base", "tag", "words"), CARDS)
def test_a_card_says_what_the_model_is(tmp_path, saved, base, tag, words):
    text = model_card("tiny/new", saved, is_adapter=tag == "sft")
    (tmp_path / "README.md").write_text(text)
    found = metadata_load(tmp_path / "README.md")
    assert found.get("base_model") == base and found["tags"] == ["spmdrl", tag]
    assert found["library_name"] == ("peft" if tag == "sft" else "transformers")
    assert words in text and "# new" in text and "/home/me" not in text


def test_modelscope_takes_pushes_by_its_own_package(folders, tmp_path, monkeypatch):
    modelscope_hub = pytest.importorskip("modelscope_hub")
    monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MODELSCOPE_API_TOKEN", raising=False)
    with serving(ModelScope()) as hub:
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", hub.url)
        modelscope_hub.set_default_config(None)  # read once for each process
        target = target_of("modelscope:tiny/new", True, "")
        with pytest.raises(ConfigError, match="set MODELSCOPE_API_TOKEN"):
            open_repository(target, private=True)
        monkeypatch.setenv("MODELSCOPE_API_TOKEN", "good")
        modelscope_hub.set_default_config(None)
        open_repository(target, private=True)
        open_repository(target, private=True)
        assert push_export(target, *folders, "All of it") == f"{hub.url}/models/tiny/new"
        repo = hub.repos["models/tiny/new"]
        assert repo.private and repo.branches["master"] == files_of(folders[1])
        assert "All of it" in repo.messages[0]
        repo.private = False
        with pytest.raises(ConfigError, match="is public on"):
            open_repository(target, private=True)
        with pytest.raises(ConfigError, match=r"denies access \(403\)"):
            open_repository(target_of("modelscope:them/new", True, ""), private=True)
