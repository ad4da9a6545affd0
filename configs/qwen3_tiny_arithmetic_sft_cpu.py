"""Warm-up of the arithmetic example: from random weights to adding without a carry.

python examples/arithmetic/make_assets.py
python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.sft \\
    --config configs/qwen3_tiny_arithmetic_sft_cpu.py
"""

from spmdrl.config import OptimConfig, SftConfig, SftDataConfig, TrainConfig

config = SftConfig(
    model="runs/arithmetic/model",
    out="runs/arithmetic/sft_model",
    run_dir="runs/arithmetic/sft",
    steps=400,
    data=SftDataConfig(train="runs/arithmetic/sft.parquet", batch_size=128, max_tokens=16),
    actor=TrainConfig(
        dtype="float32",
        optim=OptimConfig(lr=3e-3, warmup_steps=10, schedule="linear", decay_steps=400),
    ),
)
