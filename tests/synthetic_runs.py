"""Writes run folders of any size, as a run writes them; and measures the page that shows one.

    python tests/synthetic_runs.py runs/large --steps 10000 --mib 1000 [--measure]

With --measure: seconds until spmdrl.view shows the first page, a step's samples, a search through
all samples and the history of a prompt in Chromium, and the memory of the server's process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = "/usr/bin/chromium"
CHROMIUM_ARGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
SEARCH_ALL = """async () => {
  let found = 0;
  for (let start = 0; start !== null; ) {
    const answer = await (await fetch(`/api/search?text=nowhere&start=${start}`)).json();
    found += answer.rows.length;
    start = answer.next;
  }
  return found;
}"""
ANSWERS = 8  # to each prompt of a step
DIFFERENT = 1000  # thoughts
PROMPTS = 200  # that there are
METRICS = (
    "actor/entropy", "actor/grad_norm", "actor/logprob_diff_mean", "actor/ppo_kl", "actor/loss",
    "response/mean_tokens", "response/truncated", "reward/std", "reward/invalid", "time/step_s",
    *(f"time_mean/phase_{i}_s" for i in range(50)),
)  # fmt: skip


def write_run(folder: Path, steps: int, num_bytes: int, seed: int = 0, every: int = 10) -> None:
    """Writes metrics.jsonl, config.py and samples/ of `num_bytes` altogether, with every kind of
    sample: right, wrong, cut, invalid. Every `every` steps there are held-out answers.
    """
    rng = random.Random(seed)
    Path(folder, "samples").mkdir(parents=True, exist_ok=True)
    Path(folder, "config.py").write_text(f"config = PpoConfig(\n    seed={seed},\n    n=8,\n)\n")
    num_tokens = max(num_bytes // max(steps, 1) // (2 * ANSWERS) // 32, 4)
    with Path(folder, "metrics.jsonl").open("w") as metrics:
        for step in range(steps + 1):
            metrics.write(json.dumps(metrics_row(step, steps, every, rng)) + "\n")
            if step % every == 0:
                write_samples(folder, f"eval_{step}", step / max(steps, 1), num_tokens, rng, True)
            if step:
                write_samples(folder, f"step_{step}", step / steps, num_tokens, rng, False)


def metrics_row(step: int, steps: int, every: int, rng: random.Random) -> dict[str, float]:
    share = step / max(steps, 1)
    row: dict[str, float] = {"step": step}
    if step:
        row |= {name: rng.random() * (1 + i) for i, name in enumerate(METRICS)}
        row["reward/mean"] = 1 - math.exp(-3 * share) + 0.05 * rng.random()
    if step % every == 0:
        row["eval/reward"] = 0.4 + 0.5 * share
    return row


def write_samples(
    folder: Path, name: str, right: float, num_tokens: int, rng: random.Random, held_out: bool
) -> None:
    groups = range(8) if held_out else range(2)
    with Path(folder, "samples", f"{name}.jsonl").open("w") as file:
        trained = []
        for group in groups:
            prompt_id = group if held_out else rng.randrange(PROMPTS)
            for index in range(1 if held_out else ANSWERS):
                row = sample_row(prompt_id, group, index, right, num_tokens, rng)
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                trained.append(trained_row(row, rng))
    if not held_out:
        path = Path(folder, "samples", f"{name}_trained.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in trained))


def sample_row(
    prompt_id: int, group: int, index: int, right: float, num_tokens: int, rng: random.Random
) -> dict[str, Any]:
    fate = rng.random()
    invalid = "Traceback (most recent call last):\nValueError: no answer" if fate < 0.02 else None
    reward = None if invalid else float(rng.random() < right)
    thought, logprobs, _ = said(num_tokens, rng.randrange(DIFFERENT))
    words = [*thought, f" {prompt_id if reward else prompt_id + 1}", "<eos>"]
    text = "".join(words[:-1])
    return {
        "prompt_id": prompt_id, "group": group, "sample": index, "data_source": "synthetic",
        "prompt": f"What is {prompt_id} + 0?", "response": text, "ground_truth": str(prompt_id),
        "reward": reward, "invalid": invalid, "finish_reason": "length" if fate > 0.95 else "stop",
        "response_tokens": len(words),
        "chat": [{"role": "user", "content": f"What is {prompt_id} + 0?"}],
        "tokens": words, "logprobs": [*logprobs, -round(rng.expovariate(2), 4), -0.01],
    }  # fmt: skip


@cache
def said(num_tokens: int, number: int) -> tuple[list[str], list[float], list[float]]:
    """Tokens of a thought, their log-probabilities, and by how much the trainer's differ."""
    rng = random.Random(number)
    words = ["<think>", *(f" word{rng.randrange(1000)}" for _ in range(num_tokens)), "</think>"]
    logprobs = [-round(rng.expovariate(2), 4) for _ in words]
    return words, logprobs, [rng.gauss(0, 0.02) for _ in words]


