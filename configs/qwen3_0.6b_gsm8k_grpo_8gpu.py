"""GRPO on GSM8K with Qwen3-0.6B: two epochs on 8 GPUs of 40 GB or more.

python examples/data/gsm8k.py --out runs/gsm8k
python -m spmdrl.launch --nproc-per-node 8 -m spmdrl.ppo \\
    --config configs/qwen3_0.6b_gsm8k_grpo_8gpu.py

A step asks 128 prompts 8 times: 1,024 answers, 128 per GPU, learnt in two optimizer steps.
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
    model="Qwen/Qwen3-0.6B",
    run_dir="runs/gsm8k/qwen3_0.6b_grpo",
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
        # more room upwards keeps the entropy from collapsing (DAPO, arXiv 2503.14476)
        loss_args={"clip_low": 0.2, "clip_high": 0.28},
        mini_batches=2,
    ),
    rollout=RolloutConfig(
        n=8,
        temperature=1.0,
        max_tokens=1024,
        max_num_seqs=128,
        gpu_memory_utilization=0.5,
    ),
    actor=TrainConfig(
        micro_batch_tokens=65536,  # of a small model: few launches, which the GPU would wait for
        activation_checkpointing=True,
        optim=OptimConfig(lr=2e-6, weight_decay=0.01, warmup_steps=10),
    ),
    checkpoint=CheckpointConfig(every_steps=58, keep=2),
)
