"""The pen of the SVG drawing: shapes with classes, text that is measured before it is set, and the style of reports.

Renderers differ in their fonts, so widths are estimated on the generous side; what would not fit is shortened with an
ellipsis and keeps its whole text as a tooltip. No shape has an inline style: on the dashboard, whose content security
policy forbids them, the page's own style sheet gives the classes their colours, also dark ones.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from html import escape

SIZES = {"title": 17.0, "name": 13.0, "": 12.0, "small": 10.5, "cell": 9.5}
FONTS = "Inter, 'Helvetica Neue', 'Segoe UI', Roboto, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
STYLE = f"""
  text {{ font-family: {FONTS}; font-size: 12px; fill: #1c2630 }}
  .title {{ font-size: 17px; font-weight: 600 }} .name {{ font-size: 13px; font-weight: 600 }}
  .small {{ font-size: 10.5px; fill: #566370 }} .cell {{ font-size: 9.5px; fill: #6b7783 }}
  .paper {{ fill: #ffffff }} .frame {{ fill: #f6f8fa; stroke: #c9d2da }} .switch {{ fill: #dfe5ea; stroke: #b3bfc9 }}
  .gpu {{ fill: #e2f2e4; stroke: #4f9d5b }} .cpu {{ fill: #ffffff; stroke: #aab6c1 }}
  .nic {{ fill: #dbeafa; stroke: #2f73b8 }} .up {{ fill: #fdf1d8; stroke: #c48a1d }}
  .down {{ fill: #eceff2; stroke: #cdd5dc }} .unseen {{ fill: #ffffff; stroke: #9aa7b3; stroke-dasharray: 3 2 }}
  .fabric {{ fill: #cfe9d2; stroke: #4f9d5b }} .wire {{ stroke: #9aa7b3; stroke-width: 1.5; fill: none }}
  .nv {{ stroke: #4f9d5b; stroke-width: 2.5; fill: none }} .rule {{ stroke: #dde3e8 }}
"""


def measure(words: str, kind: str = "") -> float:
    """About how wide `words` are, in pixels, in the size of a class."""
    return SIZES.get(kind, 12.0) * sum(_advance(letter) for letter in words)


def _advance(letter: str) -> float:
    if letter in "iljI.,:;|!'()[] ":
        return 0.34
    if letter in "mwMW@%" or ord(letter) > 0x2E80:
        return 0.95
    return 0.68 if letter.isupper() else 0.6


def fit(words: str, width: float, kind: str = "") -> str:
    """`words`, or as much of their beginning as fits, with an ellipsis."""
    if measure(words, kind) <= width:
        return words
    kept = words
    while kept and measure(kept + "…", kind) > width:
        kept = kept[:-1]
    return kept.rstrip() + "…"


def clean(words: str) -> str:
    """`words` fit for XML: escaped, without characters that XML cannot hold."""
    return escape("".join(c if c >= " " and c not in "\ufffe\uffff" and not 0xD800 <= ord(c) < 0xE000 else "\ufffd"
                          for c in words))  # fmt: skip


@dataclass
class Canvas:
    """Shapes in the order in which they cover each other."""

    parts: list[str] = field(default_factory=list)

    def box(self, kind: str, x: float, y: float, width: float, height: float, radius: float = 4) -> None:
        self.parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"/>'
        )

    def text(
        self, x: float, y: float, words: str, kind: str = "", anchor: str = "start", width: float | None = None
    ) -> None:
        """`y` is the base line; with `width` the words are shortened to fit into it."""
        shown = words if width is None else fit(words, width, kind)
        tip = f"<title>{clean(words)}</title>" if shown != words else ""
        where = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
        style = f' class="{kind}"' if kind else ""
        self.parts.append(f"<text {where}{style}>{clean(shown)}{tip}</text>")

    def line(self, points: list[tuple[float, float]], kind: str, attributes: str = "") -> None:
        path = " ".join(f"{'L' if at else 'M'}{x:g} {y:g}" for at, (x, y) in enumerate(points))
        self.parts.append(f'<path class="{kind}" d="{path}"{attributes}/>')

    def open(self, kind: str, tip: str = "", **data: str) -> None:
        """Begins a group; its `data` attributes are what the dashboard finds it by."""
        names = "".join(f' data-{name}="{clean(value)}"' for name, value in data.items())
        self.parts.append(f'<g class="{kind}"{names}>' + (f"<title>{clean(tip)}</title>" if tip else ""))

    def close(self) -> None:
        self.parts.append("</g>")

    def document(self, width: float, height: float, title: str, *, styled: bool) -> str:
        """The whole as an SVG document."""
        size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
        head = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', f"<title>{clean(title)}</title>"]
        if styled:
            head += [f"<style>{STYLE}</style>", f'<rect class="paper" width="{width:g}" height="{height:g}"/>']
        return "\n".join([*head, *self.parts, "</svg>", ""])


def wrapped(words: str, width: float, kind: str = "") -> list[str]:
    """`words` as lines that fit into `width`."""
    letters = max(int(width / (SIZES.get(kind, 12.0) * 0.56)), 12)
    return textwrap.wrap(words, letters, break_on_hyphens=False) or [""]
