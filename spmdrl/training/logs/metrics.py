"""Writes what a run leaves: metrics.jsonl, samples, and lines on the terminal."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import resource
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import torch

from spmdrl.checkpoint.disk_space import writing
from spmdrl.checkpoint.earlier_runs import METRICS
from spmdrl.data.reply_images import is_image, pictures_in
from spmdrl.data.visuals import Visual
from spmdrl.distributed.agreement import broadcast_from_first, gather_to_first
from spmdrl.distributed.progress import PROGRESS
from spmdrl.distributed.topology import Topology
from spmdrl.rollout.multi_turn.environment import UNREAD
from spmdrl.training.logs.sample_tokens import token_fields
from spmdrl.training.logs.step_line import (
    COLUMNS,
    RESERVED,
    UNBOUNDED,
    Shown,
    field_of,
    fitted,
    step_line,
    unknown,
)
from spmdrl.training.logs.trackers import Tracker
from spmdrl.types import Judgement, Message, Prompt, Sample

MOST_INVALID = 64  # rows per rank and step in samples/
# of samples/, with those that spmdrl.view adds
COLUMNS_OF_ROWS = {
    "prompt_id", "group", "sample", "data_source", "prompt", "response", "ground_truth", "reward",
    "invalid", "finish_reason", "response_tokens", "pred", "chat", "messages", "turn_rewards",
    "rows", "agent_output",
    "images", "tokens", "logprobs", "step", "advantage", "advantages", "trainer_logprobs",
    "update_logprobs", "judge_score", "judge_verdicts", "demonstration",
}  # fmt: skip
MOST_IMAGES = 8  # of a prompt that are written to samples/images/
MOST_IMAGE_BYTES = 4 * 2**20  # a larger image is not written there
RESERVED_PER_TURN = ("turns", "outcome")
RESERVED_JUDGED = ("judge_score", "judge_unparsable", "judge_tokens")


class RunLog:
    """Rank 0's record of a run; on other ranks (`active` False) every method does nothing.

    It appends to metrics.jsonl, out of which earlier.set_aside has taken the steps after
    `resume_step`: no step stands there twice.
    """

    def __init__(
        self,
        run_dir: Path,
        active: bool,
        total_steps: int,
        trackers: Sequence[Tracker] = (),
        resume_step: int = 0,
        named: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
        show: tuple[str, ...] = (),
        lines: Literal["short", "full"] = "short",
    ) -> None:
        """named: says what the rank does meanwhile (Phases.alone). show: more metrics in the line
        of a step. lines: full ones have all that there is, however long they are."""
        self.active, self.run_dir, self.total_steps = active, run_dir, total_steps
        self.start = time.monotonic()
        self.first_step = resume_step
        self.trackers = trackers
        self.named, self.show, self.has_shown = named, show, False
        self.columns = COLUMNS if lines == "short" else UNBOUNDED
        if not active:
            return
        with writing(Path(run_dir, METRICS)):
            Path(run_dir, "samples").mkdir(parents=True, exist_ok=True)
            self.metrics = Path(run_dir, METRICS).open("a")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """One line of metrics.jsonl, and the same for the trackers."""
        if not self.active:
            return
        with self.named("write metrics"):
            with writing(Path(self.run_dir, METRICS)):
                self.check_is_there()
                self.metrics.write(metrics_line({"step": step, **metrics}))
                self.metrics.flush()
            for tracker in self.trackers:
                tracker.log(step, dict(metrics))  # which it may change

    def check_is_there(self) -> None:
        """Raises FileNotFoundError where the open file is no longer that of its name: what goes
        into it would be lost."""
        there = Path(self.run_dir, METRICS).stat()
        if not os.path.samestat(there, os.fstat(self.metrics.fileno())):
            raise FileNotFoundError(errno.ENOENT, "another file has its name now")

    def sync(self) -> None:
        """Before a checkpoint: it must not outlive the rows of its steps when a host fails."""
        if self.active:
            os.fsync(self.metrics.fileno())

    def line(self, text: str) -> None:
        if self.active:
            PROGRESS.line(text)

    def step_line(self, step: int, metrics: dict[str, float], shown: Shown) -> None:
        """Prints the line of a step, at most self.columns wide, with the metrics of
        config.show_metrics.
        """
        if not self.active:
            return
        for line in unknown(self.show, metrics) if not self.has_shown else ():
            self.line(line)
        self.has_shown = True
        more = [field_of(name, metrics) for name in self.show if name in metrics]
        # the last fields give way in a line that is too long, not what was asked for
        shown = shown._replace(fields=[*shown.fields[:1], *more, *shown.fields[1:]])
        left_s = self.left_s(step)
        self.line(step_line(step, self.total_steps, shown, metrics, left_s, self.columns))

    def held_out_line(self, step: int, shown: Shown, asked: str) -> None:
        """asked: as in "100 prompts"."""
        shown = shown._replace(first=f"held out: {shown.first}")
        self.line(fitted(f"step {step}/{self.total_steps}", shown, [asked], self.columns))

    def left_s(self, step: int) -> float:
        """Seconds until the last step, at the pace so far."""
        per_step = (time.monotonic() - self.start) / (step - self.first_step)
        return per_step * (self.total_steps - step)

    def close(self) -> None:
        if self.active:
            self.metrics.close()
            with self.named("close trackers"):
                for tracker in self.trackers:
                    tracker.close()


def metrics_line(row: Mapping[str, Any]) -> str:
    """Returns a line of metrics.jsonl, with null for numbers that JSON has not: NaN, infinities."""
    lacking = {
        name: None
        for name, value in row.items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    return json.dumps({**row, **lacking}, allow_nan=False) + "\n"


def memory_of_process() -> dict[str, float]:
    """GiB in memory now and at most so far, on a GPU at most since the last call; open files."""
    found = {
        "rss_gib": psutil.Process().memory_info().rss / 2**30,
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "open_files": float(len(os.listdir("/proc/self/fd"))),
    }
    if torch.cuda.is_available():
        found["gpu_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    return found


class SampleDetail(NamedTuple):
    """Says what the rows of samples/ have beside texts and rewards."""

    replies: bool  # samples may have several turns: each has its `messages`
    tokenizer: Any
    num_samples: int  # so many of each file have their tokens
    num_tokens: int  # so many of each sample, from the first; 0: none
    prompt_of: Callable[[int], Prompt] | None = None  # by its id; None: there are no images


def write_samples(
    path: Path, samples: list[Sample], most: int, topology: Topology, detail: SampleDetail
) -> None:
    """Rank 0 writes readable rows: the step's first `most` samples, whoever made them, and of each
    rank invalid ones.

    An invalid sample stands there with its traceback. In a run in which samples may have several
    turns, each has its `messages`, one without a reply too. Images are files in the folder images
    beside `path`: those of the prompt, and those in the messages, which name them. Collective.
    """
    ordered = sorted(samples, key=address_of)
    first = first_addresses([address_of(s) for s in ordered[:most]], most, topology)
    shown, detailed = set(first), set(first[: detail.num_samples])
    others = [s for s in ordered if s.invalid is not None and address_of(s) not in shown]
    rows = []
    for s in (*(s for s in ordered if address_of(s) in shown), *others[:MOST_INVALID]):
        num_tokens = detail.num_tokens if address_of(s) in detailed else 0
        of_tokens = token_fields(s, detail.tokenizer, num_tokens)
        rows.append((address_of(s), sample_row(s, detail.replies, of_tokens)))
    everyone = gather_to_first(rows, topology.control)
    if everyone is None:
        return
    kept = sorted(itertools.chain.from_iterable(everyone), key=lambda row: row[0])
    with writing(path):
        if detail.prompt_of is not None:
            for _, row in kept:
                if "images" in row:
                    pictures = detail.prompt_of(row["prompt_id"]).images
                    row["images"] = write_images(path.parent / "images", pictures)
        write_rows(path, [with_image_files(row, path.parent) for _, row in kept])


def address_of(sample: Sample) -> tuple[int, int]:
    return sample.group, sample.index


def first_addresses(
    own: list[tuple[int, int]], most: int, topology: Topology
) -> list[tuple[int, int]]:
    """Returns the `most` lowest addresses of all ranks' samples, in order. Collective.

    own: this rank's lowest. Rows are made of these alone, so that rank 0 does not get as many from
    every rank.
    """
    everyone = gather_to_first(own, topology.control)
    lowest = sorted(itertools.chain.from_iterable(everyone or []))[:most]
    return broadcast_from_first(lowest, topology.control)


def with_image_files(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The row with the images of its messages in files of folder/images, each once, which are named
    by their digest.
    """
    for name in ("messages", "rows"):
        found = row.get(name, [])
        several = found if name == "rows" else [found]
        if any(map(pictures_in, several)):
            saved = [[saved_images(message, folder) for message in chat] for chat in several]
            row = row | {name: saved if name == "rows" else saved[0]}
    return row


