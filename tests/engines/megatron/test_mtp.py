"""Layers for multi-token prediction that are trained: their loss and gradients against a plain
computation, the policy beside them, checkpoints and exports.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny_megatron_models as tiny
import torch
from ranks import groups_that_end, run_calls, run_ranks
from safetensors.torch import load_file, save_file
from tiny_models import CHARS, save_tokenizer
from torch import Tensor
from training_batches import CONFIG, on_data_ranks, whole_batch

from spmdrl.checkpoint.format import commit, digest
from spmdrl.config import ConfigError, LoraConfig, TrainConfig
from spmdrl.engines.hf_export import export
from spmdrl.engines.megatron.mtp import check_mtp
from spmdrl.hub.safetensors_files import INDEX

WEIGHT = 0.3
CLIP_NORM = 0.01  # below the norms of both, which are clipped apart
TOKENS = {"vocab_size": len(CHARS), "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": None}
FIELDS = {
    "deepseek_v3": {"num_nextn_predict_layers": 2}, "glm4_moe": {"num_nextn_predict_layers": 1},
    "qwen3_5_text": {"mtp_num_hidden_layers": 1},
    "glm4_moe_lite": {"num_nextn_predict_layers": 1},
}  # fmt: skip
Cases = list[tuple[str, dict[str, Any]]]  # families in layouts
ALONE: Cases = [(family, {}) for family in FIELDS]
ON_TWO_RANKS: Cases = [
    ("deepseek_v3", {"tensor_parallel": 2, "sequence_parallel": True}),
    (
        "glm4_moe",
        {"pipeline_parallel": 2, "virtual_pipeline": 2, "activation_checkpointing": True},
    ),
    ("qwen3_5_text", {"tensor_parallel": 2, "activation_checkpointing": True}),
    ("glm4_moe_lite", {"pipeline_parallel": 2}),
    ("glm4_moe", {"context_parallel": 2, "activation_checkpointing": True}),  # not saved
]


def mtp_files(family: str, files: dict[str, Tensor], hidden: int) -> dict[str, Tensor]:
    """Random tensors of the layers as published: of the layer inside, those of the model's last
    layer, changed.
    """
    torch.manual_seed(3)
    last = "model.layers.3."
    found = {}
    for number in range(next(iter(FIELDS[family].values()))):
        qwen = family.startswith("qwen")
        around, inside = ("mtp.", "mtp.layers.0.") if qwen else (f"model.layers.{4 + number}.",) * 2
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc") if qwen else (
            "enorm", "hnorm", "shared_head.norm", "eh_proj"
        )  # fmt: skip
        for name in names[:3]:
            found[f"{around}{name}.weight"] = torch.randn(hidden) * 0.2 + (0 if qwen else 1)
        found[f"{around}{names[3]}.weight"] = torch.randn(hidden, 2 * hidden) * 0.08
        for name in [name for name in files if name.startswith(last)]:
            other = files[name] + torch.randn_like(files[name]) * 0.02
            found[name.replace(last, inside)] = other
        if not qwen:
            found[f"{around}embed_tokens.weight"] = files["model.embed_tokens.weight"].clone()
            found[f"{around}shared_head.head.weight"] = files["lm_head.weight"].clone()
    return found


def save_with_mtp(family: str, folder: Path) -> None:
    """A tiny model whose files have the layers."""
    fields = FIELDS[family]
    model = tiny.save_model(family, folder, **TOKENS, **fields)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    file = folder / "model.safetensors"
    held = load_file(file)
    save_file(held | mtp_files(family, held, model.config.hidden_size), file, {"format": "pt"})
    save_tokenizer(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in FIELDS:
        save_with_mtp(family, folder / family)
    return folder


def trained_on(topology: Any, folder: Path, cases: Cases, weight: float) -> list[Any]:
    found = []
    for number, (family, layout) in enumerate(cases):
        with groups_that_end():
            saves = topology.world > 1 and number < len(FIELDS)
            found.append(trained_case(topology, Path(folder), family, layout, weight, saves))
    return found


def trained_case(
    topology: Any, folder: Path, family: str, layout: Any, weight: float, saves: bool
) -> Any:
    """Two updates; what they say, all weights then, and with `saves` a checkpoint."""
    from spmdrl.algo.objectives import policy_objective
    from spmdrl.config import AlgoConfig
    from spmdrl.distributed.topology import Topology, train_degrees
    from spmdrl.engines.build import build_engine

    config = dataclasses.replace(
        CONFIG, engine="megatron", mtp_loss_scaling_factor=weight,
        optim=dataclasses.replace(CONFIG.optim, clip_norm=CLIP_NORM), **layout,
    )  # fmt: skip
    ranks = Topology.build(topology.device, **train_degrees(config))
    actor = build_engine("policy", str(folder / family), config, ranks)
    loss = policy_objective(AlgoConfig())
    batch = on_data_ranks(ranks, whole_batch())
    metrics = [actor.update(batch, loss, temperature=0.8) for _ in range(2)]
    named = {n: t.clone() for n, t in actor.named_weights(torch.float32, 1 << 20)}
    if saves:
        saved(actor, topology, folder / f"saved_{family}")
        other = build_engine("policy", str(folder / family), config, ranks)
        other.load(folder / f"saved_{family}" / "actor")
        again = {n: t.clone() for n, t in other.named_weights(torch.float32, 1 << 20)}
        assert all(torch.equal(again[n], named[n]) for n in named), family
        plain = dataclasses.replace(config, mtp_loss_scaling_factor=0.0)
        other = build_engine("policy", str(folder / family), plain, ranks)
        with pytest.raises(
            ConfigError, match=r"layers? for multi-token prediction that (?:was|were) trained"
        ):
            other.load(folder / f"saved_{family}" / "actor")
    return metrics, named


def saved(actor: Any, topology: Any, folder: Path) -> None:
    """A checkpoint, of which an export needs no files of the model that the run started from."""
    aside = folder.with_name(folder.name + "_aside")
    first = topology.rank == 0
    if first:
        Path(aside, "actor").mkdir(parents=True)
        for part in actor.pretrained:
            part.save_pretrained(aside / "hf")
        Path(aside, "run.json").write_text(json.dumps({"model": "moved"}))
    torch.distributed.barrier()
    actor.save(aside / "actor")
    torch.distributed.barrier()
    if first:
        names = [str(f.relative_to(aside)) for f in aside.rglob("*") if f.is_file()]
        commit(aside, folder, {name: digest(aside / name) for name in names})
    torch.distributed.barrier()


# ---- the plain computation


@torch.no_grad()
def plain_loss(folder: Path, family: str) -> float:
    """The loss of the first update by transformers' layers, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder / family, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    files, config = load_file(folder / family / "model.safetensors"), model.config
    count = next(iter(FIELDS[family].values()))
    zero_centred, eps = family.startswith("qwen"), config.rms_norm_eps
    batch, total = whole_batch(), 0.0

    def norm(x: Tensor, name: str) -> Tensor:
        weight = files[name] + (1 if zero_centred else 0)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    starts = batch.cu_seqlens.tolist()
    for first, last in pairwise(starts):
        ids, mask = batch.token_ids[first:last][None], batch.loss_mask[first:last]
        states = model.model(ids, use_cache=False)[0]
        for number in range(count):
            qwen = family.startswith("qwen")
            around = "mtp." if qwen else f"model.layers.{4 + number}."
            inside = "mtp.layers.0." if qwen else around
            names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc") if qwen else (
                "enorm", "hnorm", "shared_head.norm", "eh_proj"
            )  # fmt: skip
            step = number + 1
            ahead = torch.cat([ids[:, step:], torch.zeros_like(ids[:, :step])], 1)
            embedded = norm(model.model.embed_tokens(ahead), f"{around}{names[0]}.weight")
            joined = torch.cat([embedded, norm(states, f"{around}{names[1]}.weight")], -1)
            states = joined @ files[f"{around}{names[3]}.weight"].T
            states = norm(layer_of(model, files, inside, states), f"{around}{names[2]}.weight")
            logprobs = model.lm_head(states)[0].log_softmax(-1)
            for token in range(step + 1, ids.shape[1]):
                said = logprobs[token - 1 - step, ids[0, token]]
                total -= float(said * mask[token]) / count
    return total / float(batch.loss_mask.sum())


