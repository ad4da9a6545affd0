"""What a run writes while it runs: metrics.jsonl, tensorboard, samples, and lines on the terminal."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from spmdrl.types import Sample


class RunLog:
    """Rank 0's record of a run; on other ranks (`active` False) every method does nothing.

    Steps after `resume_step` that an earlier run logged are cut from metrics.jsonl, so that no step
    stands there twice.
    """

    def __init__(
        self, run_dir: Path, active: bool, total_steps: int, tensorboard: bool, resume_step: int = 0
    ) -> None:
        self.active, self.run_dir, self.total_steps = active, run_dir, total_steps
        self.start = time.monotonic()
        self.first_step = resume_step
        self.step_label = ""
        self.live = active and sys.stdout.isatty()
        self.writer: Any = None
        if not active:
            return
        Path(run_dir, "samples").mkdir(parents=True, exist_ok=True)
        path = Path(run_dir, "metrics.jsonl")
        kept = []
        if path.exists() and resume_step:
            kept = [row for row in path.open() if json.loads(row)["step"] <= resume_step]
        path.write_text("".join(kept))
        self.metrics = path.open("a")
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(run_dir), purge_step=resume_step + 1)

    def phase(self, name: str) -> None:
        """Shows the running phase on a terminal."""
        if self.live:
            print(f"\r\033[K{self.step_label} {name} ...", end="", flush=True)

    def begin_step(self, step: int) -> None:
        self.step_label = f"step {step}/{self.total_steps}"

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """One line of metrics.jsonl, and tensorboard scalars."""
        if not self.active:
            return
        self.metrics.write(json.dumps({"step": step, **metrics}) + "\n")
        self.metrics.flush()
        if self.writer:
            for name, value in metrics.items():
                self.writer.add_scalar(name, value, step)
            self.writer.flush()

    def line(self, text: str) -> None:
        if self.active:
            print(f"\r\033[K{text}" if self.live else text, flush=True)

    def step_line(self, step: int, metrics: dict[str, float], show: tuple[str, ...]) -> None:
        """`show` metrics, then the step's time by phase, tokens/s and the time that is left."""
        if not self.active:
            return
        per_step = (time.monotonic() - self.start) / (step - self.first_step)
        left = int(per_step * (self.total_steps - step))
        seconds = {
            k.removeprefix("time/").removesuffix("_s"): v
            for k, v in metrics.items()
            if k.startswith("time/") and k != "time/step_s" and v >= 0.005
        }
        parts = " ".join(f"{name} {s:.2f}" for name, s in seconds.items())
        shown = " | ".join(f"{k.split('/')[0]} {metrics[k]:.4g}" if k.endswith("/mean")
                           else f"{k.split('/')[-1]} {metrics[k]:.4g}"
                           for k in show if k in metrics)  # fmt: skip
        self.line(
            f"step {step}/{self.total_steps} | {shown} | {metrics['time/step_s']:.2f} s ({parts}) | "
            f"{metrics['throughput/tokens_per_s']:,.0f} tok/s | {left // 60}:{left % 60:02d} left"
        )

    def close(self) -> None:
        if self.active:
            self.metrics.close()
            if self.writer:
                self.writer.close()


def write_samples(path: Path, samples: list[Sample]) -> None:
    """Appends readable rows; every invalid sample's reason in full."""
    with path.open("a") as f:
        for s in samples:
            row = {
                "prompt_id": s.prompt.id, "sample": s.index, "data_source": s.prompt.data_source,
                "prompt": s.prompt.text, "response": s.response,
                "ground_truth": s.prompt.ground_truth, "reward": s.reward, "invalid": s.invalid,
                "finish_reason": s.finish_reason, "response_tokens": len(s.response_ids),
                **s.reward_info,
            }  # fmt: skip
            f.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
