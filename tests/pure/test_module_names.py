"""Every module of the package has a base name of its own, so that a name leads to one file."""

from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "shardwise"
UNNAMED = ("__init__", "__main__")

# Base names in use more than once, with their modules. The list may only shrink.
KNOWN_DUPLICATES: dict[str, set[str]] = {}


def duplicates(modules: list[str]) -> dict[str, set[str]]:
    """Base names of more than one module or package, with the dotted names of these."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        found[module.rpartition(".")[2]].add(module)
    return {name: named for name, named in found.items() if len(named) > 1}


def modules_below(folder: Path) -> list[str]:
    """The dotted names of all modules and packages, relative to the folder."""
    paths = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py"))
    parts = {path.parts[:-1] if path.name in UNNAMED else path.parts for path in paths}
    return sorted(".".join(part) for part in parts if part)


def test_base_names_are_unique() -> None:
    found = duplicates(modules_below(SOURCE))
    added = {name: sorted(modules - KNOWN_DUPLICATES.get(name, set())) for name, modules in found.items()}
    added = {name: modules for name, modules in added.items() if modules}
    assert not added, f"give these modules a base name of their own: {added}"


def test_known_duplicates_are_current() -> None:
    found = duplicates(modules_below(SOURCE))
    stale = {name: sorted(modules) for name, modules in KNOWN_DUPLICATES.items() if found.get(name) != modules}
    assert not stale, f"update or remove these entries of KNOWN_DUPLICATES: {stale}"


def test_a_duplicate_is_found() -> None:
    assert duplicates(["a.x", "b.x", "b.y", "x", "y", "y.z"]) == {"x": {"a.x", "b.x", "x"}, "y": {"b.y", "y"}}
