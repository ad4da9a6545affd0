"""What the launcher uses of torchrun's internals: a test that fails names what torch has moved."""

import inspect
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import Store
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError
from torch.distributed.elastic.rendezvous import api as rendezvous_api
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from spmdrl.distributed import elastic_compat

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@pytest.fixture(autouse=True)
def torchrun_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Takes back what a launch and the functions under test change in this process.

    torchrun inspects its callers for every event, for which `inspect` looks through all modules
    once for each frame of a file that no module has: those of `python -m` and of pytest-xdist.
    """
    for file in ("<frozen runpy>", "<string>"):
        monkeypatch.setitem(inspect.modulesbyfile, file, "runpy")
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    free_port = rendezvous_api.get_free_port
    starts = LocalElasticAgent._start_workers, LocalElasticAgent._stop_workers
    run, shutdown = LocalElasticAgent.run, DynamicRendezvousHandler.shutdown
    yield
    elastic_compat.replace_monitor(elastic_compat.observe_ranks)
    elastic_compat.replace_free_port(free_port)
    LocalElasticAgent._start_workers, LocalElasticAgent._stop_workers = starts
    LocalElasticAgent.run, DynamicRendezvousHandler.shutdown = run, shutdown
    for number, handler in handlers.items():
        signal.signal(number, handler)


def launch(command: str, max_restarts: int = 0, shell: str = "/bin/sh") -> None:
    """Runs a shell command as two ranks of an elastic agent in this process."""
    config = LaunchConfig(
        1, 1, 2, run_id="compat", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=max_restarts, monitor_interval=0.1,
    )  # fmt: skip
    launch_agent(config, shell, ["-c", command])


@pytest.mark.programs
def test_torchrun_still_asks_monitor_workers_and_holds_its_ranks_in_pcontext() -> None:
    states, seen = [], []

    def monitor(agent: Any, group: Any) -> Any:
        processes, pids = elastic_compat.rank_processes(agent), elastic_compat.rank_pids(agent)
        seen.append(sorted(pids))
        assert sorted(process.pid for process in processes) == sorted(pids)
        result = elastic_compat.observe_ranks(agent, group)
        states.append(result.state)
        if result.state == WorkerState.SUCCEEDED:
            assert [process.poll() for process in processes] == [0, 0]
        return result

    elastic_compat.replace_monitor(monitor)
    launch("sleep 0.5")
    assert states[0] == WorkerState.HEALTHY and states[-1] == WorkerState.SUCCEEDED
    assert len(set(seen[0])) == 2 and os.getpid() not in seen[0]


@pytest.mark.programs
def test_torchrun_still_counts_the_restarts_that_are_left(tmp_path: Path) -> None:
    def monitor(agent: Any, group: Any) -> Any:
        result = elastic_compat.observe_ranks(agent, group)
        if result.failures:
            elastic_compat.forbid_restarts(agent)
        return result

    elastic_compat.replace_monitor(monitor)
    with pytest.raises(ChildFailedError):
        launch(f"echo started >> {tmp_path}/$RANK; exit 3", max_restarts=5)
    starts = [Path(tmp_path, rank).read_text().count("started") for rank in "01"]
    assert max(starts) == 1, starts


@pytest.mark.programs
def test_torchrun_still_asks_get_free_port_for_the_port_of_the_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    elastic_compat.replace_free_port(lambda: 12345)
    launch(f"echo $MASTER_PORT > {tmp_path}/$RANK")
    assert Path(tmp_path, "0").read_text() == "12345\n"


def test_torchrun_still_has_no_ranks_before_it_starts_them() -> None:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    handler: Any = object()
    spec = WorkerSpec("default", 1, handler, entrypoint=sys.executable)
    agent = LocalElasticAgent(spec, DefaultLogsSpecs())
    assert elastic_compat.rank_processes(agent) == elastic_compat.rank_pids(agent) == []


def test_torchrun_still_reads_its_rdzv_conf_as_pairs() -> None:
    assert elastic_compat.parse_rendezvous_config("is_host=1,timeout=5") == {
        "is_host": "1", "timeout": "5",
    }  # fmt: skip
    assert elastic_compat.parse_rendezvous_config("") == {}


def test_torchrun_still_reads_its_endpoint_and_number_of_nodes() -> None:
    assert elastic_compat.parse_endpoint("host-1:77", 29400) == ("host-1", 77)
    assert elastic_compat.parse_endpoint("host-1", 29400) == ("host-1", 29400)
    assert elastic_compat.parse_num_nodes("2") == (2, 2)
    assert elastic_compat.parse_num_nodes("1:4") == (1, 4)


def test_torchrun_still_reads_its_command_line_by_parse_args() -> None:
    options = elastic_compat.parse_options(["--nnodes", "2", "--rdzv-endpoint", "a:1", "x.py"])
    assert (options.nnodes, options.rdzv_endpoint, options.rdzv_backend) == ("2", "a:1", "static")
    assert (options.rdzv_conf, options.local_addr, options.master_port) == ("", None, None)


@pytest.mark.programs
def test_torchrun_still_tells_when_hosts_have_met_and_ranks_are_stopped(tmp_path: Path) -> None:
    """Ranks fail twice: the second restart is allowed because a host is said to be lost."""
    heard: list[Any] = []

    def on_start(agent: Any, group: Any) -> None:
        handler = group.spec.rdzv_handler
        assert elastic_compat.is_dynamic(handler) and not elastic_compat.is_dynamic(object())
        heard.append((elastic_compat.rendezvous_round(handler), elastic_compat.name_job(handler)))
        assert handler.num_nodes_waiting() == 0 and len(elastic_compat.members(handler)) == 1
        if len(heard) == 3:  # the round that is under way goes on
            elastic_compat.allow_restart(agent)

    elastic_compat.announce_starts(on_start)
    elastic_compat.announce_stops(lambda: heard.append("stop"), lambda codes: False)
    launch(f"echo x >> {tmp_path}/$RANK; test $(wc -l < {tmp_path}/$RANK) = 3", max_restarts=1)
    (first, name), stop, (second, same), again, (third, _) = heard
    assert [first, second, third] == [0, 1, 2] and name == same and len(name) == 16
    assert stop == again == "stop"


@pytest.mark.programs
def test_torchrun_still_starts_ranks_from_the_thread_that_blocks_a_signal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    heard = []
    elastic_compat.announce_starts(lambda agent, group: heard.append(agent))
    elastic_compat.block_signal_in_ranks(signal.SIGINT)
    monkeypatch.chdir(tmp_path)
    program = "import os, shutil; shutil.copy('/proc/self/status', os.environ['RANK'])"
    launch(program, shell=sys.executable)  # a shell may clear what is blocked
    status = [Path(tmp_path, rank).read_text() for rank in "01"]
    blocked = [int(text.partition("SigBlk:")[2].split()[0], 16) for text in status]
    assert [mask >> (signal.SIGINT - 1) & 1 for mask in blocked] == [1, 1] and len(heard) == 1
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.programs
def test_torchrun_still_stops_ranks_that_may_turn_out_to_be_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A host comes while they end: none of them is started again."""
    waiting = lambda handler: int(Path(tmp_path, "0").exists() and Path(tmp_path, "1").exists())  # noqa: E731
    monkeypatch.setattr(DynamicRendezvousHandler, "num_nodes_waiting", waiting)
    ended: list[Any] = []
    elastic_compat.announce_stops(lambda: None, lambda codes: not ended.append(codes))
    with pytest.raises(elastic_compat.JobDone):
        launch(f"trap 'exit 0' TERM; echo x >> {tmp_path}/$RANK; while :; do sleep 0.1; done")
    assert [Path(tmp_path, rank).read_text() for rank in "01"] == ["x\n"] * 2
    assert ended == [[0, 0]]


