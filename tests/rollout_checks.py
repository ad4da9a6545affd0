"""What tests of rollout engines compare with: plain forward passes, flipped bits, random states."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import CHARS, save_qwen3, save_tokenizer
from training_batches import on_data_ranks

from spmdrl.data.images import BatchImages
from spmdrl.data.packing import empty_batch
from spmdrl.rollout.base import Completion, Request, SamplingParams, WeightMismatch
from spmdrl.rollout.build import ENGINES
from spmdrl.types import Prompt
from spmdrl.weights.boxes import view, whole

EOS = 2


def is_installed(name: str) -> bool:
    """Whether the engine can be built here. SGLang's build for CPUs is asked for by a variable."""
    if find_spec(ENGINES[name].library) is None:
        return False
    on_cpu = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
    return name != "sglang" or on_cpu or torch.cuda.is_available()


INSTALLED = [name for name in ENGINES if is_installed(name)]
ENGINE_PARAMS = [
    pytest.param(name, marks=pytest.mark.vllm) if name == "vllm" else name for name in INSTALLED
]


def engine_class(name: str) -> Any:
    """The engine's class, which is called with folder, config, max_model_len and topology."""
    if name == "vllm":
        from spmdrl.rollout.vllm.engine import VllmEngine

        return VllmEngine
    if name == "sglang":
        from spmdrl.rollout.sglang.engine import SglangEngine

        return SglangEngine
    from spmdrl.rollout.hf.engine import HfEngine

    return HfEngine


@torch.no_grad()
def push_in_place(engine: Any, weights: dict[str, torch.Tensor]) -> None:
    """Writes each part of a weight where `layout` says that it belongs, as pushes do."""
    layout = engine.layout({name: tuple(tensor.shape) for name, tensor in weights.items()})
    for (name, box), place in zip(layout.regions, layout.places, strict=True):
        place.tensor().copy_(view(weights[name], whole(weights[name].shape), box))
    engine.load_opaque((name, weights[name]) for name in layout.opaque)
    engine.finish_load()


