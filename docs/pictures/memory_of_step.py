"""Draws docs/pictures/memory_of_step.svg: what lies on a GPU in each phase of a step.

    python docs/pictures/memory_of_step.py

The numbers are those that `--dry-run --ranks 8 --gpu_gib 80` prints for
configs/qwen3_8b_math_grpo_8gpu.py, with a critic and a reference beside it.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import matplotlib
from matplotlib import pyplot

from spmdrl.cli.arguments import load_config
from spmdrl.config import PpoConfig
from spmdrl.training.checks.memory_plan import memory_plan
from spmdrl.training.checks.timeline import PARTS, Phase

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "qwen3_8b_math_grpo_8gpu.py"
MODEL = {  # what the plan needs of Qwen3-8B's published config.json
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "tie_word_embeddings": False, "eos_token_id": 151645,
}  # fmt: skip
GPUS, GPU_GIB = 8, 80.0
COLOURS = dict(zip(PARTS, (
    "#4477aa", "#882255", "#228833", "#ccbb44", "#66ccee", "#cc6633", "#bbbbbb", "#aa3377",
    "#222222",
), strict=True))  # fmt: skip


def phases_of_plan() -> list[Phase]:
    """Returns the phases of the fullest rank, with a critic and a reference in the run."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        plain = load_config(str(CONFIG), PpoConfig, {"model": folder})
        role = replace(plain.actor, offload_params=True)
        algo = replace(plain.algo, advantage="gae", kl_coef=0.001)
        config = replace(plain, algo=algo, actor=role, critic=role, ref=role)
        return list(memory_plan(config, GPUS, gpu_gib=GPU_GIB).fullest.phases)


def main() -> None:
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "memory_of_step"  # the same file from every run
    phases = phases_of_plan()
    figure, axes = pyplot.subplots(figsize=(10, 4.6))
    names = [phase.name for phase in phases]
    below = [0.0] * len(phases)
    for part in PARTS:
        sizes = [phase.parts.get(part, 0.0) for phase in phases]
        if max(sizes) < 0.005:
            continue
        axes.bar(names, sizes, bottom=below, color=COLOURS[part], width=0.7, label=part)
        below = [low + size for low, size in zip(below, sizes, strict=True)]
    for place, total in enumerate(below):
        axes.text(place, total + 0.6, f"{total:.1f}", ha="center", size=9)
    axes.set_ylabel("GiB on the GPU")
    axes.set_ylim(0, max(below) * 1.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=4, fontsize=9, loc="upper right")
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    main()
