"""The NIC legend below the matrix: label to device name.

The tool itself overwrites names of the first NICs with parts of the header on machines with many NICs ("NIC1: MA
ID"), and pasted texts lose lines. A name that does not look like a device, or that two labels share, is not known.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_ENTRY = re.compile(r"^\s*(NIC\d+)\s*:\s*(.*?)\s*$")
_TWO = re.compile(r"(?<=\S)\s*(?=NIC\d+\s*:)")
_DEVICE = re.compile(r"[a-z][A-Za-z0-9_]*\d")
_BARE_DRIVER = re.compile(r"mlx\d|hfi\d")


@dataclass
class Legend:
    """Entries as printed, and the names that can be trusted. `shown` tells whether there was a legend at all."""

    shown: bool = False
    entries: dict[str, str] = field(default_factory=dict)
    corrupt: list[str] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)

    def name_of(self, label: str) -> str | None:
        """Device name of a column label; labels of old tables are device names themselves."""
        if not label.startswith("NIC"):
            return label
        if label in self.corrupt or label in self.shared:
            return None
        return self.entries.get(label)


def read_legend(lines: list[str]) -> Legend:
    legend = Legend()
    seen: set[str] = set()
    for line in lines:
        if re.match(r"^\s*NIC Legend", line):
            legend.shown = True
        for part in _TWO.split(line) if "NIC" in line and ":" in line else ():
            match = _ENTRY.match(part)
            if not match:
                continue
            legend.shown = True
            label, name = match.groups()
            if label in legend.entries:
                legend.corrupt.append(label)
            legend.entries[label] = name
            if not _DEVICE.fullmatch(name) or _BARE_DRIVER.fullmatch(name):
                legend.corrupt.append(label)
            elif name in seen:
                legend.shared += [other for other, used in legend.entries.items() if used == name]
            seen.add(name)
    return legend
