"""Rows, and how they are read and drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class SamplerConfig:
    """Sets which prompts a step asks: mixtures and curricula. As it is here a run walks through the
    data epoch by epoch. docs/mixtures.md"""

    # data_source -> its share of a step's prompts, relative to the others'; 0: none of it. Empty:
    # as many as it has rows
    weights: Mapping[str, float] = field(default_factory=dict)
    temperature: float = 1.0  # shares are weight ** (1 / temperature); above 1 evens them out
    # difficulty: the easiest first, and more of the data with each step; success_rate: rather
    # prompts that are answered rightly at about target_rate
    curriculum: Literal["difficulty", "success_rate"] | None = None
    difficulty_key: str = "extra_info.difficulty"  # a column of numbers, the larger the harder
    pace_start: float = 0.1  # share of the data, its easiest prompts, that the first step may ask
    pace_steps: int = 0  # steps from there until all of it may be asked
    target_rate: float = 0.5
    floor: float = 0.05  # weight of a prompt at the worst rate; at target_rate it is 1 + floor
    # what earlier answers to a prompt count for its rate when it is asked again; 1: as new ones
    rate_decay: float = 0.5
    # a sample succeeds with this reward or a higher one. None: 1, and rates are kept only where
    # another field of this group is set
    success_reward: float | None = None
    # a prompt all of whose answers succeeded so many times in a row is not asked; 0: it is
    drop_solved: int = 0
    return_after: int = 0  # steps after which it is asked again; 0: never
    # a function (state, step, count, rng) that returns the prompts of a step, or a class of which
    # the run has an object, instead of all the above but success_reward and rate_decay
    function: Callable[..., Any] | None = None


@dataclass(frozen=True)
class RowsConfig:
    """Holds what every program has that reads rows; the configs of their data add their own."""

    # files; or data of a hub: "openai/gsm8k:main:train", "hf://datasets/owner/name/file.parquet",
    # "modelscope:owner/name:config:split". docs/hubs.md
    train: str | tuple[str, ...]
    eval: str | tuple[str, ...] | None = None
    shuffle: bool = True
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    on_bad_row: Literal["error", "skip"] = "error"  # skip: counted and reported


@dataclass(frozen=True)
class PolicyRowsConfig(RowsConfig):
    """Rows for a policy, which may show images and videos."""

    # names of control tokens in the text of a chat: made ordinary text, refused, or obeyed
    control_tokens: Literal["escape", "error", "keep"] = "escape"
    # images are scaled to have so many pixels; None: what the model's image processor says
    image_min_pixels: int | None = None
    image_max_pixels: int | None = None
    video_key: str = "videos"  # the column with the videos of a row; docs/vision.md
    video_fps: float = 2.0  # frames that are shown of a second
    video_frames: int | None = None  # frames that are shown of a video, in place of video_fps
    # the most that are shown by video_fps; None: what the model's video processor says
    video_max_frames: int | None = None
    # videos are scaled to have so many pixels at most: of a frame in Qwen2-VL and Qwen2.5-VL, of
    # all frames that are shown in Qwen3-VL; None: what the model's video processor says
    video_max_pixels: int | None = None
    max_video_tokens: int | None = None  # a row with a video of more is a bad row; None: any number


@dataclass(frozen=True)
class DataConfig(PolicyRowsConfig):
    """Prompts in verl's schema, or that of TRL, OpenRLHF or slime; Parquet or JSONL."""

    # the column with the prompt, a chat list or a string; dotted keys reach into structs:
    # "extra_info.question". Where a row has none of the default's name, OpenRLHF's are read
    prompt_key: str = "prompt"
    apply_chat_template: bool = False  # to a prompt that is a string: it is one turn of the user's
    # the column with the reference answer; where a row has none of the default's, its column
    # ground_truth, label, answer or solution is read, if it has one of them
    ground_truth_key: str = "reward_model.ground_truth"
    # the column with an answer of somebody else to learn from, or with several; a row may have
    # none. algo.demonstrations says how many of a prompt's answers they are
    demonstration_key: str | None = None
    # the column with a hint, such as a reference solution, which the teacher's prompt has and the
    # student's has not: on-policy self-distillation. docs/distillation.md
    hint_key: str | None = None
    # what the teacher is asked in place of the user's last turn, or of a prompt that is a string
    hint_template: str = (
        "{prompt}\n\nFor reference, this is a correct answer:\n\n{hint}\n\nNow answer the question "
        "yourself."
    )
    max_hint_prompt_tokens: int = 2048  # of a prompt with its hint; longer: overlong_prompts
    prompts_per_step: int = 64
    max_prompt_tokens: int = 1024
    overlong_prompts: Literal["filter", "truncate", "error"] = "filter"  # truncate keeps the end
    max_eval_prompts: int | None = None
    sampler: SamplerConfig = field(default_factory=SamplerConfig)


@dataclass(frozen=True)
class SftDataConfig(PolicyRowsConfig):
    """Rows with a `messages` chat, whose last turn is learnt, or a prompt and a response column."""

    turns: Literal["last", "all"] = "last"  # of `messages`: "all" learns every assistant turn
    prompt_key: str = "prompt"  # dotted keys reach into structs: "extra_info.question"
    response_key: str = "response"
    batch_size: int = 64
    max_tokens: int = 2048


@dataclass(frozen=True)
class PreferenceDataConfig(RowsConfig):
    """Rows of two answers, the better and the worse: a chat list each, or a string.

    A column of a name that is not the default must be there in every row.
    """

    chosen_key: str = "chosen"  # dotted keys reach into structs, as in SftDataConfig
    rejected_key: str = "rejected"
    prompt_key: str | None = "prompt"  # what stands before both; None: not read
    margin_key: str | None = "margin"  # by how much the chosen one is better; None: not read
    batch_size: int = 64  # pairs
    max_tokens: int = 2048  # of a conversation; pairs with a longer one are left out
    # names of control tokens in the text of a chat; a reward model that scores has no "keep"
    control_tokens: Literal["escape", "error"] = "escape"
    # EOS behind rows that are strings, if they do not end in it, as TRL puts it; it is noted in the
    # model's config.json, so that scoring does the same. None: as that of `model` says, else not
    append_eos: bool | None = None


@dataclass(frozen=True)
class AnswerDataConfig(PolicyRowsConfig):
    """Rows with answers to prompts that the policy is to prefer, or to avoid.

    A pair: a prompt, a better and a worse answer. A labelled answer: a prompt, an answer, and
    whether it is desirable. docs/preference.md
    """

    # what both answers are to; dotted keys reach into structs. None: not read; the answers are then
    # whole chats that differ in their last turn alone
    prompt_key: str | None = "prompt"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    completion_key: str = "completion"  # of a labelled answer
    label_key: str = "label"  # of a labelled answer: true, if it is desirable
    batch_size: int = 64  # pairs; of a loss of labelled answers: answers
    max_tokens: int = 2048  # of a prompt with an answer; rows with a longer one are left out
