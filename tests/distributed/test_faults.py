"""Things that go wrong: every rank ends within seconds, with one report of what and where."""

import ctypes
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fault_script import FAULT, LIMIT_S
from programs import (
    CONFIG,
    RUNNING,
    end_left,
    environment,
    finish,
    launch,
    metrics_of,
    pids_of,
    set_up,
    show_environment,
    start,
    torchrun,
    wait_for,
)
from ranks import SERVER, free_port

from spmdrl.training.logs.summary import read_rows
from spmdrl.view.metric_table import MetricTable

pytestmark = pytest.mark.ranks

TORCHRUN, OURS = "torch.distributed.run", "spmdrl.launch"
ENDLESS = ("--config", "cfg.py", "--steps", "1000")

SITES = {
    "data": ("data", "spmdrl.data.prompts", "PromptDataset.prompt"),
    "rollout": ("rollout", "spmdrl.training.collect", "sample_questions"),
    "reward": ("reward", "spmdrl.rewards.runner", "RewardRunner.finish"),
    "checkpoint": ("checkpoint", "torch", "save"),
    "checkpoint, meanwhile": ("checkpoint", "spmdrl.checkpoint.writer", "sealed"),
    # amid training the other rank is inside a collective that never completes
    "training": ("update_actor", "spmdrl.algo.objectives", "masked_max"),
    # the other rank has done all its steps
    "the end": ("log samples", "spmdrl.training.logs.metrics", "RunLog.close"),
}


@pytest.fixture
def folder(tmp_path, qwen3):
    return set_up(tmp_path, qwen3)


@pytest.mark.parametrize("site", SITES)
def test_an_exception_on_one_rank_ends_all_with_one_report(folder, site):
    phase, module, name = SITES[site]
    fault = FAULT.format(module=module, name=name)
    Path(folder, "cfg.py").write_text(CONFIG + fault)
    every = "1" if phase == "checkpoint" else "0"
    done = torchrun(
        folder, 2, "--config", "cfg.py", "--data.eval", "None", "--checkpoint.every_steps", every
    )
    took = time.time() - float(Path(folder, "struck").read_text())
    assert done.code == 1
    assert took < LIMIT_S
    failure = f"failed in phase '{phase}': OSError: "
    told = [line for line in done.output.splitlines() if line.startswith("spmdrl: rank 1 on ")]
    assert len(told) == 1, done.output[-4000:]
    assert failure in told[0]
    assert told[0].endswith("disk on fire; last checkpoint: none")
    assert done.output.count("Traceback") == 1  # torchrun's own
    line = CONFIG.count("\n") + 1 + fault.split("raise ")[0].count("\n")
    assert f"rank_1.json; it was raised in cfg.py, line {line}, in boom" in done.output
    report = json.loads(Path(folder, "run/errors/rank_1.json").read_text())
    assert report["phase"] == phase
    assert "in boom" in report["details"]
    # torchrun's own summary, the last thing on the terminal, says it too
    assert failure in done.output.split("Root Cause")[-1]


EARLY = """
import os, sys
def end(*args, **kwargs):
    {call}
import spmdrl.algo.objectives
spmdrl.algo.objectives.masked_max = end
"""
ENDS = {
    "os._exit(0)": "os._exit(0) was called before the run had ended",
    "sys.exit(0)": "SystemExit: 0",
    "raise KeyboardInterrupt": "KeyboardInterrupt:",
}


@pytest.mark.parametrize("call", ENDS)
def test_code_0_says_that_all_steps_are_done(folder, call):
    """Where a function of the user's ends every rank at once, nobody is left to miss them."""
    Path(folder, "cfg.py").write_text(CONFIG + EARLY.format(call=call))
    done = torchrun(folder, 2, "--config", "cfg.py", "--data.eval", "None")
    assert done.code == 1
    told = [line for line in done.output.splitlines() if line.startswith("spmdrl: rank ")]
    assert len(told) == 1, done.output[-4000:]
    assert f"failed in phase 'update_actor': {ENDS[call]}" in told[0]
    reports = list(Path(folder, "run/errors").glob("rank_*.json"))
    assert reports and all("in end\n" in json.loads(r.read_text())["details"] for r in reports)


