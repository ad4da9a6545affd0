"""Kimi-VL's model, without the Python files that its folders bring along.

transformers does not know Kimi-VL, and it knows Kimi K2.5, whose layers are the same: a tower of
native resolution (MoonViT, Kimi-VL Technical Report, arXiv 2504.07491, section 2.1), a projector
and a language model of DeepSeek-V3's kind. The classes here are those of Kimi K2.5 with the fields
of Kimi-VL's config.json, and the published names of its weights. A checkpoint that is written of
them is one of Kimi-VL again.

Queries, keys and values stay one matrix, as published, so that a push or an export of it is a copy.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import GroupWeightRename, WeightRenaming
from transformers.models.kimi_k25.modeling_kimi_k25 import (
    Kimi_K25ForConditionalGeneration,
    Kimi_K25Model,
    Kimi_K25PreTrainedModel,
    Kimi_K25VisionModel,
    apply_rotary_pos_emb_vision,
)

from spmdrl.hub.kimi_vl_images import KimiVLImageProcessor
from spmdrl.hub.moonshot_tokenizer import TikTokenTokenizer


class MoonViTConfig(PreTrainedConfig):
    """The tower's fields in config.json, with Kimi K2.5's names for some."""

    model_type = "moonvit"
    base_config_key = "vision_config"
    attribute_map: ClassVar = {
        "pos_emb_height": "init_pos_emb_height", "pos_emb_width": "init_pos_emb_width",
    }  # fmt: skip
    default_rope_type = "axial"
    pos_emb_time = 1  # an image is one frame

    patch_size: int = 14
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    num_attention_heads: int = 16
    num_hidden_layers: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    hidden_act: str = "gelu_pytorch_tanh"
    merge_kernel_size: tuple[int, int] | list[int] = (2, 2)
    rope_parameters: dict[str, Any] | None = None

    @property
    def spatial_merge_size(self) -> int:
        return self.merge_kernel_size[0]


class KimiVLConfig(PreTrainedConfig):
    """config.json of Kimi-VL."""

    model_type = "kimi_vl"
    sub_configs: ClassVar[Any] = {"text_config": AutoConfig, "vision_config": MoonViTConfig}
    attribute_map: ClassVar = {"image_token_id": "media_placeholder_token_id"}
    projection_layer_norm_eps = 1e-5
    video_token_id = -1  # there is none

    text_config: dict[str, Any] | PreTrainedConfig | None = None
    vision_config: dict[str, Any] | PreTrainedConfig | None = None
    media_placeholder_token_id: int = 163605
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.text_config, PreTrainedConfig):
            fields = {"num_nextn_predict_layers": 0} | (self.text_config or {})
            fields.pop("model_type", None)  # files of several dates have several
            self.text_config = CONFIG_MAPPING["deepseek_v3"](**fields)
        if not isinstance(self.vision_config, PreTrainedConfig):
            self.vision_config = MoonViTConfig(**(self.vision_config or {}))
        super().__post_init__(**kwargs)

    @property
    def projection_hidden_size(self) -> int:
        assert isinstance(self.vision_config, PreTrainedConfig)
        return self.vision_config.hidden_size


class MoonViTAttention(nn.Module):
    """The attention of an image's patches to each other."""

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, hidden_states: Tensor, cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor], **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """hidden_states: (patches, hidden_size) of all images; cu_seqlens: (images + 1,)."""
        qkv = self.wqkv(hidden_states).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = qkv.unbind(1)  # (patches, heads, head_dim)
        query, key = apply_rotary_pos_emb_vision(
            halves_of_pairs(query), halves_of_pairs(key), *position_embeddings
        )
        lengths = cu_seqlens.diff().tolist()
        images = zip(*(part.split(lengths) for part in (query, key, value)), strict=True)
        seen = [
            scaled_dot_product_attention(*(part.transpose(0, 1)[None] for part in image))
            for image in images
        ]
        return self.wo(torch.cat(seen, 2)[0].transpose(0, 1).flatten(1))


