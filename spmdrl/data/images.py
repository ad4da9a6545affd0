"""Images of prompts: from a row of the data to what a vision tower is given.

    images   [{"bytes": b"..."}], [{"path": "a.png"}], ["a.png"] or ["data:image/png;base64,..."]
    prompt   [{"role": "user", "content": "<image>How many are red?"}]

"<image>" says where each image stands; TRL's content parts, {"type": "image"}, do too. The chat
template writes one placeholder token for it, in whose place stand then the image's tokens: one for
each vector of the tower, and those that some families put between them (hub/vision_families.py).
Pixels do not travel: whoever needs them reads them from its own copy of the data.
"""

from __future__ import annotations

import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoImageProcessor, PreTrainedConfig
from transformers.utils import cached_file

from spmdrl.config import ConfigError, DataConfig, SftDataConfig
from spmdrl.data.pictures import open_picture, size_of
from spmdrl.data.reply_images import (
    from_bytes,
    images_of_sample,
    key_of,
    keys_in,
    to_bytes,
)
from spmdrl.data.table_files import BadRow
from spmdrl.distributed.collectives import broadcast_object
from spmdrl.hub.hf_folder import load_tokenizer, sees_images
from spmdrl.hub.vision_families import FAMILIES, ImageSizes, Pixels
from spmdrl.types import Batch, Picture, PlacedImage, Sample

CACHE_BYTES = 1 << 30  # of pixels that a rank keeps, to look at them again
MOST_LAYOUTS = 1 << 14
FILES = (
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
    "chat_template.json", "tiktoken.model",
)  # fmt: skip


@dataclass(frozen=True)
class PromptImages:
    """Holds what a prompt is to a model with a vision tower.

    pixels: of each image, what the image processor made of it, by name; spans: (first token,
    tokens) of each; is_image: (prompt tokens,) bool, the tokens that the tower's vectors stand for;
    positions: (3, prompt tokens) int64, of multimodal rotary embeddings, None in other families.
    """

    pixels: list[Pixels]
    spans: list[tuple[int, int]]
    is_image: Tensor
    positions: Tensor | None
    digests: list[str]

    @property
    def next_position(self) -> int:
        """Returns the position of the first token behind the prompt; the later ones count on from
        there.
        """
        if self.positions is None:
            return len(self.is_image)
        return int(self.positions.max()) + 1 if self.positions.numel() else 0


@dataclass(frozen=True)
class LooksAhead:
    """Tokens of a packed row that see each other, also those behind them: those of one image.

    blocks: (num_tokens,) int64 on the CPU, the number of a token's image, -1 for other tokens;
    windows_alone: they do so only in layers with a sliding window.
    """

    blocks: Tensor
    windows_alone: bool


@dataclass(frozen=True)
class ImageInputs:
    """The images of packed sequences, on their device.

    pixels: by the names of the model's own arguments, all images in one; is_image: (num_tokens,)
    bool; positions: (3, num_tokens), or None; ahead: which tokens see each other, also those behind
    them; None: none do; own: which of the tower's vectors stand at these tokens; None: all.
    """

    pixels: Pixels
    is_image: Tensor
    positions: Tensor | None
    ahead: LooksAhead | None
    own: slice | None

    def of_tokens(self, first: int, count: int) -> ImageInputs:
        """Returns the same images for a run of the tokens; there may be none of it behind the last.
        `ahead` stays that of all tokens.
        """
        behind = max(0, first + count - len(self.is_image))
        before = int(self.is_image[:first].sum())
        is_image = pad(self.is_image, (0, behind))[first : first + count]
        positions = self.positions
        if positions is not None:
            positions = pad(positions, (0, behind))[:, first : first + count]
        own = slice(before, before + int(is_image.sum()))
        return replace(self, is_image=is_image, positions=positions, own=own)


