"""Runs a step of a run again: python -m spmdrl.replay RUN --step 137 [--ranks 2]

From the checkpoint before the step and the samples that the run has kept (keep_samples), without a
rollout engine. Compares all numbers with those of the run and says which differs first.
The exit code is 1 where numbers differ.
--sample 5.3 shows the tokens of sample 3 of group 5, with --gradients also what each adds to the
gradient. Fields of algo, reward and rewards, such as
--algo.policy_loss gspo, or --edit FILE show beside it what another config makes of the same
samples. docs/replay.md
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fire

from spmdrl.cli.arguments import converted
from spmdrl.cli.help import asks_for_help
from spmdrl.cli.paths import check_folder, check_writable
from spmdrl.config import ConfigError
from spmdrl.config.words import counted
from spmdrl.distributed.env import before_torch, without_garbage_collection
from spmdrl.distributed.exit import FAILED, GUARD, exit_config, leave_for_torchrun
from spmdrl.distributed.output import keep_output
from spmdrl.distributed.progress import LIBRARIES, PROGRESS

if TYPE_CHECKING:
    from spmdrl.training.replay.plan import ReplayPlan
    from spmdrl.training.replay.rerun import Edit, StepNumbers
    from spmdrl.training.runtime import Runtime

Address = tuple[int, int]


@fire.decorators.SetParseFns(run_dir=str, sample=str, edit=str, config=str)  # 5.10 is no number
def main(
    run_dir: str = "", step: int = 0, ranks: int = 0, sample: str = "", edit: str = "",
    config: str = "", tolerance: float = -1.0, gradients: bool = False, **overrides: Any,
) -> None:  # fmt: skip
    """Replays one step of a run, which may still be going, and compares its numbers.

    Args:
        run_dir: the folder of the run
        step: which of its steps
        ranks: start so many processes on this host; 0: those that a launcher started, else one
        sample: P.S, to show the tokens of sample S of group P, by their numbers in samples/
        edit: a config file whose algo, reward and rewards are tried on the same samples
        config: the config file of the run, where its algo has functions
        tolerance: relative difference up to which numbers are equal; else 1e-6 where the actor
            computes in float32, 1e-2 in bfloat16, and 0 with strict=True on as many ranks
        gradients: show what each token of --sample adds to the gradient: a forward and a backward
            pass of the sample for each token
        overrides: fields of algo, reward and rewards to be tried: --algo.clip_high 0.3
    """
    if asks_for_help(overrides, main):
        return
    GUARD.install()
    keep_output()
    try:
        start_ranks(converted(ranks, int, "--ranks"))
        converted(step, int, "--step")
        tolerance = converted(tolerance, float, "--tolerance")
        address = address_of(sample)
        check_folder("RUN", run_dir)
        folder = Path(run_dir, "replay")
        check_writable("RUN/replay", str(folder))
        PROGRESS.start(f"reading {run_dir}")
        PROGRESS.now(LIBRARIES)
        before_torch()
        with without_garbage_collection():
            from spmdrl.training.fetch import fetch
            from spmdrl.training.replay.plan import make_plan
            from spmdrl.training.replay.run_config import placed, read_run_config
            from spmdrl.training.replay.token_gradients import check_gradients
            from spmdrl.training.runtime import started
        value = read_run_config(Path(run_dir), config)
        plan = make_plan(Path(run_dir), value, step)
        gradients = converted(gradients, bool, "--gradients")
        if gradients:
            check_gradients(plan.config, address)
        tried = edit_of(plan, edit, overrides)
    except ConfigError as error:
        exit_config(error)
    with started(placed(plan.config, folder, True)) as runtime:
        plan = replace(plan, config=fetch(plan.config, runtime.phases, "all", ()))
        tried = tried and tried.of(plan.config)
        differs = replay(plan, runtime, tried, address, tolerance, gradients)
    if differs:
        leave_for_torchrun(differs)
        sys.exit(FAILED)


def start_ranks(ranks: int) -> None:
    """Becomes the launcher of so many ranks, where there is none yet. Raises ConfigError where
    there is one, of another number.
    """
    if ranks < 0:
        raise ConfigError(f"--ranks {ranks}: how many processes are to be started?")
    if "RANK" in os.environ:
        world = int(os.environ["WORLD_SIZE"])
        if ranks not in (0, world):
            raise ConfigError(f"--ranks {ranks}: a launcher has started {world}; leave it out")
    elif ranks > 1:
        command = ["-m", "spmdrl.launch", "--nproc-per-node", str(ranks), "-m", "spmdrl.replay"]
        os.execv(sys.executable, [sys.executable, *command, *sys.argv[1:]])


def address_of(sample: str) -> Address | None:
    """Reads "5.3"; None for "". Raises ConfigError."""
    if not sample:
        return None
    found = re.fullmatch(r"(\d+)\.(\d+)", sample)
    if found is None:
        raise ConfigError(f"--sample {sample}: expected the numbers of group and sample, as in 5.3")
    return int(found[1]), int(found[2])


def edit_of(plan: ReplayPlan, file: str, overrides: dict[str, Any]) -> Edit | None:
    """Returns what is tried on the step's samples; None: nothing. Raises ConfigError."""
    from spmdrl.training.replay.rerun import Edit
    from spmdrl.training.replay.run_config import check_rescoring, edited_config

    if not file and not overrides:
        return None
    config = edited_config(plan.config, file, overrides)
    rescores = bool(file) or any(not name.startswith("algo") for name in overrides)
    if rescores:
        check_rescoring(config)
    return Edit(config, rescores)


