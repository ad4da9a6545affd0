"""Whole runs with roles on ranks of their own: the same numbers, wherever a role lives."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from fault_script import FAULT, LIMIT_S
from programs import CONFIG, finish, metrics_of, pids_of, start, train, wait_for, write_task

pytestmark = [pytest.mark.ranks, pytest.mark.strict_nccl]

# every role: critic, reference, two mini-batches, an evaluation after every step
ALL_ROLES = CONFIG.replace("    eval_every=0,\n", "    eval_every=1,\n").replace(
    "config = PpoConfig(",
    'config = PpoConfig(\n    algo=AlgoConfig(advantage="gae", kl_coef=0.01, mini_batches=2, '
    'correction=CorrectionConfig(level="token")),\n'
    '    critic=TrainConfig(dtype="float32", micro_batch_tokens=128),',
)
TIMED = ("time", "idle/", "moved/", "throughput/", "balance/", "staleness/")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, qwen3):
    path = tmp_path_factory.mktemp("placement")
    Path(path, "model").symlink_to(qwen3)
    write_task(path)
    Path(path, "cfg.py").write_text(ALL_ROLES)
    return path


def rows_of(folder, name, ranks, *args):
    done = train(folder, ranks, "--config", "cfg.py", "--steps", "2", "--run_dir", name, *args)
    assert done.code == 0, done.output[-4000:]
    assert "returned a view" not in done.output  # torch, of an FSDP2 unit
    return [
        {k: v for k, v in row.items() if not k.startswith(TIMED)}
        for row in metrics_of(folder / name)
    ]


@pytest.fixture(scope="module")
def alone(folder):
    return rows_of(folder, "alone", 1)


PLACEMENTS = {
    "split": (2, '{"actor":"0","rollout":"1"}', ()),
    "mixed": (4, '{"actor":"2-3","rollout":"0,2","ref":"1","critic":"0,3","reward":"1,3"}', ()),
    # pairs of ranks share the tokens of their sequences, not the same ones for every role
    "ulysses": (
        3,
        '{"actor":"0,2","rollout":"0-1","ref":"0-1","critic":"1-2"}',
        ("--actor.ulysses", "2", "--critic.ulysses", "2"),
    ),
    # the weights of step n are in before step n + 1 is sampled, since every step is evaluated
    "async": (3, '{"actor":"1","rollout":"0,2","critic":"1"}', ("--async_steps", "2")),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_numbers_do_not_depend_on_the_placement(folder, alone, name):
    ranks, placement, args = PLACEMENTS[name]
    rows = rows_of(folder, name, ranks, "--placement", placement, *args)
    assert len(rows) == len(alone) == 3
    for got, want in zip(rows, alone, strict=True):
        assert got.keys() == want.keys()
        for key, value in want.items():
            assert got[key] == pytest.approx(value, rel=1e-6, abs=1e-6), (want["step"], key)
    traces = sorted(Path(folder, name, "trace").glob("rank_*.jsonl"))
    assert len(traces) == ranks
    for trace in traces if "--async_steps" not in args else ():
        shows_steps_apart(trace)


WORK = ("data", "rollout", "balance", "update_actor", "update_critic", "sync", "ref_logprobs")


def shows_steps_apart(trace):
    """What a rank does in a step stands under that step, also if it only samples or scores; each
    ends with an evaluation."""
    steps = {step: [] for step in range(3)}
    for line in map(json.loads, trace.open()):
        steps[line["step"]] += line["spans"]
    ended = 0.0
    for step, spans in steps.items():
        worked = [begin for name, begin, _, _ in spans if name in WORK]
        evaluated = [span for span in spans if span[0] in ("evaluate", "wait evaluation")]
        assert step == 0 or min(worked) >= ended, (trace, step)
        assert max(worked, default=0.0) <= evaluated[0][1], (trace, step)
        ended = evaluated[-1][3]


BREAKS = """
import inspect
from spmdrl.distributed import stop_votes
from spmdrl.distributed.collectives import broadcast_object
from spmdrl.training import loop
stop_votes.LEAVE_S = 1.0
loop.broadcast_object = broadcast_object
vote = "        ending.vote(step)\\n"
source = inspect.getsource(loop.train)
exec(source.replace(vote, vote + "        if {condition}: break\\n"), vars(loop))
config = PpoConfig("""
METRIC = "metrics.get('reward/mean') is not None and step == 2"
SHARED = f"broadcast_object({METRIC}, runtime.topology.control, run.state.log_rank)"


@pytest.mark.parametrize("condition", [METRIC, SHARED], ids=["a metric", "shared"])
def test_a_break_in_the_loop_is_for_all_ranks(folder, condition):
    """Those that only sample have no metrics."""
    text = ALL_ROLES.replace("config = PpoConfig(", BREAKS.format(condition=condition), 1)
    Path(folder, "breaks.py").write_text(text)
    done = train(
        folder, 2, "--config", "breaks.py", "--steps", "9", "--run_dir", "breaks", "--eval_every",
        "0", "--placement", '{"actor":"0","rollout":"1"}',
    )  # fmt: skip
    assert [row["step"] for row in metrics_of(folder / "breaks")] == [0, 1]
    assert done.code == (1 if condition == METRIC else 0), done.output[-4000:]
    told = "failed in phase 'leave the loop': RuntimeError: a `break` has ended the training loop"
    assert (told in done.output) == (condition == METRIC), done.output[-4000:]


def test_who_waits_is_not_said_to_work(folder):
    """A rank that scores alone, and an actor that is done long before the critic."""
    slow = ALL_ROLES.replace(
        "config = PpoConfig(",
        """
import os, time, spmdrl.engines.fsdp.engine as fsdp
update = fsdp.FsdpEngine.update
def late(self, *args, **kwargs):
    time.sleep(2.0 if os.environ["RANK"] == "2" else 0.0)
    return update(self, *args, **kwargs)
fsdp.FsdpEngine.update = late
config = PpoConfig(""",
        1,
    )
    Path(folder, "late.py").write_text(slow)
    done = train(
        folder, 4, "--config", "late.py", "--steps", "2", "--run_dir", "waits", "--placement",
        '{"actor":"0","rollout":"1","critic":"2","reward":"3","ref":"0"}', "--eval_every", "0",
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    row = [json.loads(line) for line in Path(folder, "waits/metrics.jsonl").open()][-1]
    assert row["time_mean/update_critic_s"] > 4.0  # two mini-batches
    assert row["time/wait_report_s"] > 2.0 and row["time_max/report_s"] < 1.6
    assert row["time/wait_answers_s"] > 0 and row["time_max/reward_s"] < 1.6
    assert row["idle/share"] > 0.5 and row["idle/share_max"] > 0.8


@pytest.mark.vllm
def test_vllm_samples_ahead_and_another_placement_goes_on(folder):
    """Steps that do not meet, a rank for rewards alone; then from the checkpoint with shared ranks.
    weights.check proves that the engines hold the trainers' weights after every push."""
    args = ["--config", "cfg.py", "--run_dir", "vllm", "--rollout.engine", "vllm",
            "--weights.check", "--eval_every", "0", "--checkpoint.every_steps", "3"]  # fmt: skip
    done = train(
        folder, 3, *args, "--steps", "3", "--async_steps", "2",
        "--placement", '{"actor":"1","rollout":"2","reward":"0"}',
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    done = train(
        folder, 3, *args, "--steps", "4", "--resume", "auto",
        "--placement", '{"actor":"0,2","rollout":"1-2","critic":"1"}',
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    assert "3 steps done" in done.output
    rows = [json.loads(line) for line in Path(folder, "vllm/metrics.jsonl").open()][1:]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in (rows[0], rows[3]):
        assert row["actor/logprob_diff_max"] < 1e-4  # fp32 on both sides, weights of one version


def test_sampling_ahead_stays_within_its_bound(folder):
    args = ["--steps", "6", "--eval_every", "0", "--rollout.max_tokens", "60",
            "--placement", '{"actor":"0","rollout":"1"}']  # fmt: skip
    done = train(folder, 2, "--config", "cfg.py", "--run_dir", "ahead", "--async_steps", "2", *args)
    assert done.code == 0, done.output[-4000:]
    rows = [json.loads(line) for line in Path(folder, "ahead/metrics.jsonl").open()][1:]
    assert len(rows) == 6
    assert rows[0]["staleness/max"] == 0
    assert max(row["staleness/max"] for row in rows) in (1, 2)
    busy = {}
    for rank in (0, 1):
        lines = Path(folder, f"ahead/trace/rank_{rank:05d}.jsonl").open()
        busy[rank] = [
            (name, start, end)
            for line in lines
            for name, start, end, _ in json.loads(line)["spans"]
        ]
    updates = [(s, e) for name, s, e in busy[0] if name in ("update_actor", "old_logprobs")]
    rollouts = [(s, e) for name, s, e in busy[1] if name == "rollout"]
    both = sum(max(0, min(e, f) - max(s, t)) for s, e in updates for t, f in rollouts)
    assert both > 0  # at the same time


def test_unfinished_answers_go_on_in_the_next_step_and_through_a_checkpoint(folder):
    """More prompts are asked than trained on. Answers of every step are whole, and what a
    checkpoint keeps is asked on."""
    args = ["--config", "cfg.py", "--run_dir", "partial", "--rollout.oversample", "1.5",
            "--rollout.max_num_seqs", "8", "--checkpoint.every_steps", "2",
            "--eval_every", "0"]  # fmt: skip
    done = train(folder, 2, *args, "--steps", "2")
    assert done.code == 0, done.output[-4000:]
    import torch

    saved = [
        torch.load(path, weights_only=True)
        for path in sorted(Path(folder, "partial/checkpoints/step_00000002").glob("leftover_*.pt"))
    ]
    left = saved[0]["prompts"].tolist()
    assert left
    assert len(left) * 4 == len(saved[0]["questions"]) + sum(len(s["samples"]) for s in saved)
    done = train(folder, 3, *args, "--steps", "3", "--resume", "auto")
    assert done.code == 0, done.output[-4000:]
    rows = [json.loads(line) for line in Path(folder, "partial/metrics.jsonl").open()][1:]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["staleness/max"] for row in rows) >= 1
    asked = {
        json.loads(line)["prompt_id"]
        for line in Path(folder, "partial/samples/step_3.jsonl").open()
    }
    assert {prompt for _, prompt in left} & asked


@pytest.mark.parametrize(
    ("site", "phase", "module", "name"),
    [
        ("sampling side", "balance", "spmdrl.training.dispatch", "assign_and_pack"),
        ("training side", "update_actor", "spmdrl.algo.objectives", "masked_max"),
    ],
)
def test_an_exception_anywhere_ends_all_with_its_name(folder, site, phase, module, name):
    victim = 0 if site == "training side" else 1
    fault = FAULT.format(module=module, name=name).replace('"1"', f'"{victim}"')
    Path(folder, "bad.py").write_text(ALL_ROLES + fault)
    done = train(
        folder, 2, "--config", "bad.py", "--run_dir", f"bad {phase}", "--eval_every", "0",
        "--data.eval", "None", "--placement", '{"actor":"0","rollout":"1"}', "--async_steps", "1",
    )  # fmt: skip
    took = time.time() - float(Path(folder, "struck").read_text())
    assert done.code == 1
    assert took < LIMIT_S
    told = [line for line in done.output.splitlines() if line.startswith("spmdrl: rank")]
    assert len(told) == 1, done.output[-4000:]
    assert told[0].startswith(f"spmdrl: rank {victim} on ")
    assert f"failed in phase '{phase}': OSError" in told[0]


@pytest.mark.parametrize("rank", [0, 1], ids=["trainer", "sampler"])
def test_a_killed_rank_ends_the_others_with_its_own_failure(folder, rank):
    """Also where another only feels it, in a phase that it shares with nobody who is gone."""
    proc = start(
        folder, 2, "--config", "cfg.py", "--steps", "1000", "--eval_every", "0",
        "--run_dir", "dead", "--placement", '{"actor":"0","rollout":"1"}', "--async_steps", "1",
    )  # fmt: skip
    wait_for(folder, "step 2/1000", proc)
    victim = pids_of(proc.pid)[rank]
    os.kill(victim, signal.SIGKILL)
    done = finish(proc, folder, LIMIT_S)
    assert done.code == 1
    [told] = [line for line in done.output.splitlines() if line.startswith("spmdrl: rank")]
    assert told.startswith(f"spmdrl: rank {rank} on ")
    assert f"its process {victim} ended without a word" in told
    assert f"Signal 9 (SIGKILL) received by PID {victim}" in done.output.split("Root Cause")[-1]