def trained_row(row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    where = {name: row[name] for name in ("prompt_id", "group", "sample")}
    _, _, gaps = said(len(row["tokens"]) - 4, rng.randrange(DIFFERENT))
    trainer = [
        round(value + gap, 4) for value, gap in zip(row["logprobs"], [*gaps, 0, 0], strict=True)
    ]
    return where | {"advantage": round(rng.gauss(0, 1), 4), "trainer_logprobs": trainer}


# ---- measuring


def start_server(folders: list[Path]) -> tuple[subprocess.Popen[str], str]:
    """Starts spmdrl.view; returns its process and the address that it prints."""
    command = [sys.executable, "-m", "spmdrl.view", *map(str, folders)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    assert address.startswith("http://127.0.0.1:"), address
    return server, address


def measure(folder: Path) -> dict[str, float]:
    """Returns seconds and MiB; the pages are those that Chromium has drawn. Names with cpu: the
    server's processor seconds until then."""
    from playwright.sync_api import sync_playwright

    found: dict[str, float] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        page = browser.new_page()
        page.set_default_timeout(240_000)
        begin = time.monotonic()
        server, address = start_server([folder])
        found["server_s"] = time.monotonic() - begin

        def timed(name: str, target: str, wait_for: str) -> None:
            start = time.monotonic()
            page.goto(target)
            page.wait_for_selector(wait_for)
            found[name] = round(time.monotonic() - start, 2)
            found[name.removesuffix("_s") + "_cpu_s"] = cpu_s(server)

        base = address.partition("/?")[0] + "/"
        try:
            found["start_cpu_s"] = cpu_s(server)
            timed("first_page_s", address, ".chart canvas")
            timed("samples_of_a_step_s", f"{base}#/samples?step=newest", ".sample")
            found["rss_mib"] = rss_mib(server)
            timed("history_s", f"{base}#/history?kind=step&prompt=7", "#history .group")
            timed("first_findings_s", f"{base}#/samples?everywhere=1&text=word999", ".finding")
            start = time.monotonic()
            assert page.evaluate(SEARCH_ALL) == 0
            found["search_all_s"] = round(time.monotonic() - start, 2)
            found["search_all_cpu_s"] = cpu_s(server)
            found["rss_after_search_mib"] = rss_mib(server)
        finally:
            server.terminate()
            server.wait(20)
            browser.close()
    return found


def cpu_s(server: subprocess.Popen[str]) -> float:
    """Processor seconds of the server so far, which other processes do not change."""
    used = psutil.Process(server.pid).cpu_times()
    return round(used.user + used.system, 2)


def rss_mib(server: subprocess.Popen[str]) -> float:
    return round(psutil.Process(server.pid).memory_info().rss / 2**20, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--mib", type=int, default=1000)
    parser.add_argument("--measure", action="store_true")
    args = parser.parse_args()
    if not (args.folder / "metrics.jsonl").exists():
        write_run(args.folder, args.steps, args.mib << 20)
    size = sum(path.stat().st_size for path in (args.folder / "samples").iterdir())
    print(f"{args.folder}: {args.steps:,} steps, {size / 2**20:,.0f} MiB of samples")
    if args.measure:
        print(json.dumps(measure(args.folder), indent=1))


if __name__ == "__main__":
    main()
