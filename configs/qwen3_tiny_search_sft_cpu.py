"""Warm-up of the search example: from random weights to searching in two cases of five.

python examples/search/make_assets.py
python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.sft \\
    --config configs/qwen3_tiny_search_sft_cpu.py
"""

from spmdrl.config import OptimConfig, SftConfig, SftDataConfig, TrainConfig

config = SftConfig(
    model="runs/search/model",
    out="runs/search/sft_model",
    run_dir="runs/search/sft",
    steps=500,
    data=SftDataConfig(
        train="runs/search/sft.parquet",
        turns="all",  # the search and the answer; what was found is not learnt
        batch_size=128,
        max_tokens=64,
    ),
    actor=TrainConfig(
        dtype="float32",
        optim=OptimConfig(lr=3e-3, warmup_steps=10, schedule="linear", decay_steps=500),
    ),
)
