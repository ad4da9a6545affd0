"""`make bench-algos`: addition with a noisy verifier, with every estimator and every policy loss.

    python examples/arithmetic/bench_algos.py [--kind estimators|losses] [--only NAME ...]
        [--seeds 0 1 2] [--jobs 2] [--again] [--report]

Every run starts from the fine-tuned model of the quickstart, and is the command that a user types:
spmdrl.ppo with examples/arithmetic/noisy.py, on one rank with one thread, under a time limit. The
seed is that of training; data, model and the verifier's errors stay the same.

What came of a run is kept in runs/bench_algos, so a second call makes only the runs that are not
there, or whose command, config, start, data or algorithms (spmdrl/algo) are others now; --again
makes them all. Writes docs/bench_algos.md and docs/pictures/bench_algos.png; where some of the
methods or other seeds were asked for, or a run failed, into runs/bench_algos instead, so that the
documents always hold all of them. --report writes them from the runs that are there and makes none.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from bench_algos_report import Result, this_machine, write
from quickstart import ASSETS, OUT_OF_TIME, end, read_metrics, run_stage

from spmdrl.algo.advantages import ESTIMATORS
from spmdrl.algo.losses import POLICY_LOSSES
from spmdrl.algo.preference_losses import PREFERENCE_LOSSES
from spmdrl.config import AlgoConfig

RUNS = Path("runs/bench_algos")
CONFIG = "examples/arithmetic/noisy.py"
SFT_CONFIG = "configs/qwen3_tiny_arithmetic_sft_cpu.py"
START = ASSETS / "sft_model/model.safetensors"
DATA = (ASSETS / "mixture.parquet", ASSETS / "eval.parquet")
KINDS = ("estimators", "losses")
SEEDS = [0, 1, 2]
LIMIT_S = 600  # of one run
LAST_STEPS = 4  # whose samples are counted

# What a method needs beside its name: roles, and options whose defaults are not its paper's. The
# shares of tokens of clip_cov and kl_cov are larger than their paper's, as the batch is small.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "estimators": {
        "gae": {"critic.dtype": "float32", "critic.optim.lr": 1e-3},
        "gdpo": {"algo.advantage_args": {"reward_keys": {"units": 1.0, "tens": 1.0}}},
        "prime": {"algo.advantage_args.beta": 0.05, "prm.dtype": "float32",
                  "prm.optim.lr": 1e-4, "ref.dtype": "float32"},
        "remax": {"rollout.greedy_baseline": True},
        "win_rate": {"algo.policy_loss": "sppo"},
    },
    "losses": {
        "gspo": {"algo.loss_args": {"clip_low": 3e-4, "clip_high": 4e-4}},
        "luspo": {"algo.loss_args": {"clip_low": 2e-3, "clip_high": 2.5e-3}},
        "cispo": {"algo.loss_args": {"clip_low": 1.0, "clip_high": 4.0}},
        "clip_cov": {"algo.loss_args.cov_fraction": 0.01},
        "kl_cov": {"algo.loss_args.cov_fraction": 0.02},
        "geo_mean": {"algo.loss_args": {"clip_low": 0.4, "clip_high": 0.4}},
        "dppo_kl": {"algo.loss_args": {"clip_low": 0.05, "clip_high": 0.05}},
        "sppo": {"algo.advantage": "win_rate"},
        "dpo": {"ref.dtype": "float32"},
        "ipo": {"ref.dtype": "float32"},
    },
}  # fmt: skip
# Methods without runs of their own, and why. Second names of a loss are found by `second_names`.
LEFT_OUT = {
    "estimators": {
        "tir_optimal_token_baseline": "the same as `optimal_token_baseline` where no tool writes",
    },
    "losses": {},
}  # fmt: skip


@dataclass(frozen=True)
class Method:
    """An estimator with the default loss, or a loss with the default estimator."""

    kind: str
    name: str
    settings: tuple[tuple[str, Any], ...]  # of the config, by dotted names

    @property
    def run_name(self) -> str:
        """Methods of the same settings have the same runs: the default loss and estimator."""
        chosen = dict(self.settings)
        return f"{chosen['algo.advantage']}-{chosen['algo.policy_loss']}"


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    os.chdir(Path(__file__).resolve().parents[2])
    every = all_methods()
    asked = [method for method in every if is_asked(method, args.kind, args.only)]
    if not asked:
        parser.error(f"--kind {args.kind} has none of {args.only}")
    if not args.report:
        make_start()
        run_all(asked, args)
    results = [result for method in asked for seed in args.seeds
               if (result := read_result(method, seed)) is not None]  # fmt: skip
    missing = len(asked) * len(args.seeds) - len(results)
    if results:
        pages, pictures = Path("docs"), Path("docs/pictures")
        if missing or len(asked) < len(every) or args.seeds != SEEDS:
            pages = pictures = RUNS
        write(results, without_runs(), pages, pictures)
    sys.exit(f"bench_algos: {missing} runs are missing" if missing else 0)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="every estimator and policy loss on a small task")
    names = sorted({method.name for method in all_methods()})
    parser.add_argument("--kind", choices=KINDS, help="only these")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--again", action="store_true", help="also the runs that are there")
    parser.add_argument("--report", action="store_true", help="run nothing, read what was run")
    return parser


# ---- methods


def all_methods() -> list[Method]:
    """Returns every estimator and every policy loss that there is, less those left out."""
    default = AlgoConfig()
    found = []
    for kind, names in names_of_kinds().items():
        for name in names:
            if name in without_runs()[kind]:
                continue
            chosen: dict[str, Any] = {
                "algo.advantage": name if kind == "estimators" else default.advantage,
                "algo.policy_loss": name if kind == "losses" else default.policy_loss,
            }
            settings = chosen | OPTIONS[kind].get(name, {})
            found.append(Method(kind, name, tuple(settings.items())))
    return found


def names_of_kinds() -> dict[str, list[str]]:
    """Returns the names that algo.advantage and algo.policy_loss take."""
    of_pairs = [name for name, loss in PREFERENCE_LOSSES.items() if not loss.unpaired]
    return {"estimators": list(ESTIMATORS), "losses": [*POLICY_LOSSES, *of_pairs]}


def without_runs() -> dict[str, dict[str, str]]:
    """Returns the reasons of the methods that are left out, by kind and name."""
    return {**LEFT_OUT, "losses": {**LEFT_OUT["losses"], **second_names(POLICY_LOSSES)}}


def second_names(registry: Mapping[str, Any]) -> dict[str, str]:
    """Returns the names whose value an earlier name has too."""
    names = list(registry)
    firsts = {name: next(n for n in names if registry[n] == registry[name]) for name in names}
    return {name: f"another name of `{first}`" for name, first in firsts.items() if name != first}


def is_asked(method: Method, kind: str | None, only: Sequence[str] | None) -> bool:
    return kind in (None, method.kind) and (not only or method.name in only)


# ---- running


def make_start() -> None:
    """The model that all runs start from, by the quickstart's own commands, unless it is there."""
    if not all(path.exists() for path in DATA):
        run_stage("assets", [sys.executable, "examples/arithmetic/make_assets.py"])
    if not START.exists():
        run_stage("sft", torchrun("spmdrl.sft", "--config", SFT_CONFIG))


