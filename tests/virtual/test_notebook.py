"""The notebook of the examples runs from top to bottom, and its stored outputs are those of the code."""

import ast
import contextlib
import io
import json
import types
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tour.ipynb"


def stored_outputs(cell: dict[str, Any]) -> str:
    """Text that a reader sees under a cell."""
    texts = (each.get("text") or each["data"]["text/plain"] for each in cell["outputs"])
    return "".join("".join(text) for text in texts)


def run_cell(source: str, namespace: dict[str, Any]) -> str:
    """Text that a cell prints, and the value of its last line if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, str(NOTEBOOK), "exec"), namespace)
        value = eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), namespace) if last else None  # type: ignore[attr-defined]
    return printed.getvalue() + (repr(value) if value is not None else "")


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def test_the_notebook_prints_what_it_shows() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    namespace = types.ModuleType("notebook").__dict__
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 6
    for number, cell in enumerate(cells, start=1):
        assert cell["execution_count"] == number
        assert lines(run_cell("".join(cell["source"]), namespace)) == lines(stored_outputs(cell)), f"cell {number}"


def test_a_cell_that_prints_something_else_is_found() -> None:
    assert run_cell("x = 1\nprint(x)\nx + 1", {}) == "1\n2"
    with pytest.raises(ZeroDivisionError):
        run_cell("1 / 0", {})
