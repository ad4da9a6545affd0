"""The names that a user types are the same in config, code and docs; a wrong one is answered."""

import ast
import re
import typing
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from golden_batches import batch_of, random_trajectories

from spmdrl import config as names
from spmdrl.algo import advantages, correction, kl, losses, selection
from spmdrl.algo.objectives import policy_objective
from spmdrl.algo.options import options_of
from spmdrl.cli.arguments import checked, override
from spmdrl.config import AlgoConfig, ConfigError, CorrectionConfig, DataConfig, PpoConfig
from spmdrl.segments import segment_sum
from spmdrl.training.checks.algorithms import check_algo

ROOT = Path(__file__).parents[2]
NAMES = ["algorithms", "correction", "recipes", "custom_functions", "algorithm_checks", "migration"]
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in NAMES}
DOC = "\n".join(PAGES.values())
BLOCKS = re.findall(r"^```python\n(.*?)^```", DOC, re.DOTALL | re.MULTILINE)
CODE = "\n".join([*BLOCKS, *re.findall(r"`([^`\n]+)`", DOC)])
PREFIXES = (
    "actor", "critic", "prm", "advantage", "correction", "dynamic_sampling", "filter", "reward",
    "rollout", "eval", "response",
)  # fmt: skip
OF_A_LOSS = ("actor/", "critic/", "prm/", "eval/")  # the step puts these before the bare name
CONFIG = PpoConfig(model="m", data=DataConfig(train="t.parquet"), reward="math")


def typed(literal):
    return [name for name in typing.get_args(literal) if isinstance(name, str)]


def level_names():
    literal = typing.get_type_hints(CorrectionConfig)["level"]
    return [name for name in typed(literal) if name != "off"]


# what the config allows, and what the code knows
PAIRS = {
    "advantage": (list(advantages.ESTIMATORS), advantages.ESTIMATORS),
    "policy_loss": (list(losses.POLICY_LOSSES), losses.POLICY_LOSSES),
    "aggregation": (typed(names.Aggregation), losses.AGGREGATIONS),
    "kl_estimator": (typed(names.KlEstimator), kl.ESTIMATORS),
    "sample_filter": (typed(names.SampleFilter), selection.FILTERS),
    "correction.level": (level_names(), correction.LEVELS),
}


@pytest.mark.parametrize("option", PAIRS)
def test_the_config_allows_what_the_code_knows(option):
    allowed, known = PAIRS[option]
    assert len(allowed) == len(set(allowed)) > 0
    assert set(allowed) == set(known)


# where each name of an option has a row: a page, or a section of docs/algorithms.md by its title
SECTIONS = {
    "advantage": "Advantage estimators", "policy_loss": "Policy losses",
    "aggregation": "Aggregation", "kl_estimator": "KL to a reference model",
    "correction.level": "correction", "correction.reject": "correction",
    "sample_filter": "recipes",
}  # fmt: skip


def section_of(title: str) -> str:
    """Returns the text of a page, or of a section of docs/algorithms.md."""
    if title in PAGES:
        return PAGES[title]
    return PAGES["algorithms"].split(f"\n## {title}")[1].split("\n## ")[0]


@pytest.mark.parametrize("option", SECTIONS)
def test_every_name_has_a_row(option):
    rows = set()
    for line in section_of(SECTIONS[option]).splitlines():
        if line.startswith("| `"):
            rows |= set(re.findall(r"`([^`]+)`", line.split(" | ")[0]))
    wanted = set(correction.TESTS) if option == "correction.reject" else set(PAIRS[option][0])
    assert wanted <= rows, f"no row in {SECTIONS[option]}: {sorted(wanted - rows)}"


def test_every_option_is_in_the_doc():
    words = set(re.findall(r"\w+", CODE))
    wanted = {f.name for kind in (AlgoConfig, CorrectionConfig) for f in fields(kind)}
    assert wanted <= words, f"not in {[*PAGES]}: {sorted(wanted - words)}"


def test_keywords_of_the_doc_are_options():
    """What stands as name=value between backquotes is a field of a config."""
    ours = "\n".join(PAGES[name] for name in ("algorithms", "correction", "recipes"))
    given = set(re.findall(r"\b(\w+)=", "\n".join(re.findall(r"`([^`\n]+)`", ours))))
    kinds = (AlgoConfig, CorrectionConfig, PpoConfig, names.RolloutConfig)
    known = {f.name for kind in kinds for f in fields(kind)}
    assert given and given <= known, f"no such option: {sorted(given - known)}"


TABLES = {
    "loss_args": (
        "Policy losses",
        {name: loss.function for name, loss in losses.POLICY_LOSSES.items()},
    ),
    "advantage_args": (
        "Advantage estimators",
        {n: e.function for n, e in advantages.ESTIMATORS.items()},
    ),
}


@pytest.mark.parametrize("group", TABLES)
def test_the_doc_sets_options_that_the_row_has_and_names_them_all(group):
    title, functions = TABLES[group]
    section = section_of(title)
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    for row in rows:
        names_of_row = re.findall(r"`([^`]+)`", row.split(" | ")[0])
        for given in re.findall(group + r"=(\{[^`]*\})`", row):
            for name in names_of_row:
                assert ast.literal_eval(given).keys() <= options_of(functions[name]).keys(), row
    words = set(re.findall(r"\w+", section))
    known = {option for function in functions.values() for option in options_of(function)}
    assert known <= words, f"not in section {title}: {sorted(known - words)}"


