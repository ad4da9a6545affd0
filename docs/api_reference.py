"""The reference of what a user may import, and of the programs, for the documentation's site.

Signatures, docstrings and comments are read from the source, so that nothing of the package has to
be imported: torch, vLLM and Megatron are not needed.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from spmdrl.cli.help import comments_in

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 92  # columns of a signature
PROGRAMS = (
    "launch", "ppo", "sft", "preference", "reward_model", "evaluate", "export", "translate",
    "timeline", "replay", "view/__main__",
)  # fmt: skip


class Section(NamedTuple):
    """One part of the page: what it is for, and the names that are imported, by module."""

    title: str
    text: str
    names: dict[str, str]


API = (
    Section(
        "Config files",
        "A config file defines `config`, one of these values. Their fields have pages of their "
        "own: [PpoConfig](ppo.md), [SftConfig](sft.md), "
        "[PreferenceTrainingConfig](preference.md), [RewardTrainingConfig](reward_model.md).",
        {
            "spmdrl.config": "PpoConfig SftConfig PreferenceTrainingConfig RewardTrainingConfig "
            "ConfigError"
        },
    ),
    Section(
        "A sampler of your own",
        "What `data.sampler.function` is given. [mixtures.md](../mixtures.md) has an example.",
        {"spmdrl.data.prompt_stats": "PromptStats PromptRows"},
    ),
    Section(
        "Prompts, samples, batches",
        "What functions of yours are given, and what `samples` of an attached run are.",
        {
            "spmdrl.types": "Prompt Sample Picture Batch PolicyStats",
            "spmdrl.data.visuals": "Video",
            "spmdrl.segments": "segment_sum segment_expand",
        },
    ),
    Section(
        "Losses and estimators of your own",
        "A function in `algo.policy_loss`, `algo.advantage`, `algo.aggregation`, "
        "`algo.kl_estimator` or `preference.loss`. [custom_functions.md](../custom_functions.md) "
        "and [preference.md](../preference.md) have examples.",
        {
            "spmdrl.algo.losses": "PolicyLoss advantages_of ratio_of sequence_mean trained_mask",
            "spmdrl.algo.advantages": "Estimator Outcomes Tokens centred group_sum reinforce",
            "spmdrl.algo.preference_losses": "PreferenceLoss Pairs LabelledAnswers",
            "spmdrl.algo.options": "Positive NotNegative AboveOne BelowOne BelowHalf UnitInterval "
            "Fraction",
        },
    ),
    Section(
        "For reward functions and tools",
        "A judge in words asks a server with the messages of a sample; a tool with a state makes "
        "it anew from them; programs run in a remote sandbox. See [vision.md](../vision.md), "
        "[multi_turn.md](../multi_turn.md), [remote_sandboxes.md](../remote_sandboxes.md).",
        {
            "spmdrl.rewards.openai_chat": "openai_messages",
            "spmdrl.rewards.sandbox.remote": "run_tests_in",
            "spmdrl.rewards.workers.stateful_tools": "rebuild",
        },
    ),
    Section(
        "Environments of others",
        "Tools, environments, reward functions and rows: [environments.md](../environments.md).",
        {
            "spmdrl.environments.mcp": "mcp_tools",
            "spmdrl.environments.gymnasium": "GymnasiumEpisode episode_rows",
            "spmdrl.environments.openenv": "OpenEnvEpisode openenv_rows",
            "spmdrl.environments.verifiers": "verifiers_agent verifiers_rows",
            "spmdrl.environments.harbor": "Terminal task_rows task_reward",
            "spmdrl.environments.episodes": "turn_rewards episode_reward write_rows",
        },
    ),
    Section(
        "Trackers of your own",
        "An object in `trackers`; see [trackers.md](../trackers.md).",
        {"spmdrl.config": "Tracker"},
    ),
    Section(
        "In your own program",
        "See [embedding.md](../embedding.md) and [embedding_fsdp2.md](../embedding_fsdp2.md). "
        "`spmdrl.embed` has all of these.",
        {
            "spmdrl.embed": "attach Attachment",
            "spmdrl.training.step_schedule": "interleave Schedule",
            "spmdrl.engines.megatron.external_weights": "load_hf_weights save_hf_weights",
        },
    ),
    Section(
        "Checkpoints",
        "What `python -m spmdrl.export` calls. All of it runs on CPUs.",
        {
            "spmdrl.engines.hf_export": "export export_adapter load_full Writers",
            "spmdrl.hub.vision_classifiers": "register_classifier",
        },
    ),
    Section(
        "Rollout engines",
        "The protocol that an engine has; [CONTRIBUTING.md](../CONTRIBUTING.md) says where a new "
        "one is registered.",
        {
            "spmdrl.rollout.base": "RolloutEngine Request Completion SamplingParams WeightMismatch",
            "spmdrl.rollout.spec": "EngineSpec EngineBuilder",
        },
    ),
    Section(
        "Training engines",
        "The protocol that `fsdp` and `megatron` have, and the seam between losses and engines. A "
        "family of engine megatron is one declaration: [extending.md](../extending.md).",
        {
            "spmdrl.engines.base": "LossFn TrainEngine",
            "spmdrl.engines.megatron.family_parts": "Family",
        },
    ),
)
INTRODUCTION = """# What can be imported

