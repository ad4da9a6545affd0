"""Reads what the modules of this engine's model compute of a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.engines.fsdp.recording import logprobs_of_states, recording
from spmdrl.engines.recorded_pass import FINAL, PassRecorder, RecordedPass
from spmdrl.rollout.base import Request, SamplingParams
from spmdrl.rollout.hf.engine import HfEngine


def record_pass(
    engine: HfEngine, token_ids: list[int], rows: Tensor, temperature: float
) -> RecordedPass:
    """See spec.PassReader."""
    asked = token_ids[:-1]
    recorder = PassRecorder(len(asked), rows)
    with recording(engine.model, recorder):
        engine.generate([Request(asked, seed=0)], SamplingParams(max_tokens=1, ignore_eos=True))
    found = recorder.recorded(engine.model.dtype)
    targets = torch.tensor(token_ids)[rows + 1]
    states = found.records[FINAL].output
    found.logprobs = logprobs_of_states(engine.model, states, targets, temperature)
    return found
