"""Single tokens in samples/: their texts, and numbers in the same order.

`step_N.jsonl` has the texts and the rollout engine's log-probabilities, which are known when a
sample is scored. `step_N_trained.jsonl` has what the actor's ranks compute later of the same
samples: advantages, and log-probabilities before and in the last update of the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor

from spmdrl.data.packing import BatchAssignment, address_order
from spmdrl.engines.base import LossFn
from spmdrl.types import Batch, Sample

DIGITS = 4  # behind the point of a log-probability or an advantage
MOST_HELD = 8  # tokens that may wait for the end of a character, which has at most 4 bytes

Address = tuple[int, int]  # group and index of a sample in its step
Number = float | None  # None: a token that the policy did not choose, or no finite number


def token_fields(sample: Sample, tokenizer: Any, most: int) -> dict[str, Any]:
    """Returns `tokens` and `logprobs` of the first `most` response tokens; {} where most is 0. A
    demonstration has no log-probabilities.
    """
    if most == 0:
        return {}
    texts = {"tokens": token_texts(tokenizer, sample.response_ids[:most])}
    if sample.is_demonstration:
        return texts
    kept = zip(sample.rollout_logprobs[:most], sample.loss_mask[:most], strict=True)
    return texts | {
        "logprobs": [short(value) if chosen else None for value, chosen in kept],
    }


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """Returns the text of each token; together they are the decoded row, special tokens included.

    A character of several tokens stands at the last of them, and the others are "". Bytes that are
    no character stand as "\N{REPLACEMENT CHARACTER}", and the text behind them is begun anew.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:  # a tokenizer without Rust code decodes each token by itself
        return [alone(tokenizer, i) for i in ids]
    stream, held, texts = DecodeStream(skip_special_tokens=False), 0, list[str]()
    for i in ids:
        text = next_text(stream, fast, i)
        held = 0 if text else held + 1
        if text is None or held == MOST_HELD:
            text, stream, held = alone(tokenizer, i), DecodeStream(skip_special_tokens=False), 0
        texts.append(text)
    return texts


def alone(tokenizer: Any, token_id: int) -> str:
    """Decodes one token by itself."""
    return str(tokenizer.decode([token_id], clean_up_tokenization_spaces=False))


def next_text(stream: DecodeStream, fast: Any, token_id: int) -> str | None:
    """Gives the stream a token. Returns what it completes, "" where it waits for more, and None
    where the stream cannot go on: tokens of single bytes that are no character.
    """
    try:
        return stream.step(fast, token_id) or ""
    except Exception as error:  # tokenizers has no class of its own for it
        if "Invalid prefix" not in str(error):
            raise
        return None


def short(value: float) -> Number:
    return round(value, DIGITS) if math.isfinite(value) else None


@dataclass
class SampleRecorder:
    """Keeps the log-probabilities that the actor's updates compute of a few samples.

    What is kept stays on its device until the rows are written, so that no update waits for a copy;
    it is 4 bytes for each token of the rank and update.
    """

    wanted: frozenset[Address] = frozenset()
    # of each micro-batch, in order: groups, indices, cu_seqlens, and (num_tokens,) float32
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def watch(self, loss_fn: LossFn) -> LossFn:
        """Returns the loss function, which keeps what it is given and is otherwise the same."""

        def watched(
            logprobs: Tensor, entropy: Tensor, mb: Batch
        ) -> tuple[Tensor, dict[str, Tensor]]:
            self.parts.append((mb.groups, mb.indices, mb.cu_seqlens, logprobs.detach()))
            return loss_fn(logprobs, entropy, mb)

        return watched

    def logprobs(self) -> dict[Address, Tensor]:
        """Returns (num_tokens of it,) float32 of each wanted sample, by the last update with it."""
        return {
            address: values[tokens].float().cpu()
            for groups, indices, cu_seqlens, values in self.parts
            for address, tokens in places(groups, indices, cu_seqlens, self.wanted)
        }


def places(
    groups: Tensor, indices: Tensor, cu_seqlens: Tensor, wanted: frozenset[Address]
) -> Iterator[tuple[Address, slice]]:
    """Finds wanted samples in a batch: (address, where its tokens are)."""
    ends = cu_seqlens.tolist()
    addresses = zip(groups.tolist(), indices.tolist(), strict=True)
    for address, first, end in zip(addresses, ends[:-1], ends[1:], strict=True):
        if address in wanted:
            yield address, slice(first, end)


def first_samples(
    assignment: BatchAssignment, most: int, age_stride: int, n: int
) -> frozenset[Address]:
    """Returns the addresses of the `most` first new samples of a step.

    age_stride: 1 + algo.replay_steps. With a replay buffer, group g of the step is g * age_stride
    in the batch, and groups between are older. n: rollout.n; of a sample that is drawn twice the
    second copy has a higher index (credit.resample).
    """
    table = torch.stack([assignment.groups, assignment.indices], dim=1)
    table = table[(assignment.groups % age_stride == 0) & (assignment.indices < n)]
    in_order = table[address_order(table)][:most].tolist()
    return frozenset((group, index) for group, index in in_order)


def trained_rows(
    batches: list[Batch], recorder: SampleRecorder, most: int, age_stride: int
) -> dict[Address, dict[str, Any]]:
    """Makes the rows of samples/step_N_trained.jsonl that this rank can make, by their address.

    most: tokens of each sample. A sample without a token that is trained on has no row.
    """
    rows: dict[Address, dict[str, Any]] = {}
    updated = recorder.logprobs()
    for batch in batches:
        found = places(batch.groups, batch.indices, batch.cu_seqlens, recorder.wanted)
        for address, tokens in found:
            numbers = trained_numbers(batch, tokens, updated.get(address), most)
            if numbers:
                seq = int((batch.cu_seqlens == tokens.start).nonzero()[-1])
                where = {"prompt_id": int(batch.prompts[seq]), "group": address[0] // age_stride}
                rows[address] = where | {"sample": address[1]} | numbers
    return rows


def trained_numbers(
    batch: Batch, tokens: slice, updated: Tensor | None, most: int
) -> dict[str, Any]:
    """Returns `advantage`, the mean over the tokens that are trained on, and lists by token:
    `advantages` where they differ, `trainer_logprobs`, `update_logprobs`.

    updated: (num_tokens of the sample,), what the last update computed. Where no pass was made
    before the first update, its log-probabilities are those of the trainer.
    """
    mask = batch.loss_mask[tokens] > 0
    if not bool(mask.any()):
        return {}
    first = int(mask.nonzero()[0])
    mask = mask[first:]
    trainer = updated if batch.old_logprobs is None else batch.old_logprobs[tokens]
    found: dict[str, Any] = {}
    if batch.advantages is not None:
        advantages = batch.advantages[tokens][first:]
        chosen = advantages[mask]
        found["advantage"] = short(float(chosen.double().mean()))
        if float(chosen.max() - chosen.min()) > 10**-DIGITS:
            found["advantages"] = by_token(advantages, mask, most)
    if trainer is not None:
        found["trainer_logprobs"] = by_token(trainer[first:], mask, most)
    if updated is not None and batch.old_logprobs is not None:
        found["update_logprobs"] = by_token(updated[first:], mask, most)
    return found


def by_token(values: Tensor, mask: Tensor, most: int) -> list[Number]:
    pairs = zip(values[:most].tolist(), mask[:most].tolist(), strict=True)
    return [short(value) if chosen else None for value, chosen in pairs]
