"""The fields of a row of a prompt file, checked, and their tokens; prompts.py has the schema."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.config import ConfigError, DataConfig
from spmdrl.data.chat import Encoded, Encoder
from spmdrl.data.images import ImageProcessor
from spmdrl.data.left_out import calls_of
from spmdrl.data.pictures import MARK, pictures_of, refuse_single, shown_in
from spmdrl.data.prompt_stats import needs_difficulty
from spmdrl.data.table_files import MISSING, BadRow, bad_field, columns_at, lookup, without_nulls
from spmdrl.data.videos import num_videos, videos_of
from spmdrl.data.visuals import Visual
from spmdrl.hub.vision_families import FAMILIES


@dataclass(frozen=True)
class PromptFields:
    """The fields that are read from a row of a prompt file, checked."""

    prompt: list[dict[str, Any]] | str
    data_source: str
    ground_truth: Any  # None where there is none
    extra_info: dict[str, Any]
    images: tuple[Visual, ...] = ()  # and videos, which are the last

    @property
    def has_parts(self) -> bool:
        return any(isinstance(turn["content"], list) for turn in self.turns)

    @property
    def turns(self) -> list[dict[str, Any]]:
        return self.prompt if isinstance(self.prompt, list) else [{"content": self.prompt}]


SCHEMA = (
    "data.prompt_key and data.ground_truth_key name other columns; examples/data/gsm8k.py "
    "writes a file with the usual ones"
)

# Columns of other trainers, which are read where no field of the config names others and a row has
# only one of each kind. Alpaca's `input` is a part of what its `instruction` says.
PROMPTS = ("input", "context_messages")  # OpenRLHF
TRUTHS = ("ground_truth", "label", "answer", "solution")  # OpenRLHF and slime; TRL's examples
SOURCES = ("data_source", "datasource")  # verl, OpenRLHF
SHARD = re.compile(r"-\d+-of-\d+$")  # train-00000-of-00002


def columns_of(config: DataConfig) -> tuple[str, ...]:
    others = ("extra_info", "metadata", "images", "image", "tools", "instruction")
    known = (*PROMPTS, *TRUTHS, *SOURCES, *others)
    keys = [config.prompt_key, config.ground_truth_key, config.video_key]
    keys += [key for key in (config.demonstration_key, config.hint_key) if key is not None]
    if needs_difficulty(config.sampler):
        keys.append(config.sampler.difficulty_key)
    return tuple(dict.fromkeys((*columns_at(*keys), *known)))


def prompt_fields(
    row: dict[str, Any], path: Path, config: DataConfig, sees: bool = False
) -> PromptFields:
    """Raises BadRow naming the first field that is missing, null, empty or of a wrong type.

    A ground truth may be missing: some rewards ask for none. path: of the file. sees: whether the
    model sees images.
    """
    images: tuple[Visual, ...] = ()
    if any(row.get(key) is not None for key in ("images", "image", config.video_key)):
        images = visuals_of(row, path.parent, config.video_key)
    prompt_key = prompt_key_of(row, config)
    prompt = lookup(row, prompt_key)
    if prompt is MISSING:
        raise bad_field(prompt_key, prompt, f"{PROMPT}. {SCHEMA}", row)
    check_prompt(prompt_key, prompt, parts=sees or bool(images))
    if isinstance(prompt, str) and config.apply_chat_template:
        prompt = [{"role": "user", "content": prompt}]
    data_source = data_source_of(row, path, config)
    if not isinstance(data_source, str) or not data_source:
        expected = "a name such as 'openai/gsm8k'"
        hint = f". {SCHEMA}" if data_source is MISSING else ""
        raise bad_field("data_source", data_source, expected + hint, row)
    ground_truth = lookup(row, truth_key(row, config))
    if ground_truth is MISSING or ground_truth != ground_truth:  # NaN
        ground_truth = None
    extra_info = extra_info_of(row)
    chat = prompt if isinstance(prompt, str) else [without_nulls(turn) for turn in prompt]
    return PromptFields(chat, data_source, ground_truth, extra_info, images)


def visuals_of(row: dict[str, Any], folder: Path, video_key: str) -> tuple[Visual, ...]:
    """Returns the images of a row, then its videos. folder: of the file. Raises BadRow."""
    images: tuple[Visual, ...] = pictures_of(row.get("images"), folder)
    refuse_single(row, images)
    return images + videos_of(row.get(video_key), folder, video_key)


def prompt_key_of(row: dict[str, Any], config: DataConfig) -> str:
    """Returns the column of the config; where a row has none of the default's name, OpenRLHF's."""
    key = config.prompt_key
    if key != DataConfig.prompt_key or any(row.get(k) is not None for k in (key, "instruction")):
        return key
    found = [name for name in PROMPTS if row.get(name) is not None]
    return found[0] if len(found) == 1 else key


def extra_info_of(row: dict[str, Any]) -> dict[str, Any]:
    """Returns verl's extra_info, or slime's metadata, which of other data sets may be anything
    and is read where it is a mapping. Raises BadRow.
    """
    found = row.get("extra_info")
    if found is None:
        found = row.get("metadata")
        return found if isinstance(found, dict) else {}
    if not isinstance(found, dict):
        raise bad_field("extra_info", found, "a mapping, or null", row)
    return found


def data_source_of(row: dict[str, Any], path: Path, config: DataConfig) -> Any:
    """Returns the row's data_source. A row that is not in verl's schema may lack it: then it is the
    name of the file, without the ending and the number of a hub's shard.
    """
    found = next((row[name] for name in SOURCES if name in row), MISSING)
    is_verl = config.prompt_key == DataConfig.prompt_key and row.get("reward_model") is not None
    return file_source(path) if found is MISSING and not is_verl else found


def file_source(path: Path) -> str:
    """Returns the data_source of rows that name none: see data_source_of."""
    return SHARD.sub("", path.stem)


def truth_key(row: dict[str, Any], config: DataConfig) -> str:
    """Returns the key of the config; of the default, where verl has it, or a column of its own."""
    key = config.ground_truth_key
    if key != DataConfig.ground_truth_key or row.get("reward_model") is not None:
        return key
    found = truths_of(row)
    if "ground_truth" in row:
        return "ground_truth"
    return found[0] if len(found) == 1 else key


def truths_of(row: dict[str, Any]) -> list[str]:
    """Returns the columns that may be the reference answer. A label that is true or false says
    whether an answer was liked.
    """
    given = [name for name in TRUTHS if row.get(name) is not None]
    return [name for name in given if name != "label" or not isinstance(row[name], bool)]


def is_in_doubt(row: dict[str, Any], config: DataConfig) -> bool:
    """Whether a row has no reference answer since several columns may be it."""
    is_default = truth_key(row, config) == DataConfig.ground_truth_key
    return is_default and row.get("reward_model") is None and len(truths_of(row)) > 1


def without_truth(row: dict[str, Any], config: DataConfig) -> BadRow:
    key, found = truth_key(row, config), truths_of(row)
    expected = "the reference answer, which the reward asks for"
    if is_in_doubt(row, config):
        expected += f". {' and '.join(found)} may be it: name one by data.ground_truth_key"
    elif key == DataConfig.ground_truth_key:
        expected += f" (or a column 'ground_truth'). {SCHEMA}"
    return bad_field(key, lookup(row, key), expected, row)


PROMPT = "a non-empty string or chat list [{'role': ..., 'content': ...}, ...]"

# how the text of a chat list begins, as JSON or as Python writes it
CHAT_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*(["'])(role|content)\1\s*:""")

