"""Config files and overrides: what is typed wrong is named, with the place and the remedy."""

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
import typing
from collections.abc import Mapping
from pathlib import Path

import pytest
from plan_configs import CONFIG_FILE

from spmdrl.algo.advantages import ESTIMATORS
from spmdrl.algo.losses import POLICY_LOSSES
from spmdrl.algo.option_help import option_lines, preference_lines
from spmdrl.algo.options import options_of
from spmdrl.algo.preference_losses import PREFERENCE_LOSSES
from spmdrl.cli.arguments import (
    as_source,
    changed_fields,
    describe,
    fingerprint,
    load_config,
    override,
)
from spmdrl.cli.help import config_lines
from spmdrl.config import (
    ConfigError,
    DataConfig,
    OptimConfig,
    PpoConfig,
    PreferenceTrainingConfig,
    RewardTrainingConfig,
    SftConfig,
    SftDataConfig,
    TrainConfig,
)


@pytest.fixture
def write(tmp_path):
    def write(text, name="cfg.py"):
        path = Path(tmp_path, name)
        path.write_text(text)
        return str(path)

    return write


def test_overrides_reach_nested_fields_and_keep_types(write):
    config = load_config(
        write(CONFIG_FILE), PpoConfig,
        {"steps": 2, "actor.optim.lr": 1, "run_dir": 7, "rollout.stop": "x", "data.eval": None,
         "actor.optim.betas": [0.9, 0.95], "critic.optim.lr": 1e-3},
    )  # fmt: skip
    assert (config.steps, config.actor.optim.lr, config.run_dir) == (2, 1, "7")
    assert config.rollout.stop == ("x",)
    assert config.actor.optim.betas == (0.9, 0.95)
    assert config.critic == TrainConfig(optim=config.critic.optim)
    assert config.critic.optim.lr == 1e-3


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"stepz": 2}, ["--stepz", "PpoConfig has no field 'stepz'", "nearest: steps"]),
        ({"actor.optim.lrr": 2}, ["OptimConfig has no field 'lrr'", "nearest: actor.optim.lr"]),
        ({"actor.lr": 2}, ["TrainConfig has no field 'lr'", "nearest: actor.optim.lr"]),
        ({"max_tokens": 2}, ["no field 'max_tokens'", "nearest: rollout.max_tokens"]),
        ({"temprature": 2}, ["no field 'temprature'", "rollout.temperature"]),
        ({"steps": "many"}, ["--steps", "expected int", "str 'many'"]),
        ({"steps": True}, ["expected int", "bool True"]),
        ({"actor.optim.lr": "fast"}, ["--actor.optim.lr", "expected float"]),
        ({"rollout.engine": "vlm"}, ["one of 'vllm', 'hf'", "'vlm'"]),
        ({"steps.x": 1}, ["steps is a value"]),
        ({"reward": [3]}, ["--reward", "expected", "list [3]"]),
        ({"actor": 3}, ["--actor", "expected TrainConfig"]),
    ],
)
def test_wrong_overrides_are_named(write, overrides, words):
    with pytest.raises(ConfigError) as error:
        load_config(write(CONFIG_FILE), PpoConfig, overrides)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", ["must define `config = PpoConfig(...)`", "nothing"]),
        ("config = 3", ["found int"]),
        ("import nothing_like_it", ["ModuleNotFoundError", "line 1"]),
        ("a = 1\nconfig = PpoConfig(", ["SyntaxError"]),
        (
            "from spmdrl.config import *\n\nconfig = PpoConfig(modle='m')",
            ["modle", "line 3", "nearest: model"],
        ),
        (
            CONFIG_FILE.replace('"m"', '"m", rollout=RolloutConfig(enigne="hf")'),
            ["nearest: engine"],
        ),
        (CONFIG_FILE.replace('"m"', "5.5, steps='x'"), ["PpoConfig.steps", "expected int"]),
    ],
)
def test_wrong_files_are_named(write, text, words):
    path = write(text)
    with pytest.raises(ConfigError) as error:
        load_config(path, PpoConfig, {})
    assert all(word in str(error.value) for word in [path, *words]), str(error.value)


