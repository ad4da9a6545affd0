"""The tower for images of a model whose language model is megatron-core's.

The tower is transformers' own modules, of the first stage's chunk by the names that they have in
transformers (towers.py). It is whole on each of the stage's tensor and context ranks. They all pass
it with all images of a micro-batch, and each takes the vectors of its own tokens.

    no sequence parallelism   the tensor ranks have all tokens and the same gradient of the tower,
                              averaged since kernels of GPUs add in any order
    sequence parallelism      each has the gradient of its tokens: Megatron sums it, as of norms
    context parallelism       the same, and summed with the data-parallel ranks' gradients
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from spmdrl.data.images import BatchImages, ImageInputs
from spmdrl.engines.fsdp.activations import use_checkpointing
from spmdrl.engines.fsdp.model import without_noise
from spmdrl.engines.megatron.inputs import Inputs, SequenceSplit
from spmdrl.engines.megatron.towers import (
    PARTS,
    deepstack_layers,
    has_trained_tower,
    language_part,
)
from spmdrl.hub.hf_folder import meta_model
from spmdrl.hub.transformers_compat import set_attention_name, undivided_layers


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
    config: Any = copy.deepcopy(hf_config)
    set_attention_name(config.vision_config, "sdpa")
    whole = meta_model(config)
    shell: Any = whole.base_model
    for name, child in list(shell.named_children()):
        delattr(shell, name)
        if name in PARTS:
            part = built(child, config)
            prepare(part, chunk.config, frozen)
            if isinstance(part, PreTrainedModel):
                use_checkpointing(part, recompute)
            setattr(shell, name, part)
            setattr(chunk, name, part)
    kinds = undivided_layers(whole)
    layers = [
        f"{part}.{name}."
        for part in PARTS if hasattr(chunk, part)
        for name, module in getattr(chunk, part).named_modules() if type(module).__name__ in kinds
    ]  # fmt: skip
    # not submodules of the chunk: the shell has the same parts, and knows how to pass them
    vars(chunk).update(seeing=shell, tower_layers=tuple(layers))
    for number in range(deepstack_layers(language_part(hf_config))):
        add = partial(add_vectors, number)
        chunk.decoder.layers[number].register_forward_hook(add, with_kwargs=True)


def built(child: Any, config: Any) -> Any:
    """Returns a part of a model with memory. child: the same part without; config: of the whole."""
    given = config.vision_config if isinstance(child, PreTrainedModel) else config
    with torch.device(torch.cuda.current_device()), no_init_weights():  # see cpu_shim.scope
        return type(child)(given)


def prepare(part: Any, config: Any, frozen: bool) -> None:
    """config: Megatron's."""
    parameter: Any
    for parameter in part.parameters():
        parameter.data = parameter.data.to(config.params_dtype).zero_()
        parameter.sequence_parallel = config.sequence_parallel
        # equal, but for the order in which a GPU's kernels add: copies do not drift apart
        parameter.average_gradients_across_tp_domain = not config.sequence_parallel
        parameter.requires_grad_(not frozen)
    without_noise(part)


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


def looking_ahead(inputs: Inputs, images: BatchImages | None) -> Inputs:
    """Returns inputs whose attention lets an image's tokens see each other, where the model has it
    so (Gemma 3). On every stage.
    """
    ahead = None if images is None else images.looks_ahead(inputs.batch)
    if ahead is None:
        return inputs
    row, places = inputs.row_positions, inputs.row_places
    assert row is not None and places is not None, "packed rows alone have images"
    blocks = torch.full((len(row),), -1)
    blocks[places.cpu()] = ahead.blocks
    inputs.packed.layout = replace(inputs.packed.layout, ahead=replace(ahead, blocks=blocks))
    return inputs


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
    vectors, deepstack = vectors_of(model, scene)
    out = model.embedding(input_ids=inputs.token_ids, position_ids=None)
    first = cut.tensor_rank * len(out)
    of_rank = inputs.places.to(out.device)  # below 0: on another context rank
    places = of_rank - first
    here = scene.is_image & (of_rank >= 0) & (places >= 0) & (places < len(out))
    numbers = scene.is_image.cumsum(0)[here] - 1  # of each image token's vector
    out = out.index_copy(0, places[here], vectors[numbers][:, None])
    if deepstack:
        sources = [layer[numbers] for layer in deepstack]
        leaves = [source.detach().requires_grad_(source.requires_grad) for source in sources]
        inputs.packed.deepstack = Deepstack(places[here], leaves)
        out = GradientsOfLayers.apply(out, inputs.packed, *sources)
    return out


@contextmanager
def passing(every: Sequence[Inputs], now: Inputs, forward_only: bool) -> Iterator[None]:
    """Around the forward pass of a chunk with `now`, one of the micro-batches. What images have
    hung on micro-batches goes when it is not needed any more, and not at the end of all passes.
    """
    for other in every:  # masks are made again where a layer is computed again
        layout: Any = getattr(other.packed, "layout", None)
        if other is not now and getattr(layout, "ahead", None) is not None:
            other.packed.layout = replace(layout)
    yield
    if forward_only and now.packed is not None:
        now.packed.deepstack = None


def vectors_of(model: Any, scene: ImageInputs) -> tuple[Tensor, list[Tensor]]:
    """(image tokens, hidden_size) what the tower makes of the images, and the same for each of the
    first layers of the language model that is given vectors of its own.
    """
    pixels = dict(scene.pixels)
    pixels["pixel_values"] = pixels["pixel_values"].to(model.config.params_dtype)
    found = model.seeing.get_image_features(**pixels)
    of_layers = getattr(found, "deepstack_features", None) or []
    return end_to_end(found.pooler_output), [end_to_end(layer) for layer in of_layers]


def end_to_end(vectors: Tensor | Sequence[Tensor]) -> Tensor:
    """Returns the vectors of all images as (image tokens, hidden_size)."""
    return vectors.flatten(0, -2) if isinstance(vectors, Tensor) else torch.cat(list(vectors))


# ---- vectors that are added behind layers


@dataclass(frozen=True)
class Deepstack:
    """Holds what is added to the states of a micro-batch behind the first layers.

    rows: (n,) int64, of the states of this tensor rank; vectors: of each layer (n, hidden_size).
    """

    rows: Tensor
    vectors: list[Tensor]


def add_vectors(
    number: int, layer: Any, args: Any, kwargs: dict[str, Any], out: tuple[Tensor, Any]
) -> tuple[Tensor, Any] | None:
    """A hook behind a layer of the first stage. The micro-batch's attention parameters have what
    is added, so that a layer that is computed again for its gradient adds what it has added before.
    """
    added = getattr(kwargs["packed_seq_params"], "deepstack", None)
    if added is None:
        return None
    states, context = out
    return states.index_add(0, added.rows, added.vectors[number][:, None]), context


class GradientsOfLayers(torch.autograd.Function):
    """Hands the gradients that layers have left at the vectors of a Deepstack on to what these are
    copies of, and lets go of it.

    Megatron's activation checkpointing runs a backward pass of its own for every layer, in which
    the tower's graph could be gone through once only. The gradient of the embedding comes after
    those of all layers.
    """

    @staticmethod
    def forward(ctx: Any, embedded: Tensor, packed: Any, *sources: Tensor) -> Tensor:
        ctx.packed = packed
        return embedded.view_as(embedded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        vectors, ctx.packed.deepstack = ctx.packed.deepstack.vectors, None
        return grads[0], None, *(vector.grad for vector in vectors)