class ImageProcessor:
    """A model's image processor, and which tokens stand for an image."""

    def __init__(self, config: PreTrainedConfig, processor: Any, ids: Mapping[str, int]) -> None:
        """ids: of the family's further tokens."""
        self.family = FAMILIES[config.model_type]
        self.sizes = ImageSizes(processor, config, self.family.options(config), ids)
        self.token_id: int = config.image_token_id
        self.cache: OrderedDict[str, Pixels] = OrderedDict()
        self.cached_bytes = 0
        self.known: dict[str, list[int]] = {}  # layouts by digest, so that files are read once

    @property
    def processor(self) -> Any:
        return self.sizes.processor

    @classmethod
    def load(
        cls, model: str, config: PreTrainedConfig, data: DataConfig | SftDataConfig
    ) -> ImageProcessor | None:
        """None where the model sees no images. Raises ConfigError."""
        if not sees_images(config):
            return None
        processor, family = load_processor(model), FAMILIES[config.model_type]
        set_pixels(processor, config, data)
        ids: dict[str, int] = {}
        if family.others:
            tokenizer = load_tokenizer(model)
            ids = {name: tokenizer.convert_tokens_to_ids(name) for name in family.others}
        return cls(config, processor, ids)

    def layout(self, picture: Picture) -> list[int]:
        """Returns the ids of the tokens that an image becomes. Raises BadRow for one that has none,
        or is far too long a strip.
        """
        try:
            key = picture.digest
        except OSError as error:
            raise BadRow(f"field 'images': {picture} cannot be read: {error!r}") from error
        if key not in self.known:
            width, height = size_of(picture)
            try:
                self.known[key] = self.family.layout(self.sizes, height, width)
            except ValueError as error:
                raise BadRow(f"field 'images': {picture}, {width} x {height}: {error}") from error
            if len(self.known) > MOST_LAYOUTS:
                del self.known[next(iter(self.known))]
        return self.known[key]

    def layouts(self, ids: list[int], pictures: Sequence[Picture]) -> list[list[int]]:
        """Returns what each of the template's tokens becomes: a placeholder the tokens of its
        image, all others themselves.

        Raises BadRow where the template wrote more or fewer placeholders than there are images.
        """
        if ids.count(self.token_id) != len(pictures):
            raise BadRow(
                f"field 'images': {len(pictures)} of them, but the chat template gives "
                f"{ids.count(self.token_id)} image tokens"
            )
        images = map(self.layout, pictures)
        return [next(images) if id == self.token_id else [id] for id in ids]

    def placed(self, ids: list[int], pictures: Sequence[Picture]) -> list[int]:
        """The template's token ids, with the tokens of the images. Raises BadRow."""
        return [id for tokens in self.layouts(ids, pictures) for id in tokens]

    def located(
        self, ids: list[int], pictures: Sequence[Picture]
    ) -> tuple[list[int], list[PlacedImage]]:
        """Returns the same token ids, and where each image begins among them. Raises BadRow."""
        layouts = self.layouts(ids, pictures)
        starts = accumulate(map(len, layouts), initial=0)
        firsts = [start for start, id in zip(starts, ids, strict=False) if id == self.token_id]
        return [id for tokens in layouts for id in tokens], [
            PlacedImage(first, picture) for first, picture in zip(firsts, pictures, strict=True)
        ]

    def view(
        self, prompt_ids: Sequence[int], pictures: Sequence[Picture],
        replies: Sequence[PlacedImage] = (),
    ) -> PromptImages:  # fmt: skip
        """pictures: of the prompt. With replies that show images `prompt_ids` are those of prompt
        and answer.
        """
        spans = self.spans(prompt_ids, pictures)
        spans += [(first, len(self.layout(picture))) for first, picture in replies]
        pictures = [*pictures, *(reply.picture for reply in replies)]
        pixels = [self.pixels(picture) for picture in pictures]
        is_image = torch.zeros(len(prompt_ids), dtype=torch.bool)
        for first, count in spans:
            ids = torch.tensor(prompt_ids[first : first + count])
            is_image[first : first + count] = ids == self.token_id
        positions = None
        if self.family.mrope:
            merge = self.sizes.config.vision_config.spatial_merge_size
            grids = [each["image_grid_thw"] // torch.tensor([1, merge, merge]) for each in pixels]
            grid = torch.cat(grids) if grids else torch.empty(0, 3, dtype=torch.int64)
            positions = rope_positions(len(prompt_ids), spans, grid)
        digests = [picture.digest for picture in pictures]
        return PromptImages(pixels, spans, is_image, positions, digests)

    def spans(
        self, prompt_ids: Sequence[int], pictures: Sequence[Picture]
    ) -> list[tuple[int, int]]:  # fmt: skip
        """Raises ValueError where the tokens are of other images."""
        spans, first = [], 0
        for picture in pictures:
            wanted = self.layout(picture)
            first = prompt_ids.index(self.token_id, first)
            if list(prompt_ids[first : first + len(wanted)]) != wanted:
                raise ValueError("the images of a prompt have changed since it was tokenised")
            spans.append((first, len(wanted)))
            first += len(wanted)
        return spans

    def pixels(self, picture: Picture) -> Pixels:
        """Says what the image processor makes of an image, float32 where it is pixels."""
        key = picture.digest
        if key not in self.cache:
            self.cache[key] = found = self.processed(open_picture(picture))
            self.cached_bytes += num_bytes(found)
            while self.cached_bytes > CACHE_BYTES and len(self.cache) > 1:
                _, oldest = self.cache.popitem(last=False)
                self.cached_bytes -= num_bytes(oldest)
        self.cache.move_to_end(key)
        return self.cache[key]

    def processed(self, image: Image.Image) -> Pixels:
        made = self.processor(images=[image], return_tensors="pt", **self.sizes.options)
        found = {name: made[name] for name in self.family.inputs}
        return found | {"pixel_values": found["pixel_values"].float()}

    @cached_property
    def nothing(self) -> Pixels:
        """Pixels of the smallest image there is."""
        small = self.processed(Image.new("RGB", (28, 28)))
        return self.family.least(small, self.sizes.config)


def num_bytes(pixels: Pixels) -> int:
    return sum(part.nbytes for part in pixels.values())


def set_pixels(
    processor: Any, config: PreTrainedConfig, data: DataConfig | SftDataConfig
) -> None:  # fmt: skip
    """Has images scaled to what the data config says. Raises ConfigError."""
    edges = ("shortest_edge", data.image_min_pixels), ("longest_edge", data.image_max_pixels)
    limits = {edge: limit for edge, limit in edges if limit is not None}
    if not FAMILIES[config.model_type].in_pixels:
        if limits:
            raise ConfigError(
                "data.image_min_pixels and image_max_pixels are not of model type "
                f"{config.model_type!r}, whose images have sizes of their own: leave them out"
            )
        return
    processor.size = replace(processor.size, **limits)
    least, most = processor.size.shortest_edge, processor.size.longest_edge
    if least > most:
        raise ConfigError(
            f"data.image_min_pixels={least} is above image_max_pixels={most} (one of them may "
            "be what the model's preprocessor_config.json says)"
        )


def together(several: Sequence[Pixels]) -> Pixels:
    """All images in one, by name: along the first axis; the others are padded to the largest."""
    return {name: padded_cat([each[name] for each in several]) for name in several[0]}


def padded_cat(parts: Sequence[Tensor]) -> Tensor:
    widest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    wide = []
    for part in parts:
        missing = [most - size for most, size in zip(widest, part.shape[1:], strict=True)]
        wide.append(pad(part, [n for more in reversed(missing) for n in (0, more)]))
    return torch.cat(wide)


@dataclass(frozen=True)
class ImageLimits:
    """The size and number of images that a rollout engine must be ready for."""

    vision: ImageProcessor
    per_prompt: int  # images, at most; 0: none
    tokens: int  # of the largest
    size: tuple[int, int]  # its width and height

    def with_replies(self, most: int, tokens: int, section: str = "multi_turn") -> ImageLimits:
        """Returns the limits where replies show as many images, each of so many tokens at most.
        Raises ConfigError where even the smallest image has more. section: of the config, that has
        these limits.
        """
        side, found = largest_square(self.vision, tokens)
        if found == 0:
            raise ConfigError(
                f"{section}.max_image_tokens={tokens}: an image of this model has more"
            )
        limits = replace(self, per_prompt=self.per_prompt + most)
        if found < self.tokens:
            return limits
        return replace(limits, tokens=max(tokens, self.tokens), size=(side, side))


def largest_square(vision: ImageProcessor, most: int) -> tuple[int, int]:
    """(side in pixels, tokens) of the largest square image of at most so many tokens; tokens 0
    where there is none.
    """
    best = (0, 0)
    for power in range(3, 13):
        for side in (2**power, 3 * 2 ** (power - 1)):
            with suppress(ValueError):  # too small for the processor
                tokens = len(vision.family.layout(vision.sizes, side, side))
                if best[1] < tokens <= most:
                    best = (side, tokens)
    return best


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
        self.replies: dict[int, Picture] = {}  # what the numbers in Batch.reply_images stand for

    def mark(self, batch: Batch, samples: Sequence[Sample]) -> None:
        """Sets the reply_images of a batch of these samples, and keeps the images."""
        batch.reply_images = torch.zeros(batch.num_tokens, dtype=torch.int64)
        for sample, start in zip(samples, batch.cu_seqlens.tolist(), strict=False):
            for first, picture in images_of_sample(self.vision, sample):
                self.replies[key_of(picture)] = picture
                batch.reply_images[start + first] = key_of(picture)

    def share_replies(
        self, batch: Batch, group: dist.ProcessGroup, device: torch.device, source: int = 0
    ) -> None:
        """Gives the images of its replies, which the group's rank `source` has, to the others.
        Collective over the group.
        """
        if batch.reply_images is None:
            return
        keys = keys_in(batch.reply_images)
        sent = to_bytes(self.replies, keys) if dist.get_rank(group) == source else None
        self.replies |= from_bytes(broadcast_object(sent, group, source, device))

    def scene(self, batch: Batch) -> ImageInputs:
        """A batch without images gets the smallest one, which no token stands for: the tower's
        weights are sharded, so every rank has to pass through it."""
        starts, lens = batch.cu_seqlens.tolist(), batch.seq_lens.tolist()
        views = self.views(batch)
        is_image = torch.zeros(batch.num_tokens, dtype=torch.bool)
        blocks = torch.full((batch.num_tokens,), -1)
        number = 0
        for start, length, view in zip(starts, lens, views, strict=False):
            known = min(len(view.is_image), length)
            is_image[start : start + known] = view.is_image[:known]
            for first, count in view.spans:
                blocks[start + first : start + first + count] = number
                number += 1
        blocks[~is_image] = -1
        device = batch.token_ids.device
        is_image = is_image.to(device)
        if bool((batch.token_ids[is_image] != self.vision.token_id).any()):
            raise ValueError("a sequence and the data of its prompt disagree about images")
        pixels = together([p for view in views for p in view.pixels] or [self.vision.nothing])
        kind = self.vision.family.looks_ahead(self.vision.sizes.config)
        return ImageInputs(
            {name: part.to(device) for name, part in pixels.items()}, is_image,
            self.positions(batch, views) if self.vision.family.mrope else None,
            LooksAhead(blocks, kind == "window") if number and kind else None,
            None if number else slice(0),
        )  # fmt: skip

    def positions(self, batch: Batch, views: Sequence[PromptImages]) -> Tensor:
        """(3, num_tokens) int64 on the batch's device."""
        parts = []
        for length, view in zip(batch.seq_lens.tolist(), views, strict=True):
            assert view.positions is not None
            known = min(view.positions.shape[1], length)
            behind = torch.arange(length - known) + view.next_position
            parts += [view.positions[:, :known], behind.expand(3, -1)]
        return torch.cat(parts, 1).to(batch.token_ids.device)

    def views(self, batch: Batch) -> list[PromptImages]:
        """Returns what each sequence is to the model; an id of a prompt is negative where it is of
        none.
        """
        ids, bounds = batch.prompts.tolist(), batch.cu_seqlens.tolist()
        marks = batch.reply_images
        tokens = marks.nonzero().flatten().tolist() if marks is not None else []
        found = []
        for id, (start, end) in zip(ids, pairwise(bounds), strict=True):
            own = [t for t in tokens if start <= t < end]
            prompt = self.prompt(id) if id >= 0 else None
            images = prompt.images if prompt is not None else ()
            if own:
                assert marks is not None
                shown = [PlacedImage(t - start, self.replies[int(marks[t])]) for t in own]
                sequence = batch.token_ids[start:end].tolist()
                found.append(self.vision.view(sequence, images, shown))
            else:
                found.append(self.vision.view(prompt.token_ids if prompt else [], images))
        return found


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
    """The files that a model's processor is made of, to be written beside its weights. Python files
    that these name are copied with them, and not run.
    """

    model: str

    def save_pretrained(self, folder: str | Path) -> None:
        for name in FILES:
            found = cached_file(self.model, name, _raise_exceptions_for_missing_entries=False)
            if found is not None:
                shutil.copy(found, folder)
                for code in Path(found).parent.glob("*.py"):
                    shutil.copy(code, folder)


def same_pixels(model: str, other: str) -> bool:
    """Whether both are given the same numbers for an image. Raises ConfigError."""
    mine, theirs = (load_processor(name).to_dict() for name in (model, other))
    names = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std",
             "rescale_factor", "size", "crop_to_patches", "min_patches", "max_patches",
             "max_soft_tokens", "pooling_kernel_size", "do_pan_and_scan", "in_token_limit",
             "merge_kernel_size", "pad_input")  # fmt: skip
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
