"""Models that see images on engine megatron: transformers' gradients, and FSDP2's updates."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import groups_that_end, run_calls, run_ranks
from rollout_checks import pushed_to_hf, weights_copied
from safetensors.torch import load_file
from tiny_models import film, save_qwen_vl
from training_batches import CONFIG, on_data_ranks
from vision_checks import logprobs_alone, packed, prompts_of, vision_of

from spmdrl.config import ConfigError, LoraConfig, TrainConfig
from spmdrl.data.images import BatchImages
from spmdrl.data.visuals import Video
from spmdrl.types import Prompt
from spmdrl.weights.boxes import view, whole

pytestmark = [pytest.mark.ranks, pytest.mark.megatron]

SHOWN = [0, 1, 2, 0, 2, 1, 0]  # which of the prompts each sequence answers
TP, PP = {"tensor_parallel": 2}, {"pipeline_parallel": 2}
SP = TP | {"sequence_parallel": True}
CP = {"context_parallel": 2}
MUON = {"optim": dataclasses.replace(CONFIG.optim, name="muon")}
LORA = {"lora": LoraConfig(rank=4, alpha=8), "freeze_vision": True}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    # kind of engine, model, what both engines have, the layout of engine megatron
    "one rank or several": ("policy", "qwen2_5_vl", {}, {}),
    "sequence parallel": (
        "policy", "qwen2_5_vl", {}, SP | {"activation_checkpointing": True},
    ),
    "context parallel": ("policy", "qwen2_5_vl", {}, CP),
    "critic, frozen tower": ("value", "qwen2_vl", {"freeze_vision": True}, PP),
    "Muon": ("policy", "qwen2_vl", MUON, TP),
    "stages, tied": ("policy", "qwen2_vl", {}, PP),
    "adapters": ("policy", "qwen2_vl", LORA, SP),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_qwen_vl(folder / "qwen2_5_vl")
    save_qwen_vl(folder / "qwen2_vl", "qwen2_vl", tied=True)
    for seed in range(2):
        film(folder / f"{seed}.avi", seed)
    return folder


def task(model: str) -> tuple[Any, BatchImages, list[list[int]]]:
    """Seven answers to prompts with two images, none, and one; the batch, and the answers."""
    vision, draw = vision_of(model), torch.Generator().manual_seed(3)
    prompts = prompts_of(vision)
    answers = [torch.randint(3, 60, (n,), generator=draw).tolist() for n in (9, 4, 7, 5, 12, 3, 6)]
    batch = packed([prompts[shown] for shown in SHOWN], answers)
    for name in ("advantages", "rollout_logprobs", "returns", "values"):
        setattr(batch, name, -torch.rand(batch.num_tokens, generator=draw) * batch.loss_mask)
    batch.loss_weights = batch.loss_mask / batch.loss_mask.sum()
    return batch, BatchImages(vision, prompts.__getitem__), answers


def weighed(logprobs: Any, entropy: Any, mb: Any) -> tuple[Any, dict[str, Any]]:
    """A loss whose gradient is easily known."""
    return (logprobs * mb.advantages).sum(), {}


def engine_of(topology: Any, kind: str, model: str, config: TrainConfig) -> tuple[Any, Any]:
    from spmdrl.distributed.topology import Topology, train_degrees
    from spmdrl.engines.build import build_engine

    ranks = Topology.build(topology.device, **train_degrees(config))
    return build_engine(kind, model, config, ranks), ranks


def trained_on(topology: Any, folder: Path, engine: str) -> list[Any]:
    """Of each case what a pass gives on the ranks that are given sequences, three updates' metrics,
    all weights after them, of engine megatron how many weights a push was compared for, and how
    many images were decoded until then. Engine fsdp does the same for several cases.
    """
    found: list[Any] = []
    done: dict[str, Any] = {}
    for name, (kind, model, both, layout) in CASES.items():
        config = dataclasses.replace(CONFIG, **both)
        if engine == "megatron":
            config = dataclasses.replace(config, engine=engine, **layout)
        key = repr((kind, model, config))
        if engine == "megatron" or key not in done:
            with groups_that_end():
                done[key] = trained_case(topology, folder, name, kind, model, config)
        found.append(done[key])
    return found


def trained_case(
    topology: Any, folder: Path, name: str, kind: str, model: str, config: TrainConfig
) -> Any:
    from spmdrl.algo.objectives import policy_objective, value_objective
    from spmdrl.config import AlgoConfig

    actor, ranks = engine_of(topology, kind, str(Path(folder) / model), config)
    batch, images, _ = task(str(Path(folder) / model))
    own = ranks.data_ranks
    mine = list(range(7))[own.index(ranks.rank) :: len(own)] if ranks.rank in own else []
    every, share = on_data_ranks(ranks, batch), batch.select(mine)
    of_kind = {
        "policy": (lambda: actor.logprobs(every, 1.0, images=images).logprobs, policy_objective),
        "value": (lambda: actor.values(every, images=images), value_objective),
    }
    look, objective = of_kind[kind]
    before, loss = look(), objective(AlgoConfig())
    metrics = [actor.update(share, loss, 0.8, images=images) for _ in range(3)]
    checked, decoded = 0, len(images.vision.cache)
    if config.engine == "megatron" and kind == "policy":
        checked = pushed_to_hf(topology, ranks, actor, str(Path(folder) / model))
        actor.save(Path(folder) / name)
    return before, metrics, dict(weights_copied(actor)), checked, decoded


def films_on(topology: Any, folder: Path) -> tuple[int, list[int], float]:
    """How many videos this rank has decoded in two stages, the numbers of the batch's, and the loss
    of an update. Prompts are read when they are asked for, as those of a run are.
    """
    model = str(Path(folder) / "qwen2_vl")
    config = dataclasses.replace(CONFIG, engine="megatron", **PP)
    with groups_that_end():
        actor, ranks = engine_of(topology, "policy", model, config)
        vision = vision_of(model)
        read, decode = vision.shown_videos, vision.shown_videos.decoded
        films, decoded = [Video(Path(folder, f"{seed}.avi"), None) for seed in range(2)], []

        def prompt(number: int) -> Prompt:
            ids = vision.placed([5, read.token_id, 6], [films[number]])
            return Prompt(number, ids, "d", "", "", images=(films[number],))

        batch = packed([prompt(0), prompt(1), prompt(0)], [[7, 8, 9], [10, 11], [12]])
        batch.advantages = batch.loss_mask.clone()
        read.clips.clear()
        vision.cache.clear()
        read.decoded = lambda video: decoded.append(films.index(video)) or decode(video)
        images = BatchImages(vision, prompt)
        metrics = actor.update(on_data_ranks(ranks, batch), weighed, 1.0, images=images)
    return len(decoded), sorted({*decoded}), metrics["loss"]


def test_the_first_stage_alone_decodes_videos(updated: Any) -> None:
    first, second = updated[3]
    assert first[1] == [0, 1] and second[0] == 0
    assert first[2] == second[2]


@pytest.fixture(scope="module")
def updated(models: Path) -> tuple[list[Any], list[list[Any]], list[list[Any]]]:
    """What `trained_on` gives: engine fsdp on one rank, engine megatron on each of two; and what
    `gradients_on` and `films_on` give on these two.
    """
    (fsdp,) = run_ranks(1, trained_on, models, "fsdp")
    calls = [(trained_on, (models, "megatron")), (gradients_on, (models,)), (films_on, (models,))]
    return fsdp, *run_calls(2, calls)


def weights_of(every: list[list[Any]], case: str) -> dict[str, torch.Tensor]:
    """All weights after the updates of a case, whichever rank has them."""
    number = [*CASES].index(case)
    return {name: tensor for rank in every for name, tensor in rank[number][2].items()}


def pipelined(case: str) -> bool:
    return CASES[case][3].get("pipeline_parallel", 1) > 1


@pytest.mark.parametrize("case", CASES)
def test_updates_are_fsdps(models: Path, updated: Any, case: str) -> None:
    kind, model, both, _ = CASES[case]
    number, (fsdp, every, *_) = [*CASES].index(case), updated
    before, metrics, wanted, *_ = fsdp[number]
    asked = [rank[number] for rank in every if len(rank[number][0])]
    assert asked
    # pixels are made where the tower is: on the first stage, also of images of others' sequences
    has_tower = [rank == 0 or not pipelined(case) for rank in range(len(every))]
    assert [rank[number][4] > 0 for rank in every] == has_tower
    for found, measured, _, checked, _ in asked:
        assert (found - before).abs().max() < 1e-5
        for got, other in zip(measured, metrics, strict=True):
            assert got["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-6)
            assert got["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert (checked > 0) == (kind == "policy")
    weights = weights_of(every, case)
    start = load_file(models / model / "model.safetensors")
    assert weights.keys() == wanted.keys()
    for name, tensor in weights.items():
        assert (tensor - wanted[name]).abs().max() < 2e-4, name
        is_left = "freeze_vision" in both and name.startswith("visual.")
        assert not is_left or torch.equal(tensor, start[name]), name
    moved = [name in start and not torch.equal(weights[name], start[name]) for name in weights]
    assert sum(moved) >= 14  # the matrices of two layers


def test_what_has_no_tower_there_is_refused(models: Path) -> None:
    """By the checks of every start and of --dry-run."""
    from spmdrl.hub.hf_folder import load_hf_config
    from spmdrl.training.checks.common import check_megatron, check_vision
    from spmdrl.training.checks.memory import memory_of

    role, model = dataclasses.replace(CONFIG, engine="megatron"), str(models / "qwen2_5_vl")
    check_vision(load_hf_config(model), {"actor": role})
    with pytest.raises(ConfigError, match="heads, and 2 % 4 = 2; it may be 1, 2"):
        check_megatron("actor", dataclasses.replace(role, tensor_parallel=4), model, 4)
    with pytest.raises(ConfigError, match="is given no adapters: set freeze_vision=True"):
        check_megatron("actor", dataclasses.replace(role, lora=LoraConfig()), model, 1)
    check_megatron("actor", dataclasses.replace(role, **LORA), model, 1)
    files = load_file(Path(model, "model.safetensors"))
    tower = sum(t.numel() for name, t in files.items() if name.startswith("visual."))
    whole_one = sum(tensor.numel() for tensor in files.values())
    planned = memory_of("actor", dataclasses.replace(role, **TP), model, 2).weights * 2**28
    assert planned == pytest.approx(tower + (whole_one - tower) / 2, rel=1e-3)


# ---- transformers, and other layouts


def gradients_on(topology: Any, folder: Path) -> list[Any]:
    """In two layouts log-probabilities, of an update the gradients of the parts of weights that lie
    here, and all weights when a checkpoint of yet another layout has been loaded.
    """
    from spmdrl.engines.megatron.hf_mapping import pieces

    model, found = str(Path(folder) / "qwen2_5_vl"), []
    for layout in (SP, PP):
        config = dataclasses.replace(CONFIG, engine="megatron", **layout)
        with groups_that_end():
            actor, ranks = engine_of(topology, "policy", model, config)
            batch, images, _ = task(model)
            batch = on_data_ranks(ranks, batch)
            logprobs = actor.logprobs(batch, 1.0, images=images).logprobs
            held: list[Any] = []
            prepare = actor.parts.optimizer.prepare_grads

            def note(parts: Any = actor.parts, held: Any = held, prepare: Any = prepare) -> Any:
                held += [
                    (p.name, p.shape, p.box, p.view(parameter.main_grad).clone())
                    for chunk in parts.raw
                    for _, parameter, lies in pieces(chunk, parts.hf_config)
                    for p in lies
                ]
                return prepare()

            actor.parts.optimizer.prepare_grads = note
            actor.update(batch, weighed, 1.0, images=images)
            actor.parts.optimizer.prepare_grads = prepare
            actor.load(Path(folder) / "context parallel")
            found.append((logprobs, held, dict(weights_copied(actor))))
    return found


def test_gradients_are_transformers_and_checkpoints_load_in_other_layouts(
    models: Path, updated: Any
) -> None:
    from transformers import AutoModelForImageTextToText

    from spmdrl.engines.megatron.checkpoint import weight_sources

    found, saved = updated[2], weights_of(updated[1], "context parallel")
    model = str(models / "qwen2_5_vl")
    batch, _, answers = task(model)
    hf = AutoModelForImageTextToText.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    vision = vision_of(model)
    prompts = [prompts_of(vision)[shown] for shown in SHOWN]
    rows = [logprobs_alone(hf, vision, *each) for each in zip(prompts, answers, strict=True)]
    wanted = torch.cat([part for row in rows for part in (torch.zeros(1), row)]) * batch.loss_mask
    (wanted * batch.advantages).sum().backward()
    gradients = {
        name.replace(".language_model", "").replace("model.visual", "visual"): p.grad
        for name, p in hf.named_parameters()
    }
    for number in range(2):
        seen = {name for rank in found for name, *_ in rank[number][1]}
        assert seen == gradients.keys()
        for logprobs, held, weights in (rank[number] for rank in found):
            assert not len(logprobs) or (logprobs - wanted).abs().max() < 1e-5
            for name, shape, box, part in held:
                whole_one = gradients[name]
                away = (part - view(whole_one, whole(shape), box)).abs().max()
                assert away < 1e-5 * max(1.0, float(whole_one.abs().max())), (name, float(away))
            assert all(torch.equal(saved[name], weights[name]) for name in weights)
        assert {name for rank in found for name in rank[number][2]} == saved.keys()
    sources = weight_sources(models / "context parallel", models / "qwen2_5_vl")
    exported = {name: tensor for source in sources for name, tensor in source.read()}
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
