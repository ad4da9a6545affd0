"""What is proven of a family of models, one function for each column of docs/models.md.

Each is called on the ranks of a job of its own with the folder of a tiny model, and returns the
numbers that its cell shows. A ConfigError is a refusal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rollout_checks import rollout_difference, rollout_gaps
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from vision_checks import logprobs_alone, logprobs_packed, packed, prompts_of, vision_of

from spmdrl.config import ConfigError, LoraConfig, RolloutConfig, TrainConfig, WeightsConfig
from spmdrl.data.image_limits import ImageLimits
from spmdrl.data.images import BatchImages
from spmdrl.data.packing import empty_batch
from spmdrl.distributed.topology import Topology, train_degrees
from spmdrl.engines.fsdp.model import build_model
from spmdrl.engines.fsdp.per_sequence_layers import run_per_sequence
from spmdrl.engines.fsdp.trial import gradients_of, relative
from spmdrl.hub.hf_folder import has_tower, keep_tower, load_hf_config
from spmdrl.training.checks.common import check_vision
from spmdrl.training.checks.packing import check_packing

KV_MIB = 32
NEAR = {"float32": 5e-3, "bfloat16": 2e-2}  # of the engine's log-probabilities, in the median
LONGEST = 64


class Refused(Exception):
    """What a user is told before anything is loaded."""


@contextmanager
def checks() -> Iterator[None]:
    """What a program does before it loads a model; a ConfigError of anything later is a failure."""
    try:
        yield
    except ConfigError as error:
        raise Refused(str(error)) from error


def actor_of(topology: Topology, model: str, strict: bool = False, **fields: Any) -> Any:
    """An engine fsdp of the policy on all ranks, and their topology."""
    from spmdrl.engines.fsdp.engine import FsdpEngine

    config = TrainConfig(dtype="float32", **fields)
    ranks = Topology.build(topology.device, **train_degrees(config))
    return FsdpEngine.build("policy", model, config, ranks, strict=strict), ranks


def batch_of(vocab: int) -> Any:
    """Sequences of several lengths, each token but the first of a sequence in the loss."""
    from spmdrl.engines.fsdp.trial import LENGTHS

    batch = empty_batch(torch.tensor(LENGTHS))
    generator = torch.Generator().manual_seed(3)
    ordinary = vocab - 10  # the last are marks of images and sounds, where a model has any
    batch.token_ids = torch.randint(3, ordinary, (batch.num_tokens,), generator=generator)
    batch.loss_mask = torch.ones(batch.num_tokens)
    batch.loss_mask[batch.cu_seqlens[:-1]] = 0.0
    return batch


@torch.no_grad()
def reference_logprobs(model: str, batch: Any) -> torch.Tensor:
    """transformers' own, each sequence by itself; 0 for the first token of each."""
    if with_images(model):
        return reference_with_images(model, batch)
    auto = AutoModelForImageTextToText if has_tower(model) else AutoModelForCausalLM
    hf = auto.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for tokens in batch.token_ids.split(batch.seq_lens.tolist()):
        logits = hf(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        chosen = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        found += [torch.zeros(1), chosen]
    return torch.cat(found)


def with_images(model: str) -> bool:
    """Whether it is of a row with images, whose tower is kept from here on."""
    found = Path(model, "preprocessor_config.json").exists()
    if found:
        keep_tower(model)
    return found


def images_of(model: str) -> BatchImages | None:
    if not with_images(model):
        return None
    vision = vision_of(model)
    return BatchImages(vision, prompts_of(vision).__getitem__)


def batch_with_images(model: str) -> Any:
    answers = torch.randint(3, 80, (3, 9), generator=torch.Generator().manual_seed(3))
    return packed(prompts_of(vision_of(model)), answers.tolist())


def reference_with_images(model: str, batch: Any) -> torch.Tensor:
    auto, vision = AutoModelForImageTextToText, vision_of(model)
    hf = auto.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for prompt, tokens in zip(
        prompts_of(vision), batch.token_ids.split(batch.seq_lens.tolist()), strict=True
    ):  # fmt: skip
        answer = tokens[len(prompt.token_ids) :].tolist()
        logprobs = logprobs_alone(hf, vision, prompt, answer)
        found += [torch.zeros(1), logprobs]
    return torch.cat(found) * batch.loss_mask


def packed_gradients(model: str) -> float:
    """By how much a gradient of the packed row differs from the one of transformers, each sequence
    by itself, as a part of its largest entry: the largest of all parameters.
    """
    vision, batch = vision_of(model), batch_with_images(model)
    prompts, weights = prompts_of(vision), torch.randn(batch.num_tokens - len(batch.seq_lens))
    answers = [
        tokens[len(prompt.token_ids) :].tolist() for prompt, tokens in
        zip(prompts, batch.token_ids.split(batch.seq_lens.tolist()), strict=True)
    ]  # fmt: skip
    plain = AutoModelForImageTextToText.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).train()
    ours: Any = build_model(model, full=True)
    run_per_sequence(ours)
    apart = torch.cat([
        logprobs_alone(plain, vision, p, a) for p, a in zip(prompts, answers, strict=True)
    ])  # fmt: skip
    found = logprobs_packed(ours, BatchImages(vision, prompts.__getitem__), batch)
    theirs, mine = (
        gradients_of(logprobs, weights, dict(hf.named_parameters()))
        for logprobs, hf in ((apart, plain), (found, ours))
    )
    towers = [name for name in mine if "language_model" not in name and "lm_head" not in name]
    assert all(mine[name].any() for name in towers), towers
    return max(relative(mine[name], theirs[name]) for name in theirs)


