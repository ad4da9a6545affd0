"""Every kernel against the machine's ceilings and against other forms of it, unattended:

    python kernels/bench/run.py --out runs/kernels

Ceilings (copy bandwidth, bfloat16 matmul) are measured in the same run. A second process measures;
a case that is over its time, or ends that process, is recorded as such and the rest goes on. What
does not fit into --minutes is left out, and recorded as left out. Writes results.json after every
case, and roofline.png at the end.

Bytes and operations are the least that any implementation needs; `fraction` is the time that these
take at the ceilings over the time measured. Without a GPU the shapes are tiny and say nothing of
one. Needs PyTorch, and on GPUs Triton; matplotlib for the plot, Liger where it is to be compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import time
from dataclasses import asdict
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from kernel_cases import Case, Work, build, cpu_cases, gpu_cases
from spmdrl_kernels import switch
from spmdrl_kernels.device import has_tensor_memory_accelerator

SECONDS = 0.4  # of runs of a case, at least three
START_S = 120.0  # for a process to import PyTorch and reach the GPU

Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/kernels"))
    parser.add_argument("--minutes", type=float, default=7.5, help="no case begins after these")
    parser.add_argument("--full", action="store_true", help="all twelve shapes of the LM head")
    parser.add_argument("--only", default="", help="cases whose name holds this, and the ceilings")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    gpu = torch.cuda.is_available() and switch.can_run(torch.device("cuda", 0))
    if not gpu:
        print(
            "no GPU that Triton runs on here: tiny shapes on the CPU, which say nothing of one",
            flush=True,
        )
    cases = gpu_cases(args.full, num_tiles()) if gpu else cpu_cases()
    cases = [c for c in cases if c.form == "ceiling" or args.only in str(c)]
    args.out.mkdir(parents=True, exist_ok=True)
    results = measure_all(cases, args.out, end)
    write(results, args.out)
    plot(results, args.out / "roofline.png")


def num_tiles() -> int:
    """How many tiles of the LM head this device can try: those for Hopper and later."""
    if not has_tensor_memory_accelerator(torch.device("cuda", 0)):
        return 0
    from spmdrl_kernels import lm_head_triton

    return len(lm_head_triton.HOPPER)


def measure_all(cases: list[Case], out: Path, end: float) -> list[Result]:
    results: list[Result] = []
    worker = None
    for case in cases:
        if time.monotonic() > end:
            found: Result = {"error": "left out: --minutes are over"}
        else:
            worker = worker or Worker(out / "worker.log")
            found = worker.measure(case, end)
            worker = worker if worker.alive else None
        results.append(asdict(case) | found)
        add_fraction(results)
        print(line(results[-1], str(case)), flush=True)
        write(results, out)
    if worker is not None:
        worker.stop()
    return results


class Worker:
    """A process that measures the cases it is sent, one after the other."""

    def __init__(self, log: Path) -> None:
        self.log = log
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, str(log)), daemon=True)
        self.process.start()
        theirs.close()
        self.alive = True
        self.started = False

    def measure(self, case: Case, end: float) -> Result:
        """Its numbers, or `error`. A case may go past `end` by ten seconds, no more."""
        try:
            if not self.started:
                self.started = True
                if not self.connection.poll(START_S):
                    return self._ended("the process did not start")
                self.connection.recv()
            self.connection.send(case)
            limit_s = min(case.limit_s, max(10.0, end - time.monotonic() + 10))
            if not self.connection.poll(limit_s):
                return self._ended(f"over the limit of {limit_s:.0f} s")
            return self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join(5)  # until it has written why
            return self._ended("the process ended")

    def _ended(self, why: str) -> Result:
        self.stop()
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return {"error": why, "log": lines[-12:]}

    def stop(self) -> None:
        self.alive = False
        self.process.kill()
        self.process.join()


def serve(connection: Connection, log: str) -> None:
    """Measures what it is sent. What goes wrong ends the process, except for lack of memory."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no processes that would outlive this one
    with open(log, "w") as file:
        os.dup2(file.fileno(), 2)
    gpu = torch.cuda.is_available() and switch.can_run(torch.device("cuda", 0))
    device = torch.device("cuda" if gpu else "cpu")
    torch.zeros(1, device=device)
    connection.send("ready")
    while True:
        case = connection.recv()
        try:
            found = measure(case, device)
        except torch.OutOfMemoryError:
            found = {"error": "out of memory"}
        connection.send(found)
        clean_up(device)


