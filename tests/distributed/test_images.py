"""The images and the launch files that name them: linted, whole, and of one name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted(ROOT.glob("launch/docker/*.Dockerfile"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("hadolint")
    return subprocess.run([program, path], capture_output=True, text=True, timeout=60)


def filled_in(file: str, image: str = "") -> str:
    done = subprocess.run(
        [str(ROOT / "launch/with_image.sh"), str(ROOT / file)], capture_output=True, text=True,
        timeout=10, env={"PATH": os.environ["PATH"], **({"IMAGE": image} if image else {})},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.programs
def test_dockerfiles_pass_hadolint(tmp_path):
    assert [path.name for path in DOCKERFILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]
    for path in DOCKERFILES:
        done = hadolint(path)
        assert done.returncode == 0, done.stdout + done.stderr
    wrong = tmp_path / "Dockerfile"
    wrong.write_text("FROM debian\nRUN cd /tmp && apt-get install git\n")
    assert hadolint(wrong).returncode == 1  # so it looks


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_what_a_dockerfile_copies_and_installs_exists(path):
    lines = re.sub(r"\\\n\s*", "", path.read_text())
    copied = [
        name for line in re.findall(r"^COPY (.+)$", lines, re.M) for name in line.split()[:-1]
    ]
    assert {"spmdrl", "kernels", "constraints.txt", "launch"} <= {*copied}
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not [name for name in copied if not (ROOT / name).exists() or name in ignored]
    extras = [name for found in re.findall(r"'\.\[([\w,]+)\]'", lines) for name in found.split(",")]
    assert {*extras} <= {*PYPROJECT["optional-dependencies"]}
    assert ("gpu" in extras) == (path.stem == "cuda")


@pytest.mark.programs
def test_launch_files_have_the_image_of_one_place():
    (image,) = re.findall(r"^IMAGE=(\S+)$", (ROOT / "launch/image.env").read_text(), re.M)
    assert image.endswith(f"/spmdrl:{PYPROJECT['version']}")
    files = [path for path in ROOT.glob("launch/**/*") if path.is_file() and path.suffix != ".env"]
    assert not [path for path in files if image.rpartition(":")[0] in path.read_text()]
    made = subprocess.run(
        ["make", "--dry-run", "image"], cwd=ROOT, capture_output=True, text=True, timeout=20
    )
    assert f"--tag {image} ." in made.stdout
    for file in ("launch/kubernetes.yaml", "launch/skypilot.yaml"):
        assert "${IMAGE}" not in filled_in(file) and image in filled_in(file)
        assert "mine:1" in filled_in(file, "mine:1")
    job = yaml.safe_load(filled_in("launch/kubernetes.yaml"))["spec"]["replicatedJobs"][0]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == image


@pytest.mark.programs
def test_the_skypilot_file_starts_the_launcher_on_every_node(tmp_path):
    """Its script runs here as SkyPilot would run it on a node; python says what it is given."""
    task = yaml.safe_load(filled_in("launch/skypilot.yaml"))
    assert task["resources"]["image_id"].startswith("docker:")
    config = ROOT / task["envs"]["CONFIG"]
    gpus = int(task["resources"]["accelerators"].partition(":")[2])
    assert config.is_file() and task["num_nodes"] * gpus == int(config.stem.split("_")[-1][:-3])
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python").chmod(0o755)
    script = task["run"].replace("/opt/spmdrl/bin", str(tmp_path)).replace("/shared", str(tmp_path))
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=10,
        env={"PATH": "/usr/bin:/bin", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
             "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", **task["envs"]},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pairs = [
        "--nnodes 2", "--nproc-per-node 8", "--rdzv-endpoint 10.0.0.1:29400", f"--config {config}",
        "--resume auto", "-m spmdrl.ppo",
    ]  # fmt: skip
    assert not [pair for pair in pairs if pair not in " ".join(done.stdout.split())]
