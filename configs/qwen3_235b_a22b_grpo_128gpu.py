"""GRPO with Qwen3-235B-A22B on 128 GPUs of 80 GB: 16 hosts of 8.

python -m spmdrl.ppo --config configs/qwen3_235b_a22b_grpo_128gpu.py \\
    --dry-run --ranks 128 --gpu_gib 80

Trained by Megatron in 8 pipeline stages, 4 tensor-parallel ranks each, the experts of a layer over
8. Sampled by 16 vLLM engines of 8 GPUs. It was planned, and never run: docs/megatron.md.
"""

from spmdrl.config import (
    AlgoConfig,
    CheckpointConfig,
    DataConfig,
    OptimConfig,
    PpoConfig,
    RolloutConfig,
    TrainConfig,
)

LAYOUT = {
    "engine": "megatron",
    "tensor_parallel": 4,
    "sequence_parallel": True,
    "pipeline_parallel": 8,
    # 94 layers: 11, then 6 times 12, and 11, beside the embedding and the head
    "num_layers_in_first_pipeline_stage": 11,
    "num_layers_in_last_pipeline_stage": 11,
    "expert_parallel": 8,
    "micro_batch_tokens": 16384,
    "offload_params": True,
}

config = PpoConfig(
    model="Qwen/Qwen3-235B-A22B",
    run_dir="runs/qwen3_235b_grpo",
    data=DataConfig(
        train="runs/gsm8k/train.parquet",
        prompts_per_step=256,
        max_prompt_tokens=1024,
    ),
    reward="gsm8k",
    steps=100,
    algo=AlgoConfig(advantage="grpo", kl_coef=0.001, mini_batches=2),
    rollout=RolloutConfig(
        n=8,
        max_tokens=8192,
        tensor_parallel=8,
        max_num_seqs=256,
        gpu_memory_utilization=0.8,  # Megatron's weights come back for a checkpoint
    ),
    actor=TrainConfig(
        **LAYOUT,
        offload_optimizer=True,
        activation_checkpointing=True,
        optim=OptimConfig(lr=1e-6, weight_decay=0.1, warmup_steps=10),
    ),
    ref=TrainConfig(**LAYOUT),
    checkpoint=CheckpointConfig(every_steps=20, keep=2),
)
