"""Prompts from Parquet and JSONL files, and the order they are visited in.

A prompt row follows verl's schema:

    data_source    "openai/gsm8k"                          picks the reward function
    prompt         [{"role": "user", "content": "2+3?"}]   or a plain string
    reward_model   {"style": "rule", "ground_truth": "5"}  or a column `ground_truth`
    extra_info     {...}                                   optional, handed to the reward

A chat list goes through the tokenizer's chat template with a generation prompt. A plain string is
the whole prompt: it is tokenised as it stands, with the special tokens the tokenizer adds by itself
(a base model's BOS). Other columns are not read.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
import torch.distributed as dist

from spmdrl.config import ConfigError, DataConfig, SftDataConfig
from spmdrl.files import (
    MISSING,
    BadRow,
    Files,
    bad_field,
    load_together,
    lookup,
    measure_rows,
    without_nulls,
)
from spmdrl.topology import Topology
from spmdrl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class PromptDataset:
    """The usable prompts of some files. `prompt(i)` tokenises on demand.

    num_overlong   rows longer than max_prompt_tokens, filtered or truncated
    data_sources   every data_source of the files, sorted; the same on every rank
    """

    def __init__(
        self,
        files: Files,
        rows: np.ndarray,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        num_overlong: int,
        data_sources: tuple[str, ...],
    ) -> None:
        self.files, self.rows = files, rows  # rows: (len(self),) int64, global row numbers
        self.tokenizer, self.config = tokenizer, config
        self.num_overlong, self.data_sources = num_overlong, data_sources

    @classmethod
    def load(
        cls,
        paths: str | tuple[str, ...],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        topology: Topology,
    ) -> PromptDataset:
        """Opens and checks the files. A collective: every rank of `topology` calls it.

        Raises ConfigError, the same on every rank, for a file that cannot be read, for the first
        bad row, for over-long prompts (`overlong_prompts="error"`) and where no prompt is left.
        """
        files = load_together(topology, lambda: Files.open(paths, PROMPT_COLUMNS))
        sources: set[str] = set()

        def length(row: dict[str, Any]) -> int:
            fields = prompt_fields(row)
            sources.add(fields.data_source)
            return len(prompt_tokens(fields.prompt, tokenizer, config)[0])

        lengths = measure_rows(files, length, topology)
        overlong = np.flatnonzero(lengths > config.max_prompt_tokens)
        rows = np.arange(len(files))
        if len(overlong):
            rows = handle_overlong(files, rows, lengths, overlong, config)
            if topology.rank == 0:
                word = {"filter": "left out", "truncate": "cut to their end"}
                logger.info(
                    "%d of %d prompts are longer than max_prompt_tokens=%d and were %s",
                    *(len(overlong), len(files), config.max_prompt_tokens),
                    word[config.overlong_prompts],
                )
        gathered: list[Any] = [None] * topology.world
        dist.all_gather_object(gathered, sources, group=topology.group)
        data_sources = tuple(sorted(set().union(*gathered)))
        return cls(files, rows, tokenizer, config, len(overlong), data_sources)

    def __len__(self) -> int:
        return len(self.rows)

    def prompt(self, index: int) -> Prompt:
        """The prompt at 0 <= index < len(self); its id is the row number over all files."""
        row = int(self.rows[index])
        fields = prompt_fields(self.files.row(row))
        token_ids, text = prompt_tokens(fields.prompt, self.tokenizer, self.config)
        if len(token_ids) > self.config.max_prompt_tokens:
            token_ids = token_ids[-self.config.max_prompt_tokens :]
            text = str(self.tokenizer.decode(token_ids))
        return Prompt(
            row, token_ids, fields.data_source, fields.ground_truth, text, fields.extra_info
        )

    def by_id(self, row: int) -> Prompt:
        """The prompt whose id this is."""
        return self.prompt(int(np.searchsorted(self.rows, row)))


@dataclass(frozen=True)
class PromptFields:
    """What is read from a row of a prompt file, checked."""

    prompt: list[dict[str, Any]] | str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


PROMPT_COLUMNS = ("prompt", "data_source", "reward_model", "ground_truth", "extra_info")


def prompt_fields(row: dict[str, Any]) -> PromptFields:
    """Raises BadRow naming the first field that is missing, null, empty or of a wrong type."""
    prompt = lookup(row, "prompt")
    check_prompt("prompt", prompt)
    data_source = lookup(row, "data_source")
    if not isinstance(data_source, str) or not data_source:
        raise bad_field("data_source", data_source, "a name such as 'openai/gsm8k'", row)
    key = "ground_truth" if row.get("reward_model") is None else "reward_model.ground_truth"
    if key not in row and key == "ground_truth":
        key = "reward_model.ground_truth"  # verl's place is the one to name in the message
    ground_truth = lookup(row, key)
    if ground_truth is MISSING or ground_truth is None:
        expected = "the reference answer (or a column 'ground_truth')"
        raise bad_field(key, ground_truth, expected, row)
    extra_info = row.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise bad_field("extra_info", extra_info, "a mapping, or null", row)
    chat = prompt if isinstance(prompt, str) else [without_nulls(turn) for turn in prompt]
    return PromptFields(chat, data_source, ground_truth, extra_info or {})


def check_prompt(field: str, prompt: Any) -> None:
    """Raises BadRow unless `prompt` is a non-empty string or a non-empty chat list."""
    expected = "a non-empty string or chat list [{'role': ..., 'content': ...}, ...]"
    if not isinstance(prompt, str | list) or len(prompt) == 0:
        raise bad_field(field, prompt, expected)
    if isinstance(prompt, str):
        return
    for i, turn in enumerate(prompt):
        if not isinstance(turn, dict):
            raise bad_field(f"{field}[{i}]", turn, "{'role': ..., 'content': ...}")
        for key in ("role", "content"):
            if not isinstance(turn.get(key), str):
                raise bad_field(f"{field}[{i}].{key}", turn.get(key, MISSING), "a string", turn)
    if not any(turn["content"].strip() for turn in prompt):
        raise BadRow(f"field '{field}': every turn is empty, expected {expected}")


def prompt_tokens(
    prompt: list[dict[str, Any]] | str,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig | SftDataConfig,
) -> tuple[list[int], str]:
    """(token ids, text as the model sees it), not truncated. Raises BadRow if nothing is left."""
    if isinstance(prompt, str):
        token_ids, text = encode(tokenizer, prompt, special=True), prompt
    else:
        text = render_chat(prompt, tokenizer, config.chat_template_kwargs)
        token_ids = encode(tokenizer, text, special=False)
    if not token_ids:
        raise BadRow("field 'prompt': gives no token at all, expected a non-empty prompt")
    return token_ids, text


def encode(tokenizer: PreTrainedTokenizerBase, text: str, special: bool) -> list[int]:
    """Token ids; `special`: with what the tokenizer adds by itself (a template writes its own)."""
    # verbose=False: prompts longer than the model are counted and reported by us
    return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]


def render_chat(
    chat: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]
) -> str:
    """The chat as text that ends where the model is to answer. Raises ConfigError, BadRow."""
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"the tokenizer of '{tokenizer.name_or_path}' has no chat template, but the data has "
            "prompts that are chat lists. Use an instruction-tuned model, add a "
            "chat_template.jinja to the model's folder, or make `prompt` a plain string."
        )
    try:
        text = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, **template_kwargs
        )
    except jinja2.TemplateError as error:
        raise BadRow(f"field 'prompt': the chat template refuses the chat: {error}") from error
    assert isinstance(text, str)
    return text


def handle_overlong(
    files: Files, rows: np.ndarray, lengths: np.ndarray, overlong: np.ndarray, config: DataConfig
) -> np.ndarray:
    """The rows to keep, by `config.overlong_prompts`. Raises ConfigError if that leaves none."""
    limit, longest = config.max_prompt_tokens, int(lengths.max())
    if config.overlong_prompts == "truncate":
        return rows
    if config.overlong_prompts == "error":
        raise ConfigError(
            f"{files.where(int(overlong[0]))}: the prompt has {lengths[overlong[0]]} tokens, the "
            f"limit max_prompt_tokens is {limit}. {len(overlong)} of {len(rows)} prompts are over "
            f"it, the longest has {longest}. Raise max_prompt_tokens, or set overlong_prompts to "
            "'filter' or 'truncate'."
        )
    if len(overlong) == len(rows):
        raise ConfigError(
            f"{files.names}: all {len(rows)} prompts are longer than max_prompt_tokens={limit} "
            f"(shortest {lengths.min()}, longest {longest} tokens), so none is left. "
            f"Raise max_prompt_tokens to {longest}, or set overlong_prompts to 'truncate'."
        )
    return np.delete(rows, overlong)


class PromptOrder:
    """Which prompts each step asks: a permutation per epoch, walked `prompts_per_step` at a time.

    What is left at the end of an epoch and does not fill a step is not visited in that epoch:
    filling up from the next epoch could put one prompt into a step twice, with the same seeds.
    The permutation depends on (seed, epoch, length) alone, not on the world size.
    """

    def __init__(self, length: int, prompts_per_step: int, seed: int, shuffle: bool = True) -> None:
        if not 1 <= prompts_per_step <= length:
            raise ConfigError(
                f"prompts_per_step={prompts_per_step} does not fit the data: {length} usable "
                f"prompts, and a step asks no prompt twice. Use 1 <= prompts_per_step <= {length}, "
                "add data, or raise max_prompt_tokens if prompts were filtered."
            )
        self.length, self.prompts_per_step = length, prompts_per_step
        self.seed, self.shuffle = seed, shuffle
        self.epoch = 0
        self.offset = 0  # prompts already asked in this epoch
        self._permutation = epoch_permutation(length, seed, 0, shuffle)

    def next_step(self) -> list[int]:
        """`prompts_per_step` different dataset indices; moves the position on."""
        return self.take(self.prompts_per_step)

    def take(self, count: int) -> list[int]:
        """The next `count` different dataset indices, from a new epoch if this one has fewer."""
        if self.offset + count > self.length:
            self.epoch, self.offset = self.epoch + 1, 0
            self._permutation = epoch_permutation(self.length, self.seed, self.epoch, self.shuffle)
        taken = self._permutation[self.offset : self.offset + count]
        self.offset += count
        return taken.tolist()

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: the position, and what it is a position in."""
        return {
            "epoch": self.epoch,
            "offset": self.offset,
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on exactly where `state` was taken; prompts_per_step may have changed since.

        Raises ConfigError where the data, the seed or `shuffle` differ: the rest of the epoch
        would then be other prompts than those not yet asked.
        """
        for name in ("length", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise ConfigError(
                    f"the checkpoint's data position was taken with {name}={state[name]}, this run "
                    f"has {name}={getattr(self, name)}. Use the same data and seed, or start anew "
                    "with --resume never."
                )
        if state["epoch"] != self.epoch:
            self._permutation = epoch_permutation(
                self.length, self.seed, state["epoch"], self.shuffle
            )
        self.epoch, self.offset = state["epoch"], state["offset"]


def epoch_permutation(length: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """(length,) int64: sorts raw PCG64 words, a stream that numpy never changes, unlike shuffle."""
    if not shuffle:
        return np.arange(length)
    digest = hashlib.sha256(f"prompt order, seed {seed}, epoch {epoch}".encode()).digest()
    words = np.random.PCG64(int.from_bytes(digest[:16], "little")).random_raw(length)
    return np.argsort(words, kind="stable")
