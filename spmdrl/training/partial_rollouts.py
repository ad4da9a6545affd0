"""Keeps what a step asked and did not train on: it comes first in the next one
(rollout.oversample).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from spmdrl.checkpoint.safe_load import read_plain
from spmdrl.config import ConfigError, RolloutConfig, support_width
from spmdrl.rollout.agents.samples import from_json, to_json
from spmdrl.rollout.answer_codec import pack, unpack
from spmdrl.rollout.base import Completion
from spmdrl.rollout.sampling import SampleRequest, as_samples, completion_of
from spmdrl.types import Prompt, Sample

FORMAT = 2  # of the file


@dataclass
class PartialRollouts:
    """Groups that were not complete, or complete when the step had enough.

    `prompts` and `questions` are the same on every rank of the rollout; `samples` are those that
    ended on this rank.
    """

    config: RolloutConfig
    prompts: list[tuple[int, Prompt]] = field(default_factory=list)  # (group, prompt)
    questions: list[SampleRequest] = field(default_factory=list)  # unanswered, some of them begun
    samples: list[Sample] = field(default_factory=list)  # not scored yet
    demonstrations: int = 0  # algo.demonstrations: so many of a group are not asked
    by_agents: bool = False  # agents make the samples; those that had begun begin anew after a load

    def renumbered(self) -> list[tuple[int, Prompt]]:
        """Gives the groups the numbers 0, 1, ... and returns `prompts`."""
        number = {group: i for i, (group, _) in enumerate(self.prompts)}
        self.prompts = [(number[group], prompt) for group, prompt in self.prompts]
        self.questions = [replace(q, group=number[q.group]) for q in self.questions]
        for sample in self.samples:
            sample.group = number[sample.group]
        return self.prompts

    def save(self, file: BinaryIO) -> None:
        """This rank's part, with all questions."""
        begun = {i: q.begun for i, q in enumerate(self.questions) if q.begun is not None}
        by_agents = [to_json(s) for s in self.samples] if self.by_agents else []
        said = [] if self.by_agents else self.samples
        ended = {i: completion_of(s) for i, s in enumerate(said)}
        torch.save(
            {
                "format": FORMAT,
                "n": self.config.n,
                "demonstrations": self.demonstrations,
                "max_tokens": self.config.max_tokens,
                "prompts": table([(group, prompt.id) for group, prompt in self.prompts], 2),
                "questions": table([(q.group, q.index, q.seed) for q in self.questions], 3),
                "begun": as_bytes(begun),
                "samples": table([(s.group, s.index) for s in self.samples], 2),
                "ended": as_bytes(ended),
                "by_agents": self.by_agents,
                "trajectories": by_agents,
            },
            file,
        )

    def load(
        self, paths: list[Path], prompt_of: Callable[[int], Prompt], tokenizer: Any, rank: int,
        world: int, replays_experts: bool = False,
    ) -> None:  # fmt: skip
        """Loads what all ranks saved, and of the samples this rank's part, on any number of ranks.

        Raises ConfigError where begun answers do not fit what is asked now.
        """
        shares = [read_plain(path) for path in paths]
        first = shares[0]
        if first.get("format") != FORMAT:
            raise ConfigError(
                "the checkpoint holds unfinished answers as an earlier version of spmdrl wrote "
                "them: drop them with --rollout.oversample 1"
            )
        if first.get("by_agents", False) != self.by_agents:
            raise ConfigError(
                "the checkpoint holds samples begun "
                f"{'without' if self.by_agents else 'by'} agents, and this run samples otherwise: "
                "drop them with --rollout.oversample 1"
            )
        given = first.get("demonstrations", 0)
        if self.demonstrations != given:
            raise ConfigError(
                f"the checkpoint holds answers begun with algo.demonstrations={given}; this run "
                f"has {self.demonstrations}. Keep it, or drop what was begun with "
                "--rollout.oversample 1"
            )
        if self.config.n != first["n"] or self.config.max_tokens < first["max_tokens"]:
            raise ConfigError(
                f"the checkpoint holds answers begun with rollout.n={first['n']}, max_tokens="
                f"{first['max_tokens']}; this run has n={self.config.n}, max_tokens="
                f"{self.config.max_tokens}. Keep n and at least as many tokens, or drop what was "
                "begun with --rollout.oversample 1"
            )
        self.prompts = [(group, prompt_of(id)) for group, id in first["prompts"].tolist()]
        prompts = dict(self.prompts)
        begun = unpack(first["begun"].numpy().tobytes())
        self.questions = [
            SampleRequest(prompts[group], group, index, seed, begun.get(i))
            for i, (group, index, seed) in enumerate(first["questions"].tolist())
        ]
        self.samples = []
        for share in shares[rank::world]:
            asked = [
                SampleRequest(prompts[group], group, index, seed=0)
                for group, index in share["samples"].tolist()
            ]
            if self.by_agents:
                saved = zip(share["trajectories"], asked, strict=True)
                self.samples += [from_json(s, q.prompt, q.group, q.index) for s, q in saved]
                continue
            ended = unpack(share["ended"].numpy().tobytes())
            self.samples += as_samples(asked, [ended[i] for i in range(len(asked))], tokenizer)
        known: list[Sample | Completion] = [*self.samples]
        known += [q.begun for q in self.questions if q.begun is not None]
        if replays_experts and any(each.routed_experts is None for each in known):
            raise ConfigError(
                "the checkpoint holds answers begun without actor.router_replay, of which nobody "
                "knows the experts: leave it out, or drop what was begun with "
                "--rollout.oversample 1"
            )
        widths = {0 if s.support_ids is None else s.support_ids.shape[1] for s in known}
        width = support_width(self.config)
        if width and widths - {width}:
            raise ConfigError(
                "the checkpoint holds answers begun without rollout.keep_sampling_mask or with "
                "another rollout.top_k, of which nobody knows among which tokens they were drawn: "
                "set both as they were, or drop what was begun with --rollout.oversample 1"
            )


def table(rows: list[tuple[int, ...]], columns: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, columns)


def as_bytes(answers: dict[int, Completion]) -> Tensor:
    return torch.frombuffer(bytearray(pack(answers)), dtype=torch.uint8)
