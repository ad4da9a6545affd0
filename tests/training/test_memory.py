"""A rank's memory: it does not grow with the shapes it meets, and --dry-run foretells it."""

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from programs import ROOT, train, write_task
from tiny_models import png, save_qwen3, save_qwen_vl
from transformers import AutoModelForSequenceClassification

from spmdrl.engines.fsdp.classifier import classifier_config
from spmdrl.hub.vision_classifiers import register_classifier

pytestmark = pytest.mark.ranks

SFT = """
from spmdrl.config import *

config = SftConfig(
    model="model",
    data=SftDataConfig(train="rows.jsonl", batch_size={rows}, max_tokens=256),
    out="out", run_dir="run", steps={steps},
    actor=TrainConfig(dtype="float32", micro_batch_tokens={tokens}, optim=OptimConfig(lr=1e-5)),
    checkpoint=CheckpointConfig(every_steps={every}, keep=1),
    trackers=(),
)
"""
RL = """
from spmdrl.config import *

def reward(response, ground_truth):
    return float(response.startswith(ground_truth)) + 0.01 * len(response)

role = TrainConfig(dtype="float32", micro_batch_tokens=1024)
config = PpoConfig(
    model="model", reward=reward, rewards=RewardConfig(workers=1), steps=1, eval_every=0,
    data=DataConfig(train="train.jsonl", prompts_per_step=8, max_prompt_tokens=16),
    rollout=RolloutConfig(n=2, max_tokens=64, ignore_eos=True, dtype="float32", {rollout}),
    actor={actor}, {roles}
    run_dir="run", checkpoint=CheckpointConfig(every_steps=0), trackers=(),
)
"""
# code and buffers are kept by shape, which layers share
SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "head_dim": 64}
LARGER = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 8, "head_dim": 64}


