"""The code in README.md and docs/ runs, and prints what the pages say it prints.

The blocks of one page share one namespace, in order. `<!-- not run: reason -->` before a ```python block leaves it out.
A ```text block (or a bare one) with `<!-- output -->` before it, right after a ```python block, must equal what that
block printed; the comment may stand before the ```python block as well.
"""

import contextlib
import io
import itertools
import re
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"(?P<indent> *)```(?P<language>[\w+-]*)[^`]*$")
NOT_RUN = re.compile(r"<!--\s*not run\b:?\s*(?P<reason>.*?)\s*-->")
OUTPUT = re.compile(r"<!--\s*output\s*-->")


class Block(NamedTuple):
    language: str
    line: int  # of its first line of text, from 1
    text: str
    before: tuple[str, ...]  # the lines between the last block and this one that are not blank


class Example(NamedTuple):
    line: int
    source: str
    output: str | None


class PageError(Exception):
    """A page with an invalid block, or with code whose output is not that of the page."""


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    before: list[str] = []
    lines = text.splitlines()
    position = 0
    while position < len(lines):
        opening = FENCE.match(lines[position])
        if opening is None:
            if lines[position].strip():
                before.append(lines[position].strip())
            position += 1
            continue
        start = position + 1
        end = next((i for i in range(start, len(lines)) if lines[i].strip() == "```"), None)
        if end is None:
            raise PageError(f"line {start}: this block is not closed")
        indent = len(opening["indent"])
        body = "".join(line[indent:] + "\n" for line in lines[start:end])
        found.append(Block(opening["language"], start + 1, body, tuple(before)))
        before, position = [], end + 1
    return found


def examples(text: str) -> list[Example]:
    """The python blocks to run, each with the output the page promises."""
    found: list[Example] = []
    page = blocks(text)
    for block, following in itertools.zip_longest(page, page[1:]):
        announced = bool(block.before) and bool(OUTPUT.fullmatch(block.before[-1]))
        if block.language != "python":
            if announced and not (found and _is_output(block) and len(block.before) == 1):
                raise PageError(f"line {block.line}: an output block follows its python block directly")
            continue
        left_out = NOT_RUN.fullmatch(block.before[-1]) if block.before else None
        if left_out is not None:
            if not left_out["reason"]:
                raise PageError(f"line {block.line}: say why this block is not run")
            continue
        output = None
        if following is not None and _is_output(following):
            between = following.before
            if (announced and not between) or (len(between) == 1 and OUTPUT.fullmatch(between[0])):
                output = following.text
        if announced and output is None:
            raise PageError(f"line {block.line}: no output block follows")
        found.append(Example(block.line, block.text, output))
    return found


def _is_output(block: Block) -> bool:
    return block.language in ("", "text")


def run_page(text: str, path: str) -> int:
    """Run every example of a page in a namespace of its own; how many there were."""
    module = types.ModuleType("shardwise_page")  # a real module, so that classes defined on a page can be pickled
    sys.modules[module.__name__] = module
    try:
        page = examples(text)
        for example in page:
            _run(example, module, path)
    finally:
        del sys.modules[module.__name__]
    return len(page)


def _run(example: Example, module: types.ModuleType, path: str) -> None:
    # as many empty lines as stand above the block, so that a traceback shows the page's own line
    code = compile("\n" * (example.line - 1) + example.source, path, "exec", dont_inherit=True)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, module.__dict__)
    if example.output is not None and _lines(printed.getvalue()) != _lines(example.output):
        raise PageError(
            f"{path}:{example.line}: the page promises\n{example.output}\nbut the code prints\n{printed.getvalue()}"
        )


def _lines(text: str) -> list[str]:
    """Blanks at the ends of lines and at the end of the text are not seen by a reader."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page: Path) -> None:
    if not page.exists():
        pytest.fail(f"there is no {page.relative_to(ROOT)}")
    count = run_page(page.read_text(encoding="utf-8"), str(page))
    assert count or page.name != "README.md", "README.md shows no code that is run"


def page(*parts: str) -> str:
    return "\n\n".join(parts) + "\n"


def python(source: str) -> str:
    return f"```python\n{source}\n```"


def text(output: str, language: str = "text") -> str:
    return f"```{language}\n{output}\n```"


def test_blocks_share_a_namespace_and_output_is_compared() -> None:
    sample = page(python("x = 2"), "and", python("print(x + 1)"), "<!-- output -->", text("3"))
    assert run_page(sample, "p.md") == 2
    assert run_page(page("<!-- output -->", python("print(3)"), text("3", "")), "p.md") == 1


@pytest.mark.parametrize(
    ("sample", "error", "message"),
    [
        (page(python("print(1)"), "<!-- output -->", text("2")), PageError, r"p\.md:2: the page promises"),
        (page(python("print(1)"), "<!-- output -->", text("")), PageError, "the code prints\n1"),
        (page("<!-- output -->", python("print(1)"), text("2")), PageError, "the page promises"),
        (page("<!-- output -->", python("print(1)")), PageError, "no output block follows"),
        (page("words", "<!-- output -->", text("2")), PageError, "follows its python block directly"),
        (page(python("x = 1"), "words", "<!-- output -->", text("2")), PageError, "follows its python block directly"),
        (page("<!-- not run: -->", python("x = 1")), PageError, "say why"),
        (page("<!-- not run -->", python("x = 1")), PageError, "say why"),
        (page(python("x = 1"), "```python\nx = 2"), PageError, "line 5: this block is not closed"),
        (page(python("1 / 0")), ZeroDivisionError, "division"),
        (page("- a list\n\n  ```python\n  1 / 0\n  ```"), ZeroDivisionError, "division"),
    ],
)
def test_a_wrong_page_fails(sample: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_page(sample, "p.md")


def test_what_is_left_out() -> None:
    sample = page("<!-- not run: needs a cluster -->", python("1 / 0"), python("print(1)"), text("not compared"))
    assert run_page(sample, "p.md") == 1
    assert run_page(page("```bash\nexit 1\n```", "```\n1 / 0\n```"), "p.md") == 0


def test_pages_do_not_share_a_namespace() -> None:
    run_page(python("leaked = 1"), "a.md")
    with pytest.raises(NameError, match="leaked"):
        run_page(python("leaked"), "b.md")
