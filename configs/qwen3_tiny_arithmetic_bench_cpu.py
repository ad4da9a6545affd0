"""GDPO: a reward of each digit is normalised by itself before they are added up.

Source: arXiv 2601.05242. The reward of the other configs has no keys, so this one has its own.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_bench_cpu.py
"""

from dataclasses import replace

from qwen3_tiny_arithmetic_grpo_cpu import config as grpo
from qwen3_tiny_arithmetic_grpo_cpu import exact_match


def by_digit(response: str, ground_truth: str) -> dict[str, float]:
    """`score` is logged and evaluated; GDPO learns from the digits, units first as in the task."""
    given = response.strip()
    return {
        "score": exact_match(response, ground_truth),
        "units": float(given[:1] == ground_truth[:1]),
        "tens": float(given[1:] == ground_truth[1:]),
    }


config = replace(
    grpo,
    run_dir="runs/arithmetic/gdpo",
    reward=by_digit,
    algo=replace(
        grpo.algo, advantage="gdpo", advantage_args={"reward_keys": {"units": 1.0, "tens": 1.0}}
    ),
)
