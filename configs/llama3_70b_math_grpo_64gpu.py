"""GRPO on MATH with Llama 3.3 70B: 64 GPUs of 80 GB, 8 nodes.

python examples/data/math_problems.py --out runs/math
sbatch --nodes 8 launch/ppo.sbatch configs/llama3_70b_math_grpo_64gpu.py

The weights are sharded by FSDP2 over all 64; 8 vLLM engines have 8 GPUs each. The model is gated:
set HF_TOKEN. Planned, not run.
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
    model="meta-llama/Llama-3.3-70B-Instruct",
    run_dir="runs/math/llama3_70b_grpo",
    data=DataConfig(
        train="runs/math/train.parquet",
        eval="runs/math/test.parquet",
        prompts_per_step=128,
        max_prompt_tokens=1024,
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
        tensor_parallel=8,
        gpu_memory_utilization=0.6,
    ),
    actor=TrainConfig(
        offload_params=True,
        offload_optimizer=True,
        micro_batch_tokens=16384,
        activation_checkpointing=True,
        optim=OptimConfig(lr=1e-6, weight_decay=0.01, warmup_steps=10),
    ),
    checkpoint=CheckpointConfig(every_steps=50, keep=2),
)
