"""Says when an answer ends, for engines that look at each new token themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from spmdrl.hub.model_files import eos_token_ids
from spmdrl.rollout.base import Answer, SamplingParams


@dataclass(frozen=True)
class StopRule:
    """The stops of a model's folder. Its tokenizer is loaded when a stop string is asked for."""

    folder: str

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        return tuple(eos_token_ids(self.folder))

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        return params.stop_token_ids + (() if params.ignore_eos else self.eos_token_ids)

    def forbid(
        self, logits: Tensor, answers: Sequence[Answer | None], params: SamplingParams
    ) -> None:
        """Makes stops impossible where an answer is too short to end. logits: (num_rows, vocab) of
        the answers, which have the same params; changed in place.
        """
        if not params.min_tokens:
            return
        young = [
            row for row, answer in enumerate(answers)
            if answer is not None and len(answer.token_ids) < params.min_tokens
        ]  # fmt: skip
        stops = torch.tensor(self.stop_ids(params), dtype=torch.int64, device=logits.device)
        logits[torch.tensor(young, dtype=torch.int64)[:, None], stops] = float("-inf")

    def note(self, answer: Answer, token: int, logprob: float, version: int) -> None:
        """Gives an answer its next token, which the weights of `version` chose, and its
        finish_reason.
        """
        answer.token_ids.append(token)
        answer.logprobs.append(logprob)
        answer.versions.append(version)
        answer.finish_reason = self.finish_reason(answer)

    def finish_reason(self, answer: Answer) -> str | None:
        """Returns why the answer ends with its last token; None while it goes on."""
        token_ids, params = answer.token_ids, answer.params
        if token_ids[-1] in self.stop_ids(params):
            return "stop"
        turn = token_ids[answer.request.num_earlier :] if params.stop else token_ids
        if len(token_ids) > params.min_tokens and self.ends_in_stop(turn, params.stop):
            return "stop"
        return "length" if len(token_ids) == answer.request.limit(params) else None

    def ends_in_stop(self, token_ids: list[int], stops: tuple[str, ...]) -> bool:
        """Whether the last token completed a stop string."""
        if not stops:
            return False
        # a character is at most 4 tokens of one byte each
        tail = token_ids[-4 * max(len(stop) for stop in stops) - 4 :]
        before = self.tokenizer.decode(tail[:-1], skip_special_tokens=True)
        text = self.tokenizer.decode(tail, skip_special_tokens=True)
        return any(stop in text[max(0, len(before) - len(stop) + 1) :] for stop in stops)