def halves_of_pairs(heads: Tensor) -> Tensor:
    """Returns the numbers of heads, (..., head_dim), in another order: published weights rotate
    neighbours, and transformers rotates the first half of a head with the second.
    """
    return heads.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


class MoonViT(Kimi_K25VisionModel):
    config_class = MoonViTConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.attn = MoonViTAttention(config)


class KimiVLModel(Kimi_K25Model):
    config_class = KimiVLConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.vision_tower = MoonViT(config.vision_config)

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Kimi K2.5 has another embedding for tokens of images, wherever they stand: a policy may
        write one into an answer.
        """
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        return super().forward(input_ids=input_ids, inputs_embeds=inputs_embeds, **kwargs)


class KimiVLPreTrainedModel(Kimi_K25PreTrainedModel):
    config_class = KimiVLConfig


class KimiVLForConditionalGeneration(KimiVLPreTrainedModel, Kimi_K25ForConditionalGeneration):
    def __init__(self, config: KimiVLConfig) -> None:
        KimiVLPreTrainedModel.__init__(self, config)
        self.model = KimiVLModel(config)
        text: Any = config.text_config
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.post_init()


BLOCK = r"vision_tower.encoder.blocks.(\d+)"
NAMES = (
    WeightRenaming(r"^language_model.model", "model.language_model"),
    WeightRenaming(r"^language_model.lm_head", "lm_head"),
    GroupWeightRename(
        [rf"{BLOCK}.norm0", rf"{BLOCK}.norm1"],
        [r"vision_tower.encoder.blocks.\1.norm1", r"vision_tower.encoder.blocks.\1.norm2"],
    ),
    GroupWeightRename(
        [rf"{BLOCK}.mlp.fc0", rf"{BLOCK}.mlp.fc1"],
        [r"vision_tower.encoder.blocks.\1.mlp.fc1", r"vision_tower.encoder.blocks.\1.mlp.fc2"],
    ),
    WeightRenaming(rf"{BLOCK}.wqkv", r"vision_tower.encoder.blocks.\1.attn.wqkv"),
    WeightRenaming(rf"{BLOCK}.wo", r"vision_tower.encoder.blocks.\1.attn.wo"),
    WeightRenaming(r"vision_tower.encoder.blocks", "vision_tower.encoder.layers"),
    WeightRenaming(r"^vision_tower.encoder", "model.vision_tower"),
    WeightRenaming(
        r"^vision_tower.patch_embed.pos_emb.weight",
        "model.vision_tower.patch_embed.pos_emb.position_embeddings",
    ),
    WeightRenaming(r"^vision_tower.patch_embed.proj", "model.vision_tower.patch_embed.proj"),
    WeightRenaming(r"^multi_modal_projector.linear_1", "model.mm_projector.in_proj"),
    WeightRenaming(r"^multi_modal_projector.linear_2", "model.mm_projector.out_proj"),
    WeightRenaming(r"^multi_modal_projector.pre_norm", "model.mm_projector.pre_norm"),
)


def register() -> None:
    """Has transformers find these classes for model type kimi_vl, in place of a folder's own code.
    It finds the tokenizer for others of its name too (Kimi K2, Moonlight).
    """
    AutoConfig.register("kimi_vl", KimiVLConfig, exist_ok=True)
    AutoModel.register(KimiVLConfig, KimiVLModel, exist_ok=True)
    AutoModelForImageTextToText.register(
        KimiVLConfig, KimiVLForConditionalGeneration, exist_ok=True
    )
    AutoImageProcessor.register(
        KimiVLConfig, image_processor_classes={"pil": KimiVLImageProcessor}, exist_ok=True
    )
    AutoTokenizer.register(KimiVLConfig, tokenizer_class=TikTokenTokenizer, exist_ok=True)
    experts = get_checkpoint_conversion_mapping("qwen2_moe")
    register_checkpoint_conversion_mapping("kimi_vl", [*NAMES, *experts], overwrite=True)


register()
