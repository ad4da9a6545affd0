"""The launcher: ports that are kept, what it says and what it leaves to the ranks to say."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from ranks import free_port
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from spmdrl.distributed import launcher
from spmdrl.distributed.launcher import HeldPorts

FIRST_WORDS = "spmdrl: starting the processes of the run\n"
RANK = """
import os, signal, sys, tempfile
print("rank", os.environ["RANK"], flush=True)
print(tempfile.gettempdir(), file=open("tempdir", "w"))
print(*os.environ, file=open("environment", "w"))
how = sys.argv[1]
if how == "speaks":
    from spmdrl.distributed.exit import leave, leave_for_torchrun, say
    leave_for_torchrun("config error: no")
    say("spmdrl: config error: no")
    leave(2)
if how == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(0 if how == "works" else 7)
"""


def launch(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "rank.py").write_text(RANK)
    (folder / "tmp").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", "spmdrl.launch", *arguments], cwd=folder, text=True, timeout=90,
        capture_output=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")} | env,
    )  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize(("how", "code", "said"), [
    ("works", 0, []),
    ("speaks", 2, ["spmdrl: config error: no"]),
    ("dies", 1, ["was ended by signal 9 (SIGKILL), and left no word but what stands above"]),
    ("fails", 1, ["ended with exit code 7, and left no word but what stands above"]),
])  # fmt: skip
def test_what_is_said_is_the_ranks_own_word(tmp_path, how, code, said):
    outer = {"SPMDRL_NNODES": "1:4", "SPMDRL_ROUND": "3", "SPMDRL_MEMORY_DIR": "/dev/shm/other"}
    done = launch(tmp_path, "--standalone", "--nproc-per-node", "1", "rank.py", how, **outer)
    assert (done.returncode, done.stdout) == (code, f"{FIRST_WORDS}rank 0\n"), done.stderr
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == len(said), done.stderr
    assert all(part in line for part, line in zip(said, lines, strict=True)), lines
    assert list((tmp_path / "tmp").iterdir()) == []  # torchrun would leave a folder
    assert (tmp_path / "tempdir").read_text() == f"{tmp_path / 'tmp'}\n"  # of a rank: the user's
    # the launcher was itself in a rank of another job
    assert not set(outer) & set((tmp_path / "environment").read_text().split())


SLEEPS = """
import os, time
open("there_" + os.environ.get("RANK", ""), "w").close()
time.sleep(60)
"""


def interrupted(folder: Path, there: list[str], *command: str) -> tuple[int, list[str]]:
    """Sends Ctrl-C, as a terminal does, once these files are there: the exit code, and the lines of
    the program and its ranks, less those that tell what it does.
    """
    program = subprocess.Popen(
        [sys.executable, "-m", *command], cwd=folder, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    end = time.monotonic() + 60
    while not all((folder / name).exists() for name in there):
        assert program.poll() is None and time.monotonic() < end, program.communicate()
        time.sleep(0.02)
    os.killpg(program.pid, signal.SIGINT)
    said, _ = program.communicate(timeout=30)  # until the last of its processes has ended
    doing = ("spmdrl: starting the processes", "spmdrl: reading cfg.py")
    told = [line for line in said.splitlines() if line and not line.startswith(doing)]
    return program.returncode, told


CATCHES = """
import time
try:
    open("there_", "w").close()
    time.sleep(60)
except BaseException:
    pass
"""


@pytest.mark.programs
@pytest.mark.parametrize("command", [
    ("spmdrl.launch", "--nproc-per-node", "2", "-m", "spmdrl.ppo", "--config", "cfg.py"),
    ("spmdrl.ppo", "--config", "cfg.py"),
    ("spmdrl.sft", "--config", "cfg.py", "--dry-run"),
])  # fmt: skip
def test_ctrl_c_is_one_line_while_torch_is_imported(tmp_path, command):
    """In an import KeyboardInterrupt is a traceback, or is caught by what is imported and lost."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(CATCHES)
    (tmp_path / "cfg.py").write_text("import torch")
    assert interrupted(tmp_path, ["there_"], *command) == (130, ["spmdrl: stopped by SIGINT"])


