"""Whatever a config, a command line or a data file holds: a sound plan, or a ConfigError that says
what is wrong. Everything is drawn from the dataclasses' own fields, so new ones are covered.

SPMDRL_FUZZ=50 draws fifty times as many examples, from a random seed; a number below one fewer, and
always the same: `make check` draws a fifth of what `make test` does.
"""

# ruff: noqa: PT017  a ConfigError is one of two right outcomes, so pytest.raises() says too much
from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fire
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tiny_models import save_qwen3
from transformers import AutoTokenizer

from spmdrl import ppo
from spmdrl.cli.arguments import as_source, load_config, override
from spmdrl.config import (
    AnswerDataConfig,
    ConfigError,
    DataConfig,
    OptimConfig,
    PpoConfig,
    PreferenceDataConfig,
    PreferenceTrainingConfig,
    RewardTrainingConfig,
    RolloutConfig,
    SftConfig,
    SftDataConfig,
    TrainConfig,
)
from spmdrl.data.preferences import PreferenceDataset
from spmdrl.data.prompts import PromptDataset
from spmdrl.data.sft import SftDataset
from spmdrl.distributed.topology import Topology
from spmdrl.training.checks.describe import describe
from spmdrl.training.checks.preference import check_preference
from spmdrl.training.checks.ranges import BOUNDS
from spmdrl.training.checks.rl import check
from spmdrl.training.checks.supervised import check_reward_training, check_sft

MORE = float(os.environ.get("SPMDRL_FUZZ", "0"))

# Hypothesis takes the exception of a time limit for a finding and goes on, now without a limit:
# this one prints every stack and ends the process
pytestmark = pytest.mark.timeout(300 * max(MORE, 1), method="thread")


def fuzz(examples: int) -> settings:
    return settings(
        max_examples=round(examples * (MORE or 1)), derandomize=MORE < 1, deadline=None,
        database=None, suppress_health_check=list(HealthCheck),
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save_qwen3(tmp_path_factory.mktemp("fuzz")))


@pytest.fixture(scope="module")
def topology() -> Iterator[Topology]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Topology.build(torch.device("cpu"), dp=-1)
    dist.destroy_process_group()


def ppo_config(model: str) -> PpoConfig:
    return PpoConfig(
        model, DataConfig("t.jsonl", prompts_per_step=12, max_prompt_tokens=64), "gsm8k",
        rollout=RolloutConfig(engine="hf", n=4, max_tokens=32),
    )  # fmt: skip


def sft_config(model: str) -> SftConfig:
    return SftConfig(model, SftDataConfig("t.jsonl", max_tokens=64), "out")


def reward_config(model: str) -> RewardTrainingConfig:
    return RewardTrainingConfig(model, PreferenceDataConfig("t.jsonl", max_tokens=64), "out")


def preference_config(model: str) -> PreferenceTrainingConfig:
    return PreferenceTrainingConfig(model, AnswerDataConfig("t.jsonl", max_tokens=64), "out")


STARTS = {
    PpoConfig: ppo_config, SftConfig: sft_config, RewardTrainingConfig: reward_config,
    PreferenceTrainingConfig: preference_config,
}  # fmt: skip
KINDS = list(STARTS)


def leaves(kind: type, where: str = "") -> dict[str, Any]:
    """Dotted name -> type of every field, those of groups that are off included."""
    found: dict[str, Any] = {}
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        options = options_of(hints[field.name])
        groups = [o for o in options if dataclasses.is_dataclass(o)]
        if groups:
            found |= leaves(groups[0], f"{where}{field.name}.")
        else:
            found[f"{where}{field.name}"] = hints[field.name]
    return found


