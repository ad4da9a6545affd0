"""The pages of the documentation that list things list all of them, and nothing else.

Metrics are found in the source: what is written under a name with a slash, and what losses and
engines return. In names `<>` stands for what only a run knows.
"""

import ast
import dataclasses
import importlib
import re
import sys
import textwrap
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from metric_pages import DOCS, PAGES, metric_rows, without_a_row

from spmdrl.algo.advantages import ESTIMATORS
from spmdrl.algo.losses import POLICY_LOSSES
from spmdrl.config import (
    PAIR_LOSSES,
    PpoConfig,
    PreferenceTrainingConfig,
    RewardTrainingConfig,
    SftConfig,
)
from spmdrl.distributed.progress import WORDS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "spmdrl"
NAME = re.compile(r"[a-z0-9_<>]+(/[a-z0-9_<>@]+)+")
# where metrics are written; elsewhere names with a slash are paths, keys of stores and the like
ROOMS = (
    "algo", "training", "checkpoint/writer.py", "evaluate.py", "data/prompt_sampler.py",
    "data/prompt_stats.py",
)  # fmt: skip
NO_METRICS = {"samples/train", "samples/eval", "hf/<>"}  # what trackers show; files


# ---- names in the source


def pattern_of(node: ast.expr) -> str | None:
    """The text of a string, with <> for what an f-string fills in; None for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [
            pattern_of(part) if isinstance(part, ast.Constant) else "<>" for part in node.values
        ]
        return "".join(filter(None, parts))
    return None


def written(tree: ast.AST) -> Iterator[str]:
    """The keys that code writes: of dict literals and comprehensions, of d[key] = value, and the
    first arguments of add(key, value)."""
    for node in ast.walk(tree):
        keys: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            keys = list(node.keys)
        elif isinstance(node, ast.DictComp):
            keys = [node.key]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys = [node.slice]
        elif isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Store):
            keys = [part.slice for part in node.elts if isinstance(part, ast.Subscript)]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "add":
            keys = list(node.args[:1])
        for key in keys:
            branches = [key.body, key.orelse] if isinstance(key, ast.IfExp) else [key]
            yield from filter(None, (pattern_of(one) for one in branches if one is not None))


def keys_of(module: str, *names: str) -> set[str]:
    """The keys that functions of a module write, those of calls in them left out.

    names: of functions, or Class.method; none: all functions of the module.
    """
    functions = functions_of(ast.parse((PACKAGE / module).read_text()))
    chosen = [functions[name] for name in names] or list(functions.values())
    return {key for function in chosen for key in written(function)}


def functions_of(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}": method for method in methods}
    return found


def files() -> Iterator[Path]:
    for room in ROOMS:
        path = PACKAGE / room
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def names_with_a_slash() -> set[str]:
    trees = [ast.parse(path.read_text()) for path in files()]
    found = {name for tree in trees for name in written(tree) if NAME.fullmatch(name)}
    return found - NO_METRICS


def by_role() -> dict[str, set[str]]:
    """What stands for <> in <role>/<>: all metrics of a model by the role's name."""
    update = keys_of("engines/fsdp/engine.py", "FsdpEngine.update") - {"loss_sum", "<>"}
    every = update | keys_of("training/roles.py", "train")
    every |= keys_of("engines/fsdp/router_aux_loss.py", "RouterAuxLoss.metrics")
    megatron = keys_of("engines/megatron/engine.py", "MegatronEngine.update") - {"loss_sum", "<>"}
    mtp = (megatron | {"mtp_grad_norm"}) - every
    objectives, pair = "algo/objectives.py", keys_of("algo/preference.py", "pair_terms")
    parts = ("policy_objective", "rollout_difference", "tokens_above_cut", "near_policy")
    around = keys_of(objectives, *parts)
    taught = keys_of("algo/distillation.py", "distillation_metrics")
    around |= taught | keys_of("algo/demonstrations.py", "demonstration_sums")
    by_source = keys_of("engines/fsdp/source_adapters.py", "clip_each")
    around |= by_source
    of_sft = by_source | keys_of("sft.py", "cross_entropy", "beside_teacher")
    answers = answer_terms()
    return {
        "actor": every | mtp | around | keys_of("algo/losses.py") | {"<>"} | pair_answer_terms(),
        "critic": every | keys_of(objectives, "value_objective"),
        "prm": every | keys_of(objectives, "prm_objective"),
        "sft": every | mtp | taught | of_sft,
        "preference": every | answers | {"entropy", "<>"},
        "reward_model": every | pair,
        "eval": keys_of("sft.py", "negative_logprobs", "with_perplexity")
        | taught
        | pair
        | answers
        | of_evaluation(),
    }