def replay(
    plan: ReplayPlan, runtime: Runtime, edit: Edit | None, address: Address | None,
    tolerance: float, gradients: bool,
) -> str:  # fmt: skip
    """Runs the step, with an edit a second time, and tells of it. Returns what differs from the
    run, on every rank: "" where nothing does, or where an edit is tried. Collective over all ranks.
    """
    from spmdrl.distributed.agreement import broadcast_from_first
    from spmdrl.training.replay.rerun import check_edit, rerun

    if edit is not None:
        check_edit(plan, runtime, edit)
    found = rerun(plan, runtime, None, address, gradients)
    gc.collect()  # the models: there is room for one of each
    edited = None if edit is None else rerun(plan, runtime, edit, address, gradients)
    PROGRESS.now("")
    differs = ""
    if found is not None:
        differs = tell(plan, runtime, found, edited, address, tolerance)
    differs = broadcast_from_first(differs, runtime.topology.control)
    return differs if edit is None else ""


def tell(
    plan: ReplayPlan, runtime: Runtime, found: StepNumbers, edited: StepNumbers | None,
    address: Address | None, tolerance: float,
) -> str:  # fmt: skip
    """Prints what came of it, and writes it to step_N.json. Returns what differs from the run, ""
    where nothing does. On the first rank.
    """
    from spmdrl.training.replay import comparison

    world = runtime.topology.world
    if tolerance < 0:
        tolerance = comparison.tolerance_of(plan.config, plan.actor_ranks == world)
    compared = comparison.compare(
        plan.row, plan.computed, found.metrics, found.sums, plan.config.algo.replay_steps
    )
    lines = [f"{plan.described()}, on {counted(world, 'rank')}", ""]
    lines += comparison.comparison_lines(compared, tolerance)
    if edited is not None:
        lines += ["", "with the edit:"]
        lines += comparison.edit_lines(found.metrics, edited.metrics, found.sums, edited.sums)
    for title, numbers in (("", found), (", with the edit", edited)):
        if address is not None and numbers is not None:
            lines += ["", *sample_lines(address, title, numbers)]
    path = Path(runtime.run_dir, f"step_{plan.step}.json")
    first = comparison.first_difference(compared, tolerance)
    result = {
        "step": plan.step, "ranks": world, "tolerance": tolerance,
        "first_difference": None if first is None else asdict(first),
        "compared": [asdict(each) for each in compared], "metrics": found.metrics,
        "edited": None if edited is None else edited.metrics,
        "tokens": None if found.tokens is None else asdict(found.tokens),
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1))
    PROGRESS.line("\n".join([*lines, "", f"in {path}"]))
    return "" if first is None else comparison.verdict(compared, tolerance)


def sample_lines(address: Address, title: str, numbers: StepNumbers) -> list[str]:
    from spmdrl.training.replay.comparison import token_lines

    name = f"sample {address[0]}.{address[1]}{title}"
    table = numbers.tokens
    if table is None:
        return [f"{name}: the step has not learnt from a sample of these numbers"]
    reward = f"reward {table.reward:g}" if table.valid else "invalid, so that it has no reward"
    lines = [f"{name}: prompt {table.prompt_id}, {reward}", *token_lines(table.rows)]
    if table.grad_norm is not None:
        share = sum(row["grad_share"] for row in table.rows)
        lines.append(f"  of the update's gradient norm {table.grad_norm:.4g}, {share:+.2e} is this "
                     "sample's")  # fmt: skip
    return lines


if __name__ == "__main__":
    fire.Fire(main)
