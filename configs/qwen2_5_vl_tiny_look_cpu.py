"""GRPO where the image comes from the environment, on two CPU cores: from random weights.

python examples/colours/make_assets.py
python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen2_5_vl_tiny_look_cpu.py

The prompt says nothing of the colour. Whatever the policy says first, the environment shows it a
picture, whose colour its second turn has to name. docs/vision.md
"""

from typing import Any

from spmdrl.config import (
    AlgoConfig,
    CheckpointConfig,
    DataConfig,
    MultiTurnConfig,
    OptimConfig,
    PpoConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)

COLOURS = {"r": (210, 40, 40), "g": (40, 190, 60), "b": (50, 60, 220), "y": (220, 210, 50)}


def look(num_turns: int, ground_truth: str, extra_info: dict[str, Any]) -> Any:
    """Shows a picture of the colour after the first turn; the second ends the sample."""
    import numpy as np
    from PIL import Image

    if num_turns > 1:
        return None
    noise = np.random.default_rng(extra_info["seed"]).integers(-30, 31, (*extra_info["size"], 3))
    return Image.fromarray((COLOURS[ground_truth] + noise).clip(0, 255).astype(np.uint8))


def names_it(response: str, ground_truth: str) -> float:
    return float(response == ground_truth)


config = PpoConfig(
    model="runs/colours/model",
    run_dir="runs/colours/look",
    data=DataConfig(
        train="runs/colours/look_train.parquet",
        eval="runs/colours/look_eval.parquet",
        prompts_per_step=32,
        max_prompt_tokens=8,
    ),
    reward=names_it,
    rewards=RewardConfig(workers=1),
    environment=look,
    multi_turn=MultiTurnConfig(max_images=1, max_image_tokens=36, workers=1),
    algo=AlgoConfig(entropy_coef=0.03),
    steps=40,
    eval_every=20,
    # every token ends a turn, so that a turn is a letter
    rollout=RolloutConfig(
        n=8, max_tokens=48, stop_token_ids=tuple(range(2, 14)), dtype="float32", kv_cache_mib=32
    ),
    actor=TrainConfig(
        dtype="float32", micro_batch_tokens=8192, optim=OptimConfig(lr=1e-3, warmup_steps=5)
    ),
    checkpoint=CheckpointConfig(every_steps=0),
)
