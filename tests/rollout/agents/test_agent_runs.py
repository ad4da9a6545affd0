"""Whole runs whose samples agents make: the same numbers on any number of ranks, agents of several
frameworks, programs, and trajectories that outlive a step.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from programs import CONFIG, metrics_of, samples_of, train, write_task
from vision_task import IMAGE_CONFIG, save_task

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]

ASK = """
CLIENTS = []

def connections():
    import httpx
    if not CLIENTS:
        CLIENTS.append(httpx.AsyncClient(timeout=120, verify=False))
    return CLIENTS[0]

async def ask(base_url, api_key, model, messages, **given):
    body = {"model": model, "messages": messages} | given
    key = {"authorization": f"Bearer {api_key}"}
    found = await connections().post(f"{base_url}/chat/completions", json=body, headers=key)
    answer = found.json()
    return answer["choices"][0]["message"]["content"], answer["id"]

async def play(messages, base_url, api_key, model, sample_index):
    '''Three turns, and a conversation beside them; every fourth sample drops what it said.'''
    asked, score, turns = list(messages), 0.0, {}
    for turn in range(3):
        said, id = await ask(base_url, api_key, model, asked)
        turns[id] = 0.125 * turn
        score += sum(letter.isdigit() for letter in said)
        if sample_index == 3:
            said = "cut"
        asked += [{"role": "assistant", "content": said}, reply(turn, sample_index)]
    await ask(base_url, api_key, model, [{"role": "user", "content": "aside"}], max_tokens=4)
    return {"score": score, "asked": len(asked), **({"turns": turns} if PER_TURN else {})}

PER_TURN = False

def reply(turn, sample_index):
    return {"role": "user", "content": f"({turn})"}

config = PpoConfig(
    agent=play,
"""
SHOWN = """    rewards=RewardConfig(workers=1, per_turn=True),
    agents=AgentConfig(max_images=5, max_image_tokens=12),
)

PER_TURN = True

def reply(turn, sample_index):
    import base64
    from tiny_models import png
    uri = "data:image/png;base64," + base64.b64encode(png(turn, 8 * (1 + sample_index), 8)).decode()
    image = {"type": "image_url", "image_url": {"url": uri}}
    return {"role": "user", "content": [image, {"type": "text", "text": f"({turn})"}]}
