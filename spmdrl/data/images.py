"""Images and videos of prompts: from a row of the data to what a vision tower is given.

    images   [{"bytes": b"..."}], [{"path": "a.png"}], ["a.png"] or ["data:image/png;base64,..."]
    prompt   [{"role": "user", "content": "<image>How many are red?"}]

"<image>" says where each image stands; TRL's content parts, {"type": "image"}, do too. The chat
template writes one placeholder token for it, in whose place stand then the image's tokens: one for
each vector of the tower, and those that some families put between them (hub/vision_families.py).
Pixels do not travel: whoever needs them reads them from its own copy of the data. A video is among
the images of a prompt: the tower takes it as an image with several steps in time (videos.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from spmdrl.config import DataConfig, SftDataConfig
from spmdrl.data.pictures import open_picture, size_of
from spmdrl.data.processor_files import load_processor, set_pixels
from spmdrl.data.reply_images import (
    from_bytes,
    images_of_sample,
    key_of,
    keys_in,
    to_bytes,
)
from spmdrl.data.rope_positions import rope_positions
from spmdrl.data.table_files import BadRow
from spmdrl.data.videos import Clip, VideoProcessor, num_videos, sees_no_videos
from spmdrl.data.visuals import Video, Visual
from spmdrl.distributed.collectives import broadcast_object
from spmdrl.hub.hf_folder import load_tokenizer, sees_images
from spmdrl.hub.vision_families import FAMILIES, ImageSizes, Pixels
from spmdrl.types import Batch, Picture, PlacedImage, Sample

CACHE_BYTES = 1 << 30  # of pixels that a rank keeps, to look at them again
MOST_LAYOUTS = 1 << 14


@dataclass(frozen=True)
class PromptImages:
    """Holds what a prompt is to a model with a vision tower.

    pictures: its images and videos; look: makes the pixels of one; spans: (first token, tokens) of
    each; is_image: (prompt tokens,) bool, the tokens that the tower's vectors stand for;
    positions: (3, prompt tokens) int64, of multimodal rotary embeddings, None in other families;
    clips: of each what it is as a video, None for an image.
    """

    pictures: Sequence[Visual]
    look: Callable[[Visual], Pixels]
    spans: list[tuple[int, int]]
    is_image: Tensor
    positions: Tensor | None
    digests: list[str]
    clips: list[Clip | None]

    @property
    def pixels(self) -> list[Pixels]:
        """Returns of each image what the image processor makes of it, by name. A pipeline stage
        without the tower does not ask.
        """
        return [self.look(picture) for picture in self.pictures]

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

    def __init__(
        self, config: PreTrainedConfig, processor: Any, ids: Mapping[str, int],
        videos: VideoProcessor | None = None,
    ) -> None:  # fmt: skip
        """ids: of the family's further tokens. videos: None where the model is shown none."""
        self.family, self.videos = FAMILIES[config.model_type], videos
        self.sizes = ImageSizes(processor, config, self.family.options(config), ids)
        self.token_id: int = config.image_token_id
        self.cache: OrderedDict[str, Pixels] = OrderedDict()
        self.cached_bytes = 0
        self.known: dict[str, list[int]] = {}  # layouts by digest, so that files are read once
        self.grids: dict[str, tuple[int, int, int]] = {}  # of images, by digest

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
        videos = None
        if family.video is not None:
            videos = VideoProcessor(model, config, data, speller(model))
        return cls(config, processor, ids, videos)

    def layout(self, picture: Visual) -> list[int]:
        """Returns the ids of the tokens that an image or a video becomes. Raises BadRow for one
        that has none, or is far too long a strip.
        """
        is_video = isinstance(picture, Video)
        try:
            key = picture.digest
        except OSError as error:
            field = "videos" if is_video else "images"
            raise BadRow(f"field '{field}': {picture} cannot be read: {error!r}") from error
        if isinstance(picture, Video):
            self.clip(picture)
            return self.shown_videos.layout(picture)
        if key not in self.known:
            width, height = size_of(picture)
            try:
                self.known[key] = self.family.layout(self.sizes, height, width)
            except ValueError as error:
                raise BadRow(f"field 'images': {picture}, {width} x {height}: {error}") from error
            if len(self.known) > MOST_LAYOUTS:
                del self.known[next(iter(self.known))]
        return self.known[key]

    def grid(self, picture: Visual) -> tuple[int, int, int]:
        """Returns the steps in time, rows and columns of the tokens of an image or a video, in a
        family whose positions they are. No image is decoded for it.
        """
        if isinstance(picture, Video):
            return self.clip(picture).grid
        if picture.digest not in self.grids:
            assert self.family.grid is not None
            width, height = size_of(picture)
            self.grids[picture.digest] = 1, *self.family.grid(self.sizes, height, width)
        return self.grids[picture.digest]

    @property
    def shown_videos(self) -> VideoProcessor:
        """Raises ConfigError where the model is shown none."""
        if self.videos is None:
            raise sees_no_videos(self.sizes.config)
        return self.videos

    def clip(self, video: Video) -> Clip:
        """Raises BadRow, ConfigError."""
        clips = self.shown_videos.clips
        if video.digest not in clips:
            self.keep(video.digest, self.shown_videos.processed(video))
        return clips[video.digest]

    def marks(self, shown: Sequence[Visual]) -> tuple[int, ...]:
        """The tokens that a template writes for these. Raises ConfigError."""
        return (
            (self.token_id, self.shown_videos.token_id) if num_videos(shown) else (self.token_id,)
        )

    def count(self, ids: list[int], shown: Sequence[Visual]) -> int:
        """Returns how many tokens stand for these images and videos."""
        return sum(map(ids.count, self.marks(shown))) if shown else 0

    def ordered(self, ids: list[int], shown: Sequence[Visual]) -> tuple[Visual, ...]:
        """Returns images and videos in the order in which the template's tokens show them. Raises
        BadRow where it wrote more or fewer placeholders than there are, and ConfigError.
        """
        marks, videos = self.marks(shown), num_videos(shown)
        counts = {"images": ("image", len(shown) - videos), "videos": ("video", videos)}
        for id, (field, (name, count)) in zip(marks, counts.items(), strict=False):
            if ids.count(id) != count:
                raise BadRow(
                    f"field '{field}': {count} of them, but the chat template gives "
                    f"{ids.count(id)} {name} tokens"
                )
        of_kind = {
            id: iter([each for each in shown if isinstance(each, Video) == is_video])
            for is_video, id in enumerate(marks)
        }
        return tuple(next(of_kind[id]) for id in ids if id in of_kind)

    def layouts(self, ids: list[int], pictures: Sequence[Visual]) -> list[list[int]]:
        """Returns what each of the template's tokens becomes: a placeholder the tokens of its image
        or video, all others themselves. Raises BadRow, ConfigError, as `ordered` does.
        """
        marks, shown = self.marks(pictures), map(self.layout, self.ordered(ids, pictures))
        return [next(shown) if id in marks else [id] for id in ids]

    def placed(self, ids: list[int], pictures: Sequence[Visual]) -> list[int]:
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
        self, prompt_ids: Sequence[int], pictures: Sequence[Visual],
        replies: Sequence[PlacedImage] = (),
    ) -> PromptImages:  # fmt: skip
        """pictures: of the prompt. With replies that show images `prompt_ids` are those of prompt
        and answer.
        """
        spans = self.spans(prompt_ids, pictures)
        spans += [(first, len(self.layout(picture))) for first, picture in replies]
        pictures = [*pictures, *(reply.picture for reply in replies)]
        is_image = torch.zeros(len(prompt_ids), dtype=torch.bool)
        for (first, count), picture in zip(spans, pictures, strict=True):
            ids = torch.tensor(prompt_ids[first : first + count])
            is_image[first : first + count] = ids == self.mark(picture)
        clips = [self.clip(each) if isinstance(each, Video) else None for each in pictures]
        positions = None
        if self.family.mrope:
            grids = [self.grid(picture) for picture in pictures]
            positions = self.positions(is_image, spans, grids, clips)
        digests = [picture.digest for picture in pictures]
        return PromptImages(pictures, self.pixels, spans, is_image, positions, digests, clips)

    def positions(
        self, is_image: Tensor, spans: Sequence[tuple[int, int]],
        shown: Sequence[tuple[int, int, int]], clips: Sequence[Clip | None],
    ) -> Tensor:  # fmt: skip
        """(3, prompt tokens) int64. Each frame of a video with timestamps is as an image."""
        runs, grids, intervals = [], [], []
        for (first, count), (steps, rows, columns), clip in zip(spans, shown, clips, strict=True):
            if clip is not None and self.shown_videos.family.timestamps:
                size = rows * columns
                tokens = is_image[first : first + count].nonzero()[::size, 0] + first
                runs += [(token, size) for token in tokens.tolist()]
                grids += [(1, rows, columns)] * len(tokens)
                intervals += [1.0] * len(tokens)
            else:
                runs.append((first, count))
                grids.append((steps, rows, columns))
                intervals.append(1.0 if clip is None else self.shown_videos.interval(clip))
        grid = torch.tensor(grids, dtype=torch.int64).view(-1, 3)
        return rope_positions(len(is_image), runs, grid, intervals)

    def mark(self, picture: Visual) -> int:
        """The token that the tower's vectors of an image or a video stand for."""
        return self.shown_videos.token_id if isinstance(picture, Video) else self.token_id

    def spans(
        self, prompt_ids: Sequence[int], pictures: Sequence[Visual]
    ) -> list[tuple[int, int]]:  # fmt: skip
        """Raises ValueError where the tokens are of other images."""
        spans, first = [], 0
        for picture in pictures:
            wanted, mark = self.layout(picture), self.mark(picture)
            first = prompt_ids.index(mark, first) - wanted.index(mark)
            if list(prompt_ids[first : first + len(wanted)]) != wanted:
                raise ValueError("the images of a prompt have changed since it was tokenised")
            spans.append((first, len(wanted)))
            first += len(wanted)
        return spans

    def pixels(self, picture: Visual) -> Pixels:
        """Says what the processor makes of an image or a video, float32 where it is pixels."""
        key = picture.digest
        if key not in self.cache:
            if isinstance(picture, Video):
                self.keep(key, self.shown_videos.processed(picture))
            else:
                self.keep(key, self.processed(open_picture(picture)))
        self.cache.move_to_end(key)
        return self.cache[key]

    def keep(self, key: str, found: Pixels) -> None:
        self.cache[key] = found
        self.cached_bytes += num_bytes(found)
        while self.cached_bytes > CACHE_BYTES and len(self.cache) > 1:
            _, oldest = self.cache.popitem(last=False)
            self.cached_bytes -= num_bytes(oldest)

    def processed(self, image: Image.Image) -> Pixels:
        made = self.processor(images=[image], return_tensors="pt", **self.sizes.options)
        found = {name: made[name] for name in self.family.inputs}
        return found | {"pixel_values": found["pixel_values"].float()}

    @cached_property
    def nothing(self) -> Pixels:
        """Pixels of the smallest image there is."""
        small = self.processed(Image.new("RGB", (28, 28)))
        return self.family.least(small, self.sizes.config)


