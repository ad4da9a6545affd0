"""The strict mode on a GPU: vLLM's logprobs and the trainer's, bit for bit, in bfloat16."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_the_bench_finds_no_difference():
    """It builds engine and trainer twice, and prints by how much they differ."""
    bench = Path(__file__).parents[2] / "examples" / "bench" / "strict.py"
    done = subprocess.run(
        [sys.executable, str(bench), "--runs", "1"], env=dict(os.environ), capture_output=True,
        text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    assert '{"strict": true, "largest difference": 0.0}' in done.stdout, done.stdout
