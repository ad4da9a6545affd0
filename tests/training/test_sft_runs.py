"""Fine-tuning under torchrun: the same losses on any ranks, stopped by a signal, gone on with."""

import json
import math
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread
from programs import finish, metrics_of, pids_of, start, train, wait_for
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from spmdrl.engines.hf_export import export
from spmdrl.timeline import read_trace

pytestmark = pytest.mark.ranks

CONFIG = """
from spmdrl.config import *

config = SftConfig(
    model="model",
    data=SftDataConfig(train="rows.jsonl", batch_size=6, max_tokens=32),
    out="out", run_dir="run", steps=6,
    actor=TrainConfig(dtype="float32", micro_batch_tokens=64, optim=OptimConfig(lr=1e-3)),
    checkpoint=CheckpointConfig(every_steps=2, keep=1),
    trackers=(),
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
    slow = "\nimport time, spmdrl.data.sft\nexample = spmdrl.data.sft.SftDataset.example\n"
    slow += "spmdrl.data.sft.SftDataset.example = lambda *a: time.sleep(0.2) or example(*a)\n"
    Path(folder, "slow.py").write_text(CONFIG + slow)
    proc = start(folder, 2, "--config", "slow.py", program="spmdrl.sft")
    wait_for(folder, "step 2/6 | loss", proc)
    os.kill(pids_of(proc.pid)[1], signal.SIGUSR1)
    done = finish(proc, folder, 20)
    [told] = re.findall(r"spmdrl: stopped after step (\d+) of 6; --resume auto", done.output)
    assert f"step {told}/6 | saved run/checkpoints/step_{int(told):08d}" in done.output
    assert "exitcode  : 75" in done.output
    assert f"Stopped: {told} of 6 steps done; run folder run" in done.output
    go_on = "python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.sft --config slow.py"
    assert f"{go_on} --resume auto" in done.output
    assert not Path(folder, "out").exists()
    assert f"{told} steps done" in sft(folder, 2, "--resume", "auto")
    assert metrics_of(folder / "run") == whole
    assert imread(folder / "run/loss.png").shape[:2] == (540, 960)
    losses = [f"{sum(row['sft/loss'] for row in rows) / 3:.4g}" for rows in (whole[:3], whole[3:])]
    told = Path(folder, "run/summary.txt").read_text()
    assert "Finished: 6 of 6 steps done; run folder run\n6 steps took " in told
    assert f"loss in training  {losses[0]} (steps 1 to 3) -> {losses[1]} (steps 4 to 6)" in told
    weights = "model.safetensors"
    assert (folder / "out" / weights).read_bytes() == (folder / "out_whole" / weights).read_bytes()
    assert "6 steps done" in sft(folder, 1, "--resume", "auto", "--steps", "7")


def tensors_of(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def test_what_is_written_has_the_dtype_of_the_model_unless_another_is_asked_for(folder, qwen3):
    """A bfloat16 model whose config.json does not say so, trained in float32."""
    Path(folder, "model").unlink()
    shutil.copytree(qwen3, folder / "model")
    AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.bfloat16).save_pretrained(
        folder / "model"
    )
    settings = json.loads(Path(folder, "model/config.json").read_text())
    assert settings.pop("dtype") == "bfloat16"
    Path(folder, "model/config.json").write_text(json.dumps(settings))
    args = ("--steps", "2", "--actor.ema", "0.5")
    sft(folder, 1, *args)
    sft(folder, 1, *args, "--out", "wide", "--out_dtype", "float32", "--run_dir", "run_wide")
    for name in ("", "ema"):
        half, wide = folder / "out" / name, folder / "wide" / name
        assert AutoConfig.from_pretrained(half).dtype == torch.bfloat16
        assert AutoConfig.from_pretrained(wide).dtype == torch.float32
        exact = tensors_of(wide)
        assert {t.dtype for t in exact.values()} == {torch.float32}
        assert any((t != t.bfloat16().float()).any() for t in exact.values())
        rounded = tensors_of(half)
        assert rounded.keys() == exact.keys()
        assert all(torch.equal(rounded[n], t.bfloat16()) for n, t in exact.items())
        assert AutoModelForCausalLM.from_pretrained(half).dtype == torch.bfloat16
    checkpoint = folder / "run/checkpoints/step_00000002"
    export(checkpoint, folder / "exported")
    export(checkpoint, folder / "exported_ema", ema=True)
    export(checkpoint, folder / "exported_wide", "float32")
    for name, same in (("exported", "out"), ("exported_ema", "out/ema"), ("exported_wide", "wide")):
        found, want = tensors_of(folder / name), tensors_of(folder / same)
        assert found.keys() == want.keys()
        assert all(t.dtype == found[n].dtype and torch.equal(t, found[n]) for n, t in want.items())
        dtypes = [AutoConfig.from_pretrained(folder / where).dtype for where in (name, same)]
        assert dtypes[0] == dtypes[1]
    sft(folder, 1, "--steps", "1", "--run_dir", "run_lora", "--out", "merged",
        "--actor.lora.rank", "2")  # fmt: skip
    assert {t.dtype for t in tensors_of(folder / "merged").values()} == {torch.bfloat16}


CHATS = CONFIG.replace(
    'train="rows.jsonl", batch_size=6, max_tokens=32',
    'train="chats.jsonl", eval="held_out.jsonl", turns="all", batch_size=5, max_tokens=40',
).replace("steps=6", "steps=3, eval_every=2")


@pytest.fixture
def chats(folder):
    """Chats of one to three answers, of very different lengths; some are over max_tokens."""

    def chat(n):
        turns = [("user", f"{n}+{k}=") if k % 2 else ("assistant", f"{n * k} " * (n % 4 + 1))
                 for k in range(1, 2 * (n % 3) + 3)]  # fmt: skip
        return {"messages": [{"role": role, "content": text} for role, text in turns]}

    rows = [json.dumps(chat(n)) + "\n" for n in range(30)]
    Path(folder, "chats.jsonl").write_text("".join(rows[:17]))
    Path(folder, "held_out.jsonl").write_text("".join(rows[17:]))
    Path(folder, "cfg.py").write_text(CHATS)
    return folder


def reference_loss(folder, rows):
    """Loss and tokens of a chat file, one row after the other, by transformers and the rules."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    loss, count = 0.0, 0
    for line in Path(folder, rows).open():
        ids, learnt = [], []
        for turn in json.loads(line)["messages"]:
            part = tokenizer(turn["content"])["input_ids"]
            ids += part
            learnt += [turn["role"] == "assistant"] * len(part)
        ids, learnt = [*ids, tokenizer.eos_token_id][:40], [*learnt, True][:40]
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        chosen = [t for t in range(1, len(ids)) if learnt[t]]
        loss -= sum(float(logprobs[t - 1, ids[t]]) for t in chosen)
        count += len(chosen)
    return loss / count


