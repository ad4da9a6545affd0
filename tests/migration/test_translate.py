"""Runs of verl and TRL, translated: the config loads, and what it says is what they said.

The runs are those of verl's and TRL's own examples, as names and values (verl_runs.jsonl,
trl_runs.jsonl): a script of them is written here.
"""

import ast
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from spmdrl.cli.arguments import load_config
from spmdrl.cli.hub_names import data_name
from spmdrl.config import ConfigError, PpoConfig
from spmdrl.migration import trl, verl, verl_settings
from spmdrl.migration.config_source import Translation, source_of
from spmdrl.migration.shell import commands
from spmdrl.training.checks.algorithms import check_algo
from spmdrl.translate import main, translated

HERE = Path(__file__).parent
VERL = [json.loads(line) for line in (HERE / "verl_runs.jsonl").open()]
TRL = [json.loads(line) for line in (HERE / "trl_runs.jsonl").open()]


def config_of(file: Path, ranks: int | None = None) -> PpoConfig:
    """The translation of a script, read as a run reads it."""
    translation = translated(file, ranks)
    out = file.with_name("cfg.py")
    out.write_text(source_of(translation, file.name))
    return load_config(str(out), PpoConfig, {})


def value_of(config: Any, name: str) -> Any:
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
    known = verl_settings.DEFAULTS | {k: v for k, v in given.items() if not verl.is_unknown(k, v)}
    compared = 0
    for theirs, ours in verl_settings.SAME.items():
        if theirs in known and not theirs.startswith(("reward", "algorithm.pf_ppo", "critic.")):
            assert value_of(config, ours) == known[theirs], theirs
            compared += 1
    assert compared >= 6
    batch, mini = (
        known["data.train_batch_size"],
        known[f"{verl_settings.ACTOR}.ppo_mini_batch_size"],
    )
    assert config.algo.mini_batches == -(-batch // mini)
    assert (config.actor.engine == "megatron") == any(".actor.megatron." in name for name in given)
    for field in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        theirs = f"{verl_settings.ACTOR}.megatron.override_transformer_config.{field}"
        assert getattr(config.actor, field) == given.get(theirs)
    grouped = f"{verl_settings.ACTOR}.megatron.override_transformer_config.moe_grouped_gemm"
    assert config.actor.moe_grouped_gemm == given.get(grouped, True)
    assert (config.critic is not None) == (known["algorithm.adv_estimator"] == "gae")
    uses_kl = known.get(f"{verl_settings.ACTOR}.use_kl_loss") or known.get(
        "algorithm.use_kl_in_reward"
    )
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


def test_how_megatron_reduces_gradients_is_the_actors_and_not_the_references() -> None:
    ddp = "actor_rollout_ref.actor.megatron.override_ddp_config."
    translation = verl.translate({
        "actor_rollout_ref.model.path": "m", "data.train_files": "d",
        "actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.kl_loss_coef": 0.1,
        f"{ddp}overlap_grad_reduce": True, f"{ddp}overlap_param_gather": False,
        f"{ddp}bucket_size": 10**7, f"{ddp}grad_reduce_in_fp32": True,
    })  # fmt: skip
    names = ("overlap_grad_reduce", "overlap_param_gather", "ddp_bucket_size")
    assert [translation.fields[f"actor.{name}"] for name in names] == [True, False, 10**7]
    assert translation.fields["ref.engine"] == "megatron"
    assert not any(name.startswith(("ref.overlap", "ref.ddp")) for name in translation.fields)
    assert not any("override_ddp_config" in name for name in translation.notes)


def test_bounds_of_a_rejection_are_those_of_the_ratio_here() -> None:
    """verl bounds -log rho of a k1 test, spmdrl rho: docs/migration.md."""
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
        "    peft_config=LoraConfig(r=4, lora_alpha=16, use_dora=True))\n"
    )
    translation = translated(file)
    assert "output_dir=f'{where}/run'" in translation.notes
    config = config_of(file)
    assert (config.model, config.data.train) == (
        "Qwen/Qwen2.5-0.5B", "trl-lib/DeepMath-103K::train",
    )  # fmt: skip
    assert (config.rollout.n, config.steps, config.algo.epochs) == (4, 20, 2)
    assert config.algo.kl_coef == 0.04 and config.reward == "math"
    assert config.actor.lora is not None and config.actor.lora.rank == 4
    assert config.actor.lora.use_dora and not config.actor.lora.use_rslora


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.py", "args = DPOConfig(beta=0.1)", "DPOConfig of TRL has no translation"),
        ("a.py", "args = AsyncGRPOConfig()", "AsyncGRPOConfig of TRL has no translation"),
        ("a.py", "args = TrlParser(GRPOConfig)", "takes TRL's settings from the command line"),
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


