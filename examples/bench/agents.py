"""Agents behind the endpoint: how busy they keep the engine, and what a turn costs.

    python examples/bench/agents.py

One vLLM engine on a small random Qwen3 answers `--trajectories` agents at once. Each has `--turns`
turns of 8 tokens, and after each a tool that takes a log-normal time (`--delay_s` is its median,
`--sigma` its spread). The line of JSON at the end has

    seconds        from the first request to the last answer
    occupied       the part of it in which the engine had a request
    in_steps       the part of it that the engine spent in steps
    turns_per_s    answers a second
    prefilled      by turn, the part of the prompt that was computed and not found in the cache of
                   prefixes
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fire
import torch
import torch.distributed as dist

from spmdrl.config import AgentConfig, DataConfig, PpoConfig, RolloutConfig, ServeConfig
from spmdrl.distributed.process import ENGINE_ENV
from spmdrl.distributed.topology import Topology

ANSWER, REPLY = 8, 24  # tokens of a turn, and characters of a tool's reply
CHARS = [chr(c) for c in range(32, 127)]


async def play(
    row: dict[str, Any], base_url: str, api_key: str, model: str, sample_index: int
) -> float:
    """Asks, waits as long as a tool would take, and asks again."""
    import asyncio
    import math
    import random

    import httpx

    told = row["extra_info"]
    draw = random.Random(row["prompt"] + str(sample_index))
    messages = [{"role": "user", "content": row["prompt"]}]
    headers = {"authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(timeout=600, verify=False, headers=headers) as client:
        for _ in range(told["turns"]):
            body = {"model": model, "messages": messages, "max_tokens": ANSWER}
            answer = await client.post(f"{base_url}/chat/completions", json=body)
            said = answer.json()["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said},
                         {"role": "user", "content": "r" * REPLY}]  # fmt: skip
            await asyncio.sleep(told["delay_s"] * math.exp(draw.gauss(0, told["sigma"])))
    return 0.0


@dataclass
class Meter:
    """Measures an engine from its first request on."""

    first_at: float = 0.0
    last_at: float = 0.0
    occupied_s: float = 0.0
    step_s: float = 0.0
    prefills: dict[int, list[int]] = field(default_factory=dict)  # by prompt length: all, computed

    def watch(self, engine: Any) -> None:
        from spmdrl.rollout.vllm import compat

        step, core_step = engine.step, compat.step

        def timed() -> Any:
            began = time.perf_counter()
            self.first_at = self.first_at or began
            gap = began - self.last_at
            if self.last_at and self.was_busy:
                self.occupied_s += gap
            found = step()
            self.last_at = time.perf_counter()
            self.step_s += self.last_at - began
            self.occupied_s += self.last_at - began
            self.was_busy = bool(engine.answers)
            return found

        def counted(core: Any) -> Any:
            outputs = core_step(core)
            for output in outputs:
                stats = output.prefill_stats
                if stats is not None:
                    sums = self.prefills.setdefault(stats.num_prompt_tokens, [0, 0])
                    sums[0] += stats.num_prompt_tokens
                    sums[1] += stats.num_computed_tokens
            return outputs

        self.was_busy = False
        engine.step, compat.step = timed, counted


def save(folder: Path) -> None:
    """A Qwen3 whose tokens are characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocab = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *CHARS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(vocab), hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def main(
    trajectories: int = 1000, turns: int = 10, delay_s: float = 0.5, sigma: float = 1.0,
    max_num_seqs: int = 256,
) -> None:  # fmt: skip
    os.environ.update(ENGINE_ENV)
    from transformers import AutoTokenizer

    from spmdrl.rollout.agents.pool import AgentPool
    from spmdrl.rollout.sampling import questions_of, sample_questions, training_params
    from spmdrl.rollout.scheduler import Scheduler
    from spmdrl.rollout.vllm.engine import VllmEngine
    from spmdrl.types import Prompt

    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder, "model"))
        dist.init_process_group("gloo", init_method=f"file://{folder}/pg", rank=0, world_size=1)
        rollout = RolloutConfig(
            n=1, max_tokens=512, ignore_eos=True, dtype="float32", max_num_seqs=max_num_seqs,
            kv_cache_mib=2048,
        )  # fmt: skip
        config = PpoConfig(
            model=f"{folder}/model", data=DataConfig(train="-", max_prompt_tokens=512),
            reward="agent", agent=play, rollout=rollout, agents=AgentConfig(timeout_s=1500),
            serve=ServeConfig(),
        )  # fmt: skip
        alone = Topology.build(torch.device("cpu"), dp=1, tp=1)
        engine = VllmEngine(config.model, rollout, 1024, alone)
        tokenizer = AutoTokenizer.from_pretrained(config.model)
        pool, meter = AgentPool(config, tokenizer, 0, 1, "key", len(tokenizer)), Meter()
        meter.watch(engine)
        told = {"turns": turns, "delay_s": delay_s, "sigma": sigma}
        prompts = [
            (i, Prompt(i, [5], "d", "", f"task {i:05d} " + "p" * 40, told))
            for i in range(trajectories)
        ]
        samples, _ = sample_questions(
            Scheduler(engine, alone), questions_of(prompts, 1, run_seed=0, step=1),
            training_params(rollout), tokenizer=tokenizer, by_agents=True, agents=pool,
        )  # fmt: skip
        failed = [sample.invalid for sample in samples if sample.invalid]
        assert not failed, failed[0]
        total = meter.last_at - meter.first_at
        by_turn = [meter.prefills[length] for length in sorted(meter.prefills)]
        print(json.dumps({
            "trajectories": trajectories, "turns": turns, "delay_s": delay_s, "sigma": sigma,
            "rows": sum(len(sample.rows) for sample in samples), "seconds": round(total, 2),
            "occupied": round(meter.occupied_s / total, 3),
            "in_steps": round(meter.step_s / total, 3),
            "turns_per_s": round(trajectories * turns / total, 1),
            "prefilled": [round(computed / whole, 3) for whole, computed in by_turn],
        }))  # fmt: skip
        pool.close()
        engine.shutdown()


if __name__ == "__main__":
    fire.Fire(main)