def test_losses_are_those_of_one_rank_and_of_transformers(chats):
    sft(chats, 1, "--run_dir", "alone", "--out", "out_alone")
    one = metrics_of(chats / "alone")
    assert [row["step"] for row in one] == [0, 1, 2, 3]
    assert ["eval/loss" in row for row in one] == [True, False, True, True]
    assert one[0]["eval/loss"] == pytest.approx(reference_loss(chats, "held_out.jsonl"), rel=1e-5)
    assert one[3]["eval/loss"] < one[0]["eval/loss"]
    for ranks, *args in ((2,), (3, "--actor.fsdp", "1"), (2, "--actor.ulysses", "2")):
        sft(chats, ranks, *args)
        if not args:
            reports_time_and_memory(chats)
        for row, want in zip(metrics_of(chats / "run"), one, strict=True):
            assert row == pytest.approx(want, rel=2e-5)
    for row in one:
        if "eval/loss" in row:
            assert row["eval/perplexity"] == pytest.approx(math.exp(row["eval/loss"]))


def reports_time_and_memory(chats):
    """Of two ranks; the timeline draws it."""
    rows = [json.loads(line) for line in Path(chats, "run/metrics.jsonl").open()]
    for row in rows[1:]:
        assert {"time/data_s", "time_max/update_s", "idle/share", "memory/rss_gib"} <= set(row)
        assert row["time_min/update_s"] <= row["time_max/update_s"] <= row["time/update_s"]
    trace = read_trace(chats / "run", "0:3")
    assert sorted(trace.hosts) == [0, 1]
    assert {"load data", "data", "update", "evaluate", "checkpoint", "save"} <= set(trace.busy)


