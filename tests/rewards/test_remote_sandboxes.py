"""Programs in remote sandboxes. No service is asked: a double of a SandboxFusion server speaks its
protocol, and doubles of the packages e2b and modal have as much of them as is called.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from plan_configs import ppo_config
from ranks import free_port

from spmdrl.config import ConfigError, RewardConfig, SandboxConfig
from spmdrl.rewards.code import code, python, python_in
from spmdrl.rewards.runner import RewardRunner, rewards_of
from spmdrl.rewards.sandbox.place import Busy
from spmdrl.rewards.sandbox.remote import check_remote, run_tests_in
from spmdrl.rewards.sandbox.sandbox import USUAL, Limits, SandboxError
from spmdrl.rewards.truths import truth_checker
from spmdrl.rollout.multi_turn.tools import Toolbox
from spmdrl.training.checks.rl import check_sandbox
from spmdrl.types import Prompt, Sample


def executed(code: str, stdin: str, timeout_s: float) -> SimpleNamespace:
    """Runs a program of this test on this machine, in no sandbox."""
    command = [sys.executable, "-S", "-c", code]
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True,
                              timeout=timeout_s, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        return SimpleNamespace(status="TimeLimitExceeded", code=None, out="", err="")
    return SimpleNamespace(
        status="Finished", code=done.returncode, out=done.stdout, err=done.stderr
    )


class FusionDouble(ThreadingHTTPServer):
    """A double of a SandboxFusion server: POST /run_code. `first`: HTTP codes, or texts that are
    sent instead of JSON, with which it answers before it works.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FusionHandler)
        self.first: list[int | str] = []
        self.asked: list[dict[str, Any]] = []
        self.at_once, self.most_at_once = 0, 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class FusionHandler(BaseHTTPRequestHandler):
    server: FusionDouble

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.asked.append({"path": self.path, **asked})
            first = server.first.pop(0) if server.first else None
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        if isinstance(first, int):
            self.reply(first, "try later", {"Retry-After": "0"})
        else:
            self.reply(200, self.told(asked) if first is None else first)
        with server.lock:
            server.at_once -= 1

    def told(self, asked: dict[str, Any]) -> str:
        """A RunCodeResponse."""
        done = executed(asked["code"], asked["stdin"] or "", asked["run_timeout"])
        result = {"status": done.status, "execution_time": 0.1, "return_code": done.code,
                  "stdout": done.out, "stderr": done.err}  # fmt: skip
        status = "Success" if done.code == 0 else "Failed"
        return json.dumps({"status": status, "message": "", "compile_result": None,
                           "run_result": result, "files": {}})  # fmt: skip

    def reply(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(text.encode()))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())


FAILED = json.dumps({"status": "SandboxError", "message": "no disk", "run_result": None})


@pytest.fixture
def server() -> Iterator[FusionDouble]:
    double = FusionDouble()
    thread = threading.Thread(target=double.serve_forever, args=(0.01,))
    thread.start()
    yield double
    double.shutdown()
    double.server_close()
    thread.join()


def fusion(server: FusionDouble, **changes: Any) -> SandboxConfig:
    return SandboxConfig(urls=(server.url,), **{"backoff_s": 0.01, **changes})


def fenced(program: str) -> str:
    return f"So:\n```python\n{program}\n```"


PAIRS = {"inputs": ["1\n", "5\n"], "outputs": ["2", "10"]}
CALLS = {"fn_name": "twice", "inputs": [[2], [3]], "outputs": [[4], [6]]}
ASSERTS = ["assert twice(2) == 4", "assert twice(0) == 0"]
TWICE = "def twice(n):\n    return 2 * n"


@pytest.mark.programs
@pytest.mark.parametrize(
    ("program", "truth", "passed"),
    [
        ("print(2 * int(input()))", PAIRS, 2),
        ("print(2)", PAIRS, 1),
        ("print(2); raise SystemExit(3)", PAIRS, 0),
        (TWICE, CALLS, 2),
        ("class Solution:\n    def twice(self, n):\n        return 4.0 if n == 2 else 7", CALLS, 1),
        ("def twice(n):\n    print('noise'); return (2 * n)", CALLS, 2),
        ("def other(n):\n    return 2 * n", CALLS, 0),
        (TWICE, ASSERTS, 2),
        ("import os\ndef twice(n):\n    os._exit(0)", ASSERTS, 0),
        ("def twice(n):\n    return 4", ASSERTS, 1),
    ],
)  # fmt: skip
def test_the_reward_of_programs(server, program, truth, passed) -> None:
    sandbox = fusion(server, allow_asserts=True)
    found = code(fenced(program), truth, sandbox=sandbox)
    assert (found["passed"], found["total"]) == (passed, 2)
    assert found["score"] == float(passed == 2)
    assert len(server.asked) == 2
    asked = server.asked[0]
    assert asked["path"] == "/run_code"
    assert (asked["language"], asked["run_timeout"]) == ("python", USUAL.wall_s)
    right = [json.dumps(each) for each in truth.get("outputs", [])] if truth is CALLS else []
    assert not any(f"[{each}]" in asked["code"] for each in right)  # nothing to be copied


