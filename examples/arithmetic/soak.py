"""`make soak`: trains twice, once left alone and once with ranks killed and frozen; compares.

    python examples/arithmetic/soak.py [--part all|faults|memory] [--steps 500] [--faults 10]
                                       [--seed 0] [--config FILE]

The part "memory" trains a model of 109 million random weights for 60 steps on one rank, with
prompts of many lengths and a checkpoint every 10 steps: after step 20 its resident
memory must not grow by 2 %.

Both runs of the part "faults" have the config's unreliable rewards. In the second a rank is killed
(SIGKILL) or frozen (SIGSTOP) at steps drawn from the seed, and torchrun's restarts bring the run
back. It must then have every step once, with the numbers of the first run, bit for bit; the first
must not have grown in memory or open files. Leaves runs/soak/soak.json; exit code 1 where something
fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

CONFIG = "configs/qwen3_tiny_arithmetic_soak_cpu.py"
MEMORY_CONFIG = "configs/qwen3_109m_arithmetic_soak_cpu.py"
MEMORY_STEPS = (20, 60)  # from the first on, to the second
RANKS = 2
MEASURED = (
    "time",
    "throughput/",
    "idle/",
    "moved/",
    "memory/",
    "checkpoint/",
)  # by a clock
MOST_GROWTH = 0.02  # of resident memory, from the first tenth of the steps to the last
LONG = 200  # steps, before which memory still grows into its place
SECONDS_PER_STEP = 20.0  # beyond all limits: a hang


@dataclass
class Fault:
    step: int  # it strikes when this step's line stands in metrics.jsonl
    kind: str  # "SIGKILL" or "SIGSTOP"
    rank: int
    back_s: float = 0.0  # until a step was done by the run that took over


def main() -> None:
    parser = argparse.ArgumentParser(description="train with faults, and without; compare")
    parser.add_argument("--part", choices=("all", "faults", "memory"), default="all")
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="runs/soak")
    args = parser.parse_args()
    root, own_config = Path(__file__).resolve().parents[2], args.config == CONFIG
    if own_config or args.part == "memory":
        os.chdir(root)
    out = Path(args.out)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    report: dict[str, Any] = {"steps": args.steps, "seed": args.seed, "checks": []}
    if args.part != "memory":
        if own_config:
            make_model()
        faults(out, args.config, report, args.faults)
    if args.part == "memory" or (args.part == "all" and own_config):
        memory(out, report)
    Path(out, "soak.json").write_text(json.dumps(report, indent=1) + "\n")
    show(report)
    sys.exit(0 if all(check["holds"] for check in report["checks"]) else 1)


def faults(out: Path, config: str, report: dict[str, Any], count: int) -> None:
    """Trains twice, and adds to the report what it found."""
    steps = report["steps"]
    calm = run(config, out / "calm", steps, [])
    struck = planned(steps, count, report["seed"])
    rough = run(config, out / "faults", steps, struck)
    report["faults"] = [asdict(f) for f in struck]
    report["invalid_samples"] = sum(row.get("reward/invalid", 0.0) for row in calm)
    report["checks"] += checks(calm, rough, steps)


def memory(out: Path, report: dict[str, Any]) -> None:
    """Trains the large model on one rank, and adds to the report how its memory grew."""
    if not Path("runs/arithmetic/large/model/config.json").exists():
        command = ["examples/arithmetic/make_assets.py", "--out", "runs/arithmetic/large",
                   "--large"]  # fmt: skip
        subprocess.run([sys.executable, *command], check=True, timeout=600, env=environment())
    rows = run(MEMORY_CONFIG, out / "memory", MEMORY_STEPS[1], [], ranks=1)
    report["rss_gib"] = [row["memory/rss_gib"] for row in rows]
    report["checks"].append(growth(rows, *MEMORY_STEPS))


def growth(rows: list[dict[str, float]], first: int, last: int) -> dict[str, object]:
    """Between two steps, each the most of ten: free pages go back to the system now and then."""
    rss = {round(row["step"]): row["memory/rss_gib"] for row in rows if "memory/rss_gib" in row}
    early, late = (max(rss[step] for step in range(end - 9, end + 1)) for end in (first, last))
    peak = rows[-1]["memory/peak_rss_gib"]
    return said(
        f"resident memory of 109 million weights grows by less than {MOST_GROWTH:.0%}",
        late < early * (1 + MOST_GROWTH),
        f"{late / early - 1:+.2%} from step {first} to step {last}: {late:.2f} GiB, "
        f"at most {peak:.2f}",
    )


def make_model() -> None:
    """Data and the fine-tuned model to start from, as the quickstart makes them."""
    if Path("runs/arithmetic/sft_model/config.json").exists():
        return
    python = sys.executable
    sft = ["-m", "spmdrl.launch", "--standalone", "--nproc-per-node", str(RANKS), "-m",
           "spmdrl.sft", "--config", "configs/qwen3_tiny_arithmetic_sft_cpu.py"]  # fmt: skip
    for words in (["examples/arithmetic/make_assets.py", "--out", "runs/arithmetic"], sft):
        subprocess.run([python, *words], check=True, timeout=600, env=environment())


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def planned(steps: int, count: int, seed: int) -> list[Fault]:
    draw = random.Random(seed)
    at = sorted(draw.sample(range(1, steps), min(count, steps - 1)))
    kinds = ["SIGKILL", "SIGSTOP", "SIGKILL"]  # a freeze costs lost_timeout_s
    return [Fault(step, kinds[i % 3], draw.randrange(RANKS)) for i, step in enumerate(at)]


def run(
    config: str, run_dir: Path, steps: int, faults: list[Fault], ranks: int = RANKS
) -> list[dict[str, float]]:
    """Trains under torchrun and strikes; returns the rows of metrics.jsonl."""
    command = [
        sys.executable, "-m", "spmdrl.launch", "--standalone", "--nproc-per-node", str(ranks),
        "--max-restarts", str(len(faults) + 2), "-m", "spmdrl.ppo", "--config", config,
        "--run_dir", str(run_dir), "--steps", str(steps),
    ]  # fmt: skip
    print(f"\n== {' '.join(command[1:])}", flush=True)
    process = launched(command)
    deadline = time.monotonic() + 120 + SECONDS_PER_STEP * steps + 90 * len(faults)
    metrics = run_dir / "metrics.jsonl"
    try:
        for fault in faults:
            wait_for(lambda: last_step(metrics) >= fault.step, process, deadline)  # noqa: B023
            strike(fault, process, metrics, deadline)
        code = process.wait(max(1.0, deadline - time.monotonic()))
    finally:
        process.kill()  # does nothing to one that has ended
    if code != 0:
        sys.exit(f"soak: the run ended with exit code {code}; see {run_dir}/errors")
    return [json.loads(line) for line in metrics.open()]


def launched(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=environment())


def strike(fault: Fault, launcher: subprocess.Popen[bytes], metrics: Path, deadline: float) -> None:
    """Signals one rank; returns when the run has done another step with new processes."""
    before = ranks_of(launcher.pid)
    print(f"== soak: {fault.kind} to rank {fault.rank} after step {fault.step}", flush=True)
    os.kill(before[fault.rank], getattr(signal, fault.kind))
    struck = time.monotonic()
    wait_for(lambda: is_new(ranks_of(launcher.pid), before), launcher, deadline)
    began = last_step(metrics)
    wait_for(lambda: last_step(metrics) != began, launcher, deadline)
    fault.back_s = time.monotonic() - struck


def is_new(ranks: dict[int, int], before: dict[int, int]) -> bool:
    return len(ranks) == RANKS and not set(ranks.values()) & set(before.values())


def wait_for(condition, launcher: subprocess.Popen[bytes], deadline: float) -> None:  # type: ignore[no-untyped-def]
    while not condition():
        if launcher.poll() is not None:
            sys.exit(f"soak: the run ended too soon, with exit code {launcher.returncode}")
        if time.monotonic() > deadline:
            sys.exit("soak: over the time limit: a hang")
        time.sleep(0.1)


def ranks_of(launcher: int) -> dict[int, int]:
    """Process ids by rank: the launcher's children that train."""
    found = {}
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(launcher).children():
            with suppress(psutil.Error):  # it ended meanwhile
                if rank := child.environ().get("RANK"):
                    found[int(rank)] = child.pid
    return found