@pytest.mark.programs
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


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    for out in ("run.sh", "no/cfg.py"):
        with pytest.raises(ConfigError, match=r"is there already: .* remove it|cannot be written"):
            main(str(tmp_path / "run.sh"), out=str(tmp_path / out))
    assert (tmp_path / "run.sh").read_text() == SCRIPT


def of_verl(**given: Any) -> Translation:
    """The translation of settings of verl, `.` written as `__`, with a model and data."""
    settings = {name.replace("__", "."): value for name, value in given.items()}
    prefix = "actor_rollout_ref."
    settings = {n if n.startswith(("data.", "critic.", "alg")) else prefix + n: v
                for n, v in settings.items()}  # fmt: skip
    return verl.translate({f"{prefix}model.path": "m/m", "data.train_files": "d"} | settings)


def run_of(translation: Translation, folder: Path) -> PpoConfig:
    file = folder / f"{len([*folder.iterdir()])}.py"
    file.write_text(source_of(translation, "run"))
    return load_config(str(file), PpoConfig, {})


def test_router_replay_experts_optimizers_and_fsdp_of_verl(tmp_path: Path) -> None:
    for given in (
        {"actor__router_replay__mode": "R3"},
        {"actor__megatron__router_replay__mode": "R3"},
        {"rollout__enable_rollout_routing_replay": True},
    ):
        assert run_of(of_verl(**given), tmp_path).actor.router_replay == "R3"
    t = of_verl(actor__router_replay__mode="R2", rollout__enable_rollout_routing_replay=True)
    assert "actor.router_replay" not in t.fields
    assert "actor_rollout_ref.actor.router_replay.mode=R2" in t.notes
    coef = "actor__megatron__override_transformer_config__moe_aux_loss_coeff"
    t = of_verl(**{coef: 0.001})
    assert any("actor.router_aux_loss_coef" in why for why in t.notes.values())
    assert run_of(of_verl(rollout__expert_parallel_size=2), tmp_path).rollout.expert_parallel
    alone = of_verl(rollout__expert_parallel_size=8, rollout__tensor_model_parallel_size=1)
    assert "rollout.expert_parallel" not in alone.fields
    assert "actor_rollout_ref.rollout.expert_parallel_size=8" in alone.notes
    t = of_verl(
        actor__optim__optimizer="AdamW8bit", actor__fsdp_config__reshard_after_forward=False,
        actor__fsdp_config__offload_policy=True, actor__fsdp_config__dtype="fp32",
        actor__fsdp_config__fsdp_size=4, actor__fsdp_config__model_dtype="fp32",
        critic__optim__name="muon", data__val_files="e", data__val_max_samples=9, data__seed=3,
        data__custom_cls__path="x.py", actor__use_torch_compile=True,
        rollout__quantization="fp8",
    )  # fmt: skip
    config = run_of(t, tmp_path)
    role = config.actor
    assert (
        role.optim.name,
        role.reshard_after_forward,
        role.offload_policy,
        role.dtype,
        role.fsdp,
        config.rollout.quantization,
    ) == ("adamw8bit", False, True, "float32", 4, "fp8")
    assert config.critic is not None and config.critic.optim.name == "muon"
    assert (config.data.max_eval_prompts, config.seed) == (9, 3)
    assert "Parquet" in t.notes["data.custom_cls.path=x.py"]
    assert not any("nothing here has this name" in why for why in t.notes.values())
    t = of_verl(actor__optim__optimizer="SGD")
    assert "actor_rollout_ref.actor.optim.optimizer=SGD" in t.notes


