"""Draws the curves of a benchmark into a file: panels side by side, one legend, the conditions below.

A benchmark turns its report into `Panel`s of `Curve`s and calls `draw`. matplotlib (extra `plot`) is imported by that
call, not before, and used without its global state, so that a machine without a display, or without the package, runs
everything else.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream import outfile
from slipstream.errors import ConfigError, MissingExtra

SUFFIXES = (".png", ".svg", ".pdf")
PANEL_INCHES = (5.2, 3.7)
MARKERS = "osD^vP*X<>"


@dataclass(frozen=True)
class Curve:
    """One line: points in order of x. `low` and `high`, where given, are the ends of each point's interval.

    Curves of one label have the same colour in every panel. `dashed` sets a second kind of figure of one label apart.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dashed: bool = False
    marks: bool = True  # a mark at each point


@dataclass(frozen=True)
class Panel:
    """One pair of axes. Axes begin at 0 unless they are logarithmic."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve] = field(default_factory=list)
    log_x: bool = False
    log_y: bool = False
    x_ticks: dict[float, str] = field(default_factory=dict)  # place -> text, instead of numbers


def check_path(path: Path) -> None:
    """Raises ConfigError or MissingExtra, for a benchmark to call before it measures for an hour."""
    outfile.check(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"cannot draw into {path}: end its name in one of {', '.join(SUFFIXES)}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtra("matplotlib", "plot") from error


def draw(panels: Sequence[Panel], path: Path, *, title: str = "", note: str = "", columns: int = 3) -> None:
    """Writes the panels into a PNG, SVG or PDF file, by its name, and says so. `note` stands below, wrapped.

    Raises ConfigError (another kind of file, one that cannot be written) or MissingExtra (no matplotlib).
    """
    check_path(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = min(columns, max(1, len(panels)))
    rows = max(1, math.ceil(len(panels) / columns))
    width, height = PANEL_INCHES
    with rc_context({"svg.hashsalt": "slipstream", "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(width * columns, height * rows + 0.8), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        colours = _colours(panels)
        for panel, place in zip(panels, axes, strict=False):
            _panel(place, panel, colours)
        for place in axes[len(panels) :]:
            place.set_axis_off()
        _legend(figure, panels, colours)
        if title:
            figure.suptitle(title, fontsize=12)
        if note:
            lines = (line for part in note.splitlines() for line in textwrap.wrap(part, 55 * columns))
            figure.supxlabel("\n".join(lines), fontsize=7, color="0.35")
        kind, picture = path.suffix.lower()[1:], io.BytesIO()
        figure.savefig(picture, format=kind, dpi=140, metadata={"Date": None} if kind == "svg" else None)
    outfile.write(path, picture.getvalue(), "the plot")


def _colours(panels: Sequence[Panel]) -> dict[str, str]:
    labels = dict.fromkeys(curve.label for panel in panels for curve in panel.curves)
    return {label: f"C{number % 10}" for number, label in enumerate(labels)}


def _panel(axes, panel: Panel, colours: dict[str, str]) -> None:
    order = list(colours)
    for curve in panel.curves:
        look = {"color": colours[curve.label], "linestyle": "--" if curve.dashed else "-", "linewidth": 1.4}
        marker = MARKERS[order.index(curve.label) % len(MARKERS)] if curve.marks else ""
        axes.plot(curve.x, curve.y, marker=marker, markersize=4, **look)
        if len(curve.low):
            axes.fill_between(curve.x, curve.low, curve.high, color=colours[curve.label], alpha=0.15, linewidth=0)
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel(panel.x_label, fontsize=9)
    axes.set_ylabel(panel.y_label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(visible=True, alpha=0.25, linewidth=0.6)
    if panel.log_x:
        axes.set_xscale("log", base=2)
    elif panel.curves and not panel.x_ticks:
        axes.set_xlim(left=0)
    if panel.log_y:
        axes.set_yscale("log")
    elif panel.curves:
        axes.set_ylim(bottom=0)
    if panel.x_ticks:
        axes.set_xticks(list(panel.x_ticks), list(panel.x_ticks.values()))
        axes.minorticks_off()


def _legend(figure, panels: Sequence[Panel], colours: dict[str, str]) -> None:
    from matplotlib.lines import Line2D

    if len(colours) < 2:
        return
    order = list(colours)
    handles = [
        Line2D(
            [], [], color=colours[label], marker=MARKERS[order.index(label) % len(MARKERS)], markersize=4, label=label
        )
        for label in order
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=min(len(order), 4), fontsize=8, frameon=False)