def saved_images(message: Message, folder: Path) -> Message:
    if not isinstance(message["content"], list):
        return message
    parts = []
    for part in message["content"]:
        if is_image(part):
            (picture,) = pictures_in([{**message, "content": [part]}])
            (name,) = write_images(folder / "images", [picture])
            part = {"type": "image", "image": f"images/{name}" if name else ""}
        parts.append(part)
    return {**message, "content": parts}


def write_images(folder: Path, pictures: Sequence[Visual]) -> list[str]:
    """Writes the images and videos that are not there yet, and returns their names: the digest of
    each. Of a video that is given as frames the first one is written.

    A name is "" where the file has more than MOST_IMAGE_BYTES, or its file is gone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return [write_image(folder, picture) for picture in pictures[:MOST_IMAGES]]


def write_image(folder: Path, picture: Visual) -> str:
    if isinstance(picture.source, Path) and not picture.source.is_file():
        return ""
    encoded = picture.encoded
    if len(encoded) > MOST_IMAGE_BYTES:
        return ""
    path = folder / picture.digest
    if not path.exists():
        path.write_bytes(encoded)
    return path.name


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # what UTF-8 lacks, half of a surrogate pair, is written as JSON's escape for it
    with path.open("w", encoding="utf-8", errors="backslashreplace") as f:
        for row in rows:
            f.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


def sample_row(s: Sample, replies: bool, of_tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the row of a sample; of_tokens: what token_fields says of it.

    A number of the reward function that has the name of one of our columns is info_<name>,
    whether this row has the column or not.
    """
    row = {
        "prompt_id": s.prompt.id, "group": s.group, "sample": s.index,
        "data_source": s.prompt.data_source, "prompt": s.prompt.text, "response": s.response,
        "ground_truth": s.prompt.ground_truth,
        "reward": s.reward, "invalid": s.invalid, "finish_reason": s.finish_reason,
        "response_tokens": s.num_response_tokens,
        **({"demonstration": True} if s.is_demonstration else {}),
        **({} if s.pred is None else {"pred": s.pred}),
        **({} if s.prompt.chat is None else {"chat": without_pictures(s.prompt.chat)}),
        **({"messages": s.messages} if replies else {}),
        **({"turn_rewards": s.turn_rewards} if s.turn_rewards else {}),
        **({"rows": [row.messages for row in s.rows]} if len(s.rows) > 1 else {}),
        **({} if s.agent_output is None else {"agent_output": s.agent_output}),
        **(judge_fields(s.judgement) if s.judgement is not None else {}),
        **({"images": []} if s.prompt.images else {}),  # their files, once they are written
        **of_tokens,
    }  # fmt: skip
    reported = s.reward_info.items()
    return row | {f"info_{name}" if name in COLUMNS_OF_ROWS else name: v for name, v in reported}


