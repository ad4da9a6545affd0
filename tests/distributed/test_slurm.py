"""launch/ppo.sbatch under a real Slurm: several nodes, one of which dies, and what ends a job."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import CONFIG, ROOT, metrics_of, write_task
from slurm_cluster import Slurm, why_no_slurm

pytestmark = pytest.mark.ranks

SBATCH = str(ROOT / "launch/ppo.sbatch")
# slow until a file appears, so that there is time to do harm, and none is lost afterwards
SLOW = CONFIG.replace(
    "    return",
    "    import os, time\n    time.sleep(0 if os.path.exists('go') else 0.1)\n    return",
)
STEPS = 20


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    reason = why_no_slurm()
    if reason:
        pytest.skip(reason)
    cluster = Slurm(tmp_path_factory.mktemp("slurm"), nodes=3)
    yield cluster
    cluster.close()


class Job:
    """A submitted job, in a folder of its own. PATH: where to find python, in place of a VENV."""

    def __init__(self, slurm: Slurm, folder: Path, model: Path, config: str, *args: str,
                 options: tuple[str, ...] = (), **env: str) -> None:  # fmt: skip
        folder.mkdir()
        Path(folder, "model").symlink_to(model)
        write_task(folder)
        Path(folder, "cfg.py").write_text(config)
        self.slurm, self.folder = slurm, folder
        settings = {
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RANKS_PER_NODE": "1", "GRACE_S": "60",
            "VENV": str(Path(sys.executable).parents[1]),
            "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        }  # fmt: skip
        command = ["sbatch", "--parsable", *options, SBATCH, "cfg.py", "--data.eval", "None", *args]
        settings |= {"VENV": "none"} if "PATH" in env else {}
        self.id = slurm.run(*command, cwd=folder, env=settings | env).strip()
        self.name = re.sub(".*=", "", next((o for o in options if "job-name" in o), "=spmdrl"))
        self.log = Path(folder, f"{self.name}-{self.id}.log")

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait_for(self, words: str, limit_s: float = 120, after: int = 0) -> str:
        """Until the log holds what matches `words`, from the given place on."""
        end = time.monotonic() + limit_s
        while not (found := re.search(words, self.text()[after:])):
            assert time.monotonic() < end, f"no {words}:\n{self.text()[-6000:]}\n{self.state()}"
            time.sleep(0.1)
        return found[0]

    def state(self) -> dict[str, str]:
        return self.slurm.job(self.id)

    def wait_until_over(self, limit_s: float = 120) -> dict[str, str]:
        end = time.monotonic() + limit_s
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        while (state := self.state())["JobState"] not in over:
            assert time.monotonic() < end, f"{state}\n{self.text()[-6000:]}"
            time.sleep(0.2)
        return state


FAKE_LAUNCHER = """#!/bin/bash
echo "$SLURMD_NODENAME of $SLURM_NTASKS: $*" >>"seen-$SLURM_JOB_ID"
code=$(sed -n "$((SLURM_NODEID + 1))p" codes)
[ "$code" != kill ] || kill -9 $PPID
exit "$code"
"""


@pytest.mark.parametrize(
    ("codes", "ended"),
    [
        (("0", "0", "0"), "COMPLETED 0:0"),
        (("75", "2", "1"), "FAILED 2:0"),
        (("75", "75", "1"), "FAILED 1:0"),
        (("0", "kill", "0"), "FAILED 1:0"),
    ],
)
def test_the_worst_of_all_nodes_decides(slurm, tmp_path, codes, ended):
    """A launcher that only says how it ends, once per node, whatever the job's tasks are."""
    Path(tmp_path, "codes").write_text("\n".join(codes))
    Path(tmp_path, "python").write_text(FAKE_LAUNCHER)
    Path(tmp_path, "python").chmod(0o755)
    settings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RANKS_PER_NODE": "3", "VENV": "none",
                "MAX_REQUEUES": "0"}  # fmt: skip
    command = ["sbatch", "--parsable", "--nodes=3", "--ntasks-per-node=2", "--array=4-4", SBATCH]
    command += ["c f.py", "--run_dir", "runs/%a", "--note", "a b"]
    number = slurm.run(*command, cwd=tmp_path, env=settings).strip()
    end = time.monotonic() + 60
    while (state := slurm.job(number))["JobState"] not in ("COMPLETED", "FAILED"):
        assert time.monotonic() < end, state
        time.sleep(0.1)
    assert f"{state['JobState']} {state['ExitCode']}" == ended
    lines = next(tmp_path.glob("seen-*")).read_text().splitlines()
    assert {line.split(" of ")[0] for line in lines} == {"n1", "n2", "n3"} and len(lines) == 3
    assert all(" of 3: -m spmdrl.launch --nnodes 3 --nproc-per-node 3 " in line for line in lines)
    assert all(line.endswith("--run_dir runs/4 --note a b") for line in lines)
    assert sorted(re.findall("is_host=.", "".join(lines))) == ["is_host=0"] * 2 + ["is_host=1"]


