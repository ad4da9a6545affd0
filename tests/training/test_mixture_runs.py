"""Whole runs whose prompts a mixture with a curriculum chooses: on one rank and two, resumed, and
sampling ahead. Rewards depend on the prompt alone, so that what is drawn can be compared exactly.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from programs import CONFIG, metrics_of, samples_of, train

pytestmark = pytest.mark.ranks

MIXTURE = CONFIG.replace("def reward(response, ground_truth):", '''
def last_word(messages):
    return None

def again(messages, num_turns):
    return None if num_turns == 2 else "Again."

def reward(sample_index, ground_truth):
    return float(sample_index < int(ground_truth))

def unused(response, ground_truth):''').replace(
    "prompts_per_step=8,", """prompts_per_step=6, sampler=SamplerConfig(
        weights={"talk": 2, "look": 1}, curriculum="success_rate", drop_solved=1, return_after=3),
    """,
)  # fmt: skip
MIXTURE = MIXTURE.replace("every_steps=0", "every_steps=3").replace("    steps=2,\n", "")
MIXTURE = MIXTURE.replace('eval="eval.jsonl", ', "").replace("(),", "(), log_samples=64,")


def write_rows(folder: Path) -> None:
    """Half of each source is always solved, the other half sometimes: ground_truth of 4 times."""
    rows = [
        {"data_source": source, "prompt": [{"role": "user", "content": f"{i}+{i}="}],
         "reward_model": {"style": "rule", "ground_truth": "4" if i % 2 else "2"}}
        for source, size in (("look", 12), ("talk", 8)) for i in range(size)
    ]  # fmt: skip
    Path(folder, "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, qwen3):
    path = tmp_path_factory.mktemp("mixture")
    Path(path, "model").symlink_to(qwen3)
    write_rows(path)
    Path(path, "cfg.py").write_text(MIXTURE)
    return path


def run(folder: Path, ranks: int, name: str, *args: str) -> list[dict]:
    done = train(folder, ranks, "--config", "cfg.py", "--run_dir", name, *args)
    assert done.code == 0, done.output[-5000:]
    return metrics_of(folder / name)


def drawn(folder: Path, name: str, step: int) -> list[int]:
    """The ids of the prompts of a step, in the order of their groups."""
    rows = samples_of(folder / name, step)
    return list(dict.fromkeys(row["prompt_id"] for row in rows))


def of_prompts(row: dict) -> dict:
    marks = ("prompts/", "success_rates/", "share", "success_rate", "reward/mean")
    return {k: v for k, v in row.items() if k.startswith(marks) or k.endswith(marks)}


def test_a_mixture_goes_on_bit_for_bit_and_on_another_number_of_ranks(folder):
    whole = run(folder, 1, "whole", "--epochs", "1.7")  # of 20 // 6 = 3 steps
    assert [row["step"] for row in whole] == [1, 2, 3, 4, 5]
    start = str(folder / "whole/checkpoints/step_00000003")
    for ranks in (1, 2):
        name = f"resumed_{ranks}"
        rows = run(folder, ranks, name, "--steps", "5", "--resume", start)
        for step, row in zip((4, 5), rows, strict=True):
            assert drawn(folder, name, step) == drawn(folder, "whole", step)
            assert of_prompts(row) == of_prompts(whole[step - 1])
        if ranks == 1:
            assert rows == whole[3:]
    seen: Counter[int] = Counter()
    for step, row in enumerate(whole, start=1):
        prompts = drawn(folder, "whole", step)
        assert (len(prompts), row["look/share"]) == (6, pytest.approx(2 / 6))
        solved = [id for id in prompts if (id if id < 12 else id - 12) % 2]
        assert not any(seen[id] for id in solved)  # they rest
        seen.update(prompts)
        assert row["prompts/success_rate"] == (len(solved) * 4 + (6 - len(solved)) * 2) / 24
        assert row["prompts/known"] == len(seen) / 20
        assert row["success_rates/100"] == len([id for id in seen if id % 2]) / len(seen)
    assert whole[-1]["prompts/dropped"] > 0.1
    config = (folder / "whole/config.py").read_text()
    assert "epochs=1.7," in config and " steps=" not in config


def test_sampling_ahead_draws_the_same_after_a_resume(folder):
    ahead = ("--async_steps", "1", "--placement", '{"actor":"0","rollout":"1"}', "--steps", "5",
             "--algo.correction.level", "token")  # fmt: skip
    whole = run(folder, 2, "ahead", *ahead)
    shutil.copytree(folder / "ahead", folder / "again")
    shutil.rmtree(folder / "again/checkpoints/step_00000005")
    rows = run(folder, 2, "again", *ahead, "--resume", "auto")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for step in (4, 5):
        assert drawn(folder, "again", step) == drawn(folder, "ahead", step)
        assert of_prompts(rows[step - 1]) == of_prompts(whole[step - 1])
    assert len({id for step in range(1, 6) for id in drawn(folder, "ahead", step)}) > 12


def test_environments_have_weights_and_what_dynamic_sampling_leaves_out_is_known(folder):
    both = "environment={'talk': again, 'look': last_word}, "
    Path(folder, "environments.py").write_text(MIXTURE.replace("    reward=", f"    {both}reward="))
    args = ("--config", "environments.py", "--run_dir", "environments", "--steps", "3",
            "--rollout.max_tokens", "32", "--algo.dynamic_sampling", "3")  # fmt: skip
    done = train(folder, 2, *args)
    assert done.code == 0, done.output[-5000:]
    known: set[int] = set()
    rows = metrics_of(folder / "environments")
    for step, row in enumerate(rows, start=1):
        prompts = drawn(folder, "environments", step)
        looks = [id for id in prompts if id < 12]
        assert row["look/share"] == len(looks) / len(prompts)
        # each round has the share, rounded down or up
        assert abs(len(looks) - len(prompts) / 3) <= row["dynamic_sampling/rounds"]
        known |= set(prompts)
        assert row["prompts/known"] == len(known) / 20
        assert row["look/turns/mean"] == 1
    assert max(row["talk/turns/mean"] for row in rows) > 1
    assert rows[-1]["dynamic_sampling/groups"] > 0 and len(known) > 12


def test_a_dry_run_tries_a_function_that_chooses(folder):
    mixed = MIXTURE[MIXTURE.index("SamplerConfig(") : MIXTURE.index("return_after=3)") + 15]
    one = MIXTURE.replace(mixed, "SamplerConfig(function=lambda *given: [0])")
    Path(folder, "first.py").write_text(one)
    done = train(folder, 1, "--config", "first.py", "--dry-run", "--steps", "1")
    assert done.code == 2 and "data.sampler.function returned 1 place," in done.output