def options_of(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


LEAVES = {kind: leaves(kind) for kind in KINDS}

NAMES = st.sampled_from(["", "all", "gsm8k", "score", "actor", "x/y", "/no/such", "a\0b", "0-3,7"])
INTS = st.integers(-3, 40) | st.sampled_from([-(2**70), 2**31, 2**40, 2**63, 10**30, 10**400])
FLOATS = st.floats() | st.floats(0, 2) | INTS
JUNK = st.recursive(
    st.none() | st.booleans() | INTS | st.floats() | st.text(max_size=8) | st.binary(max_size=4)
    | NAMES | st.sampled_from([len, object, OptimConfig, OptimConfig(), TrainConfig, float("nan")]),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner)
    | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


def typed(hint: Any) -> st.SearchStrategy:
    """Values of a field's type, sensible or not."""
    options = options_of(hint)
    if len(options) > 1:
        return st.one_of([typed(option) for option in options])
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    simple = {int: INTS, float: FLOATS, bool: st.booleans(), str: NAMES | st.text(max_size=5),
              type(None): st.none(), Any: JUNK}  # fmt: skip
    if hint in simple:
        return simple[hint]
    if origin is typing.Literal:
        return st.sampled_from(parts)
    if origin in (tuple, Sequence):
        return st.lists(typed(parts[0]), max_size=3).map(tuple)
    if origin is typing.get_origin(Callable[..., Any]):
        return st.just(lambda response, ground_truth: 0.0)
    return st.dictionaries(NAMES, typed(parts[1]), max_size=2)


def run_check(config: Any, world: int) -> None:
    checks = {
        PpoConfig: check, SftConfig: check_sft, RewardTrainingConfig: check_reward_training,
        PreferenceTrainingConfig: check_preference,
    }  # fmt: skip
    checks[type(config)](config, world)


def plan(config: Any, world: int) -> bool:
    """Whether it is sound; anything but a ConfigError fails the test, and so does an empty one."""
    try:
        run_check(config, world)
    except ConfigError as error:
        assert len(str(error)) > 10
        return False
    if isinstance(config, PpoConfig):
        assert f"in {config.steps}" in describe(config, world, num_prompts=7)
    return True


# --- every number, by itself


@pytest.mark.parametrize("kind", KINDS)
def test_no_number_may_be_absurd(model, kind):
    """Of each numeric field: nan, infinities, far too much and far too little are refused."""
    start = STARTS[kind](model)
    for name, hint in LEAVES[kind].items():
        if not {int, float} & set(options_of(hint)):
            continue
        is_float = float in options_of(hint)
        absurd = [-(2**50), 2**70] + [float("nan"), float("inf"), -1e300, 1e300] * is_float
        for value in absurd:
            with pytest.raises(ConfigError) as error:
                run_check(override(start, name, value), 1)
            assert name.split(".")[-1] in str(error.value), (name, value, str(error.value))


def test_bounds_are_of_fields_that_exist():
    known = {f"{base.__name__}.{field.name}" for kind in KINDS for group in groups_of(kind)
             for base in group.__mro__ if dataclasses.is_dataclass(base)
             for field in dataclasses.fields(base)}  # fmt: skip
    assert set(BOUNDS) <= known


def groups_of(kind: type) -> set[type]:
    hints = typing.get_type_hints(kind).values()
    parts = [part for hint in hints for part in (hint, *typing.get_args(hint))]  # of a mapping, too
    inner = {o for part in parts for o in options_of(part) if dataclasses.is_dataclass(o)}
    return {kind}.union(*(groups_of(group) for group in inner)) if inner else {kind}


# --- values of fields


@fuzz(250)
@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_any_value_of_any_field(model, data, kind):
    config = STARTS[kind](model)
    name = data.draw(st.sampled_from(sorted(LEAVES[kind])))
    value = data.draw(JUNK)
    try:
        config = override(config, name, value)
    except ConfigError as error:
        assert f"--{name}" in str(error)
        return
    plan(config, 1)
    as_source(config)


@fuzz(250)
@given(data=st.data(), kind=st.sampled_from(KINDS), world=st.integers(1, 9))
def test_typed_values_of_several_fields(model, data, kind, world):
    config = STARTS[kind](model)
    names = data.draw(st.lists(st.sampled_from(sorted(LEAVES[kind])), min_size=1, max_size=4))
    for name in names:
        try:
            config = override(config, name, data.draw(typed(LEAVES[kind][name])))
        except ConfigError as error:
            assert f"--{name}" in str(error)
    plan(config, world)


@fuzz(100)
@given(
    st.text(max_size=12) | st.lists(st.sampled_from(["actor", "data", "optim", "lr", "", "reward",
    "placement", "critic", "reject", "algo", "correction", "steps", "x"]), max_size=4)
    .map(".".join), JUNK,
)  # fmt: skip
def test_any_key(model, key, value):
    try:
        plan(override(ppo_config(model), key, value), 1)
    except ConfigError as error:
        assert str(error)


# --- config files

LINES = st.sampled_from([
    "import sys", "sys.exit(3)", "raise SystemExit", "raise KeyError('x')", "1 / 0", "assert 0",
    "config = PpoConfig", "config = PpoConfig()", "config = None", "config = [1]", "def f(:",
    "from spmdrl.config import *", "config = PpoConfig('m', DataConfig('t'), 'gsm8k')",
    "config = PpoConfig('m', DataConfig, 'gsm8k')", "config = PpoConfig(1, 2, 3)",
    "config = PpoConfig('m', DataConfig('t'), 'gsm8k', actor=TrainConfig)",
    "config = PpoConfig('m', DataConfig('t'), 'gsm8k', actor=OptimConfig())",
    "config = PpoConfig('m', DataConfig('t'), 'gsm8k', steps=float('nan'), algo={})",
    "config = SftConfig('m', SftDataConfig('t'), 'o')", "  indented", "f = lambda: f()", "f()",
    "config = " + "[" * 300 + "]" * 300, "exec('x' * 10**6)", "import spmdrl.nothing",
    "from .here import x", "\0", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
    "class E(Exception):\n    def __str__(self): return ''", "raise E",
])  # fmt: skip


@fuzz(120)
@given(lines=st.lists(LINES, max_size=4), raw=st.none() | st.binary(max_size=30))
def test_any_config_file(tmp_path_factory, lines, raw):
    path = tmp_path_factory.getbasetemp() / "fuzzed_config.py"
    path.write_bytes(raw if raw is not None else "\n".join(lines).encode())
    for kind in KINDS:
        try:
            config = load_config(str(path), kind, {})
        except ConfigError as error:
            assert str(path) in str(error)
        else:
            assert isinstance(config, kind)


# --- the command line


class Stopped(Exception):
    pass


FLAGS = st.sampled_from([
    "--steps", "3", "--steps=x", "--actor.optim.lr", "1e-6", "nan", "--no-shuffle", "--nodry_run",
    "--dry-run", "--dry-run=5", "--ranks", "-2", "--ranks=abc", "--ranks=2", "--placement",
    "--gpu_gib=80", "--gpu_gib=nan", "--gpu_gib",
    '{"actor": "0"}', '{"actor": 7, "x": [1]}', "{1:", "--reward", "[gsm8k]", "--data.eval",
    "--data.train=a,b", "--actor", "--actor.lora.rank", "8", "--rollout.stop", "['x', 3]", "--",
    "--rewards.workers=-1", "--rollout.stop_token_ids=[-3]", "-x", "--=", "--.=3", "--a..b=1",
    "--run_dir=", "--seed=1e400", "--seed",
    "--algo.advantage_args={'a': true}", "\u2028", "--\xe9=1",
])  # fmt: skip


@fuzz(120)
@given(argv=st.lists(FLAGS, max_size=5))
def test_any_command_line(model, tmp_path_factory, argv):
    path = tmp_path_factory.getbasetemp() / "command_config.py"
    path.write_text(f"from spmdrl.config import *\nconfig = {as_source(ppo_config(model))}\n")
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spmdrl.distributed.start.exit_config", stop)
        patch.setattr("spmdrl.training.runtime.started", lambda config: Started())
        patch.setattr("spmdrl.training.rl.train", lambda config, runtime: seen.append(config))
        patch.setattr(
            "spmdrl.training.dry_run.show_plan", lambda config, *others: seen.append(config)
        )
        try:
            fire.Fire(ppo.main, command=["--config", str(path), *argv])
        except Stopped as stopped:
            assert len(str(stopped)) > 10
        except SystemExit as left:  # fire's own usage message
            assert left.code == 2 or {"--", "-x"} & set(argv) or "-h" in argv
    assert len(seen) <= 1


class Started:
    """In place of a process group: check()'s ConfigError ends the program with its message."""

    topology = types.SimpleNamespace(world=2)

    def __enter__(self) -> Started:
        return types.SimpleNamespace(topology=self.topology)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, ConfigError):
            stop(error)