def test_the_reference_has_its_own_layout_or_the_actors(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "actor__use_kl_loss": True, "actor__megatron__tensor_model_parallel_size": 4,
        "actor__megatron__pipeline_model_parallel_size": 2,
        "actor__megatron__optimizer_offload": True,
        "ref__megatron__pipeline_model_parallel_size": 1, "ref__megatron__param_offload": True,
        "ref__log_prob_max_token_len_per_gpu": 99,
    }  # fmt: skip
    t = of_verl(**given)
    ref = run_of(t, tmp_path).ref
    assert (ref.engine, ref.tensor_parallel, ref.pipeline_parallel, ref.offload_params,
            ref.offload_optimizer, ref.sequence_parallel, ref.micro_batch_tokens) == (
        "megatron", 4, 1, True, False, True, 99)  # fmt: skip
    assert ".actor." in t.sources["ref.tensor_parallel"]
    assert ".ref." in t.sources["ref.pipeline_parallel"]
    sharded = {"actor__use_kl_loss": True, "actor__ulysses_sequence_parallel_size": 2,
               "ref__fsdp_config__param_offload": True}  # fmt: skip
    ref = run_of(of_verl(**sharded), tmp_path).ref
    assert (ref.engine, ref.ulysses, ref.offload_params) == ("fsdp", 2, True)
    for without in ({"actor__use_kl_loss": False}, {"model__lora_rank": 8}):
        t = of_verl(**given | without)
        assert not any(name.startswith("ref.") for name in t.fields)
        assert "actor_rollout_ref.ref." in t.granted
    mixed = run_of(of_verl(**given, actor__fsdp_config__offload_policy=True), tmp_path)
    assert not mixed.actor.offload_policy  # which is of FSDP2


def test_nothing_of_a_value_becomes_code(tmp_path: Path) -> None:
    code = "x\nimport os\nos.abort()\u2028y"
    given = {
        "actor_rollout_ref.model.path": code, "actor_rollout_ref.actor.odd": code, code: 1,
        "data.train_files": code, "data.truncation": code, "data.prompt_key": float("inf"),
        "trainer.logger": [code], "reward_model.reward_manager": code * 9,
    }  # fmt: skip
    source = source_of(verl.translate(given), f'a"""\n{code}.yaml')
    kinds = [type(statement) for statement in ast.parse(source).body]
    assert kinds == [ast.Expr, ast.ImportFrom, ast.Assign]
    assert "actor.odd='x\\nimport os" in source and max(map(len, source.splitlines())) < 320
    flags = {"num_generations": 8, "odd": code, "reward_funcs": code, "loss_type": code}
    source = source_of(trl.translate(flags, 1), "run")
    assert "os.abort()" in source and len(ast.parse(source).body) == 3
    config = run_of(verl.translate(given), tmp_path)
    assert (config.model, config.data.prompt_key) == (code, "inf")


BRANCHES = """
N=4
if [ "$GPUS" = 8 ]; then N=8; else N=2; fi
SAME=1; SAME=1
[ -z "$LR" ] && LR=3e-6  # it's set behind &&
case $KIND in
  a) BATCH=64 ;;
  *)
    BATCH=128
    ;;
esac
# what follows is written by cat <<END
TEMPERATURE=0.7
cat > inner.sh <<'END'
python -m verl.trainer.main_ppo data.train_files=wrong actor_rollout_ref.model.path=wrong don't
N=77
END
python3 - <<-PY
	print("it's")
	PY
ARGS="actor_rollout_ref.actor.optim.lr=$LR"
ARGS="$ARGS data.train_batch_size=$BATCH"
UNUSED=1; UNUSED=2
cd /tmp && python -m verl.trainer.main_ppo $ARGS data.train_files="a # b.parquet" \\
    actor_rollout_ref.model.path='p #q' actor_rollout_ref.rollout.n=$N \\
    actor_rollout_ref.rollout.temperature=$TEMPERATURE trainer.total_epochs=$SAME \\
    trainer.project_name=a#b 2>&1 | tee log  # 'all
"""


def test_branches_heredocs_and_comments_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(BRANCHES)
    t = translated(tmp_path / "run.sh")
    assert (t.fields["model"], t.fields["data.train"]) == ("p #q", "a # b.parquet")
    assert (t.fields["project"], t.fields["actor.optim.lr"]) == ("a#b", 3e-6)
    assert t.fields["rollout.temperature"] == 0.7
    assert (t.fields["rollout.n"], t.fields["data.prompts_per_step"]) == (2, 128)
    notes = {name: why for name, why in t.notes.items() if name.startswith("$")}
    assert notes.keys() == {"$N", "$LR", "$BATCH"}
    assert notes["$N"].endswith("the last is taken: 2; others: 4, 8")
    (tmp_path / "trl.sh").write_text("if a; then\n B=0.1\nfi\ntrl grpo --beta $B")
    assert "$B" in translated(tmp_path / "trl.sh").notes


