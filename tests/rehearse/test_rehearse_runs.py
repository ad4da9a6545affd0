"""A rehearsal as a user starts it: a placement for 4 ranks on 2, with a resume."""

import json
import re
from pathlib import Path

import pytest
from programs import set_up, train

pytestmark = pytest.mark.ranks

PLACED = """
import dataclasses
config = dataclasses.replace(
    config, placement={"actor": "0-2", "rollout": "3"}, steps=50,
    rollout=dataclasses.replace(config.rollout, max_tokens=200),
    algo=AlgoConfig(correction=CorrectionConfig(level="token"), mini_batches=4),
    checkpoint=CheckpointConfig(every_steps=25), eval_every=25)
"""


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory, qwen3):
    folder = set_up(tmp_path_factory.mktemp("rehearsed"), qwen3)
    with Path(folder, "cfg.py").open("a") as file:
        file.write(PLACED)
    options = ("--config", "cfg.py", "--out", "out", "--rollout.temperature", "0.9")
    return folder, train(folder, 1, *options, program="spmdrl.rehearse", timeout_s=400)


def test_it_trains_saves_resumes_and_evaluates(rehearsed):
    folder, done = rehearsed
    assert done.code == 0, done.output
    assert "a run on 4 ranks, here on 2 CPU ranks" in done.output
    assert "2 steps and a checkpoint: done in" in done.output
    assert "a resume, one step more: done in" in done.output
    assert "steps trained: 1, 2, 3; held-out prompts asked behind: 0, 2" in done.output
    rows = [json.loads(line) for line in Path(folder, "out/run/metrics.jsonl").open()]
    assert {row["step"] for row in rows} == {0, 1, 2, 3}
    for what, least in (("2 steps and a checkpoint", 50), ("a resume, one step more", 30)):
        agreed = re.search(rf"{what}: 2 ranks agree in ([\d,]+) operations over (\d+)", done.output)
        assert agreed and int(agreed[1].replace(",", "")) > least and int(agreed[2]) > 5
    assert "in out/report.txt" in done.output
    assert Path(folder, "out/report.txt").read_text().strip() in done.output


def test_its_report_says_what_was_replaced_and_what_the_reward_saw(rehearsed):
    folder, done = rehearsed
    assert "placement: {'actor': '0-2', 'rollout': '3'} -> {'actor': '0', 'rollout': '1'}" in (
        done.output
    )
    assert "rollout.max_tokens: 200 -> 64 (small)" in done.output
    assert "rollout.temperature" not in done.output  # the user's own, which stays
    config = Path(folder, "out/run/config.py").read_text()
    assert "temperature=0.9" in config and "max_tokens=64" in config
    assert "right, as the bare answer: 1.0" in done.output
    assert "invalid: 0 of 48" in done.output
    assert "longest 4 of data.max_prompt_tokens=16" in done.output
    assert "memory of a rank" in done.output


def test_its_review_finds_what_the_config_has(rehearsed):
    _, done = rehearsed
    wrong = done.output.partition("what looks wrong")[2]
    assert "1 of 10 held-out prompts that were read are among those" in wrong
    assert "actor.optim.lr=0.001 is above what trains all weights" in wrong


def test_a_folder_of_others_and_a_broken_config_are_refused(rehearsed):
    folder, _ = rehearsed
    Path(folder, "mine").mkdir()
    Path(folder, "mine/notes.txt").write_text("mine")
    Path(folder, "mine/report.txt").write_text("of another program\n")
    options = ("--config", "cfg.py")
    done = train(folder, 1, *options, "--out", "mine", program="spmdrl.rehearse")
    assert done.code == 2 and "the folder has files that are no rehearsal's" in done.output
    assert Path(folder, "mine/notes.txt").read_text() == "mine"
    broken = (*options, "--out", "other", "--algo.advantage", "gae")
    done = train(folder, 1, *broken, program="spmdrl.rehearse")
    assert done.code == 2 and "critic" in done.output


def test_a_dry_run_on_one_process_plans_a_placement_on_others(rehearsed):
    folder, _ = rehearsed
    options = ("--config", "cfg.py", "--dry-run", "--ranks", "4", "--run_dir", "plan")
    done = train(folder, 1, *options)
    assert done.code == 0, done.output
    assert "on rank 3" in done.output or "ranks 3 (rollout" in done.output