def test_a_config_file_that_ends_the_process_is_no_success(folder):
    Path(folder, "cfg.py").write_text("import os\nos._exit(0)\n")
    done = torchrun(folder, 1, "--config", "cfg.py")
    assert done.code == 1
    assert "os._exit(0) was called before the run had ended" in done.output
    assert 'cfg.py", line 2' in done.output


@pytest.mark.parametrize(
    ("rank", "store"), [(0, "agent's"), (0, "rank 0's"), (1, "rank 0's")]
)  # rank 1 with the agent's: the next test
def test_a_killed_rank_ends_all(folder, rank, store, monkeypatch):
    """One of three: the others' ends are no failures. The rank with the store is met with processes
    that torchrun has started itself, all others with forks, which start in no time."""
    if store == "rank 0's":  # as the launch scripts have it: it may die with the rank
        monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    forked = (rank, store) != (0, "rank 0's")
    proc = start(
        folder, 3, *ENDLESS, "--checkpoint.every_steps", "2", before=["--standalone"], forked=forked
    )
    wait_for(folder, "saved run/checkpoints/step_00000002", proc)
    victim = pids_of(proc.pid)[rank]
    os.kill(victim, signal.SIGKILL)
    done = finish(proc, folder, LIMIT_S)
    assert done.code == 1
    assert f"Signal 9 (SIGKILL) received by PID {victim}" in done.output.split("Root Cause")[-1]
    told = [line for line in done.output.splitlines() if line.startswith("spmdrl: rank ")]
    assert len(told) == 1, done.output[-4000:]  # the neighbour, which only felt it, says nothing
    assert "Exception raised from" not in done.output  # a C++ stack of each store that is gone
    assert told[0].startswith(f"spmdrl: rank {rank} on ")
    assert f"its process {victim} ended without a word" in told[0]
    assert "; last checkpoint: run/checkpoints/step_0000000" in told[0]
    report = json.loads(Path(folder, f"run/errors/rank_{rank}.json").read_text())
    assert report["last_checkpoint"].startswith("run/checkpoints/step_0000000")


def test_a_killed_rank_is_named_where_nothing_is_saved(folder):
    """torchrun's SIGTERM to the others, for which they need not stay, is not the failure."""
    proc = start(folder, 3, *ENDLESS, "--checkpoint.every_steps", "0", "--data.eval", "None")
    wait_for(folder, "step 2/1000", proc)
    victim = pids_of(proc.pid)[1]
    os.kill(victim, signal.SIGKILL)
    done = finish(proc, folder, LIMIT_S)
    assert done.code == 1
    told = [line for line in done.output.splitlines() if line.startswith("spmdrl: rank ")]
    assert len(told) == 1 and told[0].startswith("spmdrl: rank 1 on "), done.output[-4000:]
    assert f"its process {victim} ended without a word" in told[0]


