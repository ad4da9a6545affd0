"""Tries on a GPU, part by part, what no CPU can show, and writes a table into docs/gpu.md.

    tests/gpu/session.sh [--python PATH] [--minutes 25] [--parts a,b] [--out runs/gpu_session]

The parts come in the order of their value. Each is a process with a time limit, of which nothing is
left afterwards; one that fails, hangs or lacks something does not stop the others. After each the
results are in OUT/results.json, the table in OUT/table.md and in docs/gpu.md, the end of what it
printed in OUT/log.txt. A part that has a result there is not run again, so that a session may be
cut into slices; `--again` runs it all the same. This module needs nothing but Python itself.

With fewer GPUs than ranks they share them, for which NCCL 2.30 is needed: it is taken from --nccl,
or installed beside the environment where pip finds it. docs/gpu.md says more.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where python -P starts it

import processes
import session_table
from session_table import Found

ROOT = Path(__file__).resolve().parents[2]
NCCL = "nvidia-nccl-cu13==2.30.7"
LEAST_NCCL_TO_SHARE = (2, 30)
INSTALL_LIMIT_S = 600.0
LEAST_SHARE = 0.4  # of a part's limit has to be left for it to begin
LOG_BYTES = 60_000  # of a part's output that are kept
PASSED, FAILED, LATE, CANNOT, NO_TIME = "passed", "failed", "over its limit", "cannot", "no time"
FINAL = (PASSED, FAILED, LATE)
CANNOT_CODE = 77  # of a part whose last line says what it lacks


@dataclass(frozen=True)
class Part:
    """A command that ends with code 0 where all holds, and prints its key figures last."""

    name: str
    what: str
    limit_s: float
    ranks: int = 1
    needs: tuple[str, ...] = ()  # modules of the environment
    command: tuple[str, ...] = ()  # after the interpreter; (): tests/gpu/parts.py NAME

    @property
    def is_tests(self) -> bool:
        return "pytest" in self.command


def pytest_part(
    name: str, what: str, limit_s: float, *paths: str, needs: tuple[str, ...]
) -> Part:  # fmt: skip
    command = ("-m", "pytest", "-vv", *(str(ROOT / path) for path in paths))
    return Part(name, what, limit_s, needs=("pytest", *needs), command=command)


RL, VLLM, MEGATRON = ("transformers", "fire"), ("vllm",), ("transformers", "fire", "megatron.core")
PARTS = (
    Part("smoke_hf", "GRPO, transformers samples, float32", 150, needs=RL),
    Part("smoke_vllm", "GRPO, vLLM samples, bfloat16", 300, needs=RL + VLLM),
    pytest_part("tests_gpu", "tests/gpu: engines and attention", 150,
                "tests/gpu/test_gpu.py", needs=RL),
    pytest_part("tests_vllm", "tests/gpu: vLLM", 240,
                "tests/gpu/test_vllm_gpu.py", needs=RL + VLLM),
    Part("sharing", "every collective of training, by NCCL", 90, 2),
    Part("fsdp_2", "FSDP2 over 2: the numbers of one rank", 120, 2, RL),
    Part("hsdp_4", "2 copies of FSDP2 over 2: the same", 150, 4, RL),
    Part("vllm_tp_2", "vLLM with TP 2 in the ranks", 240, 2, RL + VLLM),
    Part("ulysses_2", "Ulysses over 2: the numbers of one rank", 120, 2, RL),
    Part("split_1_1", "trainer and rollout on ranks of their own: the same", 120, 2, RL),
    Part("async_2_2", "2 ranks sample a step ahead of 2 that train", 240, 4, RL),
    Part("megatron_tp_2", "Megatron TP 2: the numbers of FSDP2", 150, 2, MEGATRON),
    Part("megatron_pp_2", "Megatron PP 2, rollout TP 2", 240, 2, MEGATRON),
    Part("megatron_ep_2", "Megatron EP 2, 4 experts: the numbers of FSDP2", 150, 2, MEGATRON),
    Part("resharding", "weights to engines against a plain collective", 150, 2),
    pytest_part("strict", "strict=True: equal in every bit", 300, "tests/gpu/test_strict_gpu.py",
          needs=RL + VLLM),
    Part("killed_rank", "a rank is killed: who, and how soon", 120, 2, RL),
    Part("step", "a step of Qwen3-0.6B's shape, profiled", 360, needs=RL + VLLM),
    Part("kernels", "kernels against the machine's ceilings", 240, needs=("triton",)),
    Part("throughput", "our rollout beside `vllm bench throughput`", 300, needs=RL + VLLM),
    pytest_part("tests_kernels", "kernels against float64", 240, "tests/kernels/test_kernels.py",
          "tests/kernels/test_fp8.py", "tests/kernels/test_lm_head_triton.py",
          "tests/kernels/test_layers_triton.py", "tests/kernels/test_copies_triton.py",
          "tests/kernels/test_policy_loss_triton.py", "tests/kernels/test_invariant_triton.py",
          needs=("triton",)),
    pytest_part("tests_runs", "tests/gpu: 24 whole runs, as many as fit", 900,
          "tests/gpu/test_runs_gpu.py", needs=RL + VLLM),
)  # fmt: skip


# ---- one part


@dataclass
class Session:
    """What all parts have in common."""

    python: str
    out: Path
    machine: Found
    end: float  # time.monotonic()
    env: dict[str, str]
    work: Path  # what parts make and leave for each other; may be lost
    to_share: dict[str, str] = field(default_factory=dict)  # besides, where ranks share a GPU
    found: Found = field(default_factory=lambda: {"parts": {}})

    def shares(self, part: Part) -> bool:
        return 0 < self.machine["gpus"] < part.ranks

    def left_s(self) -> float:
        return self.end - time.monotonic()


def run_part(part: Part, session: Session) -> Found:
    """Runs it, if it can be run here and now; never raises for what the part does."""
    why = reason_not_to(part, session)
    if why is not None:
        return result(part, session, *why)
    command = part.command or (str(ROOT / "tests/gpu/parts.py"), part.name, str(session.work))
    shared = session.shares(part)
    log = session.out / "part.log"
    begun = time.monotonic()
    limit_s = min(part.limit_s, session.left_s())
    code = processes.run_limited(
        [session.python, *command], session.env | (session.to_share if shared else {}), log, limit_s
    )
    seconds = time.monotonic() - begun
    text = keep_log(session.out, part, log)
    for file in Path(session.work, "keep").glob("*"):
        shutil.move(file, session.out / file.name)
    figures = counts(text) if part.is_tests else last_json(text)
    if code is None:
        return result(part, session, LATE, f"ended after {limit_s:.0f} s", seconds, figures)
    if code == CANNOT_CODE:
        return result(part, session, CANNOT, text.strip().splitlines()[-1], seconds)
    if code:
        return result(part, session, FAILED, reason(text, code), seconds, figures)
    if part.is_tests and "passed" not in figures:
        return result(part, session, CANNOT, "its tests were all skipped", seconds, figures)
    return result(part, session, PASSED, "", seconds, figures)


def reason_not_to(part: Part, session: Session) -> tuple[str, str] | None:
    """(result, why) where a part cannot begin."""
    missing = [name for name in part.needs if name not in session.machine["modules"]]
    if missing:
        return CANNOT, f"the environment has no {', '.join(missing)}"
    if session.shares(part) and part.name != "sharing":
        tried = session.found["parts"].get("sharing", {})
        if tried.get("result") != PASSED:
            why = tried.get("why") or "part sharing has no result"
            return CANNOT, f"{part.ranks} ranks cannot share this GPU: {why}"
    least_s = LEAST_SHARE * part.limit_s
    if session.left_s() < least_s:
        return NO_TIME, f"{max(0, session.left_s()):.0f} s were left, and it wants {least_s:.0f}"
    return None


def result(
    part: Part, session: Session, ended: str, why: str, seconds: float = 0.0,
    figures: Found | None = None,
) -> Found:  # fmt: skip
    return {
        "what": part.what, "ranks": part.ranks, "shared": session.shares(part), "result": ended,
        "why": why, "seconds": round(seconds, 1), "figures": figures or {},
    }  # fmt: skip


def keep_log(out: Path, part: Part, log: Path) -> str:
    """Moves the end of a part's output into the session's log, and returns all of it."""
    data = log.read_bytes()
    with Path(out, "log.txt").open("ab") as file:
        file.write(f"\n==== {part.name}\n".encode() + data[-LOG_BYTES:])
    log.unlink()
    return data.decode(errors="replace")


def last_json(text: str) -> Found:
    lines = [line for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
    try:
        return json.loads(lines[-1]) if lines else {}
    except json.JSONDecodeError:  # it was cut off while it wrote
        return {}


def counts(text: str) -> Found:
    """Of pytest's lines, which are there also where it was cut off."""
    found = {word: len(re.findall(rf"^\S+::.* {word.upper()}\b", text, re.M))
             for word in ("passed", "failed", "error", "skipped")}  # fmt: skip
    return {word: n for word, n in found.items() if n}


