"""A KL reference that follows the policy: its weights, what is resumed, and what is refused."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from plan_configs import ppo_config
from programs import CONFIG, metrics_of, train, write_task
from safetensors.torch import load_file

from spmdrl.config import AlgoConfig, ConfigError, LoraConfig, TrainConfig
from spmdrl.training.checks.rl import check
from spmdrl.training.rl import restore_algorithm

ALPHA = 0.3
FOLLOWS = CONFIG.replace(
    "    actor=TrainConfig(",
    f"    algo=AlgoConfig(kl_coef=0.1, ref_model_sync_steps=2, ref_model_mixup_alpha={ALPHA}),\n"
    '    ref=TrainConfig(dtype="float32"),\n'
    "    actor=TrainConfig(",
).replace("every_steps=0", "every_steps=1, keep=9")
MEGATRON = ("--actor.engine", "megatron", "--ref.engine", "megatron",
            "--actor.tensor_parallel", "2", "--ref.tensor_parallel", "2")  # fmt: skip


def weights(folder: Path, step: int, role: str) -> dict[str, torch.Tensor]:
    from spmdrl.engines.hf_export import load_full

    return load_full(folder / f"checkpoints/step_{step:08}", role)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "engine", [(), pytest.param(MEGATRON, marks=pytest.mark.megatron)], ids=["fsdp", "megatron"]
)
def test_the_reference_is_mixed_with_the_policy_and_resumed(tmp_path, qwen3, engine):
    """After steps 2 and 4 it is alpha policy + (1 - alpha) reference; between them it stays."""
    Path(tmp_path, "model").symlink_to(qwen3)
    write_task(tmp_path)
    Path(tmp_path, "cfg.py").write_text(FOLLOWS)
    asked = ("--config", "cfg.py", *engine, "--steps", "4")
    done = train(tmp_path, 2, *asked, "--run_dir", "whole")
    assert done.code == 0, done.output[-4000:]
    expected = load_file(qwen3 / "model.safetensors")
    for step in (1, 2, 3, 4):
        policy = weights(tmp_path / "whole", step, "actor")
        moved = max(float((policy[n] - expected[n]).abs().max()) for n in expected)
        assert moved > 1e-3  # else a reference that stays would pass
        if step % 2 == 0:
            expected = {n: ALPHA * policy[n] + (1 - ALPHA) * expected[n] for n in expected}
        found = weights(tmp_path / "whole", step, "ref")
        assert found.keys() - expected.keys() <= {"lm_head.weight"}  # tied
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)
    again = train(
        tmp_path, 2, *asked, "--run_dir", "again", "--resume", "whole/checkpoints/step_00000002"
    )
    assert again.code == 0, again.output[-4000:]
    rows, resumed = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "again")
    assert resumed == rows[-2:] and rows[-1]["actor/ref_kl"] > 0


def test_a_checkpoint_with_another_reference_is_not_gone_on_with_in_silence():
    roles = SimpleNamespace(
        config=SimpleNamespace(algo=AlgoConfig(kl_coef=0.1)), sampling=None, ref=object()
    )
    with pytest.raises(ConfigError, match="a reference that followed the policy"):
        restore_algorithm(roles, {"engines": ["actor", "ref"]}, Path("step_1"))


ALGO = AlgoConfig(kl_coef=0.1, ref_model_sync_steps=2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algo": replace(ALGO, kl_coef=0.0)}, "no reference"),
        ({"ref": TrainConfig(model="other")}, "teacher"),
        ({"actor": TrainConfig(lora=LoraConfig(rank=2))}, "actor's base"),
        ({"placement": {"actor": "0", "ref": "1"}}, "ref is on ranks 1"),
        ({"ref": TrainConfig(engine="megatron", dtype="float32")}, "differ in engine"),
        (
            {"actor": TrainConfig(engine="megatron"), "ref": TrainConfig(engine="megatron")},
            "keeps its weights in bfloat16",
        ),
    ],
)
def test_a_reference_that_cannot_follow_is_refused(qwen3, changes, words):
    if changes.get("ref") == TrainConfig(model="other"):
        changes = {"ref": TrainConfig(model=str(Path(qwen3, "..", qwen3.name)))}
    config = ppo_config(qwen3, algo=ALGO)
    with pytest.raises(ConfigError, match="ref_model_sync_steps=2") as raised:
        check(replace(config, **changes), 2)
    assert words in str(raised.value)
