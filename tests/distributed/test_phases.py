"""What phases record, and what is said of a failure between them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from spmdrl.distributed.phases import Phases
from spmdrl.training.logs.trace import SpanLog, phase_metrics, totals_of


def test_a_clock_that_is_set_changes_no_duration(
    topology: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By 400 days, forwards and back."""
    phases = Phases(topology)
    spans = SpanLog(phases)
    began = time.time()
    real = time.time
    for jump_s in (34_560_000.0, -34_560_000.0):
        with phases("rollout"):
            monkeypatch.setattr(time, "time", lambda jump_s=jump_s: real() + jump_s)
            time.sleep(0.01)
        metrics = phase_metrics(totals_of(*spans.report(1)))
        assert 0.01 <= metrics["time/rollout_s"] < 5, metrics
        assert 0 <= metrics["idle/share"] <= 1
    with phases("reward"):
        pass
    [span] = phases.take_spans()
    assert abs(span.start - began) < 60  # as dates in a trace
