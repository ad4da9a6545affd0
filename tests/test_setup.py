"""What surrounds the library: pins, configs, the README's example, figures of the examples."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from tiny_models import save_qwen3

from spmdrl.cli.arguments import load_config
from spmdrl.config import PpoConfig, PreferenceTrainingConfig, RewardTrainingConfig, SftConfig
from spmdrl.training.checks.describe import describe
from spmdrl.training.checks.rl import check
from spmdrl.training.checks.supervised import check_sft

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted([*ROOT.glob("configs/*.py"), *ROOT.glob("examples/*/config.py")])


def load_module(path: str) -> ModuleType:
    """Executes a file under a name of its own: other tests import a `run` and a `config` too."""
    name = re.sub(r"\W", "_", path)
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def pins() -> dict[str, str]:
    """Canonical name -> version, of constraints.txt."""
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    for line in lines:
        # a local version, a file or an address would work on one machine only
        assert re.fullmatch(r"[\w.-]+==[\w.]+(; \w+ == \"\w+\")?", line), line
    requirements = [Requirement(line) for line in lines]
    return {canonicalize_name(r.name): next(iter(r.specifier)).version for r in requirements}


def test_every_requirement_has_a_pin_that_satisfies_it() -> None:
    pinned = pins()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in [
        *project["dependencies"],
        *(t for e in ("cpu", "dev", "modelscope") for t in extras[e]),
    ]:
        requirement = Requirement(text)
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{text} has no pin"
        assert requirement.specifier.contains(version), f"{text}: pinned {version}"


def test_every_pin_installs_on_the_oldest_python_that_the_project_names() -> None:
    """Debian 12 has Python 3.11.2, and a package may ask for a later patch release."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (oldest,) = re.findall(r">=(3\.\d+)", project["requires-python"])
    for name in pins():
        try:
            asks = metadata(name).get("Requires-Python")
        except PackageNotFoundError:  # of another engine or platform
            continue
        assert asks is None or SpecifierSet(asks).contains(f"{oldest}.0"), f"{name} asks for {asks}"


def test_what_breaks_transformers_is_not_pinned() -> None:
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(pins())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    return save_qwen3(folder, max_position_embeddings=8192)


# the model here has no experts; what is of Megatron is not switched to it
LEFT_OUT = {"lora", "reward", "dpo", "a3b", "256gpu", "128gpu", "64gpu", "geometry3k"}
WHOLE = [path for path in CONFIGS if not LEFT_OUT & set(path.stem.split("_"))]


def kind_of(path: Path) -> type:
    if "_reward_model_" in path.stem:
        return RewardTrainingConfig
    if "_dpo_" in path.stem:
        return PreferenceTrainingConfig
    return SftConfig if "_sft_" in path.stem else PpoConfig


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.stem)
def test_one_line_switches_a_config_to_megatron(path: Path, model: Path) -> None:
    value = load_config(str(path), kind_of(path), {"actor.engine": "megatron"})
    if isinstance(value, SftConfig):
        check_sft(replace(value, model=str(model)), 2)
        return
    # the model here sees no images
    replies = replace(value.multi_turn, max_images=0, max_image_tokens=1024)
    settings: dict[str, Any] = {"model": str(model), "multi_turn": replies}
    for name in ("ref", "critic", "prm"):
        if getattr(value, name) is not None:
            role = getattr(value, name)
            other = role.model and f"{model}/"  # by another name, as that of a teacher
            settings[name] = replace(role, engine="megatron", model=other)
    world = 2 if value.placement else 8
    check(replace(value, **settings), world)
    assert "megatron, pp 1" in describe(replace(value, **settings), world, 1000)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_loads(path: Path) -> None:
    kind = kind_of(path)
    assert isinstance(load_config(str(path), kind, {"seed": 7}), kind)


def find_row(page: str, config: str) -> list[str]:
    """Returns the cells of a config's first row, with an empty one before and behind."""
    return next(line for line in page.splitlines() if f"| `configs/{config}` |" in line).split("|")


