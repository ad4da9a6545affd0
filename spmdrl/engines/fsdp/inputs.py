"""A micro-batch as the model is given it."""

from __future__ import annotations

from typing import NamedTuple

from spmdrl.data.images import BatchImages, ImageInputs
from spmdrl.engines.fsdp.packed_rows import Packing
from spmdrl.engines.fsdp.ulysses import SequenceParallelGroup, TokenShard
from spmdrl.types import Batch


class ModelInputs(NamedTuple):
    """A micro-batch as the model is given it."""

    batch: Batch  # on the device, all of its tokens
    mine: TokenShard
    packing: Packing


def image_inputs(
    inputs: ModelInputs, images: BatchImages, team: SequenceParallelGroup | None
) -> ImageInputs:
    """Returns the images of a micro-batch, for those of its tokens that this rank has: the ranks of
    a team all pass the tower with all images, and each uses its own tokens' vectors.
    """
    if team is not None:
        images.share_replies(inputs.batch, team.group, inputs.batch.token_ids.device)
    scene, count = images.scene(inputs.batch), len(inputs.mine.token_ids)
    return scene if team is None else scene.of_tokens(team.rank * count, count)
