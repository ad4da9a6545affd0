"""Paths of a config: what cannot be read or written is told before torch is imported."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmdrl.cli.arguments import load_config
from spmdrl.cli.paths import check_paths
from spmdrl.config import (
    ConfigError,
    DataConfig,
    LoraConfig,
    PpoConfig,
    RewardModelConfig,
    SftConfig,
    SftDataConfig,
    TrainConfig,
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a model, data and the like; it is the current one."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    for name in ("train.jsonl", "eval.jsonl", "data.csv"):
        Path(name).write_text("{}\n")
    os.link("train.jsonl", "linked.jsonl")
    Path("empty").mkdir()
    Path("run/checkpoints/step_00000050").mkdir(parents=True)
    Path("run/checkpoints/step_00000050/run.json").write_text("{}")
    return tmp_path


def ppo(**changes):
    return PpoConfig(**{"model": "model", "data": DataConfig("train.jsonl"), "reward": "gsm8k"}
                     | changes)  # fmt: skip


def sft(**changes):
    return SftConfig(**{"model": "model", "data": SftDataConfig("train.jsonl"), "out": "out"}
                     | changes)  # fmt: skip


GOOD = [
    ppo(), sft(), ppo(resume="auto"), ppo(resume="run/checkpoints/step_00000050"),
    ppo(data=DataConfig(("train.jsonl", "eval.jsonl"), eval="eval.jsonl"), run_dir="a/b/c"),
]  # fmt: skip
WRONG = [
    (ppo(model="modle"), ["model: no such folder: 'modle'"]),
    (ppo(model="runs/modle/x"), ["no such folder: 'runs/modle/x' (and not a hub id like"]),
    (ppo(model="empty"), ["'empty' has no config.json"]),
    (ppo(critic=TrainConfig(model="./x")), ["critic.model: no such folder: './x'"]),
    (ppo(reward_model=RewardModelConfig("./x")), ["reward_model.model: no such folder"]),
    (sft(actor=TrainConfig(lora=LoraConfig(adapter="x"))), ["actor.lora.adapter='x'"]),
    (ppo(data=DataConfig("gone.jsonl")), ["'gone.jsonl' does not exist", "looked from"]),
    (sft(data=SftDataConfig("train.jsonl", eval="gone.jsonl")), ["'gone.jsonl' does not exist"]),
    (ppo(data=DataConfig("a.jsonl, b.jsonl")), ["""are a list: '["a.jsonl", "b.jsonl"]'"""]),
    (ppo(data=DataConfig("runs/gsm8k/train.parquet")),
     ["python examples/data/gsm8k.py --out runs/gsm8k"]),
    (ppo(data=DataConfig("data.csv")), ["unknown extension '.csv'"]),
    (ppo(data=DataConfig(())), ["no data file is given: set data.train"]),
    (ppo(data=DataConfig(("train.jsonl", "train.jsonl"))),
     ["data.train names 'train.jsonl' twice", "one file"]),
    (sft(data=SftDataConfig(("train.jsonl", "linked.jsonl"))), ["'linked.jsonl', which is one"]),
    (ppo(data=DataConfig("train.jsonl", eval=("eval.jsonl", "./eval.jsonl"))), ["data.eval names"]),
    (ppo(resume="nothing"), ["resume='nothing'", "no such folder", "'auto'"]),
    (sft(resume="run"), ["resume='run'", "no run.json", "newest in it is run/checkpoints/step_0"]),
    (ppo(run_dir="/proc/run"), ["run_dir='/proc/run'", "cannot be written to"]),
    (ppo(run_dir="train.jsonl"), ["train.jsonl' is a file; name a folder"]),
    (ppo(run_dir="train.jsonl/run"), ["run_dir='train.jsonl/run'", "Not a directory"]),
    (ppo(run_dir="x" * 300), ["cannot be written to: File name too long"]),
    (ppo(run_dir=" "), ["run_dir=' ' is no name"]),
    (sft(out="/proc/out"), ["out='/proc/out'", "cannot be written to"]),
    (sft(out="model"), ["out='model' is the folder of the model that is trained"]),
]  # fmt: skip


@pytest.mark.parametrize("config", GOOD, ids=lambda config: str(config.data)[:60])
def test_what_can_be_read_and_written_passes_and_leaves_nothing_behind(here, config):
    before = sorted(here.rglob("*"))
    check_paths(config)
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize(("config", "words"), WRONG, ids=lambda x: str(x)[:60])
def test_what_cannot_is_named_with_its_field(here, config, words):
    with pytest.raises(ConfigError) as error:
        check_paths(config)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_only_the_files_that_are_read_are_looked_at(here):
    config = ppo(data=DataConfig("gone.jsonl", eval="eval.jsonl"))
    check_paths(config, ("eval",))
    with pytest.raises(ConfigError, match=r"gone\.jsonl"):
        check_paths(config)


CONFIG = """
from spmdrl.config import *
config = {kind}
"""
KINDS = {
    "ppo": 'PpoConfig("model", DataConfig("train.jsonl", eval="eval.jsonl"), "gsm8k")',
    "evaluate": 'PpoConfig("model", DataConfig("train.jsonl", eval="eval.jsonl"), "gsm8k")',
    "sft": 'SftConfig("model", SftDataConfig("train.jsonl"), "out")',
    "preference": 'PreferenceTrainingConfig("model", AnswerDataConfig("train.jsonl"), "out")',
    "reward_model": 'RewardTrainingConfig("model", PreferenceDataConfig("train.jsonl"), "out")',
}


@pytest.mark.programs
@pytest.mark.parametrize("program", KINDS)
def test_a_wrong_path_is_told_before_torch_is_imported(here, program):
    Path("cfg.py").write_text(CONFIG.format(kind=KINDS[program]))
    command = [sys.executable, "-X", "importtime", "-m", f"spmdrl.{program}", "--config", "cfg.py"]
    started = time.monotonic()
    done = subprocess.run(
        [*command, "--data.eval", "gone.jsonl"], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert time.monotonic() - started < 20  # 0.2 s on an idle machine
    assert done.returncode == 2, done.stderr[-2000:]
    assert "config error: data file 'gone.jsonl' does not exist" in done.stderr
    assert "| torch\n" not in done.stderr and "Traceback" not in done.stderr


def write(text):
    Path("cfg.py").write_text(text)
    return "cfg.py"


def test_a_config_may_change_the_folder_and_the_path(here):
    text = CONFIG.format(kind=KINDS["ppo"])
    before = sys.path[:]
    assert load_config(write("import os\nos.chdir('empty')\n" + text), PpoConfig, {})
    assert Path.cwd() == here / "empty" and sys.path == before
    os.chdir(here)
    gone = "import sys\nsys.path.pop(0)\n" + text
    assert load_config(write(gone), PpoConfig, {}) and sys.path == before


@pytest.mark.parametrize("line", ["os.environ.clear()", "del os.environ['RANK']",
                                  "os.environ['WORLD_SIZE'] = '1'",
                                  "os.environ['MASTER_PORT'] = '1'"])  # fmt: skip
def test_a_config_that_takes_a_ranks_place_away_is_refused(here, monkeypatch, line):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    text = f"import os\n{line}\n" + CONFIG.format(kind=KINDS["ppo"])
    before = dict(os.environ)
    with pytest.raises(ConfigError, match=r"cfg\.py changes (RANK|WORLD_SIZE|MASTER_PORT)"):
        load_config(write(text), PpoConfig, {})
    for name in before.keys() - os.environ.keys():
        os.environ[name] = before[name]  # for the tests that follow
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2")  # it is rank 1 that says so
    assert "MASTER_PORT" not in os.environ
    monkeypatch.setenv("SOMETHING", "1")
    allowed = "import os\ndel os.environ['SOMETHING']\nos.environ['VLLM_X'] = '1'\n"
    load_config(write(allowed + CONFIG.format(kind=KINDS["ppo"])), PpoConfig, {})
    monkeypatch.delenv("VLLM_X")


EXPORTS = [
    ([], "--checkpoint DIR is required"),
    (["--checkpoint", "gone"], "--checkpoint gone: there is no such folder"),
    (["--checkpoint", "run"], "no run.json; the newest in it is run/checkpoints/step_00000050"),
    (["--checkpoint", "whole"], "--out DIR is required"),
    (["--checkpoint", "whole", "--out", "/proc/x"], "--out='/proc/x': '/proc' cannot be written"),
    (["--checkpoint", "whole", "--out", "o", "--base", "gone"], "--base: no such folder: 'gone'"),
    (["--checkpoit", "whole"], "--checkpoit: there is no such flag; nearest: --checkpoint"),
]


@pytest.mark.programs
@pytest.mark.parametrize(("args", "words"), EXPORTS, ids=lambda x: str(x)[:60])
def test_an_export_says_what_is_wrong_before_torch_is_imported(here, args, words):
    Path("whole").mkdir()
    Path("whole/manifest.json").write_text("{}")
    command = [sys.executable, "-X", "importtime", "-m", "spmdrl.export", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr[-2000:]
    assert words in done.stderr
    assert "| torch\n" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.programs
@pytest.mark.parametrize(("module", "words"), [
    ("export", ["--checkpoint DIR --out DIR", "  --ema: the moving average", "--trust_rem"]),
    ("timeline", ["python -m spmdrl.timeline RUN_DIR", "  --steps: 3:6 (both included)", "--out"]),
    ("replay", ["python -m spmdrl.replay RUN --step 137", "  --sample: P.S", "--KEY VALUE"]),
])  # fmt: skip
def test_help_of_programs_without_a_config_is_their_own(module, words):
    command = [sys.executable, "-m", f"spmdrl.{module}", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(word in done.stdout for word in words), done.stdout
    assert "SYNOPSIS" not in done.stdout + done.stderr