def torchrun(*words: str) -> list[str]:
    """One rank; --standalone picks a free port, or two runs could not go side by side."""
    launch = ["spmdrl.launch", "--standalone", "--nproc-per-node", "1", "-m"]
    return [sys.executable, "-m", *launch, *words]


def words_of(method: Method, seed: int) -> list[str]:
    """Returns what follows `spmdrl.ppo` on the command line of a run."""
    run = {"run_dir": folder_of(method, seed), "seed": seed}
    settings = run | dict(method.settings)
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    return ["--config", CONFIG, *words]


def key_of(method: Method, seed: int) -> list[str]:
    """Returns what a run is: a digest of the files that decide over it, and its command."""
    return [digest(), *words_of(method, seed)]


@functools.cache
def digest() -> str:
    """Returns a digest of config, start, data and algorithms, as they are at the first call."""
    found = hashlib.sha256()
    for path in (Path(CONFIG), START, *DATA, *sorted(Path("spmdrl/algo").glob("*.py"))):
        found.update(path.read_bytes() if path.exists() else b"")
    return found.hexdigest()


def folder_of(method: Method, seed: int) -> Path:
    return RUNS / f"{method.run_name}_{seed}"


def run_all(methods: Sequence[Method], args: argparse.Namespace) -> None:
    """Makes the runs that are not there, all methods with one seed before those with the next."""
    todo = {folder_of(method, seed): (method, seed) for seed in args.seeds for method in methods
            if args.again or read_result(method, seed) is None}  # fmt: skip
    started_at = time.monotonic()
    with ProcessPoolExecutor(args.jobs) as pool:
        runs = {pool.submit(run_one, *each): each for each in todo.values()}
        try:
            for done, run in enumerate(as_completed(runs), 1):
                method, seed = runs[run]
                left_s = (time.monotonic() - started_at) / done * (len(runs) - done)
                print(
                    f"{done:3}/{len(runs)} {method.run_name:28} seed {seed} {run.result()}, "
                    f"{left_s / 60:.0f} min left", flush=True,
                )  # fmt: skip
        finally:  # Ctrl-C reaches the runs that are going, too, and no other one begins
            pool.shutdown(wait=False, cancel_futures=True)


