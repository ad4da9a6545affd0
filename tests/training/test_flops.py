"""The count of operations against PyTorch's own, of a real forward and backward pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from spmdrl.config import AlgoConfig, DataConfig, PpoConfig
from spmdrl.training import rl
from spmdrl.training.logs.flops import PEAK_TFLOPS, Flops, active_weights, peak_tflops

SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 200,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
def test_it_is_what_a_pass_multiplies(kind: str, tied: bool) -> None:
    more = EXPERTS if kind == "qwen3_moe" else {}
    config = AutoConfig.for_model(kind, **SHAPE, **more, tie_word_embeddings=tied)
    config._experts_implementation = "eager"  # grouped products go by the counter
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    length = 40
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(0, 200, (1, length))).logits.sum().backward()
    flops = Flops.of_model(config)
    # eager attention computes the masked half as well
    whole = (flops.per_token + flops.per_prediction) * length + flops.per_pair * length**2
    assert counter.get_total_flops() == pytest.approx(whole, rel=0.02)
    of_update = flops.of(torch.tensor([length]), length)
    assert of_update == pytest.approx(whole - flops.per_pair * length**2 / 2)
    assert flops.per_prediction == 6 * 200 * 64
    assert flops.of(torch.tensor([length]), 10) == of_update - 30 * flops.per_prediction
    assert Flops.of_model(config, frozen=True).per_token == flops.per_token * 2 / 3


def test_embeddings_of_any_name_are_no_layers() -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 200}
    config = AutoConfig.for_model("gpt_neox", **shape, num_attention_heads=4)  # embed_in, embed_out
    layers, head = active_weights(config)
    assert head == 200 * 64
    assert layers == 3 * (4 * 64 * 64 + 2 * 64 * 96)


def test_sequences_and_windows() -> None:
    config = AutoConfig.for_model("mistral", **SHAPE, sliding_window=16)
    flops = Flops.of_model(config)
    assert flops.window == 16
    lens = torch.tensor([10, 40])
    pairs = 10 * 10 / 2 + 16 * (40 - 16 / 2)  # the first 16 as a triangle, then 16 each
    assert flops.of(lens, 0) == pytest.approx(flops.per_token * 50 + flops.per_pair * pairs)


def test_what_sequences_share_and_ranks_without_the_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rl, "peak_tflops", lambda device: 1e-6)
    prompts, lens = torch.tensor([30, 30]), torch.tensor([40, 50, 60])
    assignment: Any = SimpleNamespace(seq_lens=lens, repeated_prefixes=lambda ranks: prompts)
    flops = Flops(per_token=5.0, per_prediction=7.0, per_pair=0.0, window=None)
    for shares, computed in ((True, 90), (False, 150)):
        topology = SimpleNamespace(device=torch.device("cpu"), ranks=(0, 1))
        actor = SimpleNamespace(shares_prefixes=shares, ranks=(0, 1), topology=topology)
        run: Any = SimpleNamespace(
            runtime=SimpleNamespace(topology=topology), roles=SimpleNamespace(actor=actor),
            config=PpoConfig(model="m", data=DataConfig(train="t"), reward=len,
                             algo=AlgoConfig(epochs=3)),
            flops=flops,
        )  # fmt: skip
        batches: Any = SimpleNamespace(assignment=assignment)
        metrics = {"time/update_actor_s": 2.0, "rollout/loss_tokens": 60.0}
        found = rl.utilisation(run, batches, metrics)["throughput/mfu"]
        assert found == pytest.approx(3 * (5 * computed + 7 * 60) / (2.0 * 2 * 1e6))
        assert rl.utilisation(run, batches, {"time/update_actor_s": 2.0}) == {}


def test_peaks_are_found_by_the_device_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_tflops(torch.device("cpu")) is None
    names = {"NVIDIA H100 80GB HBM3": 989.0, "NVIDIA H100 PCIe": 756.0, "NVIDIA H200": 989.0,
             "NVIDIA A100-SXM4-80GB": 312.0, "NVIDIA A10G": 70.0, "NVIDIA A10": 125.0,
             "NVIDIA L40S": 362.0, "NVIDIA L4": 121.0, "NVIDIA H20": 148.0, "NVIDIA GB200": 2500.0,
             "AMD Instinct MI300X": 1307.0, "AMD Instinct MI250X": 191.5,
             "NVIDIA Unheard-of": None}  # fmt: skip
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_tflops(torch.device("cuda", 0)) == peak
    assert all(peak > 0 for peak in PEAK_TFLOPS.values())