def speller(model: str) -> Callable[[str], list[int]]:
    """Returns what tells the token ids of a text; the tokenizer is loaded when it is asked."""
    tokenizer = cache(lambda: load_tokenizer(model))
    return lambda text: tokenizer()(text, add_special_tokens=False)["input_ids"]


def num_bytes(pixels: Pixels) -> int:
    return sum(part.nbytes for part in pixels.values())


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


class Illustrated(Protocol):
    """A sequence, or its beginning: it has token ids, and the images that they show."""

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def images(self) -> tuple[Visual, ...]: ...


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

    def share_clips(self, batch: Batch, group: dist.ProcessGroup, device: torch.device) -> None:
        """Tells the group what its first rank knows of a batch's videos, so that others, which have
        no tower, decode none. Collective over the group."""
        videos, is_first = self.vision.videos, dist.get_rank(group) == 0
        if videos is None or group.size() == 1 or videos.token_id not in batch.token_ids:
            return
        prompts = [self.prompt(id) for id in batch.prompts.tolist() if id >= 0 and is_first]
        shown = [each for prompt in prompts for each in prompt.images if isinstance(each, Video)]
        known = {video.digest: self.vision.clip(video) for video in shown}
        videos.clips |= broadcast_object(known, group, 0, device)

    def scene(self, batch: Batch) -> ImageInputs:
        """A batch without images gets the smallest one, which no token stands for: the tower's
        weights are sharded, so every rank has to pass through it."""
        starts, lens = batch.cu_seqlens.tolist(), batch.seq_lens.tolist()
        views = self.views(batch)
        is_image = torch.zeros(batch.num_tokens, dtype=torch.bool)
        for start, length, view in zip(starts, lens, views, strict=False):
            known = min(len(view.is_image), length)
            is_image[start : start + known] = view.is_image[:known]
        device = batch.token_ids.device
        is_image = is_image.to(device)
        videos = self.vision.videos
        marks = [self.vision.token_id, *([] if videos is None else [videos.token_id])]
        if not torch.isin(batch.token_ids[is_image], torch.tensor(marks, device=device)).all():
            raise ValueError("a sequence and the data of its prompt disagree about images")
        shown = [p for view in views for p in view.pixels]
        pixels = together(shown or [self.vision.nothing])
        return ImageInputs(
            {name: part.to(device) for name, part in pixels.items()}, is_image,
            self.positions(batch, views) if self.vision.family.mrope else None,
            self.looks_ahead(batch),
            None if shown else slice(0),
        )  # fmt: skip

    def looks_ahead(self, batch: Batch) -> LooksAhead | None:
        """Returns which tokens see each other, also those behind them; None where none do."""
        kind = self.vision.family.looks_ahead(self.vision.sizes.config)
        views = self.views(batch) if kind is not None else []
        if not any(view.spans for view in views):
            return None
        blocks, number = torch.full((batch.num_tokens,), -1), 0
        bounds = pairwise(batch.cu_seqlens.tolist())
        for (start, end), view in zip(bounds, views, strict=True):
            for first, count in view.spans:
                here = view.is_image[first : first + count]
                own = blocks[start:end][first : first + count]
                own[here[: len(own)]] = number
                number += 1
        return LooksAhead(blocks, kind == "window")

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
