"""What a script of TRL leaves open, or gives in a form that is seldom, is read or named."""

from pathlib import Path
from typing import Any

import pytest

from spmdrl.config import ConfigError
from spmdrl.migration.config_source import Translation, source_of
from spmdrl.translate import main, translated

NOTHING: dict[str, Any] = {}
START = "accelerate launch grpo.py --num_generations 8 --model_name_or_path m "


def of_text(text: str, folder: Path, ranks: int | None = None, name: str = "run.py") -> Translation:
    (folder / name).write_text(text)
    translation = translated(folder / name, ranks)
    source_of(translation, name)  # which parses it
    return translation


def of_config(arguments: str, folder: Path, behind: str = "") -> Translation:
    """The translation of a Python script with these arguments of GRPOConfig."""
    text = f"args = GRPOConfig({arguments})\n{behind}\nGRPOTrainer(model='m/m', args=args)\n"
    return of_text(text, folder)


def check(t: Translation, fields: dict[str, Any], noted: tuple[str, ...] = ()) -> None:
    """Fields with these values, None for one that is not set; notes that begin like these."""
    assert {name: t.fields.get(name) for name in fields} == fields
    for start in noted:
        assert any(name.startswith(start) for name in t.notes), (start, t.notes)


@pytest.mark.parametrize(
    ("arguments", "behind", "fields", "noted"),
    [
        ("gradient_accumulation_steps=4, steps_per_generation=GA * 2", "",
         {"algo.mini_batches": 1, "data.prompts_per_step": 4}, ("steps_per_generation=GA * 2",)),
        ("gradient_accumulation_steps=4, steps_per_generation=6", "",
         {"algo.mini_batches": 1}, ("steps_per_generation=6",)),
        ("adam_beta1='x', adam_beta2=0.9", "", {"actor.optim.betas": (0.9, 0.9)},
         ("adam_beta1=x",)),
        ("generation_kwargs={[1]: 2}", "", NOTHING, ("generation_kwargs={[1]: 2}",)),
        ("'out', learning_rate=1e-5", "", {"run_dir": "out", "actor.optim.lr": 1e-5}, ()),
        ("'out', 5", "", {"run_dir": "out"}, ("GRPOConfig(5)",)),
        ("learning_rate=1e-5",
         "args.learning_rate = 3e-6\nargs.beta = f(1)\nargs.num_iterations += 1\n"
         "if x:\n    args.temperature = 0.5",
         {"actor.optim.lr": 3e-6, "algo.kl_coef": None, "rollout.temperature": None},
         ("beta=f(1)", "args.num_iterations += 1", "args.temperature = 0.5")),
        ("learning_rate=1e-5",
         "setattr(args, 'learning_rate', 3e-6)\nsetattr(other, 'beta', 0.5)\n"
         "for k in given:\n    setattr(args, k, 1)\nsetattr(args, name, 2)\n"
         "if x:\n    setattr(args, 'temperature', 0.5)",
         {"actor.optim.lr": 3e-6, "algo.kl_coef": None, "rollout.temperature": None},
         ("setattr(args, k, 1)", "setattr(args, name, 2)", "setattr(args, 'temperature', 0.5)")),
        ("report_to=where(), use_liger_kernel=False", "", {"trackers": ("tensorboard",)},
         ("report_to=where()",)),
        ("optim=OptimizerNames.ADAMW_8BIT, lr_scheduler_type=transformers.SchedulerType.COSINE", "",
         {"actor.optim.name": "adamw8bit", "actor.optim.schedule": "cosine"}, ()),
        ("chat_template_kwargs=dict(enable_thinking=False)", "",
         {"data.chat_template_kwargs": {"enable_thinking": False}}, ()),
        ("", "peft = LoraConfig(r=4, target_modules=T)\npeft.lora_alpha = 9",
         {"actor.lora.rank": 4, "actor.lora.alpha": 9}, ("lora_target_modules=T",)),
        ("", "q = BitsAndBytesConfig(load_in_4bit=True)\npeft = LoraConfig(r=4)",
         {"actor.lora.quantization": "nf4"}, ("bnb_4bit_quant_type=fp4",)),
        ("", "q = BitsAndBytesConfig(load_in_4bit=True)", {"actor.lora.quantization": None},
         ("load_in_4bit",)),
    ],
)  # fmt: skip
def test_a_python_script(
    arguments: str, behind: str, fields: dict, noted: tuple[str, ...], tmp_path: Path
) -> None:
    t = of_config(arguments, tmp_path, behind)
    check(t, fields, noted)
    assert not {"lora_target_modules=T", "lora_target_modules"} <= t.notes.keys()