def test_make_recipes_runs_every_config_for_cpus_and_finds_its_row() -> None:
    recipes = load_module("examples/recipes/run.py")
    there = {path.stem for path in ROOT.glob("configs/*_cpu.py") if "soak" not in path.stem}
    assert sorted(recipe.config for recipe in recipes.RECIPES) == sorted(there)
    page = (ROOT / "docs/recipes.md").read_text()
    for recipe in recipes.RECIPES:
        path = ROOT / f"configs/{recipe.config}.py"
        config: Any = load_config(str(path), kind_of(path), {})
        assert (config.run_dir or config.out) == recipe.run_dir, recipe.name
        new = recipes.with_cells(page, recipe, {recipes.SCORE: "-1", recipes.TIME: "-3"})
        old, row = (find_row(text, path.name) for text in (page, new))
        assert row == [*old[:3], " -1 ", old[4], " -3 ", *old[6:]] and len(row) == 8
    with pytest.raises(ValueError, match=r"no row of configs/unknown\.py"):
        recipes.with_cells(page, replace(recipes.RECIPES[0], config="unknown"), {})


def test_each_workload_of_the_benchmark_has_a_config() -> None:
    workloads = load_module("examples/add2/workloads.py").WORKLOADS
    configs = {
        name: load_config(str(ROOT / "examples/add2" / workload.config), PpoConfig, {})
        for name, workload in workloads.items()
    }
    assert {name for name, found in configs.items() if found.agent is not None} == {"agent"}
    assert replace(configs["agent"], agent=None, agents=configs["add2"].agents,
                   reward=configs["add2"].reward) == configs["add2"]  # fmt: skip


def test_ppo_config_differs_from_its_base_only_where_it_says() -> None:
    grpo = load_config(str(ROOT / "configs/qwen3_tiny_arithmetic_grpo_cpu.py"), PpoConfig, {})
    ppo = load_config(str(ROOT / "configs/qwen3_tiny_arithmetic_ppo_cpu.py"), PpoConfig, {})
    assert ppo.algo.advantage == "gae" and ppo.critic is not None
    assert (ppo.data, ppo.rollout, ppo.actor) == (grpo.data, grpo.rollout, grpo.actor)
    assert callable(ppo.reward)
    assert [ppo.reward("24 ", "24"), ppo.reward("240", "24"), ppo.reward("", "24")] == [1, 0, 0]


def test_readme_config_is_short_and_loads(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    blocks = [b for b in re.findall(r"```python\n(.*?)```", readme, re.S) if "PpoConfig(" in b]
    assert len(blocks) == 1
    assert len(blocks[0].splitlines()) <= 12
    path = tmp_path / "my_config.py"
    path.write_text(blocks[0])
    config = load_config(str(path), PpoConfig, {})
    assert callable(config.reward)
    assert config.reward("so it is 42", "42") == 1
    assert config.reward("so it is 41", "42") == 0


def test_readme_names_what_exists() -> None:
    pages = ["README.md", *(f"docs/{name}.md" for name in ("install", "how_to", "run_folder",
             "troubleshooting", "speed"))]  # fmt: skip
    text = "".join((ROOT / page).read_text() for page in pages)
    targets = set(re.findall(r"^([a-z.-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`make ([a-z.-]+)", text)) <= targets
    paths = re.findall(r"\b(?:spmdrl|configs|examples|launch|docs|tests)/[\w./-]+\.\w+", text)
    assert not [path for path in paths if not (ROOT / path).exists()]
    modules = re.findall(r"-m (spmdrl\.\w+)", text)
    assert modules and all(importlib.util.find_spec(name) for name in modules)


def test_readme_is_short_and_its_links_lead_somewhere() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 150
    links = [link for link in re.findall(r"\]\(([^)]+)\)", readme) if "://" not in link]
    assert len(links) > 20
    assert not [link for link in links if not (ROOT / link).exists()]
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert pages <= set(links), "every page of docs/ is reached from the README"


def test_picture_of_a_step_has_its_lines_in_their_order() -> None:
    script = load_module("docs/pictures/one_step.py")
    names = script.called_in_train_step()
    assert set(names) == set(script.LINES)
    picture = (ROOT / "docs/pictures/one_step.svg").read_text()
    drawn = re.findall(r">(" + "|".join(script.LINES) + r")</text>", picture)
    assert drawn == names


@pytest.mark.parametrize("name", ["memory_of_step", "micro_batches", "trajectory_rows"])
def test_picture_says_what_its_script_draws_now(name: str, tmp_path: Path) -> None:
    script = load_module(f"docs/pictures/{name}.py")
    script.__file__ = str(tmp_path / "now.py")
    script.main()
    now, kept = Path(tmp_path, "now.svg"), ROOT / f"docs/pictures/{name}.svg"
    said, drawn = (re.findall(r">([^<>]+)</text>", path.read_text()) for path in (kept, now))
    assert said == drawn and len(said) > 20


# A recorded run: three steps, evaluated before the first and after the last.
METRICS = [
    {"step": 0, "eval/reward": 0.25},
    {"step": 1, "reward/mean": 0.2, "time/rollout_s": 1.0, "time/update_actor_s": 3.0,
     "time/step_s": 4.0, "throughput/tokens_per_s": 100.0},
    {"step": 2, "reward/mean": 0.5, "time/rollout_s": 1.0, "time/update_actor_s": 1.0,
     "time/step_s": 2.0, "throughput/tokens_per_s": 250.0},
    {"step": 3, "reward/mean": 0.75, "time/rollout_s": 0.5, "time/update_actor_s": 1.0,
     "time/step_s": 2.0, "throughput/tokens_per_s": 150.0, "eval/reward": 0.9375},
]  # fmt: skip


def test_quickstart_summary(tmp_path: Path) -> None:
    quickstart = load_module("examples/arithmetic/quickstart.py")
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in METRICS))
    rows = quickstart.read_metrics(path)
    summary = quickstart.summarise(rows, {"assets": 1.0, "sft": 10.0, "rl": 20.04})
    assert summary["accuracy_before"] == 0.25
    assert summary["accuracy_after"] == 0.9375
    assert summary["wall_s"] == 30.0
    assert summary["steps"] == 3
    assert summary["tokens_per_s"] == 150.0  # (400 + 500 + 300) tokens in 8 s
    phases = quickstart.phase_seconds(rows)
    assert list(phases.items()) == [("update_actor", 5.0), ("rollout", 2.5)]


