"""Runs that go on from a checkpoint after something was changed, or damaged, meanwhile."""

import json
import shutil
from pathlib import Path

import pytest
from programs import CONFIG, metrics_of, set_up, train

from spmdrl.checkpoint import format as checkpoint

pytestmark = pytest.mark.ranks

SFT = """
from spmdrl.config import *

config = SftConfig(
    model="model", data=SftDataConfig(train="rows.jsonl", batch_size=6, max_tokens=32),
    out="out", run_dir="run", steps=2,
    actor=TrainConfig(dtype="float32", micro_batch_tokens=64, optim=OptimConfig(lr=1e-3)),
    checkpoint=CheckpointConfig(every_steps=1, keep=3), trackers=(),
)
"""


def edit(path, **changes):
    """Replaces fields of a JSON file; a dotted name reaches within."""
    tree = json.loads(path.read_text())
    for name, value in changes.items():
        *above, last = name.split("__")
        node = tree
        for part in above:
            node = node[part]
        node[last] = value
    path.write_text(json.dumps(tree))


def permute_digits(tokenizer_json):
    tree = json.loads(tokenizer_json.read_text())
    vocab = tree["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
    tokenizer_json.write_text(json.dumps(tree))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, qwen3):
    """An SFT run of two steps on a model folder of its own."""
    folder = tmp_path_factory.mktemp("tuned")
    shutil.copytree(qwen3, folder / "model")
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(5) for b in range(5)]
    Path(folder, "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path(folder, "cfg.py").write_text(SFT)
    done = sft(folder)
    assert done.code == 0, done.output[-4000:]
    return folder


def sft(folder, *args, ranks=1):
    return train(folder, ranks, "--config", "cfg.py", *args, program="spmdrl.sft")


@pytest.fixture
def folder(tuned, tmp_path):
    shutil.copytree(tuned, tmp_path / "copy")
    return tmp_path / "copy"


def test_other_content_under_the_same_names_is_refused_and_named(folder):
    """All at once, then allowed kind by kind; the run dir is untouched until it does go on."""
    rows = Path(folder, "rows.jsonl")
    rows.write_text(rows.read_text().replace('"response": "4"', '"response": "5"'))
    permute_digits(folder / "model/tokenizer.json")
    edit(folder / "model/config.json", rms_norm_eps=1e-3, rope_parameters__rope_theta=5e5)
    Path(folder, "model/chat_template.jinja").write_text("{{ messages[0].content }}")
    before = sorted(folder.joinpath("run").rglob("*"))
    done = sft(folder, "--resume", "auto", "--steps", "3", "--checkpoint.accept_changes", "reward")
    assert done.code == 2, done.output[-4000:]
    for words in (
        "run/checkpoints/step_00000002 is of another run than this one: ",
        "data.train: content rows.jsonl (", "tokenizer of model: the ids of its tokens",
        "chat template of model (sha256) ", "model: rms_norm_eps of config.json 1e-06 -> 0.001",
        "model: rope_parameters.rope_theta of config.json 10000.0 -> 500000.0",
        "--checkpoint.accept_changes chat_template,data,model,tokenizer",
    ):  # fmt: skip
        assert words in done.output, words
    assert sorted(folder.joinpath("run").rglob("*")) == before
    shutil.copytree(folder / "run", folder / "far/run")  # the checkpoint knows, wherever it lies
    far = ("--resume", "far/run/checkpoints/step_00000001", "--run_dir", "new", "--steps", "3")
    done = sft(folder, *far, "--checkpoint.accept_changes", "model,chat_template,tokenizer")
    kinds = "chat_template,data,model,tokenizer"  # so that the flag can be taken as it is told
    assert done.code == 2 and f"--checkpoint.accept_changes {kinds}" in done.output, done.output
    assert "rms_norm_eps" not in done.output
    done = sft(folder, *far, "--checkpoint.accept_changes", kinds, "--actor.optim.lr", "1e-6")
    assert done.code == 0, done.output[-4000:]
    lines = done.output.splitlines()
    assert "resume: actor.optim.lr 0.001 -> 1e-06" in lines
    assert "resume: steps 2 -> 3" in lines and "resume: run_dir 'run' -> 'new'" in lines
    assert "resume: model: rms_norm_eps of config.json 1e-06 -> 0.001 (accepted: model)" in lines
    assert sum(line.endswith(" (accepted: data)") for line in lines) == 1
    again = sft(folder, "--resume", "auto", "--run_dir", "new", "--steps", "4")
    assert again.code == 0, again.output[-4000:]  # what was accepted is the run now
    assert [line for line in again.output.splitlines() if line.startswith("resume:")] == [
        "resume: steps 3 -> 4", "resume: actor.optim.lr 1e-06 -> 0.001",
    ]  # fmt: skip


def test_choices_and_places_are_told_and_the_run_goes_on(folder):
    """A moved model and data, another dtype in config.json, more ranks; other held-out rows."""
    shutil.move(folder / "model", folder / "moved")
    shutil.move(folder / "rows.jsonl", folder / "same.jsonl")
    edit(folder / "moved/config.json", dtype="bfloat16", transformers_version="4.0")
    done = sft(folder, "--model", "moved", "--data.train", "same.jsonl", "--resume", "auto",
               "--steps", "3", "--data.eval", "same.jsonl", ranks=2)  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    assert [line for line in done.output.splitlines() if line.startswith("resume:")] == [
        "resume: ranks 1 -> 2", "resume: model 'model' -> 'moved'",
        "resume: data.train 'rows.jsonl' -> 'same.jsonl'", "resume: data.eval None -> 'same.jsonl'",
        "resume: steps 2 -> 3",
    ]  # fmt: skip
    assert [row["step"] for row in metrics_of(folder / "run")] == [1, 2, 3]


def test_other_rows_that_are_accepted_begin_a_new_epoch(folder):
    with Path(folder, "rows.jsonl").open("a") as file:
        file.write('{"prompt": "7+1=", "response": "8"}\n')
    args = ("--resume", "auto", "--steps", "3", "--checkpoint.accept_changes", "data")
    done = sft(folder, *args)
    assert done.code == 0, done.output[-4000:]
    assert "resume: a new epoch begins" in done.output
    [path] = folder.glob("run/checkpoints/step_00000003/run.json")
    order = json.loads(path.read_text())["order"]
    assert (order["epoch"], order["offset"], order["length"]) == (1, 6, 26)


def reseal(step):
    """Makes the manifest right after files were changed."""
    files = [f for f in step.rglob("*") if f.is_file() and f.name != "manifest.json"]
    digests = {str(f.relative_to(step)): checkpoint.digest(f) for f in files}
    (step / "manifest.json").write_text(json.dumps(digests))


def test_damage_is_no_reason_to_begin_anew(folder):
    """One after the other: a checkpoint of an earlier version with junk in the metrics, then
    nothing that is whole, which only a flag abandons."""
    step = folder / "run/checkpoints/step_00000002"
    run = json.loads((step / "run.json").read_text())
    assert run.pop("identity")["format"] == 1
    (step / "run.json").write_text(json.dumps(run))
    reseal(step)
    metrics = folder / "run/metrics.jsonl"
    first, second = metrics.read_text().splitlines()
    metrics.write_bytes(f"{first}\n\0\0\0\n{second}\n".encode())
    done = sft(folder, "--resume", "auto", "--steps", "3")
    assert done.code == 0, done.output[-4000:]
    assert "step_00000002 was saved by a version that did not note" in done.output
    assert "run/metrics.jsonl, line 2 is no row of metrics" in done.output
    assert [row["step"] for row in metrics_of(folder / "run")] == [1, 2, 3]
    for path in folder.glob("run/checkpoints/*/run.json"):
        path.write_text("{}")
    before = sorted(folder.joinpath("run").rglob("*"))
    done = sft(folder, "--resume", "auto", "--steps", "4")
    assert done.code == 2, done.output[-4000:]
    assert "none of the 3 checkpoints in run/checkpoints is whole: step_00000003: run.json has" in (
        done.output
    )
    assert sorted(folder.joinpath("run").rglob("*")) == before
    done = sft(folder, "--resume", "auto", "--steps", "1", "--checkpoint.on_damage", "anew")
    assert done.code == 0, done.output[-4000:]
    assert [row["step"] for row in metrics_of(folder / "run")] == [1]
    assert len(list(folder.glob("run/earlier-2/checkpoints/step_*"))) == 3


REWARD = """
BONUS = 0.01
def length(response):
    return BONUS * len(response)
"""


def test_another_reward_and_reference_are_refused(tmp_path, qwen3):
    folder = set_up(tmp_path, qwen3)
    Path(folder, "model").unlink()
    shutil.copytree(qwen3, folder / "model")
    text = CONFIG.replace("0.01 * len(response)", "length(response)")
    text = text.replace("\nconfig =", REWARD + "\nconfig =")
    Path(folder, "cfg.py").write_text(text)
    args = ("--config", "cfg.py", "--algo.kl_coef", "0.01", "--checkpoint.every_steps", "1")
    done = train(folder, 1, *args, "--steps", "1")
    assert done.code == 0, done.output[-4000:]
    Path(folder, "cfg.py").write_text(text.replace("BONUS = 0.01", "BONUS = 0.02"))
    weights = folder / "model/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-7] ^= 1
    weights.write_bytes(content)
    edit(folder / "model/generation_config.json", eos_token_id=[2, 5])
    done = train(folder, 1, *args, "--resume", "auto")
    assert done.code == 2, done.output[-4000:]
    for words in ("reward function: its code, or that of its helpers, ",
                  "ref: the weights, which this run does not train",
                  "model: eos_token_id of generation_config.json [2] -> [2, 5]",
                  "--checkpoint.accept_changes model,reward"):  # fmt: skip
        assert words in done.output, words
    args = (*args, "--checkpoint.accept_changes", "model,reward", "--rollout.n", "2")
    done = train(folder, 1, *args, "--resume", "auto")
    assert done.code == 0, done.output[-4000:]
    assert "resume: rollout.n 4 -> 2\n" in done.output
    assert done.output.count(" (accepted: reward)\n") == 1
