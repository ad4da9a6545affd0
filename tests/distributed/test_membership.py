"""What a launcher keeps for its ranks in memory, and when ranks that end in order start again."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from spmdrl.distributed import elastic_compat, launcher, membership
from spmdrl.distributed.elastic_job import ElasticJob
from spmdrl.distributed.membership import HostMemory, Membership


def is_killed(path: Path) -> None:
    memory = HostMemory(path)
    Path(memory.folder, "step").mkdir()
    os.kill(os.getpid(), signal.SIGKILL)


def test_memory_goes_with_its_launcher_or_with_the_next_one(tmp_path):
    first = HostMemory(tmp_path)
    other = multiprocessing.get_context("fork").Process(target=is_killed, args=(tmp_path,))
    other.start()
    other.join(60)
    assert other.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    second = HostMemory(tmp_path)  # what was killed has left is gone, what lives stays
    assert set(tmp_path.iterdir()) == {first.folder, second.folder}
    first.close()
    second.close()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_was_half_removed_goes_with_the_next_launcher(tmp_path, monkeypatch):
    """A second signal came while gigabytes were freed, or ranks wrote on after their launcher."""
    memory = HostMemory(tmp_path)
    Path(memory.folder, "step").mkdir()
    Path(tmp_path, "spmdrl_memory_of_ranks", "step").mkdir(parents=True)

    def interrupted(path: Path, **options: bool) -> None:
        Path(path, "lock").unlink(missing_ok=True)  # a folder's entries go in any order
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(membership.shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            memory.close()
    os.close(memory.lock)  # as at its process's end
    after = HostMemory(tmp_path)
    assert list(tmp_path.iterdir()) == [after.folder]
    after.close()


class Rendezvous:
    """As much of a handler as is asked."""

    def __init__(self, waiting: int, members: int) -> None:
        self.waiting = waiting
        self._state_holder = SimpleNamespace(state=SimpleNamespace(participants=range(members)))

    def num_nodes_waiting(self) -> int:
        return self.waiting


@pytest.mark.parametrize(
    ("nnodes", "waiting", "members", "goes_on"),
    [((1, 3), 1, 2, True), ((1, 3), 0, 1, True), ((1, 3), 0, 2, False), ((2, 2), 0, 1, False)],
)  # fmt: skip
def test_code_75_starts_again_where_hosts_join_or_leave(
    tmp_path, monkeypatch, nnodes, waiting, members, goes_on
):
    monkeypatch.setattr(membership, "SETTLE_S", 0.3)
    monkeypatch.setattr(membership, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    folder = tmp_path / "launch"
    folder.mkdir()
    member = Membership(nnodes, folder)
    member.handler, member.members = Rendezvous(waiting, members), frozenset(range(2))
    assert member.goes_on() == goes_on
    job = ElasticJob.read()
    assert (job.min_nodes, job.max_nodes) == nnodes and job.memory is None
    assert not job.is_changing()
    folder.rmdir()  # as by what cleans the temporary folder
    member.before_stop()
    assert job.is_changing()
    assert job.in_memory_every_steps(None) == int(nnodes == (1, 3))
    assert job.in_memory_every_steps(0) == 0 and job.in_memory_every_steps(5) == 5


def test_the_loss_of_a_host_costs_no_restart(tmp_path, monkeypatch):
    monkeypatch.setattr(membership, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name, answer in (("is_dynamic", True), ("rendezvous_round", 0), ("name_job", "job")):
        monkeypatch.setattr(elastic_compat, name, lambda handler, answer=answer: answer)
    member, agent = Membership((1, 3), tmp_path), SimpleNamespace(_remaining_restarts=1)
    left = []
    for failed, hosts in ((False, "abc"), (True, "ab"), (True, "ab"), (False, "a"), (True, "d")):
        member.failed = failed
        handler = Rendezvous(0, 0)
        handler._state_holder.state.participants = hosts
        member.before_start(agent, SimpleNamespace(spec=SimpleNamespace(rdzv_handler=handler)))
        left.append(agent._remaining_restarts)
    # the third was a failure, the fourth left in order, and the last was replaced
    assert left == [1, 2, 2, 2, 3]


def test_ranks_that_ended_in_order_keep_their_code_where_the_store_is_gone(tmp_path, monkeypatch):
    """The host that has the store was told to end too, and was faster."""
    monkeypatch.setattr(membership, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    member, rendezvous = Membership((1, 3), tmp_path), Rendezvous(0, 2)

    def gone() -> int:
        raise RendezvousConnectionError("The connection to the C10d store has failed.")

    monkeypatch.setattr(rendezvous, "num_nodes_waiting", gone)
    member.handler, member.members = rendezvous, frozenset(range(2))
    assert not member.goes_on()


def test_hosts_that_come_with_a_mistake_leave_and_the_others_start_again(tmp_path, monkeypatch):
    """Ranks end with code 2 at the meeting with "c", and again at the next one without it."""
    monkeypatch.setattr(membership, "SETTLE_S", 0.3)
    monkeypatch.setattr(membership, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    told = []
    for name, answer in (("is_dynamic", True), ("rendezvous_round", 1), ("name_job", "job")):
        monkeypatch.setattr(elastic_compat, name, lambda handler, answer=answer: answer)
    for name in ("close_rendezvous", "leave_rendezvous"):
        monkeypatch.setattr(elastic_compat, name, lambda handler, name=name: told.append(name))

    def meet(member: Membership, hosts: str) -> Rendezvous:
        handler = Rendezvous(0, 0)
        handler._state_holder.state.participants = hosts
        group = SimpleNamespace(spec=SimpleNamespace(rdzv_handler=handler))
        member.before_start(SimpleNamespace(_remaining_restarts=0), group)
        return handler

    def decide(member: Membership) -> int:
        watch, agent = launcher.Watch(), SimpleNamespace(_remaining_restarts=0)
        watch.membership = member
        watch._decide_restart(agent, 2)
        return agent._remaining_restarts

    here, newcomer = Membership((1, 3), tmp_path), Membership((1, 3), tmp_path)
    meet(here, "ab")
    rendezvous = meet(here, "abc")
    meet(newcomer, "abc")
    assert decide(newcomer) == 0 and newcomer.shut_down(None) and told == ["leave_rendezvous"]
    rendezvous._state_holder.state.participants = "ab"  # it has left
    assert decide(here) == 1
    meet(here, "ab")
    assert decide(here) == 0 and not here.shut_down(None) and told[1:] == ["close_rendezvous"]