def layer_of(model: Any, files: dict[str, Tensor], inside: str, states: Tensor) -> Tensor:
    """The model's last layer with the weights of a layer for multi-token prediction."""
    layer = model.model.layers[3]
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    own = {n.removeprefix(inside): t for n, t in files.items() if n.startswith(inside)}
    width = states.shape[1]
    new = {name: tensor for name, tensor in own.items() if name in before}
    for which in ("gate_up_proj", "down_proj"):
        stacked = f"mlp.experts.{which}"
        if stacked in before and stacked not in own:
            parts = ["gate_proj", "up_proj"] if which == "gate_up_proj" else ["down_proj"]
            new[stacked] = torch.stack([
                torch.cat([own[f"mlp.experts.{n}.{part}.weight"] for part in parts])
                for n in range(len(before[stacked]))
            ])  # fmt: skip
    assert new.keys() == before.keys(), before.keys() - new.keys()
    layer.load_state_dict(new)
    positions = torch.arange(width)[None]
    mask = torch.full((width, width), -torch.inf).triu(1)[None, None]
    out = layer(
        states, attention_mask=mask, position_ids=positions,
        position_embeddings=model.model.rotary_emb(states, positions),
    )  # fmt: skip
    layer.load_state_dict(before)
    return out[0] if isinstance(out, tuple) else out


def is_ahead(name: str) -> bool:
    return name.startswith("mtp.") or any(name.startswith(f"model.layers.{n}.") for n in (4, 5))