def test_values_of_the_file_are_converted_too(write):
    config = load_config(
        write(CONFIG_FILE.replace('"m"', '"m", run_dir=7, rollout=RolloutConfig(stop="x")')),
        PpoConfig,
        {},
    )
    assert (config.run_dir, config.rollout.stop) == ("7", ("x",))


def test_missing_file_and_wrong_kind(write):
    with pytest.raises(ConfigError, match=r"--config FILE is required.*config = SftConfig"):
        load_config("", SftConfig, {})
    with pytest.raises(ConfigError, match=r"no such file: 'nowhere\.py'"):
        load_config("nowhere.py", PpoConfig, {})
    with pytest.raises(ConfigError, match=r"SftConfig\(\.\.\.\)`; found PpoConfig"):
        load_config(write(CONFIG_FILE), SftConfig, {})
    with pytest.raises(ConfigError, match="not a Python file"):
        load_config(write("x", "cfg.yaml"), PpoConfig, {})


def test_configs_share_a_base_by_import(write):
    write(CONFIG_FILE, "shared_base.py")
    path = write("from dataclasses import replace\nfrom shared_base import config as base\n"
                 "config = replace(base, steps=3)\n")  # fmt: skip
    assert load_config(path, PpoConfig, {}).steps == 3


def test_a_config_imports_from_its_own_folder_whatever_an_earlier_one_imported(tmp_path):
    """As `replay --config one/config.py --edit two/config.py` does."""
    for name, steps in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        base = (
            CONFIG_FILE
            + f"from dataclasses import replace\nconfig = replace(config, steps={steps})\n"
        )
        (tmp_path / name / "base_of_both.py").write_text(base)
        (tmp_path / name / "config.py").write_text("from base_of_both import config\n")
    steps = [load_config(str(tmp_path / name / "config.py"), PpoConfig, {}).steps
             for name in ("one", "two", "two", "one")]  # fmt: skip
    assert steps == [1, 2, 2, 1]


def test_fingerprint_sees_values_and_code(write):
    first = fingerprint(load_config(write(CONFIG_FILE), PpoConfig, {}))
    assert first == fingerprint(load_config(write(CONFIG_FILE), PpoConfig, {}))
    assert first != fingerprint(load_config(write(CONFIG_FILE), PpoConfig, {"seed": 1}))
    changed = CONFIG_FILE.replace("==", "!=")
    assert first != fingerprint(load_config(write(changed), PpoConfig, {}))


def test_fingerprint_sees_constants_and_methods_of_tools(write):
    """A dataclass too, whose fields have no values; sets have no order of their own."""
    tool = """
from dataclasses import dataclass
@dataclass
class Purse:
    coins: int
    def earn(self, coins: int) -> bool:
        return coins in {"a", "b", "c"} or any(coins > 3 for _ in "x")
"""
    text = tool + CONFIG_FILE.replace("reward=reward", "reward=reward, tools=(Purse,)")
    assert text.count("Purse") == 2
    first = fingerprint(load_config(write(text), PpoConfig, {}))
    assert first == fingerprint(load_config(write(text), PpoConfig, {}))
    for old, new in (('"a"', '"d"'), ("> 3", "> 4"), ('"x"', '"y"')):
        changed = text.replace(old, new)
        assert changed != text
        assert first != fingerprint(load_config(write(changed), PpoConfig, {}))


def test_fingerprints_of_sets_lists_and_base_classes(write):
    tool = """
from functools import partial
class Base:
    size = 5
    def go(self) -> int:
        return self.size
class Maze(Base):
    @property
    def area(self):
        return 25
"""
    given = "reward=partial(reward, words={'a', 'b', 'c'}, fs=[reward]), tools=(Maze,)"
    text = tool + CONFIG_FILE.replace("reward=reward", given).replace(
        "truth)", "truth, words, fs)", 1
    )
    config = load_config(write(text), PpoConfig, {})
    assert "words={'a', 'b', 'c'}, fs=[reward]" in as_source(config)
    for old, new in (("size = 5", "size = 6"), ("self.size", "self.size + 1"), ("25", "26")):
        changed = text.replace(old, new)
        assert changed != text
        assert fingerprint(config) != fingerprint(load_config(write(changed), PpoConfig, {}))