@pytest.mark.vllm
def test_a_vllm_that_cannot_be_imported_is_the_failure(folder):
    """And not what cleans up after it, which must not import it again."""
    Path(folder, "vllm").mkdir()
    broken = "raise ImportError('libcudart.so.99: cannot open shared object file')"
    Path(folder, "vllm", "__init__.py").write_text(broken)
    done = subprocess.run(
        [sys.executable, "-m", "spmdrl.ppo", "--config", "cfg.py", "--rollout.engine", "vllm"],
        cwd=folder, timeout=120, text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    [told] = re.findall("spmdrl: (config error: .*)", done.stderr)
    assert "vLLM cannot be imported: ImportError: libcudart.so.99: cannot open shared" in told
    assert "vllm/__init__.py:1" in told and "rollout.engine='hf'" in told
    assert "Traceback" not in done.stderr


SLOW = """
import os, time
import spmdrl.training.collect
sample = spmdrl.training.collect.sample_questions
def slow(*args, **kwargs):
    if os.environ["RANK"] == "{rank}" and os.path.exists("run/checkpoints/step_00000002"):
        open("struck", "w").close()
        time.sleep(300)
    return sample(*args, **kwargs)
spmdrl.training.collect.sample_questions = slow
"""


@pytest.mark.parametrize("when", ["in any phase", "in a rollout that the other waits for"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_alone_on_its_host_is_missed_within_lost_timeout_s(folder, rank, when):
    """Nobody there looks at its process. Two torchruns, as on two hosts; rank 0's has the store.
    Who waits for a part of a rollout only asks the store, and has no connection that breaks."""
    if when != "in any phase":
        Path(folder, "cfg.py").write_text(CONFIG + SLOW.format(rank=rank))
    nodes = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    lost_s = 5
    program = [*ENDLESS, "--data.eval", "None", "--checkpoint.every_steps", "2"]
    program += ["--lost_timeout_s", str(lost_s)]
    hosts = [start(folder, 1, *program, before=[*nodes, "--node-rank", str(i)]) for i in range(2)]
    wait_for(folder, "saved run/checkpoints/step_00000002", hosts[0])
    end = time.monotonic() + 30
    while when != "in any phase" and not Path(folder, "struck").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(0.0 if when == "in any phase" else 1.0)  # until the other waits, too
    os.kill(pids_of(hosts[rank].pid)[0], signal.SIGKILL)
    end = time.monotonic() + lost_s + LIMIT_S
    for host in hosts:
        host.join(max(0.1, end - time.monotonic()))
        assert host.exitcode == 1
    text = Path(folder, "log").read_text()
    told = [line for line in text.splitlines() if line.startswith("spmdrl: rank ")]
    assert len(told) == 1 and told[0].startswith(f"spmdrl: rank {rank} on "), text[-4000:]


HELD = """
import os, time
def is_held():
    if os.path.exists("run/checkpoints/step_00000004"):
        return not os.path.exists("go")
    rows = open("run/metrics.jsonl").readlines() if os.path.exists("run/metrics.jsonl") else []
    return len(rows) > 2 and not os.path.exists("killed")
def reward(response, ground_truth):
    while is_held():
        time.sleep(0.05)
    return float(len(response))
"""


def test_a_killed_rank_is_started_again_and_the_run_goes_on(folder):
    """By torchrun, without a hand and without --resume; no step is lost and none is there twice.
    Once before anything is saved, and once after."""
    Path(folder, "cfg.py").write_text(CONFIG.replace("\nconfig =", HELD + "\nconfig ="))
    proc = start(
        folder, 2, *ENDLESS, "--steps", "6", "--checkpoint.every_steps", "4",
        "--eval_every", "4", before=["--max-restarts", "2"],
    )  # fmt: skip
    wait_for(folder, "step 2/6", proc)
    os.kill(pids_of(proc.pid)[1], signal.SIGKILL)
    Path(folder, "killed").touch()
    wait_for(folder, "saved run/checkpoints/step_00000004", proc)
    os.kill(pids_of(proc.pid)[1], signal.SIGKILL)
    Path(folder, "go").touch()
    done = finish(proc, folder, 120)
    assert done.code == 0, done.output[-4000:]
    assert done.output.count("resumed from run/checkpoints/step_00000004: 4 steps done") == 1
    assert [row["step"] for row in metrics_of(Path(folder, "run"))] == list(range(7))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_ends_the_step_saves_and_leaves_to_be_started_again(folder, number):
    """Of SIGINT see test_the_launcher_says_how_its_ranks_took_a_signal."""
    proc = start(
        folder, 2, *ENDLESS, "--checkpoint.every_steps", "900", "--trackers", "tensorboard"
    )
    wait_for(folder, "step 2/1000", proc)
    if number == signal.SIGUSR1:  # torchrun would die of it: of ranks, one alone hears it
        os.kill(pids_of(proc.pid)[1], number)
    else:
        os.kill(proc.pid, number)
    done = finish(proc, folder, LIMIT_S)
    assert done.code != 0
    [told] = re.findall(r"spmdrl: stopped after step (\d+) of 1000; --resume auto", done.output)
    assert Path(folder, f"run/checkpoints/step_{int(told):08d}/manifest.json").exists()
    assert len(metrics_of(Path(folder, "run"))) == int(told) + 1
    assert not Path(folder, "run/errors").exists()
    if number == signal.SIGUSR1:  # after the others torchrun says nothing of its ranks
        assert "exitcode  : 75" in done.output
        assert "exitcode  : 1 " not in done.output


def launch_under_nohup(folder: str, command: list[str]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    launch(folder, OURS, command, environment(), forked=True)


def test_a_run_under_nohup_outlives_its_terminal_and_its_launcher_passes_usr1_on(folder):
    command = ["--standalone", "--nproc-per-node", "2", "-m", "spmdrl.ppo", *ENDLESS,
               "--checkpoint.every_steps", "900"]  # fmt: skip
    Path(folder, "log").touch()
    process = SERVER.Process(target=launch_under_nohup, args=(str(folder), command))
    process.start()
    RUNNING.append(process)
    wait_for(folder, "step 2/1000", process)
    for pid in (process.pid, *pids_of(process.pid)):
        os.kill(pid, signal.SIGHUP)
    steps = len(metrics_of(Path(folder, "run")))
    wait_for(folder, f"step {steps + 3}/1000", process)
    os.kill(process.pid, signal.SIGUSR1)
    done = finish(process, folder, LIMIT_S)
    assert done.code == 75, done.output[-4000:]
    [told] = re.findall(r"spmdrl: stopped after step (\d+) of 1000; --resume auto", done.output)
    assert Path(folder, f"run/checkpoints/step_{int(told):08d}/manifest.json").exists()


def test_what_the_grace_time_does_not_suffice_for_is_abandoned(folder):
    slow = "\nimport time\ndef reward(response, ground_truth):\n    time.sleep(300)\n"
    Path(folder, "cfg.py").write_text(CONFIG.replace("\nconfig =", slow + "\nconfig ="))
    proc = start(folder, 2, *ENDLESS, "--checkpoint.every_steps", "900", "--data.eval", "None",
                 "--rewards.timeout_s", "200", "--checkpoint.grace_s", "2")  # fmt: skip
    wait_for(folder, "scoring answers with the reward", proc)
    time.sleep(2)
    os.kill(pids_of(proc.pid)[1], signal.SIGUSR1)
    done = finish(proc, folder, LIMIT_S)
    assert "was stopped in phase 'reward': SIGUSR1, and the step had not ended after 2 s" in (
        done.output
    )
    assert "exitcode  : 75" in done.output
    assert "exitcode  : 1 " not in done.output


def launch_on_a_small_disk(folder: str, command: list[str]) -> None:
    """torchrun, whose ranks are forks; folder/run has 7 MiB, which are in folder/kept afterwards.

    The disk is a mount that this process and its children alone see.
    """
    new_mounts, new_users, private = 0x20000, 0x10000000, 0x44000
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(new_mounts | (new_users if os.geteuid() else 0)):
        raise OSError(ctypes.get_errno(), "unshare")
    small = f"{folder}/run".encode()
    for mount in ((None, b"/", None, private, None),
                  (b"tmpfs", small, b"tmpfs", 0, b"size=7m")):  # fmt: skip
        if libc.mount(*mount):
            raise OSError(ctypes.get_errno(), "mount")
    try:
        launch(folder, TORCHRUN, command, environment(), forked=True)
    finally:
        shutil.copytree(small.decode(), f"{folder}/kept")


def test_a_full_disk_ends_the_run_and_with_more_room_it_goes_on(folder):
    mounts = shutil.which("bwrap") and subprocess.run(["bwrap", "--dev-bind", "/", "/", "true"])
    if not mounts or mounts.returncode:
        pytest.skip("no namespaces, to mount a small disk in")
    small, kept = Path(folder, "run"), Path(folder, "kept")
    small.mkdir()
    options = ["--config", "cfg.py", "--checkpoint.every_steps", "1", "--checkpoint.keep", "99",
               "--steps", "8"]  # fmt: skip
    command = ["--standalone", "--nproc-per-node", "2", "-m", "spmdrl.ppo", *options]
    process = SERVER.Process(target=launch_on_a_small_disk, args=(str(folder), command))
    process.start()
    RUNNING.append(process)
    done = finish(process, folder, 90)
    failure = r"spmdrl: rank \d on \S+ failed in phase '\w+': OSError: \[Errno 28\].*No space left"
    told = re.search(rf"{failure}.*last checkpoint: run/checkpoints/step_0000000(\d)", done.output)
    assert told, done.output[-5000:]
    assert done.code == 1
    last = int(told[1])
    assert [p.name for p in sorted(Path(kept, "checkpoints").iterdir())] == [
        f"step_{step:08d}" for step in range(1, last + 1)
    ]
    went_on = torchrun(folder, 2, *options, "--run_dir", "kept", "--resume", "auto")
    assert went_on.code == 0, went_on.output[-5000:]
    assert f"resumed from kept/checkpoints/step_{last:08d}" in went_on.output
    assert [row["step"] for row in metrics_of(kept)] == list(range(9))


def test_without_checkpoints_the_first_signal_ends_the_run(folder):
    proc = start(folder, 2, *ENDLESS)
    wait_for(folder, "step 2/1000", proc)
    os.kill(pids_of(proc.pid)[0], signal.SIGTERM)
    done = finish(proc, folder, LIMIT_S)
    assert re.search(r"spmdrl: rank 0 on .* was stopped in phase '[\w ]+': SIGTERM;", done.output)
    assert "the run stops after this step" not in done.output
    assert "exitcode  : 75" in done.output


@pytest.mark.parametrize(("stuck", "code"), [(False, 75), (True, 130)])
def test_the_launcher_says_how_its_ranks_took_a_signal(folder, stuck, code):
    """Ctrl-C ends the step and saves; a second one, where a step is endless, does not."""
    slow = "\nimport time\ndef reward(response, ground_truth):\n    time.sleep(300)\n"
    if stuck:
        Path(folder, "cfg.py").write_text(CONFIG.replace("\nconfig =", slow + "\nconfig ="))
    proc = start(
        folder, 2, *ENDLESS, "--checkpoint.every_steps", "900", "--data.eval", "None",
        "--rewards.timeout_s", "200", launcher="spmdrl.launch", before=["--standalone"],
    )  # fmt: skip
    wait_for(folder, "scoring answers" if stuck else "step 2/1000", proc)
    time.sleep(2.0 if stuck else 0.0)
    ranks = pids_of(proc.pid)
    os.killpg(proc.pid, signal.SIGINT)  # as a terminal does
    if stuck:
        wait_for(folder, "SIGINT: the run stops after this step", proc)
        wait_for(folder, "once more, and it stops now", proc)
        os.killpg(proc.pid, signal.SIGINT)
    done = finish(proc, folder, LIMIT_S + 20)
    assert done.code == code, done.output[-6000:]
    second = re.findall(r"was stopped in phase '\w+': a second signal, SIG", done.output)
    assert len(second) == stuck
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    assert Path(folder, "run/checkpoints").exists() != stuck
    assert not Path(folder, "run/errors").exists() or stuck
    for told in re.findall(r"stopped after step (\d+) of 1000; --resume auto", done.output):
        assert Path(folder, f"run/checkpoints/step_{int(told):08d}/manifest.json").exists()
        assert len(metrics_of(Path(folder, "run"))) == int(told)  # there is no row of a step 0


def test_ranks_do_not_outlive_torchrun(folder):
    proc = start(folder, 2, *ENDLESS, "--checkpoint.every_steps", "900")
    wait_for(folder, "step 2/1000", proc)
    ranks = pids_of(proc.pid)
    end_left()  # as after a test that failed: SIGKILL to torchrun, which is a group by itself
    assert proc.exitcode == -signal.SIGKILL
    end = time.monotonic() + LIMIT_S
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < end, Path(folder, "log").read_text()[-4000:]
        time.sleep(0.1)


def test_updates_that_are_not_finite_are_passed_over_where_the_config_says_so(folder):
    """In step 2 the advantages of one rank are not a number; in steps 4 to 6 either."""
    fault = """
import os
import spmdrl.training.step
add, steps = spmdrl.training.step.add_advantages, []
def broken(batches, *rest):
    steps.append(len(steps) + 1)
    found = add(batches, *rest)
    if os.environ["RANK"] == "1" and steps[-1] in (2, 4, 5, 6):
        batches[0].advantages[:] = float("nan")
    return found
spmdrl.training.step.add_advantages = broken
"""
    Path(folder, "cfg.py").write_text(CONFIG + fault)
    done = torchrun(folder, 2, "--config", "cfg.py", "--steps", "9", "--nan_updates", "2")
    assert done.code == 1
    rows = [json.loads(x) for x in Path(folder, "run/metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row["actor/skipped_updates"] for row in rows[1:]] == [0, 1, 0, 1, 1]
    assert "actor/loss" not in rows[2]
    assert rows[3]["actor/loss"] == rows[3]["actor/loss"]
    assert "FloatingPointError: update 3: loss nan" in done.output
    assert "passed over, 2 in a row" in done.output


OWN_LOSS = """
import os
from dataclasses import replace
calls = []
def my_loss(logprobs, old_logprobs, mb):
    if mb.loss_mask.any():
        calls.append(0)
    wrong = float("nan") if os.environ["RANK"] == "1" and len(calls) == 3 else 1.0
    far = logprobs.detach() * 0 + float("inf" if len(calls) == 2 else "1")
    return -mb.advantages * logprobs * wrong, {"far": far, "near": 0 * far}
actor = replace(config.actor, micro_batch_tokens=4096)
config = replace(config, algo=replace(config.algo, policy_loss=my_loss), actor=actor)
"""


def test_a_loss_of_the_users_that_is_not_finite_is_told_with_its_name_and_step(folder):
    """The second step's metric is infinite, the third step's losses are no numbers on one rank."""
    Path(folder, "cfg.py").write_text(CONFIG + OWN_LOSS)
    done = torchrun(folder, 2, "--config", "cfg.py", "--steps", "4")
    assert done.code == 1
    assert (
        "FloatingPointError: update 3: loss nan, gradient norm nan, as algo.policy_loss: my_loss "
        "returned losses that are not finite; the weights are unchanged (step 3); last"
    ) in done.output
    for name in ("far", "near"):
        said = f"step 2: the metric actor/{name} of algo.policy_loss: my_loss is "
        assert done.output.count(said) == 1
    lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [row.get("actor/far") for row in rows] == [None, 1, None]
    table = MetricTable(Path(folder, "run/metrics.jsonl"))
    table.update()
    assert table.damaged == 0
    assert table.one("actor/far", 9) == {"steps": [1], "values": [1]}
    assert table.one("actor/loss", 9)["steps"] == [1, 2]
    assert [math.isnan(row["actor/far"]) for row in read_rows(folder / "run")[1:]] == [False, True]


@pytest.mark.parametrize(("rank", "cause"), [
    (1, r"no sign of life for (\d+) s"),
    (0, r"its process \d+ is stopped, for (\d+) s as it seems"),  # which has the store
])  # fmt: skip
def test_a_frozen_rank_is_named_and_killed(folder, rank, cause, monkeypatch):
    if rank == 0:
        monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    command = [*ENDLESS, "--lost_timeout_s", "6"]
    shown = show_environment(dict(os.environ))  # who kills a rank looks there
    proc = start(folder, 3, *command, before=["--standalone"], forked=shown)
    wait_for(folder, "step 2/1000", proc)
    os.kill(pids_of(proc.pid)[rank], signal.SIGSTOP)
    done = finish(proc, folder, 6 + LIMIT_S)  # torchrun gives one that hears nothing 30 s
    assert done.code == 1
    [told] = [line for line in done.output.splitlines() if line.startswith("spmdrl: rank ")]
    found = re.match(f"spmdrl: rank {rank} on .*: {cause}", told)
    assert found, told
    assert int(found[1]) in (6, 7)


def test_a_job_that_was_stopped_and_woken_goes_on(folder):
    """As Slurm suspends one: nobody was there to beat, and nobody is lost."""
    lost_s = 3
    proc = start(folder, 3, *ENDLESS, "--lost_timeout_s", str(lost_s))
    wait_for(folder, "step 2/1000", proc)
    ranks = pids_of(proc.pid)
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(lost_s + 2)
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.3)
    begun, woken = last_step(folder), time.monotonic()
    while last_step(folder) < begun + 4 or time.monotonic() < woken + lost_s + 1:
        assert time.monotonic() < woken + 60, Path(folder, "log").read_text()[-4000:]
        time.sleep(0.1)
    os.kill(ranks[0], signal.SIGTERM)
    done = finish(proc, folder, 60)
    assert "failed in phase" not in done.output


def last_step(folder: Path) -> int:
    rows = Path(folder, "run/metrics.jsonl").read_text().splitlines()
    return json.loads(rows[-1])["step"] if rows else -1


def test_too_many_invalid_rewards_stop_the_run_and_are_shown(folder):
    text = CONFIG.replace(
        "    return float(", "    raise KeyError('no such key')\n    return float("
    )
    Path(folder, "cfg.py").write_text(text)
    done = torchrun(folder, 2, "--config", "cfg.py", "--data.eval", "None")
    assert done.code == 1
    assert "32 of 32 samples have no reward" in done.output
    assert "KeyError: 'no such key'" in done.output
    rows = [json.loads(x) for x in Path(folder, "run/samples/step_1.jsonl").open()]
    assert len(rows) == 32  # all of them, with the traceback
    assert "line 5, in reward" in rows[-1]["invalid"]


def test_rewards_that_all_hang_stop_the_run_before_all_have_timed_out(folder):
    """9 of 16 decide it, wherever they are scored; with one worker a rank 8 wait in turn."""
    text = CONFIG.replace(
        "    return float(", "    import time; time.sleep(1000)\n    return float("
    )
    text = text.replace("RewardConfig(workers=1)", "RewardConfig(workers=1, timeout_s=1)")
    Path(folder, "cfg.py").write_text(text)
    few = ("--data.eval", "None", "--data.prompts_per_step", "4")
    done = torchrun(folder, 2, "--config", "cfg.py", *few)
    assert done.code == 1
    assert re.search("(9|10) of 16 samples have no reward", done.output), done.output[-4000:]
    assert "before all are scored" in done.output
    lines = [line for line in done.output.splitlines() if "a reward timed out" in line]
    assert len(lines) == 3 and "timeout_s=1), number 1 of" in "".join(lines)
    assert not Path(folder, "run/samples/step_1.jsonl").exists()


def test_invalid_samples_are_masked_and_counted(folder):
    text = CONFIG.replace(
        "    return", "    if ground_truth == '5':\n        raise KeyError('five')\n    return"
    )
    Path(folder, "cfg.py").write_text(text)
    done = torchrun(folder, 2, "--config", "cfg.py", "--data.shuffle", "False", "--steps", "1")
    assert done.code == 0, done.output[-4000:]
    row = [json.loads(x) for x in Path(folder, "run/metrics.jsonl").open()][1]
    rows = [json.loads(x) for x in Path(folder, "run/samples/step_1.jsonl").open()]
    assert row["reward/invalid"] == 4  # of the first eight prompts, 1+4=5 alone
    assert sum(r["invalid"] is not None for r in rows) == 4
    assert all("five" in r["invalid"] for r in rows if r["ground_truth"] == "5")


@pytest.mark.parametrize(
    ("launcher", "args", "words"),
    [
        (TORCHRUN, ["--stepz", "2"], "nearest: steps"),
        (OURS, ["--model", "/no/such/model"], "no such folder: '/no/such/model'"),
        (TORCHRUN, ["--data.train", "gone.jsonl"], "gone.jsonl"),
        (OURS, ["--ranks", "4"], "--ranks 4 is for --dry-run"),
    ],
)
def test_config_errors_are_said_once_before_any_engine(folder, launcher, args, words):
    """Our launcher tells a mistake by its exit code, and does not try it again: config errors of
    two kinds, of reading the arguments (the first and the last) and of checking the config."""
    before = ["--standalone", "--max-restarts", "3"] if launcher == OURS else []
    done = torchrun(
        folder, 2, "--config", "cfg.py", *args, launcher=launcher, before=before, timeout_s=60
    )
    said = [line for line in done.output.splitlines() if line.startswith("spmdrl: config error")]
    assert len(said) == 1, done.output
    assert words in said[0]
    if launcher == OURS:
        assert done.code == 2
    else:
        assert "exitcode  : 2" in done.output
        assert "exitcode  : 1 " not in done.output
    assert "Traceback" not in done.output.split("torchrun")[0].split("elastic")[0]


def test_dry_run_prints_the_plan(folder):
    done = torchrun(folder, 2, "--config", "cfg.py", "--dry-run", "--ranks", "4")
    assert done.code == 0, done.output
    for words in ("data.prompts_per_step=8\n", "8 prompts x 4 samples = 32 samples a step",
                  "actor    ranks 0-3: dp 1 x fsdp 4", "M parameters; weights 0.00, gradients",
                  "reward of its ground truth '2' as the answer: 1.01",
                  "reward of its ground truth '11' as the answer: 1.02"):  # fmt: skip
        assert done.output.count(words) == 1, (words, done.output)
    assert not Path(folder, "run/metrics.jsonl").exists()
    assert done.output.rstrip().endswith(  # whatever the launcher says before
        "warning: checkpoint.every_steps=0: nothing of what is learnt is kept"
    )
    assert "warning" not in done.output.partition("actor    ranks 0-3")[0]
    assert "10 of them asked at each evaluation, 10 answers" in done.output
    small = ("--dry-run", "--ranks", "16", "--gpu_gib", "0.5")
    done = torchrun(folder, 2, "--config", "cfg.py", *small)  # after the plan, once, on every rank
    assert done.code != 0 and "exitcode  : 2" in done.output, done.output
    assert done.output.count("spmdrl: config error: GPU memory: temporary 0.") == 1, done.output
    assert done.output.count(" of 0.5 GiB in ") == 1
    text = CONFIG.replace("    return", "    raise KeyError('no tests')\n    return")
    Path(folder, "broken.py").write_text(text)
    done = torchrun(folder, 1, "--config", "broken.py", "--dry-run", "--show_config")
    assert "config error: the reward fails on 8 of 8 ground truths given as answers" in done.output
    assert "KeyError: 'no tests' (File " in done.output and "broken.py" in done.output
    assert "exitcode  : 2" in done.output
    few = ("--dry-run", "--show_config", "--data.max_eval_prompts", "3", "--eval_samples", "2")
    done = torchrun(folder, 1, "--config", "cfg.py", *few, "--eval_temperature", "1.0")
    assert "    stall_timeout_s=1800.0,\n" in done.output, done.output
    assert "3 of them asked at each evaluation, 6 answers" in done.output
    more = ("--rollout.oversample", "50", "--algo.correction.level", "token")
    done = torchrun(folder, 1, "--config", "cfg.py", "--dry-run", *more)
    assert done.code != 0 and "x rollout.oversample=50" in done.output, done.output
