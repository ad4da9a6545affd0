"""Images of prompts: from a row of the data to what a vision tower is given.

    images   [{"bytes": b"..."}], [{"path": "a.png"}], ["a.png"] or ["data:image/png;base64,..."]
    prompt   [{"role": "user", "content": "<image>How many are red?"}]

"<image>" says where each image stands; TRL's content parts, {"type": "image"}, do too. The chat
template writes one placeholder token for it, of which there are then as many as the tower gives
vectors. Pixels do not travel: whoever needs them reads them from its own copy of the data.
"""

from __future__ import annotations

import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    PreTrainedConfig,
)
from transformers.utils import cached_file

from spmdrl.config import ConfigError, DataConfig, SftDataConfig
from spmdrl.data.pictures import open_picture, size_of
from spmdrl.data.table_files import BadRow
from spmdrl.hub.hf_folder import sees_images
from spmdrl.types import Batch, Picture

CACHE_BYTES = 1 << 30  # of pixels that a rank keeps, to look at them again
FILES = (
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
    "chat_template.json",
)  # fmt: skip


@dataclass(frozen=True)
class PromptImages:
    """Holds what a prompt is to a model with a vision tower.

    pixels: of each image, (patches, channels * patch area) float32 by the image processor; grids:
    (num_images, 3) int64, patches in time, height and width; spans: (first token, tokens) of each;
    positions: (3, prompt tokens) int64, of multimodal rotary embeddings.
    """

    pixels: list[Tensor]
    grids: Tensor
    spans: list[tuple[int, int]]
    positions: Tensor
    digests: list[str]

    @property
    def next_position(self) -> int:
        """Returns the position of the first token behind the prompt; the later ones count on from
        there.
        """
        return int(self.positions.max()) + 1 if self.positions.numel() else 0


@dataclass(frozen=True)
class ImageInputs:
    """The images of packed sequences, on their device.

    pixels (patches, size) float32, grids (num_images, 3), is_image (num_tokens,) bool, positions
    (3, num_tokens).
    """

    pixels: Tensor
    grids: Tensor
    is_image: Tensor
    positions: Tensor


