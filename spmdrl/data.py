"""Prompts and fine-tuning rows from Parquet and JSONL files, and the order they are visited in.

A prompt row follows verl's schema:

    data_source    "openai/gsm8k"                          picks the reward function
    prompt         [{"role": "user", "content": "2+3?"}]   or a plain string
    reward_model   {"style": "rule", "ground_truth": "5"}  or a column `ground_truth`
    extra_info     {...}                                   optional, handed to the reward

A chat list goes through the tokenizer's chat template with a generation prompt. A plain string is
the whole prompt: it is tokenised as it stands, with the special tokens the tokenizer adds by itself
(a base model's BOS). Other columns are not read.

The rows stay in Arrow; a row becomes Python objects when it is asked for. Every row is checked at
load, which is split over the ranks, and a bad row raises the same ConfigError on all of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jinja2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist

from spmdrl.collectives import all_gather_rows
from spmdrl.config import ConfigError, DataConfig, SftDataConfig
from spmdrl.topology import Topology
from spmdrl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
logger = logging.getLogger(__name__)

CHUNK_ROWS = 1024  # rows that are Python objects at the same time while a file is checked
MISSING = object()
BAD_ROW = -1  # stands for a length where a row cannot be used


class BadRow(ValueError):
    """One row is wrong; whoever knows the file and the row number makes a ConfigError of it."""


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


@dataclass(frozen=True)
class SftExample:
    """One row to learn: loss on `response_ids`, which end in EOS unless they were cut."""

    id: int  # row number in the concatenated files
    prompt_ids: list[int]
    response_ids: list[int]


class SftDataset:
    """Rows for supervised fine-tuning.

    A row with `response_key` is a prompt and a response: a string prompt becomes one user turn
    (or is tokenised as it stands where the tokenizer has no chat template), as verl does it. A row
    without takes the chat in `messages`, whose last turn, by the assistant, is learnt. The end of a
    row over max_tokens is cut; where that leaves no response token the row is left out. Both are
    counted in `num_overlong`.
    """

    def __init__(
        self,
        files: Files,
        rows: np.ndarray,
        tokenizer: PreTrainedTokenizerBase,
        config: SftDataConfig,
        num_overlong: int,
    ) -> None:
        self.files, self.rows = files, rows
        self.tokenizer, self.config, self.num_overlong = tokenizer, config, num_overlong

    @classmethod
    def load(
        cls,
        paths: str | tuple[str, ...],
        tokenizer: PreTrainedTokenizerBase,
        config: SftDataConfig,
        topology: Topology,
    ) -> SftDataset:
        """As PromptDataset.load: a collective; ConfigError for a bad file or row."""
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                f"the tokenizer of '{tokenizer.name_or_path}' has no eos_token, so a model could "
                "not learn to stop. Set eos_token in its tokenizer_config.json."
            )
        keys = (config.prompt_key, config.response_key, "messages")
        columns = tuple(key.split(".")[0] for key in keys)
        files = load_together(topology, lambda: Files.open(paths, columns))

        def length(row: dict[str, Any]) -> int:
            prompt_ids, response_ids = sft_tokens(row, tokenizer, config)
            total = len(prompt_ids) + len(response_ids)
            # A prompt without room for a response is told from a row that is only cut.
            return NO_ROOM if len(prompt_ids) >= config.max_tokens else total

        lengths = measure_rows(files, length, topology)
        num_overlong = int((lengths > config.max_tokens).sum())
        rows = np.flatnonzero(lengths != NO_ROOM)
        if len(rows) == 0:
            raise ConfigError(
                f"{files.names}: in all {len(files)} rows the prompt alone has at least "
                f"max_tokens={config.max_tokens} tokens. Raise max_tokens."
            )
        if num_overlong and topology.rank == 0:
            logger.info(
                "%d of %d rows are longer than max_tokens=%d: %d were cut, %d left out",
                *(num_overlong, len(files), config.max_tokens),
                *(num_overlong - (len(files) - len(rows)), len(files) - len(rows)),
            )
        return cls(files, rows, tokenizer, config, num_overlong)

    def __len__(self) -> int:
        return len(self.rows)

    def example(self, index: int) -> SftExample:
        row = int(self.rows[index])
        prompt_ids, response_ids = sft_tokens(self.files.row(row), self.tokenizer, self.config)
        room = self.config.max_tokens - len(prompt_ids)
        return SftExample(row, prompt_ids, response_ids[:room])


NO_ROOM = 2**62  # a length no row has


def sft_tokens(
    row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, config: SftDataConfig
) -> tuple[list[int], list[int]]:
    """(prompt_ids, response_ids with EOS), not truncated. Raises BadRow."""
    prompt, response = sft_fields(row, config)
    if isinstance(prompt, str) and tokenizer.chat_template is not None:
        prompt = [{"role": "user", "content": prompt}]
    prompt_ids, _ = prompt_tokens(prompt, tokenizer, config)
    response_ids = encode(tokenizer, response, special=False)
    return prompt_ids, [*response_ids, int(tokenizer.eos_token_id)]


def sft_fields(
    row: dict[str, Any], config: SftDataConfig
) -> tuple[list[dict[str, Any]] | str, str]:
    """(prompt, response) of a row, checked. Raises BadRow."""
    response = lookup(row, config.response_key)
    if response is MISSING and "messages" in row:
        chat = row["messages"]
        check_prompt("messages", chat)
        if isinstance(chat, str) or len(chat) < 2 or chat[-1]["role"] != "assistant":
            expected = "a chat list of at least two turns, the last by the assistant"
            raise bad_field("messages", chat, expected)
        return [without_nulls(turn) for turn in chat[:-1]], chat[-1]["content"]
    prompt = lookup(row, config.prompt_key)
    check_prompt(config.prompt_key, prompt)
    if not isinstance(response, str) or not response:
        expected = "a non-empty string (data.response_key), or a column 'messages'"
        raise bad_field(config.response_key, response, expected, row)
    return (
        prompt if isinstance(prompt, str) else [without_nulls(turn) for turn in prompt]
    ), response


@dataclass(frozen=True)
class DataFile:
    """One file in Arrow. Parquet: the columns that are read. JSONL: `line` and `number`."""

    path: Path
    table: pa.Table
    is_json: bool

    def decode(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The row as a mapping of columns; raises BadRow where a line is not a JSON object."""
        if not self.is_json:
            return raw
        try:
            row = json.loads(raw["line"])
        except json.JSONDecodeError as error:
            raise BadRow(f"not valid JSON: {error.msg} at column {error.colno}") from error
        except UnicodeDecodeError as error:
            raise BadRow(f"not valid UTF-8: {error}") from error
        if not isinstance(row, dict):
            raise BadRow(f"a JSON {describe(row)}, expected an object {{column: value}}")
        return row

    def where(self, row: int) -> str:
        if self.is_json:
            return f"{self.path}, line {self.table['number'][row].as_py()}"
        return f"{self.path}, row {row} (counted from 0)"