def run_one(method: Method, seed: int) -> str:
    """Makes one run and keeps what came of it. Returns that in words.

    The processes of a pool make one run after the other, so that the CPU time of a pool process's
    children is that of its run.
    """
    folder, words = folder_of(method, seed), words_of(method, seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    cpu_before = cpu_seconds()
    code = launch(["nice", "-n", "5", *torchrun("spmdrl.ppo", *words)], folder / "output.txt")
    if code != 0:
        return f"exit code {code}: {folder}/output.txt"
    rows = read_metrics(folder / "metrics.jsonl")
    kept = {"run": key_of(method, seed), "machine": this_machine(),
            "cpu_s": cpu_seconds() - cpu_before, **outcome(rows)}  # fmt: skip
    draft = folder / "result.draft"
    draft.write_text(json.dumps(kept) + "\n")
    draft.rename(folder / "result.json")
    return f"{kept['cpu_s']:.0f} CPU s, {kept['curve'][0][1]:.2f} -> {kept['curve'][-1][1]:.2f}"


def launch(words: list[str], output: Path) -> int:
    """Returns the exit code."""
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with output.open("w") as file:
        process = subprocess.Popen(
            words, env=os.environ | env, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            return process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return OUT_OF_TIME
        finally:
            if process.poll() is None:
                end(process)


def cpu_seconds() -> float:
    """Returns the processor time of all commands that have ended, of their children too."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def outcome(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Returns held-out accuracy by step, and the share of right samples in the last steps."""
    right = [row["reward/right"] for row in rows if "reward/right" in row]
    curve = [(int(row["step"]), row["eval/reward"]) for row in rows if "eval/reward" in row]
    return {"curve": curve, "samples_right": mean(right[-LAST_STEPS:])}


def read_result(method: Method, seed: int) -> Result | None:
    """Returns None where there is no run of this command."""
    path = folder_of(method, seed) / "result.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    if kept.get("run") != key_of(method, seed):
        return None
    curve = tuple((step, accuracy) for step, accuracy in kept["curve"])
    return Result(
        method.kind, method.name, method.settings, curve, kept["samples_right"], kept["cpu_s"],
        seed, kept["machine"],
    )  # fmt: skip


if __name__ == "__main__":
    main()
