"""How a config becomes small: what stays, and what the degrees of parallelism become."""

import pickle
import signal
import subprocess
import threading
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from plan_configs import ppo_config, rollout_config

from spmdrl.config import (
    AgentConfig,
    AlgoConfig,
    CheckpointConfig,
    ConfigError,
    DataConfig,
    JudgeConfig,
    LoraConfig,
    MultiTurnConfig,
    OptimConfig,
    PpoConfig,
    RolloutConfig,
    TrainConfig,
)
from spmdrl.distributed.exit import REQUEUE
from spmdrl.distributed.nccl_rules.events import BOTH, Group, Operation
from spmdrl.distributed.signals import Stopping
from spmdrl.rehearse.collectives import broken, compare
from spmdrl.rehearse.prepare import missing_engines
from spmdrl.rehearse.runs import Outcome, environment, wait
from spmdrl.rehearse.scale import scale, value_at
from spmdrl.rollout.build import ENGINES
from spmdrl.training.checks.judge import check_comparisons
from spmdrl.training.checks.rl import check

MEGATRON = TrainConfig(
    engine="megatron", tensor_parallel=8, sequence_parallel=True, pipeline_parallel=4,
    context_parallel=2, expert_parallel=8, virtual_pipeline=2,
    num_layers_in_last_pipeline_stage=3,
)  # fmt: skip
CONFIG = PpoConfig(
    model="large",
    data=DataConfig(train="t.jsonl", eval="e.jsonl", prompts_per_step=512),
    reward="math",
    algo=AlgoConfig(mini_batches=16, overlong_buffer=4096),
    rollout=RolloutConfig(n=16, max_tokens=8192, tensor_parallel=4, quantization="fp8"),
    checkpoint=CheckpointConfig(every_steps=20),
)


def scaled(world, ranks, on_gpu=False, **changes):
    config = replace(CONFIG, **changes)
    found, here = scale(config, world, ranks, {"model": "tiny"}, "out/run", on_gpu)
    return found, here


def values(found, *keys):
    return tuple(value_at(found.config, key) for key in keys)


def test_sizes_become_small_and_the_task_stays():
    found, here = scaled(64, 2)
    assert here == 2
    keys = ("model", "run_dir", "rollout.n", "rollout.max_tokens", "data.prompts_per_step",
            "algo.mini_batches", "algo.overlong_buffer", "rollout.tensor_parallel", "steps",
            "checkpoint.every_steps", "eval_every", "rollout.quantization")  # fmt: skip
    assert values(found, *keys) == ("tiny", "out/run", 8, 64, 4, 2, 32, 2, 2, 2, 2, None)
    assert found.config.data.max_prompt_tokens == CONFIG.data.max_prompt_tokens
    assert (found.config.reward, found.config.algo.advantage) == ("math", "grpo")
    assert {change.field for change in found.changes} >= {*keys}
    assert found.options()["rollout.max_tokens"] == 64


def test_each_set_of_ranks_keeps_ranks_of_its_own():
    placement = {"actor": "0-11", "rollout": "12-15", "reward": "12", "ref": "8-11"}
    found, here = scaled(16, 2, placement=placement, algo=AlgoConfig(kl_coef=0.1))
    # the actor alone, with the reference, rollout with reward, rollout alone
    assert here == 4
    assert found.config.placement == {"actor": "0-1", "rollout": "2-3", "reward": "2", "ref": "1"}
    found, here = scaled(16, 8, placement=placement, algo=AlgoConfig(kl_coef=0.1))
    assert here == 8 and found.config.placement["actor"] == "0-3"


@pytest.mark.parametrize(
    ("ranks", "tensor", "pipeline", "context", "expert"),
    [(1, 1, 1, 1, 1), (2, 2, 1, 1, 1), (4, 2, 2, 1, 1), (8, 2, 2, 2, 1)],
)
def test_megatrons_degrees_become_two_as_long_as_there_are_ranks(
    ranks, tensor, pipeline, context, expert
):
    found, here = scaled(64, ranks, actor=MEGATRON)
    degrees = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
    assert here == ranks
    assert values(found, *(f"actor.{d}" for d in degrees)) == (tensor, pipeline, context, expert)
    actor = found.config.actor
    assert (actor.virtual_pipeline, actor.num_layers_in_last_pipeline_stage) == (1, None)
    assert actor.sequence_parallel == (tensor > 1)