class ImageProcessor:
    """A model's image processor, and which tokens stand for an image."""

    def __init__(self, config: PreTrainedConfig, processor: Any) -> None:
        self.processor = processor
        self.token_id: int = config.image_token_id
        self.merge: int = config.vision_config.spatial_merge_size  # patches a side per token
        self.cache: OrderedDict[str, tuple[Tensor, Tensor]] = OrderedDict()
        self.cached_bytes = 0

    @classmethod
    def load(
        cls, model: str, config: PreTrainedConfig, data: DataConfig | SftDataConfig
    ) -> ImageProcessor | None:
        """None where the model sees no images. Raises ConfigError."""
        if not sees_images(config):
            return None
        processor = load_processor(model)
        edges = ("shortest_edge", data.image_min_pixels), ("longest_edge", data.image_max_pixels)
        limits = {edge: limit for edge, limit in edges if limit is not None}
        if limits:
            processor.size = replace(processor.size, **limits)
        least, most = processor.size.shortest_edge, processor.size.longest_edge
        if least > most:
            raise ConfigError(
                f"data.image_min_pixels={least} is above image_max_pixels={most} (one of them may "
                "be what the model's preprocessor_config.json says)"
            )
        return cls(config, processor)

    def num_tokens(self, picture: Picture) -> int:
        """Returns the number of tokens that an image takes, by its size. Raises BadRow for one that
        has none, or is far too long a strip.
        """
        width, height = size_of(picture)
        try:
            patches = self.processor.get_number_of_image_patches(height, width, {})
        except ValueError as error:
            raise BadRow(f"field 'images': {picture}, {width} x {height}: {error}") from error
        return patches // self.merge**2

    def times(self, ids: list[int], pictures: Sequence[Picture]) -> list[int]:
        """Returns how often each of the template's tokens is to stand there: a placeholder as often
        as its image wants it, all others once.

        Raises BadRow where the template wrote more or fewer placeholders than there are images.
        """
        if ids.count(self.token_id) != len(pictures):
            raise BadRow(
                f"field 'images': {len(pictures)} of them, but the chat template gives "
                f"{ids.count(self.token_id)} image tokens"
            )
        counts = map(self.num_tokens, pictures)
        return [next(counts) if id == self.token_id else 1 for id in ids]

    def placed(self, ids: list[int], pictures: Sequence[Picture]) -> list[int]:
        """The template's token ids, with as many placeholders as the images want. Raises BadRow."""
        return repeated(ids, self.times(ids, pictures))

    def view(self, prompt_ids: Sequence[int], pictures: Sequence[Picture]) -> PromptImages:
        found = [self.pixels(picture) for picture in pictures]
        grids = torch.stack([torch.empty(3, dtype=torch.int64), *(g for _, g in found)])[1:]
        spans = self.spans(prompt_ids, grids)
        return PromptImages(
            [pixels for pixels, _ in found], grids, spans,
            rope_positions(len(prompt_ids), spans, grids // torch.tensor([1, *[self.merge] * 2])),
            [picture.digest for picture in pictures],
        )  # fmt: skip

    def spans(self, prompt_ids: Sequence[int], grids: Tensor) -> list[tuple[int, int]]:
        """Raises ValueError where the tokens are of other images."""
        spans, first = [], 0
        for count in (grids.prod(1) // self.merge**2).tolist():
            first = prompt_ids.index(self.token_id, first)
            if any(id != self.token_id for id in prompt_ids[first : first + count]):
                raise ValueError("the images of a prompt have changed since it was tokenised")
            spans.append((first, count))
            first += count
        return spans

    def pixels(self, picture: Picture) -> tuple[Tensor, Tensor]:
        """(patches, size) float32 and (3,) int64."""
        key = picture.digest
        if key not in self.cache:
            made = self.processor(images=[open_picture(picture)], return_tensors="pt")
            found = made["pixel_values"].float(), made["image_grid_thw"][0]
            self.cache[key] = found
            self.cached_bytes += found[0].nbytes
            while self.cached_bytes > CACHE_BYTES and len(self.cache) > 1:
                _, (oldest, _) = self.cache.popitem(last=False)
                self.cached_bytes -= oldest.nbytes
        self.cache.move_to_end(key)
        return self.cache[key]

    def nothing(self) -> tuple[Tensor, Tensor]:
        """Pixels and grid of the smallest image there is, one token's."""
        grid = torch.tensor([[1, self.merge, self.merge]])
        return torch.zeros(self.merge**2, self.num_values), grid

    @cached_property
    def num_values(self) -> int:
        """Returns the number of values of a patch."""
        probe = self.processor(images=[Image.new("RGB", (64, 64))], return_tensors="pt")
        return probe["pixel_values"].shape[1]


def repeated(values: list[int], times: list[int]) -> list[int]:
    return [value for value, n in zip(values, times, strict=True) for _ in range(n)]


@dataclass(frozen=True)
class ImageLimits:
    """The size and number of images that a rollout engine must be ready for."""

    vision: ImageProcessor
    per_prompt: int  # images, at most; 0: none
    tokens: int  # of the largest


class Illustrated(Protocol):
    """A sequence, or its beginning: it has token ids, and the images that they show."""

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def images(self) -> tuple[Picture, ...]: ...


class BatchImages:
    """A training engine's: which images belong to the sequences of a batch.

    by_id: what Batch.prompts stands for.
    """

    def __init__(self, vision: ImageProcessor, by_id: Callable[[int], Illustrated]) -> None:
        self.vision = vision
        self.prompt = lru_cache(maxsize=512)(by_id)  # with images, encoded

    def scene(self, batch: Batch) -> ImageInputs:
        """A batch without images gets the smallest one, which no token stands for: the tower's
        weights are sharded, so every rank has to pass through it."""
        pixels, grids, firsts = [], [], []
        is_image = torch.zeros(batch.num_tokens, dtype=torch.bool)
        positions = torch.empty(3, batch.num_tokens, dtype=torch.int64)
        starts, lens = batch.cu_seqlens.tolist(), batch.seq_lens.tolist()
        for start, length, id in zip(starts, lens, batch.prompts.tolist(), strict=False):
            view = self.view(id)
            known = min(view.positions.shape[1], length)
            behind = torch.arange(length - known) + view.next_position
            positions[:, start : start + length] = torch.cat(
                [view.positions[:, :known], behind.expand(3, -1)], 1
            )
            pixels += view.pixels
            grids.append(view.grids)
            firsts += [(start + first, count) for first, count in view.spans]
        for first, count in firsts:
            is_image[first : first + count] = True
        device = batch.token_ids.device
        is_image = is_image.to(device)
        if bool((batch.token_ids[is_image] != self.vision.token_id).any()):
            raise ValueError("a sequence and the data of its prompt disagree about images")
        if not pixels:
            empty, grid = self.vision.nothing()
            pixels, grids = [empty], [grid]
        return ImageInputs(
            torch.cat(pixels).to(device), torch.cat(grids).to(device), is_image,
            positions.to(device),
        )  # fmt: skip

    def view(self, id: int) -> PromptImages:
        """id: of a prompt; negative where a sequence is of none."""
        if id < 0:
            return self.vision.view([], ())
        prompt = self.prompt(id)
        return self.vision.view(prompt.token_ids, prompt.images)


def rope_positions(num_tokens: int, spans: list[tuple[int, int]], grids: Tensor) -> Tensor:
    """(3, num_tokens) int64: in time, height and width.

    Text counts on in all three; an image's tokens have their row and column, and the text behind it
    goes on from its longer side. grids: (num_images, 3), in tokens. Source: Qwen2-VL, arXiv
    2409.12191, section 2.1; for still images Qwen2.5-VL and Qwen3-VL do the same.
    """
    parts: list[Tensor] = []
    end = position = 0
    for (first, count), (frames, rows, columns) in zip(spans, grids.tolist(), strict=True):
        parts.append((torch.arange(first - end) + position).expand(3, -1))
        position += first - end
        axes = [torch.arange(n) for n in (frames, rows, columns)]
        parts.append(torch.stack(torch.meshgrid(*axes, indexing="ij")).reshape(3, -1) + position)
        position, end = position + max(rows, columns), first + count
    parts.append((torch.arange(num_tokens - end) + position).expand(3, -1))
    return torch.cat(parts, 1)


@dataclass(frozen=True)
class ProcessorFiles:
    """The files that a model's processor is made of, to be written beside its weights."""

    model: str

    def save_pretrained(self, folder: str | Path) -> None:
        for name in FILES:
            found = cached_file(self.model, name, _raise_exceptions_for_missing_entries=False)
            if found is not None:
                shutil.copy(found, folder)


def same_pixels(model: str, other: str) -> bool:
    """Whether both are given the same numbers for an image. Raises ConfigError."""
    mine, theirs = (load_processor(name).to_dict() for name in (model, other))
    names = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std",
             "rescale_factor", "size")  # fmt: skip
    return all(mine.get(name) == theirs.get(name) for name in names)


def load_processor(model: str) -> Any:
    """Raises ConfigError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return AutoImageProcessor.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model: {model!r} sees images, but its preprocessor_config.json does not load: {error}"
        ) from error