@pytest.mark.programs
def test_a_limit_is_a_result_and_tests_run_at_the_same_time(server) -> None:
    limits = replace(USUAL, wall_s=0.5, output_kib=1)
    tests, began = [b"1", b"2", b"3", b"4"], time.monotonic()
    slow = "import time; time.sleep(30)"
    found = run_tests_in(fusion(server, max_concurrent=4), slow, "run", tests, limits, 60)
    assert [each.status for each in found] == ["time"] * 4
    assert time.monotonic() - began < 10
    assert 1 < server.most_at_once <= 4
    [found] = run_tests_in(fusion(server), "print('x' * 5000)", "run", [b""], USUAL, 60)
    assert found.status == "ok"
    [found] = run_tests_in(
        fusion(server), "print('x' * 5000)", "run", [b""], replace(USUAL, output_kib=1), 60
    )
    assert (found.status, len(found.stdout)) == ("output", 1024)
    late = run_tests_in(fusion(server), "print(1)", "run", tests, USUAL, 0.0)
    assert [each.status for each in late] == ["time"] * 4


@pytest.mark.programs
def test_it_waits_for_room_and_asks_the_next_server(server) -> None:
    server.first = [429, 503, FAILED]
    [found] = run_tests_in(fusion(server), "print(6)", "run", [b""], USUAL, 60)
    assert found.stdout == "6\n"
    assert len(server.asked) == 4
    down = f"http://127.0.0.1:{free_port()}"
    both = replace(fusion(server), urls=(down, server.url))
    found = run_tests_in(both, "print(7)", "run", [b"", b"", b""], USUAL, 60)
    assert [each.stdout for each in found] == ["7\n"] * 3


@pytest.mark.parametrize(
    ("first", "requests", "why"),
    [
        ([500] * 3, 3, "no remote sandbox after 3 attempts: http.* answers 500: try later"),
        ([FAILED] * 3, 3, "failed: no disk"),
        ([404], 1, "answers 404: try later"),
        (["<html>"], 1, "answers no JSON"),
        (['{"detail": "hello"}'], 1, "is no SandboxFusion"),
    ],
)
def test_what_a_service_does_is_no_verdict(server, first, requests, why) -> None:
    server.first = list(first)
    with pytest.raises(SandboxError, match=why):
        run_tests_in(fusion(server, retries=2), "print(6)", "run", [b""], USUAL, 60)
    assert len(server.asked) == requests


def test_no_attempt_outlives_the_time_of_a_response(server) -> None:
    server.first = [503] * 99
    began = time.monotonic()
    with pytest.raises(SandboxError, match="no remote sandbox"):
        run_tests_in(fusion(server, retries=90, backoff_s=0.2), "1", "run", [b""], USUAL, 1.0)
    assert time.monotonic() - began < 5


# ---- where a config chooses it


def sample_of(program: str) -> Sample:
    prompt = Prompt(0, [1], "sums", json.dumps(PAIRS), "double")
    return Sample(prompt, 0, 0, [], [], [], [], "stop", fenced(program))


@pytest.mark.programs
def test_a_run_scores_with_it_and_a_failure_of_the_service_is_invalid(server) -> None:
    config = ppo_config("m", reward={"sums": "code"}, sandbox=fusion(server, retries=0))
    right, wrong, lost = (sample_of(f"print({k} * int(input()))") for k in (2, 3, 2))
    runner = RewardRunner(rewards_of(config), RewardConfig(workers=1))
    try:
        runner.score([right, wrong])
        server.first = [503] * 8
        runner.score([lost])
    finally:
        runner.close()
    assert (right.reward, wrong.reward, lost.reward) == (1.0, 0.0, None)
    assert "no remote sandbox after one attempt" in str(lost.invalid)
    assert rewards_of(replace(config, sandbox=None)) == {"sums": "code"}