def loss_of(logprobs: torch.Tensor, entropy: torch.Tensor, batch: Any) -> Any:
    return -(logprobs * batch.loss_mask).sum(), {}


def some_batch(model: str) -> Any:
    if with_images(model):
        return batch_with_images(model)
    return batch_of(load_hf_config(model).get_text_config().vocab_size)


def trained(actor: Any, model: str) -> float:
    """The largest difference of the trainer's log-probabilities from transformers', which is small;
    then updates that make tokens likelier.
    """
    batch, images = some_batch(model), images_of(model)
    found = actor.logprobs(batch, 1.0, images=images).logprobs
    away = (found - reference_logprobs(model, batch)).abs().max()
    assert away < 1e-4, f"log-probabilities differ by {away:.2g}"
    losses = [actor.update(batch, loss_of, 1.0, images)["loss"] for _ in range(3)]
    assert losses[-1] < losses[0] and math.isfinite(losses[-1]), losses
    return float(away)


def fsdp(topology: Topology, model: str) -> dict[str, float]:
    """Log-probabilities of the engine against transformers', gradients of the packed pass, and an
    update that makes tokens likelier.
    """
    seen = with_images(model)
    with checks():
        trial = check_packing(load_hf_config(model))
    actor, _ = actor_of(topology, model)
    gradients = packed_gradients(model) if seen or trial is None else trial.gradients
    return {"logprobs": trained(actor, model), "gradients": gradients}


def rollout(
    topology: Topology, model: str, engine: str, dtype: str, tp: int = 1, lora: Any = None
) -> dict[str, float]:
    """An engine that is built without weights, filled by a push, changed by an update and a second
    push; after each every weight is compared bit by bit, and log-probabilities with the trainer's.

    A router of experts may choose another one where two scores are almost equal, so the median of
    the differences is what has to be small.
    """
    from spmdrl.rollout.build import build_engine, check_engine
    from spmdrl.training.weight_sync import WeightSync

    images = images_of(model)
    hf = load_hf_config(model)
    settings = RolloutConfig(engine=engine, kv_cache_mib=KV_MIB, dtype=dtype, tensor_parallel=tp)  # type: ignore[arg-type]
    with checks():
        check_packing(hf)
        check_engine(model, hf, settings, False)
        check_vision(hf, {"actor": TrainConfig()})
        if lora is not None:
            from spmdrl.engines.fsdp.lora import check_lora

            check_lora("actor", TrainConfig(lora=lora), hf)
    actor, ranks = actor_of(topology, model, lora=lora)
    places = Topology.build(topology.device, dp=-1, tp=tp)
    prompts = [] if images is None else prompts_of(images.vision)
    longest = LONGEST + max((len(prompt.token_ids) for prompt in prompts), default=0)
    limits = None if images is None else ImageLimits(images.vision, 2, 80, (32, 16))
    built: Any = build_engine(model, settings, longest, places, looks=limits, load_weights=False)
    weights = WeightSync(actor, ranks, built, places, dtype, WeightsConfig(check=True))
    weights.push()
    gaps = [rollout_gaps(actor, ranks, built, prompts, images)]
    actor.update(some_batch(model), loss_of, 1.0, images)
    weights.push()
    gaps.append(rollout_gaps(actor, ranks, built, prompts, images))
    built.shutdown()
    median = max(float(gap.median()) for gap in gaps)
    assert median < NEAR[dtype], f"log-probabilities differ by {median:.2g} in the median"
    return {"median": median, "max": max(float(gap.max()) for gap in gaps)}


