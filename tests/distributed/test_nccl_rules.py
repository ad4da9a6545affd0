"""What would hang or fail with NCCL is found in runs with gloo."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from programs import CONFIG, set_up, train
from ranks import STRICT, run_ranks
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.distributed.collectives import level_group_count, world_of
from spmdrl.distributed.nccl_rules.events import BOTH
from spmdrl.distributed.nccl_rules.recorder import BACKENDS, BOUND
from spmdrl.distributed.nccl_rules.rules import RulesBroken
from spmdrl.distributed.topology import Topology
from spmdrl.distributed.torch_compat import timeout_of
from spmdrl.engines.megatron.parallel_state import RoleState
from spmdrl.rollout.scheduler_messages import Decision, broadcast_decision

pytestmark = pytest.mark.ranks
THIS = Path(__file__).name


@pytest.fixture(autouse=True)
def _strict(monkeypatch):
    monkeypatch.setenv(STRICT, "1")


def device_group(ranks):
    """With NCCL on GPUs, and the job's time limit."""
    return dist.new_group(ranks, timeout=c10d.default_pg_timeout)


def counters_differ(topology):
    if dist.get_rank() == 1:
        c10d._world.group_count += 1
    device_group([0])  # where two ranks met under two names, the test would hang


def one_rank_makes_no_group(topology):
    if dist.get_rank() == 0:
        device_group([0])


def gloo_for_some(topology):
    dist.new_group([0], backend="gloo")


def local_group(topology):
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)


def names_of_meshes_differ(topology):
    """Ranks 0 and 1 are in different numbers of groups, and then in one mesh."""
    device_group([0])
    DeviceMesh("cpu", torch.tensor([0, 1]))


def another_limit(topology):
    dist.new_group(timeout=timedelta(minutes=7))


def batch_of_two(topology):
    """The first call of a group of three is a batch of ranks 0 and 1."""
    group, me = device_group([0, 1, 2]), dist.get_rank()
    if me < 2:
        there = torch.ones(1, device=topology.device)
        back = torch.zeros(1, device=topology.device)
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, there, 1 - me, group),
            dist.P2POp(dist.irecv, back, 1 - me, group),
        ])  # fmt: skip
        for work in works:
            work.wait()
    dist.all_reduce(torch.ones(1), group=group)


def connected_batch(topology):
    """The same after Topology.connect."""
    three = Topology.build(topology.device, range(3), dp=-1)
    three.connect()
    exchanged = torch.zeros(1)
    if dist.get_rank() < 2:
        other = 1 - dist.get_rank()
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, torch.ones(1), other, three.group),
            dist.P2POp(dist.irecv, exchanged, other, three.group),
        ])  # fmt: skip
        for work in works:
            work.wait()
    return float(exchanged)


def two_dtypes(topology):
    """Of one size, which is all that gloo looks at."""
    dtype = torch.float32 if dist.get_rank() == 0 else torch.int32
    dist.all_reduce(torch.ones(2, dtype=dtype), group=device_group([0, 1]))


def crossed(topology):
    """Both use two groups, in two orders: with gloo each is answered when it comes."""
    groups = [device_group([0, 1]), device_group([0, 1])]
    tensor = torch.ones(1, device=topology.device)
    order = groups if dist.get_rank() == 0 else groups[::-1]
    for work in [dist.all_reduce(tensor.clone(), group=g, async_op=True) for g in order]:
        work.wait()


def in_a_circle(topology):
    """Three groups of two: no two ranks share more than one."""
    pairs = {pair: device_group(pair) for pair in ((0, 1), (1, 2), (0, 2))}
    order = {0: ((0, 1), (0, 2)), 1: ((1, 2), (0, 1)), 2: ((0, 2), (1, 2))}[dist.get_rank()]
    tensor = torch.ones(1, device=topology.device)
    for work in [dist.all_reduce(tensor.clone(), group=pairs[p], async_op=True) for p in order]:
        work.wait()


def words_of_the_cpu(topology):
    ours, words = torch.zeros(4, device=topology.device), torch.zeros(4, dtype=torch.int64)
    dist.broadcast(words, 0, group=device_group([0, 1]))
    dist.broadcast(ours, 0, group=device_group([0, 1]))


def annotated_words(topology):
    words: torch.Tensor = torch.zeros(4, dtype=torch.int64)
    dist.broadcast(words, 0, group=device_group([0, 1]))


def lawful(topology):
    """One of each that breaks no rule."""
    me, group = dist.get_rank(), device_group(None)
    control = dist.new_group(backend="gloo", timeout=c10d.default_pg_timeout)
    halves = [device_group([0]), device_group([1])]
    DeviceMesh("cpu", torch.arange(2).view(2, 1), mesh_dim_names=("dp", "tp"))
    words, ours = torch.zeros(4), torch.zeros(4, device=topology.device)
    dist.broadcast(words, 0, group=control)
    dist.all_reduce(ours, group=group)
    dist.all_reduce(ours, group=halves[me])
    dist.broadcast_object_list([me], 0, group=group)
    dist.batch_isend_irecv([
        dist.P2POp(dist.isend if me == 0 else dist.irecv, ours, 1 - me, group)
    ])[0].wait()  # fmt: skip
    mixed, payload, buffer = device_group(None), torch.ones(4, device="cpu"), torch.empty(4)
    op = dist.P2POp(dist.isend, payload, 1, mixed)  # whose buffer shows that it is gloo's
    op = op if me == 0 else dist.P2POp(dist.irecv, buffer, 0, mixed)
    dist.batch_isend_irecv([op])[0].wait()
    dist.all_reduce(ours, group=mixed)
    return me