@pytest.mark.programs
def test_quickstart_ends_with_the_exit_code_of_a_stage(capsys: pytest.CaptureFixture) -> None:
    quickstart = load_module("examples/arithmetic/quickstart.py")
    with pytest.raises(SystemExit) as stopped:
        quickstart.run_stage("sft", [sys.executable, "-c", "raise SystemExit(3)"])
    assert stopped.value.code == 3
    assert "stage sft failed with exit code 3" in capsys.readouterr().err
    quickstart.LIMITS_S["sft"] = 0.2
    before = set(psutil.Process().children())  # the server that other tests' ranks come from
    with pytest.raises(SystemExit) as stopped:
        quickstart.run_stage("sft", [sys.executable, "-c", "import time; time.sleep(60)"])
    assert stopped.value.code == quickstart.OUT_OF_TIME
    assert not set(psutil.Process().children()) - before  # the stage's process did not outlive it


def test_bench_figures_from_a_recorded_run() -> None:
    bench = load_module("examples/add2/bench.py")
    watch = bench.Watch(os.getpid(), Path("metrics.jsonl"))
    watch.line_times = [110.0, 114.0, 116.0, 119.0]  # ends of four steps
    watch.trace = [
        (100.0, 0.0, 5.0), (113.9, 20.0, 30.0), (118.9, 30.0, 42.5), (125.0, 99.0, 199.0),
    ]  # fmt: skip
    watch.peak_rss = 3 * 2**30
    row = {"time/rollout_s": 1.0, "time/update_actor_s": 0.5, "time/sync_s": 0.25,
           "reward/mean": 0, "response/tokens": 9000}  # fmt: skip
    rows = [row, row, row | {"time/rollout_s": 2.0, "response/tokens": 2000},
            row | {"time/rollout_s": 4.0, "response/tokens": 3000}]  # fmt: skip
    figures = bench.summarise(rows, watch, launched=100.0)
    assert figures["step_s_median"] == 2.5  # of 2 and 3: the first two steps are dropped
    assert figures["tokens_per_step"] == 2500 and figures["tokens_per_s"] == 1000
    assert figures["cpu_s_per_1k_tokens"] == 2.0
    assert figures["foreign_cores"] == 0.5  # 2.5 s in the 5 s of the last two steps
    assert figures["gen_s"] == 3.0
    assert figures["logp_s"] == 0.0
    assert figures["cpu_s_per_step"] == 5.0  # from the end of the second step to that of the last
    assert figures["startup_s"] == 7.5  # 110 - 100 - 2.5
    assert figures["peak_rss_gb"] == 3.0


