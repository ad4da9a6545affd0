"""The wheel, installed away from the checkout, holds both packages and trains one RL step."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from programs import ROOT, environment, metrics_of, set_up
from tiny_models import save_qwen3

pytestmark = pytest.mark.ranks

PACKAGES = {"spmdrl": ROOT / "spmdrl", "spmdrl_kernels": ROOT / "kernels" / "spmdrl_kernels"}
REPORT = """
import pathlib
import spmdrl
import spmdrl_kernels

pathlib.Path("imported").write_text(f"{spmdrl.__file__}\\n{spmdrl_kernels.__file__}")
"""


def run(*command: str, cwd: Path, timeout_s: float, **env: str) -> str:
    """Runs a command with this Python; returns its output, which a failure shows."""
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment() | env, timeout=timeout_s, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because setuptools packs whatever an earlier build left in build/."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    skip = shutil.ignore_patterns("__pycache__")
    for name in ("spmdrl", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--wheel-dir", str(folder), str(source), cwd=folder, timeout_s=120)  # fmt: skip
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_every_file_of_both_packages_and_no_other(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    held = {name for name in archive.namelist() if not name.startswith(info)}
    wanted = {
        f"{package}/{path.relative_to(folder)}"
        for package, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert len(wanted) > 100 and held == wanted
    metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_installed_wheel_trains_one_step_outside_of_the_checkout(
    wheel: Path, tmp_path: Path
) -> None:
    """The packages come from the wheel; torch and the like from this environment."""
    site, work = tmp_path / "site", tmp_path / "work"
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site),
        str(wheel), cwd=tmp_path, timeout_s=120)  # fmt: skip
    work.mkdir()
    set_up(work, save_qwen3(tmp_path / "tiny"))
    with Path(work, "cfg.py").open("a") as file:
        file.write(REPORT)
    command = "-m spmdrl.launch --nproc-per-node 1 -m spmdrl.ppo --config cfg.py --steps 1"
    run(*command.split(), cwd=work, timeout_s=120, PYTHONPATH=str(site))
    imported = Path(work, "imported").read_text().splitlines()
    assert imported == [os.path.join(site, name, "__init__.py") for name in PACKAGES]
    (step,) = [row for row in metrics_of(work / "run") if row.get("step") == 1]
    assert step["response/tokens"] > 0 and step["actor/grad_norm"] > 0