def test_fsdps_degrees():
    found, _ = scaled(64, 2, actor=TrainConfig(fsdp=8))  # 8 copies of the weights -> 2
    assert found.config.actor.fsdp == 1
    found, _ = scaled(64, 2, actor=TrainConfig(fsdp=64))
    assert found.config.actor.fsdp == -1
    found, _ = scaled(64, 2, actor=TrainConfig(fsdp=8, ulysses=4))
    assert (found.config.actor.fsdp, found.config.actor.ulysses) == (-1, 2)


def test_what_needs_a_gpu_stays_there_alone():
    role = TrainConfig(kernels="liger", attention="flash_attn", compile=True)
    small, _ = scaled(8, 2, actor=role)
    assert values(small, "actor.kernels", "actor.attention", "actor.compile") == (
        "spmdrl", "auto", False,
    )  # fmt: skip
    same, _ = scaled(8, 2, on_gpu=True, actor=role)
    assert same.config.actor.kernels == "liger" and same.config.actor.compile


def test_what_fits_the_large_model_alone_is_left_out():
    role = TrainConfig(
        lora=LoraConfig(adapter="adapter"),
        optim=OptimConfig(schedule="cosine", warmup_steps=10, decay_steps=900),
    )
    found, _ = scaled(8, 2, actor=role)
    assert found.config.actor.lora == LoraConfig(adapter=None)
    optim = found.config.actor.optim
    assert (optim.schedule, optim.warmup_steps, optim.decay_steps) == ("constant", 0, 0)


def test_a_failed_run_shows_its_end(tmp_path):
    log = tmp_path / "run_1.log"
    log.write_text("".join(f"line {i}\n" for i in range(100)))
    title, *lines = Outcome("2 steps", [], log, 1, 3.0, tmp_path).lines()
    assert "2 steps: failed after 3 s" in title
    assert lines[-1] == "  line 99" and len(lines) == 25
    assert "had not ended" in Outcome("2 steps", [], log, None, 600.0, tmp_path).lines()[0]


@pytest.mark.programs
def test_a_signal_ends_the_run_that_is_under_way():
    said: list[str] = []
    stopping = Stopping()
    stopping.on_quit = usual = lambda why, code: said.append(why)
    process = subprocess.Popen(["sleep", "60"])
    threading.Timer(0.2, lambda: stopping.on_quit("SIGTERM", REQUEUE)).start()
    assert wait(process, stopping) == -signal.SIGTERM
    assert said == ["SIGTERM"] and stopping.on_quit is usual


def test_ranks_that_call_other_collectives_are_told(tmp_path):
    """Two communicators in different orders: gloo forgives it, NCCL may hang."""
    groups = [Group(1, name, (0, 1), BOTH) for name in "12"]
    for rank in (0, 1):
        with Path(tmp_path, f"rank_{rank}").open("wb") as file:
            for group in groups if rank == 0 else reversed(groups):
                place = (("cfg.py", 7 + int(group.name), "my_loss"),)
                called = Operation(group, "allreduce", ("float32[1]",), False, "MainThread", place)
                pickle.dump(called, file)
    compared = compare(Outcome("2 steps", [], tmp_path / "log", 0, 3.0, tmp_path))
    assert "used in different orders" in "".join(compared.lines)
    assert "cfg.py:8 in my_loss" in "".join(compared.lines)
    (sentence,) = broken([compared])
    assert "rule 'order'" in sentence and "hang" in sentence
    Path(tmp_path, "rank_1").unlink()
    alone = compare(Outcome("2 steps", [], tmp_path / "log", 0, 3.0, tmp_path))
    assert "rank 1 did last nothing" in "".join(alone.lines)
    nothing = compare(Outcome("2 steps", [], tmp_path / "log", 0, 3.0, tmp_path / "empty"))
    assert nothing.findings == [] and "not recorded" in nothing.lines[0]


