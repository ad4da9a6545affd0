"""The GPU session without a GPU: real processes that end well, fail, hang and leave others behind;
the table; a part by gloo. What the parts find on a GPU, only a GPU shows."""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import session
import session_table

pytestmark = pytest.mark.programs

ROOT = Path(__file__).resolve().parents[2]
PAGE = (
    f"# Page\n\nbefore\n\n{session_table.BEGIN}\n\nan old table\n\n{session_table.END}\n\nafter\n"
)
# What a driver runs: a process of its own, since it ends everything below it.
DRIVER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import processes, session
from session import Part, Session

HANGS = '''
import signal, subprocess, sys, time
ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
leaves = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {ignores!r}], " \\
    "start_new_session=True); open('pids', 'a').write(f'{p.pid} ')"
subprocess.run([sys.executable, "-c", leaves])  # its child is an orphan now
def waits_for_ever():
    time.sleep(600)
print('{"begun": 1}', flush=True)
waits_for_ever()
'''
processes.adopt_orphans()
out = Path.cwd()
machine = {"gpus": 1, "gpu": "None Such", "torch": "0", "driver": "1", "cores": 2, "python": "3",
           "modules": ["pytest"], "amd": False, "nccl": "2.29.7"}
env = {"PATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they would take most of the time
run = Session(sys.executable, out, machine, time.monotonic() + 60, env, out)
run.found = session.earlier_results(out / "results.json", machine) | {
    "machine": machine, "date": "a day", "commands": ["session"]}
count = "open('ran', 'a').write('{} ')"
parts = [
    Part("good", "says a number", 20, command=("-c", count.format("good") + '''
print('{"tokens/s": 5, "of | for": "<x>"}')''')),
    Part("bad", "raises", 20, command=("-c", count.format("bad") + '''
raise ValueError("the loss is 3, with one rank 2")''')),
    Part("hangs", "waits", 4, command=("-c", HANGS)),
    Part("tests", "pytest", 50, command=("-m", "pytest", "-vv", "-p", "no:cacheprovider", "-c",
                                         "/dev/null", "some_tests.py"), needs=("pytest",)),
    Part("skips", "pytest", 50, command=("-m", "pytest", "-vv", "-p", "no:cacheprovider", "-c",
                                         "/dev/null", "-k", "test_c", "some_tests.py")),
    Part("lacks", "needs what is not there", 20, needs=("no_such_module",)),
    Part("refuses", "this GPU", 20, command=("-c", "print('too old a GPU'); raise SystemExit(77)")),
    Part("sharing", "two ranks", 20, 2, command=("-c", "raise SystemExit('NCCL is too old')")),
    Part("pair", "two ranks", 20, 2),
    Part("long", "more than is left", 1000),
]
session.run_parts(parts, run, out / "page.md", again=False)
assert processes.descendants(processes.os.getpid()) == []
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a session of small parts has run twice."""
    path = tmp_path_factory.mktemp("session")
    Path(path, "page.md").write_text(PAGE)
    tests = "def test_a():\n    assert True\n\ndef test_b():\n    assert 1 == 2, 'one is not two'\n"
    tests += "\nimport pytest\n@pytest.mark.skip(reason='no GPU')\ndef test_c():\n    pass\n"
    Path(path, "some_tests.py").write_text(tests)
    for _ in range(2):
        command = [sys.executable, "-c", DRIVER, str(ROOT / "tests/gpu")]
        done = subprocess.run(command, cwd=path, text=True, capture_output=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        Path(path, "said").write_text(done.stdout)
    return path


def test_no_part_stops_the_others(folder: Path) -> None:
    found = json.loads(Path(folder, "results.json").read_text())["parts"]
    ended = {name: result["result"] for name, result in found.items()}
    assert ended == {"good": "passed", "bad": "failed", "hangs": "over its limit",
                     "tests": "failed", "skips": "cannot", "lacks": "cannot", "refuses": "cannot",
                     "sharing": "failed", "pair": "cannot", "long": "no time"}  # fmt: skip
    assert found["good"]["figures"]["tokens/s"] == 5
    assert found["bad"]["why"] == "ValueError: the loss is 3, with one rank 2"
    assert found["tests"]["figures"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert found["skips"]["why"] == "its tests were all skipped"
    assert "test_b" in found["tests"]["why"] and "one is not two" in found["tests"]["why"]
    assert found["lacks"]["why"] == "the environment has no no_such_module"
    assert found["refuses"]["why"] == "too old a GPU"
    assert "2 ranks cannot share this GPU" in found["pair"]["why"]
    assert "NCCL is too old" in found["pair"]["why"]
    assert "were left, and it wants 400" in found["long"]["why"]


def test_a_part_that_hangs_shows_where_and_leaves_no_process(folder: Path) -> None:
    found = json.loads(Path(folder, "results.json").read_text())["parts"]["hangs"]
    assert 4 <= found["seconds"] < 20 and found["figures"] == {"begun": 1}
    assert "in waits_for_ever" in Path(folder, "log.txt").read_text()
    orphans = [int(pid) for pid in Path(folder, "pids").read_text().split()]
    assert len(orphans) == 1  # in a session of its own, deaf to SIGTERM, its parent gone
    assert not [pid for pid in orphans if psutil.pid_exists(pid)]


def test_what_has_a_result_is_not_run_again(folder: Path) -> None:
    assert Path(folder, "ran").read_text().split() == ["good", "bad"]
    said = Path(folder, "said").read_text()
    assert "good           passed, in an earlier call" in said
    assert "lacks          cannot, 0 s" in said  # tried anew: it may be there by now


def test_the_table_stands_in_its_page(folder: Path) -> None:
    page = Path(folder, "page.md").read_text()
    table = Path(folder, "table.md").read_text()
    assert page == PAGE.replace("an old table\n", table)
    assert "1 x None Such, driver 1, 2 processor cores, torch 0, python 3, NCCL 2.29.7" in table
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 10 and all(row.count("|") == 7 for row in rows)
    good = r"\| good \| says a number \| 1 \| passed \| \d+ \| tokens/s 5; of / for \(x\) \|"
    assert any(re.fullmatch(good, row) for row in rows)  # its seconds are the machine's
    assert any(row.startswith("| pair | two ranks | 2, sharing a GPU | cannot |") for row in rows)


def test_a_page_without_its_place_is_refused(tmp_path: Path) -> None:
    Path(tmp_path, "page.md").write_text(PAGE.replace(session_table.END, ""))
    with pytest.raises(ValueError, match="once each"):
        session_table.check(tmp_path / "page.md")
    session_table.check(ROOT / "docs/gpu.md")


def call(*args: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "tests/gpu/session.sh"), *args]
    return subprocess.run(command, text=True, capture_output=True, timeout=timeout_s)


def test_the_list_has_every_part_with_a_command_that_exists() -> None:
    lines = call("--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == [part.name for part in session.PARTS]
    parts = load("tests/gpu/parts.py")
    for part in session.PARTS:
        paths = [word for word in part.command if word.endswith(".py")]
        assert all(Path(ROOT, path).exists() for path in paths), part
        assert part.command or part.name in parts.PARTS, part
    unknown = call("--parts", "fsdp_2,nothing")
    assert unknown.returncode == 1 and "--parts has no nothing; there are: smoke" in unknown.stderr


@pytest.mark.ranks
def test_a_session_by_gloo(tmp_path: Path) -> None:
    """All of it but the GPU: the environment is looked at, a real part runs, its row is written."""
    Path(tmp_path, "page.md").write_text(PAGE)
    places = ("--out", f"{tmp_path}/out", "--work", f"{tmp_path}/work")
    args = ("--python", sys.executable, "--minutes", "4", "--parts", "sharing", *places, "--page",
            f"{tmp_path}/page.md")  # fmt: skip
    done = call(*args, "--cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    table = Path(tmp_path, "out/table.md").read_text()
    assert "`tests/gpu/session.sh --minutes 4 --parts sharing --cpu`:" in table
    assert "| sharing | every collective of training, by NCCL | 2 | passed |" in table
    assert "all-reduce GB/s" in table
    assert Path(tmp_path, "page.md").read_text() == PAGE  # it says nothing of a GPU
    assert call(*args, "--paste").returncode == 0
    assert "all-reduce GB/s" in Path(tmp_path, "page.md").read_text()
    assert {path.name for path in Path(tmp_path, "out").iterdir()} == {
        "results.json", "table.md", "log.txt",
    }  # fmt: skip


def machine(**more: Any) -> dict[str, Any]:
    return {"gpus": 1, "amd": False, "nccl": "2.30.7", "modules": []} | more


def test_ranks_share_what_there_are_too_few_of(tmp_path: Path) -> None:
    run = session.Session("python", tmp_path, machine(gpus=2), 0.0, {}, tmp_path)
    known = {part.name: part for part in session.PARTS}
    shared = [name for name, part in known.items() if run.shares(part)]
    assert shared == ["hsdp_4", "async_2_2"]
    run.machine["gpus"] = 0  # gloo
    assert not any(map(run.shares, session.PARTS))
    chosen = [known["smoke_hf"], known["fsdp_2"]]
    names = [part.name for part in session.with_sharing(chosen, machine())]
    assert names == ["smoke_hf", "sharing", "fsdp_2"]
    assert session.with_sharing(chosen, machine(gpus=2)) == chosen
    args = argparse.Namespace(nccl=None)
    want = {"SPMDRL_SHARE_GPU": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    assert session.to_share_gpus(args, "python", machine(), tmp_path) == want
    amd = machine(amd=True, nccl=None)
    assert session.to_share_gpus(args, "python", amd, tmp_path) == want


def test_a_newer_nccl_is_put_before_the_old_one(tmp_path: Path) -> None:
    """The library is a mock of NCCL, which needs a GPU's driver: it only tells its version."""
    source = Path(tmp_path, "nccl.c")
    source.write_text("int ncclGetVersion(int *v) { *v = 23007; return 0; }")
    library = tmp_path / "libnccl.so.2"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", source, "-o", library], check=True
    )
    old = machine(nccl="2.29.7")
    args = argparse.Namespace(nccl=library)
    env = session.to_share_gpus(args, sys.executable, old, tmp_path)
    assert env["LD_PRELOAD"] == env["VLLM_NCCL_SO_PATH"] == str(library)
    assert old["nccl to share"] == "2.30.7"


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_a_profile_says_the_gpu_was_busy_with(tmp_path: Path) -> None:
    events = [{"cat": "kernel", "name": "gemm", "dur": 3e5}, {"cat": "cpu_op", "name": "mm"},
              {"cat": "kernel", "name": "gemm", "dur": 3e5},
              {"cat": "kernel", "name": "copy", "dur": 2e5}]  # fmt: skip
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    busy = load("examples/bench/step.py").busy_with(tmp_path / "trace.json.gz")
    assert busy == {"kernels_s": 0.8, "shares": {"gemm": 0.75, "copy": 0.25}}
