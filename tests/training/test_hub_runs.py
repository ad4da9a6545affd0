"""Whole runs whose model and data are names on a hub, as a user starts them.

The hub is a stand-in of its server (hub_servers.py); the clients are the real ones.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_servers import HuggingFace, Repo, files_of, serving
from huggingface_hub import metadata_load
from programs import CONFIG, ROOT, write_task
from ranks import free_port
from tiny_models import save_qwen3
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.ranks

CARD = b"---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: train.jsonl}\n"
CARD += b"  - {split: test, path: eval.jsonl}\n---\n"
NAMED = CONFIG.replace('model="model"', 'model="tiny/qwen"').replace(
    'train="train.jsonl", eval="eval.jsonl"', 'train="tiny/sums:main", eval="tiny/sums:main:test"'
).replace("every_steps=0", "every_steps=1")  # fmt: skip


def run(folder, *args, ranks=1, **env):
    """Runs a command of ours in a process of its own; (exit code, all of its output)."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port",
                str(free_port())]  # fmt: skip
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "HF_"))}
    env = kept | {"OMP_NUM_THREADS": "1", "HF_HUB_CACHE": str(folder / "cache"),
                  "HF_TOKEN_PATH": str(folder / "none"), "PYTHONPATH": path()} | env  # fmt: skip
    done = subprocess.run(
        [sys.executable, *(torchrun if ranks > 1 else []), "-m", *args], cwd=folder, env=env,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def path():
    return os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With cfg.py, whose model and data are on the hub alone."""
    folder = tmp_path_factory.mktemp("run")
    save_qwen3(folder / "local")
    write_task(folder)
    (folder / "cfg.py").write_text(NAMED)
    return folder


@pytest.fixture(scope="module")
def hub(folder):
    data = {name: (folder / name).read_bytes() for name in ("train.jsonl", "eval.jsonl")}
    repos = {
        "models/tiny/qwen": Repo({"main": files_of(folder / "local")}),
        "datasets/tiny/sums": Repo({"main": data | {"README.md": CARD}}),
    }
    with serving(HuggingFace(repos)) as hub:
        yield hub


def test_a_dry_run_says_what_a_run_downloads_and_downloads_no_weights(folder, hub):
    code, output = run(
        folder, "spmdrl.ppo", "--config", "cfg.py", "--dry-run", HF_ENDPOINT=hub.url,
        HF_HUB_CACHE=str(folder / "dry"),
    )  # fmt: skip
    assert code == 0, output[-3000:]
    size = (folder / "local/model.safetensors").stat().st_size
    assert f"model: tiny/qwen of {hub.url}, here {folder}/dry/models--tiny--qwen" in output
    assert (
        f"a run downloads its weights as well: 1 file, {size / 1e9:.3g} GB from {hub.url} to "
        f"{folder}/dry"
    ) in output
    assert f"data.train: tiny/sums:main of {hub.url}" in output
    assert "train data: 40 prompts" in output and "model='tiny/qwen@" in output
    assert not list(Path(folder, "dry").rglob("*.safetensors"))


def test_a_run_is_resumed_offline_and_exported_and_pushed(folder, hub):
    args = ("spmdrl.ppo", "--config", "cfg.py", "--keep_samples.last", "1")
    code, output = run(folder, *args, "--steps", "1", ranks=2, HF_ENDPOINT=hub.url)
    assert code == 0, output[-3000:]
    weights = [line for line in hub.asked if line.startswith("GET") and "safetensors" in line]
    assert len(weights) == 1
    text = (folder / "run/config.py").read_text()
    commit = text.partition("model='tiny/qwen@")[2][:40]
    assert len(commit) == 40 and "hf://datasets/tiny/sums@" in text and "/cache/" not in text
    before = len(hub.asked)
    code, output = run(folder, *args, "--resume", "auto", HF_HUB_OFFLINE="1")
    assert code == 0 and "1 step done" in output and len(hub.asked) == before, output[-3000:]
    assert "model ->" not in output  # it is the same commit
    for step in (1, 2):
        saved = json.loads((folder / f"run/checkpoints/step_{step:08}/run.json").read_text())
        assert saved["model"] == f"tiny/qwen@{commit}"
    replay = ("spmdrl.replay", "run", "--step", "2", "--algo.policy_loss", "gspo")
    code, output = run(folder, *replay, HF_HUB_OFFLINE="1")
    assert code == 0 and "with the edit:" in output, output[-3000:]

    push = ("spmdrl.export", "--checkpoint", "run/checkpoints/step_00000002", "--push_to_hub")
    pushing = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "good", "HF_HUB_DISABLE_XET": "1"}
    code, output = run(folder, *push, "tiny/trained", "--out", "out", **pushing)
    assert code == 0 and f"pushed it to {hub.url}/tiny/trained/commit/" in output, output[-3000:]
    pushed = hub.repos["models/tiny/trained"]
    assert pushed.private and pushed.messages == ["Upload of step 2 by spmdrl"]
    assert pushed.branches["main"] == files_of(folder / "out")
    AutoModelForCausalLM.from_pretrained(folder / "out")
    card = metadata_load(folder / "out/README.md")
    assert card["base_model"] == "tiny/qwen" and card["library_name"] == "transformers"
    shown = (folder / "out/README.md").read_text()
    assert f"[tiny/qwen](https://huggingface.co/tiny/qwen) at {commit}" in shown
    assert "advantages of `grpo`, policy loss of `ppo`" in shown and "| steps | 2 |" in shown
    code, output = run(folder, *push, "them/new", "--out", "wrong", **pushing)
    assert code == 2 and "denies access (403)" in output and "Traceback" not in output
    assert not (folder / "wrong").exists()  # it was told before the export
    (folder / "mine").mkdir()
    (folder / "mine/README.md").write_text("my notes")
    before = len(hub.asked)
    code, output = run(folder, *push, "tiny/more", "--out", "mine", **pushing)
    assert code == 2 and "--out mine is not empty" in output and len(hub.asked) == before, output
    assert (folder / "mine/README.md").read_text() == "my notes"
