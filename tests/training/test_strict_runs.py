"""A whole strict run: equal in every bit in each step, on one rank and on two."""

import json

import pytest
from programs import CONFIG, metrics_of, train, write_task
from tiny_megatron_models import save_model
from tiny_models import CHARS, save_qwen3, save_tokenizer

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]

SETTINGS = """
from dataclasses import replace
config = replace(
    config, strict=True, steps=2, log_samples=1000,
    data=replace(config.data, eval=None, prompts_per_step=4),
    rollout=replace(config.rollout, engine="vllm", temperature=0.8, max_tokens=24),
)
"""
BROKEN = """
from spmdrl.rollout.vllm import strict as vllm_strict
vllm_strict.make_strict = lambda engine: None  # the engine stays as it is
"""


def samples_of(run):
    rows = [json.loads(line) for line in (run / "samples" / "step_1.jsonl").open()]
    return sorted((row["prompt_id"], row["sample"], row["response"]) for row in rows)


def test_strict_runs(tmp_path):
    """GRPO with weights in two shards, few sequences at once and small micro-batches; the same on
    one rank with none of it; a mixture of experts, whose layers are computed again for the backward
    pass; and an engine that is not what the run was promised."""
    (tmp_path / "good.py").write_text(CONFIG + SETTINGS)
    (tmp_path / "bad.py").write_text(CONFIG + SETTINGS + BROKEN)
    write_task(tmp_path)
    save_qwen3(tmp_path / "model")
    save_model(
        "qwen3_moe normalised", tmp_path / "experts", num_experts=12, vocab_size=len(CHARS),
        eos_token_id=2, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    save_tokenizer(tmp_path / "experts")
    narrow = ("--rollout.max_num_seqs", 3, "--actor.micro_batch_tokens", 100)
    runs = {
        "two": (2, "good.py", *narrow),
        "one": (1, "good.py"),
        "experts": (
            2,
            "good.py",
            *narrow,
            "--model",
            "experts",
            "--actor.activation_checkpointing",
            True,
        ),
        "bad": (1, "bad.py", "--steps", 1),
    }
    done = {}
    for name, (ranks, config, *args) in runs.items():
        args = ["--config", config, "--run_dir", name, *args]
        done[name] = train(tmp_path, ranks, *args, timeout_s=300)
    for name in ("two", "one", "experts"):
        assert done[name].code == 0, done[name].output[-6000:]
        rows = metrics_of(tmp_path / name)
        assert [row["actor/logprob_diff_max"] for row in rows] == [0.0] * 2
        assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert samples_of(tmp_path / "two") == samples_of(tmp_path / "one")
    assert done["bad"].code != 0
    assert "in step 1 a logprob of the trainer differs" in done["bad"].output
