"""Runs of verl and TRL, translated: the config loads, and what it says is what they said.

The runs are those of verl's and TRL's own examples, as names and values (verl_runs.jsonl,
trl_runs.jsonl): a script of them is written here.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from spmdrl.cli.arguments import load_config
from spmdrl.config import ConfigError, PpoConfig
from spmdrl.migration import trl, verl
from spmdrl.migration.config_source import source_of
from spmdrl.migration.shell import commands
from spmdrl.training.checks.algorithms import check_algo
from spmdrl.translate import translated

HERE = Path(__file__).parent
VERL = [json.loads(line) for line in (HERE / "verl_runs.jsonl").open()]
TRL = [json.loads(line) for line in (HERE / "trl_runs.jsonl").open()]


def config_of(file: Path, ranks: int = 1) -> PpoConfig:
    """The translation of a script, read as a run reads it."""
    translation = translated(file, ranks)
    out = file.with_name("cfg.py")
    out.write_text(source_of(translation, file.name))
    return load_config(str(out), PpoConfig, {})


def value_of(config: PpoConfig, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize("run", VERL, ids=lambda run: run["from"])
@pytest.mark.parametrize("kind", ["sh", "yaml"])
def test_a_run_of_verl(run: dict, kind: str, tmp_path: Path) -> None:
    given = {k: v for k, v in run["settings"].items() if not k.startswith("custom_reward")}
    file = tmp_path / f"run.{kind}"
    if kind == "sh":
        words = [f"{name}={shlex.quote(json.dumps(v) if not isinstance(v, str) else v)}"
                 for name, v in given.items()]  # fmt: skip
        file.write_text("python3 -m verl.trainer.main_ppo \\\n  " + " \\\n  ".join(words))
    else:
        tree: dict[str, Any] = {}
        for name, value in given.items():
            *groups, last = name.split(".")
            node = tree
            for group in groups:
                node = node.setdefault(group, {})
            node[last] = value
        file.write_text(yaml.safe_dump(tree))
    config = config_of(file)
    known = verl.DEFAULTS | {k: v for k, v in given.items() if not verl.is_unknown(k, v)}
    compared = 0
    for theirs, ours in verl.SAME.items():
        if theirs in known and not theirs.startswith(("reward", "algorithm.pf_ppo", "critic.")):
            assert value_of(config, ours) == known[theirs], theirs
            compared += 1
    assert compared >= 6
    batch, mini = known["data.train_batch_size"], known[f"{verl.ACTOR}.ppo_mini_batch_size"]
    assert config.algo.mini_batches == -(-batch // mini)
    assert (config.actor.engine == "megatron") == any(".actor.megatron." in name for name in given)
    for field in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        theirs = f"{verl.ACTOR}.megatron.override_transformer_config.{field}"
        assert getattr(config.actor, field) == given.get(theirs)
    assert (config.critic is not None) == (known["algorithm.adv_estimator"] == "gae")
    uses_kl = known.get(f"{verl.ACTOR}.use_kl_loss") or known.get("algorithm.use_kl_in_reward")
    assert bool(config.algo.kl_coef) == bool(uses_kl and config.algo.kl_coef)
    if config.rollout.n > 1 or config.algo.advantage == "gae":
        check_algo(config)


@pytest.mark.parametrize("run", TRL, ids=lambda run: run["from"])
@pytest.mark.parametrize("kind", ["py", "sh", "yaml"])
def test_a_run_of_trl(run: dict, kind: str, tmp_path: Path) -> None:
    given = {k: v for k, v in run["settings"].items() if k != "config_file"}
    given.setdefault("num_generations", 8)
    file = tmp_path / f"run.{kind}"
    if kind == "py":
        peft = {k.removeprefix("lora_"): given.pop(k) for k in [*given] if k == "lora_r"}
        arguments = ", ".join(f"{k}={v!r}" for k, v in given.items())
        file.write_text(f"args = GRPOConfig({arguments})\npeft = LoraConfig(**{peft}, r=9)\n"
                        .replace(f"**{peft}, ", ""))  # fmt: skip
    elif kind == "sh":
        flags = [
            f"--{k} {shlex.quote(str(v))}" for k, v in given.items() if not isinstance(v, dict)
        ]
        file.write_text("accelerate launch grpo.py \\\n " + " \\\n ".join(flags))
    else:
        file.write_text(yaml.safe_dump(given))
    config = config_of(file, ranks=8)
    known = trl.DEFAULTS | {k: v for k, v in given.items() if v is not None}
    assert config.rollout.n == known["num_generations"]
    assert config.rollout.max_tokens == known["max_completion_length"]
    assert config.actor.optim.lr == known["learning_rate"]
    assert config.rollout.engine == ("vllm" if known["use_vllm"] else "hf")
    assert (config.algo.correction.level == "sequence") == known["use_vllm"]
    per_generation = known.get("steps_per_generation") or known["gradient_accumulation_steps"]
    answers = known["per_device_train_batch_size"] * 8 * per_generation
    assert config.data.prompts_per_step == answers // known["num_generations"]
    check_algo(config)


def test_what_the_gspo_example_says(tmp_path: Path) -> None:
    file = tmp_path / "gspo.yaml"
    file.write_text(yaml.safe_dump(next(run for run in TRL if run["from"] == "gspo")["settings"]))
    config = config_of(file)
    assert config.algo.policy_loss == "gspo"
    assert config.algo.loss_args == {"clip_low": 3e-4, "clip_high": 4e-4}
    assert (config.algo.aggregation, config.algo.seq_mean_over) == ("seq_mean_token_mean", "all")
    assert (config.algo.mini_batches, config.algo.kl_coef) == (4, 0.0)
    assert config.actor.lora is not None


SCRIPT = """#!/usr/bin/env bash
set -x  # it's a comment with an apostrophe
export N=${N:-4}
SIZE=$((N * (2 + 6)))
ROOT=${ROOT:-"${HOME}/verl"}
name="a b"
LATER="
    data.max_prompt_length=$((1024 * 2)) \\
    actor_rollout_ref.actor.optim.lr=1e-6"
