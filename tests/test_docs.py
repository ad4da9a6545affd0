"""The documentation: its site is built without a warning, and what its pages name exists."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the site as `make docs` does; a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(ROOT / ".mkdocs.yml")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, "--site-dir", str(folder)], env=env, text=True, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.programs
def test_the_site_has_every_page_and_finds_every_field(site: Path) -> None:
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert {f"{page.stem}.html" for page in PAGES[1:]} | {"index.html"} <= pages
    found = json.loads((site / "search/search_index.json").read_text())["docs"]
    text = " ".join(entry["text"] for entry in found if entry["location"].startswith("reference/"))
    for field in (
        "prompts_per_step",
        "kl_coef",
        "tensor_parallel",
        "out_dtype",
        "micro_batch_tokens",
        "push_to_hub",  # of spmdrl.export
        "num_waiting",  # of RolloutEngine
    ):
        assert field in text
    assert "<svg" in (site / "pictures/one_step.svg").read_text()


@pytest.mark.programs
def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    page = (site / "index.html").read_text()
    loaded = re.findall(r"<(?:script|img|link)\b[^>]*?(?:src|href)=\"?([^\s\">]+)", page)
    assert len(loaded) > 3
    assert not [link for link in loaded if link.startswith(("http", "//"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"^(<<<<<<<|=======|>>>>>>>)", text, re.M), "a merge was not finished"
    targets = set(re.findall(r"^([a-z.-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`make ([a-z.-]+)", text)) <= targets
    paths = re.findall(
        r"(?<![\w/.-])(?:spmdrl|configs|examples|launch|docs|tests)/[\w./-]+\.\w+", text
    )
    assert not [path for path in paths if not (ROOT / path).exists()]
    modules = set(re.findall(r"-m (spmdrl\.\w+)", text))
    assert not [name for name in modules if importlib.util.find_spec(name) is None]