def path_with(folder: Path, python: str) -> str:
    """A PATH on which `python` is this script."""
    folder.mkdir()
    Path(folder, "python").write_text(python)
    Path(folder, "python").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_a_job_is_warned_and_loses_a_node_and_finishes(slurm, qwen3, tmp_path):
    """Nothing is lost and no step is made twice. Beside it, on the third node, others end ill: of
    one that fails only the exit codes matter, which a stand-in for the launcher has."""
    forking = f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/forking_launcher.py "$@"\n'
    job = Job(slurm, tmp_path / "long", qwen3, SLOW, "--steps", str(STEPS),
              "--checkpoint.every_steps", "2", options=("--job-name=long",),
              PATH=path_with(tmp_path / "forking", forking))  # fmt: skip
    alone = ("--nodes=1", "--nodelist=n3")
    fails = "#!/bin/sh\necho failed on $(hostname)\nexit 1\n"
    failing = Job(slurm, tmp_path / "failing", qwen3, CONFIG, options=alone, MAX_REQUEUES="1",
                  PATH=path_with(tmp_path / "fails", fails))  # fmt: skip
    mistaken = Job(slurm, tmp_path / "mistaken", qwen3, CONFIG, "--stepz", "3", options=alone)
    array = Job(slurm, tmp_path / "array", qwen3, CONFIG, options=(*alone, "--array=7"))

    job.wait_for(r"saved run/checkpoints/step_00000002")
    assert job.state()["NodeList"] == "n[1-2]"
    slurm.run("scancel", "--signal=USR1", job.id)  # as slurmctld does ahead of the time limit
    stopped = int(job.wait_for(r"stopped after step \d+").split()[-1])
    job.wait_for("stopped in order; the job is queued again")
    second = len(job.text())
    job.wait_for(rf"resumed from run/checkpoints/step_{stopped:08d}: {stopped} steps", after=second)
    job.wait_for(r"saved run/checkpoints/step_\d+", after=second)
    ends_without_another_start(mistaken, array)
    ends_after_one_more_start(failing)

    third = len(job.text())
    slurm.nodes["n2"].kill()
    saved = re.findall(r"saved (\S+)", job.text()[second:])[-1]
    job.wait_for(f"resumed from {saved}", after=third)
    assert job.state()["NodeList"] == "n[1,3]"
    Path(job.folder, "go").touch()
    state = job.wait_until_over()
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("COMPLETED", "0:0", "2")
    assert [row["step"] for row in metrics_of(job.folder / "run")] == list(range(1, STEPS + 1))
    assert job.text().rstrip().endswith("ppo.sbatch: done")
    last = Path(job.folder, "logs", f"long-{job.id}", "n1")
    assert any(f"step {STEPS}/{STEPS}" in log.read_text() for log in last.rglob("stdout.log"))


def ends_without_another_start(mistaken: Job, array: Job) -> None:
    state = mistaken.wait_until_over()
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "2:0", "0")
    assert mistaken.text().count("nearest: steps") == 1
    assert array.wait_until_over()["ExitCode"] == "2:0"
    assert "need run folders of their own" in array.text()


def ends_after_one_more_start(failing: Job) -> None:
    state = failing.wait_until_over()
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "1:0", "1")
    assert "failure 1 of at most 1" in failing.text()
    assert failing.text().count("failed on box3") == 2
    assert "failed 2 times" in failing.text()


AGENT = """
import asyncio, json, os, time
from pathlib import Path
from spmdrl.config import AgentConfig
from spmdrl.rollout.agents.command import CommandAgent

ROW = {"prompt": "p", "sample_index": 0, "data_source": "d", "extra_info": {}}
STEP = AgentConfig(runner="srun", runner_args=("--mem=10M",))

async def play(words, id):
    agent = CommandAgent(words, STEP)
    return await agent(ROW, "http://127.0.0.1:5/v1", "the-key", "policy", id)

async def both():
    said = await play(["sh", "-c", "echo $SLURM_STEP_ID $OPENAI_API_KEY; echo 0.5"], "a")
    slow = asyncio.ensure_future(play(["sh", "-c", "echo $$ > pid; sleep 300"], "b"))
    while not (os.path.exists("pid") and Path("pid").read_text()):
        await asyncio.sleep(0.1)
    slow.cancel()
    await asyncio.wait({slow})
    end = time.monotonic() + 20
    pid = Path("pid").read_text().strip()
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        await asyncio.sleep(0.1)
    print(json.dumps([said, slow.cancelled(), os.path.exists(f"/proc/{pid}")]), flush=True)

asyncio.run(both())
"""


def test_an_agent_is_a_step_that_ends_with_it(slurm, tmp_path):
    """A step that its agent leaves behind would keep the job's cores."""
    Path(tmp_path, "agent.py").write_text(AGENT)
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    command = ["sbatch", "--parsable", "--output=log", "--wrap", f"{sys.executable} agent.py"]
    slurm.run(*command, cwd=tmp_path, env=env)
    log, end = Path(tmp_path, "log"), time.monotonic() + 90
    while "[" not in (text := log.read_text() if log.exists() else ""):
        assert time.monotonic() < end, text
        time.sleep(0.2)
    said, cancelled, goes_on = json.loads(next(s for s in text.splitlines() if s.startswith("[")))
    assert said == {"score": 0.5, "output": "0 the-key\n0.5\n"}
    assert cancelled and not goes_on
