"""Sampling ahead of training against taking turns, on the same two ranks; JSON lines.

    python examples/add2/bench_async.py [--steps 10] [--async_steps 1]

The add2 workload with the actor on rank 0 and vLLM on rank 1, one thread each, sampling in float32
with so few places that it takes about as long as the update (`gen_s`, `train_s`: medians of their
busy seconds). Both runs weigh by the engine's own logprobs (algo.correction.bypass), so that
neither pays for a pass that the other saves. step_s: median between the ends of two steps, the
first two dropped; in turn, `--rounds` times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import fire

LIMIT_S = 300
DROPPED_STEPS = 2
ENV = {
    "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
}  # fmt: skip


def main(steps: int = 10, async_steps: int = 1, rounds: int = 2) -> None:
    """rounds: how often each of the two runs is made."""
    os.chdir(Path(__file__).resolve().parents[2])
    make_assets = [sys.executable, "examples/add2/make_assets.py", "runs/add2"]
    subprocess.run(make_assets, check=True, timeout=120, stderr=subprocess.DEVNULL)
    found: dict[int, list[float]] = {0: [], async_steps: []}
    for _ in range(rounds):
        for ahead in found:
            record = measure(ahead, steps)
            found[ahead].append(record["step_s"])
            print(json.dumps(record), flush=True)
    ratio = median(found[async_steps]) / median(found[0])
    print(json.dumps({"async_steps": async_steps, "step_s over synchronous": round(ratio, 3)}))


def measure(ahead: int, steps: int) -> dict[str, float]:
    command = [
        sys.executable, "-m", "spmdrl.launch", "--standalone", "--nproc-per-node", "2",
        "-m", "spmdrl.ppo", "--config", "examples/add2/config.py", "--steps", str(steps),
        "--run_dir", f"runs/add2/ahead_{ahead}", "--async_steps", str(ahead),
        "--placement", '{"actor":"0","rollout":"1"}', "--rollout.dtype", "float32",
        "--rollout.max_num_seqs", "40",
        "--algo.correction.bypass", "True",
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=LIMIT_S, env=os.environ | ENV,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    rows = [json.loads(line) for line in Path(f"runs/add2/ahead_{ahead}/metrics.jsonl").open()]
    rows = rows[DROPPED_STEPS:]
    return {
        "async_steps": ahead,
        "step_s": round(median(row["time/step_s"] for row in rows), 3),
        "gen_s": round(median(row["time_max/rollout_s"] for row in rows), 3),
        "train_s": round(median(row["time_max/update_actor_s"] for row in rows), 3),
        "idle_share": round(median(row["idle/share"] for row in rows), 3),
        "staleness_max": max(row["staleness/max"] for row in rows),
    }


if __name__ == "__main__":
    fire.Fire(main)
