"""Configs of agents that are refused, command lines and where they run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from plan_configs import ppo_config, rollout_config

from spmdrl.config import (
    AgentConfig,
    AlgoConfig,
    ConfigError,
    JudgeConfig,
    MultiTurnConfig,
    ServeConfig,
)
from spmdrl.rewards.workers.caller import Caller
from spmdrl.rewards.workers.worker import Reply
from spmdrl.rollout.agents.command import CommandAgent, read_file, without_proxy
from spmdrl.training.checks.agents import check_agent_data, check_agents, warnings_of_agents
from spmdrl.training.checks.rl import check_held_out

ROW = {
    "prompt": "2+3", "sample_index": 1, "data_source": "sums", "extra_info": {"path": "a b"},
    "messages": [], "ground_truth": "5",
}  # fmt: skip


async def play(base_url: str) -> float:
    return 1.0


def of_agent(**changes: Any) -> Any:
    return ppo_config("m", **{"reward": "agent", "agent": play} | changes)


REFUSED = {
    "no agent": ({"agent": None}, "the config has no agent"),
    "agents alone": (
        {"agent": None, "reward": "gsm8k", "agents": AgentConfig(retries=1)}, "agents has no effect"
    ),
    "serve alone": (
        {"agent": None, "reward": "gsm8k", "serve": ServeConfig(port=80)}, "serve has no effect"
    ),
    "no function": ({"agent": 5}, "expected a function, a command line"),
    "an unknown parameter": ({"agent": lambda url: 1.0}, "requires 'url'"),
    "tools": ({"tools": (len,)}, "an agent runs its own tools"),
    "an environment": ({"environment": len}, "an agent is its own environment"),
    "a judge": ({"judge": JudgeConfig(model="m")}, "judge does not go with agent"),
    "a filter": ({"algo": AlgoConfig(sample_filter="pow")}, "sample_filter does not go"),
    "a penalty": ({"algo": AlgoConfig(overlong_buffer=4)}, "overlong_buffer does not go"),
    "sums over tokens": (
        {"algo": AlgoConfig(advantage="optimal_token_baseline")}, "does not go with agent"
    ),
    "a greedy baseline": ({"rollout": rollout_config(greedy_baseline=True)}, "greedy_baseline"),
    "a static split": ({"rollout": rollout_config(static_split=True)}, "static_split"),
    "staleness": ({"agents": AgentConfig(max_staleness=1)}, "agents.max_staleness=1 has no effect"),
    "a runner": ({"agents": AgentConfig(runner="srun")}, "agents.runner has no effect"),
    "a stall": ({"agents": AgentConfig(timeout_s=900, retries=1)}, "would be taken for stalled"),
    "a port": ({"serve": ServeConfig(port=65535)}, "take this port and those behind it"),
    "no such program": ({"agent": ["no-such-program"]}, "no program 'no-such-program'"),
    "braces": ({"agent": [sys.executable, "{nothing}"]}, "a name in braces that a row has not"),
    "no image": (
        {"agent": [sys.executable], "agents": AgentConfig(runner="docker")}, "docker"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_agents_is_refused(name: str) -> None:
    changes, words = REFUSED[name]
    check_agents(of_agent(), engines=2)
    with pytest.raises(ConfigError, match=words):
        check_agents(of_agent(**changes), engines=2)


def test_a_source_without_an_agent_and_images_are_refused_once_the_data_is_known() -> None:
    def dataset(*sources: str, images: int = 0) -> Any:
        shown = SimpleNamespace(per_prompt=images, largest=(4, 16, 16))
        return SimpleNamespace(data_sources=sources, images=shown)

    both = of_agent(agent={"a": play, "b": [sys.executable]})
    check_agent_data(both, dataset("a", "b"))
    check_agent_data(of_agent(), dataset("a", "b"))
    with pytest.raises(ConfigError, match="`agent` has no data_source 'c'; it has 'a', 'b'"):
        check_agent_data(both, dataset("a", "c"))
    with pytest.raises(ConfigError, match=r"a prompt has 1 image, and agents\.max_images=0"):
        check_agent_data(of_agent(), dataset("a", images=1))
    check_agent_data(of_agent(agent=None), dataset("c", images=1))


def test_an_evaluation_scores_trajectories_where_they_are_made(qwen3: Path) -> None:
    config = replace(of_agent(), model=str(qwen3), multi_turn=MultiTurnConfig())
    check_held_out(config, num_scorers=2, world=2)
    with pytest.raises(ConfigError, match="are scored where they are made"):
        check_held_out(config, num_scorers=1, world=2)


def test_an_address_that_others_reach_is_told() -> None:
    assert not warnings_of_agents(of_agent())
    [text] = warnings_of_agents(of_agent(serve=ServeConfig(host="0.0.0.0")))
    assert "without encryption" in text


def run(words: list[str], **fields: Any) -> Any:
    agent = CommandAgent(words, AgentConfig(**fields))
    return asyncio.run(agent(ROW, "http://127.0.0.1:5/t/x/v1", "the key", "policy", "x"))


TELL = (
    "import json, os, sys; print('some words'); print(json.dumps([sys.argv[1:], "
    "os.environ['OPENAI_BASE_URL'], os.environ['ANTHROPIC_BASE_URL'], os.environ['OPENAI_API_KEY'],"
    " json.loads(os.environ['SPMDRL_ROW'])['ground_truth']])); print(0.5)"
)


@pytest.mark.programs
def test_a_command_line_is_told_the_row_and_returns_its_last_line() -> None:
    words = ["{prompt}", "{index}", "{extra_info[path]}", "{{x}}", "{base_url}"]
    found = run([sys.executable, "-c", TELL.replace("{", "{{").replace("}", "}}"), *words])
    said = found["output"].splitlines()
    assert found["score"] == 0.5 and said[0] == "some words"
    base = "http://127.0.0.1:5/t/x"
    given = ["2+3", "1", "a b", "{x}", f"{base}/v1"]
    assert json.loads(said[1]) == [given, f"{base}/v1", base, "the key", "5"]


@pytest.mark.programs
def test_a_program_that_fails_says_so_and_takes_its_children_with_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"status 3; its output: oh no"):
        run(["sh", "-c", "echo oh no; exit 3"])
    assert run(["sh", "-c", "echo no number"]) == {"output": "no number\n"}
    run(["sh", "-c", f"sleep 60 > /dev/null 2>&1 & echo $! > {tmp_path}/pid"])
    pid = int(Path(tmp_path, "pid").read_text())
    end = time.monotonic() + 10  # the kernel may take a moment
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.mark.programs
def test_what_it_has_started_in_sessions_of_its_own_ends_with_it(tmp_path: Path) -> None:
    """Whether it ends or is given up, and whatever signals they ignore."""
    daemon = f"trap '' TERM; echo $$ > {tmp_path}/$SPMDRL_TRAJECTORY_ID; while :; do sleep 9; done"
    script = f"""setsid sh -c "$0" > /dev/null 2>&1 &
        while [ ! -s {tmp_path}/$SPMDRL_TRAJECTORY_ID ]; do sleep 0.01; done
        trap '' TERM; echo 0.5; sleep $1"""
    words = ["sh", "-c", script, daemon, "{extra_info[sleeps]}"]
    agent = CommandAgent(words, AgentConfig())
    caller = Caller([agent], AgentConfig(), 1, Reply)
    told = {"base_url": "http://127.0.0.1:5/t/x/v1", "api_key": "k", "model": "policy"}
    calls = {
        id: caller.submit(
            agent, {"row": ROW | {"extra_info": {"sleeps": sleeps}}, "trajectory_id": id} | told
        )
        for id, sleeps in (("ends", 0), ("stays", 60), ("other", 60))
    }
    try:
        assert calls["ends"].result().value["score"] == 0.5
        end, pids = time.monotonic() + 30, {}
        while len(pids) < 3:
            assert time.monotonic() < end
            pids = {id: int(t) for id in calls if (t := read_file(f"{tmp_path}/{id}").strip())}
            time.sleep(0.01)
        calls["stays"].cancel()
        while any(map(psutil.pid_exists, (pids["ends"], pids["stays"]))):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert psutil.pid_exists(pids["other"])
    finally:
        caller.close()


@pytest.mark.programs
def test_a_program_is_over_when_it_has_ended() -> None:
    """Whatever it leaves running, and whatever is written beside its result."""
    begun = time.monotonic()
    found = run(["sh", "-c", "sleep 61 & echo a warning >&2; echo 0.5; echo late >&2"])
    assert time.monotonic() - begun < 30
    assert found == {"score": 0.5, "output": "0.5\na warning\nlate\n"}
    large = ROW | {"extra_info": {"path": "x" * 200_000}}
    agent = CommandAgent(["sh", "-c", "echo 1"], AgentConfig())
    with pytest.raises(ValueError, match=r"200\d{3} bytes as JSON.*take out of extra_info"):
        asyncio.run(agent(large, "http://127.0.0.1:5/t/x/v1", "the key", "policy", "x"))


@pytest.mark.sandbox
def test_bubblewrap_lets_it_write_to_its_own_tmp_alone(tmp_path: Path) -> None:
    script = f"touch /tmp/mine && echo 1; touch {tmp_path}/x 2>/dev/null && echo written; echo 2"
    found = run(["sh", "-c", script], runner="bubblewrap")
    assert (found["score"], found["output"]) == (2, "1\n2\n")
    assert not os.listdir(tmp_path) and not Path("/tmp/mine").exists()


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An image of podman with a shell alone, made of this host's files."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("podman", "runc"))):
        pytest.skip("it needs podman and runc, as root: apt-get install podman runc catatonit")
    settings = tmp_path / "containers.conf"
    settings.write_text(
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\n'
        '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]\n'
    )
    monkeypatch.setenv("CONTAINERS_CONF", str(settings))
    shell = shutil.which("sh")
    linked = subprocess.run(["ldd", str(shell)], capture_output=True, text=True, check=True).stdout
    files = [str(shell), *re.findall(r"/\S+", linked)]
    pack = subprocess.run(["tar", "--dereference", "-cP", *files], capture_output=True, check=True)
    image = "localhost/spmdrl-test"
    load = ["podman", "import", "-", image]
    subprocess.run(load, input=pack.stdout, check=True, capture_output=True, timeout=60)
    yield image
    subprocess.run(["podman", "rmi", "--force", image], check=True, timeout=60)


@pytest.fixture(params=["podman", "docker"])
def runner(
    request: pytest.FixtureRequest, image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """docker is Docker's own client; Docker's API is served by podman, which needs no daemon."""
    if request.param == "podman":
        yield "podman"
        return
    if not shutil.which("docker"):
        pytest.skip("it needs Docker's client")
    address = f"unix://{tmp_path}/docker.sock"
    monkeypatch.setenv("DOCKER_HOST", address)
    server = subprocess.Popen(["podman", "system", "service", "--time", "0", address])
    end = time.monotonic() + 30
    while subprocess.run(["docker", "version"], capture_output=True, timeout=30).returncode:
        assert server.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    yield "docker"
    server.terminate()
    server.wait(timeout=30)


@pytest.mark.sandbox
def test_a_container_is_told_the_row_and_ends_with_its_agent(runner: str, image: str) -> None:
    container: dict[str, Any] = {"runner": runner, "runner_args": (image,)}
    found = run(["sh", "-c", "echo $OPENAI_API_KEY $1; echo 0.5", "-", "{prompt}"], **container)
    assert found == {"score": 0.5, "output": "the key 2+3\n0.5\n"}
    agent = CommandAgent(["sh", "-c", "echo up; while :; do :; done"], AgentConfig(**container))
    names = ["podman", "ps", "--format", "{{.Names}}"]

    def running() -> list[str]:
        return subprocess.run(names, capture_output=True, text=True, check=True).stdout.split()

    async def given_up() -> None:
        told = (ROW, "http://127.0.0.1:5/t/y/v1", "the key", "policy", "y")
        task, end = asyncio.ensure_future(agent(*told)), time.monotonic() + 30
        while "spmdrl-y" not in running():
            assert time.monotonic() < end
            await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(given_up())
    assert "spmdrl-y" not in running()


def test_runners_stand_before_the_command_line() -> None:
    told = {"OPENAI_API_KEY": "k", "SPMDRL_TRAJECTORY_ID": "-a"}

    def by(runner: Any, *args: str) -> list[str]:
        agent = CommandAgent(["it"], AgentConfig(runner=runner, runner_args=args))
        return agent.run_by(["it", "x"], told)

    assert by("process") == ["it", "x"]
    assert by("srun", "--mem=1G") == ["srun", "--overlap", "--ntasks=1", "--mem=1G", "it", "x"]
    docker = by("docker", "my/image")
    assert docker[:2] == ["docker", "run"] and docker[-3:] == ["my/image", "it", "x"]
    assert docker[docker.index("--name") + 1] == "spmdrl--a"
    assert "k" not in docker and docker[docker.index("OPENAI_API_KEY") - 1] == "--env"


def test_proxies_are_not_asked_for_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "example.org")
    found = without_proxy("http://node7:80/t/x/v1")
    assert found["NO_PROXY"] == found["no_proxy"] == "example.org,127.0.0.1,localhost,::1,node7"