@pytest.mark.programs
def test_bench_compare_tells_noise_from_a_change() -> None:
    compare = load_module("examples/add2/bench_compare.py")
    assert compare.verdict([1.0, 1.2, 1.1], [1.15, 1.3, 1.25]) == "the same"
    assert compare.verdict([1.0, 1.2, 1.1], [1.21, 1.3, 1.25]) == "rose"
    assert compare.verdict([1.0, 1.2, 1.1], [0.9, 0.8, 0.99]) == "fell"
    assert compare.verdict([1.0], [2.0]) == "one run says nothing"
    record = dict.fromkeys(compare.FIGURES, 2.0) | {"logp_s": 0.0, "foreign_cores": 0.1}
    about = {"processor": "P, 2 cores"}
    before = [record | about | {"commit": "a"}] * 2
    after = [record | about | {"commit": "b", "train_s": 1.0, "foreign_cores": 0.7}] * 2
    first, *lines = compare.table("add2 on 1 ranks", before, after)
    assert first == "add2 on 1 ranks, a -> b, P, 2 cores, other programs took 0.7 cores"
    told = {line.split()[0]: line for line in lines}
    assert told.keys() == set(compare.FIGURES)
    assert "ratio  0.500  fell" in told["train_s"] and told["gen_s"].endswith("the same")
    with pytest.raises(SystemExit, match="'no-such' is no commit"):
        compare.check_out("no-such")


GRANDCHILD = """
import time
memory = bytearray(200 << 20)
end = time.process_time() + 0.3
while time.process_time() < end:
    pass
print("ready", flush=True)
input()
"""


