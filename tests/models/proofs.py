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

from spmdrl.config import ConfigError, LoraConfig, RolloutConfig, TrainConfig, WeightsConfig
from spmdrl.data.packing import empty_batch
from spmdrl.distributed.topology import Topology, train_degrees
from spmdrl.hub.hf_folder import has_tower, load_hf_config
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
    return FsdpEngine("policy", model, config, ranks, strict=strict), ranks


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
    auto = AutoModelForImageTextToText if has_tower(model) else AutoModelForCausalLM
    hf = auto.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for tokens in batch.token_ids.split(batch.seq_lens.tolist()):
        logits = hf(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        chosen = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        found += [torch.zeros(1), chosen]
    return torch.cat(found)


def loss_of(logprobs: torch.Tensor, entropy: torch.Tensor, batch: Any) -> Any:
    return -(logprobs * batch.loss_mask).sum(), {}


def trained(actor: Any, model: str) -> float:
    """The largest difference of the trainer's log-probabilities from transformers', which is small;
    then updates that make tokens likelier.
    """
    batch = batch_of(load_hf_config(model).get_text_config().vocab_size)
    away = (actor.logprobs(batch, 1.0).logprobs - reference_logprobs(model, batch)).abs().max()
    assert away < 1e-4, f"log-probabilities differ by {away:.2g}"
    losses = [actor.update(batch, loss_of, 1.0)["loss"] for _ in range(3)]
    assert losses[-1] < losses[0] and math.isfinite(losses[-1]), losses
    return float(away)


def fsdp(topology: Topology, model: str) -> dict[str, float]:
    """Log-probabilities of the engine against transformers', gradients of the packed pass, and an
    update that makes tokens likelier.
    """
    with checks():
        trial = check_packing(load_hf_config(model))
    assert trial is not None
    actor, _ = actor_of(topology, model)
    return {"logprobs": trained(actor, model), "gradients": trial.gradients}


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

    hf = load_hf_config(model)
    settings = RolloutConfig(engine=engine, kv_cache_mib=KV_MIB, dtype=dtype, tensor_parallel=tp)  # type: ignore[arg-type]
    with checks():
        check_packing(hf)
        check_engine(model, hf, settings, False)
        if lora is not None:
            from spmdrl.engines.fsdp.lora import check_lora

            check_lora("actor", TrainConfig(lora=lora), hf)
    actor, ranks = actor_of(topology, model, lora=lora)
    places = Topology.build(topology.device, dp=-1, tp=tp)
    built: Any = build_engine(model, settings, LONGEST, places, load_weights=False)
    weights = WeightSync(actor, ranks, built, places, dtype, WeightsConfig(check=True))
    weights.push()
    gaps = [rollout_gaps(actor, ranks, built)]
    batch = batch_of(hf.get_text_config().vocab_size)
    actor.update(batch, loss_of, 1.0)
    weights.push()
    gaps.append(rollout_gaps(actor, ranks, built))
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
    with checks():
        check_megatron("actor", config, model, 1)
    ranks = Topology.build(topology.device, **train_degrees(config))
    return {"logprobs": trained(build_engine("policy", model, config, ranks), model)}


def strict(topology: Topology, model: str) -> dict[str, float]:
    """Engine and trainer, both strict: log-probabilities are the same bits."""
    from spmdrl.rollout.build import build_engine, check_engine
    from spmdrl.training.checks.strict import check_strict_model
    from spmdrl.training.weight_sync import WeightSync

    settings = RolloutConfig(kv_cache_mib=KV_MIB, dtype="float32")
    with checks():
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

    with checks():
        check_packing(load_hf_config(model))
    actor, _ranks = actor_of(topology, model)
    out = Path(model).parent / "export"
    out.mkdir()
    for part in actor.pretrained:
        part.save_pretrained(out)
    shapes = {name: held.shape for name, held in actor.named_shards().items()}
    write_weights(actor.named_weights(torch.float32, 1 << 20), shapes, torch.float32, out)
    hf = load_model(model, dtype=torch.float32).state_dict()
    back = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    wrong = [name for name in hf if not torch.equal(hf[name], back[name])]
    assert not wrong, wrong
    return {"tensors": float(len(shapes))}


PROOFS = {
    "fsdp": fsdp, "export": export, "lora": lora, "megatron": megatron, "vllm": vllm,
    "vllm_tp2": vllm_tp2, "hf": hf, "strict": strict,
}  # fmt: skip
RANKS = {"vllm_tp2": 2}  # one for the others
