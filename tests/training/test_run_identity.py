"""What is the same run and what is not: every kind of content, without a run."""

import importlib
import json
import os
import random
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from plan_configs import CONFIG_FILE
from tiny_models import png, save_qwen_vl

from spmdrl.algo.advantages import Estimator
from spmdrl.algo.losses import PolicyLoss
from spmdrl.cli.arguments import load_config
from spmdrl.cli.function_code import code_of, is_users
from spmdrl.config import (
    AlgoConfig,
    DataConfig,
    LoraConfig,
    PpoConfig,
    RewardModelConfig,
    SftConfig,
    SftDataConfig,
    TrainConfig,
)
from spmdrl.data.table_files import Files
from spmdrl.hub.hf_folder import load_tokenizer
from spmdrl.training import run_identity as module
from spmdrl.training.run_identity import (
    content_print,
    differences,
    files_print,
    identity,
    images_print,
    of_evaluation,
)

COLUMNS = ("prompt", "images")


@pytest.fixture
def model(tmp_path, qwen3):
    return shutil.copytree(qwen3, tmp_path / "model")


@pytest.fixture
def config(tmp_path, model):
    for name in ("a", "b", "held_out"):
        Path(tmp_path, f"{name}.jsonl").write_text(f'{{"prompt": "{name}", "response": "1"}}\n')
    files = tuple(str(tmp_path / f"{name}.jsonl") for name in ("a", "b"))
    data = DataConfig(files, eval=str(tmp_path / "held_out.jsonl"))
    return PpoConfig(str(model), data, "gsm8k")


def taken(config):
    return identity(config, load_tokenizer(config.model))


def told(before, config):
    found = differences(before, taken(config))
    return [(difference.kind, difference.text) for difference in found]


def edit(path, change):
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def test_the_same_is_the_same_in_another_process_and_folder(config, tmp_path, model):
    before = json.loads(json.dumps(taken(config)))
    assert told(before, config) == []
    edit(model / "config.json", lambda c: c.update(dtype="float16", transformers_version="1"))
    edit(model / "tokenizer.json", lambda t: t.update(truncation=None))  # written anew
    moved = model.rename(tmp_path / "moved")
    [line] = told(before, replace(config, model=str(moved)))
    assert line[0] is None and line[1].startswith("model ")


def test_files_are_compared_in_their_order_and_held_out_ones_are_a_choice(config, tmp_path):
    before, data = taken(config), config.data
    swapped = replace(config, data=replace(data, train=data.train[::-1]))
    kinds = [kind for kind, _ in told(before, swapped)]
    assert kinds == [None, "data", "data"]
    fewer = replace(config, data=replace(data, train=data.train[0]))
    assert ("data", "data.train: 2 files -> 1 file") in told(before, fewer)
    Path(tmp_path, "held_out.jsonl").write_text('{"prompt": "x", "response": "2"}\n')
    [(kind, text)] = told(before, config)
    assert kind is None and text.startswith("data.eval: content held_out.jsonl (")