@pytest.mark.programs
def test_the_tool_is_the_same_to_the_policy(server) -> None:
    remote, sandbox = python_in(fusion(server)), fusion(server)
    assert remote("print(6 * 7)") == "42\n"
    assert remote("print(1); 1 / 0").startswith("1")
    assert remote("1 / 0").endswith("[error]")
    toolbox = Toolbox(("python",), sandbox)
    assert toolbox.schemas == Toolbox([remote]).schemas
    assert toolbox.schemas[0]["function"]["name"] == python.__name__ == "python"
    assert toolbox.functions["python"]("print(3)") == "3\n"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (SandboxConfig(), "sandbox.urls is empty"),
        (SandboxConfig(urls=("10.0.0.7:8080",)), "expected http://host:port"),
        (SandboxConfig(urls=("http://h",), image="x"), "is of the kinds 'e2b' and 'modal'"),
        (SandboxConfig(kind="modal", urls=("http://h",)), "are of kind 'fusion'"),
        (SandboxConfig(kind="e2b"), r"needs the package 'e2b': pip install 'spmdrl\[e2b\]'"),
        (SandboxConfig(kind="modal"), "needs the package 'modal'"),
    ],
)
def test_what_cannot_be_used_is_refused(monkeypatch, config, why) -> None:
    monkeypatch.setattr("importlib.util.find_spec", absent)
    with pytest.raises(ConfigError, match=why):
        check_remote(config)


def absent(name: str) -> None:
    return None


@pytest.mark.programs
def test_a_server_is_tried_before_a_run(server) -> None:
    check_remote(fusion(server))
    assert len(server.asked) == 1
    nobody = SandboxConfig(urls=(f"http://127.0.0.1:{free_port()}",), retries=0)
    with pytest.raises(ConfigError, match="runs no program: no remote sandbox after one attempt"):
        check_remote(nobody)


def test_rows_whose_passing_could_be_forged_are_refused(server) -> None:
    reward = rewards_of(ppo_config("m", reward="code", sandbox=fusion(server)))
    told = truth_checker(reward)
    assert told("sums", PAIRS) is None
    assert "allow_asserts=True" in str(told("sums", ASSERTS))
    trusting = fusion(server, allow_asserts=True)
    reward = rewards_of(ppo_config("m", reward="code", sandbox=trusting))
    assert truth_checker(reward)("sums", ASSERTS) is None


def test_a_sandbox_that_nothing_uses_is_refused(server) -> None:
    check_sandbox(ppo_config("m", reward={"a": "gsm8k", "b": "code"}, sandbox=fusion(server)))
    check_sandbox(ppo_config("m", tools=("python",), sandbox=fusion(server)))
    with pytest.raises(ConfigError, match="sandbox has no effect"):
        check_sandbox(ppo_config("m", sandbox=fusion(server)))


# ---- doubles of the packages of E2B and Modal


class E2bDouble:
    """A double of the package e2b: Sandbox.create, files.write, commands.run and kill."""

    class SandboxException(Exception):
        pass

    class TimeoutException(SandboxException):
        pass

    class RateLimitException(SandboxException):
        pass

    class AuthenticationException(Exception):
        pass

    class CommandExitException(SandboxException):
        def __init__(self, done: SimpleNamespace) -> None:
            self.exit_code, self.stdout, self.stderr = done.code, done.out, done.err

    def __init__(self, refusals: list[Exception]) -> None:
        self.refusals, self.made = refusals, list[dict[str, Any]]()
        self.num_killed, self.written = 0, dict[str, str]()
        self.Sandbox = SimpleNamespace(create=self.create)

    def create(self, **given: Any) -> SimpleNamespace:
        if self.refusals:
            raise self.refusals.pop(0)
        self.made.append(given)
        return SimpleNamespace(
            files=SimpleNamespace(write=self.written.__setitem__),
            commands=SimpleNamespace(run=self.run),
            kill=self.kill,
        )

    def run(self, command: str, timeout: float) -> SimpleNamespace:
        words = command.split()
        assert words[:3] == ["timeout", "-s", "KILL"]
        assert words[4] == "python3"
        done = executed(self.written[words[5]], self.written[words[7]], float(words[3]))
        if done.status != "Finished":
            time.sleep(0.01)
            done.code = 137
        if done.code:
            raise self.CommandExitException(done)
        return SimpleNamespace(exit_code=0, stdout=done.out, stderr=done.err)

    def kill(self) -> None:
        self.num_killed += 1