def program(folder: Path, *args: str) -> tuple[str, float]:
    """Output of spmdrl.sft on one rank, and the most memory that it had resident, GiB.

    The peak is read while the program runs. wait4 would give it too, but Linux carries that figure
    over an exec: a worker of pytest that is larger than the program would be measured.
    """
    command = [sys.executable, "-m", "spmdrl.sft", "--config", "cfg.py", *args]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    peak = 0.0
    with Path(folder, "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peaks = re.findall(r"^VmHWM:\s+(\d+) kB", status, re.M)  # none of one that has ended
            peak = float(peaks[0]) / 2**20 if peaks else peak
            time.sleep(0.02)
    output = Path(folder, "log").read_text()
    assert process.returncode == 0, output[-4000:]
    return output, peak


def write(folder: Path, shape: dict[str, int], **settings: int) -> None:
    """Rows of all lengths up to 250 tokens."""
    save_qwen3(folder / "model", **shape)
    draw = random.Random(0)
    rows = [{"prompt": "1" * draw.randint(1, 120), "response": "2" * draw.randint(1, 120)}
            for _ in range(240)]  # fmt: skip
    Path(folder, "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path(folder, "cfg.py").write_text(SFT.format(**settings))


def foretold(output: str) -> tuple[float, str]:
    """The peak in GiB that a dry run names, and its phase."""
    [(peak, phase)] = re.findall(r"^  peak +(\d+\.\d+) GiB in (\w+)", output, re.M)
    return float(peak), phase


def compare(folder: Path, ranks: int, **options: str) -> str:
    """A dry run and the run; the phase in which the memory is to be at its peak."""
    told = train(folder, ranks, "--config", "cfg.py", "--dry-run", **options)
    assert told.code == 0, told.output[-4000:]
    planned, phase = foretold(told.output)
    done = train(folder, ranks, "--config", "cfg.py", **options)
    assert done.code == 0, done.output[-4000:]
    last = Path(folder, "run/metrics.jsonl").read_text().splitlines()[-1]
    assert planned == pytest.approx(json.loads(last)["memory/peak_rss_gib"], rel=0.15)
    return phase


def test_memory_does_not_grow_with_new_shapes(tmp_path):
    """Packed micro-batches of ever new lengths, all of them nearly full: what a step takes at most
    is the same from the first steps on, so what is resident must stay, once the libraries' buffers
    have met most lengths."""
    write(tmp_path, SMALL, rows=8, steps=100, every=0, tokens=320)
    planned, _ = foretold(program(tmp_path, "--dry-run")[0])
    _, peak = program(tmp_path)
    rows = [json.loads(line) for line in Path(tmp_path, "run/metrics.jsonl").open()]
    rss = [row["memory/rss_gib"] for row in rows]
    assert len(rss) == 100
    # 20 MiB: the soak asks for 2 % of a model of 109 million weights, which is 96 MiB. From step
    # 20 to 55 equal runs grew by 3 to 22 MiB, from step 60 to 95 by 0 to 10
    assert median(rss[95:100]) - median(rss[60:65]) < 0.02, rss
    assert planned == pytest.approx(peak, rel=0.15)


def test_the_dry_run_foretells_the_memory_of_a_larger_model(tmp_path):
    """47 million weights, whose tensors are mappings of their own."""
    write(tmp_path, LARGER, rows=8, steps=2, every=0, tokens=1024)
    compare(tmp_path, 1, program="spmdrl.sft")


TOWER = {"hidden_size": 256, "intermediate_size": 640, "depth": 6, "out_hidden_size": 64}


@pytest.mark.parametrize("engine", ["fsdp", pytest.param("megatron", marks=pytest.mark.megatron)])
def test_the_dry_run_foretells_the_memory_of_a_tower_for_images(tmp_path, engine):
    """Seven images of 576 patches in a micro-batch: the tower keeps most of what a rank has."""
    save_qwen_vl(tmp_path / "model", most_pixels=96 * 96, **TOWER)
    prompt = [{"role": "user", "content": "<image>?"}]
    row = {"prompt": prompt, "response": "a red one", "images": [{"bytes": png(0, 96, 96)}]}
    pq.write_table(pa.Table.from_pylist([row] * 16), tmp_path / "rows.parquet")
    text = SFT.format(rows=8, steps=2, every=0, tokens=1100).replace("jsonl", "parquet")
    Path(tmp_path, "cfg.py").write_text(text.replace("dtype=", f"engine={engine!r}, dtype="))
    compare(tmp_path, 1, program="spmdrl.sft")


def test_the_dry_run_foretells_the_memory_of_a_reward_model_that_sees_images(tmp_path):
    """Its tower is far wider than the policy's, and sees all images of a micro-batch at once."""
    save_qwen_vl(tmp_path / "model", most_pixels=96 * 96)
    wide = {"hidden_size": 1024, "intermediate_size": 2560, "num_heads": 8}
    save_qwen_vl(tmp_path / "judge", most_pixels=96 * 96, **wide)
    hf = classifier_config(str(tmp_path / "judge"))
    register_classifier(hf)
    AutoModelForSequenceClassification.from_config(hf).save_pretrained(tmp_path / "judge")
    prompt = [{"role": "user", "content": "<image>?"}]
    row = {"data_source": "seen", "prompt": prompt, "images": [{"bytes": png(0, 96, 96)}],
           "reward_model": {"style": "rule", "ground_truth": "1"}}  # fmt: skip
    pq.write_table(pa.Table.from_pylist([row] * 16), tmp_path / "train.parquet")
    text = RL.replace("jsonl", "parquet").replace("max_prompt_tokens=16", "max_prompt_tokens=200")
    judge = 'reward_model=RewardModelConfig("judge", dtype="float32", micro_batch_tokens=2048),'
    text = text.format(rollout='engine="hf"', actor="role", roles=judge)
    text = text.replace("reward=reward,", 'reward="model",').replace(
        "max_tokens=64", "max_tokens=8"
    )
    Path(tmp_path, "cfg.py").write_text(text)
    assert compare(tmp_path, 1) == "reward_model"


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("ranks", "parts", "phase"),
    [
        (1, {"rollout": 'engine="vllm", kv_cache_mib=256', "actor": "role"}, "update_actor"),
        # a copy on each rank, whose gradients meet once an update
        (2, {"rollout": 'engine="hf"', "actor": "replace(role, fsdp=1)"}, "update_actor"),
        (1, {"rollout": 'engine="hf"', "actor": "role",
             "roles": 'critic=role, algo=AlgoConfig(advantage="gae"),'}, "update_critic"),
    ],
    ids=["vllm", "replicas", "critic"],
)  # fmt: skip
def test_the_dry_run_foretells_the_memory_of_reinforcement_learning(tmp_path, ranks, parts, phase):
    save_qwen3(tmp_path / "model", **LARGER)
    write_task(tmp_path)
    text = RL.format(**{"roles": ""} | parts)
    Path(tmp_path, "cfg.py").write_text("from dataclasses import replace\n" + text)
    assert compare(tmp_path, ranks) == phase
