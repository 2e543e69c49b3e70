"""A canvas of SVG shapes: a self-contained picture without scripts that follows the reader's light or dark setting."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["COLOURS", "Canvas", "fitting", "text_width"]

# Named by use. CSS classes and not CSS variables, which some viewers do not support.
LIGHT = {
    "paper": "#ffffff",
    "ink": "#1c2333",
    "soft": "#667085",
    "line": "#d0d5dd",
    "chip": "#f2f4f7",
    "edge": "#a3acba",
}
DARK = {
    "paper": "#10141c",
    "ink": "#eef1f6",
    "soft": "#98a2b3",
    "line": "#344054",
    "chip": "#1d2430",
    "edge": "#5d6b82",
}
COLOURS = ("#3e6ff4", "#12a594", "#e5484d", "#f5a524", "#8e4ec6", "#46a758", "#e8590c", "#0ea5e9")

SANS = "ui-sans-serif,system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"
MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'Liberation Mono',monospace"


def escape(text: str) -> str:
    """Text escaped for XML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _style() -> str:
    def sheet(colours: dict[str, str]) -> str:
        return (
            f".paper{{fill:{colours['paper']}}}.ink{{fill:{colours['ink']}}}.soft{{fill:{colours['soft']}}}"
            f".line{{stroke:{colours['line']};fill:none}}.pen{{stroke:{colours['soft']};fill:none}}"
            f".chip{{fill:{colours['chip']}}}.card{{fill:{colours['paper']};stroke:{colours['edge']}}}"
            f".hatch{{stroke:{colours['ink']}}}"
        )

    fonts = f"text{{font-family:{SANS}}}.mono{{font-family:{MONO}}}"
    return f"{fonts}{sheet(LIGHT)}@media (prefers-color-scheme:dark){{{sheet(DARK)}}}"


def text_width(text: str, size: float, kind: str = "") -> float:
    """The approximate width of a text, slightly more than in most fonts."""
    return (0.61 if "mono" in kind else 0.56) * size * len(text)


def fitting(text: str, width: float, height: float, largest: float = 14) -> float | None:
    """The font size at which a text fits into a box; None if it would be too small to read."""
    size = min(largest, width / (0.62 * len(text)), height)
    return size if size >= 7 else None


def _attributes(attributes: dict[str, str]) -> str:
    """The attributes of an element as text; Python names become SVG names."""
    return "".join(f' {name.rstrip("_").replace("_", "-")}="{escape(value)}"' for name, value in attributes.items())


class Canvas:
    """Shapes in painting order, and the size of the picture."""

    def __init__(self) -> None:
        self.shapes: list[str] = []
        self.width = 0.0
        self.height = 0.0

    def reach(self, x: float, y: float) -> None:
        """Extend the picture to include a point."""
        self.width, self.height = max(self.width, x), max(self.height, y)

    def rect(
        self, x: float, y: float, width: float, height: float, *, radius: float = 0, title: str = "", **attributes: str
    ) -> None:
        """Add a rectangle; `title` is its tooltip."""
        self.reach(x + width, y + height)
        shape = f'<rect x="{x:.6g}" y="{y:.6g}" width="{width:.6g}" height="{height:.6g}"'
        shape += f' rx="{radius:g}"' if radius else ""
        end = f"><title>{escape(title)}</title></rect>" if title else "/>"
        self.shapes.append(f"{shape}{_attributes(attributes)}{end}")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 13,
        *,
        kind: str = "ink",
        anchor: str = "start",
        weight: int = 400,
        turned: bool = False,
    ) -> None:
        """Add a text, vertically centred at `y`; `turned` reads from bottom to top."""
        width = text_width(text, size, kind)
        reach = {"start": width, "middle": width / 2, "end": 0.0}[anchor]
        self.reach(x + (size if turned else reach), y + size)
        turn = f' transform="rotate(-90 {x:.6g} {y:.6g})"' if turned else ""
        bold = f' font-weight="{weight}"' if weight != 400 else ""
        self.shapes.append(
            f'<text class="{kind}" x="{x:.6g}" y="{y + 0.35 * size:.6g}" font-size="{size:.4g}" '
            f'text-anchor="{anchor}"{bold}{turn}>{escape(text)}</text>'
        )

    def path(self, points: Sequence[tuple[float, float]], *, kind: str = "pen", arrow: bool = False) -> None:
        """Add a line through points, optionally with an arrowhead."""
        commands = " ".join(f"{'M' if i == 0 else 'L'}{x:.6g} {y:.6g}" for i, (x, y) in enumerate(points))
        for x, y in points:
            self.reach(x, y)
        head = ' marker-end="url(#arrow)"' if arrow else ""
        self.shapes.append(f'<path class="{kind}" d="{commands}" stroke-width="1.5"{head}/>')

    def area(self, points: Sequence[tuple[float, float]], *, title: str = "", **attributes: str) -> None:
        """Add a filled polygon; `title` is its tooltip."""
        for x, y in points:
            self.reach(x, y)
        corners = " ".join(f"{x:.6g},{y:.6g}" for x, y in points)
        end = f"><title>{escape(title)}</title></polygon>" if title else "/>"
        self.shapes.append(f'<polygon points="{corners}"{_attributes(attributes)}{end}')

    def svg(self, title: str, margin: float = 24) -> str:
        """The SVG document."""
        width, height = self.width + margin, self.height + margin
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.6g}" height="{height:.6g}" '
            f'viewBox="0 0 {width:.6g} {height:.6g}" role="img"><title>{escape(title)}</title>'
            f"<style>{_style()}</style><defs>"
            '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path class="soft" d="M0 0L8 4L0 8z"/></marker>'
            '<pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            '<path class="hatch" d="M0 0V7" stroke-width="1.6" stroke-opacity="0.28"/></pattern></defs>'
            f'<rect class="paper" width="{width:.6g}" height="{height:.6g}" rx="14"/>{"".join(self.shapes)}</svg>'
        )
