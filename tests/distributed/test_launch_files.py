"""launch/: the Kubernetes file against JobSet's published models, the scripts, how nodes meet."""

from __future__ import annotations

import copy
import os
import re
import socket
import subprocess
import threading
import time
from pathlib import Path
from string import Template
from typing import Any

import pytest
import yaml
from ranks import free_port
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.run import parse_args

from spmdrl.distributed import launcher

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def jobset() -> dict[str, Any]:
    return yaml.safe_load(Path(ROOT, "launch/kubernetes.yaml").read_text())


def as_published(given: dict[str, Any]) -> dict[str, Any]:
    """What is left of it in the models, which drop what they do not know."""
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    model = JobsetV1alpha2JobSet.from_dict(given)
    assert model is not None
    return model.to_dict()


def test_kubernetes_file_has_the_published_fields_only(jobset):
    assert as_published(jobset) == jobset
    pod = "spec.replicatedJobs.0.template.spec.template.spec"
    for path, wrong in (("spec", "failurePolice"), ("spec.network", "dns"), (pod, "restart")):
        broken = copy.deepcopy(jobset)
        place: Any = broken
        for key in path.split("."):
            place = place[int(key) if key.isdigit() else key]
        place[wrong] = "x"
        assert as_published(broken) != broken
    broken = copy.deepcopy(jobset)
    broken["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"] = "two"
    with pytest.raises(ValueError, match="parallelism"):
        as_published(broken)


def test_kubernetes_file_agrees_with_itself(jobset):
    """What no schema says, but the API server, JobSet or the launcher would."""
    spec, [ranks] = jobset["spec"], jobset["spec"]["replicatedJobs"]
    job = ranks["template"]["spec"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    env = {entry["name"]: entry.get("value", "0") for entry in container["env"]}
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy asks for it
    assert job["completionMode"] == "Indexed"  # so that there is a JOB_COMPLETION_INDEX
    assert int(env["NODES"]) == job["parallelism"] == job["completions"]
    assert env["RANKS_PER_NODE"] == container["resources"]["limits"]["nvidia.com/gpu"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    codes = [rule["onExitCodes"] for rule in job["podFailurePolicy"]["rules"][:2]]
    assert {code["containerName"] for code in codes} == {container["name"]}
    assert [code["values"] for code in codes] == [[launcher.BAD_CONFIG], [launcher.REQUEUE]]
    # the message is Kubernetes's own (pkg/controller/job/pod_failure_policy.go)
    message = (
        "Container ranks for pod x/y failed with exit code {} matching FailJob rule at index {}"
    )
    [mistake, again] = spec["failurePolicy"]["rules"]
    [pattern] = mistake["onJobFailureMessagePatterns"]
    assert mistake["action"] == "FailJobSet" and re.fullmatch(pattern, message.format(2, 0))
    assert "IgnoreMaxRestarts" in again["action"] and not re.match(pattern, message.format(75, 1))

    [script] = container["args"]
    index = "$((JOB_COMPLETION_INDEX == 0))"
    script = (
        Template(script.replace(index, "1")).substitute(env, HOSTNAME="pod").replace("\\\n", "")
    )
    words = script.replace('"', "").split()
    assert words[:4] == ["exec", "python", "-m", "spmdrl.launch"]
    options = parse_args(words[4:])
    assert options.training_script == env["SPMDRL_PROGRAM"] == "spmdrl.ppo"
    assert options.rdzv_conf == "is_host=1"
    name = jobset["metadata"]["name"]
    assert options.rdzv_endpoint == f"{name}-{ranks['name']}-0-0.{name}:29400"
    grace_s = float(words[words.index("--checkpoint.grace_s") + 1])
    assert grace_s < options.shutdown_timeout < pod["terminationGracePeriodSeconds"]


@pytest.mark.programs
@pytest.mark.parametrize("script", ["ppo.sbatch", "multinode.sh", "setup.sh"])
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", str(ROOT / "launch" / script)], check=True, timeout=10)


ROCM_SMI = "for gpu in 0 1 2; do printf 'GPU[%s]: Name: MI300X\\nGPU[%s]: ID: 0\\n' $gpu $gpu; done"


@pytest.mark.programs
def test_ranks_of_a_machine_with_amd_gpus_are_counted(tmp_path):
    """rocm-smi is a mock: no AMD GPU can be had here. python says what it is started with."""
    for name, script in (("rocm-smi", ROCM_SMI), ("python", 'echo "$@"')):
        Path(tmp_path, name).write_text(f"#!/bin/sh\n{script}\n")
        Path(tmp_path, name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / "launch/multinode.sh"), "2", "head", "cfg.py"], text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, timeout=10,
    )  # fmt: skip
    assert "--nnodes 2 --nproc-per-node 3 " in done.stdout, done.stderr


