"""Qwen3.5 by engine megatron: a run of GRPO with vLLM, from files with a vision tower; refusals."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_megatron_models as tiny
import torch
from programs import CONFIG, metrics_of, train, write_task

from spmdrl.config import ConfigError
from spmdrl.engines.hf_export import export
from spmdrl.engines.megatron.layout import Degrees, check_layout

sys.path.append(str(Path(__file__).parents[2] / "models"))  # families.py

RUN = (
    CONFIG.replace('engine="hf", n=4', 'engine="vllm", n=4')
    .replace('max_tokens=8, dtype="float32"', 'max_tokens=8, dtype="bfloat16"')
    .replace(
        'actor=TrainConfig(dtype="float32",',
        "weights=WeightsConfig(check=True),\n"
        '    algo=AlgoConfig(correction=CorrectionConfig(level="token")),\n'
        '    actor=TrainConfig(dtype="float32", '
        'engine="megatron", tensor_parallel=2, sequence_parallel=True,',
    )
    .replace("every_steps=0", "every_steps=2")
)


@pytest.mark.ranks
@pytest.mark.vllm
@pytest.mark.megatron
def test_a_run_of_grpo_pushes_every_bit_and_exports_the_language_model(tmp_path: Path) -> None:
    from families import BY_KIND, save_tiny
    from transformers import AutoModelForCausalLM

    save_tiny(BY_KIND["qwen3_5"], tmp_path / "model")
    write_task(tmp_path)
    Path(tmp_path, "cfg.py").write_text(RUN)
    done = train(tmp_path, 2, "--config", "cfg.py")
    assert done.code == 0, done.output[-6000:]
    rows = [row for row in metrics_of(tmp_path / "run") if row["step"]]
    assert len(rows) == 2
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    # of the engine, which computes in bfloat16, and the trainer
    assert all(0 < row["correction/k3"] < 0.01 for row in rows), rows
    export(tmp_path / "run/checkpoints/step_00000002", tmp_path / "out")
    before: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    after, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    moved = [not torch.equal(a, b) for a, b in zip(
        before.state_dict().values(), after.state_dict().values(), strict=True
    )]  # fmt: skip
    assert sum(moved) > len(moved) // 2


@pytest.mark.parametrize(("degrees", "said"), [
    ({"context": 2}, "context_parallel=2: a gated delta net has a state"),
    ({"tensor": 4}, "does not cut the gates of attention"),
    ({"tensor": 4}, "2 key heads of gated delta nets, and 2 % 4 = 2"),
])  # fmt: skip
def test_a_layout_that_cuts_states_or_gates_is_refused(degrees: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_layout(tiny.make_config("qwen3_5_text"), Degrees(**degrees))
    check_layout(tiny.make_config("qwen3_5_text"), Degrees(tensor=2, sequence=True, pipeline=2))