BROKEN = {
    "creation": (counters_differ, 2, "makes group '"),
    "left creation": (one_rank_makes_no_group, 2, "not every rank of group"),
    "split": (gloo_for_some, 2, r"ranks \[1\] call ncclCommSplit"),
    "local split": (local_group, 2, "by its members alone"),
    "hashed name": (names_of_meshes_differ, 3, "_world.pg_names"),
    "time limit": (another_limit, 2, "limit of 1800 s, but"),
    "first": (batch_of_two, 3, "a batch is the first call"),
    "operation": (two_dtypes, 2, r"int32\[2\]"),
    "order": (crossed, 2, "in different orders"),
    "circle order": (in_a_circle, 3, r"ranks \[0, 1, 2\] wait for one another in a circle"),
    "CPU tensor": (words_of_the_cpu, 2, "NCCL alone"),
    "annotated CPU tensor": (annotated_words, 2, "NCCL alone"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_found(case, monkeypatch):
    """With the line that broke it, and what another rank did there or instead."""
    work, ranks, said = BROKEN[case]
    monkeypatch.setenv(BACKENDS, "nccl" if "CPU tensor" in case else BOTH)
    monkeypatch.setenv(BOUND, str(int("split" in case or case == "hashed name")))
    with pytest.raises(RulesBroken, match=said) as broken:
        run_ranks(ranks, work, timeout_s=30)
    (finding,) = broken.value.findings
    assert finding.rule == re.sub("^(left|local|circle|annotated) ", "", case)
    shown = re.findall(r"\n  rank (\d)", finding.text)
    assert len(set(shown)) == {"time limit": 1, "circle order": 3}.get(case, 2), finding.text
    assert f"{THIS}:" in finding.text and f" in {work.__name__}\n" in finding.text


def test_a_lawful_run_passes():
    assert run_ranks(2, lawful, timeout_s=30) == [0, 1]
    assert run_ranks(3, connected_batch, timeout_s=30) == [1.0, 1.0, 0.0]


# ---- our own runs

ROLES = CONFIG.replace(
    "config = PpoConfig(",
    'config = PpoConfig(\n    algo=AlgoConfig(advantage="gae", kl_coef=0.01, '
    'correction=CorrectionConfig(level="token")),\n'
    '    critic=TrainConfig(dtype="float32", micro_batch_tokens=128),',
).replace("steps=2", "steps=1")
RUNS = {
    "one rank": (1, ()),
    "replicas of shards": (4, ("--actor.fsdp", "2", "--critic.fsdp", "2")),
    "split": (2, ("--placement", '{"actor":"0","rollout":"1"}')),
    "overlap": (3, ("--placement", '{"actor":"0-1","rollout":"1-2","critic":"0,2"}')),
    "async": (
        3,
        ("--placement", '{"actor":"1","rollout":"0,2","critic":"1"}', "--async_steps", "1"),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, qwen3):
    path = set_up(tmp_path_factory.mktemp("rules"), qwen3)
    Path(path, "cfg.py").write_text(ROLES)
    return path


@pytest.mark.parametrize("name", RUNS)
def test_a_run_keeps_the_rules(folder, name):
    """With the default group bound to a device split, overlap and async broke "split", overlap
    "hashed name", and all but the first "time limit"."""
    ranks, args = RUNS[name]
    done = train(folder, ranks, "--config", "cfg.py", "--run_dir", name, *args, timeout_s=60)
    assert done.code == 0, done.output[-4000:]


def pipeline_then_tensor_parallel(topology):
    """Only first stages are in Megatron's position embedding group: 0 and 2 are in more groups."""
    trained = Topology.build(topology.device, share=topology, pp=2, dp=-1)
    RoleState.build(trained, pipeline_model_parallel_size=2)
    level_group_count()
    return Topology.build(topology.device, share=topology, dp=-1, tp=2).axis_rank("tp")


def test_tensor_parallel_engines_after_megatron_pipelines():
    """The time limit of Megatron's groups, and the name of each tensor-parallel group."""
    assert run_ranks(4, pipeline_then_tensor_parallel, timeout_s=60) == [0, 1, 0, 1]


def made_by_a_library(topology):
    """Seconds of a group that is made without a time limit among the ranks of another."""
    group = dist.new_group([0, 1], timeout=timedelta(hours=2))
    with world_of(group):
        made = dist.new_group([0, 1])
    later = dist.new_group([0, 1])
    return [timeout_of(each).total_seconds() for each in (made, later)]


def test_a_librarys_groups_have_the_time_limit_of_its_world():
    assert run_ranks(2, made_by_a_library, timeout_s=60) == [[7200.0, 1800.0]] * 2


def decide_in_a_host(topology):
    """As in embed.attach, where rollout engines have two ranks and a role has some ranks."""
    everyone = Topology.build(topology.device, hosted=True, dp=-1)
    rollout = Topology.build(topology.device, share=everyone, dp=-1, tp=2)
    Topology.build(topology.device, ranks=[1], dp=-1)
    decision = Decision(count=3) if dist.get_rank() == 0 else None
    return broadcast_decision(decision, rollout.mesh.get_group("tp"), 2).count


@pytest.mark.parametrize("bound", ["0", "1"])
def test_a_host_of_nccl_alone(monkeypatch, bound):
    """CPU tensors do not go over its groups, and where its default group is bound to a device
    nothing is split off."""
    monkeypatch.setenv(BACKENDS, "nccl")
    monkeypatch.setenv(BOUND, bound)
    assert run_ranks(2, decide_in_a_host, timeout_s=60) == [3, 3]
