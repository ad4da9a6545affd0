"""Whole runs with Megatron under torchrun: they resume, change their layout, export."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs import CONFIG, metrics_of, train, write_task

pytestmark = [pytest.mark.ranks, pytest.mark.megatron, pytest.mark.strict_nccl]

# an actor on tensor-parallel ranks, not trained before step 3; a critic in two pipeline stages
MEGATRON = CONFIG.replace(
    'actor=TrainConfig(dtype="float32",',
    'algo=AlgoConfig(advantage="gae", critic_warmup_steps=2),\n'
    '    critic=TrainConfig(dtype="float32", engine="megatron", pipeline_parallel=2,\n'
    "                       micro_batch_tokens=128, offload_params=True),\n"
    '    actor=TrainConfig(dtype="float32", engine="megatron", tensor_parallel=2,\n'
    "                      offload_optimizer=True,",
).replace('engine="hf",', 'engine="hf", static_split=True,')  # the same batches in every run
STEP_2 = "whole/checkpoints/step_00000002"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, qwen3):
    path = tmp_path_factory.mktemp("runs")
    Path(path, "model").symlink_to(qwen3)
    write_task(path)
    Path(path, "cfg.py").write_text(MEGATRON)
    return path


@pytest.fixture(scope="module")
def whole(folder):
    """The metrics of four steps, with a checkpoint after the second and the fourth."""
    done = train(
        folder, 2, "--config", "cfg.py", "--steps", "4", "--run_dir", "whole",
        "--checkpoint.every_steps", "2",
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    return metrics_of(folder / "whole")


def resumed(folder, ranks, name, *args):
    done = train(
        folder, ranks, "--config", "cfg.py", "--steps", "4", "--run_dir", name, "--resume", STEP_2,
        *args,
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    assert "2 steps done" in done.output
    return metrics_of(folder / name)


def test_resume_is_bit_for_bit(folder, whole):
    rows = resumed(folder, 2, "resumed", "--checkpoint.every_steps", "4")
    assert [row["step"] for row in rows] == [3, 4]
    assert rows == whole[-2:]
    for role in ("actor", "critic"):
        part = f"checkpoints/step_00000004/{role}"
        shards = sorted((folder / "whole" / part).glob("*.distcp"))
        assert len(shards) == 2
        for shard in shards:
            assert shard.read_bytes() == (folder / "resumed" / part / shard.name).read_bytes()


def test_a_checkpoint_goes_on_in_another_layout(folder, whole):
    layout = ("--actor.tensor_parallel", "1", "--critic.pipeline_parallel", "1")
    for got, want in zip(resumed(folder, 1, "other", *layout), whole[-2:], strict=True):
        for name in ("reward/mean", "actor/loss", "actor/grad_norm", "critic/loss"):
            assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_the_other_engine_refuses_a_checkpoint(folder, whole, engine):
    path = STEP_2
    if engine == "megatron":
        path = "of_fsdp/checkpoints/step_00000001"
        done = train(
            folder, 2, "--config", "cfg.py", "--steps", "1", "--run_dir", "of_fsdp",
            "--checkpoint.every_steps", "1", "--actor.engine", "fsdp", "--actor.tensor_parallel",
            "1",
        )  # fmt: skip
        assert done.code == 0, done.output[-4000:]
    args = ["--actor.engine", engine, "--actor.tensor_parallel", "1", "--resume", path]
    done = train(folder, 2, "--config", "cfg.py", "--run_dir", f"{engine} refuses", *args)
    other = "fsdp" if engine == "megatron" else "megatron"
    told = [line for line in done.output.splitlines() if "config error" in line]
    assert len(told) == 1, done.output[-4000:]
    assert f"actor was written by engine {other}" in told[0]
    assert done.code == 2, done.output
    assert (
        "spmdrl/checkpoint/format.py" not in done.output
    )  # of a traceback; torchrun prints its own


def test_export_is_what_was_trained(folder, whole):
    from transformers import AutoModelForCausalLM

    done = train(
        folder, 1, "--checkpoint", "whole/checkpoints/step_00000004", "--out", "exported",
        program="spmdrl.export",
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    model, info = AutoModelForCausalLM.from_pretrained(
        folder / "exported", output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    before = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    moved = [
        (p - q).abs().max().item()
        for p, q in zip(model.parameters(), before.parameters(), strict=True)
    ]
    assert 1e-4 < min(moved) <= max(moved) < 0.02  # two steps of Adam at 1e-3
    shutil.rmtree(folder / "exported")


def test_an_evaluation_alone_is_that_of_the_run(folder, whole):
    done = train(
        folder, 1, "--config", "cfg.py", "--checkpoint", "whole/checkpoints/step_00000004",
        program="spmdrl.evaluate",
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    got = metrics_of(folder / "run_eval")[0]
    assert got["eval/reward"] == pytest.approx(whole[-1]["eval/reward"])
    assert got["step"] == 4


FORGED = """
import os, pickle, sys, torch
from pathlib import Path
from spmdrl.checkpoint import format as checkpoint
from spmdrl.config import ConfigError
from spmdrl.engines.hf_export import load_full

class Evil:
    def __reduce__(self):
        return os.system, ("touch ran",)

folder = Path(sys.argv[1])
for name, write in (("common.pt", torch.save), (".metadata", pickle.dump)):
    path = folder / "actor" / name
    before = path.read_bytes()
    with path.open("wb") as file:
        write(Evil(), file)
    try:
        load_full(folder, "actor")
    except ConfigError as error:
        print("refused:", error)
    path.write_bytes(before)
metadata = pickle.loads(before)
kept = [info for index, info in metadata.storage_data.items() if index.offset is None]
print("objects", len(kept))
assert not Path("ran").exists()
load_full(folder, "actor")
"""


def test_no_code_runs_that_stands_in_a_checkpoint(folder, whole):
    shutil.copytree(folder / STEP_2, folder / "forged")
    Path(folder, "forge.py").write_text(FORGED)
    done = subprocess.run(
        [sys.executable, "forge.py", "forged"], cwd=folder, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("common.pt", ".metadata"):
        assert f"refused: forged/actor/{name} is not read" in done.stdout
