"""What the plan counts of a tower for images is what its backward pass reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_qwen_vl
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    InternVLVisionConfig,
    InternVLVisionModel,
    PixtralVisionConfig,
    PixtralVisionModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig
from transformers.models.glm4v.modeling_glm4v import Glm4vVisionModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from spmdrl.config import TrainConfig
from spmdrl.hub.transformers_compat import undivided_layers
from spmdrl.training.checks.memory import Memory, MicroBatches, memory_of
from spmdrl.training.checks.tower_memory import kept_of_layer

GRIDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2_5_vl": (Qwen2_5_VisionTransformerPretrainedModel, Qwen2_5_VLVisionConfig,
                   {"fullatt_block_indexes": [1]}),
    "qwen3_vl": (Qwen3VLVisionModel, Qwen3VLVisionConfig, {"deepstack_visual_indexes": []}),
    "glm4v": (Glm4vVisionModel, Glm4vVisionConfig, {}),
}  # fmt: skip
SQUARES: dict[str, tuple[Any, Any]] = {
    "gemma3": (SiglipVisionModel, SiglipVisionConfig),
    "internvl": (InternVLVisionModel, InternVLVisionConfig),
    "mistral3": (PixtralVisionModel, PixtralVisionConfig),
}
WIDTHS = {"hidden_size": 64, "intermediate_size": 160}


def built(kind: str, depth: int) -> tuple[Any, Callable[[], Any]]:
    """A tower of some layers, and its pass over 64 patches."""
    if kind in GRIDS:
        model, config, more = GRIDS[kind]
        made = config(**WIDTHS, depth=depth, num_heads=2, out_hidden_size=64, **more)
        pixels = torch.randn(64, 3 * made.temporal_patch_size * made.patch_size**2)
        tower = model._from_config(made, attn_implementation="sdpa")
        return tower, lambda: tower(pixels, grid_thw=torch.tensor([[1, 8, 8]]))
    model, config = SQUARES[kind]
    each = (112, 112), (14, 14)
    side, patch = each if kind == "internvl" else (112, 14)
    more: dict[str, Any] = {"vision_use_head": False} if kind == "gemma3" else {}
    made = config(**WIDTHS, num_hidden_layers=depth, num_attention_heads=2, image_size=side,
                  patch_size=patch, **more)  # fmt: skip
    given = {"image_sizes": torch.tensor([[112, 112]])} if kind == "mistral3" else {}
    tower = model._from_config(made, attn_implementation="sdpa")
    return tower, lambda: tower(torch.randn(1, 3, 112, 112), **given)


def kept_bytes(tower: Any, run: Callable[[], Any]) -> int:
    """Of what the backward pass reads, the tower's weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in tower.parameters()}
    held: list[Tensor] = []  # alive, so that no two are at one place

    def keep(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    assert result is not None
    return sum(size for place, size in storages.items() if place not in weights)


@pytest.mark.parametrize("kind", [*GRIDS, *SQUARES])
def test_a_layer_keeps_what_is_counted(kind: str) -> None:
    two, three = (built(kind, depth) for depth in (2, 3))
    measured = (kept_bytes(*three) - kept_bytes(*two)) / (4 * 64)
    names = undivided_layers(three[0])
    counted = [kept_of_layer(m) for m in three[0].modules() if type(m).__name__ in names]
    assert len([each for each in counted if each]) == 3
    assert max(counted) == pytest.approx(measured, rel=0.05)


def test_who_keeps_what_of_the_tower(tmp_path: Path) -> None:
    model = str(save_qwen_vl(tmp_path, hidden_size=128, depth=4))
    role = TrainConfig(dtype="float32", activation_checkpointing=False)

    def planned(images: float = 0.5, num_ranks: int = 1, **changes: Any) -> Memory:
        tokens = MicroBatches(1000, 0)
        return memory_of(
            "actor", replace(role, **changes), model, num_ranks, tokens=tokens, images=images
        )

    def kept(images: float = 0.5, **changes: Any) -> float:
        without = planned(0.0, **changes).first.activations
        return planned(images, **changes).first.activations - without

    whole = kept()
    assert whole > 1e6
    assert whole == pytest.approx(2 * kept(0.25))
    assert kept(freeze_vision=True) < whole / 4
    assert kept(activation_checkpointing=True) < whole / 2
    assert kept(activation_checkpointing="selective") < 0.8 * whole
    assert kept(ulysses=2, num_ranks=2) == pytest.approx(2 * whole)
    assert kept(engine="megatron") == pytest.approx(whole)
    assert kept(engine="megatron", tensor_parallel=2, num_ranks=2) == pytest.approx(whole)
    stages = {"engine": "megatron", "pipeline_parallel": 2, "num_ranks": 2}
    assert kept(**stages) == pytest.approx(2 * whole)  # of two micro-batches