@pytest.mark.ranks
@pytest.mark.megatron
def test_the_layers_learn_and_the_policy_is_as_without_them(models, tmp_path):
    without, one = run_calls(
        1, [(trained_on, (models, ALONE, 0.0)), (trained_on, (models, ALONE, WEIGHT))], 200
    )
    two = run_ranks(2, trained_on, models, ON_TWO_RANKS, WEIGHT, timeout_s=200)
    losses = {family: plain_loss(models, family) for family in FIELDS}
    for number, (family, _) in enumerate(ON_TWO_RANKS):
        itself = [*FIELDS].index(family)
        (plain_metrics, plain), (metrics, alone) = without[0][itself], one[0][itself]
        many = {n: t for rank in two for n, t in rank[number][1].items()}
        first = losses[family]
        for found in (metrics, *(rank[number][0] for rank in two)):
            assert found[0]["mtp_loss"] == pytest.approx(first, rel=1e-5), family
            assert found[1]["mtp_loss"] < first - 0.01, family
            for got, other in zip(found, plain_metrics, strict=True):
                assert got["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-6), family
            for name in ("grad_norm", "mtp_grad_norm"):
                assert found[0][name] == pytest.approx(metrics[0][name], rel=1e-4), (family, name)
                assert found[0][name] > CLIP_NORM, (family, name)
        files = load_file(models / family / "model.safetensors")
        copies = {
            n for n in files if is_ahead(n) and n.endswith(("embed_tokens.weight", "head.weight"))
        }
        assert alone.keys() == many.keys() == files.keys() - copies, family
        assert plain.keys() == {name for name in alone if not is_ahead(name)}, family
        assert "mtp_grad_norm" not in plain_metrics[0], family
        norms = [[step["grad_norm"] for step in found] for found in (metrics, plain_metrics)]
        assert norms[0] == norms[1], family
        for name, tensor in plain.items():
            assert torch.equal(tensor, alone[name]), (family, name)
        for name, tensor in alone.items():
            assert (many[name] - tensor).abs().max() < 1e-4, (family, name)
        moved = [n for n in alone if is_ahead(n) and not torch.equal(alone[n], files[n])]
        still = {n for n in alone if is_ahead(n)} - {*moved}
        # a router's bias is not trained, and an expert may have been given no token
        unused = (".e_score_correction_bias", ".experts.")
        assert all(any(part in name for part in unused) for name in still), still
        if number >= len(FIELDS):
            continue
        export(models / f"saved_{family}", tmp_path / family, dtype="float32")
        out = load_file(tmp_path / family / "model.safetensors")
        assert out.keys() == files.keys(), family
        for name in many:
            assert torch.equal(out[name], many[name]), (family, name)
        for name in copies:
            own = "lm_head.weight" if "head" in name else "model.embed_tokens.weight"
            assert torch.equal(out[name], out[own]), (family, name)
        export(models / f"saved_{family}", tmp_path / f"{family}_1", without_mtp=True)
        left = load_file(tmp_path / f"{family}_1" / "model.safetensors")
        assert left.keys() == plain.keys(), family


def test_what_cannot_be_trained_is_refused(models):
    role = TrainConfig(engine="megatron", mtp_loss_scaling_factor=WEIGHT)
    model = str(models / "deepseek_v3")
    check_mtp("actor", role, model)
    for name, changed, said in (
        ("actor", {"mtp_loss_scaling_factor": -1.0}, "0 or above"),
        ("critic", {}, "are the actor's"),
        ("actor", {"lora": LoraConfig()}, "adapters alone"),
        ("actor", {"router_replay": "R3"}, "router_replay"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_mtp(name, dataclasses.replace(role, **changed), model)
    without = models / "without"
    shutil.copytree(model, without)
    files = load_file(without / "model.safetensors")
    save_file({n: t for n, t in files.items() if not is_ahead(n)}, without / "model.safetensors")
    with pytest.raises(ConfigError, match="its files have none"):
        check_mtp("actor", role, str(without))
    Path(without, "model.safetensors").unlink()
    Path(without, INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(files, "gone")}))
    check_mtp("actor", role, str(without))  # by the index
    tiny.make_config("exaone_moe").save_pretrained(models / "exaone")
    unknown = json.loads((models / "exaone" / "config.json").read_text())
    (models / "exaone" / "config.json").write_text(
        json.dumps(unknown | {"num_nextn_predict_layers": 1})  # as K-EXAONE's says
    )
    with pytest.raises(ConfigError, match="of model type 'exaone_moe' is not mapped"):
        check_mtp("actor", role, str(models / "exaone"))
    config = json.loads(Path(model, "config.json").read_text())
    Path(model, "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    try:
        with pytest.raises(ConfigError, match="has no layers for multi-token prediction"):
            check_mtp("actor", role, model)
    finally:
        Path(model, "config.json").write_text(json.dumps(config))