AS_A_LIST = "the model would be asked its brackets and quotes. Write it as a list, e.g. json.loads"


def check_prompt(field: str, prompt: Any, parts: bool = False) -> None:
    """Raises BadRow unless `prompt` is a non-empty string or a non-empty chat list.

    parts: a content may be a list of parts, which are not looked at.
    """
    if not isinstance(prompt, str | list) or len(prompt) == 0:
        raise bad_field(field, prompt, PROMPT)
    if isinstance(prompt, str):
        if CHAT_AS_TEXT.match(prompt):
            raise bad_field(field, prompt, f"{PROMPT}; this is the text of a list: {AS_A_LIST}")
        return
    for i, turn in enumerate(prompt):
        if not isinstance(turn, dict):
            raise bad_field(f"{field}[{i}]", turn, "{'role': ..., 'content': ...}")
        for key in ("role", "content"):
            kind = str | list if parts and key == "content" else str
            if key == "content" and turn.get(key) is None and calls_of(turn):
                continue
            if not isinstance(turn.get(key), kind):
                raise bad_field(f"{field}[{i}].{key}", turn.get(key, MISSING), "a string", turn)
    contents = [turn.get("content") or calls_of(turn) for turn in prompt]
    if not any(text.strip() if isinstance(text, str) else text for text in contents):
        raise BadRow(f"field '{field}': every turn is empty, expected {PROMPT}")


def encode(
    fields: PromptFields, encoder: Encoder, config: DataConfig, vision: ImageProcessor | None,
    limit: str = "max_prompt_tokens",
) -> tuple[Encoded, tuple[Visual, ...]]:  # fmt: skip
    """Returns the token ids of a prompt, those of images and videos included, and these in the
    order of their tokens. limit: the field that the encoder's limit is from. Raises BadRow,
    ConfigError.
    """
    if not fields.images and not fields.has_parts:
        return encoder.prompt(fields.prompt), ()
    return encode_shown(fields, encoder, config, vision, limit)


def encode_shown(
    fields: PromptFields, encoder: Encoder, config: DataConfig, vision: ImageProcessor | None,
    limit: str,
) -> tuple[Encoded, tuple[Visual, ...]]:  # fmt: skip
    """Does what `encode` does for a prompt with images or videos."""
    shown = fields.images
    if vision is None:
        raise sees_none(shown)
    if isinstance(fields.prompt, str):
        raise BadRow(f"field 'images': they want a prompt that is a chat list, with {MARK} in it")
    found = encoder.prompt(shown_in(fields.prompt, shown))
    if len(found.ids) <= encoder.limit:
        shown = vision.ordered(found.ids, shown)
        found = found._replace(ids=vision.placed(found.ids, shown))
    if len(found.ids) > encoder.limit and config.overlong_prompts == "truncate":
        raise BadRow(
            f"field 'images': a prompt of {len(found.ids)} tokens with images cannot be cut to "
            f"{limit}={encoder.limit}: raise it, set image_max_pixels, or set "
            "overlong_prompts to 'filter'"
        )
    return found, shown


def sees_none(shown: Sequence[Visual] = ()) -> ConfigError:
    what = "videos" if num_videos(shown) else "images"
    return ConfigError(
        f"the data has {what}, which the model does not see. Model types that see images are "
        f"{', '.join(FAMILIES)}; where one of them has a language model that can be loaded alone, "
        "set vision_tower=True"
    )