def answer_terms() -> set[str]:
    """What preference losses say of answers."""
    return pair_answer_terms() | keys_of("algo/preference_terms.py", "labelled_terms") - {"rewards"}


def pair_answer_terms() -> set[str]:
    """What those of them say that are of pairs."""
    terms = keys_of("algo/preference_terms.py", "terms_of_pairs")
    return (terms | keys_of("algo/preference_losses.py")) - {"rewards"}


def of_evaluation() -> set[str]:
    """What collect.evaluate picks of a step's metrics, and what several answers say."""
    of_samples = keys_of("training/logs/metrics.py", "sample_metrics", "count_replies")
    picked = {name for name in of_samples if name.startswith(("reward/", "turns/", "tools/"))}
    of_steps = {
        f"reward/{name}" for name in ("mean", "std", "overlong_penalty", "turns", "outcome")
    }
    several = keys_of("algo/pass_at_k.py", "mean_over", "numbers_of") | {"pass@<>"}
    return {"reward", "response/mean_tokens", *(picked - of_steps), *several}


def metrics_of_the_code() -> set[str]:
    """All of them; <role>/<> is replaced by the names of the role's model."""
    roles = by_role()
    kinds: dict[str, set[str]] = {
        "<>/<>": set(),  # of supervised learning, and of data sources: below
        "<>/skipped_updates": set(),
        **{name: set() for name in answer_terms()},  # of the role preference, and of evaluations
        **{
            f"<>/{name}": {"<>"}  # by data source
            for name in (
                "reward/mean",
                "reward/<>",
                "turns/mean",
                "response/mean_tokens",
                "success_rate",
                "share",
            )
        },
        **{f"{kind}/<>": {"<>_s"} for kind in ("time", "time_min", "time_mean", "time_max")},
        "memory/<>": keys_of("training/logs/metrics.py", "memory_of_process"),
        "moved/<>_mib": keys_of("training/rl.py", "report_of"),
        **{f"{role}/<>": names for role, names in roles.items()},
    }
    found = set()
    for name in names_with_a_slash():
        assert name in kinds or "<>" not in name.split("/")[0], f"{name}: say in kinds what it is"
        if name in kinds:
            found |= {name.replace("<>", one) for one in kinds[name]}
        else:
            found.add(name)
    for program in ("sft", "preference", "reward_model"):
        found |= {f"{program}/{name}" for name in roles[program]}
    return found


# ---- what the pages have


def documented() -> list[str]:
    return [re.sub(r"<\w+>", "<>", row[0]) for row in metric_rows()]


def test_every_metric_has_one_row_and_every_row_a_metric() -> None:
    names = documented()
    assert sorted(names) == sorted(set(names))
    known = metrics_of_the_code()
    assert sorted(known - set(names)) == [], "metrics without a row"
    assert sorted(set(names) - known) == [], "rows without a metric"


def test_a_row_says_what_its_metric_is() -> None:
    for name, _, meaning, there, _ in metric_rows():
        assert meaning and there, name


def test_every_phase_has_its_line() -> None:
    text = PAGES[1].read_text()
    names = {*WORDS, *phases_in_calls()}
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


def phases_in_calls() -> Iterator[str]:
    """The names of phases that are first arguments of phases(), barrier(), alone() and named()."""
    texts = [path.read_text() for path in PACKAGE.rglob("*.py")]
    names = ("phases", "barrier", "alone", "named")
    some = [text for text in texts if any(f"{name}(" in text for name in names)]
    for text in some:  # to parse all would take a second
        for node in ast.walk(ast.parse(text)):
            called = getattr(node, "func", None)
            name = getattr(called, "attr", getattr(called, "id", ""))
            if name in names and node.args:
                yield from strings(node.args[0])


def strings(node: ast.expr) -> Iterable[str]:
    branches = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]
    return [b.value for b in branches if isinstance(b, ast.Constant) and isinstance(b.value, str)]


# ---- what can be imported


@pytest.fixture(scope="module")
def reference() -> Iterator[Any]:
    sys.path.insert(0, str(DOCS))
    yield importlib.import_module("api_reference")
    sys.path.remove(str(DOCS))