@pytest.mark.parametrize(
    ("flags", "fields", "noted"),
    [
        # TRL counts updates: 4 mini-batches of 2 iterations are 8 of a step
        ("--steps_per_generation 4 --num_iterations 2 --save_steps 80 --eval_strategy steps "
         "--eval_steps 4", {"checkpoint.every_steps": 10, "eval_every": 1}, ()),
        ("--steps_per_generation 4", {"checkpoint.every_steps": 125, "eval_every": 0}, ()),
        ("--save_steps 0.1", {"checkpoint.every_steps": None}, ("save_steps=0.1",)),
        ("--eval_strategy steps --logging_steps 5", {"eval_every": 5}, ()),
        ("--eval_strategy no --eval_steps 5", {"eval_every": 0}, ()),
        ("--max_steps 1e3", {"steps": 1000, "epochs": None}, ()),
        ("--lr_scheduler_type constant --warmup_steps 5", {"actor.optim.warmup_steps": None},
         ("warmup_steps=5",)),
        ("--lr_scheduler_type constant --warmup_ratio 0.1", {"actor.optim.warmup_ratio": None},
         ("warmup_ratio=0.1",)),
        ("--warmup_steps 5 --warmup_ratio 0.1",
         {"actor.optim.warmup_steps": 5, "actor.optim.warmup_ratio": None}, ("warmup_ratio=0.1",)),
        ("--warmup_ratio $W --max_steps $STEPS --adam_beta1 $B --beta $BETA --loss_type $L",
         {"actor.optim.warmup_ratio": None, "steps": None, "epochs": 3, "algo.kl_coef": None,
          "actor.optim.betas": None, "algo.aggregation": "token_mean"},
         ("warmup_ratio=$W", "max_steps=$STEPS", "adam_beta1=$B", "beta=$BETA", "loss_type=$L")),
        ("--steps_per_generation $SPG --gradient_accumulation_steps 2", {"algo.mini_batches": 1},
         ("steps_per_generation=$SPG",)),
        ("--lr_scheduler_type cosine_with_min_lr --learning_rate 2e-6 "
         "--lr_scheduler_kwargs '{\"min_lr\": 2e-7}'", {"actor.optim.min_lr_ratio": 0.1}, ()),
        ("--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{\"min_lr\": \"a\"}'",
         {"actor.optim.min_lr_ratio": None}, ("lr_scheduler_kwargs=",)),
        ("--lora_r 16", {"actor.lora.rank": None, "actor.lora.target_modules": None}, ("lora_r",)),
        ("--use_peft --lora_target_modules q_proj,k_proj",
         {"actor.lora.rank": 16, "actor.lora.target_modules": ("q_proj", "k_proj")}, ()),
        ("--config r.yaml", NOTHING, ("--config",)),
        ("$MORE --beta 0.1 ${EXTRA:+--use_vllm}", {"algo.kl_coef": 0.1},
         ("$MORE", "${EXTRA:+--use_vllm}")),
        ("--num_iterations 0 --loss_type 3 --report_to 5",
         {"algo.epochs": 1, "algo.aggregation": "token_mean"},
         ("num_iterations=0", "loss_type=3", "report_to=[5]")),
    ],
)  # fmt: skip
def test_flags(flags: str, fields: dict, noted: tuple[str, ...], tmp_path: Path) -> None:
    check(of_text(START + flags, tmp_path, name="run.sh"), fields, noted)


def test_a_yaml_file(tmp_path: Path) -> None:
    t = of_text(
        "num_generations: 8\nlearning_rate: 1e-6\nlr_scheduler_type: cosine_with_min_lr\n"
        "lr_scheduler_kwargs:\n  min_lr: 1e-7\nuse_peft: false\nlora_r: 16\n"
        "gradient_accumulation_steps: 2\nsteps_per_generation: $SPG\n",
        tmp_path, name="run.yaml",
    )  # fmt: skip
    assert t.fields["actor.optim.min_lr_ratio"] == pytest.approx(0.1)
    check(t, {"actor.lora.rank": None, "algo.mini_batches": 1}, ("lora_r", "steps_per_generation"))