@pytest.mark.programs
def test_torchrun_still_lets_a_host_leave() -> None:
    left: list[int] = []

    def monitor(agent: Any, group: Any) -> Any:
        result = elastic_compat.observe_ranks(agent, group)
        if result.state == WorkerState.SUCCEEDED:
            handler = group.spec.rdzv_handler
            elastic_compat.leave_rendezvous(handler)
            handler.num_nodes_waiting()
            left.append(len(elastic_compat.members(handler)))
        return result

    elastic_compat.replace_monitor(monitor)
    launch("true")
    assert left == [0]


@pytest.mark.programs
def test_torchrun_still_asks_the_handler_to_shut_down() -> None:
    closed: list[bool] = []

    def shut_down(handler: Any) -> bool:
        closed.append(handler.is_closed())
        elastic_compat.close_rendezvous(handler)
        closed.append(handler.is_closed())
        return True

    elastic_compat.replace_shutdown(shut_down)
    launch("true")
    assert closed == [False, True]


def test_torchrun_still_returns_nothing_where_a_host_was_not_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def closed(agent: Any, role: str) -> None:
        raise RendezvousGracefulExitError("The rendezvous is closed")

    monkeypatch.setattr(LocalElasticAgent, "_invoke_run", closed)
    with pytest.raises(AttributeError, match="is_failed"):  # torchrun's own
        launch("true")
    elastic_compat.tell_hosts_that_are_not_needed()
    with pytest.raises(elastic_compat.NotNeeded):
        launch("true")


class StoreOfEtcd(Store):
    """Has the methods of torch's EtcdStore, and keeps in a dict what that keeps in etcd."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value

    def get(self, key: str) -> bytes:
        return self.kept[key].encode()

    def add(self, key: str, number: int) -> int:
        self.kept[key] = str(int(self.kept.get(key, "0")) + number)
        return int(self.kept[key])


def test_hosts_agree_on_the_name_of_their_job_by_a_store_of_etcd() -> None:
    assert "compare_set" not in vars(EtcdStore)
    store = StoreOfEtcd()
    handlers = [SimpleNamespace(_store=store, get_run_id=lambda: "job") for _ in range(2)]
    first, second = map(elastic_compat.name_job, handlers)
    assert first == second and len(first) == 16
