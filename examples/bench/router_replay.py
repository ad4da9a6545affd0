"""What routing costs in agreement: python examples/bench/router_replay.py [--engine hf]

A dense Qwen3 and a Qwen3-MoE of about the same active size, with random weights, in bfloat16. An
engine answers 32 prompts; the trainer computes the log-probabilities of the answers, of the MoE
without and with router_replay="R3". A JSON line each: the largest, the mean and the 99th percentile
of |trainer - engine| over the sampled tokens, and how many of all choices of an expert (token,
layer, one of top_k) are not the engine's.
"""

from __future__ import annotations

import json
import os
import tempfile
from datetime import timedelta
from typing import Any

import fire
import torch
import torch.distributed as dist
from strict import ENVIRONMENT
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from spmdrl.config import RolloutConfig, TrainConfig
from spmdrl.data.packing import pack_samples
from spmdrl.distributed.process import start_process_group
from spmdrl.distributed.topology import Topology
from spmdrl.engines.fsdp.engine import FsdpEngine
from spmdrl.engines.fsdp.router_replay import Routers, routing_of
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.rollout.base import Completion, Request, SamplingParams
from spmdrl.rollout.build import build_engine
from spmdrl.types import Batch, Prompt, Routing, Sample

SHAPE: dict[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 6, "vocab_size": 1024, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048, "eos_token_id": 2,
    "bos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.1,
}  # fmt: skip
EXPERTS = {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 64,
           "norm_topk_prob": True}  # fmt: skip


def save_model(folder: str, moe: bool) -> None:
    torch.manual_seed(0)
    model: Any = (
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS))
        if moe
        else Qwen3ForCausalLM(Qwen3Config(**SHAPE, intermediate_size=256))
    )
    model.save_pretrained(folder)


def batch_of(requests: list[Request], answers: list[Completion], routing: Routing | None) -> Batch:
    samples = [
        Sample(
            Prompt(i, request.prompt_ids, "", None, ""), i, 0, answer.token_ids, answer.logprobs,
            [1] * len(answer.token_ids), answer.versions, answer.finish_reason,
            routed_experts=answer.routed_experts,
        )
        for i, (request, answer) in enumerate(zip(requests, answers, strict=True))
    ]  # fmt: skip
    return pack_samples(samples, routing=routing)


def flips(trainer: FsdpEngine, batch: Batch) -> float:
    """The part of the engine's choices that the trainer, by itself, does not make."""
    routers = Routers(trainer.module.hf)
    with routers.recording():
        trainer.logprobs(batch, 1.0)
        own = routers.routed()
    assert batch.routed_experts is not None
    known = torch.ones(batch.num_tokens, dtype=torch.bool)
    known[batch.cu_seqlens[1:] - 1] = False  # the last of a sequence was no engine's input
    theirs = batch.routed_experts[known]
    found = (theirs[..., None] == own[known][..., None, :]).any(-1)
    return 1 - float(found.double().mean())


def report(gaps: Tensor, **more: Any) -> None:
    numbers = {"max": gaps.max(), "mean": gaps.mean(), "p99": gaps.quantile(0.99)}
    print(json.dumps(more | {name: float(f"{float(x):.3g}") for name, x in numbers.items()}))


def main(engine: str = "vllm", dtype: str = "bfloat16", answer: int = 64) -> None:
    os.environ |= {k: v for k, v in ENVIRONMENT.items() if k not in os.environ}
    os.environ.setdefault("MASTER_PORT", "0")
    torch.set_num_threads(1)
    device = start_process_group(timedelta(seconds=600))
    kinds: Any = {"engine": engine, "dtype": dtype}
    cache = None if device.type == "cuda" else 64
    rollout = RolloutConfig(**kinds, sleep=False, kv_cache_mib=cache)
    for moe in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            save_model(folder, moe)
            ranks = Topology.build(device, dp=1, tp=1)
            sampler = build_engine(folder, rollout, 512, ranks, return_routed_experts=moe)
            assert sampler is not None
            trainers = {
                replay: FsdpEngine.build(
                    "policy", folder, TrainConfig(dtype=dtype, router_replay=replay),
                    Topology.build(device, dp=1, fsdp=1),
                )
                for replay in ((None, "R3") if moe else (None,))
            }  # fmt: skip
            routing = routing_of(load_hf_config(folder)) if moe else None
        draw = torch.Generator().manual_seed(0)
        prompts = torch.randint(3, 1000, (32, 24), generator=draw).tolist()
        requests = [Request(row, 7 * i) for i, row in enumerate(prompts)]
        answers = sampler.generate(requests, SamplingParams(max_tokens=answer, ignore_eos=True))
        batch = batch_of(requests, answers, routing)
        for replay, trainer in trainers.items():
            gaps = (trainer.logprobs(batch, 1.0).logprobs - batch.rollout_logprobs).abs()
            more = {"engine": engine, "model": "moe" if moe else "dense", "router_replay": replay}
            report(gaps[batch.loss_mask > 0], **more)
        if moe:
            print(json.dumps({"choices that differ": round(flips(trainers[None], batch), 5)}))
        sampler.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    fire.Fire(main)
