"""The tower for images of a model whose language model is megatron-core's.

The tower is transformers' own module, `visual` of the first stage's chunk. It is whole on each of
the stage's tensor and context ranks. They all pass it with all images of a micro-batch, and each
takes the vectors of its own tokens.

    no sequence parallelism   the tensor ranks have all tokens and so the same gradient of the tower
    sequence parallelism      each has the gradient of its tokens: Megatron sums it, as of norms
    context parallelism       the same, and summed with the data-parallel ranks' gradients
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.initialization import no_init_weights

from spmdrl.data.images import BatchImages
from spmdrl.engines.fsdp.activations import use_checkpointing
from spmdrl.engines.fsdp.model import without_noise
from spmdrl.engines.megatron.inputs import Inputs, SequenceSplit
from spmdrl.engines.megatron.layout import has_trained_tower
from spmdrl.hub.hf_folder import meta_model
from spmdrl.hub.transformers_compat import set_attention_name


def add_tower(
    chunk: Any, hf_config: PreTrainedConfig, recompute: bool | Literal["selective"] = False,
    frozen: bool = False,
) -> None:  # fmt: skip
    """Gives the chunk that has the embedding the tower of its model, with weights of zero.

    hf_config: of the whole model; nothing is done for one that sees no images. recompute: see
    use_checkpointing. frozen: it is not trained.
    """
    if not has_trained_tower(hf_config) or not chunk.pre_process:
        return
    config = copy.deepcopy(hf_config.vision_config)
    set_attention_name(config, "sdpa")
    shell: Any = meta_model(hf_config).base_model
    with torch.device(torch.cuda.current_device()), no_init_weights():  # see cpu_shim.scope
        tower = type(shell.visual)(config)
    parameter: Any
    for parameter in tower.parameters():
        parameter.data = parameter.data.to(chunk.config.params_dtype).zero_()
        parameter.sequence_parallel = chunk.config.sequence_parallel
        parameter.requires_grad_(not frozen)
    without_noise(tower)
    use_checkpointing(tower, recompute)
    chunk.visual = tower


def rotary_positions(inputs: Inputs, images: BatchImages | None) -> Tensor:
    """(3, 1, tokens) int64: positions in time, height and width, of the row of all tokens before it
    is cut over context ranks. images None: there are none.
    """
    row, places = inputs.row_positions, inputs.row_places
    assert row is not None and places is not None, "packed rows alone have images"
    found = row.repeat(3, 1)
    if images is not None:
        found[:, places] = images.positions(inputs.batch, images.views(inputs.batch))
    return found[:, None]


def embedded(
    model: Any, inputs: Inputs, images: BatchImages | None, cut: SequenceSplit
) -> Tensor | None:
    """(local tokens of this tensor rank, 1, hidden_size): what goes into the layers, with the
    vectors of images in their places. None where the model's own embedding makes it: where there is
    no image, and on later stages. Collective over the tensor ranks.
    """
    while hasattr(model, "module"):  # what wraps a chunk that is trained
        model = model.module
    if images is None or not model.pre_process:
        return None
    scene = images.scene(inputs.batch)
    if scene.own is not None:  # it has the smallest image alone, which no token sees
        return None
    pixels = dict(scene.pixels)
    values = pixels.pop("pixel_values").to(model.config.params_dtype)
    vectors = model.visual(values, grid_thw=pixels["image_grid_thw"]).pooler_output
    out = model.embedding(input_ids=inputs.token_ids, position_ids=None)
    first = cut.tensor_rank * len(out)
    of_rank = inputs.places.to(out.device)  # below 0: on another context rank
    places = of_rank - first
    here = scene.is_image & (of_rank >= 0) & (places >= 0) & (places < len(out))
    numbers = scene.is_image.cumsum(0) - 1  # of each image token's vector
    return out.index_copy(0, places[here], vectors[numbers[here]][:, None])