def test_trackers_of_a_rehearsal_send_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://example.org")
    monkeypatch.setenv("TRACKIO_SPACE_ID", "team/space")
    env = environment(tmp_path)
    assert env["TRACKIO_DIR"] == f"{tmp_path}/trackio" and "TRACKIO_SPACE_ID" not in env
    assert env["MLFLOW_ALLOW_FILE_STORE"] == "true"  # without it MLflow 3 refuses the folder
    assert "RANK" not in env and env["WANDB_MODE"] == "offline"
    assert env["MLFLOW_TRACKING_URI"] == f"file:{tmp_path}/mlruns"


def test_an_engine_that_does_not_run_here_becomes_transformers():
    """Without what transformers would refuse. The judge's engine is the run's."""
    rollout = RolloutConfig(
        engine="sglang", tensor_parallel=4, enforce_eager=False, expert_parallel=True,
        engine_args={"mem_fraction_static": 0.5},
    )  # fmt: skip
    judge = JudgeConfig("judge", tensor_parallel=4)
    for on_gpu in (False, True):
        found, _ = scaled(8, 2, on_gpu, rollout=rollout, judge=judge)
        assert found.config.rollout.engine == found.config.judge.engine == "hf"
        ENGINES["hf"].check(found.config.rollout)
        assert not found.config.rollout.engine_args and not found.config.rollout.expert_parallel
        assert found.config.judge.tensor_parallel == 1
        assert any("SGLang does not run here" in change.line() for change in found.changes)


def test_a_draft_model_is_left_out_and_n_grams_are_not():
    """A tiny policy has other tokens than the draft model, which may be large."""
    for given, kept in (({"model": "draft", "num_speculative_tokens": 2}, False),
                        ({"method": "ngram", "num_speculative_tokens": 2}, True)):  # fmt: skip
        found, _ = scaled(8, 2, rollout=RolloutConfig(engine="vllm", speculative=given))
        assert found.config.rollout.speculative == (given if kept else {})
    found, _ = scaled(8, 2, rollout=RolloutConfig(engine="sglang", speculative=given))
    ENGINES["hf"].check(found.config.rollout)
    assert not found.config.rollout.speculative


@pytest.mark.skipif(find_spec("sglang") is not None, reason="SGLang is installed")
def test_an_engine_need_not_be_installed_here(qwen3):
    config = ppo_config(qwen3, rollout=rollout_config(engine="sglang"))
    check(config, 2, installed=False)
    (said,) = missing_engines(config)
    assert "SGLang is not installed" in said and "transformers in its place" in said
    with pytest.raises(ConfigError, match="SGLang is not installed"):
        check(config, 2)


def test_sizes_that_depend_on_one_another_stay_sound():
    """Each was refused when the other was small: of pairs, of images, of engines, of batches."""
    judge = JudgeConfig("judge", compare="pairs", opponents=12)
    found, _ = scaled(8, 2, judge=judge)
    check_comparisons(found.config.judge, found.config)
    multi_turn = MultiTurnConfig(max_images=2)
    agents = AgentConfig(max_images=1, max_image_tokens=1200)
    found, _ = scaled(8, 2, tools=("python",), multi_turn=multi_turn, agents=agents)
    assert values(found, "rollout.max_tokens", "multi_turn.max_image_tokens") == (256, 128)
    assert found.config.agents.max_image_tokens == 1200  # a prompt has room beside an answer
    few, _ = scaled(8, 8, rollout=RolloutConfig(n=1))
    assert few.config.data.prompts_per_step == 8
    odd = replace(CONFIG.data, prompts_per_step=3)
    found, _ = scaled(8, 2, data=odd, algo=AlgoConfig(mini_batches=3))
    assert values(found, "data.prompts_per_step", "algo.mini_batches") == (3, 3)
