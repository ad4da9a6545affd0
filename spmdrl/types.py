"""The nouns: a Prompt is asked, a Sample is one answer, a Batch is what a training engine eats.

A worked example, one prompt of three tokens and one answer of two:

    prompt.token_ids   [5, 6, 7]
    sample.response_ids          [8, 2]
    batch.token_ids    [5, 6, 7,  8, 2]
    batch.loss_mask    [0, 0, 0,  1, 1]     1: this token was chosen by the policy
    batch.old_logprobs [0, 0, 0, -1.2, -0.1]  entry t is log p(token t | tokens before t)
    batch.values       [0, 0, 0, 0.3, 0.7]   entry t is V(tokens before t)

Every per-token field of a Batch is aligned to the token it speaks of and holds 0 where masked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spmdrl.segments import lengths_to_cu_seqlens, to_device

Message = dict[str, Any]  # of a chat: role, content, and what else a template knows
DEMONSTRATED = -2  # in place of a policy version: a token of an answer that the data has


@dataclass(frozen=True)
class Picture:
    """An encoded image (PNG, JPEG, ...): its bytes, or the file that has them."""

    source: bytes | Path

    @property
    def encoded(self) -> bytes:
        return self.source if isinstance(self.source, bytes) else self.source.read_bytes()

    @cached_property
    def digest(self) -> str:
        """The first 128 bits of the encoded image's BLAKE2b hash, in hexadecimal digits."""
        return hashlib.blake2b(self.encoded, digest_size=16).hexdigest()

    def __str__(self) -> str:
        if isinstance(self.source, bytes):
            return f"an image of {len(self.source)} bytes"
        return f"'{self.source}'"


class PlacedImage(NamedTuple):
    """An image that a sequence shows."""

    first: int  # the token of the sequence where its tokens begin
    picture: Picture


@dataclass(frozen=True)
class Prompt:
    """One row of a data set, ready to be asked."""

    id: int  # row number in the concatenated data files; part of every sample's seed
    token_ids: list[int]
    data_source: str
    ground_truth: Any
    text: str  # the prompt as the model sees it, for logs
    extra_info: dict[str, Any] = field(default_factory=dict)
    chat: list[Message] | None = None  # as the data has it; None: it has a plain string
    images: tuple[Any, ...] = ()  # each a data.visuals.Visual, in order of their tokens
    # answers of others that the row has, to be learnt from: token ids, EOS included
    demonstrations: tuple[list[int], ...] = ()

    @property
    def messages(self) -> list[Message]:
        return [{"role": "user", "content": self.text}] if self.chat is None else self.chat


@dataclass
class Judgement:
    """Holds what the judge (PpoConfig.judge) says of a sample."""

    score: float | None  # None: no verdict could be read
    verdicts: list[str]  # as the judge wrote them; of pairs one a comparison
    num_unparsable: int  # of these
    num_tokens: int  # of these together