"""


def with_agent(config: str, ends: str = ")\n", max_prompt_tokens: int = 60) -> str:
    """Returns a config file of a task with the agent in place of the reward."""
    config = config.replace("reward=reward,", 'reward="agent",')
    if "per_turn" in ends:
        config = config.replace("    rewards=RewardConfig(workers=1),\n", "")
    config = re.sub(r"max_prompt_tokens=\d+", f"max_prompt_tokens={max_prompt_tokens}", config)
    return config.replace("config = PpoConfig(", ASK).rstrip().removesuffix(")") + ends


PLAY = with_agent(CONFIG)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, qwen3):
    path = tmp_path_factory.mktemp("agents")
    Path(path, "model").symlink_to(qwen3)
    write_task(path)
    Path(path, "play.py").write_text(PLAY)
    Path(path, "seen").mkdir()
    save_task(path / "seen")
    Path(path, "seen", "play.py").write_text(with_agent(IMAGE_CONFIG, SHOWN, 200))
    return path


def run(folder: Path, name: str, ranks: int, *args: str) -> list[dict]:
    config = [] if "--config" in args else ["--config", "play.py"]
    done = train(folder, ranks, *config, "--run_dir", name, "--log_samples", "32", *args)
    assert done.code == 0, done.output[-4000:]
    return metrics_of(folder / name)


SAME = ("reward/mean", "turns/mean", "turns/reply_tokens", "response/tokens", "rollout/loss_tokens",
        "agents/rows", "actor/loss", "actor/grad_norm", "advantage/std")  # fmt: skip


def test_numbers_do_not_depend_on_the_ranks(folder):
    """Rows of a trajectory are dealt to ranks one by one, with the images that they show."""
    folder = folder / "seen"
    vllm = ("--rollout.engine", "vllm", "--data.eval", "None")
    alone = run(folder, "alone", 1, *vllm)
    assert all(row["actor/logprob_diff_max"] < 1e-4 for row in alone)
    assert all(row["actor/ratio_max"] == 1.0 for row in alone)
    # a talk is one row, but where what was said is dropped each turn begins another
    assert alone[0]["reward/turns"] == 0.125 + 0.25  # by the ids of answers, in all rows
    assert alone[0]["agents/rows"] == (3 * 2 + 4) / 4 and alone[0]["turns/mean"] == 4
    for sample in samples_of(folder / "alone", 1):
        rows = sample["rows"]
        assert [sum(m["role"] == "assistant" for m in row) for row in rows] == (
            [1, 1, 1, 1] if sample["sample"] == 3 else [3, 1]
        )
        assert sample["agent_output"]["asked"] == 7 == sample["asked"]
    for name, tensor_parallel in (("two engines", "1"), ("two ranks of one engine", "2")):
        rows = run(folder, name, 2, *vllm, "--rollout.tensor_parallel", tensor_parallel)
        for row, right in zip(rows, alone, strict=True):
            for key in SAME:
                if key in right:
                    assert row[key] == pytest.approx(right[key], rel=1e-4), (name, key)


def test_trajectories_go_on_in_the_next_step_and_after_a_resume(folder):
    slow = PLAY.replace(
        "    asked, score, turns =",
        "    import asyncio, zlib\n"
        "    await asyncio.sleep(zlib.crc32(f'{messages}{sample_index}'.encode()) % 7 / 7)\n"
        "    asked, score, turns =",
    )
    Path(folder, "slow.py").write_text(slow)
    args = ["--config", "slow.py", "--rollout.oversample", "1.5", "--algo.correction.level",
            "token", "--checkpoint.every_steps", "2", "--agents.max_staleness", "1",
            "--data.eval", "None"]  # fmt: skip
    run(folder, "partial", 2, *args)
    files = sorted((folder / "partial/checkpoints/step_00000002").glob("leftover_*.pt"))
    saved = [torch.load(path, weights_only=True) for path in files]
    assert all(each["by_agents"] for each in saved)
    left = len(saved[0]["questions"]) + sum(len(each["trajectories"]) for each in saved)
    assert left == 4 * len(saved[0]["prompts"]) > 0
    rows = run(folder, "partial", 1, *args, "--steps", "4", "--resume", "auto")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for step, row in enumerate(rows, start=1):
        assert row["reward/invalid"] == 0 and row["turns/mean"] == 4
        assert row["staleness/max"] <= 2
        assert len(samples_of(folder / "partial", step)) == 32


FRAMEWORKS = PLAY.replace("    agent=play,", '''    agent={"a": pydantic, "b": graph, "c": PROGRAM},
    agents=AgentConfig(retries=1, timeout_s=120),''').replace("config = PpoConfig(", '''
def digits(text):
    return float(sum(letter.isdigit() for letter in text))

async def pydantic(prompt, base_url, api_key, model):
    """pydantic-ai; fails at the first try."""
    from pathlib import Path
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    tried = Path("tried")
    if not tried.exists():
        tried.touch()
        raise RuntimeError("the first try of all")
    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    result = await Agent(OpenAIChatModel(model, provider=provider)).run(prompt)
    return digits(result.output)

async def graph(prompt, base_url, api_key, model):
    """langgraph: a graph of one node, by LangChain's client."""
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph

    chat = ChatOpenAI(base_url=base_url, api_key=api_key, model=model)

    async def answer(state):
        return {"messages": [await chat.ainvoke(state["messages"])]}

    built = StateGraph(MessagesState).add_node("answer", answer).add_edge(START, "answer")
    state = await built.add_edge("answer", END).compile().ainvoke({"messages": [("user", prompt)]})
    return digits(state["messages"][-1].content)

import sys

PROGRAM = [sys.executable, "program.py", "{prompt}"]

config = PpoConfig(
''', 1)  # fmt: skip
PROGRAM = """
import json, os, sys
import httpx

url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
row = json.loads(os.environ["SPMDRL_ROW"])
assert row["prompt"] == sys.argv[1]
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}]}
answer = httpx.post(f"{url}/chat/completions", json=body, timeout=60,
                    headers={"authorization": f"Bearer {key}"}).json()
said = answer["choices"][0]["message"]["content"]
print("said", repr(said))
print(json.dumps({"score": float(sum(c.isdigit() for c in said))}))
"""


def test_agents_of_frameworks_and_a_program_learn(folder):
    """Each data_source has an agent of its own; the reward is the number of digits said."""
    for name in ("train", "eval"):
        rows = [json.loads(line) for line in Path(folder, f"{name}.jsonl").open()]
        for i, row in enumerate(rows):
            row["data_source"] = "abc"[i % 3]
        Path(folder, f"{name}_3.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    Path(folder, "frameworks.py").write_text(FRAMEWORKS)
    Path(folder, "program.py").write_text(PROGRAM)
    rows = run(folder, "frameworks", 2, "--config", "frameworks.py", "--steps", "4",
               "--data.train", "train_3.jsonl", "--data.eval", "eval_3.jsonl",
               "--actor.optim.lr", "0.01")  # fmt: skip
    assert Path(folder, "tried").exists()
    assert all(row["reward/invalid"] == 0 for row in rows[1:])
    for source in "abc":
        held_out = [row for row in rows if f"eval/{source}/reward" in row]
        first, last = held_out[0], held_out[-1]
        assert last[f"eval/{source}/reward"] > first[f"eval/{source}/reward"] + 2, source
    samples = [s for step in (1, 2, 3, 4) for s in samples_of(folder / "frameworks", step)]
    outputs = [s["agent_output"]["output"] for s in samples if s["data_source"] == "c"]
    assert outputs and all(output.startswith("said ") for output in outputs)