def last_step(metrics: Path) -> int:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return json.loads(lines[-1])["step"] if lines else -1


def checks(
    calm: list[dict[str, float]], rough: list[dict[str, float]], steps: int
) -> list[dict[str, object]]:
    """What must hold: text, whether it does, and what was seen."""
    differ = [
        row["step"] for row, other in zip(calm, rough, strict=False) if plain(row) != plain(other)
    ]
    scores = [next(r["reward/mean"] for r in reversed(rows)) for rows in (calm, rough)]
    found = [
        said("every step once, none lost", [r["step"] for r in rough] == list(range(steps + 1)),
             f"{len(rough)} rows"),
        said("the numbers of the undisturbed run, bit for bit", not differ,
             f"{len(calm) - len(differ)} of {len(calm)} rows equal"),
        said("the last reward as good", scores[1] >= scores[0] - 0.02,
             f"{scores[0]:.3f} undisturbed, {scores[1]:.3f} with faults"),
    ]  # fmt: skip
    tenth = max(1, steps // 10)
    some = max(4, tenth)  # rows, of which one has the fewest: a save under way has files open too
    files = [min(r["memory/open_files"] for r in calm[first : first + some])
             for first in range(tenth, len(calm) - some + 1, some)]  # fmt: skip
    # the first rows may lack what the watchdog's first beats open and keep
    found.append(said("as many open files all along", len(set(files[1:])) == 1,
                      ", ".join(f"{count:.0f}" for count in files)))  # fmt: skip
    if steps >= LONG:
        early, late = (median(r["memory/rss_gib"] for r in rows)
                       for rows in (calm[tenth : 2 * tenth], calm[-tenth:]))  # fmt: skip
        found.append(
            said(f"resident memory grows by less than {MOST_GROWTH:.0%}",
                 late < early * (1 + MOST_GROWTH),
                 f"{late / early - 1:+.2%} from the second tenth of the steps to the last")
        )  # fmt: skip
    return found


def plain(row: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in row.items() if not k.startswith(MEASURED)}


def said(what: str, holds: bool, seen: str) -> dict[str, object]:
    return {"what": what, "holds": holds, "seen": seen}


def show(report: dict[str, Any]) -> None:
    if "faults" in report:
        table = Table("fault", "after step", "rank", "s until the next step", title="soak")
        for fault in report["faults"]:
            row = (fault["kind"], str(fault["step"]), str(fault["rank"]), f"{fault['back_s']:.1f}")
            table.add_row(*row)
        Console().print(table)
    table = Table("what", "holds", "seen")
    for check in report["checks"]:
        table.add_row(str(check["what"]), "yes" if check["holds"] else "NO", str(check["seen"]))
    Console().print(table)
    if "faults" in report:
        print(f"{report['invalid_samples']:.0f} invalid samples were passed over in each run")


if __name__ == "__main__":
    main()
