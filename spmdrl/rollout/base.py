"""The protocol of engines that sample: what the step asks of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor, nn

from spmdrl.config import RolloutConfig, require
from spmdrl.data.visuals import Visual
from spmdrl.distributed.topology import Topology
from spmdrl.rollout.rng import preserved_rng
from spmdrl.types import PlacedImage
from spmdrl.weights.engine_layout import Layout

WAKE_TAGS = ("weights", "kv_cache")  # what an engine takes memory for, by vLLM's names
NOT_CHOSEN = -1  # in place of a policy version: a token that a tool or an environment wrote


@dataclass(frozen=True)
class SamplingParams:
    """The way in which tokens are drawn. temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and
    repetition_penalty 1 mean off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    support_width: int = 0  # columns of Completion.support_ids; 0: answers have none


@dataclass(frozen=True)
class Request:
    """One sequence to be continued; equal requests give equal tokens on any rank.

    The answer may have been begun elsewhere or under older weights. It is then continued as if it
    had never been interrupted: lengths and stop strings count all of it.
    """

    prompt_ids: list[int]
    seed: int  # 0 .. 2**63 - 1, made from the sample's address
    response_ids: Sequence[int] = ()  # what there is of the answer
    logprobs: Sequence[float] = ()  # one per token of response_ids
    versions: Sequence[int] = ()  # one per token of response_ids
    max_tokens: int | None = None  # of this answer; None: SamplingParams.max_tokens
    replies: Sequence[str] = ()  # as Completion.replies
    awaits_reply: bool = False  # a turn has ended: not to be added to an engine as it is
    images: Sequence[Visual] = ()  # of the prompt; those of replies are in `replies`
    placed_images: Sequence[PlacedImage] = ()  # of an agent's conversation: in prompt_ids
    home: int | None = None  # the number of the engine where its agent runs; None: it has none yet
    adapter: int = 0  # with actor.lora.by_source: which answers, by its place in LoraConfig.names
    # as Completion.routed_experts
    routed_experts: np.ndarray | None = field(default=None, compare=False)
    # as Completion.support_ids
    support_ids: np.ndarray | None = field(default=None, compare=False)

    @property
    def num_earlier(self) -> int:
        """The number of tokens of `response_ids` that are of earlier turns, the last reply
        included.
        """
        if not self.replies:
            return 0
        after = list(self.versions)[::-1].index(NOT_CHOSEN)
        return len(self.versions) - after

    @property
    def num_routed(self) -> int:
        """The number of tokens of prompt and answer whose experts are known."""
        return 0 if self.routed_experts is None else len(self.routed_experts)

    def begun(self) -> Completion:
        """The part of the answer that is there."""
        return Completion(
            list(self.response_ids), list(self.logprobs), "stop" if self.awaits_reply else "abort",
            list(self.versions), list(self.replies), self.routed_experts, self.support_ids,
        )  # fmt: skip

    def limit(self, params: SamplingParams) -> int:
        """Number of tokens after which the answer ends."""
        return params.max_tokens if self.max_tokens is None else self.max_tokens


@dataclass(frozen=True)
class Completion:
    """A whole answer, with what it was begun with; one entry per token.

    `logprobs` are of the distribution sampled from: after repetition penalty, temperature, min-p,
    top-k and top-p; 0 where the token was not chosen.
    """

    token_ids: list[int]  # the stop token, if one ended it, is included
    logprobs: list[float]  # natural log
    # "stop" | "length" | "abort": not at its end | with several turns also "turns" | "error"
    finish_reason: str
    versions: list[int] = field(default_factory=list)  # of the weights that chose it, or NOT_CHOSEN
    # JSON, a list of messages: what stands in each run of tokens that were not chosen, in order;
    # one more where the last thing said was no token ("error")
    replies: list[str] = field(default_factory=list)
    # (num_rows, num_moe_layers, top_k) uint8 or int16, where the engine returns them: the experts
    # that the first num_rows tokens of prompt and answer were sent to when they were computed. The
    # last token, which no pass has been given, has no row, nor has a reply that is not answered
    routed_experts: np.ndarray | None = field(default=None, compare=False)
    # (num_tokens, support_width) int32, where they are asked for: the ids among which each token
    # was drawn, ascending, -1 behind the last. -1 alone where the token was not chosen, or where
    # there are more ids than columns
    support_ids: np.ndarray | None = field(default=None, compare=False)


@dataclass
class Answer:
    """A request on its way through an engine."""

    request: Request
    params: SamplingParams
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str | None = None  # None while it goes on
    # parts of Completion.routed_experts, in order; none where the engine does not return them
    routed_experts: list[np.ndarray] = field(default_factory=list)
    num_routed: int = 0  # their rows
    supports: list[np.ndarray] = field(default_factory=list)  # rows of Completion.support_ids

    @classmethod
    def begin(cls, request: Request, params: SamplingParams) -> Answer:
        begun = list(request.response_ids), list(request.logprobs), list(request.versions)
        answer = cls(request, params, *begun)
        if params.support_width and request.support_ids is not None:
            answer.supports = list(request.support_ids)
        if request.routed_experts is not None:
            answer.add_routed(request.routed_experts, len(request.routed_experts))
        return answer

    def add_routed(self, rows: np.ndarray, end: int) -> None:
        """Adds the routed experts of the tokens before `end`, of which `rows` has the last. Those
        that are known already stay: they are of the weights that chose what follows.
        """
        num_new = end - self.num_routed
        assert num_new <= len(rows), (end, self.num_routed, len(rows))
        if num_new > 0:
            self.routed_experts.append(rows[len(rows) - num_new :].copy())
            self.num_routed = end

    def completion(self) -> Completion:
        width = self.params.support_width
        return Completion(
            self.token_ids, self.logprobs, self.finish_reason or "abort", self.versions,
            list(self.request.replies),
            np.concatenate(self.routed_experts) if self.routed_experts else None,
            support_rows(self.supports, width) if width else None,
        )  # fmt: skip