def reason(text: str, code: int) -> str:
    """What went wrong, in a line: the first error that a test or a program told."""
    error = r"^(?:E +|\[rank\d+\]: *)?[\w.]*(?:Error|Exception): .*"
    for pattern in (r"^FAILED \S+.*", r"^spmdrl: .*", error):
        told = re.findall(pattern, text, re.M)
        if told:
            return " ".join(told[-1].split())
    lines = text.strip().splitlines()
    return f"code {code}: {lines[-1] if lines else 'it printed nothing'}"


# ---- the session


def run_parts(parts: Iterable[Part], session: Session, page: Path | None, again: bool) -> None:
    """Runs those without a result in turn; after each, all that was found is on disk."""
    for part in parts:
        earlier = session.found["parts"].get(part.name, {}).get("result")
        if earlier in FINAL and not again:
            print(f"{part.name:14s} {earlier}, in an earlier call", flush=True)
            continue
        found = run_part(part, session)
        session.found["parts"][part.name] = found
        save(session.found, session.out, page)
        told = found["why"] or json.dumps(found["figures"])
        print(f"{part.name:14s} {found['result']}, {found['seconds']:.0f} s: {told}", flush=True)


def save(found: Found, out: Path, page: Path | None) -> None:
    session_table.write_whole(out / "results.json", json.dumps(found, indent=1) + "\n")
    text = session_table.table(found, [part.name for part in PARTS] + extra(found))
    session_table.write_whole(out / "table.md", text)
    if page is not None:
        session_table.paste(page, text)