def judge_fields(judgement: Judgement) -> dict[str, Any]:
    return {"judge_score": judgement.score, "judge_verdicts": judgement.verdicts}


def without_pictures(chat: list[Message]) -> list[Message]:
    """Returns the chat of a prompt with parts that say only where an image is."""
    return [
        message | {"content": [
            {"type": part["type"]}
            if isinstance(part, dict) and part.get("type") in ("image", "video") else part
            for part in message["content"]
        ]}
        if isinstance(message.get("content"), list) else message
        for message in chat
    ]  # fmt: skip


def merged(metrics: dict[str, float], topology: Topology) -> dict[str, float]:
    """Merges what each rank knows, on every rank; of what several know, the first's counts.
    Collective.
    """
    result: dict[str, float] = {}
    for part in gather_to_first(metrics, topology.control) or []:
        result |= {name: value for name, value in part.items() if name not in result}
    return broadcast_from_first(result, topology.control)


def count_replies(s: Sample, add: Callable[[str, float], None]) -> None:
    """turns/mean; turns/cut: fraction that was refused another; turns/reply_tokens per sample, and
    tools/calls; of these tools/failed and tools/unread, fractions. agents/rows: sequences of a
    trajectory that are trained on."""
    add("turns/mean", s.num_turns)
    add("turns/cut", s.finish_reason == "turns")
    add("turns/reply_tokens", sum(len(r.loss_mask) - sum(r.loss_mask) for r in s.rows or [s]))
    if s.rows:
        add("agents/rows", len(s.rows))
    read = [message for message in s.messages if message["role"] == "tool"]
    unread = [call for message in s.messages for call in message.get(UNREAD, ())]
    add("tools/calls", len(read) + len(unread))
    for number, call in enumerate([*read, *unread]):
        add("tools/failed", bool(call.get("is_error")))
        add("tools/unread", number >= len(read))