def vllm(topology: Topology, model: str, dtype: str = "float32") -> dict[str, float]:
    return rollout(topology, model, "vllm", dtype)


def vllm_tp2(topology: Topology, model: str, dtype: str = "float32") -> dict[str, float]:
    return rollout(topology, model, "vllm", dtype, tp=2)


def hf(topology: Topology, model: str) -> dict[str, float]:
    return rollout(topology, model, "hf", "float32")


def lora(topology: Topology, model: str) -> dict[str, float]:
    """Adapters of the layers that are chosen where nothing is said: trained, and merged by a push
    to engine hf, which takes every family.
    """
    return rollout(topology, model, "hf", "float32", lora=LoraConfig(rank=4, alpha=8))


def megatron(topology: Topology, model: str) -> dict[str, float]:
    """Log-probabilities of engine megatron on one rank against transformers', and updates."""
    from spmdrl.engines.build import build_engine
    from spmdrl.training.checks.common import check_megatron

    config = TrainConfig(engine="megatron", dtype="float32")
    seen = with_images(model)
    with checks():
        if seen:
            check_vision(load_hf_config(model), {"actor": config})
        check_megatron("actor", config, model, 1)
    ranks = Topology.build(topology.device, **train_degrees(config))
    return {"logprobs": trained(build_engine("policy", model, config, ranks), model)}


def strict(topology: Topology, model: str) -> dict[str, float]:
    """Engine and trainer, both strict: log-probabilities are the same bits."""
    from spmdrl.rollout.build import build_engine, check_engine
    from spmdrl.training.checks.strict import check_strict_model
    from spmdrl.training.weight_sync import WeightSync

    settings = RolloutConfig(kv_cache_mib=KV_MIB, dtype="float32")
    seen = with_images(model)
    with checks():
        if seen:
            check_vision(load_hf_config(model), {"actor": TrainConfig()}, {"strict": True})
        check_packing(load_hf_config(model))
        check_engine(model, load_hf_config(model), settings, True)
        check_strict_model(load_hf_config(model), settings.engine)
    actor, ranks = actor_of(topology, model, strict=True)
    places = Topology.build(topology.device, dp=-1, tp=1)
    rollout: Any = build_engine(model, settings, LONGEST, places, strict=True, load_weights=False)
    weights = WeightSync(actor, ranks, rollout, places, "float32", WeightsConfig(check=True))
    weights.push()
    away = rollout_difference(actor, ranks, rollout)
    rollout.shutdown()
    assert away == 0.0, away
    return {"logprobs": away}


def export(topology: Topology, model: str) -> dict[str, float]:
    """Weights that the engine gives by their checkpoint's names are those of the file, in every
    bit, and transformers reads the folder that is written of them.
    """
    from spmdrl.engines.fsdp.model import load_model
    from spmdrl.engines.hf_export import write_weights

    auto = AutoModelForImageTextToText if with_images(model) else AutoModelForCausalLM
    with checks():
        check_packing(load_hf_config(model))
    actor, _ranks = actor_of(topology, model)
    out = Path(model).parent / "export"
    out.mkdir()
    for part in actor.pretrained:
        part.save_pretrained(out)
    shapes = {name: held.shape for name, held in actor.named_shards().items()}
    write_weights(actor.named_weights(torch.float32, 1 << 20), shapes, torch.float32, out, {}, None)
    hf = load_model(model, dtype=torch.float32).state_dict()
    back = auto.from_pretrained(out, dtype=torch.float32).state_dict()
    wrong = [name for name in hf if not torch.equal(hf[name], back[name])]
    assert not wrong, wrong
    return {"tensors": float(len(shapes))}


PROOFS = {
    "fsdp": fsdp, "export": export, "lora": lora, "megatron": megatron, "vllm": vllm,
    "vllm_tp2": vllm_tp2, "hf": hf, "strict": strict,
}  # fmt: skip
RANKS = {"vllm_tp2": 2}  # one for the others
