"""Whole runs that train adapters: they resume, export, keep a reference, and sample ahead."""

import json
from pathlib import Path

import pytest
import torch
from programs import CONFIG, metrics_of, train, write_task

pytestmark = pytest.mark.ranks

LORA = CONFIG.replace(
    "    actor=TrainConfig(",
    '    algo=AlgoConfig(advantage="gae", kl_coef=0.01),\n'
    '    critic=TrainConfig(dtype="float32", micro_batch_tokens=128, lora=LoraConfig(rank=2)),\n'
    "    actor=TrainConfig(lora=LoraConfig(rank=4), ",
).replace('RolloutConfig(engine="hf"', 'RolloutConfig(static_split=True, engine="hf"')
SFT = """
from spmdrl.config import *

config = SftConfig(model="model", data=SftDataConfig(train="sft.jsonl", batch_size=8,
                                                    max_tokens=64), out="sft", steps=4,
                   run_dir="sft_run", trackers=(),
                   actor=TrainConfig(dtype="float32", lora=LoraConfig(rank=3, use_dora=True),
                                     optim=OptimConfig(lr=1e-2)))
"""
SAVING = ("--checkpoint.every_steps", "1", "--checkpoint.keep", "9")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, qwen3):
    path = tmp_path_factory.mktemp("lora_runs")
    Path(path, "model").symlink_to(qwen3)
    write_task(path)
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(6) for b in range(6)]
    Path(path, "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path(path, "cfg.py").write_text(LORA)
    Path(path, "sft.py").write_text(SFT)
    return path


def run(folder, name, ranks, *args, **kwargs):
    config = "sft.py" if kwargs else "cfg.py"
    where = () if kwargs else ("--run_dir", name)
    done = train(folder, ranks, "--config", config, *where, *args, **kwargs)
    assert done.code == 0, done.output[-4000:]
    return metrics_of(folder / name)


@pytest.fixture(scope="module")
def whole(folder):
    return run(folder, "whole", 2, *SAVING)


def test_a_run_resumes_bit_for_bit(folder, whole):
    again = run(folder, "again", 2, "--resume", "whole/checkpoints/step_00000001")
    assert again[-1]["step"] == 2
    assert again[-1] == whole[-1]
    assert whole[-1]["actor/ref_kl"] > 0


@pytest.mark.megatron
def test_the_reference_of_megatrons_actor_is_its_base_too(folder, whole):
    rows = run(folder, "megatron", 2, "--actor.engine", "megatron", "--actor.tensor_parallel", "2")
    for got, want in zip(rows[1:], whole[1:], strict=True):
        for name in ("reward/mean", "actor/ref_kl", "actor/loss", "critic/loss"):
            assert got[name] == pytest.approx(want[name], rel=1e-3, abs=1e-6), name


def test_export_gives_the_model_and_what_peft_loads(folder, whole):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from spmdrl.engines.hf_export import export, export_adapter

    checkpoint = folder / "whole/checkpoints/step_00000002"
    export(checkpoint, folder / "merged", "float32")
    export_adapter(checkpoint, folder / "adapter", "")
    (folder / "full").mkdir()
    (folder / "full" / "adapter_model.safetensors").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"cannot write \S+/full, where .*No space left"):
        export_adapter(checkpoint, folder / "full", "")
    ids = torch.randint(4, 60, (3, 13))
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float64)
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    before = base(ids).logits
    adapted = PeftModel.from_pretrained(base, folder / "adapter").double().eval()
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=0, atol=1e-5)
    assert (before - merged(ids).logits).abs().max() > 1e-3


def test_an_evaluation_alone_is_that_of_the_run(folder, whole):
    done = train(
        folder, 2, "--config", "cfg.py", "--checkpoint", "whole/checkpoints/step_00000002",
        program="spmdrl.evaluate",
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    got = metrics_of(folder / "run_eval")[0]
    assert got["eval/reward"] == pytest.approx(whole[-1]["eval/reward"])


@pytest.mark.vllm
def test_vllm_takes_adapters_while_it_samples_ahead(folder):
    rows = run(
        folder, "ahead", 2, "--placement", '{"actor":"0","rollout":"1"}', "--async_steps", "1",
        "--rollout.engine", "vllm", "--weights.lora", "adapter", "--weights.check", "True",
        "--algo.correction.level", "token", "--steps", "3",
    )  # fmt: skip
    assert rows[-1]["staleness/max"] <= 1 and rows[-1]["step"] == 3


def test_sft_writes_the_model_and_its_adapter(folder):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    one = run(folder, "sft_run", 1, program="spmdrl.sft")
    rows = run(folder, "sft_run", 2, program="spmdrl.sft")
    assert rows[-1]["sft/loss"] < rows[0]["sft/loss"]
    for row, want in zip(rows, one, strict=True):
        assert row["sft/loss"] == pytest.approx(want["sft/loss"], rel=1e-6)
    ids = torch.randint(4, 60, (3, 13))
    merged = AutoModelForCausalLM.from_pretrained(folder / "sft", dtype=torch.float64)
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    adapted = PeftModel.from_pretrained(base, folder / "sft/adapter").double().eval()
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=0, atol=1e-5)