def count_verdicts(judgement: Judgement, add: Callable[[str, float], None]) -> None:
    """reward/judge_score; reward/judge_unparsable: fraction of the verdicts;
    reward/judge_tokens: of all verdicts on a sample."""
    if judgement.score is not None:
        add("reward/judge_score", judgement.score)
    add("reward/judge_unparsable", judgement.num_unparsable / len(judgement.verdicts))
    add("reward/judge_tokens", judgement.num_tokens)


def count_source(s: Sample, reserved: Collection[str], add: Callable[[str, float], None]) -> None:
    """Adds the same numbers of the sample under the name of its data source."""
    source = s.prompt.data_source
    add(f"{source}/response/mean_tokens", s.num_response_tokens)
    add(f"{source}/turns/mean", s.num_turns)
    if s.reward is None:
        return
    add(f"{source}/reward/mean", s.reward)
    for name, value in s.reward_info.items():
        logged_as = f"info_{name}" if name in reserved else name
        add(f"{source}/reward/{logged_as}", value)


def sample_metrics(
    samples: list[Sample],
    topology: Topology,
    penalised: bool = False,
    replies: bool = False,
    per_turn: bool = False,
) -> dict[str, float]:
    """Numbers about all ranks' samples. Rewards are means over valid samples. Collective.

    reward/mean, reward/std, reward/invalid (count), reward/<what a reward function reports>,
    response/mean_tokens, response/max_tokens, response/truncated (fraction), and what
    count_source has where there are several sources. replies: see count_replies. per_turn:
    reward/turns, the sum of a sample's, and reward/outcome, the rest of its reward. Where there is
    a judge, see count_verdicts.
    """
    sums: dict[str, tuple[Fraction, int]] = {}  # name -> (sum without rounding, count)

    def add(name: str, value: float) -> None:
        total, count = sums.get(name, (Fraction(), 0))
        sums[name] = (total + Fraction(float(value)), count + 1)

    for s in samples:
        add("response/mean_tokens", s.num_response_tokens)
        add("response/truncated", s.finish_reason == "length")
        if replies:
            count_replies(s, add)
        add("reward/invalid", s.invalid is not None)
        judged = RESERVED_JUDGED if s.judgement is not None else ()
        reserved = (*RESERVED, *(RESERVED_PER_TURN if per_turn else ()), *judged)
        if s.judgement is not None:
            count_verdicts(s.judgement, add)
        count_source(s, reserved, add)
        if s.reward is None:
            continue
        if penalised:
            add("reward/overlong_penalty", s.penalty)
        add("reward/mean", s.reward)
        add("reward/std", s.reward**2)
        for name, value in s.reward_info.items():
            add(f"reward/info_{name}" if name in reserved else f"reward/{name}", value)
        if per_turn:
            of_turns = math.fsum(s.turn_rewards)
            add("reward/turns", of_turns)
            add("reward/outcome", s.reward - of_turns)
    longest = max((s.num_response_tokens for s in samples), default=0)
    everyone = gather_to_first((sums, longest), topology.control)
    found = None if everyone is None else metrics_of_sums(everyone)
    return broadcast_from_first(found, topology.control)


def metrics_of_sums(
    everyone: list[tuple[dict[str, tuple[Fraction, int]], int]],
) -> dict[str, float]:
    """everyone: by rank, the sum and the count of each metric and the longest answer."""
    # which rank made a sample is a matter of timing: the sum must not depend on it
    names = {name for part, _ in everyone for name in part}
    totals: dict[str, tuple[float, float]] = {}
    for name in names:
        found = [part[name] for part, _ in everyone if name in part]
        total = float(sum(part for part, _ in found))
        totals[name] = (total, float(sum(count for _, count in found)))
    metrics = {name: total / count for name, (total, count) in sorted(totals.items())}
    if "reward/mean" in metrics:
        variance = metrics["reward/std"] - metrics["reward/mean"] ** 2
        metrics["reward/std"] = max(variance, 0.0) ** 0.5
    metrics["response/tokens"] = totals.get("response/mean_tokens", (0.0, 0.0))[0]
    metrics["reward/invalid"] = totals.get("reward/invalid", (0.0, 0.0))[0]
    metrics["response/max_tokens"] = max(most for _, most in everyone)
    return without_single_source(metrics)


def without_single_source(metrics: dict[str, float]) -> dict[str, float]:
    """Leaves out what repeats the metrics of all samples: that of the only data source."""
    tokens = "/response/mean_tokens"
    sources = [name.removesuffix(tokens) for name in metrics if name.endswith(tokens)]
    if len(sources) != 1:
        return metrics
    own = {f"{sources[0]}/{name}" for name in (*metrics, "turns/mean")}
    return {name: value for name, value in metrics.items() if name not in own}