def imports_in(text: str) -> set[str]:
    """The names that Python code imports from the package, those of spmdrl.config left out."""
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)]
    ours = [n for n in nodes if (n.module or "").startswith("spmdrl.")]
    return {a.name for n in ours if n.module != "spmdrl.config" for a in n.names}


def test_what_pages_and_configs_import_is_in_the_reference(reference: Any) -> None:
    blocks = [
        textwrap.dedent(block)
        for page in sorted(DOCS.glob("*.md"))
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    files = [path.read_text() for path in (ROOT / "configs").glob("*.py")]
    imported = set().union(*map(imports_in, [*blocks, *files]))
    known = {n for part in reference.API for names in part.names.values() for n in names.split()}
    assert len(imported) > 8
    assert sorted(imported - known) == []


def test_the_reference_says_what_each_name_and_method_is(reference: Any) -> None:
    for section in reference.API:
        for module, names in section.names.items():
            for name in names.split():
                assert len(reference.entry(module, name)) > 6, f"{module}.{name} has no docstring"
    text = reference.api_page()
    for part in (
        "finish_reason: str",
        "load_weights(weights: Iterable",
        "sum of that distribution",
    ):
        assert part in text
    assert "--checkpoint`: a folder" in reference.programs_page()


# ---- fields and metrics that pages name

CONFIGS = (PpoConfig, SftConfig, PreferenceTrainingConfig, RewardTrainingConfig)
OPTIONS = (
    "algo.loss_args.",
    "algo.advantage_args.",
    "preference.loss_args.",
)  # whose keys are of a loss or an estimator
OTHERS = {"migration"}  # its names are of other trainers, too
# of verl; a column of verl's data; what MLflow calls a metric
NO_FIELDS = {"actor.use_prefix_grouper", "reward_model.ground_truth"}
NO_METRIC = {"eval/best_at_4"}
KINDS = {name.split("/")[0] for name in documented()}  # what metrics begin with


def fields_of(kind: type, prefix: str = "") -> Iterator[str]:
    """The dotted names of all fields of a config, and of the configs in it."""
    for name, hint in typing.get_type_hints(kind).items():
        yield prefix + name
        for part in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(part) and isinstance(part, type):
                yield from fields_of(part, f"{prefix}{name}.")


def code_in(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", page.read_text())


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda path: path.stem)
def test_a_field_or_a_metric_that_a_page_names_exists(page: Path) -> None:
    fields = {name for config in CONFIGS for name in fields_of(config)}
    sections = {name.split(".")[0] for name in fields if "." in name}
    named = [re.match(r"(?:--)?((\w+)\.[a-z][\w.]*\w)(?=$|[ =])", code) for code in code_in(page)]
    dotted = {found[1] for found in named if found and found[2] in sections}
    files = {name for name in dotted if name.endswith((".md", ".py", ".json"))}
    unknown = {n for n in dotted - files - fields - NO_FIELDS if not n.startswith(OPTIONS)}
    assert page.stem in OTHERS or sorted(unknown) == []
    metrics = {code for code in code_in(page) if re.fullmatch(r"[a-z]+/[a-z][a-z0-9_@]+", code)}
    of_metrics = {name for name in metrics if name.split("/")[0] in KINDS}
    assert without_a_row(of_metrics - NO_METRIC) == set()


COUNTED = {
    "estimators": len(ESTIMATORS), "policy losses": len({*POLICY_LOSSES.values()}),
    "of pairs": len(PAIR_LOSSES),
}  # fmt: skip


def test_pages_count_the_algorithms_that_there_are() -> None:
    """A loss under two names, `vanilla` for `ppo` and `gpg` for `reinforce`, counts once."""
    named = re.compile(r"\b(\d+) (?:advantage )?(estimators|policy losses|of pairs)\b")
    found = {
        (page.name, what, int(number))
        for page in (ROOT / "README.md", *DOCS.glob("*.md"), ROOT / "CHANGELOG.md")
        for number, what in named.findall(" ".join(page.read_text().split()))
    }
    assert len(found) >= 5
    assert [each for each in found if COUNTED[each[1]] != each[2]] == []


def test_every_config_is_a_recipe() -> None:
    text = (DOCS / "recipes.md").read_text()
    configs = [path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").glob("*.py")]
    assert [name for name in sorted(configs) if f"| `{name}` |" not in text] == []