class ModalDouble:
    """A double of the package modal: App.lookup, Image.from_registry, Sandbox.create, exec and
    terminate.
    """

    def __init__(self, refusals: list[str]) -> None:
        names = ("ResourceExhaustedError", "ServiceError", "ConnectionError", "AuthError")
        base = type("Error", (Exception,), {})
        self.exception = SimpleNamespace(
            Error=base, **{name: type(name, (base,), {}) for name in names}
        )
        self.refusals, self.made, self.num_killed = refusals, list[dict[str, Any]](), 0
        self.App = SimpleNamespace(lookup=lambda name, create_if_missing: name)
        self.Image = SimpleNamespace(from_registry=lambda name: name)
        self.Sandbox = SimpleNamespace(create=self.create)

    def create(self, **given: Any) -> SimpleNamespace:
        if self.refusals:
            raise getattr(self.exception, self.refusals.pop(0))("no")
        self.made.append(given)
        return SimpleNamespace(exec=self.exec, terminate=self.terminate)

    def exec(self, *command: str, timeout: int) -> SimpleNamespace:
        assert command[:2] == ("python3", "-c")
        given = io.BytesIO()
        found: dict[str, Any] = {}

        def end() -> None:
            text = given.getvalue().decode()
            found["done"] = executed(command[2], text, timeout)

        stdin = SimpleNamespace(write=given.write, write_eof=end, drain=lambda: None)
        return SimpleNamespace(
            stdin=stdin,
            stdout=SimpleNamespace(read=lambda: found["done"].out),
            stderr=SimpleNamespace(read=lambda: found["done"].err),
            wait=lambda: -1 if found["done"].code is None else found["done"].code,
        )

    def terminate(self) -> None:
        self.num_killed += 1


@pytest.mark.programs
@pytest.mark.parametrize("kind", ["e2b", "modal"])
def test_a_response_has_one_sandbox_of_a_cloud(monkeypatch, kind) -> None:
    double: Any = E2bDouble([]) if kind == "e2b" else ModalDouble([])
    monkeypatch.setitem(sys.modules, kind, double)
    config = SandboxConfig(kind=kind, backoff_s=0.01, retries=1)
    found = code(fenced("print(2 * int(input()))"), PAIRS, sandbox=config)
    assert found["score"] == 1
    assert code(fenced(TWICE), CALLS, sandbox=config)["score"] == 1
    assert code(fenced("1 / 0"), PAIRS, sandbox=config)["passed"] == 0
    assert len(double.made) == double.num_killed == 3
    closed = "allow_internet_access" if kind == "e2b" else "block_network"
    assert double.made[0][closed] is (kind == "modal")
    limits = Limits(wall_s=0.5 if kind == "e2b" else 1)
    [slow] = run_tests_in(config, "while True: pass", "run", [b""], limits, 60)
    assert slow.status == "time"


@pytest.mark.programs
@pytest.mark.parametrize("kind", ["e2b", "modal"])
def test_a_cloud_without_room_is_asked_again_and_one_that_refuses_is_not(monkeypatch, kind) -> None:
    full = E2bDouble.RateLimitException("no") if kind == "e2b" else "ResourceExhaustedError"
    barred = E2bDouble.AuthenticationException("no") if kind == "e2b" else "AuthError"
    config = SandboxConfig(kind=kind, backoff_s=0.01, retries=1)
    for refusals, works in (([full], True), ([full, full], False), ([barred], False)):
        double: Any = E2bDouble(list(refusals)) if kind == "e2b" else ModalDouble(list(refusals))
        monkeypatch.setitem(sys.modules, kind, double)
        if works:
            [found] = run_tests_in(config, "print(6)", "run", [b""], USUAL, 60)
            assert found.stdout == "6\n"
        else:
            with pytest.raises(SandboxError) as error:
                run_tests_in(config, "print(6)", "run", [b""], USUAL, 60)
            assert not isinstance(error.value, Busy)
        assert not double.refusals


def test_a_cloud_needs_a_key(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    for name in ("E2B_API_KEY", "MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MODAL_CONFIG_PATH", str(tmp_path / "none.toml"))
    for kind, words in (("e2b", "E2B_API_KEY"), ("modal", "MODAL_TOKEN_ID")):
        check_remote.cache_clear()
        with pytest.raises(ConfigError, match=words):
            check_remote(SandboxConfig(kind=kind))
    for name in ("E2B_API_KEY", "MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        monkeypatch.setenv(name, "set by the test")
    check_remote(SandboxConfig(kind="e2b"))
    check_remote(SandboxConfig(kind="modal"))
