"""Videos of prompts: how a row has them, and which of their frames a vision tower is given.

    videos   ["a.mp4"], [{"path": "a.mp4"}], [{"bytes": b"..."}], [{"video": "a.mp4", "fps": 1}]
             or frames: [["0.png", "1.png"]], [{"video": ["0.png", "1.png"], "fps": 1}]
    prompt   [{"role": "user", "content": "<video>What happens?"}]

Frames are drawn from a file, scaled and cut into patches by the model's own video processor in
transformers; a list of frames is shown whole. OpenCV decodes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedConfig

from spmdrl.config import ConfigError, DataConfig, SftDataConfig
from spmdrl.data.pictures import open_picture, pictures_of
from spmdrl.data.processor_files import video_processor_of
from spmdrl.data.table_files import BadRow, bad_field
from spmdrl.data.visuals import Video, Visual
from spmdrl.hub.vision_families import FAMILIES, Pixels, VideoFamily

EXPECTED = (
    "videos as {'path': ...}, {'bytes': ...}, a path, or a list of frames; in a dict with 'fps' "
    "where a video has one of its own"
)
KEYS = ("bytes", "path", "video")  # of a dict, one of which has the video


def videos_of(value: Any, folder: Path, key: str = "videos") -> tuple[Video, ...]:
    """Reads the videos of a row. folder: of the data file, where relative paths begin; key: of the
    column. Raises BadRow.
    """
    if value is None:
        return ()
    if not isinstance(value, list):
        raise bad_field(key, value, f"a list of {EXPECTED}")
    return tuple(video_of(item, folder, key) for item in value)


def video_of(item: Any, folder: Path, key: str) -> Video:
    fps = None
    if isinstance(item, dict):
        given = {name: value for name, value in item.items() if value is not None}
        fps = given.pop("fps", None)
        given.pop("type", None)  # "video", where verl's rows have it
        if len(given) != 1 or not given.keys() <= set(KEYS):
            raise bad_field(key, item, EXPECTED)
        (item,) = given.values()
    if fps is not None and (isinstance(fps, bool) or not isinstance(fps, int | float) or fps <= 0):
        raise bad_field(f"{key}[].fps", fps, "frames per second, a number above 0")
    fps = None if fps is None else float(fps)
    if isinstance(item, bytes) and item:
        return Video(item, fps)
    if isinstance(item, list) and item:
        return Video(pictures_of(item, folder), fps)
    if not isinstance(item, str) or not item:
        raise bad_field(key, item, EXPECTED)
    if item.startswith(("http://", "https://", "data:")):
        raise BadRow(
            f"field '{key}': {item[:80]!r} is no file: write it to one before the run and name "
            "that, so that every rank and every later run sees the same"
        )
    return Video(folder / item.removeprefix("file://"), fps)


def refuse_videos(row: Mapping[str, Any]) -> None:
    """Raises BadRow for a row with videos where none are shown: leaving them out would leave the
    question without what it is about.
    """
    if row.get("videos"):
        raise BadRow(
            "field 'videos': videos are not shown to reward models; give their frames as 'images', "
            "with <image> where each stands (docs/vision.md)"
        )


class Decoded(NamedTuple):
    """The frames of a video that are shown: (frames, height, width, 3) uint8 in RGB.

    numbers: of each in the video, counted from 0; fps: frames per second of the video; shown_fps:
    of those that are shown.
    """

    frames: np.ndarray
    numbers: list[int]
    fps: float
    shown_fps: float


@dataclass(frozen=True)
class Clip:
    """Says what a video is to the language model.

    grid: steps in time, rows and columns, in tokens; seconds: of each step; times: in seconds, the
    middle of the frames of each step.
    """

    grid: tuple[int, int, int]
    seconds: float
    times: list[float]


class VideoProcessor:
    """A model's video processor, and which tokens stand for a video."""

    def __init__(
        self, model: str, config: PreTrainedConfig, data: DataConfig | SftDataConfig,
        spell: Callable[[str], list[int]],
    ) -> None:  # fmt: skip
        """spell: the token ids of a text. The files of the processor are read when the first video
        is seen.
        """
        family = FAMILIES[config.model_type].video
        assert family is not None
        self.model, self.config, self.data, self.spell = model, config, data, spell
        self.family: VideoFamily = family
        self.token_id: int = config.video_token_id
        self.clips: dict[str, Clip] = {}  # by digest, so that files are read once

    @cached_property
    def processor(self) -> Any:
        """Raises ConfigError."""
        found = video_processor_of(self.model, self.family)
        data = self.data
        if data.video_max_pixels is not None:
            least = min(found.size.shortest_edge, data.video_max_pixels)
            found.size = replace(
                found.size, shortest_edge=least, longest_edge=data.video_max_pixels
            )
        if data.video_max_frames is not None:
            found.max_frames = data.video_max_frames
            found.min_frames = min(found.min_frames, found.max_frames)
        # transformers' default, which it announces to change
        found.cap_pixels_per_frame = bool(found.cap_pixels_per_frame)
        return found

    def processed(self, video: Video) -> Pixels:
        """Returns what the video processor makes of a video, by the names of what an image
        processor makes, and notes its clip. Raises BadRow, ConfigError.
        """
        seen = self.decoded(video)
        try:
            made = self.processor(
                [torch.from_numpy(seen.frames)], do_sample_frames=False, return_tensors="pt"
            )
        except ValueError as error:
            height, width = seen.frames.shape[1:3]
            size = f"{len(seen.frames)} frames of {width} x {height}"
            raise BadRow(f"field '{self.data.video_key}': {video}, {size}: {error}") from error
        merge, step = self.processor.merge_size, self.processor.temporal_patch_size
        times, rows, columns = (
            made["video_grid_thw"][0] // torch.tensor([1, merge, merge])
        ).tolist()
        numbers = seen.numbers + seen.numbers[-1:] * (times * step - len(seen.numbers))
        middles = [
            (numbers[i] + numbers[i + step - 1]) / 2 / seen.fps
            for i in range(0, len(numbers), step)
        ]
        self.clips[video.digest] = Clip((times, rows, columns), step / seen.shown_fps, middles)
        return {
            "pixel_values": made["pixel_values_videos"].float(),
            "image_grid_thw": made["video_grid_thw"],
        }

    def layout(self, video: Video) -> list[int]:
        """Returns the ids of the tokens that a video becomes; `processed` has seen it. Raises
        BadRow where they are too many.
        """
        clip = self.clips[video.digest]
        times, rows, columns = clip.grid
        most, count = self.data.max_video_tokens, times * rows * columns
        if most is not None and count > most:
            raise BadRow(
                f"field '{self.data.video_key}': {video} has {count} tokens, more than "
                f"data.max_video_tokens={most}: set video_fps, video_max_frames or video_max_pixels"
            )
        if not self.family.timestamps:
            return [self.token_id] * count
        frame = [
            self.config.vision_start_token_id, *[self.token_id] * (rows * columns),
            self.config.vision_end_token_id,
        ]  # fmt: skip
        return [id for time in clip.times for id in (*self.spell(f"<{time:.1f} seconds>"), *frame)]

    def interval(self, clip: Clip) -> float:
        """Returns the positions from one step in time to the next, a fraction or more."""
        if not self.family.timed:
            return 1.0
        return clip.seconds * float(self.config.vision_config.tokens_per_second)

    def decoded(self, video: Video) -> Decoded:
        """Raises BadRow, ConfigError."""
        if isinstance(video.source, tuple):
            return self.frames_of(video)
        with file_of(video) as path:
            return self.read(path, video)

    def frames_of(self, video: Video) -> Decoded:
        assert isinstance(video.source, tuple)
        frames = [np.asarray(open_picture(frame)) for frame in video.source]
        sizes = {frame.shape[:2] for frame in frames}
        if len(sizes) > 1:
            raise BadRow(f"field '{self.data.video_key}': the frames of a video differ in size")
        fps = video.fps or self.data.video_fps
        return Decoded(np.stack(frames), list(range(len(frames))), fps, fps)

    def read(self, path: str, video: Video) -> Decoded:
        """Decodes the frames of a file that the video processor chooses."""
        from transformers.video_utils import read_video_opencv

        decode: Any = read_video_opencv
        sample = self.processor.sample_frames
        metadata: Any = None

        def choose(metadata: Any) -> list[int]:
            if metadata.total_num_frames < 1 or not metadata.fps:
                raise ValueError("OpenCV finds no frames in it")
            return [int(number) for number in sample(metadata, **self.asked(metadata, video.fps))]

        try:
            frames, metadata = decode(path, choose)
            if len(frames) < len(metadata.frames_indices):
                raise ValueError(f"of its {metadata.total_num_frames} frames the last are missing")
        except ImportError as error:
            raise ConfigError(
                "videos are decoded by OpenCV: pip install opencv-python-headless"
            ) from error
        except (ValueError, ZeroDivisionError, RuntimeError) as error:
            raise BadRow(
                f"field '{self.data.video_key}': {video} cannot be read: {error}"
            ) from error
        numbers = metadata.frames_indices
        return Decoded(frames, numbers, metadata.fps, metadata.sampled_fps)

    def asked(self, metadata: Any, fps: float | None) -> dict[str, Any]:
        """Returns how many frames the video processor is to choose. fps: of the video's own."""
        if self.data.video_frames is not None and fps is None:
            return {"num_frames": min(self.data.video_frames, metadata.total_num_frames)}
        return {"fps": fps or self.data.video_fps}


@contextmanager
def file_of(video: Video) -> Iterator[str]:
    """The path of a video's file; of one that is bytes, of a temporary one. Raises BadRow."""
    if isinstance(video.source, Path):
        if not video.source.is_file():
            raise BadRow(f"field 'videos': {video} is no file")
        yield str(video.source)
        return
    with tempfile.NamedTemporaryFile() as file:
        file.write(video.encoded)
        file.flush()
        yield file.name


def num_videos(shown: Sequence[Visual]) -> int:
    return sum(isinstance(each, Video) for each in shown)


def sees_no_videos(config: PreTrainedConfig) -> ConfigError:
    kinds = ", ".join(name for name, family in FAMILIES.items() if family.video is not None)
    return ConfigError(
        f"the data has videos, which model type {config.model_type!r} is not shown here; model "
        f"types that are: {kinds}. Give their frames as images (docs/vision.md)"
    )
