"""Outside of `fabric/` nothing asks which fabric runs a mesh, nor of what kind a local is: it asks the fabric.

A new fabric is then one new file. What still asks is counted for each file; the counts may only shrink.
"""

import ast
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "shardwise"
# Tests of `isinstance(..., RankTensor)` or of a fabric's name, by file.
ALLOWED: dict[str, int] = {}


def asks(tree: ast.AST) -> int:
    """How often a module tests the name of a fabric, or whether something is a `RankTensor`."""
    return sum(map(_asks, ast.walk(tree)))


def _asks(node: ast.AST) -> bool:
    match node:
        case ast.Compare(left=left, comparators=others):
            return any(_names_fabric(side) or _is_class(side) for side in (left, *others))
        case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
            return any(_is_class(name) for name in ast.walk(kinds))
    return False


def _names_fabric(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "fabric"


def _is_class(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "RankTensor"


def counted() -> Counter[str]:
    found: Counter[str] = Counter()
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if not name.startswith("fabric/") and (count := asks(ast.parse(path.read_text(encoding="utf-8")))):
            found[name] = count
    return found


def test_fabrics_are_asked_not_named() -> None:
    more = {name: count for name, count in counted().items() if count > ALLOWED.get(name, 0)}
    assert not more, (
        f"ask the fabric (`has_values`, `many_ranks`, `one_rank`, `spread`, `is_of_ranks`, `parts_of`, ...): {more}"
    )


def test_the_list_is_current() -> None:
    found = counted()
    fewer = {name: found[name] for name, count in ALLOWED.items() if found[name] < count}
    assert not fewer, f"fewer than listed; write the new counts: {fewer}"


def test_what_asks_is_found() -> None:
    assert asks(ast.parse("mesh.fabric == 'dry'")) == 1
    assert asks(ast.parse("spec.mesh.fabric in (virtual.name, dry.name)")) == 1
    assert asks(ast.parse("isinstance(x, DTensor | RankTensor)")) == 1
    assert asks(ast.parse("x.__class__ is RankTensor")) == 1
    assert asks(ast.parse("fabric_of(mesh).has_values")) == 0
