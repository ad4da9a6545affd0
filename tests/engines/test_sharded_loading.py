"""Each rank reads its own rows of a model's files: bit for bit what transformers loads, and no
rank holds more than its share."""

import re
import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_calls, run_ranks
from safetensors.torch import load_file, save_file
from tiny_megatron_models import make_config
from tiny_models import save_qwen3, save_qwen_vl
from training_batches import engine_on

from spmdrl.config import ConfigError, LoraConfig, TrainConfig

pytestmark = pytest.mark.ranks
FROZEN = TrainConfig(dtype="float32")


def held_on(topology, kind, model, config, frozen=True):
    """(all weights, which parameters it read whole through a converter) of an engine."""
    from spmdrl.distributed.topology import Topology, train_degrees
    from spmdrl.engines.fsdp.engine import FsdpEngine
    from spmdrl.engines.fsdp.weight_files import WeightFiles

    read: list[tuple[str, int]] = []
    plain = WeightFiles.tensor

    def recorded(self, key, rows=None):
        found = plain(self, key, rows)
        read.append((key, found.numel()))
        return found

    WeightFiles.tensor = recorded  # type: ignore[method-assign]
    ranks = Topology.build(topology.device, **train_degrees(config))
    engine = FsdpEngine.build(kind, model, config, ranks, frozen=frozen)
    WeightFiles.tensor = plain  # type: ignore[method-assign]
    weights = {}
    for name, p in engine.module.state_dict().items():
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        weights[name.removeprefix("hf.")] = whole.clone()
    base = engine.adapters.fingerprint if engine.adapters is not None else None
    return weights, read, base


