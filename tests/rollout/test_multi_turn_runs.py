"""Whole runs in which an environment or tools answer, with the real vLLM."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from programs import CONFIG, ROOT, metrics_of, samples_of, train, write_task

from spmdrl.rollout.answer_codec import unpack

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]

# A turn ends with a digit or a small letter, which a random model soon says. The environment lets
# a sample go on until it has had three turns, but one whose index is 3 only once.
TALK = CONFIG.replace('engine="hf"', 'engine="vllm", stop_token_ids=tuple(range(4, 44))').replace(
    "max_tokens=8", "max_tokens=24"
).replace("config = PpoConfig(", '''
def environment(messages, num_turns, sample_index):
    said = messages[-1]["content"]
    assert messages[-1]["role"] == "assistant" and len(messages) == 2 * num_turns
    return None if num_turns == 3 or sample_index == 3 else f"({len(said)})"

def reward(messages, response, finish_reason):
    assert messages[-1] == {"role": "assistant", "content": response}
    return float(len(messages)) + 0.01 * len(response)

config = PpoConfig(
    environment=environment,
''')  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory, qwen3):
    path = tmp_path_factory.mktemp("talk")
    Path(path, "model").symlink_to(qwen3)
    write_task(path)
    Path(path, "talk.py").write_text(TALK)
    return path


def run(folder: Path, name: str, ranks: int, *args: str) -> list[dict]:
    config = [] if "--config" in args else ["--config", "talk.py"]
    done = train(folder, ranks, *config, "--run_dir", name, "--log_samples", "32", *args)
    assert done.code == 0, done.output[-4000:]
    return metrics_of(folder / name)


@pytest.fixture(scope="module")
def alone(folder):
    return run(folder, "alone", 1)


def test_tokens_of_several_turns_are_those_that_were_said(folder, alone):
    """The trainer's logprobs of all of them are the engine's, so nothing shifted or was encoded
    again; masks are as the messages."""
    for row in alone[1:]:
        assert row["actor/logprob_diff_max"] < 1e-4
        assert row["actor/ratio_max"] == 1.0
        assert row["turns/mean"] > 1.5
        assert row["reward/invalid"] == 0
    samples = samples_of(folder / "alone", 1)
    assert len(samples) == 32
    lengths = set()
    for sample in samples:
        said = sample["messages"]
        assert [m["role"] for m in said] == (["assistant", "user"] * 3)[: len(said)]
        assert said[-1]["role"] == "assistant"
        assert sample["sample"] != 3 or len(said) == 1
        assert len(sample["tokens"]) == sample["response_tokens"]
        of_replies = [i for i, value in enumerate(sample["logprobs"]) if value is None]
        replied = "".join(sample["tokens"][i] for i in of_replies)
        assert replied == "".join(m["content"] for m in said[1::2])
        for before, reply in zip(said[::2], said[1::2], strict=False):
            assert reply["content"] == f"({len(before['content'])})"
        lengths.add(len(said))
    assert lengths == {1, 5}
    replied = sum(len(m["content"]) for s in samples for m in s["messages"][1::2])
    assert alone[1]["turns/reply_tokens"] == replied / 32
    loss_tokens = sum(s["response_tokens"] for s in samples) - replied
    assert alone[1]["rollout/loss_tokens"] == loss_tokens


SAME = ("reward/mean", "turns/mean", "turns/reply_tokens", "response/tokens", "rollout/loss_tokens",
        "actor/loss", "actor/grad_norm", "eval/reward", "eval/turns/mean")  # fmt: skip


@pytest.mark.parametrize(
    "args",
    [
        ("--rollout.tensor_parallel", "2"),
        ("--placement", '{"actor":"0","rollout":"1","reward":"0"}'),
    ],
    ids=["tensor parallel", "scored elsewhere"],
)
def test_two_ranks_have_the_same_numbers(folder, alone, args):
    rows = run(folder, args[0][2:], 2, *args)
    for row, right in zip(rows, alone, strict=True):
        for name in SAME:
            if name in right:
                assert row[name] == pytest.approx(right[name], rel=1e-4), name


def test_an_evaluation_by_itself_talks_as_the_run_did(folder, alone):
    done = train(
        folder, 2, "--config", "talk.py", "--out", "evaluated", program="spmdrl.evaluate"
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    [row] = metrics_of(folder / "evaluated")
    for name in ("eval/reward", "eval/turns/mean", "eval/turns/reply_tokens"):
        assert row[name] == pytest.approx(alone[0][name], rel=1e-6), name


def test_the_engine_without_vllm_talks_too(folder):
    rows = run(folder, "hf", 2, "--rollout.engine", "hf")
    for row in rows[1:]:
        assert row["actor/logprob_diff_max"] < 1e-4
        assert row["turns/mean"] > 1.5


def test_what_waits_for_a_reply_goes_on_in_the_next_step_and_after_a_resume(folder):
    """Replies take so long that a step has enough while some are being made."""
    slow = TALK.replace(
        "    said = messages", "    import time; time.sleep(0.05)\n    said = messages"
    )
    Path(folder, "slow.py").write_text(slow)
    args = ["--rollout.oversample", "1.5", "--algo.correction.level", "token",
            "--rollout.max_num_seqs", "8", "--checkpoint.every_steps", "2",
            "--config", "slow.py"]  # fmt: skip
    run(folder, "partial", 2, *args)
    saved = [
        torch.load(path, weights_only=True)
        for path in sorted((folder / "partial/checkpoints/step_00000002").glob("leftover_*.pt"))
    ]
    begun = unpack(saved[0]["begun"].numpy().tobytes()).values()
    assert any(c.replies for c in begun)
    assert any(c.finish_reason == "stop" for c in begun)  # the reply will be asked for again
    rows = run(folder, "partial", 1, *args, "--steps", "4", "--resume", "auto")
    assert [row["step"] for row in rows[1:]] == [1, 2, 3, 4]
    assert rows[3]["staleness/max"] >= 1
    for step in (3, 4):
        for sample in samples_of(folder / "partial", step):
            said = sample["messages"]
            for before, reply in zip(said[::2], said[1::2], strict=False):
                assert reply["content"] == f"({len(before['content'])})"
            assert len(said) == (1 if sample["sample"] == 3 else 5)


def test_a_greedy_answer_is_asked_and_scored_under_one_index(folder):
    told = TALK.replace('f"({len(said)})"', 'f"({sample_index + 1})"').replace(
        "def reward(messages, response, finish_reason):",
        "def reward(messages, response, sample_index):\n"
        "    told = {m['content'] for m in messages[1:] if m['role'] == 'user'}\n"
        "    assert told <= {f'({sample_index + 1})'}, told",
    )
    assert told.count("sample_index + 1") == 2
    Path(folder, "told.py").write_text(told)
    rows = run(folder, "told", 2, "--config", "told.py", "--algo.advantage", "remax",
               "--rollout.greedy_baseline", "True", "--data.eval", "None")  # fmt: skip
    for row in rows:
        assert row["reward/invalid"] == 0
        assert row["turns/mean"] > 1.5


def test_it_samples_ahead_of_training(folder):
    ahead = ["--placement", '{"actor":"0","rollout":"1"}', "--async_steps", "1", "--steps", "3",
             "--eval_every", "0", "--data.eval", "None",
             "--algo.correction.level", "token"]  # fmt: skip
    rows = run(folder, "ahead", 2, *ahead)
    assert [row["turns/mean"] > 1.5 for row in rows] == [True] * 3
    assert max(row["staleness/max"] for row in rows) == 1


def test_an_environment_that_fails_costs_samples_and_many_end_the_run(folder):
    wrong = TALK.replace(
        "    said = messages", "    assert sample_index % 4, 'no dice'\n    said = messages"
    )
    Path(folder, "wrong.py").write_text(wrong)
    config = ("--config", "wrong.py", "--data.eval", "None")
    rows = run(folder, "wrong", 2, *config)
    assert [row["reward/invalid"] for row in rows] == [8, 8]
    invalid = [s["invalid"] for s in samples_of(folder / "wrong", 1) if s["sample"] == 0]
    assert all("the environment: " in why and "no dice" in why for why in invalid)
    done = train(
        folder, 2, *config, "--run_dir", "many", "--rewards.max_invalid_fraction", "0.2"
    )  # fmt: skip
    assert done.code == 1
    assert "more than rewards.max_invalid_fraction=0.2 allows" in done.output
    assert "no dice" in done.output


def fine_tune(folder: Path, ranks: int, steps: int, in_pairs: bool = False) -> None:
    """The example, shorter: afterwards a model calls in two cases of five. in_pairs: a chat has two
    questions, so that it may call in several turns."""
    script = ROOT / "examples/multiply/make_assets.py"
    made = train(folder, 1, "--out", "runs/multiply", program=str(script))
    assert made.code == 0, made.output[-4000:]
    chats = folder / "runs/multiply/sft.parquet"
    if in_pairs:
        said = [row["messages"] for row in pq.read_table(chats).to_pylist()]
        pairs = [{"messages": said[i] + said[i + 1]} for i in range(0, len(said), 2)]
        pq.write_table(pa.Table.from_pylist(pairs), chats)
    lasts = ["--steps", str(steps), "--actor.optim.decay_steps", str(steps)]
    sft = str(ROOT / "configs/qwen3_tiny_multiply_sft_cpu.py")
    done = train(folder, ranks, "--config", sft, *lasts, program="spmdrl.sft", timeout_s=400)
    assert done.code == 0, done.output[-4000:]


TOOLS = ROOT / "configs/qwen3_tiny_multiply_tools_cpu.py"


@pytest.mark.timeout(600)
def test_a_model_learns_to_call_a_tool(tmp_path):
    fine_tune(tmp_path, 2, 150)
    done = train(
        tmp_path, 2, "--config", str(TOOLS), "--steps", "8", "--eval_every", "0",
        "--run_dir", "tools", "--checkpoint.every_steps", "0", "--trackers", "()",
        "--data.max_eval_prompts", "512", timeout_s=400,
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    rows = metrics_of(tmp_path / "tools")
    assert rows[0]["eval/tools/calls"] < 0.6
    assert rows[-1]["eval/tools/calls"] > 0.9
    assert rows[-1]["eval/reward"] > 1.5 * rows[0]["eval/reward"]
    assert rows[-1]["tools/failed"] < 0.1
    for row in rows[1:]:
        assert row["actor/logprob_diff_max"] < 1e-3


# Counts its calls; the same is asked again and again. What a sample's object says is checked
# wherever the sample went, and what a reward function rebuilds of it too.
TILL = '''
class Till:
    def __init__(self, ground_truth, sample_index):
        self.right, self.count, self.last = ground_truth, 100 * sample_index, 0

    def multiply(self, a: int, b: int) -> str:
        """Multiplies two whole numbers.

        Args:
            a: one of them
            b: the other
        """
        self.count += 1
        self.last = a * b
        return f"{self.count}*{self.last}"


def environment(messages, num_turns):
    import time
    time.sleep(0.02)
    return messages[0]["content"] if num_turns < 7 else None


def reward(messages, ground_truth, sample_index):
    from spmdrl.rewards.workers.stateful_tools import rebuild

    till = rebuild(Till, messages, ground_truth=ground_truth, sample_index=sample_index)
    counts = [m["content"] for m in messages if m["role"] == "tool" and "arguments" in m]
    first = 100 * sample_index + 1
    assert [int(c.split("*")[0]) for c in counts] == list(range(first, first + len(counts)))
    assert not counts or counts[-1].split("*")[1] == str(till.last)
    return float(till.count - 100 * sample_index)


config = PpoConfig(
'''


@pytest.mark.timeout(600)
def test_a_tool_with_a_state_keeps_it_in_any_step_engine_and_attempt(tmp_path):
    fine_tune(tmp_path, 1, 50, in_pairs=True)
    text = TOOLS.read_text().replace("config = PpoConfig(\n", TILL)
    text = text.replace("tools=(multiply,)", "tools=(Till,), environment=environment")
    text = text.replace("max_turns=3", "max_turns=8").replace("exact_match,", "reward,")
    text = "\n".join(line for line in text.split("\n") if " eval" not in line)
    Path(tmp_path, "till.py").write_text(text.replace("max_tokens=32", "max_tokens=128"))
    args = ("--config", "till.py", "--run_dir", "till", "--data.prompts_per_step", "8",
            "--rollout.n", "4", "--rollout.oversample", "1.5", "--rollout.max_num_seqs", "8",
            "--algo.correction.level", "token", "--checkpoint.every_steps", "2",
            "--trackers", "()")  # fmt: skip
    for ranks, steps in ((2, 2), (1, 4)):
        done = train(tmp_path, ranks, *args, "--steps", str(steps), "--resume", "auto")
        assert done.code == 0, done.output[-4000:]
    rows = metrics_of(tmp_path / "till")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["staleness/max"] for row in rows) >= 1
    for row in rows:
        assert row["reward/invalid"] == 0
    rewards = [s["reward"] for step in (1, 2, 3, 4) for s in samples_of(tmp_path / "till", step)]
    assert sum(reward >= 2 for reward in rewards) > 10  # they have something to remember
