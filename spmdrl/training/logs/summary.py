"""Sums up what came of a run, in words: printed when it ends, and left in its folder as
summary.txt.

Everything is read from the run's own files, so a resumed run tells all of its history.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spmdrl.checkpoint.earlier_runs import METRICS, step_of
from spmdrl.checkpoint.format import steps_in
from spmdrl.config import PpoConfig, RunConfig, SupervisedConfig
from spmdrl.config.words import counted
from spmdrl.distributed.progress import spoken
from spmdrl.training.logs.answers import SampleRow, few_answers, one_line, reward_text
from spmdrl.training.logs.curves import REWARD, Curve, Points, Row, points
from spmdrl.training.logs.step_line import RESERVED, plain

SUMMARY = "summary.txt"
MOST_AVERAGED = 10  # steps at the start and at the end, for the training curve
MOST_PARTS = 4  # of the reward


@dataclass(frozen=True)
class LaunchCommand:
    """The command line by which the run was started, to write commands that work beside it."""

    program: str  # "spmdrl.ppo"
    arguments: tuple[str, ...]  # as they were typed behind it
    ranks_here: int  # on this host
    hosts: int
    launched: bool  # by torchrun or spmdrl.launch

    def command(self, program: str, dropped: Sequence[str] = (), *more: str) -> str:
        """Returns the same command line for `program`, without the options `dropped`, and with
        `more` at its end.
        """
        launcher = ["-m", "spmdrl.launch", "--nproc-per-node", str(self.ranks_here)]
        kept = without_options(self.arguments, dropped)
        words = ["python", *(launcher if self.launched else []), "-m", program, *kept, *more]
        return shlex.join(words)


@dataclass(frozen=True)
class FinishedRun:
    """A run that has just ended."""

    config: RunConfig
    curve: Curve
    start: LaunchCommand
    step: int  # the last that was done
    stopped: bool  # by a signal, before config.steps

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run_dir)


def without_options(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """Without `--name value`, `--name=value` and `--name.field value` of these names."""
    kept: list[str] = []
    dropping = False  # the next word, unless it is an option: the value of one that is dropped
    for word in arguments:
        if word.startswith("--"):
            name, equals, _ = word[2:].replace("-", "_").partition("=")
            found = any(name == other or name.startswith(f"{other}.") for other in names)
            dropping = found and not equals
        else:
            found, dropping = dropping, False
        if not found:
            kept.append(word)
    return kept


def read_rows(run_dir: Path) -> list[Row]:
    """The rows of metrics.jsonl, with NaN for null; what is no row of metrics is passed over."""
    path = Path(run_dir, METRICS)
    lines = path.read_bytes().splitlines() if path.exists() else []
    rows = [json.loads(line.strip(b"\0")) for line in lines if step_of(line) is not None]
    return [{n: math.nan if value is None else value for n, value in r.items()} for r in rows]


def summary(ended: FinishedRun, rows: Sequence[Row]) -> str:
    """The whole text; of a run that a signal stopped only what there is to know to go on."""
    parts = [[headline(ended), *timing_lines(rows)], result_lines(ended, rows)]
    if not ended.stopped:
        parts.append(answer_lines(ended, rows))
        parts.append(file_lines(ended))
    parts.append(next_lines(ended, rows))
    return "\n\n".join("\n".join(part) for part in parts if part)


# ---- what was done


def headline(ended: FinishedRun) -> str:
    steps = f"{ended.step} of {counted(ended.config.steps, 'step')} done"
    return f"{'Stopped' if ended.stopped else 'Finished'}: {steps}; run folder {ended.run_dir}"


def timing_lines(rows: Sequence[Row]) -> list[str]:
    """Over all steps that the history has, those before a resume too."""
    timed = [row for row in rows if "time/step_s" in row]
    seconds = sum(row["time/step_s"] for row in timed)
    if not seconds:
        return []
    tokens = sum(row["throughput/tokens_per_s"] * row["time/step_s"] for row in timed)
    return [
        f"{counted(len(timed), 'step')} took {spoken(seconds)}, {seconds / len(timed):.3g} s "
        "each, at "
        f"{tokens / seconds:,.0f} tokens/s (without evaluations, checkpoints and the start)"
    ]


def result_lines(ended: FinishedRun, rows: Sequence[Row]) -> list[str]:
    curve = ended.curve
    training = points(rows, curve.training)
    table: list[tuple[str, str]] = []
    for name, metric in {curve.name: curve.held_out, **held_out_parts(rows)}.items():
        held_out = points(rows, metric)
        if held_out:
            table.append((f"{name} on held-out data", from_to(held_out)))
    if training:
        table.append((f"{curve.name} in training", first_and_last(training)))
    best = best_line(ended, rows)
    if best:
        table.append(best)
    width = max((len(name) for name, _ in table), default=0)
    return [f"{name:{width}}  {value}" for name, value in table]


def held_out_parts(rows: Sequence[Row]) -> dict[str, str]:
    """Names and metrics of the numbers that reward functions report beside their score, such as
    an accuracy; of many the first MOST_PARTS.
    """
    head = f"{REWARD.held_out}/"
    metrics = dict.fromkeys(name for row in rows for name in row if name.startswith(head))
    names = {plain(name.removeprefix(head)): name for name in metrics}
    reported = [name for name in names if name not in RESERVED]
    return {name: names[name] for name in reported[:MOST_PARTS]}


def from_to(found: Points) -> str:
    (first, before), (last, after) = found[0], found[-1]
    if len(found) == 1:
        return f"{before:.4g} after step {first}"
    return f"{before:.4g} (step {first}) -> {after:.4g} (step {last})"


def first_and_last(found: Points) -> str:
    """Means of the first and the last steps: a single one is a matter of luck."""
    if len(found) == 1:
        return f"{found[0][1]:.4g} (step {found[0][0]})"
    count = min(MOST_AVERAGED, len(found) // 2)
    return " -> ".join(
        f"{sum(value for _, value in part) / count:.4g} ({span(part)})"
        for part in (found[:count], found[-count:])
    )


def span(found: Points) -> str:
    first, last = found[0][0], found[-1][0]
    return f"step {first}" if first == last else f"steps {first} to {last}"


def best_line(ended: FinishedRun, rows: Sequence[Row]) -> tuple[str, str] | None:
    found = best_step(ended, rows)
    if found is None:
        return None
    metric, step, value = found
    folder = folders(ended).get(step)
    if step == 0:
        where = "the model that the run started from"
    else:
        where = f"in {folder}" if folder else "its checkpoint was not kept"
    return "best", f"{metric} {value:.4g} after step {step}; {where}"


def best_step(ended: FinishedRun, rows: Sequence[Row]) -> tuple[str, int, float] | None:
    """(metric, step, value): by what chooses checkpoints where it does, else by the run's curve. Of
    equals the latest."""
    choice = ended.config.checkpoint
    wanted = [(ended.curve.held_out, ended.curve.best), (ended.curve.training, ended.curve.best)]
    if choice.keep_best:
        wanted.insert(0, (choice.best_metric, choice.best_is))
    for metric, best in wanted:
        found = points(rows, metric)
        if found:
            sign = 1 if best == "largest" else -1
            step, value = max(found, key=lambda point: (sign * point[1], point[0]))
            return metric, step, value
    return None


def folders(ended: FinishedRun) -> dict[int, Path]:
    """The checkpoints that stand, by step."""
    return dict(steps_in(ended.run_dir / "checkpoints"))


# ---- answers


def answer_lines(ended: FinishedRun, rows: Sequence[Row]) -> list[str]:
    """Held-out answers of the last evaluation, else answers of the last step."""
    if not isinstance(ended.config, PpoConfig):
        return []
    evaluated = points(rows, ended.curve.held_out)
    names = [f"eval_{step}" for step, _ in evaluated[-1:]] + [f"step_{ended.step}"]
    for name in names:
        path = Path(ended.run_dir, "samples", f"{name}.jsonl")
        answers = few_answers(path)
        if answers:
            break
    else:
        return []
    lines = [f"some answers (more in {path}):"]
    for row in answers:
        lines += [
            f"  {reward_text(row)}" + truth_text(row),
            f"    prompt: {one_line(row['prompt'])}",
            f"    answer: {one_line(row['response'])}",
        ]
    return lines


def truth_text(row: SampleRow) -> str:
    truth = row["ground_truth"]
    return "" if truth is None else f", ground truth: {one_line(str(truth), 60)}"


# ---- files


def file_lines(ended: FinishedRun) -> list[str]:
    """Returns lines that say what lies where, of what is there."""
    config, run_dir = ended.config, ended.run_dir
    model: list[tuple[Path, str]] = []
    if isinstance(config, SupervisedConfig):
        model = [(Path(config.out), "the trained model, for transformers, vLLM and spmdrl.ppo")]
        if config.actor.lora is not None and config.actor.lora.by_source:
            model = [(Path(config.out, "adapter"), "the adapters, for peft, vLLM and spmdrl.ppo")]
    entries = [
        *model,
        (run_dir / METRICS, "all numbers of each step"),
        (run_dir / ended.curve.picture, f"{ended.curve.name} by step, as a picture"),
        (run_dir / "samples", "prompts, answers and rewards"),
        (run_dir / "checkpoints", "weights and optimizer: step " + told_steps(ended)),
        (run_dir / "trace", "what each rank did when"),
    ]
    # the picture is drawn when the other ranks have gone
    there = [e for e in entries if holds_something(e[0]) or e[0].name == ended.curve.picture]
    width = max(len(str(path)) for path, _ in there)
    return ["files:", *(f"  {path!s:{width}}  {what}" for path, what in there)]


def holds_something(path: Path) -> bool:
    return path.is_file() or (path.is_dir() and any(path.iterdir()))


def told_steps(ended: FinishedRun) -> str:
    return ", ".join(map(str, folders(ended)))


# ---- commands


def next_lines(ended: FinishedRun, rows: Sequence[Row]) -> list[str]:
    commands = continue_commands(ended)
    if not ended.stopped:
        commands = [*model_commands(ended, rows), *look_commands(ended), *commands]
    lines = ["next:"]
    for what, command in commands:
        lines += [f"  # {what}", f"  {command}"]
    return lines if commands else []


def model_commands(ended: FinishedRun, rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Returns commands for the best checkpoint that is kept, else the newest. Fine-tuning has
    written its model.
    """
    kept, config = folders(ended), ended.config
    if isinstance(config, SupervisedConfig):
        return []
    if not kept:
        what = "no checkpoint was saved, so the trained weights are gone. To keep them next time"
        every = "checkpoint.every_steps"
        return [again(ended, what, [every], [f"--{every}", str(config.steps)])]
    best = best_step(ended, rows)
    step = best[1] if best is not None and best[1] in kept else max(kept)
    folder, out = str(kept[step]), f"{config.run_dir}_step_{step}"
    export = ["python", "-m", "spmdrl.export", "--checkpoint", folder, "--out", out]
    if config.trust_remote_code:
        export.append("--trust_remote_code")
    lora = getattr(config.actor, "lora", None)
    if lora is not None and lora.by_source:  # no one model has them all
        what = f"write the adapters of step {step} as folders of peft's"
        return [(what, shlex.join([*export, "--adapter"]))]
    evaluation = ended.start.command(
        "spmdrl.evaluate", ["resume", "profile"], "--checkpoint", folder
    )
    found = [(f"write the model of step {step} as a Hugging Face folder", shlex.join(export))]
    if config.data.eval is not None:
        found.insert(0, (f"evaluate step {step} on data.eval again", evaluation))
    return found


