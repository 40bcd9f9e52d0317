"""Figures of the GPU scripts beside their goals: a line each, PASS or SHORT, and one of JSON in FOLDER/figures.jsonl.

A figure without a goal is marked with dashes. `gpu_all.py` collects the files of all sections into one table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "figures.jsonl"
ONE_CARD = "-one-card"  # behind the names of what is measured there


@dataclass(frozen=True)
class Figure:
    """What was measured. The goal is an upper bound (`most`) or a lower one (`least`); `value` None: not measured."""

    section: str
    name: str
    value: float | None
    unit: str = ""
    most: float | None = None
    least: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "NONE"
        if self.most is None and self.least is None:
            return "----"
        kept = (self.most is None or self.value <= self.most) and (self.least is None or self.value >= self.least)
        return "PASS" if kept else "SHORT"

    @property
    def goal(self) -> str:
        parts = [f"<= {self.most:g}"] if self.most is not None else []
        parts += [f">= {self.least:g}"] if self.least is not None else []
        return " and ".join(parts)

    def line(self) -> str:
        value = "not measured" if self.value is None else f"{self.value:.4g} {self.unit}".rstrip()
        goal = f"  (goal {self.goal})" if self.goal else ""
        return f"{self.verdict:5} {self.section:14} {self.name}: {value}{goal}" + (
            f"; {self.note}" if self.note else ""
        )


class Figures:
    """Those of one section, printed and written as they come.

    `one_card`: two workers share a card. Then no link between cards is measured, and goals for two do not apply:
    section and notes say so, and a goal stands only where it is for `everywhere`.
    """

    def __init__(self, folder: Path, section: str, one_card: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.one_card = one_card
        self._file, self._section = folder / FILE, section + ONE_CARD * one_card

    def add(
        self,
        name: str,
        value: float | None,
        unit: str = "",
        *,
        most: float | None = None,
        least: float | None = None,
        note: str = "",
        everywhere: bool = False,
    ) -> Figure:
        if self.one_card:
            note = f"one card; {note}" if note else "one card"
            most, least = (most, least) if everywhere else (None, None)
        figure = Figure(self._section, name, value, unit, most, least, note)
        print(figure.line(), flush=True)
        with self._file.open("a") as file:
            file.write(json.dumps(asdict(figure)) + "\n")
        return figure


def read(folder: Path) -> list[Figure]:
    """All figures of a folder; those that were written whole."""
    path = folder / FILE
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(Figure(**json.loads(line)))
        except ValueError:  # cut off while it was written
            continue
    return found


def table(figures: Iterable[Figure]) -> str:
    """Aligned columns: verdict, section, name, measured, goal, note."""
    rows = [("verdict", "section", "figure", "measured", "goal", "note")]
    for one in figures:
        value = "not measured" if one.value is None else f"{one.value:.4g} {one.unit}".rstrip()
        rows.append((one.verdict, one.section, one.name, value, one.goal, one.note))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows
    )
