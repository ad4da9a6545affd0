"""`make bench`: the add2 workload on one rank and on two, two threads in all; one JSON line each.

    python examples/add2/bench.py [--ranks 1,2] [--peers DIR] [--out FILE]

--peers DIR runs TRL too, through DIR/bench_peers.py where DIR/venv exists, in turn with spmdrl, and
ends with one line of ratios (TRL's figure over spmdrl's) for each number of ranks.

    step_s_median   between the ends of two steps; the first two steps are dropped
    gen_s, logp_s   medians of the phases sampling and old logprobs (0: not needed)
    train_s, sync_s   medians of the update and of weights -> engine
    tokens_per_s    16384 response tokens over step_s_median
    cpu_s_per_step  user + system seconds of the process tree
    peak_rss_gb     largest sum of RSS over the tree, sampled 5 times a second (GiB; shared pages
                    count once per process); peak_pss_gb: every tenth sample, shared pages divided
    startup_s       launch to the end of the first step, less step_s_median
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

ASSETS = Path("runs/add2")
CONFIG = "examples/add2/config.py"
DROPPED_STEPS = 2
TOKENS_PER_STEP = 32 * 8 * 64
THREADS = 2  # over all ranks
LIMIT_S = 900
ENV = {
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads would take the cores from each other
    "GOMP_SPINCOUNT": "0",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
COMPARED = ("step_s_median", "cpu_s_per_step", "peak_rss_gb", "startup_s")

Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="times the add2 workload")
    parser.add_argument("--ranks", default="1,2", help="comma separated")
    parser.add_argument("--peers", type=Path, help="folder with bench_peers.py and TRL's venv")
    parser.add_argument("--out", type=Path, help="file that the JSON lines are appended to")
    args = parser.parse_args()
    peers = args.peers.resolve() if args.peers else None
    out = args.out.resolve() if args.out else None
    os.chdir(Path(__file__).resolve().parents[2])
    if peers and not Path(peers, "venv/bin/python").exists():
        sys.exit(f"bench: {peers} has no venv; make it with {peers}/bench_peers.sh")
    make_assets = [sys.executable, "examples/add2/make_assets.py", str(ASSETS)]
    subprocess.run(make_assets, check=True, timeout=120, stderr=subprocess.DEVNULL)
    for ranks in map(int, args.ranks.split(",")):
        own = measure(ranks)
        report(own, out)
        if peers:
            theirs = run_peer(peers, f"trl-vllm-{ranks}")
            report(theirs, out)
            ratios = {key: round(theirs[key] / own[key], 2) for key in COMPARED}
            report({"ratio": f"{theirs['peer']} / {own['peer']}", **ratios}, out)


def report(record: Record, out: Path | None) -> None:
    line = json.dumps(record)
    print(line, flush=True)
    if out:
        with out.open("a") as f:
            f.write(line + "\n")


def measure(ranks: int) -> Record:
    """One run of spmdrl. Exits the process where it fails; its output is then on stderr."""
    run_dir = ASSETS / f"run_{ranks}"
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "spmdrl.ppo", "--config", CONFIG]
    command += ["--run_dir", str(run_dir)]
    env = os.environ | ENV | {"OMP_NUM_THREADS": str(max(THREADS // ranks, 1))}
    log = ASSETS / f"log_{ranks}.txt"
    launched = time.time()
    with log.open("w") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
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
    return {"peer": f"spmdrl-vllm-{ranks}", "nproc": ranks, **summarise(rows, watch, launched)}


def summarise(rows: list[dict[str, float]], watch: Watch, launched: float) -> Record:
    """The figures of the module's docstring, from metrics.jsonl and what was watched."""
    ends = watch.line_times  # of steps, in order
    steps = [later - earlier for earlier, later in pairwise(ends)]
    steps = steps[DROPPED_STEPS - 1 :]
    used = rows[DROPPED_STEPS:]
    step_s = median(steps)

    def phase(name: str) -> float:
        return round(median(row.get(f"time/{name}_s", 0.0) for row in used), 3)

    cpu_s = watch.cpu_s_at(ends[-1]) - watch.cpu_s_at(ends[DROPPED_STEPS - 1])
    return {
        "step_s_median": round(step_s, 3),
        "step_s_min": round(min(steps), 3),
        "step_s_max": round(max(steps), 3),
        "gen_s": phase("rollout"),
        "logp_s": phase("old_logprobs"),
        "train_s": phase("update_actor"),
        "sync_s": phase("sync"),
        "tokens_per_s": round(TOKENS_PER_STEP / step_s),
        "cpu_s_per_step": round(cpu_s / len(used), 2),
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
        self.trace: list[tuple[float, float]] = []  # (time, CPU seconds so far)
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
        self.trace.append((time.time(), sum(self.cpu_s.values())))

    def tree(self) -> list[psutil.Process]:
        try:
            return [self.root, *self.root.children(recursive=True)]
        except psutil.Error:
            return []

    def cpu_s_at(self, moment: float) -> float:
        return max((cpu_s for seen, cpu_s in self.trace if seen <= moment), default=0.0)


def run_peer(folder: Path, peer: str) -> Record:
    """One peer's record, measured by its own driver. Exits the process where it fails."""
    command = [folder / "venv/bin/python", "bench_peers.py", "--peers", peer, "--quiet-wait", "0"]
    env = os.environ | {"PEERS": str(folder), "PYTHONPATH": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S + 60
    )
    record: Record = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    if record.get("rc") != 0 or "error" in record:
        sys.exit(f"bench: {peer} failed: {record or done.stderr}; see {folder}/log-{peer}.txt")
    return record


if __name__ == "__main__":
    main()