class Files:
    """Several data files, their rows numbered through."""

    def __init__(self, files: list[DataFile]) -> None:
        self.files = files
        self.starts = np.cumsum([0, *(file.table.num_rows for file in files)])  # (num_files + 1,)

    @classmethod
    def open(cls, paths: str | tuple[str, ...], columns: tuple[str, ...]) -> Files:
        """Reads `columns` (those that exist). Raises ConfigError for what cannot be read."""
        paths = (paths,) if isinstance(paths, str) else tuple(paths)
        if not paths:
            raise ConfigError("no data file is given: set data.train to one path or several")
        return cls([open_file(Path(path), columns) for path in paths])

    @property
    def names(self) -> str:
        return ", ".join(str(file.path) for file in self.files)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def locate(self, row: int) -> tuple[DataFile, int]:
        index = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self.files[index], row - int(self.starts[index])

    def where(self, row: int) -> str:
        file, local = self.locate(row)
        return file.where(local)

    def row(self, row: int) -> dict[str, Any]:
        """The columns of one row. Raises BadRow."""
        file, local = self.locate(row)
        return file.decode(file.table.slice(local, 1).to_pylist()[0])

    def share(self, rank: int, world: int) -> Iterator[tuple[DataFile, dict[str, Any]]]:
        """Rows rank::world in order, undecoded; a chunk of them at a time is Python objects."""
        for file, start in zip(self.files, self.starts, strict=False):
            for batch in file.table.to_batches(max_chunksize=CHUNK_ROWS):
                picks = np.arange((rank - start) % world, batch.num_rows, world)
                start += batch.num_rows
                yield from ((file, raw) for raw in batch.take(pa.array(picks)).to_pylist())


def open_file(path: Path, columns: tuple[str, ...]) -> DataFile:
    if path.suffix not in (".parquet", ".jsonl"):
        what = "is a folder" if path.is_dir() else f"has the unknown extension '{path.suffix}'"
        raise ConfigError(f"data file '{path}' {what}: expected a .parquet or .jsonl file")
    if not path.is_file():
        raise ConfigError(f"data file '{path}' does not exist (looked from {Path.cwd()})")
    is_json = path.suffix == ".jsonl"
    table = read_lines(path) if is_json else read_parquet(path, columns)
    if table.num_rows == 0:
        raise ConfigError(f"data file '{path}' has no rows")
    return DataFile(path, table, is_json)


