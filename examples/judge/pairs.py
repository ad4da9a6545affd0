"""GRPO by win rates: a frozen Qwen3-8B compares the answers to a prompt two by two. 8 GPUs, the
last two of which score. docs/judge.md

Held-out answers are compared with the row's `ground_truth`, a good answer that somebody wrote; so
`eval/reward` is the win rate against it, and rises, while `reward/mean` is 0.5 in every step.

python -m spmdrl.launch --nproc-per-node 8 -m spmdrl.ppo --config examples/judge/pairs.py
"""

from spmdrl.config import (
    AlgoConfig,
    DataConfig,
    JudgeConfig,
    OptimConfig,
    PpoConfig,
    RolloutConfig,
    TrainConfig,
)

config = PpoConfig(
    model="Qwen/Qwen3-4B",
    run_dir="runs/judge_pairs",
    data=DataConfig(
        train="runs/open_questions/train.parquet",
        eval="runs/open_questions/eval.parquet",
        prompts_per_step=60,
        max_prompt_tokens=1024,
        chat_template_kwargs={"enable_thinking": False},
    ),
    reward="judge",
    judge=JudgeConfig(
        "Qwen/Qwen3-8B",
        compare="pairs",
        rubric="The better answer is true, says what was asked for, and is easy to read.",
        opponents=3,  # of the 7 others: 24 comparisons a prompt and not 56
        unparsable=0.5,
        max_prompt_tokens=6144,
        max_tokens=512,
        gpu_memory_utilization=0.85,  # nobody else is on its ranks
        chat_template_kwargs={"enable_thinking": False},
    ),
    placement={"actor": "0-5", "rollout": "0-5", "reward": "6-7"},
    steps=200,
    algo=AlgoConfig(advantage="grpo", mini_batches=2),
    rollout=RolloutConfig(n=8, max_tokens=2048),
    actor=TrainConfig(optim=OptimConfig(lr=1e-6, warmup_steps=10)),
)
