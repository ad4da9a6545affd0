"""GRPO with an environment of the package verifiers, on two CPU cores: it learns to call its tool.

Starts from the model that configs/qwen3_tiny_multiply_sft_cpu.py leaves. verifiers is installed in
a Python of its own, runs/verifiers. docs/verifiers.md

python -m venv runs/verifiers && runs/verifiers/bin/pip install verifiers==0.3.1
python examples/verifiers/make_rows.py
python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config examples/verifiers/multiply_run.py
"""

from pathlib import Path

from spmdrl.config import (
    AlgoConfig,
    CheckpointConfig,
    DataConfig,
    OptimConfig,
    PpoConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)
from spmdrl.environments.verifiers import verifiers_agent

HERE = str(Path(__file__).parent.resolve())

config = PpoConfig(
    model="runs/multiply/sft_model",
    run_dir="runs/multiply/verifiers",
    data=DataConfig(
        train="runs/multiply/verifiers_train.jsonl",
        eval="runs/multiply/verifiers_eval.jsonl",
        prompts_per_step=64,
        max_prompt_tokens=16,
    ),
    agent=verifiers_agent("runs/verifiers/bin/python", "multiply-env", env={"PYTHONPATH": HERE}),
    reward="agent",
    rewards=RewardConfig(workers=1),
    steps=30,
    eval_every=10,
    eval_temperature=1.0,
    algo=AlgoConfig(advantage="grpo", mini_batches=2),
    rollout=RolloutConfig(n=8, max_tokens=32, dtype="float32", kv_cache_mib=64),
    actor=TrainConfig(
        dtype="float32", optim=OptimConfig(lr=1e-3, weight_decay=0.0, warmup_steps=5)
    ),
    checkpoint=CheckpointConfig(every_steps=30, keep=1),
)
