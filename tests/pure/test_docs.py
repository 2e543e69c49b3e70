"""The documentation holds together: links lead somewhere, every page and every public name has its place, it builds."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ +(?P<words>.+)$", re.MULTILINE)
DOCUMENTED = re.compile(r"^::: shardwise\.(?P<name>[\w.]+)$", re.MULTILINE)
NAMED_TEST = re.compile(r"`(?P<file>(?:tests|bench|examples)/[\w/]+\.(?:py|ipynb))(?:::(?P<name>\w+))?`")
OUTSIDE = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?https?:[^>]*>|@import|url\(['\"]?https?:")


def prose(page: Path) -> str:
    """A page without its code."""
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """What headings of a page are called in links, by GitHub and by the site."""
    words = (re.sub(r"[^\w\s-]", "", found["words"].lower()) for found in HEADING.finditer(prose(page)))
    return {re.sub(r"\s+", "-", each.strip()) for each in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    broken = []
    for link in LINK.finditer(prose(page)):
        target, _, anchor = link["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = page.parent / target if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(link["target"])
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_tests_that_a_page_names(page: Path) -> None:
    missing = []
    for found in NAMED_TEST.finditer(prose(page)):
        file = ROOT / found["file"]
        if not file.exists() or (found["name"] and f"def {found['name']}(" not in file.read_text(encoding="utf-8")):
            missing.append(found[0])
    assert not missing


def test_every_feature_that_is_there_has_a_test() -> None:
    rows = [line.split(" | ") for line in (DOCS / "features.md").read_text(encoding="utf-8").splitlines()]
    features = {row[0]: row[1] for row in rows if len(row) > 4 and row[1].startswith("yes")}
    assert len(features) > 30
    assert not [name for name, ours in features.items() if not NAMED_TEST.search(ours)]


def test_every_public_name_is_in_the_reference() -> None:
    reference = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    documented = [found["name"] for found in DOCUMENTED.finditer(reference)]
    assert len(documented) == len(set(documented)), "a name has two places"
    packages = (
        "checkpoint",
        "checkpoint.state_dict",
        "debug",
        "hf",
        "moe",
        "optim",
        "parallel",
        "pipelines",
        "recurrences",
    )
    parts = {f"{part}.{name}" for part in packages for name in importlib.import_module(f"shardwise.{part}").__all__}
    again = {name.partition(".")[2] for name in parts}  # names that shardwise has of its packages
    own = set(shardwise.__all__) - again - set(packages)
    assert set(documented) == own | parts


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_the_site_builds_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    for page in [*tmp_path.rglob("*.html"), *tmp_path.rglob("*.css")]:
        assert not OUTSIDE.findall(page.read_text(encoding="utf-8")), page
    assert "distribute_tensor" in (tmp_path / "reference" / "tensors.html").read_text(encoding="utf-8")
