"""GRPO with DeepSeek-V3 or R1, 671 billion parameters, on 256 GPUs of 80 GB: 32 hosts of 8.

python -m spmdrl.ppo --config configs/deepseek_v3_grpo_256gpu.py --dry-run --ranks 256 --gpu_gib 80

Trained by Megatron in 16 pipeline stages, the experts of a layer over 16 ranks: the cut of verl's
published run, which had 512 GPUs of 96 GB. Sampled by 8 vLLM engines of 32 GPUs in bfloat16.
It was planned, and never run: docs/megatron.md says what was.
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
    "pipeline_parallel": 16,
    # 61 layers: 3 in the first stage, the dense ones, then 14 times 4, and 2
    "num_layers_in_first_pipeline_stage": 3,
    "num_layers_in_last_pipeline_stage": 2,
    "expert_parallel": 16,
    "micro_batch_tokens": 8192,
    "offload_params": True,
}

config = PpoConfig(
    model="deepseek-ai/DeepSeek-V3",
    run_dir="runs/deepseek_v3_grpo",
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
        max_tokens=4096,
        tensor_parallel=32,
        max_num_seqs=256,
        gpu_memory_utilization=0.7,
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
