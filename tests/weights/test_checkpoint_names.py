"""What checkpoints call the parameters of transformers' models: as save_pretrained writes them."""

from __future__ import annotations

import pytest
import tiny_megatron_models
import torch
from safetensors.torch import load_file

from spmdrl.config import ConfigError
from spmdrl.weights import checkpoint_names as names
from spmdrl.weights.checkpoint_names import SubTensor, checkpoint_parts
from spmdrl.weights.shards import lying, shards_by_part


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_parts_are_what_save_pretrained_writes(family, tmp_path):
    model = tiny_megatron_models.save_model(family, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    buffers = {name for name in saved if name.endswith("e_score_correction_bias")}
    found = lying(shards_by_part(dict(model.named_parameters()), checkpoint_parts(model.config)))
    assert found.keys() == saved.keys() - buffers
    for name, ((box, tensor),) in found.items():
        assert box == tuple((0, size) for size in saved[name].shape), name
        assert torch.equal(tensor, saved[name]), name


def test_a_dense_model_has_its_own_names(tmp_path):
    assert checkpoint_parts(tiny_megatron_models.make_config("qwen3")) == {}


def test_a_shard_may_end_within_an_expert():
    up = SubTensor("experts.2.up_proj.weight", (3, 5), ((2, 3), (3, 6), (0, 5)))
    assert up.inside(((2, 3), (4, 6), (1, 5))) == ((1, 3), (1, 5))
    stacked = torch.arange(4 * 6 * 5).view(4, 6, 5)
    assert torch.equal(up.of(stacked), stacked[2, 3:])
    assert up.of(stacked).data_ptr() == stacked[2, 3:].data_ptr()


def test_what_is_computed_for_a_checkpoint_is_refused(monkeypatch):
    def doubled(model, given):
        return {name: tensor * 2 for name, tensor in given.items()}

    monkeypatch.setattr(names, "revert_weight_conversion", doubled)
    with pytest.raises(ConfigError, match="more than a part of what transformers keeps for qwen3"):
        checkpoint_parts(tiny_megatron_models.make_config("qwen3"))
