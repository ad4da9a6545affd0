"""Warm-up of the tool example: from random weights to calling the tool in one case of three.

python examples/multiply/make_assets.py
python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.sft \\
    --config configs/qwen3_tiny_multiply_sft_cpu.py
"""

from spmdrl.config import OptimConfig, SftConfig, SftDataConfig, TrainConfig

config = SftConfig(
    model="runs/multiply/model",
    out="runs/multiply/sft_model",
    run_dir="runs/multiply/sft",
    steps=500,
    data=SftDataConfig(
        train="runs/multiply/sft.parquet",
        turns="all",  # the call and the answer
        chat_template_kwargs={"tools": [{"name": "multiply"}]},  # as the prompts of the run have it
        batch_size=128,
        max_tokens=48,
    ),
    actor=TrainConfig(
        dtype="float32",
        optim=OptimConfig(lr=3e-3, warmup_steps=10, schedule="linear", decay_steps=500),
    ),
)
