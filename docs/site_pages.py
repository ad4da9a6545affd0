"""Pages of the documentation's site that are made from other files; mkdocs calls `on_files`.

The first page is README.md, so that the two cannot differ. CONTRIBUTING.md and CHANGELOG.md are
those of the repository's top. The reference has every field of a config with its default and its
comment, as `--help` prints them, and what can be imported (api_reference.py).
"""

from __future__ import annotations

import re
from pathlib import Path

from api_reference import api_page, programs_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from spmdrl.cli.help import config_lines
from spmdrl.config import PpoConfig, PreferenceTrainingConfig, RewardTrainingConfig, SftConfig

ROOT = Path(__file__).resolve().parents[1]
REFERENCES = {"ppo": PpoConfig, "sft": SftConfig, "preference": PreferenceTrainingConfig,
              "reward_model": RewardTrainingConfig}  # fmt: skip
SOURCES = "https://github.com/spmdrl/spmdrl/blob/main/"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the made pages to the site's files."""
    pages = {f"reference/{program}.md": reference(program) for program in REFERENCES}
    pages |= {"reference/api.md": api_page(), "reference/programs.md": programs_page()}
    for name, page in (
        ("README.md", "index.md"),
        ("CONTRIBUTING.md", None),
        ("CHANGELOG.md", None),
    ):
        pages[page or name] = from_top((ROOT / name).read_text())
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Leads a page's links to files outside of docs/ to the repository."""
    return re.sub(r"\]\(\.\./([^)#]+)", rf"]({SOURCES}\1", markdown)


def from_top(text: str) -> str:
    """Returns a page of the repository's top with its links as seen from docs/."""
    text = re.sub(r"\]\(docs/", "](", text)
    text = text.replace("](README.md)", "](index.md)")
    return text.replace("](LICENSE)", f"]({SOURCES}LICENSE)")


def reference(program: str) -> str:
    """Returns the page with every field of the config that a program takes."""
    kind = REFERENCES[program]
    lines = [
        f"# Fields of {kind.__name__}",
        "",
        f"The config of `python -m spmdrl.{program}`, as its `--help` prints it. On the command",
        "line a field is set by its dotted name: `--actor.optim.lr 1e-5`.",
    ]
    for line in config_lines(kind):
        comment = re.fullmatch(r"      (.+)", line)
        field = re.fullmatch(r"  (\w+): (.+)", line)
        if field:
            lines += ["", f"- `{field[1]}: {field[2]}`  "]
        elif comment:
            lines.append(f"  {comment[1]}")
        elif line:
            where, _, summary = line.partition("  ")
            lines += ["", f"## `{where}`", "", summary]
    return "\n".join(lines) + "\n"