MODEL_EDITS = {
    "rope": ("config.json", lambda c: c["rope_parameters"].update(rope_theta=1.0), "model"),
    "eos": ("generation_config.json", lambda c: c.update(eos_token_id=7), "model"),
    "norm": ("config.json", lambda c: c.update(rms_norm_eps=0.5), "model"),
    "vocabulary": ("tokenizer.json", lambda t: t["model"]["vocab"].update({"1": 6, "2": 5}),
                   "tokenizer"),
    "normalizer": ("tokenizer.json", lambda t: t.update(normalizer={"type": "Lowercase"}),
                   "tokenizer"),
    "eos token": ("tokenizer_config.json", lambda t: t.update(eos_token="<unk>"), "tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("what", MODEL_EDITS)
def test_what_a_model_folder_holds(config, model, what):
    before = taken(config)
    file, change, kind = MODEL_EDITS[what]
    edit(model / file, change)
    kinds = {kind for kind, _ in told(before, config)}
    assert kinds == {kind}


def test_a_chat_template_is_a_kind_of_its_own(config, model):
    before = taken(config)
    Path(model, "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert [kind for kind, _ in told(before, config)] == ["chat_template"]


def test_fields_that_another_version_of_a_library_adds_are_no_difference(config):
    before = taken(config)
    del before["models"]["model"]["config"]["rms_norm_eps"]
    before["tokenizers"]["model"]["pipeline"] = "written otherwise"
    assert {kind for kind, _ in told(before, config)} == {"model", "tokenizer"}
    before["versions"] |= {"transformers": "4.0", "tokenizers": "0.1"}
    assert [kind for kind, _ in told(before, config)] == [None, None]  # a line for each version


def flip_last_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_weights_count_where_they_are_never_trained(config, model, tmp_path):
    other = shutil.copytree(model, tmp_path / "other")
    config = replace(config, reward_model=RewardModelConfig(str(other)),
                     critic=TrainConfig(model=str(other)))  # fmt: skip
    before, with_ref = taken(config), replace(config, algo=AlgoConfig(kl_coef=0.1))
    before_ref = taken(with_ref)
    flip_last_byte(model / "model.safetensors")
    assert told(before, config) == []  # a checkpoint has the actor's
    assert [text for _, text in told(before_ref, with_ref)] == [
        "ref: the weights, which this run does not train"
    ]
    flip_last_byte(other / "model.safetensors")
    edit(other / "config.json", lambda c: c.update(rms_norm_eps=0.5))
    assert [text for kind, text in told(before, config) if kind == "model"] == [
        "critic: rms_norm_eps of config.json 1e-06 -> 0.5",
        "reward_model: rms_norm_eps of config.json 1e-06 -> 0.5",
        "reward_model: the weights, which this run does not train",
    ]
    edit(other / "tokenizer.json", lambda t: t["model"]["vocab"].update({"1": 6, "2": 5}))
    kinds = {kind for kind, text in told(before, config) if "of reward_model" in text}
    assert kinds == {"tokenizer"}


def test_choices_have_a_line_each(config):
    before = taken(config)
    changed = replace(
        config, seed=1, steps=7, actor=replace(config.actor, dtype="float32"), critic=TrainConfig(),
        resume="auto", placement={"actor": "0"},
        checkpoint=replace(config.checkpoint, accept_changes=("data",)),
    )  # fmt: skip
    assert sorted(told(before, changed)) == [
        (None, "actor.dtype 'bfloat16' -> 'float32'"), (None, "critic None -> TrainConfig"),
        (None, "placement {} -> {'actor': '0'}"), (None, "seed 0 -> 1"), (None, "steps 100 -> 7"),
    ]  # fmt: skip


def test_an_evaluation_is_told_what_it_asks_otherwise(config, tmp_path):
    """Its model and tokenizer are the checkpoint's, and rows to train on may be gone."""
    before = taken(config)
    other = replace(config, model="gone", reward="math", data=replace(config.data, train="gone"))
    Path(tmp_path, "held_out.jsonl").write_text('{"prompt": "x", "response": "2"}\n')
    texts = [difference.text for difference in of_evaluation(before, other)]
    assert [text.partition(":")[0] for text in texts] == ["data.eval", "reward function"]


def test_code_in_a_models_folder_is_part_of_it(config, model):
    before = taken(config)
    Path(model, "modeling_own.py").write_text("import torch")
    assert told(before, config) == [("model", "model: the Python files in its folder")]


def test_programs_that_learn_from_rows_have_one_too(config, tmp_path):
    sft = SftConfig(config.model, SftDataConfig(config.data.train[0]), "out")
    before = taken(sft)
    assert told(before, sft) == []
    Path(config.data.train[0]).write_text('{"prompt": "a", "response": "2"}\n')
    assert [kind for kind, _ in told(before, sft)] == ["data"]


# ---- files that are not read whole


@pytest.mark.parametrize("place", [0, 3 << 20, -1])
def test_blocks_of_a_large_file_are_read_and_its_size_counts(tmp_path, place, monkeypatch):
    monkeypatch.setattr(module, "LEAST_BYTES", 1 << 10)
    path = tmp_path / "rows.jsonl"
    content = bytearray(random.randbytes(6 << 20))
    path.write_bytes(content)
    before = content_print(path, 4 << 10)
    assert before == content_print(path, 4 << 10) != content_print(path, 8 << 20)
    whole = content_print(path, 8 << 20)
    content[place] ^= 1
    path.write_bytes(content)
    assert content_print(path, 8 << 20) != whole
    if place != 3 << 20:  # between its blocks
        assert content_print(path, 4 << 10) != before
    path.write_bytes(content + b"\n")
    assert content_print(path, 4 << 10) != before


def test_a_parquet_files_footer_knows_of_rows_that_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LEAST_BYTES", 64)
    path = tmp_path / "rows.parquet"

    def write(rows):
        pq.write_table(pa.table({"truth": rows}), path, row_group_size=500, compression="none",
                       use_dictionary=False)  # fmt: skip

    rows = [f"{i:06d}" for i in range(20_000)]
    write(rows)
    before, size = content_print(path, 256), os.path.getsize(path)
    write(rows)
    assert content_print(path, 256) == before
    rows[10_000] = "zzzzzz"
    write(rows)
    assert os.path.getsize(path) == size
    assert content_print(path, 256) != before


def test_many_files_take_no_longer_than_one(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(module, "BUDGET_BYTES", 1 << 20)
    sha256 = module.hashlib.sha256

    class Counting:
        def __init__(self, content=b""):
            self.inner = sha256(content)

        def update(self, content):
            read.append(len(content))
            self.inner.update(content)

        def hexdigest(self):
            return self.inner.hexdigest()

    monkeypatch.setattr(module.hashlib, "sha256", Counting)
    paths = tuple(str(tmp_path / f"{i}.jsonl") for i in range(16))
    for path in paths:
        Path(path).write_bytes(bytes(1 << 20))
    found = files_print(paths)
    assert 1 << 19 <= sum(read) <= 1 << 20
    with Path(paths[3]).open("r+b") as file:
        file.write(b"1")
    changed = files_print(paths)
    assert [i for i in range(16) if changed[i] != found[i]] == [3]


def test_the_base_of_adapters_is_compared_elsewhere(config, model):
    """A flag that allowed another one here would not there."""
    config = replace(config, algo=AlgoConfig(kl_coef=0.1),
                     actor=replace(config.actor, lora=LoraConfig()))  # fmt: skip
    before = taken(config)
    flip_last_byte(model / "model.safetensors")
    assert told(before, config) == []


def test_images_that_rows_name_are_content(tmp_path):
    for name in ("a.png", "b.png"):
        Path(tmp_path, name).write_bytes(png(0, 8, 8))
    rows = [{"prompt": "x", "images": ["a.png"]}, {"prompt": "y", "images": ["b.png", "a.png"]}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = images_print([Files.open(str(path), COLUMNS)])
    assert before is not None
    Path(tmp_path, "b.png").write_bytes(png(1, 8, 8))
    after = images_print([Files.open(str(path), COLUMNS)])
    assert after != before
    with path.open("a") as file:  # a row whose image is not there is passed over
        file.write(json.dumps({"prompt": "z", "images": ["missing.png"]}) + "\n")
    assert images_print([Files.open(str(path), COLUMNS)]) == after
    path.write_text('{"prompt": "x"}\n')
    assert images_print([Files.open(str(path), COLUMNS)]) is None


def test_the_image_processor_is_part_of_the_model(config, tmp_path):
    seeing = save_qwen_vl(tmp_path / "seeing")
    config = replace(config, model=str(seeing))
    before = taken(config)
    edit(seeing / "preprocessor_config.json", lambda p: p["size"].update(longest_edge=256))
    [(kind, text)] = told(before, config)
    assert kind == "model" and "size.longest_edge of preprocessor_config.json 1024 -> 256" in text


# ---- functions


def test_every_entry_of_what_a_function_holds_counts():
    def with_weights(weights):
        return lambda response: weights.get(response, 0)

    names = [f"name {i}" for i in range(100)]
    prints = [code_of(with_weights(dict.fromkeys(names, 1) | {name: 2})) for name in names]
    assert len({tuple(found) for found in prints}) == len(names)


def test_packages_of_other_prefixes_are_installed_too(tmp_path, monkeypatch):
    folder = tmp_path / "lib" / "python3" / "dist-packages"
    folder.mkdir(parents=True)
    Path(folder, "packaged_helper.py").write_text("LIMIT = 3\n")
    Path(tmp_path, "own_helper.py").write_text("LIMIT = 3\n")
    for path in (folder, tmp_path):
        monkeypatch.syspath_prepend(path)
    assert is_users(importlib.import_module("own_helper").__name__)
    assert not is_users(importlib.import_module("packaged_helper").__name__)


HELPERS = """
import re
NUMBER = re.compile("[0-9]+")
STARTED = __import__("time").time()
def clean(text):
    return NUMBER.findall(text)
class Unused:
    pass
"""
FUNCTIONS = """
import helpers
from helpers import NUMBER as NUM, clean
import os, functools
from functools import partial
from spmdrl.config import *

UNIT = 2
try:
    WEIGHTS = {"a": UNIT * 3}
except ValueError:
    WEIGHTS = {}
config_steps = 5
URL = os.environ["TMPDIR"] if "TMPDIR" in os.environ else str(os.getpid())

def weigh(text):
    return WEIGHTS["a"] * len(clean(text)) + (URL == "")

def make(scale, where="http://10.0.0.1:80"):
    def made(response, ground_truth):
        return scale * weigh(response)
    return made

@functools.cache
def kept(text):
    return text.strip() == "1"

class Judge:
    limit = 4
    def __init__(self, strict):
        self.strict = strict
    @staticmethod
    def score(text):
        return float(NUM.match(text) is not None)
    def __call__(self, response):
        return self.score(response) + self.strict

def by_module(response):
    return helpers.clean(response), response.config_steps

def caching(response):
    return [kept(part) for part in response.split()]
"""
REWARDS = ["make(1)", "Judge(1)", "Judge(1).score", "by_module", "caching",
           "lambda response: weigh(response)", "partial(make, 3)", "Judge(1).__call__"]  # fmt: skip
CHANGES = {  # what is replaced -> which of the rewards that changes
    "UNIT = 2": ("UNIT = 3", [0, 5, 6]),
    "UNIT * 3": ("UNIT * 4", [0, 5, 6]),
    "scale * weigh": ("scale + weigh", [0, 6]),
    "text.strip()": ("text.lstrip()", [4]),
    "is not None)": ("is None)", [1, 2, 7]),
    "self.score(response) +": ("self.score(response) -", [1, 7]),
    "limit = 4": ("limit = 5", [1, 7]),
    "config_steps = 5": ("config_steps = 6", []),
    "10.0.0.1": ("10.0.0.2", []),
    "[0-9]+": ("[0-9]*", [0, 1, 2, 3, 5, 6, 7]),
    "findall": ("match", [0, 3, 5, 6]),
    "    pass": ("    name = 1", []),
}


def loaded(folder, functions, helpers):
    """The code of each reward of a config file that was just started."""
    Path(folder, "helpers.py").write_text(helpers)
    rewards = ", ".join(f'"{i}": {reward}' for i, reward in enumerate(REWARDS))
    Path(folder, "cfg.py").write_text(
        f"{functions}\nconfig = PpoConfig('m', DataConfig('d'), {{{rewards}}})\n"
    )
    config = load_config(str(folder / "cfg.py"), PpoConfig, {})
    return [sorted(code_of(reward)) for reward in config.reward.values()]


def test_rewards_are_their_helpers_constants_and_classes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    before = None
    for old, (new, changed) in {"": ("", []), **CHANGES}.items():
        monkeypatch.delitem(importlib.sys.modules, "helpers", raising=False)
        importlib.invalidate_caches()
        now = loaded(tmp_path, FUNCTIONS.replace(old, new) if old else FUNCTIONS,
                     HELPERS.replace(old, new) if old else HELPERS)  # fmt: skip
        before = before or now
        assert [i for i in range(len(REWARDS)) if now[i] != before[i]] == changed, old


def test_a_partials_values_are_the_configs_and_installed_functions_are_names(config):
    one, two = partial(json.loads, strict=True), partial(json.loads, strict=False)
    before = taken(replace(config, reward={"a": one, "b": "gsm8k"}))
    [(kind, text)] = told(before, replace(config, reward={"a": two, "b": "gsm8k"}))
    assert kind is None and text.startswith("reward {'a': partial(loads")
    found = told(before, replace(config, reward={"a": one, "b": "math"}, tools=("python",)))
    assert [kind for kind, _ in found] == [None, None, "reward", "tools"]
    assert "reward function of 'b'" in found[2][1]


def test_an_agents_code_counts_and_a_command_line_is_the_configs(config, tmp_path):
    def agent_of(score):
        path = tmp_path / f"agent_{score}.py"
        path.write_text(
            f"{CONFIG_FILE}\nasync def play(base_url): return {score}\n"
            "config = PpoConfig('m', DataConfig('d'), 'agent', agent=play)\n"
        )
        return load_config(str(path), PpoConfig, {}).agent

    one = replace(config, reward="agent", agent={"a": agent_of(1), "b": ["run", "{prompt}"]})
    two = replace(one, agent={**one.agent, "a": agent_of(2)})
    assert "tools" in [kind for kind, _ in told(taken(one), two)]
    other = replace(one, agent={**one.agent, "b": ["walk", "{prompt}"]})
    [(kind, text)] = told(taken(one), other)
    assert kind is None and "walk" in text


def test_code_of_another_python_is_not_compared(config, tmp_path):
    path = tmp_path / "cfg.py"
    path.write_text(CONFIG_FILE)
    reward = load_config(str(path), PpoConfig, {}).reward
    before = taken(replace(config, reward=reward))
    before["code"]["reward"] = dict.fromkeys(before["code"]["reward"], "0")
    assert [kind for kind, _ in told(before, replace(config, reward=reward))] == ["reward"]
    before["versions"]["python"] = "3.1"
    [(kind, text)] = told(before, replace(config, reward=reward))
    assert kind is None and text.startswith("python 3.1 -> ")


def one_loss(logprobs, old_logprobs, mb):
    return -logprobs, {}


def another_loss(logprobs, old_logprobs, mb):
    return -2 * logprobs, {}


def test_a_loss_in_a_record_counts_as_it_does_alone(monkeypatch):
    monkeypatch.setattr(module, "is_users", lambda name: name == __name__)
    records = [
        PolicyLoss(one_loss), PolicyLoss(another_loss), PolicyLoss(one_loss, has_ratio=False),
        Estimator(one_loss), Estimator(one_loss, whiten=True),
    ]  # fmt: skip
    prints = [module.function_print(record) for record in records]
    assert len(set(prints)) == len(records)
    assert module.function_print(PolicyLoss(one_loss)) == prints[0]


def test_options_are_compared_by_the_values_in_use(config):
    now = module.options_in_use(config)
    assert now["algo.loss_args.clip_high"] == "0.2"
    wider = replace(config, algo=replace(config.algo, loss_args={"clip_high": 0.3}))
    lines = list(module.of_settings(now, module.options_in_use(wider)))
    assert lines == ["algo.loss_args.clip_high 0.2 -> 0.3"]
    earlier = {"algo.clip_high": "0.28", "algo.dual_clip": "3.0", "algo.sppo_beta": "2.0"}
    lines = list(module.of_settings(module.with_moved_options(earlier), now))
    assert lines == ["algo.loss_args.clip_high 0.28 -> 0.2"]
