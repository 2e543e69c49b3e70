"""What a command prints, in colours, as an SVG for the documents: `python docs/images/screen.py FILE.svg COMMAND...`.

With `--from TEXT` and `--until TEXT` before the file, only the lines between two that begin so; the latter is left out.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
from pathlib import Path

from rich.console import Console
from rich.text import Text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="first", default="")
    parser.add_argument("--until", dest="last")
    parser.add_argument("--title", default="")
    parser.add_argument("file", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    surroundings = os.environ | {"FORCE_COLOR": "1", "COLUMNS": "80"}
    done = subprocess.run(options.command, env=surroundings, capture_output=True, text=True, check=True)
    options.file.write_text(as_svg(between(done.stdout.splitlines(), options.first, options.last), options.title))


def between(lines: list[str], first: str, last: str | None) -> list[str]:
    """The lines from one that begins with `first` up to one that begins with `last`."""
    plain = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines]
    begin = next(i for i, line in enumerate(plain) if line.startswith(first))
    end = next((i for i, line in enumerate(plain) if last and i > begin and line.startswith(last)), len(lines))
    return lines[begin:end]


def as_svg(lines: list[str], title: str) -> str:
    """A terminal with these lines; its font is one that the reader has, so that nothing is fetched."""
    console = Console(width=80, record=True, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi("\n".join(lines).rstrip()))
    drawn = console.export_svg(title=title)
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL).replace("Fira Code", "Menlo, Consolas")


if __name__ == "__main__":
    main()