@pytest.mark.parametrize(
    ("script", "train", "held_out", "noted"),
    [
        ("t = load_dataset('a/b', 'main', split='train')\ne = load_dataset('c/d', split='test')",
         "a/b:main:train", "c/d::test", ""),
        ("e = load_dataset('a/b', name='main')\ne = e.map(f)\nt = e['train'].shuffle()\n"
         "e = e['test']", "a/b:main:train", "a/b:main:test", ""),
        ("x = load_dataset('a/b', split='train').train_test_split(test_size=0.1)\nt = x['train']\n"
         "e = x['test']", "a/b::train", None, "train_test_split"),
        ("t = load_dataset('a/b', split='train[:90]')\ne = None", "a/b::train", None,
         "split=train[:90]"),
        ("def rows(split='train'):\n    return load_dataset('a/b', 'main')[split]\nt = rows()\n"
         "e = rows('test')", "a/b:main:train", "a/b:main:test", ""),
        ("if x:\n    t = load_dataset('a/b')\nelse:\n    t = load_dataset('c/d')\ne = None",
         "c/d", None, "train_dataset"),
        ("a = load_dataset('a/b')\nb = load_dataset('c/d')\nt = mixed(a, b)\ne = None",
         "a/b", None, "train_dataset"),
        ("t = load_dataset(args.data)\ne = load_dataset('c/d')", "train.parquet", None,
         "data.eval"),
        ("def f():\n    return f()\nt = f()\ne = load_dataset('json', data_files='e.jsonl')",
         "train.parquet", "e.jsonl", "train_dataset"),
        ("t = load_dataset('a/b', revision='v1')\ne = t if x else None", "a/b@v1", None,
         "data.eval"),
    ],
)  # fmt: skip
def test_the_data_sets_that_a_trainer_is_given(
    script: str, train: str, held_out: str | None, noted: str, tmp_path: Path
) -> None:
    last = "\n" if train == "train.parquet" else "\nother = load_dataset('not/this')\n"
    call = "GRPOTrainer(model='m/m', args=GRPOConfig(), train_dataset=t, eval_dataset=e)\n"
    (tmp_path / "run.py").write_text(script + last + call)
    t = translated(tmp_path / "run.py")
    assert (t.fields["data.train"], t.fields.get("data.eval")) == (train, held_out)
    assert not noted or noted in t.notes
    if not noted:
        assert not t.notes.keys() & {"train_dataset", "eval_dataset", "data.eval"}
    for name in (train, held_out):
        assert name is None or str(data_name("data.train", name) or name) == name


def test_the_data_set_of_flags(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "trl grpo --dataset_name a/b --dataset_config main --eval_strategy steps\n"
    )
    fields = translated(tmp_path / "run.sh").fields
    assert (fields["data.train"], fields["data.eval"]) == ("a/b:main", "a/b:main:test")


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 2e-3},
         {"policy_loss": "luspo", "aggregation": None, "seq_mean_over": "all",
          "loss_args": {"clip_low": 2e-3, "clip_high": 2e-3}}),
        ({"loss_type": "vespo", "vespo_k_neg": 4.0, "use_vllm": True},
         {"policy_loss": "vespo", "aggregation": "token_mean",
          "loss_args": {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 4.0, "lambda_neg": 2.0},
          "correction.level": "off", "correction.bypass": True}),
        ({"scale_rewards": "batch", "off_policy_mask_threshold": 0.5},
         {"advantage": "grpo", "advantage_args": {"scale": "batch"},
          "off_policy_mask_threshold": 0.5, "kl_bias_correction": False}),
        ({"beta": 0.01, "use_bias_correction_kl": True},
         {"kl_coef": 0.01, "kl_bias_correction": True}),
        ({"beta": 0.01, "sync_ref_model": True, "ref_model_sync_steps": 64, "num_iterations": 4},
         {"ref_model_sync_steps": 16, "ref_model_mixup_alpha": 0.6}),
        ({"min_p": 0.05, "repetition_penalty": 1.1}, {"correction.level": "token"}),
    ],
    ids=lambda value: next(iter(value)),
)  # fmt: skip
def test_newer_settings_of_trl(given: dict, fields: dict, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"num_generations": 8, "model": "m"} | given))
    config = config_of(file)
    check_algo(config)
    assert {name: value_of(config.algo, name) for name in fields} == fields
    rollout = {name: given[name] for name in ("min_p", "repetition_penalty") if name in given}
    assert {name: value_of(config.rollout, name) for name in rollout} == rollout
    assert not [line for line in (tmp_path / "cfg.py").read_text().splitlines()
                if "nothing here has this name" in line]  # fmt: skip


