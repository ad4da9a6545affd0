"""What the benchmark runs: the options of spmdrl, and the constants of a peer's driver.

add2      32 prompts x 8 answers of exactly 64 tokens
natural   the same prompts, answers that end with EOS, of 256 tokens at most
short     prompts of 60 tokens, answers of exactly 10
agent     add2 by an agent that asks for each answer at the engine's endpoint; it has no peer
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

ASSETS = Path("runs/add2")
DRIVER = ("bench_peers.py", "measure.py", "trl_grpo.py")  # of the peer, beside venv and model


@dataclass(frozen=True)
class Workload:
    prompts: str  # file in ASSETS
    answer: int  # tokens, at most
    longest: int  # tokens of prompt and answer together
    ends: bool  # whether EOS ends an answer
    lr: float = 1e-4  # next to 0 where lengths are to stay those of the first policy
    config: str = "config.py"  # beside this file

    def options(self) -> list[str]:
        """Of spmdrl.ppo, beside the config's. A micro-batch has 64 sequences of the longest, of
        natural lengths as many tokens as add2's. Ranks hold replicas of the weights, as peers' do.
        """
        tokens = 64 * (70 if self.ends else self.longest)
        return [
            "--data.train", str(ASSETS / self.prompts), "--rollout.max_tokens", str(self.answer),
            "--data.max_prompt_tokens", str(self.longest - self.answer),
            "--rollout.ignore_eos", str(not self.ends), "--actor.micro_batch_tokens", str(tokens),
            "--actor.optim.lr", str(self.lr), "--actor.fsdp", "1",
        ]  # fmt: skip

    def trl_options(self, correction: bool) -> dict[str, object]:
        """Of GRPOConfig, beside the driver's."""
        return {
            "generation_kwargs": {} if self.ends else {"ignore_eos": True},
            "vllm_max_model_length": self.longest + 64,
            "vllm_importance_sampling_correction": correction,
        }


WORKLOADS = {
    "add2": Workload("train.parquet", answer=64, longest=70, ends=False),
    "natural": Workload("train.parquet", answer=256, longest=262, ends=True, lr=1e-12),
    "short": Workload("long_prompts.parquet", answer=10, longest=70, ends=False),
    "agent": Workload("train.parquet", answer=64, longest=70, ends=False, config="agent.py"),
}
# TRL's own correction: ratios of whole sequences, those above 3 masked. Its options here; what it
# costs does not depend on the bounds.
CORRECTIONS = {
    "off": [],
    "on": ["--algo.correction.level", "sequence", "--algo.correction.mode", "mask",
           "--algo.correction.low", "1e-6", "--algo.correction.high", "3.0"],
}  # fmt: skip


def peer_folder(peers: Path, name: str, prompts: list[tuple[str, str]]) -> Path:
    """A copy of a peer's driver with the constants of a workload. prompts: (prompt, answer)."""
    workload, folder = WORKLOADS[name], peers / name
    folder.mkdir(exist_ok=True)
    for part in DRIVER:
        shutil.copy(peers / part, folder / part)
    for part in ("venv", "model"):
        if not Path(folder, part).exists():
            Path(folder, part).symlink_to(peers / part)
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in prompts]
    Path(folder, "prompts.json").write_text(json.dumps(rows))
    own = Path(peers, "workload.py").read_text()
    changed = f"""
RESP, LR = {workload.answer}, {workload.lr}
def rows():
    import json
    return json.load(open({str(folder / "prompts.json")!r}))
"""
    Path(folder, "workload.py").write_text(own + changed)
    return folder
