"""GRPO on MATH with Qwen3-8B: 8 GPUs of 80 GB.

python examples/data/math_problems.py --out runs/math
python -m spmdrl.launch --nproc-per-node 8 -m spmdrl.ppo \\
    --config configs/qwen3_8b_math_grpo_8gpu.py

The optimizer lies on the hosts while answers are sampled. Planned, not run.
"""

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

config = PpoConfig(
    model="Qwen/Qwen3-8B",
    run_dir="runs/math/qwen3_8b_grpo",
    data=DataConfig(
        train="runs/math/train.parquet",
        eval="runs/math/test.parquet",
        prompts_per_step=128,
        max_prompt_tokens=1024,
        chat_template_kwargs={"enable_thinking": False},  # answers of hundreds, not thousands
        max_eval_prompts=500,
    ),
    reward="math",
    rewards=RewardConfig(workers=4, timeout_s=15.0),
    steps=200,
    eval_every=20,
    algo=AlgoConfig(
        advantage="grpo",
        # more room upwards keeps the entropy from collapsing (DAPO, arXiv 2503.14476)
        loss_args={"clip_low": 0.2, "clip_high": 0.28},
        mini_batches=2,
    ),
    rollout=RolloutConfig(
        n=8,
        max_tokens=4096,
        max_num_seqs=256,
        gpu_memory_utilization=0.5,
    ),
    actor=TrainConfig(
        offload_optimizer=True,
        micro_batch_tokens=16384,
        activation_checkpointing=True,
        optim=OptimConfig(lr=1e-6, weight_decay=0.01, warmup_steps=10),
    ),
    checkpoint=CheckpointConfig(every_steps=50, keep=2),
)