def test_the_best_by_held_out_loss_is_kept(chats):
    """A rate at which the loss grows: the first checkpoint is the best."""
    args = ("--eval_every", "1", "--actor.optim.lr", "3.0", "--checkpoint.every_steps", "1")
    best = ("--checkpoint.keep_best", "1", "--checkpoint.best_metric", "eval/loss")
    sft(chats, 1, *args, *best, "--checkpoint.best_is", "smallest", "--steps", "4")
    losses = [row["eval/loss"] for row in metrics_of(chats / "run")][1:4]
    best_step = 1 + losses.index(min(losses))
    kept = sorted(path.name for path in (chats / "run/checkpoints").iterdir())
    assert kept == [f"step_{best_step:08d}", "step_00000004"]


def test_updates_that_are_not_finite_are_passed_over_where_the_config_says_so(folder):
    """In step 2 the loss of one rank is not a number; in steps 4 to 6 either."""
    fault = """
import os
import spmdrl.data.sft
example, calls = spmdrl.data.sft.SftDataset.example, []
def broken(self, index):
    calls.append(index)
    found = example(self, index)
    step = (len(calls) + 2) // 3  # a rank has 3 of 6 rows of equal length
    if os.environ["RANK"] == "1" and step in (2, 4, 5, 6):
        object.__setattr__(found, "loss_mask", [m * float("inf") for m in found.loss_mask])
    return found
"""
    fault += "spmdrl.data.sft.SftDataset.example = broken\n"
    Path(folder, "cfg.py").write_text(CONFIG + fault)
    done = train(folder, 2, "--config", "cfg.py", "--steps", "9", "--nan_updates", "2",
                 program="spmdrl.sft")  # fmt: skip
    assert done.code == 1, done.output
    rows = metrics_of(folder / "run")
    assert [row["sft/skipped_updates"] for row in rows] == [0, 1, 0, 1, 1]
    assert ["sft/loss" in row for row in rows] == [True, False, True, False, False]
    assert "actor: passed over, 2 in a row" in done.output
    assert "failed in phase 'update': FloatingPointError: update 3" in done.output


def test_dry_run_checks_all_and_shows_what_is_learnt(chats):
    done = train(chats, 1, "--config", "cfg.py", "--dry-run", "--ranks", "4", program="spmdrl.sft")
    assert done.code == 0, done.output
    for words in ("data.batch_size=5\n",
                  "5 rows a step, at most 200 tokens, about 1.25 on each of 4",
                  "17 rows / 5 = 3 steps an epoch: 3 steps are 0.88 epochs",
                  "actor    ranks 0-3: dp 1 x fsdp 4", "M parameters; weights 0.00, gradients",
                  "train data: 17 rows of", "eval data: 13 rows of",
                  "    given  '0+1='\n    learnt '0 <eos>'"):  # fmt: skip
        assert done.output.count(words) == 1, (words, done.output)
    assert not Path(chats, "run").exists() and not Path(chats, "out").exists()
    for args, words in (
        (("--data.batch_size", "18"), "batch_size=18 is above the 17 rows that can be learnt"),
        (("--data.eval", "gone.jsonl"), "gone.jsonl"),
        (("--data.max_tokens", "513"), "max_position_embeddings is 512"),
    ):
        done = train(chats, 1, "--config", "cfg.py", "--dry-run", *args, program="spmdrl.sft")
        assert done.code == 2 and words in done.output, done.output


def test_a_row_whose_turns_cannot_be_told_is_named(chats):
    copy = chats / "forgets"
    shutil.copytree(chats / "model", copy)
    template = "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}"
    Path(copy, "chat_template.jinja").write_text(template + "{% endif %}{% endfor %}")
    done = train(chats, 2, "--config", "cfg.py", "--model", str(copy), program="spmdrl.sft")
    assert done.code == 2
    assert "chats.jsonl, line 2: field 'messages[1]': the chat template writes" in done.output
    sft(chats, 1, "--model", str(copy), "--data.turns", "last", "--steps", "1")