def support_rows(supports: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Completion.support_ids of as many tokens. supports: the ids of each token, which may have -1
    behind them.
    """
    rows = np.full((len(supports), width), -1, np.int32)
    for row, ids in zip(rows, supports, strict=True):
        if len(ids) <= width:
            row[: len(ids)] = ids
    return rows


class RolloutEngine(Protocol):
    """One engine per tensor-parallel group; every rank of the group makes the same calls."""

    max_num_seqs: int  # that are decoded at once; more wait in the engine
    policy_version: int  # of its weights, set by the caller; written beside every token
    has_weights: bool  # False: it was built without any, until the first push has filled it

    @property
    def model(self) -> nn.Module:
        """This rank's part of the model."""
        ...

    @property
    def num_running(self) -> int:
        """Requests that are being decoded."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that were added and have no place yet."""
        ...

    def add(self, requests: Sequence[Request], params: SamplingParams) -> list[int]:
        """Queues requests, also while others run; returns an id each, never used twice.

        Raises ValueError where one cannot fit, or has nothing left to be sampled.
        """
        ...

    def step(self) -> list[tuple[int, Completion]]:
        """One forward pass, a token for each that runs; returns those that ended, with their ids.

        Local to the tensor-parallel group. Does nothing where there are no requests.
        """
        ...

    def abort(self, ids: Sequence[int]) -> list[Completion]:
        """Takes unfinished requests out; what there is of each answer, finish_reason "abort"."""
        ...

    def forget_prefixes(self) -> None:
        """Forgets cached prefixes, so that an answer depends on nothing but its request and the
        weights.

        Requests that run go on: what is cached of them is computed anew before their next token, so
        that after a change of weights each token is of the weights that chose it.
        """
        ...

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """Completes every request, in the order given. Local to the tensor-parallel group."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces all weights: (Hugging Face name, full tensor). Forgets cached prefixes."""
        ...

    def layout(self, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
        """Returns which part of each weight this rank needs, and where in its parameters it
        belongs.

        shapes: of the full tensors, by Hugging Face name. Raises ValueError where they do not fit
        the model. Whoever writes to these places calls `finish_load` when all is written.
        """
        ...

    def load_opaque(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads full tensors that `layout` had no place for. `finish_load` is to follow."""
        ...

    def finish_load(self) -> None:
        """Makes new weights take effect and forgets what was computed with the old ones."""
        ...

    def check_weights(self, weights: Iterator[tuple[str, Tensor]]) -> int:
        """Compares checksums of the engine's weights with those given.

        Returns the number of tensors compared; raises WeightMismatch naming the first that differs,
        or an engine parameter that no given tensor accounts for.
        """
        ...

    def sleep(self) -> None:
        """Gives back what memory it can (KV cache; on GPUs weights too)."""
        ...

    def wake(self, tags: Sequence[str] = WAKE_TAGS) -> None:
        """Takes the memory of these again; weights must be loaded anew where `sleep` gave them
        back. After "weights" alone nothing can be sampled, until "kv_cache" follows.
        """
        ...

    def shutdown(self) -> None:
        """Frees the engine without touching the process groups of the caller."""
        ...


def require_tensor_parallel(config: RolloutConfig, topology: Topology) -> None:
    """Raises ConfigError where the topology's axis tp is not config.tensor_parallel."""
    require(
        topology.axis_size("tp") == config.tensor_parallel,
        f"rollout.tensor_parallel={config.tensor_parallel}, but the topology has "
        f"tp={topology.axis_size('tp')}",
    )


class WeightMismatch(RuntimeError):
    """The engine's weights are not the trainer's."""


def generate(
    engine: RolloutEngine, requests: Sequence[Request], params: SamplingParams
) -> list[Completion]:
    """Does what RolloutEngine.generate promises, for an engine that has nothing else to do."""
    engine.forget_prefixes()
    ids = engine.add(requests, params)
    ended: dict[int, Completion] = {}
    with preserved_rng():
        while len(ended) < len(ids):
            ended.update(engine.step())
    return [ended[id] for id in ids]


def check_lengths(requests: Sequence[Request], params: SamplingParams, max_model_len: int) -> None:
    """Raises ValueError where a prompt and its answer cannot fit the engine."""
    if any(not request.prompt_ids for request in requests):
        raise ValueError("a prompt has no tokens")
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise ValueError(
            f"min_tokens={params.min_tokens} must be in 0..max_tokens={params.max_tokens}"
        )
    for request in requests:
        prompt, limit, begun = len(request.prompt_ids), request.limit(params), request.response_ids
        if prompt + limit > max_model_len:
            raise ValueError(
                f"a prompt of {prompt} tokens and max_tokens={limit} make {prompt + limit}, more "
                f"than max_model_len={max_model_len}"
            )
        if len(begun) >= limit:
            raise ValueError(
                f"an answer of {len(begun)} tokens leaves nothing to max_tokens={limit}"
            )
        if not len(begun) == len(request.logprobs) == len(request.versions):
            raise ValueError(
                f"an answer was begun with {len(begun)} tokens, {len(request.logprobs)} logprobs "
                f"and {len(request.versions)} versions: they must be as many"
            )
