"""What a GRPO step takes on GPUs, phase by phase: python examples/bench/step.py --shape 0.6b

A run of spmdrl.ppo under torchrun on all GPUs of this host (`--ranks` for fewer), vLLM and trainer
on the same ranks, in bfloat16: `--prompts` questions of `--question` tokens, `--n` answers to each
of exactly `--answer` tokens, one optimizer step; a Qwen3 of the given shape with random weights,
whose times are those of real ones. A JSON line: medians over the steps but the first two of every
phase in seconds, answer tokens per second and GPU of the rollout, tokens per second and GPU of the
update, its model FLOP/s as a share of what the GPUs can do (spmdrl/training/logs/flops.py), the
most memory that the process had from PyTorch, vLLM's while it sleeps included, and how far engine
and trainer were apart in log-probability.
Further arguments are options of spmdrl.ppo: --actor.compile True. With `--profile.steps 2
--profile_to FOLDER` torch.profiler's trace of a step that is not counted goes there, and the line
says what the GPU was busy with in it.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import fire
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

DROPPED = 2
LIMIT_S = 1800
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
             "vocab_size": 1024},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
           "num_attention_heads": 32},
}  # fmt: skip
USUAL = {"vocab_size": 151936, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
         "tie_word_embeddings": True, "max_position_embeddings": 32768, "eos_token_id": 2,
         "pad_token_id": 0, "bos_token_id": 1}  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CONFIG = """
from spmdrl.config import *

def vowels(response):
    return sum(response.count(v) for v in "aeiou") / 10

config = PpoConfig(
    model="model", reward=vowels, run_dir="run", steps={steps}, eval_every=0,
    data=DataConfig(train="train.jsonl", prompts_per_step={prompts}, max_prompt_tokens={question}),
    rollout=RolloutConfig(n={n}, max_tokens={answer}, ignore_eos=True, max_num_seqs=512),
    actor=TrainConfig(
        micro_batch_tokens=16384, activation_checkpointing=False, optim=OptimConfig(lr=1e-6)),
    checkpoint=CheckpointConfig(every_steps=0), trackers=(), log_samples=0,
)
"""


def save_model(folder: Path, shape: str) -> None:
    config = Qwen3Config(**USUAL | SHAPES[shape])
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(folder)


def write_prompts(path: Path, count: int, length: int) -> None:
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            asked = "".join(draw.choices(LETTERS, k=length))
            row = {"data_source": "letters", "prompt": [{"role": "user", "content": asked}],
                   "reward_model": {"style": "rule", "ground_truth": ""}}  # fmt: skip
            file.write(json.dumps(row) + "\n")


def busy_with(trace: Path) -> dict[str, Any]:
    """Seconds in which kernels of a trace ran, added up, and the shares of the five that took most;
    their names are cut off at 60 characters."""
    took: Counter[str] = Counter()
    with gzip.open(trace, "rt") as file:
        for event in json.load(file)["traceEvents"]:
            if event.get("cat") == "kernel":
                took[event["name"][:60]] += event["dur"]
    total = sum(took.values())
    shares = {name: round(us / total, 3) for name, us in took.most_common(5)}
    return {"kernels_s": round(total / 1e6, 3), "shares": shares}


def main(
    *options: str, shape: str = "0.6b", ranks: int | None = None, prompts: int = 64,
    question: int = 256, n: int = 8, answer: int = 512, steps: int = 6,
    log: str | None = None, profile_to: str | None = None, **more: Any,
) -> None:  # fmt: skip
    """log: file for the run's output. profile_to: folder for the traces of profiled steps."""
    ranks = ranks or max(1, torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as own:
        folder = Path(own)
        output = Path(log).resolve() if log else folder / "log"
        save_model(folder / "model", shape)
        write_prompts(folder / "train.jsonl", prompts * steps, question)
        text = CONFIG.format(steps=steps, prompts=prompts, question=question, n=n, answer=answer)
        Path(folder, "cfg.py").write_text(text)
        root = Path(__file__).resolve().parents[2]
        path = f"{root}:{root / 'kernels'}:{os.environ.get('PYTHONPATH', '')}"
        given = [word for name, value in more.items() for word in (f"--{name}", str(value))]
        done = subprocess.run(
            [sys.executable, "-m", "spmdrl.launch", "--standalone", "--nproc-per-node",
             str(ranks), "-m", "spmdrl.ppo", "--config", "cfg.py", *options, *given],
            cwd=folder, timeout=LIMIT_S, stdout=output.open("w"), stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        if done.returncode:
            sys.exit(output.read_text()[-8000:])
        rows = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").open()]
        traces = sorted(Path(folder, "run").glob("profile/*.json.gz")) if profile_to else []
        busy = busy_with(traces[0]) if traces else None
        for trace in traces:
            Path(str(profile_to)).mkdir(parents=True, exist_ok=True)
            shutil.copy(trace, str(profile_to))
    rows = [row for row in rows if row["step"] > DROPPED]

    def middle(name: str) -> float:
        return median(row[name] for row in rows)

    tokens = prompts * n * (question + answer)
    update_s, rollout_s = middle("time/update_actor_s"), middle("time/rollout_s")
    print(json.dumps({
        "shape": shape, "ranks": ranks, "device": torch.cuda.get_device_name()
        if torch.cuda.is_available() else "cpu", "options": {**more}, "prompts": prompts, "n": n,
        "question": question, "answer": answer, "steps": len(rows),
        **{name: round(middle(name), 3) for name in sorted(rows[0]) if name.startswith("time/")},
        "rollout_tokens_per_s": round(prompts * n * answer / rollout_s / ranks),
        "update_tokens_per_s": round(tokens / update_s / ranks),
        **{name: round(middle(name), 5) for name in
           ("throughput/mfu", "memory/gpu_peak_gib", "actor/logprob_diff_mean",
            "actor/logprob_diff_max") if name in rows[0]},
        **({} if busy is None else {"profile": busy}),
    }), flush=True)  # fmt: skip


if __name__ == "__main__":
    fire.Fire(main)
