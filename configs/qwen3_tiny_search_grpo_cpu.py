"""GRPO with a search engine in the format of Search-R1, on two CPU cores. docs/search.md

Starts from the model that configs/qwen3_tiny_search_sft_cpu.py leaves, and asks the server
examples/search/retriever.py. `python examples/search/run.py` does all of it.

python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.ppo \\
    --config configs/qwen3_tiny_search_grpo_cpu.py
"""

import os
import re
import string

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

URL = os.environ.get("SEARCH_URL", "http://127.0.0.1:8817/retrieve")
TOPK = 2
QUERY = re.compile(r"<search>(.*?)</search>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
CLIENTS: dict = {}  # of the process that searches: a client takes longer to make than a search


async def search_engine(messages: list[dict]) -> str | None:
    """Answers a turn that searches with what was found; any other turn is the last."""
    import httpx

    queries = QUERY.findall(messages[-1]["content"])
    if not queries:
        return None
    if URL not in CLIENTS:
        CLIENTS[URL] = httpx.AsyncClient(timeout=20)
    asked = {"queries": [queries[-1].strip()], "topk": TOPK}
    found = (await CLIENTS[URL].post(URL, json=asked)).raise_for_status().json()["result"][0]
    texts = [hit["document"]["contents"] for hit in found]
    shown = " ".join(f"Doc {i}: {text}" for i, text in enumerate(texts, start=1))
    return f"<information> {shown} </information>"


def exact_match(response: str, ground_truth: str, num_turns: int) -> dict[str, float]:
    """1 where the last answer is the right one, but for case, articles, punctuation and space."""
    answers = ANSWER.findall(response)
    right = bool(answers) and normalised(answers[-1]) == normalised(ground_truth)
    return {"score": float(right), "searches": num_turns - 1}


def normalised(text: str) -> str:
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(word for word in bare.split() if word not in ("a", "an", "the"))


config = PpoConfig(
    model="runs/search/sft_model",
    run_dir="runs/search/grpo",
    data=DataConfig(
        train="runs/search/train.parquet",
        eval="runs/search/eval.parquet",
        prompts_per_step=64,
        max_prompt_tokens=16,
    ),
    environment=search_engine,
    multi_turn=MultiTurnConfig(max_turns=3, max_reply_tokens=40),
    reward=exact_match,
    rewards=RewardConfig(workers=1),
    steps=30,
    eval_every=10,
    eval_temperature=1.0,
    algo=AlgoConfig(advantage="grpo", mini_batches=2),
    rollout=RolloutConfig(n=8, max_tokens=64, dtype="float32", kv_cache_mib=64),
    actor=TrainConfig(
        dtype="float32", optim=OptimConfig(lr=1e-3, weight_decay=0.0, warmup_steps=5)
    ),
    checkpoint=CheckpointConfig(every_steps=30, keep=1),
)
