"""DAPO: clip-higher, dynamic sampling with a cap, token-mean loss, soft overlong punishment.

Source: arXiv 2503.14476. Made from its sibling; see there for the model.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_arithmetic_dapo_cpu.py
"""

from dataclasses import replace

from qwen3_tiny_arithmetic_grpo_cpu import config as grpo

from spmdrl.config import AlgoConfig

config = replace(
    grpo,
    run_dir="runs/arithmetic/dapo",
    algo=AlgoConfig(
        advantage="grpo",
        loss_args={"clip_low": 0.2, "clip_high": 0.28},
        aggregation="token_mean",
        dynamic_sampling=4,  # rounds at most; towards the end most prompts are solved
        overlong_buffer=3,  # of max_tokens=8: the right answers have at most four tokens
        overlong_penalty=0.5,
        mini_batches=4,
    ),
)
