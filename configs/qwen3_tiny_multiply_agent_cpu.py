"""GRPO with an agent behind an OpenAI client, on two CPU cores: it learns to call its tool.

Starts from the model that configs/qwen3_tiny_multiply_sft_cpu.py leaves. docs/agents.md

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_multiply_agent_cpu.py
"""

import json

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

NUMBER = {"type": "integer"}
MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiplies two whole numbers.",
        "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}},
    },
}


CLIENTS = []  # one, once it is needed


def connections():
    """Returns what all agents of the process send their requests by: with clients of their own each
    would load the certificates of the web. Of openai's two, that of aiohttp takes the same time for
    a request however many are under way."""
    from openai import DefaultAioHttpClient

    if not CLIENTS:
        CLIENTS.append(DefaultAioHttpClient())
    return CLIENTS[0]


async def solve(messages, ground_truth, base_url, api_key, model):
    """Asks until the model calls no tool any more; returns 1 for the right product."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=connections())
    while True:
        answer = await client.chat.completions.create(
            model=model, messages=messages, tools=[MULTIPLY]
        )
        said = answer.choices[0].message
        if not said.tool_calls:
            return float(said.content == ground_truth)
        messages = [*messages, said.model_dump(exclude_none=True)]
        for call in said.tool_calls:
            given = json.loads(call.function.arguments)
            product = str(given["a"] * given["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": product})


config = PpoConfig(
    model="runs/multiply/sft_model",
    run_dir="runs/multiply/agent",
    data=DataConfig(
        train="runs/multiply/train.parquet",
        eval="runs/multiply/eval.parquet",
        prompts_per_step=64,
        max_prompt_tokens=16,
    ),
    agent=solve,
    reward="agent",
    rewards=RewardConfig(workers=1),
    steps=30,
    eval_every=10,
    eval_temperature=1.0,
    algo=AlgoConfig(advantage="grpo", mini_batches=2),
    rollout=RolloutConfig(n=8, max_tokens=32, dtype="float32", kv_cache_mib=64),
    actor=TrainConfig(
        dtype="float32", optim=OptimConfig(lr=1e-3, weight_decay=0.0, warmup_steps=5)
    ),
    checkpoint=CheckpointConfig(every_steps=30, keep=1),
)