def read_parquet(path: Path, columns: tuple[str, ...]) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:
            found = [name for name in file.schema_arrow.names if name in columns]
            if not found and file.metadata.num_rows:
                raise ConfigError(
                    f"data file '{path}' has none of the columns {', '.join(columns)}; "
                    f"it has {', '.join(file.schema_arrow.names)}"
                )
            return file.read(columns=found)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"data file '{path}' cannot be read as Parquet: {error}") from error


def read_lines(path: Path) -> pa.Table:
    """The lines of a JSONL file, unparsed, with their numbers from 1; blank ones are skipped."""
    schema = pa.schema({"line": pa.large_binary(), "number": pa.int64()})
    batches, lines, numbers = [], [], []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                lines.append(line)
                numbers.append(number)
            if len(lines) == CHUNK_ROWS:
                batches.append(pa.record_batch([lines, numbers], schema))
                lines, numbers = [], []
    batches.append(pa.record_batch([lines, numbers], schema))
    return pa.Table.from_batches(batches)


def measure_rows(
    files: Files, length: Callable[[dict[str, Any]], int], topology: Topology
) -> np.ndarray:
    """Calls `length` on every row, split over the ranks: -> (num_rows,) int64, the same everywhere.

    Raises ConfigError for the lowest row in which `length` raised BadRow; on every rank, because
    each then calls it on that row itself.
    """

    def measure_share() -> list[int]:
        return [
            measure_row(file, raw, length)
            for file, raw in files.share(topology.rank, topology.world)
        ]

    own = torch.tensor(load_together(topology, measure_share), dtype=torch.int64)
    lengths = np.empty(len(files), dtype=np.int64)
    for rank, part in enumerate(all_gather_rows(own, topology)):
        lengths[rank :: topology.world] = part.numpy()
    bad = np.flatnonzero(lengths == BAD_ROW)
    if len(bad):
        try:
            length(files.row(int(bad[0])))
        except BadRow as error:
            more = f" ({len(bad)} of {len(files)} rows are bad)" if len(bad) > 1 else ""
            raise ConfigError(f"{files.where(int(bad[0]))}: {error}{more}") from error
        raise ConfigError(f"{files.where(int(bad[0]))} differs between ranks' copies of the file")
    return lengths


def measure_row(file: DataFile, raw: dict[str, Any], length: Callable[[dict], int]) -> int:
    try:
        return length(file.decode(raw))
    except BadRow:
        return BAD_ROW


def load_together(topology: Topology, work: Callable[[], T]) -> T:
    """Runs `work`, which holds no collective, on every rank; a failure on any is one on all.

    A ConfigError becomes a ConfigError on all ranks, anything else a RuntimeError that names the
    rank, so that no rank is left alone in the collective that follows.
    """
    failure: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001  raised again on every rank below
        failure = error
    wrong = isinstance(failure, ConfigError)
    mine = None if failure is None else (wrong, str(failure) if wrong else repr(failure))
    problems: list[Any] = [None] * topology.world
    dist.all_gather_object(problems, mine, group=topology.group)
    failed = [rank for rank, problem in enumerate(problems) if problem is not None]
    if not failed:
        return result
    some = "" if len(failed) == topology.world else f" (on ranks {failed} of {topology.world})"
    wrong, text = problems[failed[0]]
    if wrong:
        raise ConfigError(text + some) from failure
    raise RuntimeError(f"rank {failed[0]} cannot read the data: {text}{some}") from failure


def lookup(row: dict[str, Any], key: str) -> Any:
    """The value at a dotted key, or MISSING. A column whose name has the dots in it wins."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return MISSING
        value = value[part]
    return value


def without_nulls(turn: dict[str, Any]) -> dict[str, Any]:
    """A chat turn as it was written: Arrow gives every turn the keys of all others, with null."""
    return {key: value for key, value in turn.items() if value is not None}


def bad_field(field: str, found: Any, expected: str, row: dict[str, Any] | None = None) -> BadRow:
    fields = "" if row is None else f"; the row has {', '.join(row)}"
    shown = f"missing{fields}" if found is MISSING else f"found {describe(found)}"
    return BadRow(f"field '{field}': {shown}, expected {expected}")


def describe(value: Any) -> str:
    if value is None:
        return "null"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


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

    @property
    def steps_per_epoch(self) -> int:
        return self.length // self.prompts_per_step

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
        self.epoch, self.offset = state["epoch"], state["offset"]
        self._permutation = epoch_permutation(self.length, self.seed, self.epoch, self.shuffle)


def epoch_permutation(length: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """(length,) int64: sorts raw PCG64 words, a stream that numpy never changes, unlike shuffle."""
    if not shuffle:
        return np.arange(length)
    digest = hashlib.sha256(f"prompt order, seed {seed}, epoch {epoch}".encode()).digest()
    words = np.random.PCG64(int.from_bytes(digest[:16], "little")).random_raw(length)
    return np.argsort(words, kind="stable")