def test_a_config_has_annotations_as_it_wrote_them(write):
    text = "def tool(a: int) -> str: ...\nassert tool.__annotations__['a'] is int\n" + CONFIG_FILE
    load_config(write(text), PpoConfig, {})
    with pytest.raises(ConfigError, match=r"ZeroDivisionError.*\(line 2\)"):
        load_config(write("x = 1\nx / 0\n"), PpoConfig, {})


def test_partials_and_objects_do_not_differ_between_ranks(write):
    text = CONFIG_FILE.replace(
        "reward=reward", "reward={'a': partial(reward, ground_truth='1'), 'b': J()}"
    )
    text = "from functools import partial\nclass J:\n    def __call__(self): ...\n" + text
    config = load_config(write(text), PpoConfig, {})
    assert "partial(reward, ground_truth='1')" in as_source(config)
    assert " at 0x" not in as_source(config)


def test_words_that_look_like_booleans_are_refused(write):
    with pytest.raises(ConfigError, match="enable_thinking"):
        load_config(
            write(CONFIG_FILE),
            PpoConfig,
            {"data.chat_template_kwargs": {"enable_thinking": "false"}},
        )


def test_source_of_a_config_is_python(write):
    config = load_config(write(CONFIG_FILE), PpoConfig, {"critic.optim.lr": 0.5})
    import spmdrl.config

    names = vars(spmdrl.config) | {"reward": config.reward}
    assert eval(as_source(config), names) == config


