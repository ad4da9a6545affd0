"""Reads what the modules of vLLM's model compute of a sequence, in this process."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spmdrl.engines.recorded_pass import FINAL, PassRecorder, RecordedPass, Rotation, module_hooks
from spmdrl.rollout.base import Request, SamplingParams
from spmdrl.rollout.vllm import compat
from spmdrl.rollout.weight_check import FUSED

HEAD_ROWS = 64  # whose logits are computed at a time: (rows, vocabulary) float32


@torch.no_grad()
def record_pass(
    engine: Any, token_ids: list[int], rows: Tensor, temperature: float
) -> RecordedPass:
    """See spec.PassReader. engine: a VllmEngine with rollout.enforce_eager, since modules that
    were compiled call no hooks. Its ranks' parts of queries, keys and values are what each keeps.

    The prefix cache is emptied first. A prompt may be computed in several pieces.
    """
    asked, model = token_ids[:-1], engine.model
    recorder = PassRecorder(len(asked), rows)
    with ExitStack() as hooks:
        in_batch = compat.runs_transformers_code(type(model).__name__)
        hooks.enter_context(module_hooks(model, recorder, partial(rows_of, in_batch)))
        hooks.enter_context(compat.watched_routers(model, recorder.take_experts))
        # a class that vLLM compiles is called past its hooks, but never the whole model's
        final = model.register_forward_hook(
            lambda module, args, states: recorder.take(FINAL, "out", states)
        )
        hooks.callback(final.remove)
        engine.generate([Request(asked, seed=0)], SamplingParams(max_tokens=1, ignore_eos=True))
    recorder.scales = compat.attention_scales(model)
    recorder.rotations = rotations(model, len(asked))
    found = recorder.recorded(engine.dtype)
    found.fused = dict(getattr(model, "packed_modules_mapping", FUSED))
    targets = torch.tensor(token_ids)[rows + 1]
    states = found.records[FINAL].output.to(engine.topology.device)
    found.logprobs = logprobs_of_states(model, states, targets, temperature)
    return found


def rows_of(in_batch: bool, tensor: Tensor) -> Tensor | None:
    """vLLM's tensors have a row for each token that is computed. in_batch: the model is run by
    transformers' code, whose have one more axis before.
    """
    if in_batch and tensor.ndim >= 3 and len(tensor) == 1:
        return tensor[0]
    return tensor if tensor.ndim >= 2 else None


def rotations(model: Any, num_tokens: int) -> list[Rotation]:
    tables = [table[:num_tokens].float().cpu() for table in compat.rotary_tables(model)]
    return [Rotation(*table.chunk(2, dim=-1)) for table in tables]


def logprobs_of_states(
    model: Any, states: Tensor, targets: Tensor, temperature: float
) -> Tensor | None:
    """(num_rows,) float32; None on ranks to which vLLM gives no logits. Collective over the
    engine's ranks.
    """
    found: list[Tensor] = []
    for part, ids in zip(states.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True):
        logits = model.compute_logits(part)
        if logits is not None:
            logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
            found.append(logprobs.gather(-1, ids.to(logits.device)[:, None])[:, 0].cpu())
    return torch.cat(found) if found else None