@dataclass
class Sample:
    """One trajectory. The per-token lists have one entry per response token."""

    prompt: Prompt
    group: int  # position of the prompt in the step's batch; samples of one prompt share it
    index: int  # which of the prompt's n samples
    response_ids: list[int]
    rollout_logprobs: list[float]  # of the distribution that was sampled from
    loss_mask: list[int]  # 0 on tokens that the policy did not choose (tools, environment)
    # of the weights that chose the token; -1 on those nobody chose, DEMONSTRATED on all tokens of a
    # demonstration, whose rollout_logprobs are 0
    policy_version: list[int]
    finish_reason: str  # "stop" | "length" | "turns": another would have been due | "error"
    response: str = ""  # the policy's last turn, decoded without special tokens
    # what was said behind the prompt: a message per turn of the policy's, and the replies
    messages: list[Message] = field(default_factory=list)
    reward: float | None = None  # None: not scored yet, or invalid; those of its turns included
    turn_rewards: list[float] = field(default_factory=list)  # rewards.per_turn: one a turn
    model_score: float | None = None  # what the reward model says, where there is one
    judgement: Judgement | None = None  # what the judge says, where there is one
    penalty: float = 0.0  # added to the reward for the algorithm (DAPO's overlong punishment)
    greedy_reward: float = 0.0  # of the greedy answer to the same prompt, where it was asked for
    invalid: str | None = None  # why there is no reward: the traceback or the time limit
    reward_info: dict[str, float] = field(default_factory=dict)  # further numbers to be logged
    pred: str | None = None  # what the reward function read as the answer, if it says so
    # with actor.router_replay, and with rollout.keep_sampling_mask: as those of a Completion
    routed_experts: np.ndarray | None = field(default=None, compare=False)
    support_ids: np.ndarray | None = field(default=None, compare=False)
    agent_output: Any = None  # with an agent: what it returned
    # of an agent's row: which of the trajectory's turns it has, in the order of their answers
    turn_numbers: list[int] = field(default_factory=list)
    # of an agent's row: where each of its images begins, counted from the start of its prompt
    placed_images: list[PlacedImage] = field(default_factory=list)
    # with an agent: the sequences that are trained on, in the order in which they began; this
    # sample is then the trajectory. It has the tokens of the first, and the messages and the
    # response of the one in which the last turn was said
    rows: list[Sample] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids) + len(self.response_ids)

    @property
    def is_demonstration(self) -> bool:
        """Whether the answer is one that the data has, and nobody has sampled it."""
        return self.policy_version[:1] == [DEMONSTRATED]

    @property
    def num_turns(self) -> int:
        """Returns the number of the policy's turns: as many as runs of tokens with loss_mask 1, if
        it has any token.
        """
        if self.rows:
            return sum(row.num_turns for row in self.rows)
        if self.turn_numbers:
            return len(self.turn_numbers)
        return sum(message["role"] == "assistant" for message in self.messages)

    @property
    def num_response_tokens(self) -> int:
        """Returns the number of tokens behind the prompt, in all rows of a trajectory."""
        return sum(len(row.response_ids) for row in self.rows or [self])

    @property
    def chat(self) -> list[Message]:
        """Prompt and answer; of a trajectory, the conversation in which the last turn was said."""
        if self.rows:
            return self.messages
        return [*self.prompt.messages, *self.messages]

    @property
    def rewards_by_key(self) -> dict[str, float]:
        """Returns what the reward function returned, the reward itself under "score"; {} if
        invalid.
        """
        return {} if self.reward is None else self.reward_info | {"score": self.reward}


