"""Model folders that are broken, or want code of theirs to be run."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_qwen3
from transformers import Gemma3Config

from spmdrl.config import (
    ConfigError,
    DataConfig,
    PpoConfig,
    RolloutConfig,
    SftConfig,
    SftDataConfig,
    TrainConfig,
)
from spmdrl.engines.fsdp.model import build_model
from spmdrl.engines.megatron.hf_mapping import Folder
from spmdrl.engines.stored_dtype import as_stored
from spmdrl.hub.hf_folder import load_hf_config, load_tokenizer
from spmdrl.hub.model_files import eos_token_ids, missing_shards
from spmdrl.hub.remote_code import allow_code, code_files, has_foreign_code
from spmdrl.training.checks.rl import check
from spmdrl.training.checks.supervised import check_sft

CONFIG = "from transformers import Qwen3Config\nclass OwnConfig(Qwen3Config):\n    model_type = "
MODEL = """
from transformers import Qwen3ForCausalLM
from .configuration_own import OwnConfig
class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
"""
TOKENIZER = """
from transformers import PreTrainedTokenizerFast
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def qwen3_copy(tmp_path) -> Path:
    return save_qwen3(tmp_path / "model")


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def with_code(folder: Path, model_type: str) -> Path:
    """Adds classes of its own; each file leaves a mark when it is run. Returns the mark's path."""
    mark = folder.parent / "ran"
    run = f"open({str(mark)!r}, 'a').write(__name__.rpartition('.')[2] + ' ')\n"
    Path(folder, "configuration_own.py").write_text(f"{run}{CONFIG}{model_type!r}\n")
    Path(folder, "modeling_own.py").write_text(run + MODEL)
    Path(folder, "tokenization_own.py").write_text(run + TOKENIZER)
    edit(
        folder / "config.json", model_type=model_type,
        auto_map={"AutoConfig": "configuration_own.OwnConfig",
                  "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
    )  # fmt: skip
    edit(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer",
         auto_map={"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]})  # fmt: skip
    return mark


def sft(folder: Path, **changes: object) -> SftConfig:
    return SftConfig(str(folder), SftDataConfig("t", max_tokens=64), "o", **changes)


def test_code_of_the_folder_runs_only_where_it_is_trusted(qwen3_copy, tmp_path, monkeypatch):
    def asked(*args):
        raise AssertionError("asked on stdin")

    monkeypatch.setattr("builtins.input", asked)
    weights = load_file(qwen3_copy / "model.safetensors")
    mark = with_code(qwen3_copy, "own_model")
    for load in (
        load_hf_config, load_tokenizer, lambda m: build_model(m, True),
        lambda m: build_model(m, False), lambda m: check_sft(sft(Path(m)), 1),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"Python code of its own.*trust_remote_code=True"):
            load(str(qwen3_copy))
    assert not mark.exists()

    check_sft(sft(qwen3_copy, trust_remote_code=True), 1)
    assert {"configuration_own", "modeling_own", "tokenization_own"} <= set(
        mark.read_text().split()
    )
    model, shell = (build_model(str(qwen3_copy), full) for full in (True, False))
    tokenizer = load_tokenizer(str(qwen3_copy))
    assert type(model).__name__ == type(shell).__name__ == "OwnForCausalLM"
    assert type(tokenizer).__name__ == "OwnTokenizer"
    assert has_foreign_code(load_hf_config(str(qwen3_copy)))
    for name, tensor in weights.items():
        assert torch.equal(model.state_dict()[name], tensor)

    megatron = TrainConfig(engine="megatron")
    with pytest.raises(ConfigError, match=r"megatron' builds 'own_model' itself"):
        check_sft(sft(qwen3_copy, trust_remote_code=True, actor=megatron), 1)

    out = tmp_path / "out"  # what a checkpoint and an export hold
    for part in (model.config, *code_files(model.config), tokenizer):
        part.save_pretrained(out)
    assert {"configuration_own.py", "modeling_own.py", "tokenization_own.py"} <= {
        path.name for path in out.iterdir()
    }
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    mark.unlink()
    allow_code(str(out))
    assert "modeling_own" in mark.read_text()
    again = build_model(str(out), True)
    assert type(again).__module__ != type(model).__module__
    assert type(load_tokenizer(str(out))).__name__ == "OwnTokenizer"


def test_known_architectures_need_no_code(qwen3_copy):
    """Many a folder brings code for what transformers has long known: its own classes are used."""
    mark = with_code(qwen3_copy, "qwen3")
    edit(qwen3_copy / "tokenizer_config.json", tokenizer_class="TokenizersBackend")
    check_sft(sft(qwen3_copy), 1)
    model = build_model(str(qwen3_copy), True)
    assert type(model).__module__.startswith("transformers.")
    load_tokenizer(str(qwen3_copy))
    assert not mark.exists() and not code_files(model.config)


class Mark:
    """What it says on unpickling: a file that is there then."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_pickles_are_not_run(qwen3_copy, tmp_path, form):
    (qwen3_copy / "model.safetensors").unlink()
    evil = {"model.norm.weight": Mark(tmp_path / "ran")}
    if form == "torch":
        torch.save(evil, qwen3_copy / "pytorch_model.bin")
    else:
        (qwen3_copy / "pytorch_model.bin").write_bytes(pickle.dumps(evil))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        build_model(str(qwen3_copy), True)
    with pytest.raises(ConfigError, match=r"neither model\.safetensors"):
        Folder(qwen3_copy)
    assert not (tmp_path / "ran").exists()


def broken(folder: Path, what: str) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    norm = "model.layers.1.input_layernorm.weight"
    if what == "cut":
        path.write_bytes(path.read_bytes()[:-100])
        return
    if what == "text":
        path.write_text("version https://git-lfs.github.com/spec/v1\n")
        return
    if what == "lacks":
        del weights[norm]
    if what == "shape":
        weights[norm] = weights[norm][:-1].clone()
    if what == "nan":
        weights[norm][3] = float("nan")
    if what == "left over":
        weights["model.layers.7.nothing"] = torch.ones(2)
    save_file(weights, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("cut", ["model.safetensors is damaged", "copy it again"]),
        ("text", ["model.safetensors is damaged"]),
        ("lacks", ["weight files lack", "model.layers.1.input_layernorm.weight"]),
        ("shape", ["layers.1.input_layernorm.weight ([63] in the files, [64] by the config)"]),
        ("nan", ["model.layers.1.input_layernorm.weight", "not finite"]),
    ],
)
def test_broken_weights_are_named(qwen3_copy, what, words):
    broken(qwen3_copy, what)
    with pytest.raises(ConfigError) as error:
        build_model(str(qwen3_copy), True)
    assert all(word in str(error.value) for word in words), str(error.value)
    norm = "model.layers.1.input_layernorm.weight"
    with pytest.raises(ConfigError, match=r"damaged|no tensor|means|not finite"):
        Folder(qwen3_copy).read(norm, (64,), ((0, 64),))


def test_weights_left_over_are_reported(qwen3_copy, caplog):
    broken(qwen3_copy, "left over")
    with caplog.at_level(logging.WARNING, "spmdrl"):
        build_model(str(qwen3_copy), True)
    assert "no use for model.layers.7.nothing" in caplog.text


def test_a_critic_needs_no_head(tmp_path):
    folder = save_qwen3(tmp_path / "model", tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    build_model(str(folder), True, has_head=False)
    with pytest.raises(ConfigError, match=r"lack lm_head\.weight"):
        build_model(str(folder), True)


BROKEN = [
    {"model_type": 3}, {"model_type": "nothing"}, {"hidden_size": "big"}, {"hidden_size": 0},
    {"num_hidden_layers": -1}, {"rope_scaling": 3}, {"num_attention_heads": 0}, {"auto_map": 3},
    {"vocab_size": None}, {"dtype": "float7"}, {"layer_types": [1]},
]  # fmt: skip
TEXTS = ["", "{", "[]", "3", "null", "{}", "\0"]


@pytest.mark.parametrize(
    "text", TEXTS + [json.dumps({"model_type": "qwen3"} | broken) for broken in BROKEN]
)
def test_broken_configs(qwen3_copy, text):
    (qwen3_copy / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r".{20}"):
        check_sft(sft(qwen3_copy), 1)


def test_broken_tokenizers(qwen3_copy):
    tokenizer = qwen3_copy / "tokenizer.json"
    whole = tokenizer.read_text()
    for text in ("", "{", "[]", "{}", whole[: len(whole) // 2], whole.replace("WordLevel", "Nix")):
        tokenizer.write_text(text)
        with pytest.raises(ConfigError, match=r"no tokenizer that loads: .{5}"):
            load_tokenizer(str(qwen3_copy))
    tokenizer.write_text(whole)
    for text in ("{", "[]", '{"tokenizer_class": 3}'):
        (qwen3_copy / "tokenizer_config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"no tokenizer that loads: .{5}"):
            load_tokenizer(str(qwen3_copy))
    tokenizer.unlink()
    for kind in ("qwen3", "gemma3_text", "llama"):  # transformers makes the first two of nothing
        (qwen3_copy / "tokenizer_config.json").unlink(missing_ok=True)
        (qwen3_copy / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(ConfigError, match=r"no tokenizer that loads: .*tokenizer"):
            load_tokenizer(str(qwen3_copy))
    shutil.rmtree(qwen3_copy)
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_tokenizer(str(qwen3_copy))


def test_the_option_is_off():
    assert not PpoConfig("m", None, "r").trust_remote_code


def rl(folder: Path, **rollout: object) -> PpoConfig:
    return PpoConfig(
        str(folder), DataConfig("t", max_prompt_tokens=64), "gsm8k",
        rollout=RolloutConfig(max_tokens=64, **rollout),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("generation", "config", "words"),
    [
        ({"eos_token_id": "<eos>"}, {}, "generation_config.json has eos_token_id='<eos>'"),
        ({"eos_token_id": [2, "<eos>"]}, {}, r"eos_token_id=\[2, '<eos>'\]"),
        ({"eos_token_id": 5000}, {}, "eos_token_id=5000.*the model has 94 tokens"),
        ({"eos_token_id": None}, {"eos_token_id": -1}, "config.json has eos_token_id=-1"),
        ({"eos_token_id": None}, {"eos_token_id": None}, "no answer would end before"),
        ({"eos_token_id": []}, {"eos_token_id": []}, "no answer would end before"),
    ],
)
def test_an_end_that_no_answer_can_have_is_found_before_the_first_step(
    qwen3_copy, generation, config, words
):
    edit(qwen3_copy / "generation_config.json", **generation)
    edit(qwen3_copy / "config.json", **config)
    with pytest.raises(ConfigError, match=words):
        check(rl(qwen3_copy), 1)
    if "no answer" in words:
        check(rl(qwen3_copy, stop=("\n",)), 1)
        check(rl(qwen3_copy, stop_token_ids=(7,)), 1)
        check(rl(qwen3_copy, ignore_eos=True), 1)
        edit(qwen3_copy / "config.json", eos_token_id=2)
        if generation["eos_token_id"] is None:
            assert eos_token_ids(str(qwen3_copy)) == (2,)


def test_architectures_of_another_family_are_refused(qwen3_copy):
    for said, words in (
        (["LlamaForCausalLM"], r"model_type='qwen3' and architectures=\['LlamaForCausalLM'\]"),
        (["BertModel"], "which is of .*bert"),
        (["Qwen3ForSequenceClassification"], "a classifier, which writes no text"),
    ):
        edit(qwen3_copy / "config.json", architectures=said)
        for checked in (lambda: check(rl(qwen3_copy), 1), lambda: check_sft(sft(qwen3_copy), 1)):
            with pytest.raises(ConfigError, match=words):
                checked()


def test_weights_that_are_none_are_found_before_they_are_read(qwen3_copy):
    file = qwen3_copy / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    for dtype, word in ((torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")):
        save_file(weights | {name: weights[name].to(dtype)}, file, {"format": "pt"})
        for checked in (lambda: check(rl(qwen3_copy), 1), lambda: check_sft(sft(qwen3_copy), 1)):
            with pytest.raises(ConfigError, match=f"up_proj.weight is of {word}.*quantization"):
                checked()
    save_file(weights | {"positions": torch.arange(3)}, file, {"format": "pt"})
    check(rl(qwen3_copy), 1)
    Path(qwen3_copy, "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    )
    shard = file.rename(qwen3_copy / "model-00002-of-00002.safetensors")
    with pytest.raises(ConfigError, match=r"lacks model-00001-of-00002\.safetensors, which"):
        check(rl(qwen3_copy), 1)
    shard.rename(file)
    Path(qwen3_copy, "model.safetensors.index.json").unlink()
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        check(rl(qwen3_copy), 1)
    file.unlink()
    with pytest.raises(ConfigError, match=r"has no weights: no \*\.safetensors"):
        check_sft(sft(qwen3_copy), 1)


def test_a_model_of_several_parts_ends_where_its_own_config_says(tmp_path):
    """As Gemma 3's, whose text config is silent."""
    text = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
    config = Gemma3Config(text_config=text, eos_token_id=[1, 106])
    config.save_pretrained(tmp_path)
    assert eos_token_ids(str(tmp_path)) == (1, 106)


def test_what_is_saved_as_floats_is_not_called_quantized(qwen3_copy):
    edit(qwen3_copy / "config.json", quantization_config={"quant_method": "fp8"})
    saved = as_stored(load_hf_config(str(qwen3_copy)), torch.bfloat16)
    assert saved.dtype == torch.bfloat16
    assert "quantization_config" not in saved.to_dict()


def test_one_file_of_weights_is_read_before_an_index_that_is_left(qwen3_copy):
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    Path(qwen3_copy, "model.safetensors.index.json").write_text(json.dumps(index))
    assert missing_shards("model", qwen3_copy) == []
    assert "model.embed_tokens.weight" in Folder(qwen3_copy).files
