"""A batch as the teacher of self-distillation reads it: the same answers behind prompts with hints.

    student   [q q q | y1 y2 y3]
    teacher   [q q q h h h | y1 y2 y3]

What the teacher says of y1, y2, y3 is put back in the places that they have in the student's batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spmdrl.config import ConfigError, PpoConfig
from spmdrl.data.images import BatchImages
from spmdrl.data.packing import empty_batch
from spmdrl.data.prompts import PromptDataset
from spmdrl.data.source_adapters import OTHERS, AdapterRoutes, adapter_routes_of
from spmdrl.distributed.placement import TEACHERS
from spmdrl.distributed.topology import Topology
from spmdrl.rollout.multi_turn.reply_encoder import prompts_of
from spmdrl.types import Batch, PolicyStats, Prompt


class HintedBatch(NamedTuple):
    """A batch with hints in its prompts, and where the tokens behind the prompts are."""

    batch: Batch
    places: Tensor  # (n,) int64, in this batch
    own_places: Tensor  # (n,) int64, in the batch without hints
    own_tokens: int  # of the batch without hints

    def placed(self, stats: PolicyStats) -> PolicyStats:
        """Returns what was found of this batch's tokens, in the places of the other's; 0 else."""

        def moved(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            found = values.new_zeros(self.own_tokens, *values.shape[1:])
            found[self.own_places] = values[self.places]
            return found

        return PolicyStats(*map(moved, stats))  # type: ignore[arg-type]


class HintedPrompts:
    """Looks up prompts with their hints, by the ids of the data's rows."""

    def __init__(self, prompts: PromptDataset, images: BatchImages | None) -> None:
        """images: of the prompts without hints; None where no sequence shows an image."""

        def pair(row: int) -> tuple[Prompt, Prompt]:
            return prompts.by_id(row), prompts.hinted(row)

        self.pair = lru_cache(maxsize=1024)(pair)  # of a prompt without and with its hint
        self.images: BatchImages | None = None
        if images is not None:
            self.images = BatchImages(images.vision, lambda row: self.pair(row)[1])
            self.images.replies = images.replies  # both know the same

    def put_into(self, batch: Batch) -> HintedBatch:
        return with_hints(batch, self.pair)


class TeacherRoutes:
    """Says which of several teachers a sequence belongs to, by the data source of its prompt."""

    def __init__(self, config: PpoConfig, prompts: PromptDataset) -> None:
        self.teachers = config.teachers
        self.source = lru_cache(maxsize=65536)(prompts.data_source)  # of a prompt's id

    def rows(self, batch: Batch, name: str) -> list[int]:
        """Returns the sequences of the teacher whose role, or whose key of an endpoint with
        "teachers." before it, is `name`.
        """
        return [i for i, row in enumerate(batch.prompts.tolist())
                if f"{TEACHERS}{teacher_of(self.teachers, self.source(row))}" == name]  # fmt: skip


def teacher_of(teachers: Mapping[str, Any], data_source: str) -> str | None:
    """Returns the key of the teacher of a data source; None where it has none."""
    key = data_source if data_source in teachers else OTHERS
    found = teachers.get(key)
    if isinstance(found, str):  # another source, which has the same
        return found
    return None if found is None else key


def check_sources(config: PpoConfig, data_sources: Sequence[str]) -> None:
    """Raises ConfigError where a data source has no teacher, or a teacher no data source."""
    teachers = config.teachers
    if not teachers:
        return
    lacking = [source for source in data_sources if teacher_of(teachers, source) is None]
    if lacking:
        raise ConfigError(
            f"teachers has {[*teachers]}, and none for data_source {lacking[0]!r}: name its "
            "teacher, or one for all other sources under '*'"
        )
    used = {teacher_of(teachers, source) for source in data_sources} | {*data_sources, OTHERS}
    unused = [key for key in teachers if key not in used]
    if unused:
        raise ConfigError(
            f"teachers[{unused[0]!r}]: no row has this data_source; the data has "
            f"{', '.join(map(repr, data_sources))}"
        )


def routes_of(config: PpoConfig, prompts: PromptDataset) -> TeacherRoutes | None:
    """None where there are not several teachers."""
    return TeacherRoutes(config, prompts) if config.teachers else None


def hints_of(prompts: PromptDataset, images: BatchImages | None) -> HintedPrompts | None:
    """None where no teacher sees hints (data.hint_key). images: as of HintedPrompts."""
    return None if prompts.hints is None else HintedPrompts(prompts, images)


def load_again(
    config: PpoConfig, tokenizer: Any, topology: Topology
) -> tuple[HintedPrompts | None, TeacherRoutes | None, AdapterRoutes | None]:
    """Reads the prompts of a run again, where its teachers or its adapters ask for more than kept
    samples have.

    For a replay of its steps, which asks for no rewards and shows no images. Collective.
    """
    lora = config.actor.lora
    if config.data.hint_key is None and not config.teachers and not (lora and lora.by_source):
        return None, None, None
    prompts = PromptDataset.load(
        config.data.train, tokenizer, prompts_of(config), topology, hinted=True,
        needs_truth=lambda source: False, takes_truth=lambda source: False,
    )  # fmt: skip
    adapters = adapter_routes_of(lora, prompts.data_source)
    return hints_of(prompts, images=None), routes_of(config, prompts), adapters


def with_hints(batch: Batch, pair: Callable[[int], tuple[Prompt, Prompt]]) -> HintedBatch:
    """Returns the batch with its prompts exchanged. All that stands behind a prompt is kept.

    pair: the prompt of an id without and with its hint. Raises ConfigError where a sequence does
    not begin with its prompt.
    """
    bounds = batch.cu_seqlens.tolist()
    lens: list[int] = []
    tokens, places, own_places = [batch.token_ids[:0]], [bounds_of(0, 0)], [bounds_of(0, 0)]
    start = 0
    for row, (first, end) in zip(batch.prompts.tolist(), pairwise(bounds), strict=True):
        plain, hinted = pair(row)
        behind = first + len(plain.token_ids)
        if batch.token_ids[first:behind].tolist() != plain.token_ids:
            raise ConfigError(
                f"data.hint_key: an answer to row {row} does not begin with the prompt that the "
                "data has now, so that its hint has no place"
            )
        tokens += [torch.tensor(hinted.token_ids), batch.token_ids[behind:end]]
        lens.append(len(hinted.token_ids) + end - behind)
        places.append(bounds_of(start + len(hinted.token_ids), start + lens[-1]))
        own_places.append(bounds_of(behind, end))
        start += lens[-1]
    found = empty_batch(
        torch.tensor(lens, dtype=torch.int64), batch.reward_components.shape[1],
        reply_images=batch.reply_images is not None,
    )  # fmt: skip
    there, here = torch.cat(places), torch.cat(own_places)
    found.token_ids = torch.cat(tokens)
    for name in ("groups", "indices", "prompts", "valid", "adapters"):
        setattr(found, name, getattr(batch, name))
    found.loss_mask[there] = batch.loss_mask[here]
    if found.reply_images is not None and batch.reply_images is not None:
        found.reply_images[there] = batch.reply_images[here]
    return HintedBatch(found, there, here, batch.num_tokens)


def bounds_of(first: int, end: int) -> Tensor:
    """first, first + 1, ... end - 1, int64."""
    return torch.arange(first, end, dtype=torch.int64)
