"""Whole runs of a mixture of experts whose engine's routing is replayed (actor.router_replay)."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import CONFIG, metrics_of, train, write_task
from tiny_megatron_models import save_model
from tiny_models import CHARS, save_tokenizer

pytestmark = [pytest.mark.ranks]

REPLAYED = CONFIG.replace(
    "actor=TrainConfig(",
    "algo=AlgoConfig(mini_batches=2),\n    "
    'actor=TrainConfig(router_replay="R3", activation_checkpointing=True, ',
)
# Turns end with a digit or a small letter; the environment answers twice.
TALK = REPLAYED.replace('"R3", ', '"R3", router_aux_loss_coef=0.01, ').replace(
    'engine="hf"', 'engine="hf", oversample=1.5, stop_token_ids=tuple(range(4, 44))'
).replace("mini_batches=2", "mini_batches=2, correction=CorrectionConfig(level='token')").replace(
    "max_tokens=8", "max_tokens=24"
).replace("config = PpoConfig(", '''
def environment(messages, num_turns, sample_index):
    return None if num_turns == 3 or sample_index == 3 else "(more)"

config = PpoConfig(
    environment=environment,
''')  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models of 32 and of 260 experts, whose numbers have two bytes; three layers choose two."""
    path = tmp_path_factory.mktemp("routed")
    for name, number, width in (("model", 32, 64), ("many", 260, 32)):
        save_model(
            "qwen3_moe normalised", path / name, num_experts=number, moe_intermediate_size=width,
            vocab_size=len(CHARS), eos_token_id=2, bos_token_id=1, pad_token_id=0,
        )  # fmt: skip
        save_tokenizer(path / name)
    write_task(path)
    Path(path, "cfg.py").write_text(REPLAYED)
    Path(path, "talk.py").write_text(TALK)
    return path


def run(folder: Path, name: str, *args: str, config: str = "cfg.py") -> list[dict]:
    done = train(folder, 2, "--config", config, "--run_dir", name, *args)
    assert done.code == 0, done.output[-4000:]
    return metrics_of(folder / name)


@pytest.mark.vllm
def test_replay_closes_the_gap_that_routing_makes(folder):
    """In bfloat16 some routers of the trainer choose other experts than vLLM's: with those of vLLM
    the largest difference of a log-probability is several times smaller."""
    half = ("--rollout.engine", "vllm", "--rollout.dtype", "bfloat16", "--actor.dtype", "bfloat16")
    with_r3 = run(folder, "with", *half)
    without = run(folder, "without", *half, "--actor.router_replay", "None")
    for replayed, plain in zip(with_r3[1:], without[1:], strict=True):
        assert replayed["actor/logprob_diff_max"] < 0.04 < 0.08 < plain["actor/logprob_diff_max"]
        assert 2 * replayed["actor/rollout_kl"] < plain["actor/rollout_kl"]


@pytest.mark.vllm
def test_ranks_that_train_and_do_not_sample_are_sent_the_experts(folder):
    """Sampling ahead; in float32 the engine's experts are the trainer's own, so that experts of
    other tokens, or of none, would show in the differences of the first step."""
    rows = run(
        folder, "ahead", "--placement", '{"actor":"0","rollout":"1"}', "--async_steps", "1",
        "--rollout.engine", "vllm", "--algo.correction.level", "token", "--model", "many",
    )  # fmt: skip
    assert rows[1]["actor/logprob_diff_max"] < 1e-4 and rows[1]["staleness/max"] == 0
    assert rows[-1]["step"] == 2


def test_a_run_of_several_turns_resumes_with_the_experts_of_what_was_begun(folder):
    """With answers that were begun under older weights and are in the checkpoint."""
    saving = ("--checkpoint.every_steps", "1", "--checkpoint.keep", "9", "--steps", "3")
    whole = run(folder, "turns", *saving, config="talk.py")
    again = run(
        folder, "again", *saving, "--resume", "turns/checkpoints/step_00000001", config="talk.py"
    )
    assert whole[1]["actor/logprob_diff_max"] < 1e-4 and whole[1]["turns/mean"] > 1.5
    assert whole[2]["staleness/max"] == 1
    assert all(0.9 < row["actor/router_aux_loss"] < 4 for row in whole[1:])
    assert again[-1]["step"] == 3 and again[-2]["staleness/max"] == 1
    done = train(
        folder, 2, "--config", "talk.py", "--run_dir", "off", "--resume",
        "turns/checkpoints/step_00000001", "--actor.router_replay", "None", "--steps", "2",
        *("--checkpoint.every_steps", "2"),
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    done = train(
        folder, 2, "--config", "talk.py", "--run_dir", "on", "--resume",
        "off/checkpoints/step_00000002",
    )  # fmt: skip
    assert done.code == 2 and "of which nobody knows the experts" in done.output