ACTOR="$LATER actor_rollout_ref.actor.ppo_mini_batch_size=${SIZE}"
CRITIC="${ACTOR//actor_rollout_ref.actor/critic}"
MORE=(
    trainer.total_training_steps=30   # thirty
    +trainer.project_name='$name'
)
CUDA_VISIBLE_DEVICES=0 python3 -m verl.trainer.main_ppo $ACTOR "${MORE[@]}" \\
    data.train_files="['$ROOT/a.parquet', '$ROOT/b.parquet']" \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.rollout.n=$ANSWERS \\

    algorithm.adv_estimator=\\'grpo\\' trainer.experiment_name="$name" $@
"""


def test_variables_arrays_sums_and_quotation_marks_of_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    found = verl.overrides_of_script(SCRIPT)
    assert found == {
        "data.max_prompt_length": 2048,
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
        "trainer.total_training_steps": 30,
        "trainer.project_name": "$name",
        "data.train_files": ["/home/me/verl/a.parquet", "/home/me/verl/b.parquet"],
        "actor_rollout_ref.model.path": "$MODEL",
        "actor_rollout_ref.rollout.n": "$ANSWERS",
        "algorithm.adv_estimator": "grpo",
        "trainer.experiment_name": "a b",
    }
    assert ["export"] not in commands(SCRIPT)
    translation = verl.translate(found)
    assert "actor_rollout_ref.rollout.n=$ANSWERS" in translation.notes
    assert translation.fields["rollout.n"] == 1  # verl's default
    assert translation.fields["data.train"] == tuple(found["data.train_files"])


def test_bounds_of_a_rejection_are_those_of_the_ratio_here() -> None:
    """verl bounds -log rho of a k1 test, spmdrl rho: docs/algorithms.md, section 9."""
    prefix = "algorithm.rollout_correction."
    translation = verl.translate({
        "actor_rollout_ref.model.path": "m", "data.train_files": "d",
        f"{prefix}rollout_is": "sequence", f"{prefix}rollout_is_threshold": 3.0,
        f"{prefix}rollout_rs": "token_k1,seq_max_k2",
        f"{prefix}rollout_rs_threshold": "0.5_4.0,2.5",
    })  # fmt: skip
    assert translation.fields["algo.correction.reject"] == {
        "token_k1": (0.25, 2.0), "seq_max_k2": 2.5,
    }  # fmt: skip
    assert translation.fields["algo.correction.level"] == "sequence"
    assert translation.fields["algo.correction.high"] == 3.0


def test_values_of_a_python_script_and_its_arguments(tmp_path: Path) -> None:
    file = tmp_path / "run.py"
    file.write_text(
        "parser.add_argument('--answers', type=int, default=4)\n"
        "data = load_dataset('trl-lib/DeepMath-103K', split='train')\n"
        "trainer = trl.GRPOTrainer(model='Qwen/Qwen2.5-0.5B', reward_funcs=accuracy_reward,\n"
        "    args=trl.GRPOConfig(num_generations=args.answers, max_steps=40, beta=0.04,\n"
        "                        num_iterations=2, output_dir=f'{where}/run'),\n"
        "    peft_config=LoraConfig(r=4, lora_alpha=16))\n"
    )
    translation = translated(file)
    assert "output_dir=f'{where}/run'" in translation.notes
    config = config_of(file)
    assert (config.model, config.data.train) == ("Qwen/Qwen2.5-0.5B", "trl-lib/DeepMath-103K")
    assert (config.rollout.n, config.steps, config.algo.epochs) == (4, 20, 2)
    assert config.algo.kl_coef == 0.04 and config.reward == "math"
    assert config.actor.lora is not None and config.actor.lora.rank == 4


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.py", "args = DPOConfig(beta=0.1)", "DPOConfig of TRL has no translation"),
        ("a.py", "def (", "is no Python: line 1"),
        ("a.py", "print(1)", "starts neither verl"),
        ("a.sh", "trl sft --model x", "trl sft of TRL has no translation"),
        ("a.sh", "python -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=x",
         "only the program for reinforcement learning|the program for reinforcement learning"),
        ("a.sh", "echo 'one", "No closing quotation"),
        ("a.sh", "python -m verl.trainer.main_ppo data.train_batch_size=many "
         "actor_rollout_ref.model.path=x", "verl takes a number"),
        ("a.yaml", "a: [", "is no YAML"),
        ("a.yaml", "a: 1", "has neither verl's"),
        ("a.yaml", "num_generations: many", "TRL takes a number"),
    ],
)  # fmt: skip
def test_what_cannot_be_translated_is_said(
    name: str, text: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        translated(tmp_path / name)


def test_the_command_writes_a_config_and_says_what_to_look_at(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT.replace("$MODEL", "Qwen/Qwen3-8B"))
    command = [sys.executable, "-m", "spmdrl.translate"]
    done = subprocess.run(
        [*command, "run.sh", "--out", "cfg.py"], cwd=tmp_path, text=True, capture_output=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "look at: actor_rollout_ref.rollout.n=$ANSWERS" in done.stdout
    config = load_config(str(tmp_path / "cfg.py"), PpoConfig, {})
    assert (config.model, config.steps, config.algo.advantage) == ("Qwen/Qwen3-8B", 30, "grpo")
    done = subprocess.run(
        [*command, "no.sh"], cwd=tmp_path, text=True, capture_output=True, timeout=60
    )
    assert done.returncode == 2 and "config error: no.sh cannot be read" in done.stderr