@dataclass
class Batch:
    """Sequences packed end to end, without padding.

    Fields of shape (num_tokens,) and (num_seqs,); a field that is None was not computed.
    `loss_weights` sums the per-token losses: it holds the mask divided by a count that was taken
    over the whole mini-batch on all ranks (algo.losses.loss_weights), so the sum of the weighted
    losses over micro-batches and ranks is the loss, whatever the split.
    """

    token_ids: Tensor  # (num_tokens,) int64
    cu_seqlens: Tensor  # (num_seqs + 1,) int64, on the CPU: sequence i is cu[i]:cu[i+1]
    loss_mask: Tensor  # (num_tokens,) float32, 0 on the prompt and on every token of an invalid one
    rollout_logprobs: Tensor  # (num_tokens,) float32
    groups: Tensor  # (num_seqs,) int64
    # (num_seqs,) int64: which of the prompt's n samples; plus n * k of the k-th further row of an
    # agent's trajectory, or of the k-th further copy that a sample filter drew
    indices: Tensor
    prompts: Tensor  # (num_seqs,) int64, ids of their prompts; -1 where there is none
    rewards: Tensor  # (num_seqs,) float64, penalties included, 0 where not valid
    valid: Tensor  # (num_seqs,) float32
    greedy_rewards: Tensor  # (num_seqs,) float64, of the greedy answer to the same prompt
    # (num_seqs, num_keys) float64: the rewards that gdpo's reward_keys name, in their order
    reward_components: Tensor
    policy_version: Tensor  # (num_tokens,) int64, as of a Sample; 0 on prompts
    # (num_seqs,) int64, with actor.lora.by_source: which adapter each is of, by its place in
    # LoraConfig.names
    adapters: Tensor | None = None
    # (num_tokens,) float64, with rewards.per_turn: what `rewards` has of a turn, at its last token
    turn_rewards: Tensor | None = None
    old_logprobs: Tensor | None = None  # (num_tokens,) float32
    old_entropy: Tensor | None = None  # (num_tokens,) float32, nats
    pi_squared: Tensor | None = None  # (num_tokens,) float32, sum over the vocabulary
    ref_logprobs: Tensor | None = None  # (num_tokens,) float32
    # (num_seqs,) float64: the reference's log-probability of each answer, the sum over its tokens
    ref_sums: Tensor | None = None
    # with distillation: the k tokens that the teacher finds most likely in the place of each
    # unmasked token, (num_tokens, k) int32, and its log-probabilities of them, float32
    teacher_ids: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    # (num_tokens, k) float32: the policy's log-probabilities of teacher_ids, within an update or
    # while it is measured
    student_logprobs: Tensor | None = None
    prm_logprobs: Tensor | None = None  # (num_tokens,) float32, of the process reward model
    values: Tensor | None = None  # (num_tokens,) float32
    advantages: Tensor | None = None  # (num_tokens,) float32
    returns: Tensor | None = None  # (num_tokens,) float32
    loss_weights: Tensor | None = None  # (num_tokens,) float32
    # (num_tokens,) float32: the loss mask less what a rollout correction rejected
    kept_mask: Tensor | None = None
    # (num_tokens,) float32, on the policy loss alone: rollout correction times the top-entropy mask
    policy_weights: Tensor | None = None
    nll_weights: Tensor | None = None  # (num_tokens,) float32, of the positive-example NLL
    # (num_tokens,) float32: 1 on the tokens that clip_cov or kl_cov acts on
    selected_mask: Tensor | None = None
    # (num_tokens, num_moe_layers, top_k) uint8 or int16, with actor.router_replay: the experts that
    # each token was sent to while it was sampled; any where nobody knows
    routed_experts: Tensor | None = None
    # (num_tokens, width) int32, with rollout.keep_sampling_mask: as of a Sample, -1 where masked
    support_ids: Tensor | None = None
    # (num_tokens,) int64, with multi_turn.max_images: where an image of a reply begins, its number
    # (data/reply_images.py); 0 elsewhere
    reply_images: Tensor | None = None

    @property
    def num_seqs(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def seq_lens(self) -> Tensor:
        return self.cu_seqlens.diff()  # (num_seqs,)

    def select(self, seqs: list[int]) -> Batch:
        """The given sequences, in the given order, as a Batch of their own (copies)."""
        index = torch.tensor(seqs, dtype=torch.int64)
        starts, lens = self.cu_seqlens[:-1][index], self.seq_lens[index]
        cu_seqlens = lengths_to_cu_seqlens(lens)
        offsets = torch.repeat_interleave(starts - cu_seqlens[:-1], lens)
        rows = (torch.arange(int(cu_seqlens[-1])) + offsets).to(self.token_ids.device)
        index = index.to(self.token_ids.device)
        picked: dict[str, Any] = {
            name: value[rows] if name in TOKEN_FIELDS else value[index]
            for name, value in self.tensors()
        }
        return replace(self, **picked, cu_seqlens=cu_seqlens)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every field that is set, `cu_seqlens` left out."""
        for spec in fields(self):
            value = getattr(self, spec.name)
            if value is not None and spec.name != "cu_seqlens":
                yield spec.name, value

    def to(self, device: torch.device) -> Batch:
        names, values = zip(*self.tensors(), strict=True)
        return replace(self, **dict(zip(names, to_device(values, device), strict=True)))


class PolicyStats(NamedTuple):
    """Holds what a pass without gradient says of every unmasked token; (num_tokens,) float32, 0
    else.
    """

    logprobs: Tensor  # of the token
    entropy: Tensor  # nats, of the distribution it was drawn from
    pi_squared: Tensor | None = None  # sum of that distribution's squared probabilities
    # of the most probable tokens, largest first: (num_tokens, top_k) float32 and int32
    top_logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    # of the batch's teacher_ids: (num_tokens, k) float32
    student_logprobs: Tensor | None = None


SEQ_FIELDS = frozenset({
    "groups", "indices", "prompts", "rewards", "valid", "greedy_rewards", "reward_components",
    "ref_sums", "adapters",
})  # fmt: skip
TOKEN_FIELDS = frozenset(f.name for f in fields(Batch)) - SEQ_FIELDS - {"cu_seqlens"}


def turn_ends(loss_mask: list[int]) -> list[int]:
    """Finds where the policy's turns end: the last token of each run of ones."""
    return [i for i, (here, behind) in enumerate(pairwise([*loss_mask, 0])) if here > behind]
