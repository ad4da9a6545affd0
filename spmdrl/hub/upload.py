"""Pushes an exported model to a hub, with a model card that says what it is. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from spmdrl.cli.hub_names import MODEL, MODELSCOPE, HubName
from spmdrl.config import PAIR_LOSSES
from spmdrl.hub import huggingface, modelscope

CARD = """---
{metadata}---

# {title}

{sentence} It was trained with [spmdrl](https://github.com/spmdrl/spmdrl).

| | |
|---|---|
{rows}
"""


def open_repository(name: HubName, private: bool) -> None:
    """Makes sure, before anything takes time, that a push can succeed: creates the repository where
    there is none. Raises ConfigError.
    """
    hub = modelscope if name.on_modelscope else huggingface
    hub.open_repository(name, private)


def push_export(name: HubName, checkpoint: Path, folder: Path, message: str = "") -> str:
    """Writes the card of an exported folder and uploads it. Returns the address of what was pushed.
    Raises ConfigError.
    """
    saved = json.loads(Path(checkpoint, "run.json").read_text())
    # of several adapters each has a folder
    is_adapter = any(any(Path(folder).glob(f"{p}adapter_config.json")) for p in ("", "*/"))
    Path(folder, "README.md").write_text(model_card(name.repo, saved, is_adapter))
    hub = modelscope if name.on_modelscope else huggingface
    return hub.push(name, folder, message or f"Upload of step {saved['step']} by spmdrl")


def model_card(repo: str, saved: Mapping[str, Any], is_adapter: bool) -> str:
    """Returns the text of README.md. saved: run.json of the checkpoint.

    A base model that is a folder of the user's is told by its last part alone. One that was
    downloaded has a commit, or its hub, in its name (cli/hub_names.py).
    """
    settings = {key: value.strip("'\"") for key, value in saved["identity"]["config"].items()}
    method, tag = method_of(settings)
    given, on_modelscope = settings["model"], settings["model"].startswith(MODELSCOPE)
    found = MODEL.fullmatch(given.removeprefix(MODELSCOPE))
    base = found if found and (on_modelscope or found["revision"]) else None
    metadata: dict[str, Any] = {"base_model": base["repo"]} if base else {}
    metadata |= {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-classification" if tag == "reward-model" else "text-generation",
    }
    shown = f"`{Path(given).name}`"
    if base is not None:
        at = f" at {base['revision']}" if base["revision"] else ""
        place = "https://modelscope.cn/models" if on_modelscope else "https://huggingface.co"
        shown = f"[{base['repo']}]({place}/{base['repo']}){at}"
    rows = {
        "base model": shown,
        "algorithm": method,
        "steps": f"{saved['step']:,}",
        "library": f"spmdrl {version('spmdrl')}",
    }
    what = "A LoRA adapter for" if is_adapter else "A model that starts from"
    lines = [f"{key}: {value}\n" for key, value in metadata.items()]
    lines.append(f"tags:\n- spmdrl\n- {tag}\n")
    return CARD.format(
        metadata="".join(lines), title=repo.partition("/")[2], sentence=f"{what} {shown}.",
        rows="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
    )  # fmt: skip


def method_of(settings: Mapping[str, str]) -> tuple[str, str]:
    """Returns how a run trained, in words and as a tag, by the settings of its config."""
    if "data.chosen_key" in settings:
        return "a reward model, trained on preferences", "reward-model"
    if "algo.advantage" not in settings:
        return "supervised fine-tuning", "sft"
    advantage, loss = settings["algo.advantage"], settings["algo.policy_loss"]
    if loss in PAIR_LOSSES:
        words = f"reinforcement learning, the loss `{loss}` of pairs of its own answers"
        return words, "reinforcement-learning"
    words = f"reinforcement learning, advantages of `{advantage}`, policy loss of `{loss}`"
    return words, "reinforcement-learning"
