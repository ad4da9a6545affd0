"""What tests of models that see images compare with: transformers, one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tiny_models import png

from spmdrl.config import DataConfig
from spmdrl.data.images import BatchImages, ImageProcessor
from spmdrl.data.packing import empty_batch
from spmdrl.data.pictures import open_picture
from spmdrl.engines.fsdp.model import TokenPolicy
from spmdrl.engines.fsdp.packed_rows import Packing
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.rollout.base import Completion, Request, RolloutEngine, SamplingParams
from spmdrl.types import Batch, Picture, Prompt


def vision_of(model: str, **settings: Any) -> ImageProcessor:
    found = ImageProcessor.load(model, load_hf_config(model), DataConfig(train="", **settings))
    assert found is not None
    return found


def prompts_of(vision: ImageProcessor) -> list[Prompt]:
    """Two images, none, one at the very start."""
    mark, shown = vision.token_id, [Picture(png(s, w, h)) for s, w, h in
                                    ((0, 16, 24), (1, 8, 8), (2, 32, 16))]  # fmt: skip
    rows = [([5, mark, 6, mark, 7], shown[:2]), ([8, 9, 10], []), ([mark, 11], shown[2:])]
    return [
        Prompt(i, vision.placed(ids, pictures), "d", "", "", images=tuple(pictures))
        for i, (ids, pictures) in enumerate(rows)
    ]


def packed(prompts: Sequence[Prompt], answers: Sequence[Sequence[int]]) -> Batch:
    """Every token of an answer is in the loss."""
    sequences = [[*p.token_ids, *a] for p, a in zip(prompts, answers, strict=True)]
    batch = empty_batch(torch.tensor([len(s) for s in sequences]))
    batch.token_ids = torch.tensor([id for s in sequences for id in s])
    batch.prompts = torch.tensor([p.id for p in prompts])
    masks = [
        [0.0] * len(p.token_ids) + [1.0] * len(a) for p, a in zip(prompts, answers, strict=True)
    ]
    batch.loss_mask = torch.tensor([m for mask in masks for m in mask])
    return batch


def logprobs_packed(model: Any, batch_images: BatchImages, batch: Batch) -> torch.Tensor:
    """Of every token but each sequence's first."""
    lens = batch.seq_lens.tolist()
    rows = torch.cat([torch.arange(1, n) + sum(lens[:i]) for i, n in enumerate(lens)])
    positions = torch.cat([torch.arange(n) for n in lens])
    packing = Packing.build(batch.seq_lens, torch.device("cpu"))
    found, *_ = TokenPolicy(model)(
        batch.token_ids, positions, packing, rows - 1, batch.token_ids[rows], 1.0,
        scene=batch_images.scene(batch),
    )  # fmt: skip
    return found


def answer_twice(
    engine: RolloutEngine, model: Any, vision: ImageProcessor, asked: Sequence[Prompt], seeds: int
) -> tuple[list[Completion], list[Completion]]:
    """Answers of 12 tokens to prompts, whose log-probabilities must be the model's, and the same
    again from their first 5 tokens on. The i-th has the seed i % seeds.
    """
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    requests = [Request(p.token_ids, seed=i % seeds, images=p.images) for i, p in enumerate(asked)]
    whole = engine.generate(requests, params)
    with torch.no_grad():
        for prompt, answer in zip(asked, whole, strict=True):
            batch_images = BatchImages(vision, {prompt.id: prompt}.__getitem__)
            right = logprobs_packed(model, batch_images, packed([prompt], [answer.token_ids]))
            got = torch.tensor(answer.logprobs)
            torch.testing.assert_close(got, right[-12:], rtol=1e-4, atol=1e-5)
    begun = [
        Request(r.prompt_ids, r.seed, a.token_ids[:5], a.logprobs[:5], a.versions[:5],
                images=r.images)
        for r, a in zip(requests, whole, strict=True)
    ]  # fmt: skip
    return whole, engine.generate(begun, params)


def logprobs_alone(
    model: Any, vision: ImageProcessor, prompt: Prompt, answer: Sequence[int]
) -> torch.Tensor:
    """By transformers, from its own preprocessing, positions and masks."""
    ids = torch.tensor([[*prompt.token_ids, *answer]])
    seen: dict[str, Any] = {}
    if prompt.images:
        opened = [open_picture(picture) for picture in prompt.images]
        made = vision.processor(images=opened, return_tensors="pt", **vision.sizes.options)
        seen = {name: made[name] for name in vision.family.inputs}
        types = "mm_token_type_ids" if vision.family.mrope else vision.family.types
        if types is not None:
            seen[types] = (ids == vision.token_id).int()
            seen[types][:, len(prompt.token_ids) :] = 0
    logits = model(input_ids=ids, use_cache=False, **seen).logits[0].float()
    return logits.log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