def look_commands(ended: FinishedRun) -> list[tuple[str, str]]:
    """Ways to look at the run."""
    folder = str(ended.run_dir)
    found = [
        ("look at curves and answers", ["python", "-m", "spmdrl.view", folder]),
        ("see what each rank did when", ["python", "-m", "spmdrl.timeline", folder]),
    ]
    if "tensorboard" in ended.config.trackers:
        found.insert(0, ("see all curves in a browser", ["tensorboard", "--logdir", folder]))
    return [(what, shlex.join(words)) for what, words in found]


def continue_commands(ended: FinishedRun) -> list[tuple[str, str]]:
    """Returns the command by which the run goes on from its newest checkpoint."""
    if not folders(ended):
        return []
    more = ["--resume", "auto"]
    what, dropped = "go on", ["resume"]
    if not ended.stopped:
        more, dropped = ["--steps", str(2 * ended.config.steps), *more], ["resume", "steps"]
        if ended.config.epochs:
            more, dropped = ["--epochs", "0", *more], [*dropped, "epochs"]
        what = f"train for {counted(ended.config.steps, 'more step')}"
    return [again(ended, what, dropped, more)]


def again(
    ended: FinishedRun, what: str, dropped: Sequence[str], more: Sequence[str]
) -> tuple[str, str]:
    """The run's own command with other options; where it has several hosts these options alone."""
    if ended.start.hosts > 1:
        return f"{what}: the command that started the run, with", shlex.join(more)
    return what, ended.start.command(ended.start.program, dropped, *more)