@pytest.mark.ranks
def test_ctrl_c_is_one_line_while_ranks_start(tmp_path):
    (tmp_path / "cfg.py").write_text(SLEEPS)
    command = ["--nproc-per-node", "2", "-m", "spmdrl.ppo", "--config", "cfg.py"]
    found = interrupted(tmp_path, ["there_0", "there_1"], "spmdrl.launch", *command)
    assert found == (130, ["spmdrl: stopped by SIGINT"])


@pytest.mark.ranks
def test_a_port_that_is_taken_is_named_with_who_has_it(tmp_path):
    with socket.socket() as other:
        other.bind(("", free_port()))
        other.listen()
        port = other.getsockname()[1]
        done = launch(tmp_path, "--nproc-per-node", "1", "--master-port", str(port), "rank.py", "x")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"port {port} (--master-port" in done.stderr
    assert f"is taken, where process {os.getpid()} listens (" in done.stderr
    assert "or name none for a run on this machine alone" in done.stderr
    assert done.stdout == FIRST_WORDS


def test_hosts_that_come_and_go_need_a_rendezvous_that_knows_them(tmp_path, capsys):
    assert launcher.main(["--nnodes", "1:2", "--nproc-per-node", "1", "rank.py"]) == 2
    said = capsys.readouterr().err
    assert "--nnodes 1:2 is for hosts that come and go, which --rdzv-backend static" in said
    for options in (["--nnodes", "2"], ["--nnodes", "1:2", "--rdzv-backend", "c10d"]):
        assert launcher.why_not_elastic([*options, "rank.py"]) == ""


def test_a_launcher_that_asks_who_joins_is_not_taken_for_one_that_is_held_up(monkeypatch):
    """Its ranks took their time to end: that is not to count."""
    watch, failure = launcher.Watch(), SimpleNamespace(exitcode=75, timestamp=1)

    def observe(agent, group):
        time.sleep(0.3)
        return SimpleNamespace(failures={0: failure}, state=None)

    idle = []
    member = SimpleNamespace(goes_on=lambda: idle.append(time.monotonic() - watch.seen_at))
    monkeypatch.setattr(launcher.elastic_compat, "observe_ranks", observe)
    monkeypatch.setattr(watch, "_guard", lambda *args: None)
    watch.membership = member
    watch(SimpleNamespace(), None)
    assert idle[0] < 0.2


@pytest.mark.ranks
def test_a_second_job_on_the_same_store_hears_why_it_cannot_meet(tmp_path):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = [
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{store.port}", "--rdzv-conf",
        "is_host=0,last_call_timeout=1", "--nproc-per-node", "1", "rank.py", "works",
    ]  # fmt: skip
    first, second = (
        launch(tmp_path, "--nnodes", "1:2", "--rdzv-id", "same", *meet) for _ in range(2)
    )
    assert first.returncode == 0, first.stderr
    assert second.returncode == 1 and "Traceback" not in second.stderr, second.stderr
    assert "has used the same store with the same --rdzv-id (same)" in second.stderr
    options = ["--nnodes", "3", "rank.py"]
    late = launcher.why_not_met(RendezvousTimeoutError(), launcher.Watch(), options)
    assert late.startswith("fewer hosts came to the rendezvous than --nnodes 3 asks for")
    gone = RendezvousConnectionError("The connection has failed. See inner exception for details.")
    told = launcher.why_not_met(gone, launcher.Watch(), ["--rdzv-endpoint", "a:1", "rank.py"])
    assert told.startswith("the store of the rendezvous (a:1) does not answer any more")


def test_a_held_port_is_nobody_else_s_and_a_store_may_open_it():
    """Also where somebody asks the system for all the ports that it has left."""
    ports = HeldPorts()
    held = ports()
    assert held != ports()
    given = set()
    others = []
    for _ in range(300):
        other = socket.create_server(("", 0))
        others.append(other)
        given.add(other.getsockname()[1])
    assert held not in given
    with socket.socket() as somebody, pytest.raises(OSError, match="already in use"):
        somebody.bind(("", held))
    store = TCPStore("127.0.0.1", held, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", held, wait_for_workers=False)
    store.set("key", "value")
    assert client.get("key") == b"value"
    for each in (*others, *ports.sockets):
        each.close()