def extra(found: Found) -> list[str]:
    """Results of parts that are none of this version's."""
    return [name for name in found["parts"] if name not in {part.name for part in PARTS}]


def with_sharing(parts: list[Part], machine: Found) -> list[Part]:
    """Puts the part that tries whether ranks can share a GPU before the first that needs it."""
    names = [part.name for part in parts]
    need = [i for i, part in enumerate(parts) if 0 < machine["gpus"] < part.ranks]
    if need and "sharing" not in names:
        parts = [*parts]
        parts.insert(need[0], next(part for part in PARTS if part.name == "sharing"))
    return parts


def environment_of(args: argparse.Namespace, work: Path) -> str:
    """The interpreter that parts run with. Without --python it is .venv's, which launch/setup.sh
    makes; where that does not work, such as without a network, the one that runs this.
    """
    if args.python:
        return args.python
    log = work / "setup.log"
    limit_s = min(INSTALL_LIMIT_S, 60 * args.minutes / 2)
    code = processes.run_limited(
        ["bash", str(ROOT / "launch/setup.sh")], dict(os.environ), log, limit_s
    )
    if code == 0:
        return str(ROOT / ".venv/bin/python")
    said = (log.read_text().strip().splitlines() or ["nothing"])[-1]
    print(
        f"launch/setup.sh did not make .venv ({said}); going on with {sys.executable}", flush=True
    )
    return sys.executable


def install_wheels(python: str, folder: Path, work: Path) -> Path:
    """Puts wheels from a folder beside the environment, which stays as it is."""
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        sys.exit(f"--wheels {folder} has no *.whl")
    pip_install(python, work / "site", INSTALL_LIMIT_S, "--no-index", *wheels)
    return work / "site"


def pip_install(python: str, target: Path, limit_s: float, *args: str) -> None:
    """Without what the packages ask for. Raises RuntimeError with the last line of pip's errors."""
    command = [python, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target",
               str(target), *args]  # fmt: skip
    log = target.parent / "pip.log"
    code = processes.run_limited(command, dict(os.environ), log, limit_s)
    if code != 0:
        said = log.read_text().strip().splitlines() or [f"over {limit_s:.0f} s"]
        raise RuntimeError(f"{shlex.join(command)}: {said[-1]}")


