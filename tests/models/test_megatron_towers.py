"""Every family with a tower for images on engine megatron, in several layouts, against transformers
and engine fsdp.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from families import BY_KIND, save_tiny
from plan_configs import ppo_config
from proofs import batch_with_images, images_of
from ranks import groups_that_end, run_ranks
from rollout_checks import pushed_to_hf, weights_copied
from safetensors.torch import load_file, save_file
from training_batches import CONFIG, on_data_ranks
from transformers import AutoModelForImageTextToText, Llama4Config, LlavaConfig, SmolVLMConfig
from vision_checks import logprobs_alone, prompts_of, vision_of

from spmdrl.config import ConfigError, TrainConfig
from spmdrl.engines.megatron.hf_mapping import Folder
from spmdrl.engines.megatron.towers import language_part, own_name
from spmdrl.hub.hf_folder import keep_tower, load_hf_config
from spmdrl.training.checks.common import check_megatron, check_vision, keep_towers
from spmdrl.training.checks.memory import memory_of
from spmdrl.training.checks.model_shape import shape_of
from spmdrl.weights.boxes import view, whole
from spmdrl.weights.checkpoint_names import (
    as_published,
    by_checkpoint_name,
    checkpoint_parts,
)

pytestmark = [pytest.mark.ranks, pytest.mark.megatron]

TP = {"tensor_parallel": 2, "sequence_parallel": True}
PP, CP = {"pipeline_parallel": 2}, {"context_parallel": 2}
TOWER = re.compile(r"(^|\.)(visual|vision_tower|multi_modal_projector)\.")
# the first layout is trained in, the others go on from its checkpoint
CASES: dict[str, list[dict[str, Any]]] = {
    "qwen3_vl": [TP | {"activation_checkpointing": True}, PP, CP],
    "qwen3_vl_moe": [TP | {"expert_tensor_parallel": 2}, PP],
    "qwen3_5": [TP, PP],
    "glm4v": [PP, TP],
    "glm4v_moe": [TP | {"expert_parallel": 2}, PP],
    "gemma3": [TP, PP],
    "internvl": [PP, {"tensor_parallel": 2}],
    "mistral3": [TP, PP],
}
# whose updates are compared with engine fsdp's, and whose pushes bit by bit
UPDATED = ["qwen3_vl", "qwen3_vl_moe"]


def weighed(logprobs: Any, entropy: Any, mb: Any) -> tuple[Any, dict[str, Any]]:
    """A loss whose gradient is easily known."""
    return (logprobs * mb.advantages).sum(), {}


def batch_of(model: str) -> Any:
    batch = batch_with_images(model)
    draw = torch.Generator().manual_seed(5)
    batch.advantages = -torch.rand(batch.num_tokens, generator=draw) * batch.loss_mask
    return batch


def on_ranks(topology: Any, folder: Path) -> dict[str, Any]:
    """Of each family what `trained` gives of engine fsdp (None where it is not asked) and of engine
    megatron, and what `gone_on` gives of every other layout.
    """
    found = {}
    for kind, (first, *others) in CASES.items():
        model = str(Path(folder) / kind)
        keep_tower(model)
        config = dataclasses.replace(CONFIG, engine="megatron", **first)
        reached = []
        fsdp = None
        if kind in UPDATED:
            with groups_that_end():
                fsdp = trained(topology, model, CONFIG, 3)
        with groups_that_end():
            megatron = trained(topology, model, config, 3 if kind in UPDATED else 1)
        for layout in others:
            with groups_that_end():
                reached.append(gone_on(topology, model, layout))
        found[kind] = fsdp, megatron, reached
    return found


def engine_on(topology: Any, model: str, config: TrainConfig) -> tuple[Any, Any]:
    from spmdrl.distributed.topology import Topology, train_degrees
    from spmdrl.engines.build import build_engine

    ranks = Topology.build(topology.device, **train_degrees(config))
    return build_engine("policy", model, config, ranks), ranks


def trained(topology: Any, model: str, config: TrainConfig, num_updates: int) -> tuple[Any, ...]:
    """Returns log-probabilities, the metrics of the updates, all weights after them, and of engine
    megatron the gradients of the first, by the parts that lie here, and how many weights a push
    after three was compared for; it is saved.
    """
    actor, ranks = engine_on(topology, model, config)
    batch, images = batch_of(model), images_of(model)
    every = on_data_ranks(ranks, batch)
    own = ranks.data_ranks
    mine = [*range(3)][own.index(ranks.rank) :: len(own)] if ranks.rank in own else []
    share = batch.select(mine)
    before = actor.logprobs(every, 1.0, images=images).logprobs
    gradients: list[Any] = []
    if config.engine == "megatron":
        prepare = actor.parts.optimizer.prepare_grads

        def note() -> Any:
            gradients.extend([] if gradients else held_gradients(actor))
            return prepare()

        actor.parts.optimizer.prepare_grads = note
    metrics = [actor.update(share, weighed, 1.0, images=images) for _ in range(num_updates)]
    weights = dict(weights_copied(actor))
    checked = 0
    if config.engine == "megatron":
        actor.parts.optimizer.prepare_grads = prepare
        checked = pushed_to_hf(topology, ranks, actor, model) if num_updates > 1 else 0
        actor.save(Path(f"{model} saved"))
    return before, metrics, weights, gradients, checked


def held_gradients(actor: Any) -> list[Any]:
    from spmdrl.engines.megatron.hf_mapping import pieces

    return [
        (piece.name, piece.shape, piece.box, piece.view(parameter.main_grad).clone())
        for chunk in actor.parts.raw
        for _, parameter, held in pieces(chunk, actor.parts.hf_config)
        if parameter.requires_grad  # a router's bias is a buffer
        for piece in held
    ]


def gone_on(topology: Any, model: str, layout: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Returns log-probabilities at first, and with the weights of the checkpoint, and these."""
    config = dataclasses.replace(CONFIG, engine="megatron", **layout)
    actor, ranks = engine_on(topology, model, config)
    batch, images = on_data_ranks(ranks, batch_of(model)), images_of(model)
    before = actor.logprobs(batch, 1.0, images=images).logprobs
    actor.load(Path(f"{model} saved"))
    return before, actor.logprobs(batch, 1.0, images=images).logprobs, dict(weights_copied(actor))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in CASES:
        save_tiny(BY_KIND[f"{kind} with images"], folder / kind)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(2, on_ranks, folder)


