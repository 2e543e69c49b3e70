"""docs/architecture.md is true: every file and name that it mentions exists, and it mentions every module."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from tests.pure.test_layers import LAYERS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "shardwise"
PAGE = re.sub(r"```.*?```", "", (ROOT / "docs" / "architecture.md").read_text(), flags=re.DOTALL)
QUOTED = sorted(set(re.findall(r"`([^`\n]+)`", PAGE)))
PLACES = sorted(text for text in QUOTED if re.fullmatch(r"[\w./]+(/|\.py|\.md)|[a-z_]+(/[a-z_]\w+)+", text))
NAMES = sorted(text for text in QUOTED if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*(\(\))?", text) and text not in PLACES)
FILES = [path for folder in ("src", "tests", "bench", "docs") for path in (ROOT / folder).rglob("*.*")]


@functools.cache
def known_words() -> set[str]:
    """Words of the sources, and names of files."""
    texts = (path.read_text() for path in FILES if path.suffix == ".py")
    return {word for text in texts for word in re.findall(r"\w+", text)} | {path.stem for path in FILES}


def is_there(text: str) -> bool:
    """Whether a file or folder, with or without `.py`, has this end of a path."""
    tail = text.rstrip("/")
    tails = (f"/{tail}", f"/{tail}.py")
    return any(str(path).endswith(tails) for path in (*FILES, *(path.parent for path in FILES)))


@pytest.mark.parametrize("text", PLACES)
def test_files_exist(text: str) -> None:
    assert is_there(text), f"docs/architecture.md names {text}, which is not there"


def test_names_exist() -> None:
    unknown = [text for text in NAMES if not set(re.findall(r"\w+", text)) - {"yml"} <= known_words()]
    assert not unknown, f"docs/architecture.md names {unknown}, which no source contains"


def test_every_module_is_mentioned() -> None:
    words = {word for text in QUOTED for word in re.findall(r"\w+", text)}
    modules = [path for path in SOURCE.rglob("*.py") if path.stem not in ("__init__", "__main__")]
    commands = {path for path in modules if path.stem.endswith("_command")}  # one file for each, as the map says
    missing = sorted(
        str(path.relative_to(SOURCE)) for path in modules if path.stem not in words and path not in commands
    )
    assert not missing, f"add these modules to the tables of docs/architecture.md: {missing}"


def test_the_layers_of_the_guide_are_those_of_the_imports() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    (block,) = re.findall(r"```\n(errors.*?)```", guide, flags=re.DOTALL)
    rows = [tuple(name.strip() for name in row.split(",")) for row in block.split("<")]
    expected = [tuple(name for name in row if not name.startswith("__")) for row in LAYERS]
    assert rows == [row for row in expected if row]


def test_what_is_missing_is_found() -> None:
    assert is_there("core/mesh.py")
    assert is_there("core/mesh")
    assert is_there("fabric/")
    assert not is_there("core/meshes.py")
    assert not is_there("ore/mesh.py")
    assert "no_such_name_at" + "_all" not in known_words()
    assert "rules/engine.py" in PLACES
    assert "Gathered.drop" in NAMES
