"""Exports of checkpoints: what they hold, the memory that they take, and several ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_megatron_models as tiny
import torch
from hub_servers import HuggingFace, Repo, serving
from hub_servers import files_of as files_in
from huggingface_hub import constants
from programs import train
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny_models import save_tokenizer

from spmdrl.checkpoint.format import commit, digest
from spmdrl.cli import hub_names
from spmdrl.config import ConfigError, TrainConfig
from spmdrl.engines import hf_export
from spmdrl.engines.hf_export import Writers, beside, export, kept_sources, mtp_tensors
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.hub.mtp_layers import MtpTensors
from spmdrl.hub.safetensors_files import INDEX, SafetensorsFile, TensorSpec, files_of

ROOT = Path(__file__).parents[2]
MIB = 2**20
LARGE = {  # 200 MiB in float32, of which 25 are a layer's experts, and 2 the embedding
    "hidden_size": 256, "moe_intermediate_size": 512, "n_routed_experts": 16,
    "num_hidden_layers": 9, "vocab_size": 2048, "num_nextn_predict_layers": 1,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("fsdp", {"dtype": "float32"}),
    "megatron": ("megatron", {"expert_parallel": 2, "dtype": "bfloat16"}),
}


def mtp_weights() -> dict[str, torch.Tensor]:
    """Of the layer after the last, in two dtypes as published."""
    torch.manual_seed(5)
    return {
        "model.layers.9.eh_proj.weight": torch.randn(256, 512, dtype=torch.bfloat16),
        "model.layers.9.enorm.weight": torch.randn(256, dtype=torch.bfloat16),
        "model.layers.9.mlp.gate.e_score_correction_bias": torch.randn(16),
    }


def saved_on(topology: Any, model: str, folder: str) -> Any:
    """Saves a model as checkpoints of the engines; returns their weights on the first rank."""
    return {name: saved_by(topology, model, folder, *case) for name, case in CASES.items()}


def saved_by(
    topology: Any, model: str, folder: str, engine: str, layout: dict[str, Any]
) -> dict[str, torch.Tensor]:
    from spmdrl.distributed.topology import Topology, train_degrees
    from spmdrl.engines.build import build_engine

    config = TrainConfig(engine=engine, **layout)
    ranks = Topology.build(topology.device, **train_degrees(config))
    built = build_engine("policy", model, config, ranks)
    aside, first = Path(folder, "aside"), topology.rank == 0
    if first:
        Path(aside, "actor").mkdir(parents=True)
        for part in built.pretrained:
            part.save_pretrained(aside / "hf")
        Path(aside, "run.json").write_text(json.dumps({"model": model}))
    torch.distributed.barrier()
    built.save(Path(aside, "actor"))
    torch.distributed.barrier()
    if first:
        names = [str(f.relative_to(aside)) for f in aside.rglob("*") if f.is_file()]
        commit(aside, Path(folder, engine), {name: digest(Path(aside, name)) for name in names})
    named = built.named_weights(torch.float32, MIB)
    return {name: tensor.clone() for name, tensor in named if first}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a model, which has a multi-token prediction layer, and its checkpoints."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = folder / "model"
    tiny.save_model("deepseek_v3", model, **LARGE).config.save_pretrained(model)
    save_tokenizer(model)
    save_file(load_file(model / "model.safetensors") | mtp_weights(), model / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    return folder, run_ranks(2, saved_on, str(model), str(folder), timeout_s=200)[0]


MEASURE = """
import sys
from pathlib import Path
from spmdrl.engines import hf_export
def kib(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0])
checkpoint, out = map(Path, sys.argv[1:])
hf_export.sources_of(checkpoint, "actor")
Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
before = kib("VmRSS")
hf_export.export(checkpoint, out, "bfloat16")
print("took", (kib("VmHWM") - before) * 1024)
"""


@pytest.mark.ranks
@pytest.mark.megatron
@pytest.mark.parametrize("engine", CASES)
def test_an_export_takes_the_memory_of_a_tensor(made, engine, tmp_path):
    folder, _ = made
    size = sum(t.numel() * 4 for t in load_file(folder / "model/model.safetensors").values())
    assert size > 200 * MIB
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder / engine), str(tmp_path / "out")],
        env=os.environ | paths, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    took = int(done.stdout.split("took")[1])
    print(f"{engine}: {took / MIB:.0f} MiB beside libraries and the index, of {size / MIB:.0f}")
    assert 0 < took < 100 * MIB


@pytest.mark.ranks
@pytest.mark.megatron
@pytest.mark.parametrize("engine", CASES)
def test_ranks_write_files_of_one_model(made, engine, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    folder, weights = made
    args = ["--checkpoint", str(folder / engine), "--out", "out", "--dtype", "float32"]
    done = train(tmp_path, 3, *args, program="spmdrl.export")
    assert done.code == 0, done.output[-4000:]
    assert "3 tensors of multi-token prediction layers, which were not trained" in done.output
    found = load_file(tmp_path / "out/model.safetensors")
    want = weights[engine] | mtp_weights()
    assert found.keys() == want.keys()
    for name, tensor in found.items():  # the float32 weights, of which the model's are rounded
        rounds = engine == "megatron" and not name.endswith("correction_bias")
        own = tensor.bfloat16().to(tensor.dtype) if rounds else tensor
        assert torch.equal(own, want[name]), name
    assert all(found[name].dtype == tensor.dtype for name, tensor in mtp_weights().items())
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and set(info["unexpected_keys"]) <= mtp_weights().keys()
    # several files, by two ranks in turn: the same tensors, and an index of them
    monkeypatch.setattr(hf_export, "files_of", lambda groups: files_of(groups, 20 * MIB))
    for rank in (1, 0):
        export(folder / engine, tmp_path / "many", "float32", without_mtp=True,
               writers=Writers(rank, 2))  # fmt: skip
        if rank == 1:  # it is no model yet, and not refused as one
            assert not Path(tmp_path, "many", "config.json").exists()
            assert not Path(tmp_path, "many", INDEX).exists()
            with pytest.raises((OSError, ValueError), match=r"config\.json"):
                AutoModelForCausalLM.from_pretrained(tmp_path / "many")
    index = json.loads(Path(tmp_path, "many", INDEX).read_text())
    files = sorted({*index["weight_map"].values()})
    assert len(files) > 8
    many = {name: t for file in files for name, t in load_file(tmp_path / "many" / file).items()}
    assert many.keys() == index["weight_map"].keys() == found.keys() - mtp_weights().keys()
    assert all(torch.equal(many[name], found[name]) for name in many)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in many.values())


@pytest.mark.ranks
@pytest.mark.megatron
def test_where_the_layers_are_not_there_it_is_said_what_to_do(made, tmp_path):
    folder, _ = made
    shutil.copytree(folder / "model", tmp_path / "moved")
    Path(folder, "model/model.safetensors").rename(folder / "hidden")
    try:
        with pytest.raises(ConfigError, match=r"Name its folder with --base, or .*--without_mtp"):
            export(folder / "fsdp", tmp_path / "out")
        export(folder / "fsdp", tmp_path / "out", base=str(tmp_path / "moved"))
        export(folder / "fsdp", tmp_path / "without", without_mtp=True)
    finally:
        Path(folder, "hidden").rename(folder / "model/model.safetensors")
    mtp = mtp_weights().keys()
    assert load_file(tmp_path / "out/model.safetensors").keys() >= mtp
    assert not load_file(tmp_path / "without/model.safetensors").keys() & mtp
    with pytest.raises(ConfigError, match="already holds a model"):
        export(folder / "fsdp", tmp_path / "out", without_mtp=True)


def test_nothing_of_files_stands_beside_layers_that_were_trained(tmp_path):
    """Which may have the experts of a layer as one tensor, where training names each."""
    model = {}
    for family, fields in (
        ("qwen3_5_moe_text", {"mtp_num_hidden_layers": 1}),
        ("deepseek_v3", {"num_nextn_predict_layers": 1}),
    ):
        tiny.save_model(family, tmp_path / family)
        file = tmp_path / family / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
        model[family] = load_hf_config(str(tmp_path / family))
    qwen, deepseek = model["qwen3_5_moe_text"], model["deepseek_v3"]
    stacked = {f"mtp.layers.0.mlp.experts.{n}": torch.ones(2, 3) for n in ("gate_up_proj", "down")}
    save_file(stacked, tmp_path / "qwen3_5_moe_text/model.safetensors")
    own = ["model.embed_tokens.weight", "lm_head.weight"]
    found = MtpTensors(str(tmp_path / "qwen3_5_moe_text"), qwen)
    copies, kept = beside(own, qwen, lambda: found)
    assert copies == {} and kept is found
    names = [name for source, _ in kept_sources(found, torch.float32, copies) for name in source[0]]
    assert sorted(names) == sorted(stacked)
    each = [f"mtp.layers.0.mlp.experts.{n}.gate_proj.weight" for n in range(2)]
    assert beside([*own, *each], qwen, lambda: found) == ({}, None)
    layer = f"model.layers.{deepseek.num_hidden_layers}."
    trained = [*own, "model.layers.0.input_layernorm.weight", f"{layer}enorm.weight"]
    assert beside(trained, deepseek, lambda: found) == (
        {f"{layer}embed_tokens.weight": own[0], f"{layer}shared_head.head.weight": own[1]}, None,
    )  # fmt: skip


def test_the_layers_are_had_by_a_hubs_name(tmp_path, monkeypatch):
    """Of --base, and of the model that the checkpoint names: with a revision, and of ModelScope."""
    model = tmp_path / "model"
    tiny.save_model("deepseek_v3", model, num_nextn_predict_layers=1).config.save_pretrained(model)
    config = load_hf_config(str(model))
    layers = f"model.layers.{config.num_hidden_layers}."
    given = {n.replace("model.layers.9.", layers): t for n, t in mtp_weights().items()}
    save_file(given, model / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "run.json").write_text(json.dumps({"model": "tiny/v3@main"}))
    with serving(HuggingFace({"models/tiny/v3": Repo({"main": files_in(model)})})) as hub:
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for base in ("tiny/v3@main", ""):
            found = mtp_tensors(tmp_path, config, base)
            assert found is not None and found.shapes.keys() == given.keys()
            assert all(torch.equal(found.read(name), tensor) for name, tensor in given.items())
        with pytest.raises(ConfigError, match=r"v3@gone.*no revision 'gone'.*Name its folder"):
            mtp_tensors(tmp_path, config, "tiny/v3@gone")
        monkeypatch.setattr(hub_names, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"--base='modelscope:tiny/v3' is on ModelScope"):
            mtp_tensors(tmp_path, config, "modelscope:tiny/v3")


def test_a_file_is_what_safetensors_writes(tmp_path):
    given = {
        "half": torch.randn(3, 5).bfloat16(), "one": torch.tensor(2.5), "none": torch.zeros(0, 4),
        "wide": torch.randn(7, dtype=torch.float64), "bytes": torch.arange(5, dtype=torch.uint8),
        "eight": torch.randn(4, 4).to(torch.float8_e4m3fn), "turned": torch.randn(4, 6).T,
    }  # fmt: skip
    specs = {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in given.items()}
    file = SafetensorsFile(tmp_path / "a.safetensors", specs)
    for name in reversed(list(given)):
        assert not (tmp_path / "a.safetensors").exists()
        if name == "one":
            with pytest.raises(ValueError, match=r"lacks 2 tensors: \['half', 'one'\]"):
                SafetensorsFile.close(shallow(file))
        file.write(name, given[name])
    file.close()
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.float()), name
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def shallow(file):
    """A file with the same tensors left, whose closing does not close this one."""
    other = SafetensorsFile(file.path.with_name("b"), file.specs)
    other.left = set(file.left)
    Path(f"{other.path}.unfinished").unlink()
    return other