@pytest.mark.programs
@pytest.mark.parametrize("program", ["ppo", "sft", "reward_model"])
def test_a_wrong_key_costs_no_import_of_torch(write, program):
    code = (
        f"import sys\nimport spmdrl.{program} as p\nsys.argv = ['x']\n"
        "try:\n    p.main(config='nowhere.py')\n"
        "finally:\n    assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("spmdrl: config error: --config: no such file") == 1
    assert "Traceback" not in done.stderr


def test_a_comment_is_of_one_field():
    """Help takes what stands above a field and behind it: a comment behind one that went on in the
    next line would be told of the next field."""
    kinds, seen = [PpoConfig, SftConfig, RewardTrainingConfig, PreferenceTrainingConfig], set()
    while kinds:
        kind = kinds.pop()
        seen.add(kind)
        kinds += [k for k in groups_of(kind) if k not in seen]
        above = False
        for row in inspect.getsource(kind).splitlines():
            code, mark, _ = row.strip().partition("# ")
            if code.partition(":")[0] in {f.name for f in dataclasses.fields(kind)}:
                assert not (above and mark), f"{kind.__name__}.{code}: comments above and behind"
            above = bool(mark) and not code
    assert len(seen) > 15


def groups_of(kind):
    hints = typing.get_type_hints(kind).values()
    found = [inner for hint in hints for inner in (hint, *typing.get_args(hint))]
    return [k for k in found if isinstance(k, type) and dataclasses.is_dataclass(k)]


def test_help_says_of_a_field_what_stands_beside_it():
    text = "\n".join(config_lines(PpoConfig))
    for name, words in {
        "static_split": "engine e takes a fixed share, whatever its speed: for GPU and hf runs",
        "oversample": "ask so many times the prompts, stop when prompts_per_step are complete",
        "greedy_baseline": "ask each prompt once more, greedily",
        "level": "of the weight. token: rho; sequence: the product",
        "mode": "truncate: min(weight, high) (TIS); mask",
        "low": 'bound of "mask"',
    }.items():
        told = text.partition(f"\n  {name}: ")[2].split("\n")[1].strip()
        assert told.startswith(words), (name, told)


def test_only_what_differs_from_the_defaults_is_shown():
    config = PpoConfig(
        "m", DataConfig("t"), "gsm8k", critic=TrainConfig(), prm=TrainConfig(fsdp=2),
        actor=TrainConfig(optim=OptimConfig(lr=0.5)),
    )  # fmt: skip
    assert changed_fields(config) == [
        "model='m'", "data.train='t'", "actor.optim.lr=0.5", "reward='gsm8k'",
        "critic=TrainConfig()", "prm.fsdp=2",
    ]  # fmt: skip
    sft = SftConfig("m", SftDataConfig("t"), "o")
    assert changed_fields(sft) == ["model='m'", "data.train='t'", "out='o'"]
    assert changed_fields(dataclasses.replace(sft, actor=TrainConfig())) == [
        "model='m'", "data.train='t'", "actor.optim.lr=1e-06", "out='o'",
    ]  # fmt: skip


def test_a_name_that_is_nearly_right_is_put_right():
    with pytest.raises(ConfigError, match="did you mean 'token_mean'"):
        override(PpoConfig("m", DataConfig("t"), "gsm8k"), "algo.aggregation", "token-mean")


CONFIGS = {"ppo": PpoConfig, "sft": SftConfig, "reward_model": RewardTrainingConfig,
           "preference": PreferenceTrainingConfig,
           "evaluate": PpoConfig}  # fmt: skip


def test_help_lists_the_options_of_every_loss_and_estimator():
    lines = option_lines()
    middle = next(i for i, line in enumerate(lines) if line.startswith("--algo.advantage_args."))
    seen = check_option_lines(lines[:middle], POLICY_LOSSES)
    assert seen + check_option_lines(lines[middle:], ESTIMATORS) > 30
    assert check_option_lines(preference_lines(), PREFERENCE_LOSSES) > 10


def check_option_lines(lines, table):
    """Compares the lines with the functions' own signatures; returns the number of options."""
    by_name = {line.partition(":")[0]: line for line in lines if line.startswith("  ")}
    seen = 0
    for name, record in table.items():
        options = options_of(record.function)
        shown = by_name.pop(f"  {name}", "")
        assert bool(shown) == bool(options), name
        for option, known in options.items():
            kind = describe(known.type).replace(" or ", " | ")
            default = dict(known.default) if isinstance(known.default, Mapping) else known.default
            found = re.search(rf"\b{option}: (.*?) = (.*?)(?: \((.*?)\))?(?:, \w+: |$)", shown)
            assert found is not None, (name, option, shown)
            assert found[1] == kind, (name, option)
            assert ast.literal_eval(found[2]) == default, (name, option)
            assert found[3] == (known.range and known.range.text), (name, option)
            seen += 1
    assert not by_name
    return seen


def test_a_whole_group_and_a_key_of_it_are_both_taken_whatever_their_order(tmp_path):
    file = tmp_path / "config.py"
    file.write_text(
        "from spmdrl.config import *\n"
        "config = PpoConfig('m', DataConfig('t'), 'gsm8k', algo=AlgoConfig(loss_args={'a': 1}))\n"
    )
    group, key = {"algo.loss_args": {"b": 2, "c": 3}}, {"algo.loss_args.c": 4}
    for flags in (group | key, key | group):
        config = load_config(str(file), PpoConfig, flags)
        assert config.algo.loss_args == {"b": 2, "c": 4}


@pytest.mark.programs
@pytest.mark.parametrize("module", CONFIGS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_every_option(module, flag):
    command = [sys.executable, "-X", "importtime", "-m", f"spmdrl.{module}", flag]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| torch\n" not in done.stderr  # help comes at once
    for field in (*dataclasses.fields(CONFIGS[module]), *dataclasses.fields(OptimConfig)):
        assert f"\n  {field.name}: " in done.stdout, field.name
    assert "--actor.optim." in done.stdout and "spmdrl.launch --nproc-per-node" in done.stdout
    assert "--show_config" in done.stdout
    assert ("  sapo: tau_pos: float = 1.0 (above 0)" in done.stdout) == (module == "ppo")
    assert "\n  every_steps: int = " in done.stdout and "of the older ones, by the" in done.stdout
