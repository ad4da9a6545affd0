"""The engine for machines without vLLM: a Hugging Face model, its KV cache and a loop.

transformers' `generate` draws from one generator for the whole batch, so that an answer would
depend on its neighbours, and carries finished rows along to the end. This loop does neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from spmdrl.config import ConfigError, RolloutConfig
from spmdrl.rollout.engine import Completion, Request, SamplingParams
from spmdrl.rollout.noise import gumbel, mix, preserved_rng
from spmdrl.rollout.sampling import check_lengths, eos_token_ids
from spmdrl.rollout.weight_check import compare_weights
from spmdrl.topology import Topology
from spmdrl.weights.layout import Layout, layout_by_name


class HfEngine:
    """One engine per rank; what each method promises stands in RolloutEngine."""

    def __init__(
        self, model: str, config: RolloutConfig, max_model_len: int, topology: Topology
    ) -> None:
        """Raises ConfigError where tensor parallelism is asked for."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if config.tensor_parallel != 1:
            raise ConfigError(
                f"rollout.engine='hf' has no tensor parallelism, but rollout.tensor_parallel="
                f"{config.tensor_parallel}: set it to 1, or use engine='vllm'"
            )
        self.topology, self.device = topology, topology.device
        self.config, self.max_model_len = config, max_model_len
        with preserved_rng():
            dtype = getattr(torch, config.dtype)
            loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self.model = loaded.to(self.device).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.eos_token_ids = eos_token_ids(model)

    def generate(self, requests: list[Request], params: SamplingParams) -> list[Completion]:
        """At temperature 0 the logprobs are of the model's own distribution (temperature 1).

        Raises ValueError where a prompt and max_tokens exceed max_model_len.
        """
        check_lengths(requests, params, self.max_model_len)
        by_length = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_ids))
        completions: dict[int, Completion] = {}
        for first in range(0, len(by_length), self.config.max_num_seqs):
            batch = by_length[first : first + self.config.max_num_seqs]
            answers = self.complete([requests[i] for i in batch], params)
            completions.update(zip(batch, answers, strict=True))
        return [completions[i] for i in range(len(requests))]

    @torch.no_grad()
    def complete(self, requests: list[Request], params: SamplingParams) -> list[Completion]:
        """One batch, left-padded. Rows that ended leave it when half of them have."""
        from transformers import DynamicCache

        ids, mask = left_pad([request.prompt_ids for request in requests], self.device)
        seeds = mix(torch.tensor([request.seed for request in requests], device=self.device))
        answers: list[Any] = [([], []) for _ in requests]  # token ids, logprobs
        reasons: list[str | None] = [None] * len(requests)
        rows = list(range(len(requests)))  # of the batch: which request
        cache = DynamicCache(config=self.model.config)
        while None in reasons:
            lengths = mask.sum(1)  # (num_rows,)
            logits = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :],
                past_key_values=cache,
                logits_to_keep=1,
            ).logits[:, -1]
            num_drawn = len(answers[rows[0]][0])
            tokens, logprobs = self.draw(logits.float(), seeds + lengths, params, num_drawn)
            ids, mask = tokens[:, None], torch.cat([mask, torch.ones_like(tokens[:, None])], 1)
            for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
                if reasons[row] is None:
                    answers[row][0].append(token)
                    answers[row][1].append(logprob)
                    reasons[row] = self.finish_reason(answers[row][0], params)
            going = [i for i, row in enumerate(rows) if reasons[row] is None]
            if 0 < len(going) <= len(rows) // 2:
                kept = torch.tensor(going, device=self.device)
                cache.batch_select_indices(kept)
                ids, mask, seeds = ids[kept], mask[kept], seeds[kept]
                rows = [rows[i] for i in going]
        return [
            Completion(token_ids, logprobs, reason or "length")
            for (token_ids, logprobs), reason in zip(answers, reasons, strict=True)
        ]

    def draw(
        self, logits: Tensor, seeds: Tensor, params: SamplingParams, num_drawn: int
    ) -> tuple[Tensor, Tensor]:
        """logits (num_rows, vocab) float32, seeds (num_rows,) -> tokens, logprobs (num_rows,)."""
        if num_drawn < params.min_tokens:
            logits[:, list(self.stop_ids(params))] = float("-inf")
        logprobs = processed_logprobs(logits, params)
        noise = gumbel(mix(seeds), logits.shape[1]) if params.temperature > 0 else 0
        tokens = (logprobs + noise).argmax(-1)
        return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        return params.stop_token_ids + (() if params.ignore_eos else self.eos_token_ids)

    def finish_reason(self, token_ids: list[int], params: SamplingParams) -> str | None:
        """None while the sequence goes on."""
        if token_ids[-1] in self.stop_ids(params):
            return "stop"
        if len(token_ids) > params.min_tokens and self.ends_in_stop(token_ids, params.stop):
            return "stop"
        return "length" if len(token_ids) == params.max_tokens else None

    def ends_in_stop(self, token_ids: list[int], stops: tuple[str, ...]) -> bool:
        """Whether the last token completed a stop string."""
        if not stops:
            return False
        # a character is at most 4 tokens of one byte each
        tail = token_ids[-4 * max(len(stop) for stop in stops) - 4 :]
        before = self.tokenizer.decode(tail[:-1], skip_special_tokens=True)
        text = self.tokenizer.decode(tail, skip_special_tokens=True)
        return any(stop in text[max(0, len(before) - len(stop) + 1) :] for stop in stops)

    # weights

    def layout(self, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
        return layout_by_name(self.model, shapes)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raises ValueError naming a tensor that the model lacks or that was not given."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        missing = {p.data_ptr(): name for name, p in parameters.items()}
        for name, tensor in weights:
            if name not in parameters:
                raise ValueError(f"the engine's model has no parameter {name}")
            parameters[name].copy_(tensor)
            missing.pop(parameters[name].data_ptr(), None)
        if missing:
            raise ValueError(f"weights were not given: {sorted(missing.values())}")

    def load_opaque(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        assert not list(weights), "every weight has its place"

    def finish_load(self, running: bool = False) -> None:
        """Nothing is kept from one call of generate to the next."""

    def check_weights(self, weights: Iterator[tuple[str, Tensor]]) -> int:
        return compare_weights(self.model, weights, tp_rank=0, tp_size=1)

    def sleep(self) -> None:
        if self.config.sleep:
            self.model.to("cpu")

    def wake(self) -> None:
        self.model.to(self.device)

    def shutdown(self) -> None:
        del self.model


def left_pad(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask, both (num_rows, longest) int64; 0 where there is no token."""
    longest = max(len(prompt) for prompt in prompts)
    ids = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def processed_logprobs(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution sampled from: temperature, then top-k, then top-p of what is left.

    logits: (num_rows, vocab) float32. Greedy: the model's own distribution.
    """
    if params.temperature == 0:
        return logits.log_softmax(-1)
    logits = logits / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        kth = logits.topk(params.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if params.top_p < 1:
        ascending, order = logits.sort(-1)
        unlikely = ascending.softmax(-1).cumsum(-1) <= 1 - params.top_p
        unlikely[:, -1] = False
        logits = logits.masked_fill(unlikely.scatter(-1, order, unlikely), float("-inf"))
    return logits.log_softmax(-1)
