"""A whole run with an environment for each data source, one of which says what turns are worth."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from programs import CONFIG, metrics_of, train, write_task

from spmdrl.environments.episodes import write_rows
from spmdrl.environments.gymnasium import episode_rows
from spmdrl.environments.harbor import task_rows

pytestmark = pytest.mark.ranks

# A turn ends with a digit or a small letter. A game lasts three turns, or ends at once for the
# sample 3; sums are asked once more.
GAMES = CONFIG.replace('engine="hf"', 'engine="hf", stop_token_ids=tuple(range(4, 44))').replace(
    "max_tokens=8", "max_tokens=24"
).replace(
    "rewards=RewardConfig(workers=1)", "rewards=RewardConfig(workers=1, per_turn=True)"
).replace("    reward=reward,\n", "").replace("config = PpoConfig(", """
from spmdrl.environments.episodes import turn_rewards

class Game:
    def __init__(self, extra_info, sample_index):
        self.worth, self.count, self.index = extra_info["worth"], 0, sample_index

    def step(self, action):
        self.count += 1
        done = self.count == 3 or self.index == 3
        return {"observation": f"({self.count})", "reward": self.worth * self.count, "done": done}

def once_more(num_turns):
    return None if num_turns == 2 else "(2)"

def shape(num_turns):
    return {"turns": [0.5] * num_turns, "shape": 7}

config = PpoConfig(
    environment={"game": Game, "sums": once_more},
    reward={"game": turn_rewards, "sums": shape},
    multi_turn=MultiTurnConfig(workers=2),
    algo=AlgoConfig(advantage="reinforce_plus_plus"),
""")  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, qwen3: Path) -> Path:
    Path(tmp_path, "model").symlink_to(qwen3)
    write_task(tmp_path)
    for name in ("train", "eval"):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()]
        for i, row in enumerate(rows[::2]):
            row |= {"data_source": "game", "extra_info": {"worth": 1 + i}}
        Path(tmp_path, f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    Path(tmp_path, "cfg.py").write_text(GAMES)
    return tmp_path


def test_each_source_has_its_environment_rewards_and_metrics(folder: Path) -> None:
    done = train(folder, 1, "--config", "cfg.py", "--log_samples", "32", "--steps", "1")
    assert done.code == 0, done.output[-4000:]
    row = metrics_of(folder / "run")[-1]
    samples = [json.loads(line) for line in (folder / "run/samples/step_1.jsonl").open()]
    by_source = {s: [x for x in samples if x["data_source"] == s] for s in ("game", "sums")}
    assert len(samples) == 32 and all(by_source.values())
    for source, found in by_source.items():
        turns = [sum(m["role"] == "assistant" for m in sample["messages"]) for sample in found]
        assert row[f"{source}/turns/mean"] == pytest.approx(math.fsum(turns) / len(turns))
        mean = math.fsum(sample["reward"] for sample in found) / len(found)
        assert row[f"{source}/reward/mean"] == pytest.approx(mean)
    assert (row["reward/shape"], row["sums/reward/shape"]) == (7, 7)
    assert "game/reward/shape" not in row
    for sample in by_source["game"]:
        said = [m for m in sample["messages"] if m["role"] == "assistant"]
        assert sample["turn_rewards"] == [m.get("reward", 0) for m in said]
        assert len(said) == 1 if sample["sample"] == 3 else len(said) <= 3
        if len(said) == 3 and sample["finish_reason"] == "stop":
            assert said[-1]["observation"] == "(3)" and said[-1]["reward"] == 3 * said[0]["reward"]
    assert any(len(s["turn_rewards"]) == 3 for s in by_source["game"])


def test_a_dry_run_shows_and_refuses(folder: Path) -> None:
    done = train(folder, 1, "--config", "cfg.py", "--dry-run")
    assert done.code == 0, done.output[-4000:]
    assert "environment Game of game, environment once_more of sums" in done.output
    Path(folder, "cfg.py").write_text(GAMES.replace('"sums": once_more}', '"sum": once_more}'))
    done = train(folder, 1, "--config", "cfg.py", "--dry-run")
    assert done.code != 0
    assert "`environment` has no data_source 'sums'; it has 'game', 'sum'" in done.output


@pytest.mark.sandbox
def test_a_dry_run_of_what_the_adapters_make(folder: Path) -> None:
    """Rows without a ground truth; tools with schemas of a server and of a class."""
    rows = episode_rows("Blackjack-v1", range(8), "Play.", data_source="cards")
    task = folder / "tasks/hello"
    Path(task, "tests").mkdir(parents=True)
    Path(task, "instruction.md").write_text("Write hello into hi.")
    Path(task, "tests/test.sh").write_text("grep -q hello hi")
    write_rows(folder / "train.jsonl", [*rows, *task_rows(folder / "tasks")])
    server = Path(__file__).parents[1] / "mcp_server.py"
    adapters = CONFIG.replace("max_prompt_tokens=16", "max_prompt_tokens=500").replace(
        "    reward=reward,\n", ""
    ).replace(', eval="eval.jsonl"', "").replace("config = PpoConfig(", f"""
from spmdrl.environments.episodes import episode_reward
from spmdrl.environments.gymnasium import GymnasiumEpisode
from spmdrl.environments.harbor import Terminal, task_reward
from spmdrl.environments.mcp import mcp_tools

config = PpoConfig(
    tools=(Terminal, *mcp_tools([{sys.executable!r}, {str(server)!r}], only=["add"])),
    environment={{"cards": GymnasiumEpisode, "terminal": None}},
    reward={{"cards": episode_reward, "terminal": task_reward}},
""")  # fmt: skip
    Path(folder, "cfg.py").write_text(adapters)
    done = train(folder, 1, "--config", "cfg.py", "--dry-run")
    assert done.code == 0, done.output[-4000:]
    assert "tool shell, tool add, environment GymnasiumEpisode of cards" in done.output
    assert "train data: 9 prompts" in done.output
