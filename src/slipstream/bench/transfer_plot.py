"""The curves of a transfer benchmark, fresh or saved: `slipstream bench transfer [SAVED] --plot FILE`.

One pair of axes for the rate in each direction, one for the latency of a single page, one for what the processors do
for it. Pages are scattered; the block, which is contiguous, stands at the right. A dashed line is the rate with several
batches under way; the raw copy, which knows no pages, is a level line. Cases without figures, or with wrong contents,
are left out and named below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from slipstream.bench.plot import Curve, Panel, check_path, draw
from slipstream.bench.report import TransferReport, TransferRow, size_text
from slipstream.errors import ConfigError

BLOCK_APART = 4  # the block's place: this many times the largest page
TICKS = 6
RAW = "raw"
UNCHECKED = (RAW, "memmove")  # engines whose contents nobody checks


def plot_transfer(report: TransferReport, path: Path) -> None:
    """Writes the picture. Raises ConfigError (another kind of file, nothing to draw) or MissingExtra."""
    check_path(path)
    if not any(drawable(row) for row in report.rows):
        raise ConfigError("there is nothing to draw: no case of this report has figures.")
    title = f"KV transfer, {size_text(report.batch_bytes)} a batch, {' to '.join(report.memory)}"
    draw(panels(report), path, title=title, note=note(report), columns=2)


def drawable(row: TransferRow) -> bool:
    return not row.problem and row.gbps > 0 and (row.verified or row.engine in UNCHECKED)


def panels(report: TransferReport) -> list[Panel]:
    rows = [row for row in report.rows if drawable(row)]
    places = _Places(rows)
    directions = list(dict.fromkeys(row.direction for row in rows))
    found = [
        Panel(f"rate, {direction}", "page", "GB/s", _rates(rows, direction, places), log_x=True, x_ticks=places.ticks)
        for direction in directions
    ]
    paged = [row for row in rows if not row.contiguous]
    for title, unit, curves in (
        ("one page alone: median, up to the 99th of 100", "µs", _curves(paged, places, lambda row: row.p50_us, _p99)),
        ("processors", "CPU seconds a GB", _curves(paged, places, lambda row: row.cpu_s_per_gb)),
    ):
        if curves:
            found.append(Panel(title, "page", unit, curves, log_x=True, log_y=True, x_ticks=places.page_ticks))
    return found


def note(report: TransferReport) -> str:
    """What was measured where, and what is not in the picture."""
    at = report.conditions
    packages = ", ".join(f"{name} {version}" for name, version in at.packages.items())
    words = [f"{at.command}; {at.when}; slipstream {at.version}; {at.cpu}, {at.cores} cores, {at.kernel}"]
    words.append(f"Python {at.python}, {packages}" if packages else f"Python {at.python}")
    if at.devices:
        words.append("devices " + ", ".join(at.devices))
    if any(row.gbps_many is not None for row in report.rows):
        words.append("dashed: several batches under way")
    left_out = [row for row in report.rows if not drawable(row)]
    if left_out:
        named = dict.fromkeys(f"{row.engine} {_name(row)} {row.direction}" for row in left_out)
        words.append("left out, without figures or with wrong contents: " + ", ".join(named))
    return "; ".join(words)


class _Places:
    """Where a row stands on the axis of pages."""

    def __init__(self, rows: Sequence[TransferRow]) -> None:
        self.pages = sorted({row.page for row in rows if not row.contiguous})
        self.block = (self.pages[-1] if self.pages else max(row.page for row in rows)) * BLOCK_APART
        step = max(1, -(-len(self.pages) // TICKS))
        self.page_ticks = {float(page): size_text(page) for page in self.pages[::step]}
        blocks = any(row.contiguous for row in rows)
        self.ticks = {**self.page_ticks, **({float(self.block): "one block"} if blocks else {})}

    def of(self, row: TransferRow) -> float:
        return float(self.block if row.contiguous else row.page)

    @property
    def ends(self) -> tuple[float, float]:
        return float(self.pages[0] if self.pages else self.block / 2), float(self.block)


def _rates(rows: Sequence[TransferRow], direction: str, places: _Places) -> list[Curve]:
    """Solid: one batch at a time; dashed: several under way."""
    these = [row for row in rows if row.direction == direction]
    curves = _curves([row for row in these if row.engine != RAW], places, lambda row: row.gbps)
    for name, engine in _by_engine(row for row in these if row.gbps_many is not None):
        curves.append(
            Curve(name, [places.of(row) for row in engine], [row.gbps_many or 0.0 for row in engine], dashed=True)
        )
    for row in these:
        if row.engine == RAW:
            curves.append(Curve(RAW, places.ends, (row.gbps, row.gbps)))
    return curves


def _curves(
    rows: Sequence[TransferRow],
    places: _Places,
    figure: Callable[[TransferRow], float],
    high: Callable[[TransferRow], float] | None = None,
) -> list[Curve]:
    """One an engine, of its pushes where it has some, else of its pulls."""
    curves = []
    for name, engine in _by_engine(rows):
        first = engine[0].direction
        shown = [row for row in engine if row.direction == first and figure(row) > 0]
        x, y = [places.of(row) for row in shown], [figure(row) for row in shown]
        if shown:
            curves.append(Curve(name, x, y, y, [high(row) for row in shown]) if high else Curve(name, x, y))
    return curves


def _by_engine(rows: Iterable[TransferRow]) -> list[tuple[str, list[TransferRow]]]:
    """Engines in the order they came, pushes before pulls, each direction by page."""
    found: dict[str, list[TransferRow]] = {}
    for row in sorted(rows, key=lambda row: (row.direction != "push", row.contiguous, row.page)):
        found.setdefault(row.engine, []).append(row)
    return list(found.items())


def _p99(row: TransferRow) -> float:
    return row.p99_us


def _name(row: TransferRow) -> str:
    return "one block" if row.contiguous else size_text(row.page)
