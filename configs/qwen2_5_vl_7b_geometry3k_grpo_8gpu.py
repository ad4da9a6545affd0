"""GRPO on Geometry3K with Qwen2.5-VL-7B: 8 GPUs of 80 GB.

python examples/data/geometry3k.py --out runs/geometry3k
python -m spmdrl.launch --nproc-per-node 8 -m spmdrl.ppo \\
    --config configs/qwen2_5_vl_7b_geometry3k_grpo_8gpu.py

Problems of geometry with a figure each; the tower for images stays as it is. Planned, not run.
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
    model="Qwen/Qwen2.5-VL-7B-Instruct",
    run_dir="runs/geometry3k/qwen2_5_vl_7b_grpo",
    data=DataConfig(
        train="runs/geometry3k/train.parquet",
        eval="runs/geometry3k/test.parquet",
        prompts_per_step=128,
        max_prompt_tokens=2048,
        image_max_pixels=1024 * 28 * 28,  # 1,024 tokens
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
        max_tokens=2048,
        max_num_seqs=256,
        gpu_memory_utilization=0.5,
    ),
    actor=TrainConfig(
        freeze_vision=True,
        offload_optimizer=True,
        micro_batch_tokens=16384,
        activation_checkpointing=True,
        optim=OptimConfig(lr=1e-6, weight_decay=0.01, warmup_steps=10),
    ),
    checkpoint=CheckpointConfig(every_steps=50, keep=2),
)