def load_hf(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def some_requests(n: int, longest: int = 9) -> list[Request]:
    chosen = random.Random(n)
    return [
        Request(
            [chosen.randrange(4, len(CHARS)) for _ in range(2 + i % (longest - 1))], 7**i % 2**63
        )
        for i in range(n)
    ]


@torch.no_grad()
def forward_logprobs(
    model: Any, request: Request, completion: Completion, params: SamplingParams
) -> torch.Tensor:
    """One token after the other, with the definitions of every kind of cut spelt out."""
    ids = torch.tensor([request.prompt_ids + completion.token_ids])
    logits = model(input_ids=ids).logits[0].float()
    result = []
    for t, token in enumerate(completion.token_ids, start=len(request.prompt_ids) - 1):
        for had in {*ids[0, : t + 1].tolist()}:
            above = logits[t, had] > 0
            logits[t, had] *= params.repetition_penalty ** (-1 if above else 1)
        logits[t] /= params.temperature or 1.0
        order = logits[t].argsort(descending=True)
        chances = logits[t][order].softmax(-1)
        order = order[chances >= params.min_p * chances[0]]
        kept = order[: params.top_k] if params.top_k else order
        probs = logits[t][kept].softmax(-1)
        enough = int((probs.cumsum(-1) < params.top_p).sum()) + 1  # the first set that reaches it
        kept = kept[:enough]
        position = (kept == token).nonzero().item()
        result.append(logits[t][kept].log_softmax(-1)[int(position)])
    return torch.stack(result)


def worst_error(engine: Any, model: Any, params: SamplingParams, n: int = 12) -> float:
    """Largest difference between the engine's logprobs and those of a forward pass."""
    requests = some_requests(n)
    return max(
        (forward_logprobs(model, r, c, params) - torch.tensor(c.logprobs)).abs().max().item()
        for r, c in zip(requests, engine.generate(requests, params), strict=True)
    )


def flip_every_parameter(engine: Any, weights: dict[str, torch.Tensor]) -> None:
    """Changes one bit at the start and one further on of each engine parameter in turn."""
    for name, parameter in engine.model.named_parameters():
        bits = parameter.data.view(torch.uint8).view(-1)
        for place in (0, len(bits) // 4):  # the last rank's vocabulary is padded further on
            bits[place] ^= 1
            with pytest.raises(WeightMismatch, match=rf"differs from the engine's {name} in 1 of"):
                engine.check_weights(iter(weights.items()))
            bits[place] ^= 1
    assert engine.check_weights(iter(weights.items())) == len(weights)


def rng_states() -> list[bytes]:
    numpy_state: Any = np.random.get_state()
    return [
        torch.get_rng_state().numpy().tobytes(),
        repr(random.getstate()).encode(),
        numpy_state[1].tobytes(),
    ]


def save_family(family: str, folder: Path, kv_heads: int = 1) -> Any:
    """A tiny random model of the family with its tokenizer; returns it in float32."""
    import transformers as hf

    if family == "qwen3 untied":
        return load_hf(save_qwen3(folder, tie_word_embeddings=False))
    config, model = {
        "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM),
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
    }[family]
    torch.manual_seed(0)
    built = model(
        config(
            vocab_size=len(CHARS), hidden_size=128, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=kv_heads, max_position_embeddings=512,
            tie_word_embeddings=family == "qwen2", eos_token_id=EOS, pad_token_id=0,
            bos_token_id=1,
        )
    )  # fmt: skip
    built.save_pretrained(folder)
    save_tokenizer(folder)
    return built.eval()


def rollout_difference(actor: Any, ranks: Any, rollout: Any) -> float:
    """The largest of `rollout_gaps`."""
    gaps = rollout_gaps(actor, ranks, rollout)
    return gaps.max().item() if len(gaps) else 0.0


def rollout_gaps(
    actor: Any, ranks: Any, rollout: Any, prompts: Sequence[Prompt] = (),
    images: BatchImages | None = None, num_adapters: int = 0,
) -> torch.Tensor:  # fmt: skip
    """How far the engine's logprob of each sampled token is from the trainer's. Every engine
    answers the same. prompts: with images, to be answered instead of random ones. num_adapters: of
    an actor with several, which answer in turns.
    """
    asked = [prompts[i % len(prompts)] for i in range(24)] if prompts else []
    plain = [Request(p.token_ids, 7**i % 2**63, images=p.images) for i, p in enumerate(asked)]
    requests = plain or some_requests(24)
    requests = [replace(r, max_tokens=2 + i % 11) for i, r in enumerate(requests)]
    if num_adapters:
        requests = [replace(r, adapter=i % num_adapters) for i, r in enumerate(requests)]
    answers = rollout.generate(requests, SamplingParams(temperature=1.0, max_tokens=12))
    return answer_gaps(actor, ranks, requests, answers, asked, images, num_adapters > 0)


def answer_gaps(
    actor: Any, ranks: Any, requests: Sequence[Request], answers: Sequence[Completion],
    asked: Sequence[Prompt] = (), images: BatchImages | None = None, routed: bool = False,
) -> torch.Tensor:  # fmt: skip
    """How far the logprob of each token of the answers is from the trainer's. asked: the prompts,
    where they have images. routed: the requests say which adapter answered.
    """
    both = list(zip(requests, answers, strict=True))
    batch = empty_batch(torch.tensor([len(r.prompt_ids) + len(a.token_ids) for r, a in both]))
    batch.token_ids = torch.tensor([id for r, a in both for id in r.prompt_ids + a.token_ids])
    rows = [([0.0] * len(r.prompt_ids), a.logprobs) for r, a in both]
    batch.rollout_logprobs = torch.tensor([x for none, some in rows for x in none + some])
    batch.loss_mask = (batch.rollout_logprobs != 0).float()
    if asked:
        batch.prompts = torch.tensor([prompt.id for prompt in asked])
    if routed:
        batch.adapters = torch.tensor([r.adapter for r in requests])
    assert batch.loss_mask.sum() > 4 * len(requests)
    batch = on_data_ranks(ranks, batch)
    away = actor.logprobs(batch, 1.0, images=images).logprobs - batch.rollout_logprobs
    return away.abs()[batch.loss_mask.bool()]


def weights_copied(actor: Any) -> Any:
    """Yields each weight of a trainer by its name, float32. Collective."""
    return ((n, t.clone()) for n, t in actor.named_weights(torch.float32, 1 << 20))


def pushed_to_hf(topology: Any, ranks: Any, actor: Any, model: str) -> int:
    """Pushes to engine hf and compares the weights there with the trainer's, bit by bit. Returns
    how many were compared. Collective.
    """
    from spmdrl.config import RolloutConfig, WeightsConfig
    from spmdrl.distributed.topology import Topology
    from spmdrl.rollout.build import build_engine
    from spmdrl.training.weight_sync import WeightSync

    places = Topology.build(topology.device, dp=-1, tp=1)
    rollout = build_engine(model, RolloutConfig(engine="hf", dtype="float32"), 64, places)
    weights = WeightSync(actor, ranks, rollout, places, "float32", WeightsConfig(check=True))
    weights.push()
    checked = weights.check()
    rollout.shutdown()
    return checked