def package_strings():
    """Every string in the package's source that is exactly a metric's name, or a part of one."""
    found = set()
    for path in (ROOT / "spmdrl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return {text for text in found if re.fullmatch(r"[a-z0-9_/]+", text)}


def test_metrics_of_the_doc_exist():
    metrics = re.findall(rf"`((?:{'|'.join(PREFIXES)})/[a-z0-9_/]+)`", DOC)
    known = package_strings()
    assert len(set(metrics)) > 30
    missing = [
        metric
        for metric in sorted(set(metrics))
        if metric not in known
        and not (metric.startswith(OF_A_LOSS) and metric.split("/", 1)[1] in known)
    ]
    assert not missing, f"the pages name metrics that nothing writes: {missing}"


@pytest.mark.parametrize("option", PAIRS)
def test_an_unknown_name_is_answered_with_the_known_ones(option):
    with pytest.raises(ConfigError) as error:
        check_algo(override(CONFIG, f"algo.{option}", "no_such_name"))
    assert "no_such_name" in str(error.value)
    assert all(repr(name) in str(error.value) for name in PAIRS[option][0]), str(error.value)


LITERALS = ("aggregation", "kl_estimator", "sample_filter")


@pytest.mark.parametrize("option", LITERALS)
def test_an_unknown_name_in_a_file_is_answered_too(option):
    wrong = replace(CONFIG, algo=AlgoConfig(**{option: "no_such_name"}))
    with pytest.raises(ConfigError) as error:
        checked(wrong, "cfg.py")
    assert f"cfg.py: AlgoConfig.{option}" in str(error.value)
    assert all(repr(name) in str(error.value) for name in PAIRS[option][0]), str(error.value)


def test_an_unknown_rejection_test_is_answered_with_the_known_ones():
    wrong = override(CONFIG, "algo.correction.reject", {"token_k4": 1.0})
    with pytest.raises(ConfigError) as error:
        check_algo(wrong)
    assert all(repr(name) in str(error.value) for name in ["token_k4", *correction.TESTS])


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_examples_of_the_doc_are_sound_configs(block):
    space = {name: getattr(names, name) for name in dir(names) if name.endswith("Config")}
    exec(block, space)
    roles = {name: space[name] for name in ("critic", "ref", "prm") if name in space}
    check_algo(checked(replace(CONFIG, algo=space["algo"], **roles), "docs"))
    if "def " in block:
        run_example(space["algo"])


def run_example(algo):
    """Your own function of any kind: the shapes it has to give, finite, and 0 where masked."""
    batch = batch_of(random_trajectories(0))
    n, every_seq = batch.num_seqs, torch.arange(batch.num_seqs)
    lengths = segment_sum(batch.loss_mask, batch.seq_lens).double()
    outcomes = advantages.Outcomes(
        groups=batch.groups, scores=batch.rewards.double(), valid=batch.valid.double(),
        lengths=lengths, greedy_rewards=torch.zeros(n).double(),
        reward_components=torch.zeros(n, 0).double(), process=torch.zeros(n).double(),
    )  # fmt: skip
    rewards = advantages.token_rewards(
        batch.rewards, batch.loss_mask, batch.seq_lens, torch.zeros_like(batch.loss_mask)
    )
    tokens = advantages.Tokens(rewards, batch.loss_mask, batch.seq_lens, outcomes, every_seq)
    estimate = advantages.advantage_of(algo)
    if advantages.estimator_of(algo).sees == "outcomes":
        per_sample = estimate(outcomes)
        assert per_sample.shape == (n,) and per_sample.dtype == torch.float64
        batch.advantages = tokens.own(per_sample) * batch.loss_mask
    else:
        batch.advantages = estimate(tokens)
    assert batch.advantages.shape == (batch.num_tokens,)
    assert batch.advantages.dtype == torch.float32
    assert batch.advantages.any() and not batch.advantages[batch.loss_mask == 0].any()

    counts = losses.loss_counts(batch.loss_mask, batch.seq_lens)
    batch.loss_weights = losses.aggregate_of(algo)(batch.loss_mask, batch.seq_lens, counts, 16)
    assert batch.loss_weights.shape == (batch.num_tokens,)
    assert not batch.loss_weights[batch.loss_mask == 0].any()

    assert batch.old_logprobs is not None
    batch.ref_logprobs = batch.rollout_logprobs
    logprobs = (batch.old_logprobs * 1.01).requires_grad_()
    loss, sums = policy_objective(algo)(logprobs, torch.zeros_like(logprobs), batch)
    loss.backward()
    assert loss.shape == () and all(torch.isfinite(x) for x in (loss, *sums.values()))
    assert logprobs.grad is not None and torch.isfinite(logprobs.grad).all()
    assert logprobs.grad.any() and not logprobs.grad[batch.loss_mask == 0].any()
