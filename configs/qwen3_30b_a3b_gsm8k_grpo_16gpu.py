"""GRPO on GSM8K with Qwen3-30B-A3B, a mixture of 128 experts: two nodes of 8 GPUs of 80 GB.

python examples/data/gsm8k.py --out runs/gsm8k
sbatch --nodes 2 launch/ppo.sbatch configs/qwen3_30b_a3b_gsm8k_grpo_16gpu.py

The 8 ranks of a node have the experts of a layer between them, 16 each, so that tokens travel
within a node; the same experts of both nodes, and all other weights, are sharded by FSDP2. A step
asks 128 prompts 8 times. docs/experts.md says what expert_parallel does.
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
    model="Qwen/Qwen3-30B-A3B",
    run_dir="runs/gsm8k/qwen3_30b_a3b_grpo",
    data=DataConfig(
        train="runs/gsm8k/train.parquet",
        eval="runs/gsm8k/test.parquet",
        prompts_per_step=128,
        max_prompt_tokens=512,  # the longest question has about 300 with the template
        chat_template_kwargs={"enable_thinking": False},  # answers of hundreds, not thousands
    ),
    reward="gsm8k",
    rewards=RewardConfig(workers=2, timeout_s=10.0),
    steps=116,  # 58 per epoch
    eval_every=20,
    algo=AlgoConfig(
        advantage="grpo",
        loss_args={"clip_low": 0.2, "clip_high": 0.28},
        mini_batches=2,
    ),
    rollout=RolloutConfig(
        n=8,
        temperature=1.0,
        max_tokens=1024,
        tensor_parallel=4,
        expert_parallel=True,
        max_num_seqs=256,
        gpu_memory_utilization=0.5,
    ),
    actor=TrainConfig(
        expert_parallel=8,
        micro_batch_tokens=16384,
        activation_checkpointing=True,
        offload_optimizer=True,
        optim=OptimConfig(lr=1e-6, weight_decay=0.01, warmup_steps=10),
    ),
    checkpoint=CheckpointConfig(every_steps=58, keep=2),
)