def to_share_gpus(args: argparse.Namespace, python: str, machine: Found, work: Path) -> Found:
    """The environment of ranks that share a GPU, with a newer NCCL where the one there is too old
    and another can be had. Writes into `machine` which one that is.
    """
    env = {"SPMDRL_SHARE_GPU": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    version = tuple(map(int, (machine["nccl"] or "0.0").split(".")))
    if machine["amd"] or (version >= LEAST_NCCL_TO_SHARE and not args.nccl):
        return env
    try:
        library = args.nccl or installed_nccl(python, work)
    except RuntimeError as error:
        print(f"no NCCL 2.30: {error}", flush=True)
        return env
    env |= {"LD_PRELOAD": str(library), "VLLM_NCCL_SO_PATH": str(library)}
    machine["nccl to share"] = probe(python, dict(os.environ) | env)["nccl"]
    return env


def installed_nccl(python: str, work: Path) -> Path:
    """Raises RuntimeError where pip cannot install it."""
    if not list(Path(work, "nccl").rglob("libnccl.so.2")):
        pip_install(python, work / "nccl", 240.0, NCCL)
    return next(Path(work, "nccl").rglob("libnccl.so.2")).resolve()


def probe(python: str, env: dict[str, str]) -> Found:
    """What the environment has, and which GPUs it sees. Ends the session where it has no torch."""
    command = [python, str(ROOT / "tests/gpu/parts.py"), "machine"]
    done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=180)
    if done.returncode:
        sys.exit(
            f"{python} cannot run the parts: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def chosen(names: str | None) -> list[Part]:
    known = {part.name: part for part in PARTS}
    if names is None:
        return [*PARTS]
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        sys.exit(f"--parts has no {', '.join(unknown)}; there are: {', '.join(known)}")
    return [known[name] for name in names.split(",")]


def earlier_results(file: Path, machine: Found) -> Found:
    """Ends the session where they are another machine's: one table is one machine's."""
    found = session_table.read(file)
    before = {key: found.get("machine", machine).get(key) for key in ("gpu", "gpus", "torch")}
    if before != {key: machine[key] for key in before}:
        sys.exit(f"{file} holds the results of another machine, {before}: give another --out")
    return found


def as_typed(args: argparse.Namespace) -> str:
    """The command without the paths in it, which are this machine's."""
    words = ["tests/gpu/session.sh", "--minutes", f"{args.minutes:g}"]
    words += ["--parts", args.parts] if args.parts else []
    return " ".join(words + ["--cpu"] * args.cpu + ["--again"] * args.again)


def list_parts(parts: list[Part]) -> None:
    for part in parts:
        needs = f"; needs {', '.join(part.needs)}" if part.needs else ""
        print(
            f"{part.name:14s} {part.ranks} ranks, at most {part.limit_s:.0f} s: {part.what}{needs}"
        )


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--python", help="of an environment that stands; default: .venv, made first"
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="for all, with the environment")
    parser.add_argument("--parts", help="names with commas between; default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/gpu_session", help="results")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/gpu_work", help="may be lost")
    parser.add_argument("--again", action="store_true", help="run what has a result, too")
    parser.add_argument("--list", action="store_true", help="say what the parts are, run none")
    parser.add_argument("--paste", action="store_true", help="only write OUT's table into the page")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/gpu.md", help="docs/gpu.md")
    parser.add_argument("--nccl", type=Path, help="a libnccl.so.2 of NCCL 2.30 or newer")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to have besides")
    parser.add_argument("--cpu", action="store_true", help="try the parts without a GPU, by gloo")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    args = parse_args(argv)
    end = time.monotonic() + 60 * args.minutes
    parts, out = chosen(args.parts), args.out.resolve()
    if args.list:
        return list_parts(parts)
    session_table.check(args.page)
    if args.paste:
        return save(session_table.read(out / "results.json"), out, args.page)
    processes.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    out.mkdir(parents=True, exist_ok=True)
    session = set_up(args, out, end)
    on_gpu = session.machine["gpus"] > 0
    run_parts(
        with_sharing(parts, session.machine), session, args.page if on_gpu else None, args.again
    )
    bad = [name for name, found in session.found["parts"].items() if found["result"] in FINAL[1:]]
    sys.exit(f"failed or over their limits: {', '.join(bad)}" if bad else 0)


def set_up(args: argparse.Namespace, out: Path, end: float) -> Session:
    """The environment, what it sees, and the results of earlier calls."""
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    python = environment_of(args, work)
    paths = [str(ROOT), str(ROOT / "kernels")]
    if args.wheels:
        paths.append(str(install_wheels(python, args.wheels, work)))
    path = ":".join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    env = dict(os.environ) | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    machine = probe(python, env)
    if not machine["gpus"] and not args.cpu:
        sys.exit(f"torch {machine['torch']} sees no GPU here; --list shows the parts")
    if args.cpu and machine["gpus"]:
        sys.exit("--cpu is for a machine without a GPU; CUDA_VISIBLE_DEVICES= hides those here")
    session = Session(python, out, machine, end, env, work)
    session.found = earlier_results(out / "results.json", machine)
    if machine["gpus"]:
        session.to_share = to_share_gpus(args, python, machine, work)
    calls = [*session.found.get("commands", []), as_typed(args)]
    session.found |= {
        "machine": machine, "date": f"{datetime.date.today()}", "commands": [*dict.fromkeys(calls)],
    }  # fmt: skip
    print(session_table.describe(machine), flush=True)
    return session


if __name__ == "__main__":
    main(sys.argv[1:])