@pytest.mark.programs
def test_scripts_refuse_what_they_cannot_do():
    for script, args, words in (
        ("ppo.sbatch", [], "usage: sbatch launch/ppo.sbatch cfg.py"),
        ("multinode.sh", ["2", "head"], "launch/multinode.sh NODES HEAD"),
        ("multinode.sh", ["2", "head", "cfg.py"], "set RANKS_PER_NODE for a run on CPUs"),
    ):
        env = {"PATH": "/usr/bin:/bin"}  # no nvidia-smi
        done = subprocess.run(
            ["bash", str(ROOT / "launch" / script), *args],
            env=env, capture_output=True, text=True, timeout=10,
        )  # fmt: skip
        assert done.returncode == 2
        assert words in done.stderr


@pytest.mark.programs
def test_one_variable_chooses_the_program(tmp_path):
    Path(tmp_path, "python").write_text('#!/bin/sh\necho "$@"\n')
    Path(tmp_path, "python").chmod(0o755)
    command = ["bash", str(ROOT / "launch/multinode.sh"), "2", "head", "cfg.py", "--steps", "3"]
    for chosen, program in (({}, "spmdrl.ppo"), ({"SPMDRL_PROGRAM": "spmdrl.sft"}, "spmdrl.sft")):
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RANKS_PER_NODE": "2", **chosen}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=10)
        assert f"-m {program} --config cfg.py --checkpoint.grace_s 25 --steps 3" in done.stdout
    sbatch = Path(ROOT, "launch/ppo.sbatch").read_text()
    assert sbatch.count('-m "${SPMDRL_PROGRAM:-spmdrl.ppo}" --config "$@"') == 1


@pytest.mark.programs
def test_parts_of_a_gpu_are_no_gpus(tmp_path):
    """As nvidia-smi -L lists them, each below its GPU."""
    part = "  MIG 3g.40gb     Device  {}: (UUID: MIG-7a)\n"
    gpu = "GPU {}: NVIDIA A100-SXM4-80GB (UUID: GPU-5c0f)\n"
    lines = gpu.format(0) + part.format(0) + part.format(1) + gpu.format(1)
    for name, text in (("python", 'echo "$@"'), ("nvidia-smi", f"echo '{lines}'")):
        Path(tmp_path, name).write_text(f"#!/bin/sh\n{text}\n")
        Path(tmp_path, name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / "launch/multinode.sh"), "2", "head", "cfg.py"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, timeout=10,
    )  # fmt: skip
    assert "--nproc-per-node 2 " in done.stdout, done


def test_a_node_knows_its_address_and_waits_for_the_head(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is put back afterwards
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert launcher.interface_of("127.0.0.1") == "lo"
    assert launcher.interface_of("198.51.100.7") is None
    assert launcher.addresses_of("no-such-host.invalid") == set()
    own = launcher.address_towards("127.0.0.1", 1)
    assert own is None or not own.startswith("127.")  # others cannot reach a loopback
    assert launcher.meet_other_nodes(["--nproc-per-node", "2", "x.py"]) == []
    port = free_port()
    far = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
           "--rdzv-conf", "is_host=0", "--local-addr", "127.0.0.1", "x.py"]  # fmt: skip
    monkeypatch.setattr(launcher, "HEAD_S", 0.5)
    with pytest.raises(RendezvousConnectionError, match=f"nobody listens at 127.0.0.1:{port}"):
        launcher.meet_other_nodes(far)
    monkeypatch.setattr(launcher, "HEAD_S", 30.0)
    servers: list[socket.socket] = []
    listen = lambda: servers.append(socket.create_server(("127.0.0.1", port)))  # noqa: E731
    threading.Timer(0.7, listen).start()
    begin = time.monotonic()
    assert launcher.meet_other_nodes(far) == ["--local-addr", "127.0.0.1"]
    assert 0.5 < time.monotonic() - begin < 20
    servers[0].close()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    near = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:1", "x.py"]
    begin = time.monotonic()
    launcher.meet_other_nodes(near)  # it is the head: nobody to wait for
    assert time.monotonic() - begin < 5
