"""Compares spmdrl.preference with TRL's DPOTrainer: loss and gradient norm of the same rows.

    pip install trl datasets accelerate        # in an environment of their own, beside spmdrl
    python examples/bench/preference_trl.py [--out runs/preference_trl] [--rows 16]

Both take the first step from one model with random weights and the same rows, in float32 on the
CPU, from prompts and answers that are strings: behind an answer both put EOS. The policy is not the
reference: it is that model with noise on its weights, and so the losses are not those of the start.
The command prints both numbers of each loss, and fails where they differ by more than 1e-4 of
their size.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
BETA = 0.3
TOLERANCE = 1e-4
CONFIG = """
from spmdrl.config import *

config = PreferenceTrainingConfig(
    model="{folder}/policy",
    data=AnswerDataConfig("{folder}/rows.jsonl", batch_size={rows}, max_tokens=64, shuffle=False),
    out="{folder}/out", run_dir="{folder}/run", steps=1,
    preference=PreferenceConfig("{loss}", {args}, ld_alpha={ld_alpha}),
    actor=TrainConfig(dtype="float32", micro_batch_tokens=100, optim=OptimConfig(lr=0.0)),
    checkpoint=CheckpointConfig(every_steps=0), trackers=(),
)
"""
# name of ours, options of ours, LD-DPO's alpha, options of TRL's
CASES: dict[str, tuple[str, dict[str, Any], float | None, dict[str, Any]]] = {
    "dpo": ("dpo", {}, None, {"loss_type": "sigmoid"}),
    "dpo, ld_alpha": ("dpo", {}, 0.4, {"loss_type": "sigmoid", "ld_alpha": 0.4}),
    "dpo, length_normalized": (
        "dpo", {"length_normalized": True}, None, {"loss_type": "sigmoid_norm"},
    ),
    "ipo": ("ipo", {}, None, {"loss_type": "ipo"}),
}  # fmt: skip


def write_task(folder: Path, rows: int) -> None:
    """The reference, the policy, and sums as strings with a better and a worse answer."""
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    script = ROOT / "examples/arithmetic/make_assets.py"
    subprocess.run([sys.executable, str(script), "--out", str(folder / "task")], check=True)
    torch.manual_seed(1)
    for name, noise in (("reference", 0.0), ("policy", 0.02)):
        model = AutoModelForCausalLM.from_pretrained(folder / "task/model", dtype=torch.float32)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(noise * torch.randn_like(weight))
        model.save_pretrained(folder / name)
        for file in (folder / "task/model").glob("*token*"):
            (folder / name / file.name).write_bytes(file.read_bytes())
    draw = random.Random(0)
    sums = [(draw.randrange(50), draw.randrange(50)) for _ in range(rows)]
    made = [
        {"prompt": f"{a:02}+{b:02}=", "chosen": f"{a + b}",
         "rejected": f"{draw.randrange(10 ** draw.randint(1, 5))}x".rstrip("x") + "+"}
        for a, b in sums
    ]  # fmt: skip
    Path(folder, "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))


def ours(folder: Path, rows: int, case: str) -> dict[str, float]:
    """Loss and gradient norm of the first step of the program.

    The program's reference is the model that it starts from. So the log-probabilities that it kept
    are replaced by those of another model: it is run with that model first.
    """
    loss, args, ld_alpha, _ = CASES[case]
    text = CONFIG.format(
        folder=folder, rows=rows, loss=loss, args={"beta": BETA, **args}, ld_alpha=ld_alpha
    )
    Path(folder, "cfg.py").write_text(text)
    command = [sys.executable, "-m", "spmdrl.preference", "--config", str(folder / "cfg.py")]
    for model in ("reference", "policy"):
        run_dir = folder / f"run_{model}_{list(CASES).index(case)}"
        subprocess.run(
            [*command, "--model", str(folder / model), "--run_dir", str(run_dir)],
            check=True, capture_output=True,
        )  # fmt: skip
        if model == "reference":
            of_reference = next(run_dir.glob("reference/train-*/*.npy")).read_bytes()
    for part in run_dir.glob("reference/train-*/*.npy"):
        part.write_bytes(of_reference)
    subprocess.run(
        [*command, "--model", str(folder / "policy"), "--run_dir", str(run_dir)],
        check=True, capture_output=True,
    )  # fmt: skip
    row = json.loads(Path(run_dir, "metrics.jsonl").read_text().splitlines()[-1])
    return {name: row[f"preference/{name}"] for name in ("loss", "grad_norm")}


def trl(folder: Path, rows: int, case: str) -> dict[str, float]:
    """The same of TRL's trainer."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    models = [
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        for name in ("policy", "reference")
    ]
    asked = DPOConfig(
        output_dir=str(folder / "trl"), beta=BETA, per_device_train_batch_size=rows, max_steps=1,
        learning_rate=0.0, max_grad_norm=1e9, logging_steps=1, report_to=[], use_cpu=True,
        max_length=None, gradient_checkpointing=False, bf16=False, disable_tqdm=True,
        save_strategy="no", **CASES[case][3],
    )  # fmt: skip
    trainer = DPOTrainer(
        model=models[0], ref_model=models[1], args=asked,
        train_dataset=load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(folder / "policy"),
    )  # fmt: skip
    trainer.train()
    row = next(row for row in trainer.state.log_history if "loss" in row)
    return {name: float(row[name]) for name in ("loss", "grad_norm")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/preference_trl"))
    parser.add_argument("--rows", type=int, default=16)
    given = parser.parse_args()
    folder = given.out.resolve()
    write_task(folder, given.rows)
    worst = 0.0
    for case in CASES:
        here, there = (by(folder, given.rows, case) for by in (ours, trl))
        for name, value in here.items():
            apart = abs(value - there[name]) / abs(there[name])
            worst = max(worst, apart)
            print(f"{case:24} {name:10} spmdrl {value:.7f}  TRL {there[name]:.7f}  {apart:.1e}")
    if worst > TOLERANCE:
        sys.exit(f"they differ by {worst:.1e} of their size, which is above {TOLERANCE:g}")


if __name__ == "__main__":
    main()