@pytest.mark.programs
def test_bench_watches_a_process_tree() -> None:
    """The grandchild keeps its memory until the watch has surely looked at it."""
    bench = load_module("examples/add2/bench.py")
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', GRANDCHILD], check=True)"
    command = [sys.executable, "-c", f"GRANDCHILD = {GRANDCHILD!r}\n{child}"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    watch = bench.Watch(process.pid, Path("no such file"))
    watch.start()
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    num_samples = len(watch.trace)
    while len(watch.trace) < num_samples + 2:  # the next one may have begun before
        assert watch.is_alive()
        time.sleep(0.02)
    process.communicate("\n", timeout=60)
    watch.stop()
    assert process.returncode == 0
    assert watch.peak_procs == 2
    assert watch.peak_rss > 200 << 20  # the grandchild's
    assert watch.trace[-1][1] > 0.2


def setup_copy(folder: Path) -> Path:
    """A folder in which setup.sh can be run without touching this checkout's environment."""
    for name in ("launch/setup.sh", "constraints.txt", "pyproject.toml"):
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    return folder


def fake_python(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}")
    path.chmod(0o755)
    return path


def run_setup(folder: Path, python: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHON": str(python)}
    command = ["bash", str(folder / "launch/setup.sh"), *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.programs
def test_setup_refuses_an_old_python(tmp_path: Path) -> None:
    old = fake_python(
        tmp_path / "python3.9", '[ "$1" = --version ] && echo "Python 3.9.2"\nexit 1\n'
    )
    done = run_setup(setup_copy(tmp_path), old)
    assert done.returncode == 1
    assert "Python 3.9.2 is too old: 3.11 or newer is needed" in done.stderr
    assert not Path(tmp_path, ".venv").exists()


@pytest.mark.programs
def test_setup_leaves_an_environment_behind_a_link_alone(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    Path(other, "kept").touch()
    checkout = setup_copy(tmp_path)
    Path(checkout, ".venv").symlink_to(other)
    done = run_setup(checkout, Path(sys.executable))
    assert done.returncode == 1
    assert f".venv is a link to {other}" in done.stderr
    assert Path(other, "kept").exists()


ROCM_SMI = """
for gpu in 0 1; do
    printf 'GPU[%s]\\t\\t: Device Name: \\t\\tAMD Instinct MI300X\\n' $gpu
    printf 'GPU[%s]\\t\\t: Device ID: \\t\\t0x74a1\\n' $gpu
done
"""


@pytest.mark.programs
def test_setup_finds_amd_gpus_and_asks_for_an_index(tmp_path: Path) -> None:
    """rocm-smi is a mock, as no AMD GPU can be had here: what it prints is that of ROCm 6."""
    script = setup_copy(tmp_path) / "launch/setup.sh"
    Path(tmp_path, "bin").mkdir()
    fake_python(tmp_path / "bin/rocm-smi", ROCM_SMI)

    def print_plan(**env: str) -> subprocess.CompletedProcess[str]:
        path = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
        command = ["bash", str(script), "--print"]
        return subprocess.run(command, env=path | env, capture_output=True, text=True, timeout=60)

    done = print_plan()
    assert done.returncode == 1 and "set TORCH_INDEX to one that has torch 2.13" in done.stderr
    done = print_plan(TORCH_INDEX="file:///wheels/rocm")
    assert done.returncode == 0 and "of the kind 'rocm'" in done.stdout
    assert "--extra-index-url file:///wheels/rocm -e .[gpu,dev]" in done.stdout
    done = print_plan(PATH="/usr/bin:/bin")
    assert "of the kind 'cpu'" in done.stdout and "--no-deps -r constraints.txt" in done.stdout
    assert not Path(tmp_path, ".venv").exists()


@pytest.mark.programs
def test_setup_makes_an_environment_for_each_engine(tmp_path: Path) -> None:
    """SGLang's is .venv-sglang, under pins of its own, and needs a GPU."""
    (tmp_path / "constraints-sglang.txt").write_bytes(
        (ROOT / "constraints-sglang.txt").read_bytes()
    )
    (tmp_path / "bin").mkdir()
    python = fake_python(tmp_path / "bin/python", f'exec {sys.executable} "$@"\n')
    folder = setup_copy(tmp_path)
    done = run_setup(folder, python, "--engine", "hf")
    assert done.returncode == 2 and "usage: launch/setup.sh" in done.stderr
    script = (folder / "launch/setup.sh").read_text()
    without = "command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1"
    for has_gpu in ("false", "true"):
        assert without in script
        (folder / "launch/setup.sh").write_text(script.replace(without, has_gpu))
        pip = "mkdir -p $4/bin; printf '#!/bin/sh\\necho \"$@\"; exit 9\\n' > $4/bin/python"
        fake_python(
            python, f'[ "$2" = venv ] && {{ {pip}; chmod +x $4/bin/python; exit; }}\nexec '
            f'{sys.executable} "$@"\n',
        )  # fmt: skip
        done = run_setup(folder, python, "--engine", "sglang")
        if has_gpu == "false":
            assert done.returncode == 1 and "SGLang needs an NVIDIA GPU" in done.stderr
        else:
            assert "-c constraints-sglang.txt -e .[sglang,dev]" in done.stdout, done.stderr
            assert Path(folder, ".venv-sglang").is_dir()
    assert not Path(folder, ".venv").exists()


@pytest.mark.programs
def test_setup_that_was_interrupted_starts_over(tmp_path: Path) -> None:
    broken = "mkdir -p .venv/bin; printf '#!/bin/sh\\nexit 9\\n' > .venv/bin/python\n"
    broken += "chmod +x .venv/bin/python; exit 0\n"
    python = fake_python(
        tmp_path / "python", f'[ "$2" = venv ] && {{ {broken} }}\nexec {sys.executable} "$@"\n'
    )
    folder = setup_copy(tmp_path)
    for _ in range(2):  # the second time must try again, not find itself done
        done = run_setup(folder, python)
        assert "installing the" in done.stdout
        assert done.returncode == 9
    assert not Path(folder, ".venv/installed").exists()


QUIET = """
from spmdrl.distributed.env import before_torch, show_package
before_torch()
import sys
import spmdrl.training.rl
import transformers
show_package("torchao.optim")
show_package("bitsandbytes.functional")
from torchao.optim import AdamW8bit
assert not {"wandb", "mlflow", "swanlab", "trackio"} & sys.modules.keys()
"""


@pytest.mark.programs
def test_what_other_packages_would_say_at_their_import_is_not_shown():
    """Services that people watch are imported only where they are asked for."""
    done = subprocess.run(
        [sys.executable, "-c", QUIET], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Functions without a side effect; `list`, which reads an iterator to its end, is not among them.
PURE = {
    "all", "any", "int", "isinstance", "is_contiguous", "keys", "len", "Shard", "sizes", "tuple",
}  # fmt: skip


def test_no_assert_does_work_that_python_would_leave_out_with_its_option_O() -> None:
    asserts = [
        (path, statement)
        for folder in ("spmdrl", "kernels/spmdrl_kernels")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "assert" in (text := path.read_text())
        for statement in ast.walk(ast.parse(text))
        if isinstance(statement, ast.Assert)
    ]
    assert len(asserts) > 20
    for path, statement in asserts:
        where = f"{path.relative_to(ROOT)}:{statement.lineno}"
        for node in ast.walk(statement.test):
            assert not isinstance(node, ast.NamedExpr | ast.Await | ast.Yield), where
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).rpartition(".")[2]
                assert name in PURE, f"{where}: {name}() stands inside an assert"


def test_every_path_that_contributing_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    folders = "spmdrl|tests|docs|kernels|configs|examples|launch"
    paths = {path.rstrip(".") for path in re.findall(rf"\b(?:{folders})/[\w/.-]*", text)}
    assert len(paths) > 30
    missing = [path for path in sorted(paths) if not (ROOT / path).exists()]
    assert not missing, f"CONTRIBUTING.md names paths that do not exist: {missing}"