def test_estimators_of_verl_without_a_deviation(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(
        "python3 -m verl.trainer.main_ppo data.train_files=t.parquet actor_rollout_ref.rollout.n=4 "
        "actor_rollout_ref.model.path=m algorithm.adv_estimator=grpo_passk "
        "algorithm.norm_adv_by_std_in_grpo=False actor_rollout_ref.rollout.repetition_penalty=1.2"
    )
    config = config_of(file)
    check_algo(config)
    assert (config.rollout.repetition_penalty, config.algo.correction.level) == (1.2, "token")
    assert config.algo.advantage == "grpo_passk"
    assert config.algo.advantage_args == {"scale": "none"}


def test_epochs_and_a_warm_up_that_is_a_share_are_taken_as_they_are() -> None:
    actor = "actor_rollout_ref.actor.optim"
    found = verl.translate({
        "actor_rollout_ref.model.path": "m", "data.train_files": "d", "trainer.total_epochs": 15,
        f"{actor}.lr_warmup_steps_ratio": 0.1, f"{actor}.lr_scheduler_type": "cosine",
        "data.sampler.class_name": "Mine",
    })  # fmt: skip
    assert (found.fields["epochs"], found.fields["actor.optim.warmup_ratio"]) == (15, 0.1)
    assert "steps" not in found.fields and "actor.optim.decay_steps" not in found.fields
    assert any("docs/mixtures.md" in why for why in found.notes.values())
    both = verl.translate({
        "actor_rollout_ref.model.path": "m", "data.train_files": "d", f"{actor}.lr_warmup_steps": 5,
        f"{actor}.lr_warmup_steps_ratio": 0.1,
    })  # fmt: skip
    updates = both.fields["algo.mini_batches"]
    assert updates == 1024 // 256  # of a rollout by verl's defaults
    assert both.fields["actor.optim.warmup_steps"] == 5 * updates
    assert "actor.optim.warmup_ratio" not in both.fields
    given = {"model": "m", "dataset_name": "d", "num_train_epochs": 2, "warmup_ratio": 0.03}
    ours = trl.translate(given | {"dataset_mixture": {"datasets": []}}, 1)
    assert (ours.fields["epochs"], ours.fields["actor.optim.warmup_ratio"]) == (2, 0.03)
    assert "actor.optim.decay_steps" not in ours.fields and "steps" not in ours.fields
    assert any("data.sampler.weights" in why for why in ours.notes.values())
    balanced = trl.translate(given | {"router_aux_loss_coef": 0.01}, 1)
    assert balanced.fields["actor.router_aux_loss_coef"] == 0.01
    assert any("experts per token / layers" in why for why in balanced.notes.values())


def test_schedules_of_verl_count_rollouts_and_ours_updates() -> None:
    """verl takes one step of its learning-rate schedule for a rollout, whatever its updates."""
    actor = "actor_rollout_ref.actor"
    fields = verl.translate({
        "actor_rollout_ref.model.path": "m", "data.train_files": "d",
        "data.train_batch_size": 512, f"{actor}.ppo_mini_batch_size": 128, f"{actor}.ppo_epochs": 2,
        f"{actor}.optim.lr_warmup_steps": 10, f"{actor}.optim.lr_scheduler_type": "cosine",
        "trainer.total_training_steps": 300, "critic.optim.lr_warmup_steps": -1,
    }).fields  # fmt: skip
    assert (fields["algo.mini_batches"], fields["steps"]) == (4, 300)
    assert fields["actor.optim.warmup_steps"] == 10 * 4 * 2
    assert fields["actor.optim.decay_steps"] == 300 * 4 * 2
    assert "critic.optim.warmup_steps" not in fields


def test_options_of_templates_rewards_and_schedules_of_verl(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "python3 -m verl.trainer.main_ppo data.train_files=t actor_rollout_ref.model.path=m "
        "+data.apply_chat_template_kwargs.enable_thinking=False "
        "custom_reward_function.path=r.py +custom_reward_function.reward_kwargs.scale=0.5 "
        "actor_rollout_ref.actor.optim.lr_scheduler_type=wsd "
        "\"actor_rollout_ref.rollout.stop=['</a>']\" "
        "actor_rollout_ref.rollout.multi_turn.max_tool_response_length=99\n"
    )
    found = translated(tmp_path / "run.sh")
    assert found.fields["data.chat_template_kwargs"] == {"enable_thinking": False}
    assert found.fields["rollout.stop"] == ("</a>",)
    assert found.notes.keys() >= {
        "actor_rollout_ref.rollout.multi_turn.max_tool_response_length=99",
        "custom_reward_function.reward_kwargs.scale=0.5",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=wsd",
    }


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"adam_beta2": 0.99, "optim": "adamw_8bit", "shuffle_dataset": False},
         {"actor.optim.betas": (0.9, 0.99), "actor.optim.name": "adamw8bit",
          "data.shuffle": False}),
        ({"warmup_steps": 0.05, "max_steps": 40, "lr_scheduler_type": "cosine_with_min_lr",
          "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
         {"actor.optim.warmup_ratio": 0.05, "actor.optim.schedule": "cosine",
          "actor.optim.decay_steps": 40, "actor.optim.min_lr_ratio": 0.1}),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10, "optim": "adamw_torch"},
         {"actor.optim.warmup_steps": 10}),
        # 8 answers of each rank in each of 4 micro-batches; one generation is 16 of them
        ({"gradient_accumulation_steps": 4, "generation_batch_size": 16 * 8},
         {"algo.mini_batches": 4, "data.prompts_per_step": 16}),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2},
         {"algo.mini_batches": 1, "data.prompts_per_step": 4}),
        ({"num_processes": 4}, {"data.prompts_per_step": 4}),
        ({"dataset_prompt_column": "problem", "generation_kwargs": {"stop": ["</a>"]}},
         {"data.prompt_key": "problem", "data.apply_chat_template": True,
          "rollout.stop": ("</a>",)}),
        ({"save_strategy": "no", "eval_strategy": "no"},
         {"checkpoint.every_steps": 0, "eval_every": 0}),
        ({"use_peft": True, "lora_target_modules": ["q_proj,", "v_proj"]},
         {"actor.lora.target_modules": ("q_proj", "v_proj")}),
        ({"use_peft": True, "lora_target_modules": "all-linear"},
         {"actor.lora.target_modules": "all-linear"}),
    ],
    ids=lambda value: next(iter(value)),
)  # fmt: skip
def test_how_trl_trains(given: dict, fields: dict, tmp_path: Path) -> None:
    found = trl.translate({"model": "m"} | given, ranks=None)
    assert {name: found.fields.get(name) for name in fields} == fields
    schedules = {"actor.optim.warmup_steps", "actor.optim.warmup_ratio", "actor.optim.schedule"}
    if "lr_scheduler_type" in given:
        assert schedules & found.fields.keys() == schedules & fields.keys()
    assert not any("nothing here has this name" in why for why in found.notes.values())
    run_of(found, tmp_path)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"lr_scheduler_type": "inverse_sqrt"}, "lr_scheduler_type=inverse_sqrt"),
        ({"optim": "adafactor"}, "optim=adafactor"),
        ({"use_peft": True, "lora_r": 8}, "lora_target_modules"),
        ({"use_peft": True, "lora_target_modules": "all-linear", "lora_dropout": 0.1},
         "lora_dropout=0.1"),
        ({"use_peft": True, "lora_target_modules": ".*attn.*"}, "lora_target_modules=['.*attn.*']"),
        ({"save_strategy": "epoch"}, "save_strategy=epoch"),
        ({"reward_funcs": ["accuracy_reward", "think_format_reward"]},
         "reward_funcs=['accuracy_reward', 'think_format_reward']"),
        ({"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate",
          "vllm_importance_sampling_clip_min": 0.5}, "vllm_importance_sampling_clip_min=0.5"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_of_trl_is_not_taken_is_named(given: dict, name: str) -> None:
    assert name in trl.translate({"model": "m"} | given, ranks=1).notes


def test_flags_of_several_words(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "accelerate launch --num_processes 4 grpo.py --num_generations 8 --use_peft \\\n"
        " --lora_target_modules q_proj, v_proj --report_to wandb tensorboard --lora_r 4 \\\n"
        " --reward_funcs accuracy_reward think_format_reward --bf16 2>&1 | tee log\n"
    )
    found = translated(tmp_path / "run.sh")
    assert found.fields["actor.lora.target_modules"] == ("q_proj", "v_proj")
    assert found.fields["trackers"] == ("tensorboard", "wandb")
    assert found.fields["data.prompts_per_step"] == 4  # of 4 ranks of 8 answers
    assert any(name.startswith("reward_funcs=") for name in found.notes)


def test_layers_of_adapters_and_what_a_python_script_hides(tmp_path: Path) -> None:
    file = tmp_path / "run.py"
    head = "def accuracy_reward(completions): ...\ntrainer = GRPOTrainer(model='m/m', "
    file.write_text(
        f"{head}reward_funcs=[accuracy_reward], args=GRPOConfig(**common, beta=0.1),\n"
        "    peft_config=LoraConfig(r=4, target_modules=['q_proj', 'o_proj'], bias='none',\n"
        "        lora_dropout=0.05, modules_to_save=['embed_tokens'], task_type='CAUSAL_LM'))\n"
    )
    found = translated(file)
    assert found.fields["actor.lora.target_modules"] == ("q_proj", "o_proj")
    assert found.notes.keys() >= {
        "GRPOConfig(**common)", "lora_dropout=0.05", "lora_modules_to_save=['embed_tokens']",
        "reward_funcs=[accuracy_reward], which the script defines",
    }  # fmt: skip
    assert "peft_config" not in found.notes and "lora_bias=none" not in found.notes
    file.write_text(f"{head}args=GRPOConfig(), peft_config=get_peft_config(model_args))\n")
    assert "peft_config" in translated(file).notes


def test_schedules_of_verl_where_two_settings_say_one_thing() -> None:
    actor, prefix = "actor_rollout_ref.actor.optim", "actor.optim"
    t = of_verl(
        actor__optim__lr_warmup_steps=0, actor__optim__lr_warmup_steps_ratio=0.1,
        actor__optim__lr_scheduler_type="constant", actor__optim__warmup_style="cosine",
        actor__optim__lr_decay_steps=-1, critic__optim__lr_warmup_steps=2.5,
        critic__ppo_mini_batch_size=64, rollout__top_k="many", actor__loss_agg_mode=3,
        algorithm__rollout_correction__rollout_rs="token_k1",
        algorithm__rollout_correction__rollout_rs_threshold="0_4",
    )  # fmt: skip
    assert (t.fields[f"{prefix}.warmup_ratio"], t.fields[f"{prefix}.schedule"]) == (0.1, "cosine")
    assert not {f"{prefix}.warmup_steps", f"{prefix}.decay_steps"} & t.fields.keys()
    assert repr(t.fields["critic.optim.warmup_steps"]) == "10"  # of 4 updates in a rollout
    assert t.notes.keys() >= {
        f"{actor}.lr_scheduler_type=constant", "critic.ppo_mini_batch_size=64",
        "actor_rollout_ref.rollout.top_k=many", "actor_rollout_ref.actor.loss_agg_mode=3",
        "algorithm.rollout_correction.rollout_rs",
    }  # fmt: skip
    model = {"actor_rollout_ref.model.path": "m", "data.train_files": "d"}
    both = {"trainer.total_training_steps": 9, "trainer.total_epochs": 2}
    assert "trainer.total_epochs=2" in verl.translate(model | both).notes


def test_declarations_pipes_and_mappings_of_a_script_of_verl(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        ': "${N:=16}"\nreadonly BATCH=32\ndeclare -r LR=2e-6\nexport TOP=0.9 MODEL="a b" HOST\n'
        "FREQ=1 SAVE=$((2 + 3))\nreadonly MORE=(\n trainer.test_freq=$FREQ\n $(no))\n"
        "python3 -m verl.trainer.main_ppo --config-path=$PWD/mine --config-name my_grpo \\\n"
        ' data.train_files=t actor_rollout_ref.model.path="$MODEL" \\\n'
        " data.train_batch_size=$BATCH \\\n"
        " actor_rollout_ref.rollout.n=$N actor_rollout_ref.actor.optim.lr=$LR \\\n"
        " actor_rollout_ref.rollout.top_p=$TOP trainer.save_freq=$SAVE ${MORE[@]} \\\n"
        " +data.apply_chat_template_kwargs={enable_thinking:False} \\\n"
        " +custom_reward_function.reward_kwargs='{alpha: 1e-1}' 2>&1 | tee x=1.log"
    )
    t = translated(tmp_path / "run.sh")
    assert {name: t.fields[name] for name in (
        "model", "rollout.n", "data.prompts_per_step", "actor.optim.lr", "rollout.top_p",
        "data.chat_template_kwargs", "checkpoint.every_steps", "eval_every",
    )} == {
        "model": "a b", "rollout.n": 16, "data.prompts_per_step": 32, "actor.optim.lr": 2e-6,
        "checkpoint.every_steps": 5, "eval_every": 1, "rollout.top_p": 0.9,
        "data.chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    assert t.notes.keys() >= {
        "--config-name=./mine/my_grpo", "custom_reward_function.reward_kwargs={'alpha': 0.1}",
    }  # fmt: skip
    assert not any("x=" in name for name in t.notes)
    own = "verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' "
    found = verl.overrides_of_script(own + "data.a=1 actor_rollout_ref.b=2")
    assert found == {"data.a": 1, "actor_rollout_ref.b": 2}


FOLDERS = """
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null 2>&1 && pwd)"
ROOT=$(readlink -f "$HERE/../..")
PROJECT="$(pwd)"
python3 -m verl.trainer.main_ppo --config-path="$PROJECT/settings" --config-name=mine \\
    data.train_files=$HERE/a.parquet data.val_files=`pwd`/b.parquet \\
    actor_rollout_ref.model.path=$ROOT/model \\
    custom_reward_function.path="$(dirname "$0")/reward.py" \\
    actor_rollout_ref.rollout.max_num_batched_tokens=4096 \\
    +actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode=FULL \\
    +actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True \\
    +actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0
"""


def test_folders_settings_files_and_engine_arguments_of_a_script_of_verl(tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "grpo"
    folder.mkdir(parents=True)
    file = folder / "run.sh"
    file.write_text(FOLDERS)
    missing = translated(file)
    assert "--config-name=./settings/mine" in missing.notes
    assert missing.fields["data.train"] == f"{folder}/a.parquet"
    assert missing.fields["data.eval"] == "./b.parquet"
    assert missing.fields["model"] == f"{folder}/../../model"
    assert repr(f"{folder}/reward.py") in missing.fields["reward"].above
    assert missing.fields["rollout.engine_args"] == {
        "max_num_batched_tokens": 4096, "compilation_config": {"cudagraph_mode": "FULL"},
    }  # fmt: skip
    own = "actor_rollout_ref.rollout.engine_kwargs.vllm."
    assert f"{own}swap_space=4" in missing.notes
    assert f"{own}disable_mm_preprocessor_cache" in missing.granted
    (folder / "reward.py").write_text("def compute_score(solution_str): return 1.0")
    config = config_of(file)
    assert config.algo.kl_coef == 0
    check_algo(replace(config, rollout=replace(config.rollout, n=2)))

    (tmp_path / "settings").mkdir()
    settings = tmp_path / "settings" / "mine.yaml"
    tree: dict[str, Any] = {
        "defaults": ["ppo_trainer", "_self_"],
        "data": {"max_response_length": 77},
        "actor_rollout_ref": {"rollout": {"n": 6, "max_num_batched_tokens": 1}},
    }
    settings.write_text(yaml.safe_dump(tree))
    read = translated(file)
    assert not any(name.startswith("--config-name") for name in read.notes)
    assert read.fields["rollout.max_tokens"] == 77 and read.fields["rollout.n"] == 6
    assert read.fields["rollout.engine_args"]["max_num_batched_tokens"] == 4096  # the script's
    settings.write_text(yaml.safe_dump(tree | {"defaults": ["theirs"]}))
    assert "--config-name=./settings/mine with theirs" in translated(file).notes
    both = {
        f"{own}compilation_config": "level 3", f"{own}compilation_config.cudagraph_mode": "FULL",
        f"{own}block_size": None, "actor_rollout_ref.model.path": "m",
    }  # fmt: skip
    text = verl.translate(both)
    assert text.fields["rollout.engine_args"] == {"compilation_config": "level 3"}
    assert f"{own}compilation_config.cudagraph_mode=FULL" in text.notes
    settings.write_text("a: [")
    with pytest.raises(ConfigError, match=r"mine\.yaml, which .*run\.sh names, cannot be read"):
        translated(file)