def clean_up(device: torch.device) -> None:
    switch.enabled = True
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure(case: Case, device: torch.device) -> Result:
    """Median time of a run in ms, and what follows of it; on GPUs also peak memory over inputs."""
    start = time.perf_counter()
    work = build(case, device)
    work.run()  # compiles
    first_s = time.perf_counter() - start
    found: Result = {"first_s": round(first_s, 2)}  # inputs and compilation
    if device.type == "cuda":
        found["peak_mib"] = peak_mib(work)
    if work.check is not None:
        found |= work.check()
    times = gpu_times(work, device) if device.type == "cuda" else cpu_times(work)
    ms = statistics.median(times)
    return found | {
        "ms": ms, "runs": len(times), "tflops": work.flops / ms / 1e9,
        "gb_per_s": work.num_bytes / ms / 1e6, "flops": work.flops, "num_bytes": work.num_bytes,
    }  # fmt: skip


def peak_mib(work: Work) -> float:
    """Of a run, over what its inputs take; gradients and results included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work.run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def gpu_times(work: Work, device: torch.device) -> list[float]:
    """ms of each run, the cache filled with something else before it."""
    cache = torch.empty(256 << 20, dtype=torch.int8, device=device)
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 100):
        cache.zero_()
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        work.run()
        done.record()
        done.synchronize()
        times.append(begun.elapsed_time(done))
    return times


def cpu_times(work: Work) -> list[float]:
    times: list[float] = []
    end = time.perf_counter() + SECONDS / 4
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work.run()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def ceilings(results: list[Result]) -> tuple[float, float] | None:
    """GB/s and TFLOP/s; None unless both were measured."""
    found = {r["kernel"]: r for r in results if r["form"] == "ceiling" and "ms" in r}
    if set(found) != {"copy", "matmul"}:
        return None
    return found["copy"]["gb_per_s"], found["matmul"]["tflops"]


def add_fraction(results: list[Result]) -> None:
    """To the last result."""
    last, most = results[-1], ceilings(results)
    if most is None or "ms" not in last or last["form"] == "ceiling":
        return
    least_ms = max(last["num_bytes"] / most[0] / 1e6, last["flops"] / most[1] / 1e9)
    last["fraction"] = least_ms / last["ms"]


def line(result: Result, name: str) -> str:
    if "error" in result:
        return f"{name:58s} {result['error']}"
    rate = f"{result['gb_per_s']:8.1f} GB/s"
    if result["flops"]:
        rate = f"{result['tflops']:7.2f} TFLOP/s"
    fraction = f" {result['fraction']:6.1%} of the ceiling" if "fraction" in result else ""
    peak = f" {result['peak_mib']:9.0f} MiB" if "peak_mib" in result else ""
    return f"{name:58s} {result['ms']:10.3f} ms {rate}{fraction}{peak}"


def write(results: list[Result], out: Path) -> None:
    whole = {"machine": machine(), "ceilings_gb_per_s_and_tflops": ceilings(results),
             "results": results}  # fmt: skip
    (out / "results.json").write_text(json.dumps(whole, indent=1) + "\n")


def machine() -> dict[str, str | None]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    versions: dict[str, str | None] = {"gpu": gpu, "torch": torch.__version__, "triton": None}
    if find_spec("triton"):
        import triton

        versions["triton"] = triton.__version__
    return versions


def plot(results: list[Result], file: Path) -> None:
    """What every form reaches of what the machine can do: kernels that move memory in GB/s, and the
    LM head, which multiplies matrices, in TFLOP/s."""
    most = ceilings(results)
    if most is None or find_spec("matplotlib") is None:
        print("no plot: it needs both ceilings and matplotlib", flush=True)
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    timed = [r for r in results if "ms" in r and r["form"] != "ceiling"]
    moving = [r for r in timed if not r["flops"]]
    heads = [r for r in timed if r["kernel"].startswith("lm_head") and "tiles" not in r["form"]]
    size = (15, max(5.0, 0.25 * max(len(moving), len(heads))))
    figure, (left, right) = plt.subplots(1, 2, figsize=size)
    bars(left, moving, "gb_per_s", most[0], "GB/s")
    left.set_title("memory-bound; line: a copy")
    bars(right, heads, "tflops", most[1], "TFLOP/s")
    right.set_title("LM head: log-probability and entropy; line: a matrix product")
    figure.tight_layout()
    figure.savefig(file, dpi=100)


def bars(axes: Any, results: list[Result], rate: str, ceiling: float, unit: str) -> None:
    def case(r: Result) -> str:
        return f"{r['kernel']} {r['shape']}{' + bwd' if r['backward'] else ''}"

    ordered = sorted(results, key=lambda r: (case(r), r["form"] != "ours"))
    own = ("ours", "top 8", "top 64")
    colors = ["tab:orange" if r["form"] in own else "tab:gray" for r in ordered]
    places = range(len(ordered))
    axes.barh(places, [r[rate] for r in ordered], color=colors)
    axes.set_yticks(places, [f"{case(r)}, {r['form']}" for r in ordered], fontsize=7)
    axes.axvline(ceiling, color="black", linestyle="--")
    axes.set_xlabel(unit)
    axes.invert_yaxis()
    axes.margins(y=0.01)


if __name__ == "__main__":
    main()