def transformers_own(model: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities, one row at a time, and all gradients by their names in checkpoints."""
    hf = AutoModelForImageTextToText.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    vision, batch = vision_of(model), batch_of(model)
    rows = []
    for prompt, tokens in zip(
        prompts_of(vision), batch.token_ids.split(batch.seq_lens.tolist()), strict=True
    ):
        answer = tokens[len(prompt.token_ids) :].tolist()
        rows += [torch.zeros(1), logprobs_alone(hf, vision, prompt, answer)]
    logprobs = torch.cat(rows) * batch.loss_mask
    (logprobs * batch.advantages).sum().backward()
    grads = {n: p.grad if p.grad is not None else torch.zeros_like(p)
             for n, p in hf.named_parameters()}  # fmt: skip
    parts = by_checkpoint_name(checkpoint_parts(load_hf_config(model)))
    cut = {name: part.of(grads[owner]) for name, (owner, part) in parts.items() if owner in grads}
    owners = {owner for owner, _ in parts.values()}
    whole_ones = {name: grad for name, grad in grads.items() if name not in owners}
    return logprobs.detach(), {own_name(name): grad for name, grad in (whole_ones | cut).items()}


def require_like_fsdp(fsdp: Any, megatron: Any, saved: dict[str, torch.Tensor]) -> None:
    for mine, theirs in zip(megatron[0][1], fsdp[0][1], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    wanted = {name: tensor for rank in fsdp for name, tensor in rank[2].items()}
    assert saved.keys() == wanted.keys()
    for name, tensor in saved.items():
        assert (tensor - wanted[name]).abs().max() < 2e-4, name
    assert sum(rank[4] for rank in megatron) > 0  # weights that a push was compared for


@pytest.mark.parametrize("kind", CASES)
def test_a_family_is_trained_as_by_transformers_and_engine_fsdp(
    folder: Path, found: Any, kind: str
) -> None:
    from spmdrl.engines.megatron.checkpoint import weight_sources

    keep_tower(model := str(folder / kind))
    logprobs, gradients = transformers_own(model)
    fsdp, megatron, others = zip(*(rank[kind] for rank in found), strict=True)
    shown = [before for before, *_ in megatron if len(before)]
    shown += [before for rank in others for before, *_ in rank if len(before)]
    assert len(shown) > len(CASES[kind]) - 1
    for before in shown:
        assert (before - logprobs).abs().max() < 1e-5
    for name, shape, box, part in (held for _, _, _, grads, _ in megatron for held in grads):
        wanted = gradients[own_name(name)]
        away = (part - view(wanted, whole(shape), box)).abs().max()
        assert away < 1e-5 * max(1.0, float(wanted.abs().max())), (name, float(away))
    held = {own_name(name) for rank in megatron for name, *_ in rank[3]}
    assert held == gradients.keys()
    saved = {name: tensor for rank in megatron for name, tensor in rank[2].items()}
    files = load_file(Path(model, "model.safetensors"))
    assert saved.keys() == files.keys()
    assert any(not torch.equal(saved[name], files[name]) for name in files if TOWER.search(name))
    if kind in UPDATED:
        require_like_fsdp(fsdp, megatron, saved)
    for reached in zip(*others, strict=True):
        loaded = {name: tensor for rank in reached for name, tensor in rank[2].items()}
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.items())
    sources = weight_sources(Path(f"{model} saved"), Path(model))
    exported = {name: tensor for source in sources for name, tensor in source.read()}
    assert exported.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in exported.items())


def test_what_is_not_trained_beside_its_tower_is_refused(tmp_path: Path) -> None:
    """By the checks of every start and of --dry-run, with the reason."""
    role = dataclasses.replace(CONFIG, engine="megatron")
    for kind, reason in {
        "gemma4": r"its language model \('gemma4_text'\) is no architecture that engine megatron",
        "kimi_vl": "does not map the names that files of 'kimi_vl' have for its tower",
    }.items():
        model = str(save_tiny(BY_KIND[f"{kind} with images"], tmp_path / kind))
        keep_tower(model)
        with pytest.raises(ConfigError, match=reason):
            check_vision(load_hf_config(model), {"actor": role})
    for config in (LlavaConfig(), SmolVLMConfig(), Llama4Config()):
        folder = tmp_path / config.model_type
        config.save_pretrained(folder)
        tower = f"model type '{config.model_type}' has no tower for images that is understood here"
        with pytest.raises(ConfigError, match=tower):
            keep_towers(ppo_config(folder, actor=role, vision_tower=True))
    gemma = str(save_tiny(BY_KIND["gemma3 with images"], tmp_path / "gemma3"))
    keep_tower(gemma)
    check_megatron("actor", role, gemma, 1)
    with pytest.raises(ConfigError, match="context_parallel=2: an image's tokens see each other"):
        check_megatron("actor", dataclasses.replace(role, **CP), gemma, 2)
    qwen = str(save_tiny(BY_KIND["qwen3_vl with images"], tmp_path / "qwen3_vl"))
    keep_tower(qwen)
    config = load_hf_config(qwen)
    config.vision_config.deepstack_visual_indexes = [0, 1]
    config.save_pretrained(qwen)
    check_megatron("actor", role, qwen, 1)
    with pytest.raises(ConfigError, match="the first 2 layers are given vectors of the tower"):
        check_megatron("actor", dataclasses.replace(role, **PP), qwen, 2)
    one_by_one = dataclasses.replace(role, moe_grouped_gemm=False)
    with pytest.raises(ConfigError, match="moe_grouped_gemm=False has no effect: 'qwen3_vl_text'"):
        check_megatron("actor", one_by_one, qwen, 1)
    next_tokens = dataclasses.replace(role, mtp_loss_scaling_factor=0.1)
    qwen = str(save_tiny(BY_KIND["qwen3_5 with images"], tmp_path / "qwen3_5"))
    keep_tower(qwen)
    config = load_hf_config(qwen)
    config.text_config.mtp_num_hidden_layers = 1
    config.save_pretrained(qwen)
    with pytest.raises(ConfigError, match="not trained beside a tower for images"):
        check_megatron("actor", next_tokens, qwen, 1)


def test_fp8_blocks_of_stacked_experts_are_refused(folder: Path, tmp_path: Path) -> None:
    keep_tower(model := str(folder / "qwen3_vl_moe"))
    config = load_hf_config(model)
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config.save_pretrained(tmp_path)
    keep_tower(str(tmp_path))
    role = dataclasses.replace(CONFIG, engine="megatron")
    check_megatron("actor", role, model, 1)
    with pytest.raises(ConfigError, match="reads no FP8 blocks of 'qwen3_vl_moe_text'"):
        check_megatron("actor", role, str(tmp_path), 1)


@pytest.mark.parametrize("kind", CASES)
def test_the_memory_of_a_model_with_a_tower_is_planned(folder: Path, kind: str) -> None:
    """Of each family: all of its parameters, and without gradients of a frozen tower."""
    keep_tower(model := str(folder / kind))
    role = dataclasses.replace(CONFIG, engine="megatron")
    trained = memory_of("actor", role, model, 1)
    frozen = memory_of("actor", dataclasses.replace(role, freeze_vision=True), model, 1)
    shape = shape_of(model)
    towers = sum(p.numel() for tower in shape.towers for p in tower.parameters())
    assert trained.parameters == trained.trainable == shape.count
    assert trained.weights == frozen.weights
    assert frozen.trainable == shape.count - towers
    assert (trained.gradients - frozen.gradients) * 2**30 == pytest.approx(4 * towers)
    assert frozen.adam < trained.adam


def test_experts_are_read_as_they_are_published(folder: Path, tmp_path: Path) -> None:
    """Published files of Qwen3-VL-MoE have them with their last two axes the other way round."""
    keep_tower(model := str(folder / "qwen3_vl_moe"))
    ours = load_file(Path(model, "model.safetensors"))
    turned = {n: t.contiguous() for n, t in as_published("qwen3_vl_moe", ours.items())}
    save_file(turned, tmp_path / "model.safetensors")
    (name,) = [n for n in ours if n.endswith("layers.0.mlp.experts.gate_up_proj")]
    shape = tuple(ours[name].shape)
    assert shape != tuple(turned[name].shape)
    box = ((1, 2), (8, 16), (0, shape[2]))
    read = Folder(tmp_path, language_part(load_hf_config(model))).read(name, shape, box)
    assert torch.equal(read, view(ours[name], whole(shape), box))