Most runs import `spmdrl.config` and nothing else. Functions that spmdrl calls need no import: a
reward function, a tool and an environment are plain functions whose parameters are found by name
([rewards.md](../rewards.md), [multi_turn.md](../multi_turn.md)). Modules that are not on this page
are the inside of the programs; [CONTRIBUTING.md](../CONTRIBUTING.md) says how they are read.
"""


# ---- pages


def api_page() -> str:
    """Returns the page of everything in API."""
    lines = [INTRODUCTION]
    for section in API:
        lines += [f"## {section.title}", "", section.text, ""]
        for module, names in section.names.items():
            for name in names.split():
                lines += [*entry(module, name), ""]
    return "\n".join(lines)


def programs_page() -> str:
    """Returns the page of the programs' usage and flags, as `--help` prints them."""
    lines = ["# Programs", "", "Each is started by `python -m`; `--help` prints the same.", ""]
    for program in PROGRAMS:
        path = ROOT / "spmdrl" / f"{program}.py"
        tree = ast.parse(path.read_text())
        main = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main")
        own, _, flags = (ast.get_docstring(main) or "").partition("\n\nArgs:\n")
        summary = "\n\n".join(filter(None, (ast.get_docstring(tree), own)))
        lines += [f"## `spmdrl.{program.removesuffix('/__main__')}`", "", *prose(summary), ""]
        lines += [*flag_lines(flags), ""]
    return "\n".join(lines)


def flag_lines(flags: str) -> list[str]:
    """Returns an item for each entry of the section Args of a docstring."""
    joined = re.sub(r"\n {8,}", " ", flags)
    found = re.findall(r"^ {4}(\w+): (.+)$", joined, re.MULTILINE)
    names = {"overrides": "--KEY VALUE", "runs": "RUN"}
    return [f"- `{names.get(name, f'--{name}')}`: {escaped(text)}" for name, text in found]


# ---- one name


def entry(module: str, name: str) -> list[str]:
    """Returns the lines about a class, a function or an alias of a module."""
    source, node = definition(module, name)
    lines = [f"### `{name}`", ""]
    imported = f"from {module} import {name}"
    if isinstance(node, ast.FunctionDef):
        return [*lines, *code(imported, "", signature(node)), *prose(ast.get_docstring(node))]
    if isinstance(node, ast.ClassDef):
        return [*lines, *code(imported), *prose(ast.get_docstring(node)), *members(node, source)]
    text = ast.get_source_segment(source, node) or ""
    return [*lines, *code(imported, "", text), *prose(comment_above(source, node.lineno))]


def definition(module: str, name: str) -> tuple[str, ast.stmt]:
    """Returns the text of the file that defines a name, and the statement. module: a file, or a
    folder whose files do.
    """
    path = ROOT / module.replace(".", "/")
    files = sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    for source in (file.read_text() for file in files):
        for node in ast.parse(source).body:
            targets = node.targets if isinstance(node, ast.Assign) else [node]
            if name in [getattr(part, "name", getattr(part, "id", None)) for part in targets]:
                return source, node
    raise ValueError(f"docs/api_reference.py: {module} has no {name}")


def members(node: ast.ClassDef, source: str) -> Iterator[str]:
    """Yields the fields of a class with their comments, then its public methods.

    The fields of a config have pages of their own.
    """
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
    if fields and not node.name.endswith("Config"):
        names = {ast.unparse(field.target) for field in fields}
        lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
        comments = comments_in("\n".join(lines), names)
        yield ""
        for field in fields:
            comment = comments.get(ast.unparse(field.target), "")
            yield f"- `{ast.unparse(field)}`" + (f"  {escaped(comment)}" if comment else "")
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
            yield from ("", *code(signature(part)), *prose(ast.get_docstring(part)))


def signature(node: ast.FunctionDef) -> str:
    """Returns `name(parameters) -> type`, in lines of at most WIDTH columns; a property's type."""
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    kinds = {getattr(decorator, "id", "") for decorator in node.decorator_list}
    if kinds & {"property", "cached_property"}:
        return f"{node.name}{result.replace(' ->', ':')}"
    parameters = re.sub(r"^self(, )?", "", ast.unparse(node.args))
    text = f"{node.name}({parameters}){result}"
    return textwrap.fill(text, WIDTH, subsequent_indent="    ", break_long_words=False)


def comment_above(source: str, lineno: int) -> str:
    """Returns the comment lines directly above a line, joined."""
    lines = source.splitlines()[: lineno - 1]
    found = []
    while lines and lines[-1].startswith("# ") and not lines[-1].startswith("# ---"):
        found.insert(0, lines.pop().removeprefix("# "))
    return " ".join(found)


# ---- markdown


def code(*lines: str) -> list[str]:
    return ["```python", *lines, "```", ""]


def prose(docstring: str | None) -> list[str]:
    """Returns a docstring as markdown: indented parts stay code, all else is text."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    return [line if line.startswith("    ") else escaped(line) for line in lines]


def escaped(text: str) -> str:
    """Returns text in which only `code` is markup."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([\\*_<\[|])", r"\\\1", p) for p in parts)
