"""explain_mismatch before anything is built: what is refused; and what is compared with what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from plan_configs import ppo_config, rollout_config
from tiny_models import save_qwen_vl
from transformers import AutoModelForCausalLM

from spmdrl.config import AlgoConfig, ConfigError, CorrectionConfig, LoraConfig, TrainConfig
from spmdrl.data.packing import empty_batch
from spmdrl.engines.fsdp.recording import logprobs_of_states, recording
from spmdrl.engines.recorded_pass import FINAL, PassRecorder, RecordedPass
from spmdrl.training.checks.mismatch import check_explain_mismatch
from spmdrl.training.checks.rl import check
from spmdrl.training.mismatch.points import compare_passes, local_part, names_of
from spmdrl.training.mismatch.sample import WorstSample, rows_of_interest
from spmdrl.training.mismatch.verdict import base_of, first_divergence, rounding_of

ON: dict[str, Any] = {"explain_mismatch": True}
CASES = [
    (ON | {"explain_mismatch_above": 1.0}, 1, "has no effect with explain_mismatch=True"),
    ({"explain_mismatch_above": 0.0}, 1, "must be above 0"),
    (ON | {"actor": TrainConfig(engine="megatron")}, 1, "needs actor.engine='fsdp'"),
    (ON | {"placement": {"actor": "0", "rollout": "1"}}, 2, "ranks of their own"),
    (ON | {"placement": {"actor": "0", "rollout": "0", "reward": "1"}}, 2, "on every rank"),
    (ON | {"rollout": rollout_config(enforce_eager=False)}, 1, "set rollout.enforce_eager=True"),
    (ON | {"actor": TrainConfig(lora=LoraConfig(rank=4))}, 1, "actor.lora="),
    (ON | {"actor": TrainConfig(compile=True)}, 1, "compiled layers cannot be read"),
    (ON | {"actor": TrainConfig(ulysses=2)}, 2, "actor.ulysses=2"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "world", "said"), CASES)
def test_what_cannot_be_explained_is_refused(qwen3, changes, world, said):
    with pytest.raises(ConfigError, match=said):
        check(ppo_config(qwen3, **changes), world)


def test_what_can_be_is_not(qwen3):
    for changes in ({}, {"rollout": rollout_config(engine="hf")}, {"strict": False},
                    {"algo": AlgoConfig(correction=CorrectionConfig(bypass=True))}):  # fmt: skip
        check(ppo_config(qwen3, **ON, **changes), 2)


def test_what_other_machines_and_models_have_is_refused(qwen3, tmp_path):
    from spmdrl.distributed.placement import place
    from spmdrl.hub.hf_folder import load_hf_config

    config = ppo_config(qwen3, **ON)
    hf = load_hf_config(str(qwen3))
    with pytest.raises(ConfigError, match="Megatron-core"):
        check_explain_mismatch(config, hf, place(config, 1), hosted=True)
    for changes, said in (
        ({"rollout": rollout_config(quantization="fp8")}, "not quantised"),
        ({"rollout": rollout_config(engine="sglang")}, "SGLang compute cannot be read"),
        ({"actor": TrainConfig(router_replay="R3")}, "none can flip"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_explain_mismatch(replace(config, **changes), hf, place(config, 1), hosted=False)
    seeing = replace(config, model=str(save_qwen_vl(tmp_path)))
    with pytest.raises(ConfigError, match="models of text alone"):
        check_explain_mismatch(seeing, load_hf_config(seeing.model), place(seeing, 1), hosted=False)


def test_rows_of_a_long_sample_have_its_worst_tokens():
    batch = empty_batch(torch.tensor([1000]))
    batch.loss_mask[500:] = 1.0
    batch.old_logprobs = torch.zeros(1000)
    batch.rollout_logprobs[[700, 999]] = torch.tensor([-3.0, -4.0])
    sample = WorstSample(batch, 4.0)
    rows = rows_of_interest(sample, most=16)
    assert sample.worst_token == 999 and {699, 998} <= {*rows.tolist()}
    assert len(rows) <= 16 and rows[0] == 0 and rows.max() == 998
    assert rows.tolist() == sorted({*rows.tolist()})
    batch.rollout_logprobs.zero_()  # as in a strict run: the worst is no token of the prompt
    assert WorstSample(batch, 0.0).worst_token >= 500


def test_a_rank_has_its_heads_and_neighbours_share_those_that_are_fewer():
    full = torch.arange(8.0)[None]  # two heads of 4
    assert [local_part(full, 4, rank, 4)[0, 0].item() for rank in range(4)] == [0, 0, 4, 4]
    assert [local_part(full, 2, rank, 4)[0, 0].item() for rank in range(4)] == [0, 2, 4, 6]
    assert local_part(full, 3, 0, 4) is None and local_part(full, 4, 0, 1) is None


def recorded(outputs: dict[str, torch.Tensor]) -> RecordedPass:
    """A pass whose modules are each given what the one before has returned, in two pieces."""
    recorder = PassRecorder(6, torch.arange(6))
    last = torch.ones(6, 4)
    for path, output in outputs.items():
        for piece in (slice(0, 4), slice(4, 6)):
            recorder.take(path, "in0", last[piece])
            recorder.take(path, "out", output[piece])
        last = output
    recorder.take(FINAL, "out", last)
    return recorder.recorded(torch.float32)


def test_a_difference_counts_where_the_layers_result_parts():
    """One model may scale its embedding inside a module, and the other behind it."""
    draw = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(6, 4, generator=draw) for _ in range(3))
    rounding = rounding_of(torch.float32)
    engine = recorded({"embed": a, "model.layers.0": b, "norm": c})
    inside = recorded({"embed": a, "model.layers.0": b, "norm": c})
    inside.records["embed"] = inside.records["embed"]._replace(output=a * 8)
    assert first_divergence(compare_passes(engine, inside), {}, rounding) is None
    missing = recorded({"embed": a * 8, "model.layers.0": b + 1, "norm": c + 1})
    found = first_divergence(compare_passes(engine, missing), {}, rounding)
    assert found is not None and (found.kind, found.name) == ("output", "embed")


def test_modules_are_paired_by_either_sides_name():
    assert "model.layers.0.mlp.gate" in names_of("model.layers.0.block_sparse_moe.gate")
    assert names_of("model.language_model.layers.1")[0] == "model.layers.1" and names_of("") == [""]


def test_what_comes_between_two_modules_is_told_from_the_modules():
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(6, 4, generator=draw) for _ in range(2))
    rounding = rounding_of(torch.float32)
    engine, trainer = recorded({"one": a, "two": b}), recorded({"one": a, "two": b + 1})
    record = trainer.records["two"]
    trainer.records["two"] = record._replace(inputs=[a + 1])
    found = first_divergence(compare_passes(engine, trainer), {}, rounding)
    assert found is not None and (found.kind, found.name) == ("input", "two")


def test_a_module_that_ran_more_than_once_is_not_compared():
    recorder = PassRecorder(6, torch.tensor([1, 5]))
    for _ in range(2):
        recorder.take("shared", "out", torch.ones(6, 2))
    recorder.take("once", "out", torch.arange(12.0).view(6, 2))
    found = recorder.records()
    assert found.keys() == {"once"} and found["once"].output[:, 0].tolist() == [2.0, 10.0]
    with pytest.raises(RuntimeError, match="a pass over 6 tokens gave last hidden states of 0"):
        recorder.recorded(torch.float32)


def test_a_model_that_is_called_past_its_hooks_is_recorded(qwen3, monkeypatch):
    """vLLM does that to classes of transformers whose models it runs itself."""
    hf: Any = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32).eval()
    kind = type(hf.model)
    monkeypatch.setattr(
        kind, "__call__", lambda self, *args, **kwargs: self.forward(*args, **kwargs)
    )
    recorder = PassRecorder(9, torch.arange(9))
    with torch.no_grad(), recording(hf, recorder):
        wanted = hf(torch.arange(9)[None] + 4).logits[0].log_softmax(-1)
    assert "forward" not in vars(hf.model)
    found = recorder.recorded(torch.float32)
    assert found.scales == {f"model.layers.{i}.self_attn.attn": 32**-0.5 for i in range(2)}
    targets = torch.arange(9) + 5
    logprobs = logprobs_of_states(hf, found.records[FINAL].output, targets, 1.0)
    assert torch.allclose(logprobs, wanted[torch.arange(9), targets], atol=1e-5)
    (rotation,) = found.rotations
    assert base_of(rotation.cos, rotation.sin) == pytest.approx(10_000, rel=1e-3)


def test_no_base_is_named_where_frequencies_are_stretched():
    """Else a missing rope_scaling would be told as another base."""
    powers = 10_000.0 ** (-torch.arange(16) / 16)
    stretched = torch.where(torch.arange(16) < 6, powers, powers / 4)
    for frequencies, base in ((powers, 10_000), (powers / 4, None), (stretched, None)):
        angles = torch.arange(4)[:, None] * frequencies
        for dtype in (torch.float32, torch.bfloat16):
            cos, sin = (table.to(dtype).float() for table in (angles.cos(), angles.sin()))
            expected = base and pytest.approx(base, rel=0.03)
            assert base_of(cos, sin) == expected
