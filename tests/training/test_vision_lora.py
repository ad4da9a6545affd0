"""Adapters on a model that sees images: its tower included, or frozen as it is."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from programs import train
from transformers import AutoModelForImageTextToText
from vision_task import CLOSE, SAVE_EACH_STEP, run_task, save_task

pytestmark = pytest.mark.ranks

LORA = ("--actor.lora.rank", "4", "--actor.optim.lr", "0.01")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_task(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def alone(folder):
    return run_task(folder, "lora1", 1, *SAVE_EACH_STEP, *LORA)


def test_numbers_do_not_depend_on_ranks(folder, alone):
    rows = run_task(folder, "lora2", 2, *SAVE_EACH_STEP, *LORA, "--actor.micro_batch_tokens", "40",
                    "--actor.activation_checkpointing", "True")  # fmt: skip
    for one, other in zip(rows, alone, strict=True):
        one["balance/imbalance"] = other["balance/imbalance"]  # of as many ranks
        assert one == pytest.approx(other, **CLOSE)
        assert one["actor/grad_norm"] > 0


@pytest.mark.vllm
def test_the_engine_samples_from_what_is_trained(folder):
    """vLLM's weights are compared bit by bit after each update; the reference is the base."""
    rows = run_task(folder, "lora_vllm", 2, *LORA, "--rollout.engine", "vllm",
                    "--weights.check", "True", "--model", "qwen3",
                    "--algo.kl_coef", "0.1")  # fmt: skip
    assert all(row["actor/logprob_diff_max"] < 1e-5 for row in rows[1:])
    assert rows[1]["actor/ref_kl"] == pytest.approx(0, abs=1e-6) and rows[2]["actor/ref_kl"] > 1e-6


@pytest.mark.parametrize("frozen", [False, True])
def test_the_adapter_is_peft_s(folder, frozen):
    name = f"adapter_{frozen}"
    run_task(folder, name, 2, *LORA, "--checkpoint.every_steps", "2", "--data.eval", "None",
             "--actor.freeze_vision", str(frozen))  # fmt: skip
    checkpoint = str(folder / name / "checkpoints/step_00000002")
    for out, more in (("whole", ()), ("adapter", ("--adapter",))):
        done = train(folder, 1, "--checkpoint", checkpoint, "--out", f"{name}/{out}", *more,
                     program="spmdrl.export")  # fmt: skip
        assert done.code == 0, done.output[-3000:]
    base, whole = (
        AutoModelForImageTextToText.from_pretrained(folder / path, dtype=torch.float32)
        for path in ("model", f"{name}/whole")
    )
    before = {key: value.clone() for key, value in base.state_dict().items()}
    merged = PeftModel.from_pretrained(base, str(folder / name / "adapter")).merge_and_unload()
    moved = 0
    for key, value in merged.state_dict().items():
        torch.testing.assert_close(value, whole.state_dict()[key], rtol=1e-5, atol=1e-6)
        moves = not torch.equal(value, before[key])
        assert not (moves and frozen and "visual" in key), key
        moved += moves and "visual" in key
    assert (moved > 0) != frozen


def test_an_adapter_goes_on_where_it_stopped(folder, alone):
    run_task(folder, "lora_half", 2, *SAVE_EACH_STEP, *LORA, "--steps", "1")
    rows = run_task(
        folder, "lora_half", 1, *SAVE_EACH_STEP, *LORA, "--steps", "2", "--resume", "auto"
    )
    assert rows[-1]["actor/loss"] == pytest.approx(alone[-1]["actor/loss"], **CLOSE)


def test_an_adapter_by_itself_is_not_sent(folder):
    done = train(folder, 1, "--config", "cfg.py", *LORA, "--weights.lora", "adapter",
                 "--rollout.engine", "vllm")  # fmt: skip
    assert done.code == 2
    assert "weights.lora='adapter': not with 'qwen2_5_vl'" in done.output