def stop(error: Exception) -> None:
    raise Stopped(str(error))


# --- data

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
    | st.sampled_from(["user", "\ud800", "\0", "<eos>", "<|x|>", "a" * 5000, ""]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["role", "content", "ground_truth", "", "é"]), inner,
                      max_size=3),
    max_leaves=6,
)  # fmt: skip
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "a\nb", "<eos>"]), "content": VALUES}
)
GOOD_ROW = {
    "data_source": "d", "prompt": [{"role": "user", "content": "2+3?"}], "ground_truth": "5",
    "response": "5", "extra_info": {"a": 1},
    "chosen": [{"role": "assistant", "content": "5"}],
    "rejected": [{"role": "assistant", "content": "6"}], "margin": 1.0,
}  # fmt: skip
ROWS = st.builds(
    lambda changes: {name: value for name, value in (GOOD_ROW | changes).items()
                     if name != "response" or "messages" not in changes},
    st.dictionaries(
        st.sampled_from([*GOOD_ROW, "messages", "reward_model"]),
        VALUES | st.lists(TURN, max_size=3), max_size=3,
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(model):
    return AutoTokenizer.from_pretrained(model)


def load_all(path: Path, tokenizer: Any, topology: Topology, on_bad_row: str) -> int:
    """Loads the file as prompts, twice as rows for fine-tuning and as preferences; the number of
    usable ones."""
    config = DataConfig(str(path), max_prompt_tokens=20, on_bad_row=on_bad_row)
    sft = SftDataConfig(str(path), max_tokens=20, on_bad_row=on_bad_row)
    count = 0
    whole = dataclasses.replace(sft, turns="all")
    for load, settings_ in (
        (PromptDataset.load, config), (SftDataset.load, sft), (SftDataset.load, whole)
    ):  # fmt: skip
        try:
            data = load(str(path), tokenizer, settings_, topology, len(tokenizer))
        except ConfigError as error:
            assert str(path) in str(error)
            continue
        for i in range(len(data)):
            found = (data.prompt(i) if settings_ is config else data.example(i)).token_ids
            assert 1 <= len(found) <= 20
            assert settings_ is config or 1 in data.example(i).loss_mask[1:]
        count += len(data)
    preferences = PreferenceDataConfig(str(path), max_tokens=20, on_bad_row=on_bad_row)
    try:
        pairs = PreferenceDataset.load(str(path), tokenizer, preferences, topology, len(tokenizer))
    except ConfigError as error:
        assert str(path) in str(error)
        return count
    for i in range(len(pairs)):
        assert 1 <= len(pairs.pair(i).chosen.ids) <= 20 and pairs.pair(i).margin >= 0
    return count + len(pairs)


@fuzz(120)
@given(rows=st.lists(ROWS, max_size=4), skip=st.booleans())
def test_any_rows_in_jsonl(tokenizer, topology, tmp_path_factory, rows, skip):
    path = tmp_path_factory.getbasetemp() / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    load_all(path, tokenizer, topology, "skip" if skip else "error")


@fuzz(120)
@given(rows=st.lists(ROWS, min_size=1, max_size=4), skip=st.booleans())
def test_any_rows_in_parquet(tokenizer, topology, tmp_path_factory, rows, skip):
    path = tmp_path_factory.getbasetemp() / "rows.parquet"
    if not (writes_parquet(rows, path) or writes_parquet(rows[:1], path)):
        assume(False)  # nothing that Parquet can hold
    load_all(path, tokenizer, topology, "skip" if skip else "error")


def writes_parquet(rows: list[dict[str, Any]], path: Path) -> bool:
    """Whether Parquet can hold the rows, which are then in the file."""
    try:
        pq.write_table(pa.Table.from_pylist(rows), path)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError, TypeError):
        return False
    return True


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_any_damage(tokenizer, topology, tmp_path_factory, kind):
    path = tmp_path_factory.getbasetemp() / f"damaged.{kind}"
    rows = [GOOD_ROW | {"ground_truth": str(i)} for i in range(9)]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, compression="none", row_group_size=3)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = path.read_bytes()
    assert load_all(path, tokenizer, topology, "error") == 36

    @fuzz(150)
    @given(
        changes=st.lists(st.tuples(st.integers(0, len(whole) - 1), st.binary(max_size=4)),
                         max_size=4),
        end=st.none() | st.integers(0, len(whole)), skip=st.booleans(),
    )  # fmt: skip
    def damage(changes, end, skip):
        damaged = bytearray(whole)
        for place, new in changes:
            damaged[place : place + len(new)] = new
        path.write_bytes(bytes(damaged[:end]))
        load_all(path, tokenizer, topology, "skip" if skip else "error")

    damage()