@pytest.mark.parametrize(
    ("launcher", "ranks", "prompts", "noted"),
    [
        ("accelerate launch --num_machines 2 --num_processes 16", None, 16, ""),
        ("torchrun --nnodes 2 --nproc_per_node 8", None, 16, ""),
        ("torchrun --nproc-per-node=8", None, 8, ""),
        ("accelerate launch --num_processes $NUM_GPUS", None, 1, "num_processes=$NUM_GPUS"),
        ("torchrun --nproc_per_node gpu", None, 1, "nproc_per_node=gpu"),
        ("torchrun --nnodes 1:4 --nproc_per_node 8", None, 1, "nproc_per_node=8, nnodes=1:4"),
        ("accelerate launch --num_processes $NUM_GPUS", 4, 4, ""),
        ("accelerate launch --num_processes 8", 1, 1, ""),
    ],
)  # fmt: skip
def test_the_processes_of_a_launcher(
    launcher: str, ranks: int | None, prompts: int, noted: str, tmp_path: Path
) -> None:
    t = of_text(f"{launcher} grpo.py --num_generations 8", tmp_path, ranks, "run.sh")
    assert t.fields["data.prompts_per_step"] == prompts
    assert [name for name in t.notes if "process" in t.notes[name]] == [noted] * bool(noted)


@pytest.mark.parametrize("command", ["accelerate launch grpo.py", "trl grpo"])
def test_the_recipe_that_a_command_names(command: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("num_generations: 4\nbeta: 1e-2\nepsilon: 0.1\n")
    t = of_text(f"{command} --config r.yaml --epsilon 0.3", tmp_path, name="run.sh")
    check(t, {"rollout.n": 4, "algo.kl_coef": 0.01})
    assert t.fields["algo.loss_args"]["clip_low"] == 0.3
    assert "--config" not in t.notes
    (tmp_path / "r.yaml").unlink()
    t = of_text(f"{command} --config r.yaml", tmp_path, name="run.sh")
    assert "translate that file" in t.notes["--config"]


def test_a_script_whose_command_stands_in_its_docstring(tmp_path: Path) -> None:
    t = of_text(
        f'"""\n{START} --beta 0.1\n"""\n'
        "script_args, training_args, model_args = parser.parse_args_and_config()\n"
        "training_args.learning_rate = 3e-6\nif x:\n    training_args.temperature = 0.5\n",
        tmp_path,
    )
    check(t, {"algo.kl_coef": 0.1, "actor.optim.lr": 3e-6, "reward": "math"},
          ("training_args.temperature = 0.5", "reward_funcs"))  # fmt: skip


def test_prose_around_the_command_of_a_docstring(tmp_path: Path) -> None:
    text = (
        '"""Trains with transformers\' own batches: it doesn\'t wait.\n\n```bash\n'
        "FAST=1 accelerate launch grpo.py \\\\\n    --num_generations 6\n```\n\n"
        'The trainer\'s --num_generations 7 is only prose.\n"""\nTrlParser(GRPOConfig)\n'
    )
    check(of_text(text, tmp_path), {"rollout.n": 6})


def test_an_environment_of_trl_is_named_with_what_to_write(tmp_path: Path) -> None:
    text = (
        "GRPOTrainer(model='m', args=GRPOConfig(num_completions_to_print=2), "
        "environment_factory=lambda: Game(client), callbacks=[Mine()])"
    )
    notes = of_text(text, tmp_path).notes
    said = " ".join(f"{name}: {why}" for name, why in notes.items())
    assert "environment=..., a class whose objects answer turns" in said
    assert "num_completions_to_print=2: log_samples" in said
    assert "an object of your own) is called after each step" in said


@pytest.mark.parametrize("ranks", ["many", 0])
def test_a_number_of_processes_is_asked_for(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(START)
    with pytest.raises(ConfigError, match="--ranks"):
        main(str(tmp_path / "run.sh"), ranks=ranks)
