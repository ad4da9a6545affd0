"""`make bench`: the workloads on one rank and on two, two threads in all; one JSON line each.

    python examples/add2/bench.py [--workload add2,natural,short] [--ranks 1,2]
        [--correction off,on] [--steps 12] [--options "..."] [--peers DIR] [--out FILE]

--peers DIR runs TRL too, through DIR/bench_peers.py where DIR/venv exists, in turn with spmdrl and
with the same correction, and ends with one line of ratios (spmdrl's figure over TRL's) for each
pair. The lines are appended to FILE, runs/bench.jsonl unless given. workloads.py says what is run.

    commit, processor   of this checkout, of this machine
    foreign_cores   processor time of other programs, in cores, while the steps were timed
    step_s_median   between the ends of two steps; the first two steps are dropped
    gen_s, logp_s   medians of the phases sampling and old logprobs (0: not needed)
    train_s, sync_s   medians of the update and of weights -> engine
    tokens_per_step, tokens_per_s   of answers; over step_s_median
    cpu_s_per_step, cpu_s_per_1k_tokens   user + system seconds of the process tree
    peak_rss_gb     largest sum of RSS over the tree, sampled 5 times a second (GiB; shared pages
                    count once per process); peak_pss_gb: every tenth sample, shared pages divided
    startup_s       launch to the end of the first step, less step_s_median
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent))
from workloads import ASSETS, CORRECTIONS, WORKLOADS, peer_folder

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "examples/add2"
DROPPED_STEPS = 2
SAMPLES = 32 * 8
THREADS = 2  # over all ranks
LIMIT_S = 900
ENV = {
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads would take the cores from each other
    "GOMP_SPINCOUNT": "0",
}
COMPARED = (
    "step_s_median", "cpu_s_per_step", "cpu_s_per_1k_tokens", "tokens_per_s", "peak_rss_gb",
    "startup_s",
)  # fmt: skip

Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="times the add2 workload and its like")
    add_options(parser)
    parser.add_argument("--correction", default="off", help="off, on, or both: off,on")
    parser.add_argument("--peers", type=Path, help="folder with bench_peers.py and TRL's venv")
    args = parser.parse_args()
    peers = args.peers.resolve() if args.peers else None
    out = args.out.resolve()
    os.chdir(ROOT)
    if peers and not Path(peers, "venv/bin/python").exists():
        sys.exit(f"bench: {peers} has no venv; make it with {peers}/bench_peers.sh")
    if peers and "agent" in args.workload.split(","):
        parser.error("--peers: the workload agent has no peer")
    make_assets()
    out.parent.mkdir(exist_ok=True)
    for name, ranks, correction in product(
        args.workload.split(","), map(int, args.ranks.split(",")), args.correction.split(",")
    ):
        own = measure(name, ranks, correction, args.steps, args.options)
        report(own, out)
        if peers:
            theirs = run_peer(peers, name, ranks, correction, args.steps)
            report(theirs, out)
            ratios = {key: round(own[key] / theirs[key], 2) for key in COMPARED}
            report({"ratio": f"{own['peer']} / {theirs['peer']}", "workload": name,
                    "correction": correction, **ratios}, out)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of a comparison of commits too."""
    parser.add_argument("--workload", default="add2", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--ranks", default="1,2", help="comma separated")
    parser.add_argument("--options", type=str.split, default=[],
                        help="further ones of spmdrl.ppo, in quotes: '--actor.fsdp 1'")  # fmt: skip
    parser.add_argument("--steps", type=int, default=12, help="two of them are dropped")
    parser.add_argument("--out", type=Path, default=Path("runs/bench.jsonl"),
                        help="file that the JSON lines are appended to")  # fmt: skip


def make_assets() -> None:
    command = [sys.executable, "examples/add2/make_assets.py", str(ASSETS)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120, stderr=subprocess.DEVNULL)


def report(record: Record, out: Path) -> None:
    line = json.dumps(record)
    print(line, flush=True)
    with out.open("a") as f:
        f.write(line + "\n")


def measure(
    name: str, ranks: int, correction: str = "off", steps: int = 12,
    options: Sequence[str] = (), root: Path = ROOT,
) -> Record:  # fmt: skip
    """One run of spmdrl, of the checkout `root`. Exits the process where it fails; its output is
    then on stderr.
    """
    run_dir = root / ASSETS / f"run_{name}_{ranks}"
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [sys.executable, "-m", "spmdrl.launch", "--standalone"]
    config = f"{FOLDER}/{WORKLOADS[name].config}"
    command += ["--nproc-per-node", str(ranks), "-m", "spmdrl.ppo", "--config", config]
    command += ["--run_dir", str(run_dir), "--steps", str(steps)]
    command += [*WORKLOADS[name].options(), *CORRECTIONS[correction], *options]
    own_code = os.pathsep.join([str(root), str(root / "kernels")])
    threads = {"OMP_NUM_THREADS": str(max(THREADS // ranks, 1)), "PYTHONPATH": own_code}
    log = root / ASSETS / f"log_{name}_{ranks}.txt"
    launched = time.time()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=root, env=os.environ | ENV | threads, stdout=output,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        watch = Watch(process.pid, run_dir / "metrics.jsonl")
        watch.start()
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = process.wait()
        watch.stop()
    if code != 0:
        sys.stderr.write(log.read_text())
        sys.exit(f"bench: spmdrl on {ranks} ranks ended with exit code {code}")
    rows = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    about = {"peer": f"spmdrl-vllm-{ranks}", "workload": name, "correction": correction}
    about |= {"options": " ".join(options)} if options else {}
    return about | where(root) | summarise(rows, watch, launched)


def where(root: Path) -> Record:
    """The commit of a checkout, with "+" where its files differ, and the machine's processor."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"], cwd=root, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    return {"commit": found.stdout.strip() or "unknown", "processor": processor()}


def processor() -> str:
    """Its name, and family and model, which name the generation where the name does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    said: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        said.setdefault(key.strip(), value.strip())
    name = said.get("model name", platform.machine())
    family = f", family {said['cpu family']} model {said['model']}" if "cpu family" in said else ""
    return f"{name}{family}, {psutil.cpu_count()} cores"


def summarise(rows: Sequence[Record], watch: Watch, launched: float) -> Record:
    """The figures of the module's docstring, from metrics.jsonl and what was watched."""
    ends = watch.line_times  # of steps, in order
    steps = [later - earlier for earlier, later in pairwise(ends)]
    steps = steps[DROPPED_STEPS - 1 :]
    used = rows[DROPPED_STEPS:]
    step_s, tokens = median(steps), mean(row["response/tokens"] for row in used)

    def phase(name: str) -> float:
        return round(median(row.get(f"time/{name}_s", 0.0) for row in used), 3)

    began, ended = ends[DROPPED_STEPS - 1], ends[-1]
    cpu_s = (watch.cpu_s_at(ended) - watch.cpu_s_at(began)) / len(used)
    others = watch.other_s_at(ended) - watch.other_s_at(began)
    return {
        "step_s_median": round(step_s, 3),
        "step_s_min": round(min(steps), 3),
        "step_s_max": round(max(steps), 3),
        "gen_s": phase("rollout"),
        "logp_s": phase("old_logprobs"),
        "train_s": phase("update_actor"),
        "sync_s": phase("sync"),
        "tokens_per_step": round(tokens),
        "tokens_per_s": round(tokens / step_s),
        "cpu_s_per_step": round(cpu_s, 2),
        "cpu_s_per_1k_tokens": round(1000 * cpu_s / tokens, 3),
        "foreign_cores": round(max(others, 0.0) / (ended - began), 2),
        "peak_rss_gb": round(watch.peak_rss / 2**30, 2),
        "peak_pss_gb": round(watch.peak_pss / 2**30, 2),
        "procs": watch.peak_procs,
        "first_step_s": round(ends[0] - launched, 1),
        "startup_s": round(ends[0] - launched - step_s, 1),
        "reward_last": round(used[-1]["reward/mean"], 4),
    }


class Watch(threading.Thread):
    """Samples memory and CPU time of a process tree, and notes when a file grows a line."""

    PERIOD_S = 0.2
    PSS_EVERY = 10  # samples: reading it costs the kernel a walk over all pages
    LINES_EVERY_S = 0.02

    def __init__(self, pid: int, path: Path) -> None:
        super().__init__(daemon=True)
        self.root, self.path = psutil.Process(pid), path
        self.ended = threading.Event()
        self.peak_rss = self.peak_pss = self.peak_procs = 0
        self.cpu_s: dict[int, float] = {}  # by process id; of ended processes the last seen
        # (time, CPU seconds of the tree so far, those of all programs of the machine)
        self.trace: list[tuple[float, float, float]] = []
        self.line_times: list[float] = []

    def run(self) -> None:
        samples, due = 0, 0.0
        while not self.ended.wait(self.LINES_EVERY_S):
            self.note_lines()
            if time.monotonic() >= due:
                due = time.monotonic() + self.PERIOD_S
                self.sample(with_pss=samples % self.PSS_EVERY == 0)
                samples += 1

    def stop(self) -> None:
        self.ended.set()
        self.join()
        self.note_lines()

    def note_lines(self) -> None:
        lines = self.path.read_bytes().count(b"\n") if self.path.exists() else 0
        self.line_times += [time.time()] * (lines - len(self.line_times))

    def sample(self, with_pss: bool) -> None:
        rss = pss = procs = 0
        for process in self.tree():
            try:
                times = process.cpu_times()
                rss += process.memory_info().rss
                pss += process.memory_full_info().pss if with_pss else 0
            except psutil.Error:  # it ended between the listing and here
                continue
            self.cpu_s[process.pid] = times.user + times.system
            procs += 1
        self.peak_rss, self.peak_pss = max(self.peak_rss, rss), max(self.peak_pss, pss)
        self.peak_procs = max(self.peak_procs, procs)
        busy = psutil.cpu_times()
        everything = sum(busy) - busy.idle - busy.iowait - busy.steal - busy.guest - busy.guest_nice
        self.trace.append((time.time(), sum(self.cpu_s.values()), everything))

    def tree(self) -> list[psutil.Process]:
        try:
            return [self.root, *self.root.children(recursive=True)]
        except psutil.Error:
            return []

    def cpu_s_at(self, moment: float) -> float:
        return max((cpu_s for seen, cpu_s, _ in self.trace if seen <= moment), default=0.0)

    def other_s_at(self, moment: float) -> float:
        """CPU seconds of the machine's other programs, from any moment on."""
        found = [(busy, cpu_s) for seen, cpu_s, busy in self.trace if seen <= moment]
        return found[-1][0] - found[-1][1] if found else 0.0


def run_peer(peers: Path, name: str, ranks: int, correction: str, steps: int) -> Record:
    """TRL's record, measured by its own driver. Exits the process where it fails."""
    folder = peer_folder(peers, name, prompts_of(WORKLOADS[name].prompts))
    peer = f"trl-vllm-{ranks}"
    command = [folder / "venv/bin/python", "bench_peers.py", "--peers", peer, "--quiet-wait", "0",
               "--steps", str(steps)]  # fmt: skip
    options = WORKLOADS[name].trl_options(correction == "on")
    env = os.environ | {
        "PEERS": str(folder), "PYTHONPATH": str(folder), "TRL_EXTRA": json.dumps(options),
    }  # fmt: skip
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S + 60
    )
    record: Record = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    if record.get("rc") != 0 or "error" in record:
        sys.exit(f"bench: {peer} failed: {record or done.stderr}; see {folder}/log-{peer}.txt")
    lines = Path(folder, f"ev-{peer}.jsonl").read_text().splitlines()
    lengths = [row["completions/mean_length"] for row in map(json.loads, lines)
               if "completions/mean_length" in row]  # fmt: skip
    tokens = SAMPLES * mean(lengths[DROPPED_STEPS:])
    figures = {
        "tokens_per_step": round(tokens),
        "tokens_per_s": round(tokens / record["step_s_median"]),
        "cpu_s_per_1k_tokens": round(1000 * record["cpu_s_per_step"] / tokens, 3),
    }
    return record | {"workload": name, "correction": correction, **figures}


def prompts_of(file: str) -> list[tuple[str, str]]:
    """(prompt, answer) of each row."""
    rows = pq.read_table(ASSETS / file).to_pylist()
    return [(row["prompt"][0]["content"], row["reward_model"]["ground_truth"]) for row in rows]


if __name__ == "__main__":
    main()