def save_family(folder: Path, family: str, parts_mb: float | None = None, **changes: Any) -> Path:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = make_config(family, **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    sizes = {} if parts_mb is None else {"max_shard_size": f"{int(parts_mb * 1000)}KB"}
    model.bfloat16().save_pretrained(folder, **sizes)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(kind of engine, folder) by name."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    root = tmp_path_factory.mktemp("models")
    made = {
        "tied": ("policy", save_qwen3(root / "tied")),
        "llama in parts": ("policy", save_family(root / "llama", "llama", 0.1)),
        "critic": ("value", root / "llama"),
        "experts in parts": ("policy", save_family(root / "moe", "qwen3_moe", 0.1)),
        "mixtral": ("policy", save_family(root / "mixtral", "mixtral")),
        "deepseek": ("policy", save_family(root / "deepseek", "deepseek_v3")),
        "qwen2_vl": ("policy", save_qwen_vl(root / "vl2", "qwen2_vl")),
        "qwen3_vl": ("policy", save_qwen_vl(root / "vl3", "qwen3_vl", tied=True)),
        "new classifier": ("reward", root / "tied"),
    }  # fmt: skip
    config: Any = AutoConfig.from_pretrained(root / "tied")
    config.num_labels = 1
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(root / "classifier")
    made["classifier"] = ("reward", root / "classifier")
    # the head alone is in the file of a tied model: transformers then ties the other way round
    save_qwen3(root / "head alone")
    weights = load_file(root / "head alone" / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, root / "head alone" / "model.safetensors", {"format": "pt"})
    made["head alone"] = ("policy", root / "head alone")
    # one tensor stands in the files under two names of one parameter
    weights = load_file(save_qwen3(root / "two names") / "model.safetensors")
    weights["norm.weight"] = weights["model.norm.weight"].clone()
    save_file(weights, root / "two names" / "model.safetensors", {"format": "pt"})
    made["two names"] = ("policy", root / "two names")
    return {name: (kind, str(folder)) for name, (kind, folder) in made.items()}


def reference(kind: str, folder: str) -> dict[str, torch.Tensor]:
    """What transformers loads, by the names of the engine's module."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    config: Any = AutoConfig.from_pretrained(folder)
    auto: Any = AutoModelForCausalLM
    if kind == "reward":
        auto, config.num_labels = AutoModelForSequenceClassification, 1
    if "vision_config" in config.to_dict():
        auto = AutoModelForImageTextToText
    model = auto.from_pretrained(folder, config=config, dtype=torch.float32)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if kind == "reward" and not folder.endswith("classifier"):
        state["score.weight"].zero_()
    if kind == "value":
        del state["lm_head.weight"]
    return state


WORLDS = {1: FROZEN, 2: FROZEN, 3: FROZEN, 4: replace(FROZEN, fsdp=2)}  # the last: two replicas


@pytest.fixture(scope="module")
def loaded(models):
    """[world][model] -> what each rank has. Three ranks, whose shares are not equal, load
    all that one loads; two have those of `test_ranks_read_their_rows_alone`.
    """
    found: dict[int, dict[str, list]] = {}
    some = {2: ["tied", "llama in parts", "experts in parts", "mixtral"],
            4: ["tied", "experts in parts", "critic"]}  # fmt: skip
    for world, config in WORLDS.items():
        names = some.get(world, list(models))
        calls = [(held_on, (*models[name], config)) for name in names]
        found[world] = dict(zip(names, run_calls(world, calls), strict=True))
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_every_weight_is_what_transformers_loads(models, loaded, world):
    for name, results in loaded[world].items():
        kind, folder = models[name]
        want = reference(kind, folder)
        for weights, _, _ in results:
            heads = {"value_head.weight", "value_head.bias"} if kind == "value" else set()
            assert weights.keys() == want.keys() | heads, name
            for key, tensor in want.items():
                assert weights[key].dtype == tensor.dtype and torch.equal(weights[key], tensor), (
                    world, name, key,
                )  # fmt: skip
            assert not any(weights[head].any() for head in heads)


def test_ranks_read_their_rows_alone(models, loaded):
    """Elements read by all ranks: those of the files once, but for rows of stacked experts that
    are too few for the ranks; the second replica reads nothing."""
    for name in ("tied", "llama in parts", "experts in parts", "mixtral"):
        folder = Path(models[name][1])
        assert (len(list(folder.glob("*.safetensors"))) > 2) == name.endswith("parts")
        size = sum(t.numel() for f in folder.glob("*.safetensors") for t in load_file(f).values())
        for world in (1, 2):
            read = [sum(n for _, n in keys) for _, keys, _ in loaded[world][name]]
            assert sum(read) == size, (name, world, read)
            assert max(read) < 1.05 * size / world, (name, world, read)
    two, four = loaded[2]["tied"], loaded[4]["tied"]
    assert [read for _, read, _ in four] == [*(read for _, read, _ in two), [], []]


# ---- adapters


def adapted_on(topology, model, config):
    from spmdrl.engines.fsdp.engine import FsdpEngine  # noqa: F401  imported by engine_on

    engine = engine_on(topology, "policy", model, config)
    full = {n: p.full_tensor().clone() for n, p in engine.module.named_parameters()}
    return full, engine.adapters.fingerprint


@pytest.mark.parametrize("world", [1, 3])
def test_adapters_and_their_base(models, world):
    """The base in bfloat16, A and B as a whole model's, and the fingerprint that whole weights
    have: checkpoints of earlier versions hold it."""
    from spmdrl.engines.fsdp.lora import add_adapters, fingerprint
    from spmdrl.engines.fsdp.model import build_model

    _, folder = models["tied"]
    config = TrainConfig(dtype="bfloat16", lora=LoraConfig(rank=4, alpha=8))
    hf: Any = build_model(folder, full=True)
    known = fingerprint(dict(hf.named_parameters()))
    made = add_adapters(hf, folder, config, {}, full=True, fast_cpu=False)
    assert made.fingerprint == known
    results = run_ranks(world, adapted_on, folder, config)
    assert [print_ for _, print_ in results] == [known] + [None] * (world - 1)
    for full, _ in results:
        want = {f"hf.{n}": p.detach() for n, p in hf.named_parameters()}
        assert full.keys() == want.keys()
        for name, tensor in want.items():
            assert full[name].dtype == tensor.dtype and torch.equal(full[name], tensor), name


def test_checksums_of_rows_make_that_of_the_whole():
    from spmdrl.engines.fsdp.sharded_loading import joined

    data = torch.randint(0, 256, (100_003,), dtype=torch.uint8).numpy().tobytes()
    for cuts in ([0, 100_003], [0, 0, 1, 7, 64_000, 64_001, 100_003]):
        crc = 0
        for first, last in pairwise(cuts):
            crc = joined(crc, zlib.crc32(data[first:last]), last - first)
        assert crc == zlib.crc32(data)


# ---- what is wrong with files


def refused_on(topology, kind, models):
    from spmdrl.distributed.topology import Topology, train_degrees
    from spmdrl.engines.fsdp.engine import FsdpEngine

    ranks = Topology.build(topology.device, **train_degrees(FROZEN))
    said = []
    for model in models:
        try:
            FsdpEngine.build(kind, model, FROZEN, ranks, frozen=True)
            said.append("")
        except ConfigError as error:
            said.append(str(error))
    return said


def test_files_that_are_wrong_are_refused_on_every_rank(tmp_path):
    norm = "model.layers.1.input_layernorm.weight"
    expected = {
        "cut": "model.safetensors is damaged",
        "lacks": f"its weight files lack {norm}. Are all files of it there?",
        "shape": f"differ in the shape of {norm} ([63] in the files, [64] by the config)",
        "nan": f"{norm} has values that are not finite numbers",
        "nan in the last row": "model.embed_tokens.weight has values that are not finite numbers",
        "tied": "config.json ties lm_head.weight to model.embed_tokens.weight, but the weight",
        "left over": "",
        "bin": "",  # read by rank 0 alone
    }  # fmt: skip
    folders = []
    for what in expected:
        folder = save_qwen3(tmp_path / what)
        file = folder / "model.safetensors"
        weights = load_file(file)
        if what == "lacks":
            del weights[norm]
        elif what == "shape":
            weights[norm] = weights[norm][:-1].clone()
        elif what == "nan":
            weights[norm][3] = float("nan")
        elif what == "nan in the last row":
            weights["model.embed_tokens.weight"][-1, 3] = float("inf")
        elif what == "tied":
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
        elif what == "left over":
            weights["model.layers.7.nothing"] = torch.ones(2)
        save_file(weights, file, {"format": "pt"})
        if what == "cut":
            file.write_bytes(file.read_bytes()[:-100])
        if what == "bin":
            torch.save(weights, folder / "pytorch_model.bin")
            file.unlink()
        folders.append(str(folder))
    for said in run_ranks(2, refused_on, "policy", folders):
        for (what, words), text in zip(expected.items(), said, strict=True):
            assert words in text and bool(words) == bool(text), (what, text)


def test_rows_behind_a_converter_that_mixes_them(tmp_path):
    """Mixtral's experts are stacked by rows; a rule that moves rows is applied to the whole."""
    from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, WeightConverter

    from spmdrl.engines.fsdp.weight_files import Source

    def source(*operations):
        return Source("t", WeightConverter(["a.*.w", "b.*.w"], "t", list(operations)))

    assert source(MergeModulelist(dim=0), Concatenate(dim=1)).stacks_rows
    assert not source(MergeModulelist(dim=0), Concatenate(dim=0)).stacks_rows
    assert not source(MergeModulelist(dim=1), Concatenate(dim=0)).stacks_rows
    assert not source(Concatenate(dim=0)).stacks_rows
    assert not Source("t", WeightConverter("a", ["b", "c"], [Chunk(dim=0)])).stacks_rows


# ---- memory


def status(field: str) -> int:
    """KiB that /proc says of this process."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def peak_on(topology, small, model):
    """MiB that building an engine takes at most, and those that it keeps. small: another model,
    built before, so that libraries are imported."""
    from spmdrl.distributed.topology import Topology, train_degrees
    from spmdrl.engines.fsdp.engine import FsdpEngine

    ranks = Topology.build(topology.device, **train_degrees(FROZEN))
    FsdpEngine.build("policy", small, FROZEN, ranks, frozen=True)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    engine = FsdpEngine.build("policy", model, FROZEN, ranks, frozen=True)
    kept = sum(p.to_local().numel() * 4 for p in engine.module.parameters()) / 2**20
    return (status("VmHWM") - before) / 1024, kept


def test_no_rank_holds_more_than_its_share(tmp_path):
    """Of a model of 240 MiB in float32 that lies in bfloat16 a rank of four keeps 60 MiB, and has
    the 30 MiB of the file that it reads mapped meanwhile: 133 MiB were measured. Rank 0 took 379
    MiB when it read the whole model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    size = 2 * (tmp_path / "model.safetensors").stat().st_size / 2**20
    results = run_ranks(4, peak_on, str(save_qwen3(tmp_path / "small")), str(tmp_path))
    for peak, kept in results:
        assert kept == pytest.approx(size / 4, rel=0.01)
        assert peak < 0.7 * size, (peak, kept, size)
    assert size > 200
