"""Fine-tuning under torchrun: it is stopped by a signal and goes on bit for bit."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from programs import finish, metrics_of, pids_of, start, train, wait_for

CONFIG = """
from spmdrl.config import *

config = SftConfig(
    model="model",
    data=SftDataConfig(train="rows.jsonl", batch_size=6, max_tokens=32),
    out="out", run_dir="run", steps=6,
    actor=TrainConfig(dtype="float32", micro_batch_tokens=64, optim=OptimConfig(lr=1e-3)),
    checkpoint=CheckpointConfig(every_steps=2, keep=1),
    tensorboard=False,
)
"""


@pytest.fixture
def folder(tmp_path, qwen3):
    Path(tmp_path, "model").symlink_to(qwen3)
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(5) for b in range(5)]
    Path(tmp_path, "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path(tmp_path, "cfg.py").write_text(CONFIG)
    return tmp_path


def sft(folder, ranks, *args):
    done = train(folder, ranks, "--config", "cfg.py", *args, program="spmdrl.sft")
    assert done.code == 0, done.output[-4000:]
    return done.output


def test_a_signal_stops_and_the_rest_is_bit_for_bit(folder):
    """25 rows: the interrupted run goes on amid an epoch."""
    sft(folder, 2, "--run_dir", "whole", "--out", "out_whole")
    whole = metrics_of(folder / "whole")
    assert [path.name for path in (folder / "whole/checkpoints").iterdir()] == ["step_00000006"]
    slow = "\nimport time, spmdrl.sft_data\nexample = spmdrl.sft_data.SftDataset.example\n"
    slow += "spmdrl.sft_data.SftDataset.example = lambda *a: time.sleep(0.2) or example(*a)\n"
    Path(folder, "slow.py").write_text(CONFIG + slow)
    proc = start(folder, 2, "--config", "slow.py", program="spmdrl.sft")
    wait_for(folder, "step 2/6 | loss", proc)
    os.kill(pids_of(proc.pid, "spmdrl.sft")[1], signal.SIGUSR1)
    done = finish(proc, folder, 20)
    [told] = re.findall(r"spmdrl: stopped after step (\d+) of 6; --resume auto", done.output)
    assert f"step {told}/6 | saved run/checkpoints/step_{int(told):08d}" in done.output
    assert "exitcode  : 75" in done.output
    assert not Path(folder, "out").exists()
    assert f"{told} steps done" in sft(folder, 2, "--resume", "auto")
    assert metrics_of(folder / "run") == whole
    weights = "model.safetensors"
    assert (folder / "out" / weights).read_bytes() == (folder / "out_whole" / weights).read_bytes()
    assert "6 steps done" in sft(folder, 1, "--resume", "auto", "--steps", "7")
