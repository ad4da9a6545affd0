"""The engine for machines without vLLM: a Hugging Face model, its KV cache and a loop.

transformers' `generate` draws from one generator for the whole batch, so that an answer would
depend on its neighbours, and carries finished rows along to the end. This loop does neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spmdrl.config import ConfigError, RolloutConfig
from spmdrl.data.image_limits import ImageLimits
from spmdrl.data.images import together
from spmdrl.distributed.topology import Topology
from spmdrl.engines.fsdp.model import place_images
from spmdrl.engines.fsdp.router_replay import Routers
from spmdrl.rollout.base import (
    WAKE_TAGS,
    Answer,
    Completion,
    Request,
    SamplingParams,
    check_lengths,
    generate,
)
from spmdrl.rollout.draw import draw, penalise
from spmdrl.rollout.hf import strict as hf_strict
from spmdrl.rollout.request_images import images_of_request
from spmdrl.rollout.rng import mix, preserved_rng
from spmdrl.rollout.stops import StopRule
from spmdrl.rollout.weight_check import compare_by_name
from spmdrl.weights.checkpoint_names import by_checkpoint_name, checkpoint_parts
from spmdrl.weights.engine_layout import ByName, Layout, layout_by_name


@dataclass
class Cohort:
    """Requests that were prefilled together, left-padded; (num_rows, ...) in the order of `ids`."""

    ids: list[int]  # of requests; one that ended stays until half of them have
    params: SamplingParams
    cache: Any
    tokens: Tensor  # (num_rows, n) int64, not yet in the cache
    mask: Tensor  # (num_rows, length) int64, `tokens` included
    seeds: Tensor  # (num_rows,) int64
    ahead: Tensor  # (num_rows,) int64: a new token's position less how many stand before it
    images: dict[str, Any]  # for the first pass


class HfEngine:
    """One engine per rank; what each method promises stands in RolloutEngine."""

    def __init__(
        self, model: str, config: RolloutConfig, max_model_len: int, topology: Topology,
        strict: bool = False, looks: ImageLimits | None = None, load_weights: bool = True,
        return_routed_experts: bool = False,
    ) -> None:  # fmt: skip
        """strict: see strict.py. looks: which images prompts have, where the model sees any.
        return_routed_experts: answers have them.

        Raises ConfigError where tensor parallelism is asked for, or the model cannot be strict.
        """
        from spmdrl.engines.fsdp.model import blank, load_model

        if config.tensor_parallel != 1:
            raise ConfigError(
                f"rollout.engine='hf' has no tensor parallelism, but rollout.tensor_parallel="
                f"{config.tensor_parallel}: set it to 1, or use engine='vllm'"
            )
        self.topology, self.device = topology, topology.device
        self.config, self.max_model_len, self.looks = config, max_model_len, looks
        self.has_weights = load_weights
        with preserved_rng():
            dtype = getattr(torch, config.dtype)
            loaded: Any = load_model(model, dtype=dtype) if load_weights else blank(model, dtype)
        self.model = loaded.to(self.device).eval()
        self.log_softmax: Callable[[Tensor], Tensor] = partial(torch.log_softmax, dim=-1)
        if strict:
            hf_strict.make_strict(self)
        self.routers = Routers(self.model) if return_routed_experts else None
        self.stops = StopRule(model)
        # a checkpoint's names that are no parameter's: of experts
        self.elsewhere = by_checkpoint_name(checkpoint_parts(loaded.config))
        self.max_num_seqs, self.policy_version = config.max_num_seqs, 0
        self.num_requests = 0  # so far
        self.answers: dict[int, Answer] = {}  # by id, those that go on
        self.waiting: deque[int] = deque()
        self.cohorts: list[Cohort] = []

    @property
    def num_running(self) -> int:
        return len(self.answers) - len(self.waiting)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """Answers the requests; at temperature 0 the logprobs are of the model's own distribution
        (temperature 1).
        """
        return generate(self, requests, params)

    def add(self, requests: Sequence[Request], params: SamplingParams) -> list[int]:
        check_lengths(requests, params, self.max_model_len)
        ids = [self.num_requests + i for i in range(len(requests))]
        self.num_requests += len(requests)
        for id, request in zip(ids, requests, strict=True):
            self.answers[id] = Answer.begin(request, params)
        self.waiting += sorted(ids, key=lambda id: len(sequence(self.answers[id])))  # less padding
        return ids

    @torch.no_grad()
    def step(self) -> list[tuple[int, Completion]]:
        self.admit()
        ended = [id for cohort in self.cohorts for id in self.advance(cohort)]
        self.cohorts = [cohort for cohort in self.cohorts if cohort.ids]
        return [(id, self.answers.pop(id).completion()) for id in ended]

    def abort(self, ids: Sequence[int]) -> list[Completion]:
        partial = [self.answers.pop(id).completion() for id in ids]
        self.waiting = deque(id for id in self.waiting if id in self.answers)
        self.cohorts = [c for c in self.cohorts if any(id in self.answers for id in c.ids)]
        return partial

    def forget_prefixes(self) -> None:
        running = [id for cohort in self.cohorts for id in cohort.ids if id in self.answers]
        self.waiting.extendleft(reversed(running))
        self.cohorts = []

    def admit(self) -> None:
        """Prefills what waits once half of the places are free: every cohort is one more pass."""
        from transformers import DynamicCache

        free = self.max_num_seqs - self.num_running
        if not self.waiting or (self.cohorts and 2 * free < self.max_num_seqs):
            return
        by_params: dict[SamplingParams, list[int]] = {}
        for _ in range(min(free, len(self.waiting))):
            id = self.waiting.popleft()
            by_params.setdefault(self.answers[id].params, []).append(id)
        for params, ids in by_params.items():
            tokens, mask = left_pad([sequence(self.answers[id]) for id in ids], self.device)
            seeds = torch.tensor([self.answers[id].request.seed for id in ids], device=self.device)
            cache = DynamicCache(config=self.model.config)
            requests = [self.answers[id].request for id in ids]
            ahead, images = self.images_of(requests, mask)
            self.cohorts.append(
                Cohort(ids, params, cache, tokens, mask, mix(seeds), ahead, images)
            )  # fmt: skip

    def images_of(
        self, requests: list[Request], mask: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:  # fmt: skip
        """(Cohort.ahead, what the model's first pass is given) of left-padded rows."""
        ahead = torch.zeros(len(requests), dtype=torch.int64, device=self.device)
        if self.looks is None:
            return ahead, {}
        vision = self.looks.vision
        seen = [images_of_request(vision, request) for request in requests]
        if not any(seen):
            return ahead, {}
        views = [
            view or vision.view(request.prompt_ids, ())
            for view, request in zip(seen, requests, strict=True)
        ]
        positions = text_positions(mask).expand(3, -1, -1).clone()
        is_image = torch.zeros_like(mask, dtype=torch.bool)
        for row, view in enumerate(views):
            known = len(view.is_image)
            first = mask.shape[1] - int(mask[row].sum())
            is_image[row, first : first + known] = view.is_image.to(self.device)
            if view.positions is not None:
                ahead[row] = view.next_position - known
                positions[:, row, first:] += ahead[row]
                positions[:, row, first : first + known] = view.positions.to(self.device)
        pixels = together([p for view in views for p in view.pixels])
        given: dict[str, Any] = {name: part.to(self.device) for name, part in pixels.items()}
        if vision.family.mrope:
            given["position_ids"] = positions
        if vision.family.types is not None:
            given[vision.family.types] = is_image.long()
        return ahead, {"is_image": is_image, **given}

    def advance(self, cohort: Cohort) -> list[int]:
        """One token for each row; returns the ids of those that ended with it."""
        positions = text_positions(cohort.mask)[:, -cohort.tokens.shape[1] :]
        given = {"position_ids": positions + cohort.ahead[:, None]} | cohort.images
        if self.looks is not None:
            nowhere = torch.zeros_like(cohort.tokens, dtype=torch.bool)
            place_images(self.model, given.pop("is_image", nowhere))
            cohort.images = {}
        with self.routers.recording() if self.routers is not None else nullcontext():
            logits = self.model(
                input_ids=cohort.tokens,
                attention_mask=cohort.mask,
                past_key_values=cohort.cache,
                logits_to_keep=1,
                **given,
                **hf_strict.padding_of(self.model, cohort.mask),
            ).logits[:, -1]
            self.note_routed(cohort)
        tokens, logprobs, support = self.draw(logits.float(), cohort)
        supports = None if support is None else support.cpu().numpy()
        cohort.tokens = tokens[:, None]
        cohort.mask = torch.cat([cohort.mask, torch.ones_like(cohort.tokens)], 1)
        ended, going = [], []
        for row, (id, token, logprob) in enumerate(
            zip(cohort.ids, tokens.tolist(), logprobs.tolist(), strict=True)
        ):
            answer = self.answers.get(id)
            if answer is None:
                continue
            self.stops.note(answer, token, logprob, self.policy_version)
            if supports is not None:
                answer.supports.append(supports[row])
            if answer.finish_reason is None:
                going.append(row)
            else:
                ended.append(id)
        if not going:
            cohort.ids = []
        elif len(going) <= len(cohort.ids) // 2:
            kept = torch.tensor(going, device=self.device)
            cohort.cache.reorder_cache(kept)  # selects rows of every kind of cache, states too
            cohort.tokens, cohort.mask = cohort.tokens[kept], cohort.mask[kept]
            cohort.seeds, cohort.ahead = cohort.seeds[kept], cohort.ahead[kept]
            cohort.ids = [cohort.ids[row] for row in going]
        return ended

    def note_routed(self, cohort: Cohort) -> None:
        """Adds the experts of a pass that has just been run to the answers."""
        if self.routers is None:
            return
        rows = self.routers.routed().unflatten(0, cohort.tokens.shape).cpu().numpy()
        for id, routed, end in zip(cohort.ids, rows, cohort.mask.sum(1).tolist(), strict=True):
            if id in self.answers:
                self.answers[id].add_routed(routed, end)

    def draw(self, logits: Tensor, cohort: Cohort) -> tuple[Tensor, Tensor, Tensor | None]:
        """logits (num_rows, vocab) float32 -> tokens, logprobs (num_rows,), supports."""
        params, answers = cohort.params, [self.answers.get(id) for id in cohort.ids]
        self.stops.forbid(logits, answers, params)
        penalise(logits, [sequence(a) if a else () for a in answers], params.repetition_penalty)
        return draw(logits, params, cohort.seeds, cohort.mask.sum(1), self.log_softmax)

    # weights

    def layout(self, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
        return layout_by_name(self.model, shapes, self.elsewhere)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raises ValueError naming a tensor that the model lacks or that was not given."""
        by_name = ByName(self.model, self.elsewhere)
        for name, tensor in weights:
            by_name.find(name)[1].copy_(tensor)
        by_name.require_all()
        self.forget_prefixes()

    def load_opaque(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Takes the weights that have no place in the layout: none, since `layout` places all.

        The iterator is read to its end all the same. Raises RuntimeError where it held a weight.
        """
        names = [name for name, _ in weights]
        if names:
            raise RuntimeError(f"weights without a place in the model: {', '.join(names)}")

    def finish_load(self) -> None:
        self.forget_prefixes()

    def check_weights(self, weights: Iterator[tuple[str, Tensor]]) -> int:
        return compare_by_name(ByName(self.model, self.elsewhere), weights)

    def sleep(self) -> None:
        if self.config.sleep:
            self.model.to("cpu")

    def wake(self, tags: Sequence[str] = WAKE_TAGS) -> None:
        if "weights" in tags:
            self.model.to(self.device)

    def shutdown(self) -> None:
        del self.model


def sequence(answer: Answer) -> list[int]:
    """Prompt and what there is of the answer."""
    return [*answer.request.prompt_ids, *answer.token_ids]


def text_positions(mask: Tensor) -> Tensor:
    """(num_rows, length) int64: how many tokens stand before each."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def left_pad(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask, both (num_rows, longest) int64; 0 where there is no token."""
    longest = max(len(prompt) for prompt in prompts)
    ids = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
